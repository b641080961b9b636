/* Race detection: the functions of race detection that the runtime calls, as a table. */
#include "races.h"

#include <stdlib.h>
#include <string.h>

#include "interface/settings.h"

static struct race_hooks hooks = {
    .at_record = race_at_record,
    .at_wait = race_at_wait,
    .at_event_end = race_at_event_end,
    .delays_event = race_delays_event,
    .delays_stream = race_delays_stream,
    .at_event_wait = race_at_event_wait,
    .at_stream_wait = race_at_stream_wait,
    .at_device_wait = race_at_device_wait,
    .at_allocation = race_at_allocation,
    .at_free = race_at_free,
    .at_copy = race_at_copy,
    .after_copy = race_after_copy,
    .before_use = race_before_use,
    .after_use = race_after_use,
    .at_fill = race_at_fill,
    .at_collective = race_at_collective,
    .at_kernel = race_at_kernel,
    .at_launch = race_at_launch,
    .at_graph_end = race_at_graph_end,
};

__attribute__((constructor)) static void start(void)
{
    const char *races = getenv(SETTING_RACES), *late = getenv(SETTING_LATE_COPIES);
    races_are_reported = races && (strcmp(races, "report") == 0 || strcmp(races, "raise") == 0);
    races_are_raised = races_are_reported && strcmp(races, "raise") == 0;
    copies_are_late = late && strcmp(late, "1") == 0;
    if (!races_are_reported && !copies_are_late) /* late copies need the clocks too */
        return;
    hooks.functions = races_are_reported ? &race_functions : NULL;
    race_runtime = use_race_hooks(&hooks);
    pthread_atfork(NULL, NULL, open_guards_in_child);
}
