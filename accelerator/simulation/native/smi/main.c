/* The simulated nvidia-smi: the command line. */
#include "smi.h"

#include <stdio.h>
#include <string.h>

/* Returns the value of the option `name`, written as --name=value or as two words, or NULL for another option. */
static const char *value_of(const char *name, char **argv, int *at)
{
    size_t length = strlen(name);
    if (strncmp(argv[*at], name, length) != 0)
        return NULL;
    if (argv[*at][length] == '=')
        return argv[*at] + length + 1;
    return argv[*at][length] == '\0' && argv[*at + 1] ? argv[++*at] : NULL;
}

int main(int argc, char **argv)
{
    enum { WRONG_USAGE = 2 };
    const char *chosen = NULL, *gpu_fields = NULL, *process_fields = NULL, *format = NULL, *value;
    bool is_list = false, is_detailed = false, is_topology = argc == 3 && strcmp(argv[1], "topo") == 0 && strcmp(argv[2], "-m") == 0;
    for (int i = 1; i < argc && !is_topology; i++) {
        if (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0)
            is_list = true;
        else if (strcmp(argv[i], "-q") == 0 || strcmp(argv[i], "--query") == 0)
            is_detailed = true;
        else if ((value = value_of("--query-gpu", argv, &i)))
            gpu_fields = value;
        else if ((value = value_of("--query-compute-apps", argv, &i)))
            process_fields = value;
        else if ((value = value_of("--format", argv, &i)))
            format = value;
        else if ((value = value_of("-i", argv, &i)) || (value = value_of("--id", argv, &i)))
            chosen = value;
        else {
            printf("Invalid combination of input arguments: the simulated nvidia-smi has no %s.\n", argv[i]);
            return WRONG_USAGE;
        }
    }
    if ((gpu_fields || process_fields) && !(format && strncmp(format, "csv", 3) == 0)) {
        puts("\"--format=\" must be csv for a query.");
        return WRONG_USAGE;
    }
    int status = smi_start();
    status = status ? status : smi_find_gpus(chosen);
    if (status)
        return status;
    if (is_topology)
        return smi_topology();
    if (is_list)
        return smi_list();
    if (is_detailed)
        return smi_details();
    if (!gpu_fields && !process_fields)
        return smi_table();
    struct smi_format parsed = {!strstr(format, "noheader"), !strstr(format, "nounits")};
    return smi_query(gpu_fields ? gpu_fields : process_fields, !gpu_fields, parsed) ? 0 : WRONG_USAGE;
}
