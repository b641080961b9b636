/* Faults: what ends faults (clear, reset), and the lines of `fault status` about them and about GPUs. */
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "common/clock.h"
#include "common/faults.h"

/* Of the faults without a GPU, one that waits is of a rank, and one that is active is of all GPUs. */
static bool concerns(const struct fault *fault, int gpu)
{
    return gpu == FAULT_ANY_GPU || fault->gpu == gpu || (fault->gpu == FAULT_ANY_GPU && fault->state == FAULT_ACTIVE);
}

static void end_fault(struct fault *fault, int gpu)
{
    enum { MOST_WAITS = 5000 };
    for (int waits = 0; waits < MOST_WAITS;) {
        int32_t state = fault->state;
        if (state == FAULT_CLAIMED) { /* another process fires it, unless it was killed there */
            sleep_until(now() + MILLISECOND);
            waits++;
            continue;
        }
        if ((state != FAULT_WAITS && state != FAULT_ACTIVE) || !concerns(fault, gpu))
            return;
        if (state == FAULT_ACTIVE)
            fault->ended_at = now();
        if (atomic_compare_exchange_strong(&fault->state, &state, FAULT_CLEARED))
            return;
    }
}

static void end(struct fault_table *table, int gpu)
{
    for (int i = 0; i < SIM_MAX_FAULTS; i++)
        end_fault(&table->faults[i], gpu);
}

void faults_clear(struct fault_table *table, int gpu)
{
    end(table, gpu);
    for (int i = 0; i < SIM_MAX_GPUS; i++)
        if (gpu == FAULT_ANY_GPU || gpu == i) {
            struct gpu_health *health = &table->gpus[i];
            health->is_lost = health->recovery = health->error = 0;
            health->volatile_errors = health->volatile_corrected = 0;
            health->is_remap_pending = health->has_remap_failed = 0;
        }
}

/* The counters of the driver start again, and pending rows are remapped. A lost GPU cannot be reset. */
void faults_reset(struct fault_table *table, int gpu)
{
    for (int i = 0; i < SIM_MAX_GPUS; i++) {
        struct gpu_health *health = &table->gpus[i];
        if ((gpu != FAULT_ANY_GPU && gpu != i) || health->is_lost)
            continue;
        end(table, i);
        health->recovery = health->error = 0;
        health->volatile_errors = health->volatile_corrected = 0;
        health->is_remap_pending = 0;
        health->resets++;
        table->is_used = 1; /* processes look from now on, and see the reset */
    }
}

struct writer {
    char *text;
    size_t left;
};

__attribute__((format(printf, 2, 3))) static void put(struct writer *writer, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(writer->text, writer->left, format, arguments);
    va_end(arguments);
    size_t written = length < 0 ? 0 : (size_t)length < writer->left ? (size_t)length : writer->left ? writer->left - 1 : 0;
    writer->text += written;
    writer->left -= written;
}

static void describe_fault(struct writer *writer, const struct fault *fault, bool is_brief)
{
    static const char *const units[] = {"", "ops", "collectives", "launches", ""};
    char time[32] = "";
    put(writer, "%s", fault->words);
    if (fault->fired_at == 0) {
        put(writer, "%s", is_brief ? " never fired" : fault->state == FAULT_CLEARED ? ": cleared, never fired" : ": waits");
        if (fault->clock != CLOCK_NONE && fault->clock != CLOCK_SECONDS)
            put(writer, ", after %llu %s", (unsigned long long)fault->ticks, units[fault->clock]);
        put(writer, "\n");
        return;
    }
    const time_t seconds = (time_t)fault->fired_at;
    struct tm parts;
    strftime(time, sizeof time, "%H:%M:%S", localtime_r(&seconds, &parts));
    put(writer, ": %s, fired at %s", fault->state == FAULT_ACTIVE ? "active" : fault->state == FAULT_CLEARED ? "cleared" : "over", time);
    if (fault->gpu != FAULT_ANY_GPU)
        put(writer, " on GPU %d", fault->gpu);
    if (fault->pid)
        put(writer, " in process %d", fault->pid);
    put(writer, "\n");
}

static void describe_gpu(struct writer *writer, int gpu, const struct gpu_health *health)
{
    static const char *const actions[] = {"none", "reset the GPU", "reboot the node", "drain its peers", "drain and reset the GPU"};
    if (!health->is_lost && !health->recovery && !health->aggregate_errors && !health->aggregate_corrected && !health->remapped &&
        !health->has_remap_failed)
        return;
    put(writer, "GPU %d:%s %llu uncorrectable and %llu corrected ECC errors, %u remapped rows%s%s; to do: %s\n", gpu,
        health->is_lost ? " lost," : "", (unsigned long long)health->aggregate_errors,
        (unsigned long long)health->aggregate_corrected, health->remapped, health->is_remap_pending ? " (pending)" : "",
        health->has_remap_failed ? ", a failed remapping" : "",
        health->recovery < sizeof actions / sizeof *actions ? actions[health->recovery] : "unknown");
}

void faults_describe(const struct fault_table *table, bool only_unfired, char *text, size_t size)
{
    struct writer writer = {text, size};
    put(&writer, "%s", "");
    for (int i = 0; i < SIM_MAX_FAULTS; i++) {
        const struct fault *fault = &table->faults[i];
        if (only_unfired ? fault->state == FAULT_WAITS : fault->state != FAULT_FREE && fault->state != FAULT_CLAIMED)
            describe_fault(&writer, fault, only_unfired);
    }
    for (int i = 0; i < SIM_MAX_GPUS && !only_unfired; i++)
        describe_gpu(&writer, i, &table->gpus[i]);
}
