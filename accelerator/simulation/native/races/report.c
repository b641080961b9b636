/* Race detection: which races are reported, once they are found, and the words.
 * Python splits a report into its lines (found_races.py). */
#include "races.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "common/file_limit.h"
#include "interface/settings.h"

struct found {
    int first, second; /* the places */
    bool is_possible;
    char *text;
};

static struct found *found;
static size_t found_count, found_capacity;
static size_t first_of_test; /* two places are reported once in a test of pytest; otherwise once in a process */
static char *unraised; /* what the next op of the process raises */

static void stream_text(char *text, size_t size, int index)
{
    const struct known_stream *stream = stream_at((size_t)index);
    if (stream->number == 0)
        snprintf(text, size, "the default stream of cuda:%d", stream->device);
    else
        snprintf(text, size, "stream %d of cuda:%d", stream->number, stream->device);
}

/* Writes what the memory is: "an int64 tensor of shape (2, 3)", or its bytes. */
static void memory_text(char *text, size_t size, const struct access *access)
{
    if (!access->dtype || access->layout.dims < 0) {
        snprintf(text, size, "%zu bytes of memory", layout_bytes(&access->layout));
        return;
    }
    int length = snprintf(text, size, "%s %s tensor of shape (", *access->dtype == 'i' ? "an" : "a", access->dtype);
    for (int64_t i = 0; i < access->layout.dims; i++)
        length += snprintf(text + length, size - (size_t)length, "%s%lld", i ? ", " : "", (long long)access->layout.sizes[i]);
    snprintf(text + length, size - (size_t)length, access->layout.dims == 1 ? ",)" : ")");
}

static void place_line(char *text, size_t size, const struct access *access)
{
    if (access->launch != 0)
        snprintf(text, size, "%s, in a graph that %s launches", place_text(access->place), place_text(access->launch));
    else
        snprintf(text, size, "%s", place_text(access->place));
}

static const char *verb(const struct access *access)
{
    const bool is_part = access->flags & RACE_PART;
    return access->flags & RACE_WRITES ? (is_part ? "may write" : "writes") : is_part ? "may read" : "reads";
}

static bool is_collective(const struct access *access)
{
    return strncmp(access->name, "nccl", 4) == 0;
}

/* Appends a report to the file of all processes of a run, with the test of pytest that this process belongs to. */
static void write_to_file(const char *text)
{
    const char *path = getenv(SETTING_RACE_FILE), *test = getenv(SETTING_RACE_TEST);
    const int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    char *entry = NULL;
    if (file < 0)
        return;
    const int length = asprintf(&entry, "%s\n%s", test ? test : "", text);
    /* One call, with the final null: other processes write too. */
    if (length < 0 || !is_room_in_file(file, (uint64_t)length + 1) || write(file, entry, (size_t)length + 1) < 0)
        dprintf(STDERR_FILENO, "accelerator: %s cannot be written\n", path);
    if (length >= 0)
        free(entry);
    close(file);
}

/* Prints and stores a report. Takes over the text. */
static void publish(int first, int second, bool is_possible, char *text)
{
    if (!array_reserve((void **)&found, &found_capacity, found_count + 1, sizeof *found)) {
        free(text);
        return;
    }
    found[found_count++] = (struct found){first, second, is_possible, text};
    dprintf(STDERR_FILENO, "%s", text);
    if (is_possible)
        return;
    if (races_are_raised && !unraised)
        unraised = strdup(text);
    write_to_file(text);
}

static bool is_published(int first, int second, bool is_possible)
{
    for (size_t i = first_of_test; i < found_count; i++)
        if (found[i].first == first && found[i].second == second && found[i].is_possible == is_possible)
            return true;
    return false;
}

