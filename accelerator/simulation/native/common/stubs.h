/* Stubs of what is not simulated, for the names that NVIDIA's libraries export.
 *
 * The lists in exported/ call NAME for each function, and VARIANT for one that does the same as another. A library that misses
 * a name cannot be loaded. Stubs are weak: a function of another file takes the place of the stub of its name. */
#ifndef ACCELERATOR_SIM_STUBS_H
#define ACCELERATOR_SIM_STUBS_H

#define STUB __attribute__((visibility("default"), weak))

/* Of the function that stubs call: without this, compilers spend seconds to put a copy into each of a thousand stubs. */
#define CALLED_BY_STUBS __attribute__((noinline, cold))

/* A jump keeps the arguments and the result, whatever they are. */
#define VARIANT(name, function)                                                                                        \
    __asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n\tjmp " #function "@PLT\n.size " #name ", .-" #name);

#endif
