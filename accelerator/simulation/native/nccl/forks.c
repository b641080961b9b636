/* NCCL: what a communicator notices of forks. */
#include "nccl.h"

#include "common/fork.h"

int fork_generation;

static void count_fork(void)
{
    fork_generation++;
}

IN_FORKED_CHILD(count_fork)
