/* What the engine, which is C++ and knows torch's types, and race detection tell each other. */
#ifndef ACCELERATOR_SIM_RACE_ACCESSES_H
#define ACCELERATOR_SIM_RACE_ACCESSES_H

#include <stddef.h>
#include <stdint.h>

enum {
    RACE_MAX_DIMS = 8,
    RACE_TEXT_SIZE = 8192, /* of the text that an op raises */
};

/* X(flag, value). Flags of an access. */
#define RACE_ACCESS_FLAGS(X)                                                                                           \
    X(RACE_WRITES, 1 << 0)                                                                                             \
    X(RACE_PART, 1 << 1) /* only a part of it, which depends on values */                                              \
    X(RACE_ATOMIC, 1 << 2) /* two atomic accesses do not race */                                                       \
    X(RACE_UNOWNED, 1 << 3) /* the storage is unknown, so nobody knows when the memory is freed */

/* X(owner, value). Whose code is in a file: the program's; that of torch and of this package, whose lines say nothing; that of
 * other packages. */
#define RACE_CODE_OWNERS(X)                                                                                            \
    X(RACE_OF_PROGRAM, 0)                                                                                              \
    X(RACE_OF_TORCH, 1)                                                                                                \
    X(RACE_OF_LIBRARY, 2)

#define RACE_NUMBER(name, value) name = value,
enum { RACE_ACCESS_FLAGS(RACE_NUMBER) };
enum { RACE_CODE_OWNERS(RACE_NUMBER) };
#undef RACE_NUMBER

struct race_layout {
    uintptr_t address;
    int64_t item_size;
    int64_t dims; /* -1: more than RACE_MAX_DIMS; then sizes[0] is the number of bytes */
    int64_t sizes[RACE_MAX_DIMS], strides[RACE_MAX_DIMS]; /* strides in items */
};

struct race_access {
    struct race_layout layout;
    void *owner;       /* a weak reference to the storage, which race detection takes over, or NULL */
    const char *dtype; /* torch's name, which lives as long as the process, or NULL */
    int32_t flags;
};

/* Functions of the engine: for weak references to storages, and torch's current stream of a device. */
struct race_storages {
    uintptr_t (*data)(void *owner); /* the address of the storage's memory; 0 if the storage is gone */
    void (*release)(void *owner);
    void *(*current_stream)(int device);
};

/* Functions of race detection. */
struct race_functions {
    /* What an op accesses, with the stream on which it runs. If it `is_transfer`, the runtime records the op's copies itself:
     * the accesses must live until op_ends(), and the owners that the copies took are NULL then. */
    void (*op)(void *stream, int device, const char *name, struct race_access *accesses, size_t count, int place,
               int is_transfer);
    void (*op_ends)(void);
    int (*place)(const char *text); /* the number of a line of the program */
    int (*set_place)(int place);    /* at which the thread's op begins; returns the one before, 0 if there was none */
    int (*code_owner)(const char *path, const char *function); /* RACE_OF_... of its code */
    int (*take)(char *target, size_t size); /* copies the text that an op must raise; returns 0 if there is none */
    void (*order)(void *stream, int device, void *other_stream, int other_device); /* lets the second wait for the first */
    void (*use_storages)(const struct race_storages *storages);
};

#endif
