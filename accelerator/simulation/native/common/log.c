/* The log of what processes initialize. */
#include "config.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "file_limit.h"

void sim_log(const char *format, ...)
{
    const char *path = sim_config()->log_path;
    if (!*path)
        return;
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0)
        return;

    char line[128];
    int length = snprintf(line, sizeof line, "%d ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    size_t space = sizeof line - (size_t)length - 1;
    int written = vsnprintf(line + length, space, format, arguments);
    va_end(arguments);
    /* vsnprintf also counts the characters that did not fit. */
    length += written < 0 ? 0 : (size_t)written < space ? written : (int)space - 1;
    line[length++] = '\n';
    if (!is_room_in_file(file, (uint64_t)length) || write(file, line, (size_t)length) != length) {
        /* A failing log must not disturb the program; the test that reads the log will fail. */
    }
    close(file);
}
