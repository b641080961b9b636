/* NCCL: errors and their texts. */
#include "nccl.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/fork.h"

enum { TEXT_SIZE = 512 };

static char last_error[TEXT_SIZE];
static ncclResult_t last_result;
/* Protects both. */
RENEWED_LOCK(lock)

ncclResult_t fail(ncclResult_t result, const char *format, ...)
{
    char text[TEXT_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    memcpy(last_error, text, sizeof text);
    last_result = result;
    pthread_mutex_unlock(&lock);
    return result;
}

/* The text is not per thread: torch's watchdog reads errors of other threads. */
EXPORT const char *ncclGetLastError(const struct comm *comm)
{
    static _Thread_local char text[TEXT_SIZE];
    (void)comm;
    pthread_mutex_lock(&lock);
    memcpy(text, last_error, sizeof text);
    pthread_mutex_unlock(&lock);
    return text;
}

/* With the reason, because torch's process group of 2.15 shows only this text. */
EXPORT const char *ncclGetErrorString(ncclResult_t result)
{
    static _Thread_local char with_reason[TEXT_SIZE + 64];
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "system error", "internal error", "invalid argument", "invalid usage",
        "remote process ended or cannot be reached", "in progress", "timed out"};
    const char *text = (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
    pthread_mutex_lock(&lock);
    bool has_reason = result == last_result && *last_error;
    if (has_reason)
        snprintf(with_reason, sizeof with_reason, "%s: %s", text, last_error);
    pthread_mutex_unlock(&lock);
    return has_reason ? with_reason : text;
}
