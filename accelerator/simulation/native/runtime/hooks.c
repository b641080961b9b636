/* The CUDA runtime: the hooks of race detection. */
#include "runtime.h"

const struct race_hooks *race_hooks;
