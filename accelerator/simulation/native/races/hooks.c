/* Race detection: the functions of race detection that the runtime calls, as a table. */
#include "races.h"

#include <stdlib.h>
#include <string.h>

#include "interface/settings.h"

#define ROW(result, name, parameters) .name = race_##name,
static struct race_hooks hooks = {RACE_HOOKS(ROW)};

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
