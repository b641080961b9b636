/* The CUDA runtime: the table of hooks that race detection fills in. */
#include "runtime.h"

const struct race_hooks *race_hooks;
