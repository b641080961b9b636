/* Handlers of the processor's signals, such as SIGSEGV: kernels set one while they run (ptx/), race detection one for good. */
#ifndef ACCELERATOR_SIM_PROCESSOR_SIGNALS_H
#define ACCELERATOR_SIM_PROCESSOR_SIGNALS_H

#include <signal.h>
#include <stdbool.h>

/* Sets a handler before all others but that of kernels, which hands on what concerns no kernel. The replaced one is what the new
 * one has to hand on to. Returns false if the handler is there already. */
bool sim_set_handler(int number, const struct sigaction *action, struct sigaction *replaced);

#endif
