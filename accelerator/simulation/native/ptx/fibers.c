/* Fibers: each thread of a block has a stack of its own. For kernels in which functions wait that are recursive or called
 * through pointers. */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "library.h"

enum { FIBER_STACK = 256 << 10, FIBER_RESERVE = 32 << 10 };

struct fiber {
    void *stack_pointer;
    char *stack;
    struct thread thread;
};

/* Saves the callee's registers on the stack, and takes another stack with what was saved there. */
void sim_kernel_switch(void **save, void *load) __attribute__((visibility("hidden")));
__asm__(".text\n"
        ".hidden sim_kernel_switch\n"
        ".globl sim_kernel_switch\n"
        ".type sim_kernel_switch, @function\n"
        "sim_kernel_switch:\n"
        "    push %rbp\n"
        "    push %rbx\n"
        "    push %r12\n"
        "    push %r13\n"
        "    push %r14\n"
        "    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n"
        "    pop %r14\n"
        "    pop %r13\n"
        "    pop %r12\n"
        "    pop %rbx\n"
        "    pop %rbp\n"
        "    ret\n"
        ".size sim_kernel_switch, .-sim_kernel_switch\n");

bool make_fibers(struct block *block)
{
    size_t size = block->threads * (sizeof(struct fiber) + (size_t)FIBER_STACK);
    char *memory = take_buffer(size);
    if (!memory)
        return false;
    block->fibers = (struct fiber *)memory;
    memset(block->fibers, 0, block->threads * sizeof(struct fiber));
    char *stacks = memory + block->threads * sizeof(struct fiber);
    for (u32 i = 0; i < block->threads; i++)
        block->fibers[i].stack = stacks + (size_t)i * FIBER_STACK;
    return true;
}

void free_fibers(struct block *block)
{
    return_buffer(block->fibers);
}

static void leave_fiber(struct running_worker *worker, struct fiber *fiber)
{
    sim_kernel_switch(&fiber->stack_pointer, worker->scheduler_stack);
}

static _Thread_local struct fiber *starting_fiber;

static void run_fiber(void)
{
    struct fiber *fiber = starting_fiber;
    struct thread *thread = &fiber->thread;
    thread->block->launch->kernel->run_thread(thread);
    thread->warp->point[thread->lane] = POINT_EXITED;
    leave_fiber(running(thread->worker), fiber);
    __builtin_unreachable();
}

void begin_fibers(struct block *block)
{
    enum { SAVED_REGISTERS = 6 };
    for (u32 i = 0; i < block->threads; i++) {
        struct fiber *fiber = &block->fibers[i];
        struct warp *warp = &block->warps[i / LANES];
        u32 lane = i % LANES;
        char *local = block->local + i * block->local_stride;
        fiber->thread = (struct thread){
            .worker = block->worker,
            .block = block,
            .warp = warp,
            .number = i,
            .lane = lane,
            .x = warp->x[lane],
            .y = warp->y[lane],
            .z = warp->z[lane],
            .local_base = local,
            .local_top = local,
            .local_end = local + block->local_span,
        };
        /* Stacks begin at different lines of the cache. At a function's entry, the stack is 8 bytes off a multiple of 16. */
        void **top = (void **)(((uintptr_t)fiber->stack + FIBER_STACK - 64 - i * 320 % 4096) & ~(uintptr_t)15);
        *--top = NULL;
        *--top = (void *)run_fiber;
        top -= SAVED_REGISTERS;
        memset(top, 0, SAVED_REGISTERS * sizeof *top);
        fiber->stack_pointer = top;
    }
}

void run_fibers(struct warp *warp, u32 lanes)
{
    struct block *block = warp->block;
    struct running_worker *worker = running(block->worker);
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        u32 number = warp->first + (u32)__builtin_ctz(rest);
        struct fiber *fiber = &block->fibers[number];
        worker->worker.thread = number;
        worker->worker.stack_end = fiber->stack + FIBER_RESERVE;
        starting_fiber = fiber;
        sim_kernel_switch(&worker->scheduler_stack, fiber->stack_pointer);
    }
}

void suspend(struct thread *thread, u32 point)
{
    struct block *block = thread->block;
    thread->warp->point[thread->lane] = (u16)point;
    leave_fiber(running(thread->worker), &block->fibers[thread->number]);
}