/* A report has four lines: what nothing orders, the first access, the second, the advice. */
void report_race(const struct access *first, const struct access *second, size_t bytes, bool is_reuse)
{
    char memory[300], streams[2][60], places[2][2200], *text = NULL, advice[500]; /* longer than all advice with a stream's text */
    const bool is_possible = (first->flags | second->flags) & RACE_PART;
    const int first_place = first->launch ? first->launch * 65536 + first->place : first->place;
    const int second_place = second->launch ? second->launch * 65536 + second->place : second->place;
    if (is_published(first_place, second_place, is_possible))
        return;
    memory_text(memory, sizeof memory, second);
    stream_text(streams[0], sizeof streams[0], first->stream);
    stream_text(streams[1], sizeof streams[1], second->stream);
    place_line(places[0], sizeof places[0], first);
    place_line(places[1], sizeof places[1], second);
    if (is_reuse && stream_of_memory(second->layout.address) == first->stream)
        snprintf(advice, sizeof advice,
                 "the memory was freed in between, and is of %s again: call wait_stream() or wait_event() on %s, for %s, before the"
                 " second access, or allocate that tensor on %s", streams[0], streams[1], streams[0], streams[1]);
    else if (is_reuse)
        snprintf(advice, sizeof advice, "the memory was freed in between: call record_stream(stream) on the tensor of the first"
                                        " access, with %s, before its last reference goes", streams[0]);
    else if (is_collective(first))
        snprintf(advice, sizeof advice, "call work.wait() on the collective before the second access");
    else
        snprintf(advice, sizeof advice, "call wait_stream() or wait_event() on %s, for %s, before the second access", streams[1],
                 streams[0]);
    if (asprintf(&text,
                 "race: %s%zu bytes of %s: nothing orders two accesses on two streams\n"
                 "  %s on %s %s it: %s\n"
                 "  %s on %s %s it: %s\n"
                 "  %s\n",
                 is_possible ? "possible, depending on values: " : "", bytes, memory, first->name, streams[0], verb(first), places[0],
                 second->name, streams[1], verb(second), places[1], advice) < 0)
        return;
    publish(first_place, second_place, is_possible, text);
}

void report_host_race(const struct access *copy, uintptr_t address, bool is_write, int place)
{
    char memory[300], stream[60], *text = NULL;
    if (is_published(copy->place, -place, false))
        return;
    memory_text(memory, sizeof memory, copy);
    stream_text(stream, sizeof stream, copy->stream);
    if (asprintf(&text,
                 "race: %zu bytes of pinned memory, %s: the host has not waited for a copy\n"
                 "  %s on %s %s it: %s\n"
                 "  the host %s byte %zu of it: %s\n"
                 "  call synchronize() on that stream, or on an event recorded after the copy, before the host %s it\n",
                 layout_bytes(&copy->layout), memory, copy->name, stream, verb(copy), place_text(copy->place),
                 is_write ? "writes" : "reads", (size_t)(address - copy->layout.address), place_text(place),
                 is_write ? "writes" : "reads") < 0)
        return;
    publish(copy->place, -place, false, text);
}

/* ---- For Python and the ops' kernels. ---- */

EXPORT int accelerator_simulation_race_count(void)
{
    pthread_mutex_lock(&race_lock);
    const size_t count = found_count;
    pthread_mutex_unlock(&race_lock);
    return (int)count;
}

EXPORT void accelerator_simulation_race_begin_test(void)
{
    pthread_mutex_lock(&race_lock);
    first_of_test = found_count;
    pthread_mutex_unlock(&race_lock);
}

EXPORT int accelerator_simulation_race_first_of_test(void)
{
    pthread_mutex_lock(&race_lock);
    const size_t first = first_of_test;
    pthread_mutex_unlock(&race_lock);
    return (int)first;
}

/* Returns the text of a report, and whether it is only possible. The text lives as long as the process. */
EXPORT const char *accelerator_simulation_race_text(int index, int *is_possible)
{
    pthread_mutex_lock(&race_lock);
    const struct found *each = index >= 0 && (size_t)index < found_count ? &found[index] : NULL;
    if (each)
        *is_possible = each->is_possible;
    const char *text = each ? each->text : NULL;
    pthread_mutex_unlock(&race_lock);
    return text;
}

/* Copies the text that an op must raise; returns false if there is none. */
EXPORT int accelerator_simulation_race_take(char *target, size_t size)
{
    if (!races_are_raised || race_runtime->is_capturing()) /* an error in a capture would leave it unjoined */
        return false;
    pthread_mutex_lock(&race_lock);
    const bool is_there = unraised != NULL;
    if (is_there) {
        snprintf(target, size, "%s", unraised);
        free(unraised);
        unraised = NULL;
    }
    pthread_mutex_unlock(&race_lock);
    return is_there;
}
