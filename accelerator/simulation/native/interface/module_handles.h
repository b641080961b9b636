/* The handles of modules and of their functions that are valid. All runtimes of a process share them: a program may use another one
 * after it has loaded a module. */
#ifndef ACCELERATOR_SIM_MODULE_HANDLES_H
#define ACCELERATOR_SIM_MODULE_HANDLES_H

#include <pthread.h>

#include "common/arrays.h"

struct sim_handles {
    pthread_mutex_t lock;
    struct sorted modules, functions; /* by address, which is the handle */
};

#endif
