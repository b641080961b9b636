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

/* Options of the driver's nvidia-smi: one that comes here is lacking, or lacks its value. */
static bool is_option_of_driver(const char *argument)
{
    static const char *const names[] = {"-h", "-x", "-f", "-l", "-lms", "-u", "-pm", "-e", "-p", "-c", "-r", "-vm", "-ac", "-rac", "-pl",
                                        "-am", "-caa", "-mig", "-lgc", "-rgc", "-lmc", "-rmc", "-gtt", "-B", "-i", "-d", "-dm", "-fdm"};
    static const char *const beginnings[] = {"--help", "--xml-format", "--filename", "--loop", "--unit", "--persistence-mode",
                                             "--ecc-config", "--reset-ecc-errors", "--compute-mode", "--gpu-reset", "--gom",
                                             "--applications-clocks", "--reset-applications-clocks", "--power-limit",
                                             "--accounting-mode", "--clear-accounted-apps", "--multi-instance-gpu", "--lock-",
                                             "--reset-gpu-clocks", "--reset-memory-clocks", "--list-excluded-gpus", "--debug", "--dtd",
                                             "--version", "--help-query", "--query-", "--format", "--id", "--display"};
    if (argument[0] != '-')
        return true; /* a subcommand */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(argument, names[i]) == 0)
            return true;
    for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++)
        if (strncmp(argument, beginnings[i], strlen(beginnings[i])) == 0)
            return true;
    return false;
}

int main(int argc, char **argv)
{
    enum { WRONG_USAGE = 2, UNKNOWN_OPTION = 255 };
    const char *chosen = NULL, *fields = NULL, *format = NULL, *parts = NULL, *value;
    enum smi_rows rows = SMI_GPUS;
    bool is_list = false, is_detailed = false, is_topology = argc == 3 && strcmp(argv[1], "topo") == 0 && strcmp(argv[2], "-m") == 0;
    for (int i = 1; i < argc && !is_topology; i++) {
        if (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0)
            is_list = true;
        else if (strcmp(argv[i], "-q") == 0 || strcmp(argv[i], "--query") == 0)
            is_detailed = true;
        else if ((value = value_of("--query-gpu", argv, &i)))
            fields = value, rows = SMI_GPUS;
        else if ((value = value_of("--query-compute-apps", argv, &i)))
            fields = value, rows = SMI_PROCESSES;
        else if ((value = value_of("--query-remapped-rows", argv, &i)))
            fields = value, rows = SMI_REMAPPED;
        else if ((value = value_of("-d", argv, &i)) || (value = value_of("--display", argv, &i)))
            parts = value;
        else if ((value = value_of("--format", argv, &i)))
            format = value;
        else if ((value = value_of("-i", argv, &i)) || (value = value_of("--id", argv, &i)))
            chosen = value;
        else if (!is_option_of_driver(argv[i])) {
            printf("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h'.\n\n", argv[i]);
            return UNKNOWN_OPTION;
        } else {
            printf("Invalid combination of input arguments: the simulated nvidia-smi has no %s.\n", argv[i]);
            return WRONG_USAGE;
        }
    }
    if (parts && (!is_detailed || !smi_are_parts(parts))) {
        printf("Invalid combination of input arguments: -q -d takes MEMORY, UTILIZATION, ECC, TEMPERATURE, POWER, CLOCK, COMPUTE, PIDS,"
               " PERFORMANCE, PAGE_RETIREMENT, ACCOUNTING, ENCODER_STATS, ROW_REMAPPER and FBC_STATS, not %s.\n",
               parts);
        return WRONG_USAGE;
    }
    if (fields && !(format && strncmp(format, "csv", 3) == 0)) {
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
        return smi_details(parts);
    if (!fields)
        return smi_table();
    struct smi_format parsed = {!strstr(format, "noheader"), !strstr(format, "nounits")};
    return smi_query(fields, rows, parsed) ? 0 : WRONG_USAGE;
}
