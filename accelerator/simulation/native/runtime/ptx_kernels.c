/* The CUDA runtime: kernels that are translated from their PTX: their attributes, occupancy, variables, and launches. */
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "images.h"
#include "interface/settings.h"

#define KERNEL_SYMBOL "accelerator_kernel"
#define TABLE_SYMBOL "accelerator_variables"

enum { STATIC_SHARED_LIMIT = 48 << 10 };
enum { ATTRIBUTE_SHARED_PER_PROCESSOR = 81, ATTRIBUTE_SHARED_PER_BLOCK = 97 };

static void free_variables(struct program *program)
{
    for (int device = 0; device < SIM_MAX_GPUS; device++) {
        char **addresses = program->addresses[device];
        const bool is_there = program->resets[device] == driver->devices[device].context_resets;
        for (size_t i = 0; addresses && is_there && program->table[i].name; i++) {
            if (!addresses[i])
                continue;
            note_free(addresses[i]);
            driver->cuMemFree((uintptr_t)addresses[i]);
            for (int other = device + 1; other < SIM_MAX_GPUS && program->table[i].is_managed; other++)
                if (program->addresses[other])
                    program->addresses[other][i] = NULL; /* it is the same memory */
        }
        free(addresses);
    }
}

/* Nothing runs any more. Race detection keeps the names of kernels. */
static void free_kernels(struct program *program)
{
    for (struct ptx_kernel *kernel = program->kernels, *next; kernel; kernel = next) {
        next = kernel->next;
        for (int device = 0; device < SIM_MAX_GPUS; device++)
            free(kernel->variables[device]);
        if (kernel->library)
            dlclose(kernel->library);
        if (kernel->readable != kernel->name && !race_hooks)
            free(kernel->readable);
        if (!race_hooks)
            free(kernel->name);
        free(kernel->problem);
        pthread_mutex_destroy(&kernel->lock);
        free(kernel);
    }
    free_variables(program);
    if (program->table_library)
        dlclose(program->table_library);
    free(program->table_problem);
}

/* Takes the lock of a program that is to have kernels or variables. */
static void lock_program(struct program *program)
{
    pthread_mutex_lock(&program->lock);
    program->free_kernels = free_kernels;
}

struct ptx_kernel *find_ptx_kernel(struct image *image, const char *name, const struct sim_device *device)
{
    struct program *program = find_program(image, device);
    if (!program)
        return NULL;
    lock_program(program);
    struct ptx_kernel *kernel = program->kernels;
    while (kernel && strcmp(kernel->name, name) != 0)
        kernel = kernel->next;
    if (!kernel && (kernel = calloc(1, sizeof *kernel))) {
        kernel->program = program;
        kernel->name = strdup(name);
        pthread_mutex_init(&kernel->lock, NULL);
        kernel->next = program->kernels;
        program->kernels = kernel;
    }
    pthread_mutex_unlock(&program->lock);
    return kernel;
}

/* Returns why it cannot run, or NULL, and whether that stays so. */
static char *try_to_translate(struct ptx_kernel *kernel, bool *is_final)
{
    char *problem = NULL;
    *is_final = true;
    if (kernel->program->problem)
        return strdup(kernel->program->problem);
    kernel->library = load_translation(kernel->program, kernel->name, &problem, is_final);
    if (!kernel->library)
        return problem;
    kernel->code = dlsym(kernel->library, KERNEL_SYMBOL);
    if (!kernel->code || !sim_kernel_connect(kernel->code, &kernel->facts))
        return strdup("another version has translated it");
    return kernel->facts.uses_clusters ? strdup("it uses clusters of blocks, which are not simulated") : NULL;
}

cudaError_t translate(struct ptx_kernel *kernel)
{
    pthread_mutex_lock(&kernel->lock);
    if (!kernel->is_tried) {
        char *problem = try_to_translate(kernel, &kernel->is_tried);
        if (problem && kernel->problem && strcmp(problem, kernel->problem) == 0)
            free(problem);
        else
            kernel->problem = problem; /* another thread may still report the previous one, which therefore stays */
    }
    const bool is_ready = kernel->problem == NULL;
    pthread_mutex_unlock(&kernel->lock);
    return is_ready ? SUCCESS : ERROR_NOT_SUPPORTED;
}

/* Variables. The caller of these three functions holds the program's lock. */

/* Returns ERROR_NOT_SUPPORTED with a problem that stays, or ERROR_OUT_OF_MEMORY. */
static cudaError_t load_table(struct program *program, const char **problem)
{
    if (!program->has_table) {
        char *found = NULL;
        program->table_library = load_translation(program, "", &found, &program->has_table);
        if (!program->has_table) {
            free(found);
            return ERROR_OUT_OF_MEMORY;
        }
        program->table_problem = found;
        program->table = program->table_library ? dlsym(program->table_library, TABLE_SYMBOL) : NULL;
    }
    if (program->table)
        return SUCCESS;
    *problem = program->table_problem ? program->table_problem : "its variables cannot be loaded";
    return ERROR_NOT_SUPPORTED;
}

static bool has_name(const struct sim_program_variable *variable, const char *name)
{
    /* Variables that other modules do not see begin with the number of theirs. */
    const char *own = strchr(variable->name, ':');
    return strcmp(variable->name, name) == 0 || (own && own[1] != ':' && strcmp(own + 1, name) == 0);
}

static char *address_of(struct program *program, int device, size_t number)
{
    const struct sim_program_variable *variable = &program->table[number];
    const unsigned resets = driver->devices[device].context_resets;
    if (program->resets[device] != resets) { /* which have freed the variables */
        free(program->addresses[device]);
        program->addresses[device] = NULL;
        program->resets[device] = resets;
    }
    if (!program->addresses[device]) {
        size_t count = 0;
        while (program->table[count].name)
            count++;
        program->addresses[device] = calloc(count + 1, sizeof(char *));
    }
    char **addresses = program->addresses[device];
    if (!addresses || addresses[number])
        return addresses ? addresses[number] : NULL;
    for (int other = 0; variable->is_managed && other < visible_device_count(); other++)
        if (program->addresses[other] && program->addresses[other][number]) /* all devices have the same one */
            return addresses[number] = program->addresses[other][number];
    uintptr_t memory = 0;
    cudaError_t error = variable->is_managed ? driver->cuMemAllocManaged(&memory, variable->size ? variable->size : 1, 1)
                                             : driver->cuMemAlloc(&memory, variable->size ? variable->size : 1);
    if (error != SUCCESS)
        return NULL;
    addresses[number] = (char *)memory; /* before those of others, which may refer to it */
    driver->fill_with_zeros(addresses[number], variable->size);
    if (variable->initial_size)
        memcpy(addresses[number], variable->initial, variable->initial_size);
    for (uint32_t i = 0; i < variable->relocation_count; i++) {
        const struct sim_relocation *relocation = &variable->relocations[i];
        uint64_t value = (uint64_t)address_of(program, device, relocation->target);
        if (value == 0)
            return NULL;
        value = (value + relocation->addend) >> relocation->shift;
        memcpy(addresses[number] + relocation->offset, &value, relocation->size);
    }
    return addresses[number];
}

cudaError_t find_variable(struct image *image, const char *name, const struct sim_device *device, void **address, size_t *size)
{
    struct program *program = find_program(image, device);
    const char *problem;
    RETURN_UNLESS(program && !program->problem, ERROR_NOT_SUPPORTED);
    lock_program(program);
    cudaError_t error = load_table(program, &problem);
    if (error == SUCCESS) {
        size_t number = 0;
        while (program->table[number].name && !has_name(&program->table[number], name))
            number++;
        error = ERROR_NOT_FOUND;
        if (program->table[number].name) {
            *address = address_of(program, device->ordinal, number);
            *size = program->table[number].size;
            error = *address ? SUCCESS : ERROR_OUT_OF_MEMORY;
        }
    }
    pthread_mutex_unlock(&program->lock);
    return error;
}

/* Fills in the addresses of a kernel's variables on a device. */
static cudaError_t find_variables(struct ptx_kernel *kernel, int device)
{
    struct program *program = kernel->program;
    const char *problem = NULL;
    cudaError_t error = SUCCESS;
    const unsigned resets = driver->devices[device].context_resets;
    if (kernel->variables[device] && kernel->resets[device] == resets)
        return SUCCESS;
    char **found = calloc(kernel->facts.variable_count + 1, sizeof *found);
    RETURN_UNLESS(found, ERROR_OUT_OF_MEMORY);
    lock_program(program);
    if (kernel->facts.variable_count)
        error = load_table(program, &problem);
    for (uint32_t i = 0; i < kernel->facts.variable_count && !problem && error == SUCCESS; i++) {
        size_t number = 0;
        while (program->table[number].name && strcmp(program->table[number].name, kernel->facts.variables[i].name) != 0)
            number++;
        if (!program->table[number].name)
            problem = "it uses a variable that is declared in a function";
        else if (!(found[i] = address_of(program, device, number)))
            error = ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&program->lock);
    if (problem) {
        kernel->problem = strdup(problem);
        error = ERROR_NOT_SUPPORTED;
    }
    if (error == SUCCESS) {
        free(kernel->variables[device]);
        kernel->resets[device] = resets;
        kernel->variables[device] = found;
    } else {
        free(found);
    }
    return error;
}

/* Memory that kernels access. */

static const char *kind_of(const struct sim_memory *memory)
{
    static const char *const kinds[] = {
        [SIM_DEVICE_MEMORY] = "device memory",     [SIM_MANAGED_MEMORY] = "managed memory",
        [SIM_MAPPED_MEMORY] = "mapped memory",     [SIM_IMPORTED_MEMORY] = "memory of another process",
        [SIM_PINNED_MEMORY] = "pinned memory",     [SIM_REGISTERED_MEMORY] = "registered host memory",
    };
    return kinds[memory->type];
}

static void describe(const struct sim_memory *memory, struct sim_kernel_memory *described)
{
    *described = (struct sim_kernel_memory){
        .low = (uint64_t)memory->base,
        .size = memory->size,
        .kind = kind_of(memory),
        .device = sim_is_on_host(memory) ? -1 : memory->device,
    };
}

static bool find_accessible(int device, uint64_t address, struct sim_kernel_memory *described)
{
    struct sim_memory memory;
    if (!driver->find_memory((const void *)address, &memory))
        return false;
    bool is_of_any = sim_is_on_host(&memory) || memory.type == SIM_MANAGED_MEMORY;
    if (!is_of_any && memory.device != device && !has_peer_access(device, memory.device))
        return false;
    describe(&memory, described);
    return true;
}

static bool find_nearest(uint64_t address, struct sim_kernel_memory *described)
{
    struct sim_memory memory;
    if (!driver->find_nearest((const void *)address, &memory))
        return false;
    describe(&memory, described);
    return true;
}

/* Launches. */

/* Read once: other threads must not read the environment while the program writes it. */
static struct {
    int threads; /* not above 0: one for each processor */
    bool fills_with_nan;
    uint64_t timeout_ms;
} settings;
static pthread_once_t settings_once = PTHREAD_ONCE_INIT;

static void read_settings(void)
{
    const char *threads = getenv("OMP_NUM_THREADS"), *fill = getenv(SETTING_FILL), *timeout = getenv(SETTING_KERNEL_TIMEOUT);
    const double seconds = strtod(timeout && *timeout ? timeout : SETTING_KERNEL_TIMEOUT_DEFAULT, NULL);
    settings.threads = threads ? atoi(threads) : 0;
    settings.fills_with_nan = fill && strcmp(fill, "nan") == 0;
    settings.timeout_ms = seconds > 0 ? (uint64_t)(seconds * 1000) : (uint64_t)INT32_MAX;
}

static uint32_t count_cpus(void)
{
    cpu_set_t set;
    if (settings.threads > 0)
        return (uint32_t)settings.threads;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1;
}

struct ptx_launch {
    struct ptx_kernel *kernel;
    struct sim_launch shape;
    char parameters[]; /* as the kernel lays them out */
};

/* Tells race detection what a kernel has accessed. */
static void note_accesses(struct stream *stream, const char *name, struct sim_kernel_accesses *accesses)
{
    static const int32_t flags[SIM_ACCESS_KINDS] = {
        [SIM_WRITE] = RACE_WRITES, [SIM_ATOMIC_READ] = RACE_ATOMIC, [SIM_ATOMIC_WRITE] = RACE_ATOMIC | RACE_WRITES,
    };
    struct race_access *noted = calloc(accesses->count + 1, sizeof *noted);
    for (size_t i = 0; i < accesses->count && noted; i++) {
        const struct sim_kernel_access *access = &accesses->items[i];
        noted[i] = (struct race_access){
            .layout = {.address = access->low, .item_size = 1, .dims = 1, .sizes = {(int64_t)access->size}, .strides = {1}},
            .flags = RACE_UNOWNED | flags[access->kind] | (access->is_part ? RACE_PART : 0),
        };
    }
    if (noted)
        race_hooks->at_kernel(&stream->races, name, noted, accesses->count);
    free(noted);
    free(accesses->items);
}

/* A kernel's name as in its source. */
static const char *readable_name(struct ptx_kernel *kernel)
{
    pthread_mutex_lock(&kernel->lock);
    if (!kernel->readable && !(kernel->readable = demangle(kernel->name)))
        kernel->readable = kernel->name;
    pthread_mutex_unlock(&kernel->lock);
    return kernel->readable;
}

static cudaError_t run(struct stream *stream, const struct work *work)
{
    const struct ptx_launch *launch = work->launch;
    struct sim_kernel_accesses accesses = {0};
    char message[1200];
    if (unless_broken(stream->device) != SUCCESS) /* nothing runs in a broken context */
        return SUCCESS;
    if (has_faults())
        RETURN_IF_ERROR(fail_or_delay(stream));
    pthread_once(&settings_once, read_settings);
    const struct sim_launch *shape = &launch->shape;
    struct sim_kernel_run request = {
        .kernel = launch->kernel->code,
        .grid = {shape->grid[0], shape->grid[1], shape->grid[2]},
        .block = {shape->block[0], shape->block[1], shape->block[2]},
        .dynamic_shared = (uint32_t)shape->shared_memory,
        .is_cooperative = shape->is_cooperative,
        .fills_with_nan = settings.fills_with_nan,
        .device = stream->device,
        .parameters = launch->parameters,
        .variables = launch->kernel->variables[stream->device],
        .stack_limit = driver->limit_of(stream->device, SIM_STACK_LIMIT),
        .heap_limit = driver->limit_of(stream->device, SIM_HEAP_LIMIT),
        .cpu_count = count_cpus(),
        .timeout_ms = settings.timeout_ms,
        .timeout_setting = SETTING_KERNEL_TIMEOUT,
        .find_memory = find_accessible,
        .find_nearest = find_nearest,
        .accesses = race_hooks && race_hooks->functions ? &accesses : NULL,
    };
    IF_RACES(race_hooks->before_use());
    pthread_mutex_lock(&stream->running);
    int error = sim_kernel_run(&request, message, sizeof message);
    pthread_mutex_unlock(&stream->running);
    IF_RACES(race_hooks->after_use());
    if (request.accesses)
        note_accesses(stream, readable_name(launch->kernel), request.accesses);
    if (error == SUCCESS)
        return SUCCESS;
    const struct sim_error *known = sim_find_error(error);
    fprintf(stderr, "accelerator: kernel %s on device %d fails (%s): %s\n", readable_name(launch->kernel), stream->device,
            known ? known->runtime_name : "", message);
    return driver->faults_break(driver->devices[stream->device].gpu, error);
}

static size_t launch_size(const struct ptx_kernel *kernel)
{
    return sizeof(struct ptx_launch) + kernel->facts.parameter_size + 16;
}

/* Captured work is a copy: so are its parameters. */
static bool keep(struct work *work)
{
    size_t size = launch_size(work->launch->kernel);
    struct ptx_launch *copy = malloc(size);
    if (copy) {
        memcpy(copy, work->launch, size);
        image_retain(copy->kernel->program->image);
    }
    work->launch = copy;
    return copy != NULL;
}

static void release(const struct work *work)
{
    image_release(work->launch->kernel->program->image);
    free(work->launch);
}

static const struct work_type translated_kernel = {
    .node = "KERNEL", .run = run, .prepare = wait_for_earlier_work, .keep = keep, .release = release,
};

size_t largest_shared_memory(const struct sim_device *device)
{
    int size = 0;
    return driver->cuDeviceGetAttribute(&size, ATTRIBUTE_SHARED_PER_BLOCK, device->ordinal) == SUCCESS && size > 0
               ? (size_t)size : STATIC_SHARED_LIMIT;
}

int resident_blocks(const struct sim_device *device, const struct ptx_kernel *kernel, uint64_t threads, size_t dynamic_shared)
{
    enum { MAX_BLOCKS = 32 };
    int shared = 0;
    uint64_t by_threads = SIM_THREADS_PER_PROCESSOR / ((threads + SIM_WARP_SIZE - 1) / SIM_WARP_SIZE * SIM_WARP_SIZE);
    uint64_t used = (kernel ? kernel->facts.shared_size : 0) + dynamic_shared + SIM_RESERVED_SHARED;
    if (driver->cuDeviceGetAttribute(&shared, ATTRIBUTE_SHARED_PER_PROCESSOR, device->ordinal) == SUCCESS && shared > 0 &&
        (uint64_t)shared / used < by_threads)
        by_threads = (uint64_t)shared / used;
    return (int)(by_threads < MAX_BLOCKS ? by_threads : MAX_BLOCKS);
}

static cudaError_t check_shape(const struct ptx_kernel *kernel, const struct sim_launch *shape,
                               const struct sim_device *device)
{
    const struct sim_kernel_facts *facts = &kernel->facts;
    const uint32_t *block = shape->block, *required = facts->required_block;
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    size_t allowed = kernel->dynamic_limit ? (size_t)kernel->dynamic_limit : STATIC_SHARED_LIMIT - facts->shared_size;
    RETURN_UNLESS(!facts->thread_limit || threads <= facts->thread_limit, ERROR_LAUNCH_OUT_OF_RESOURCES);
    if (required[0] && (block[0] != required[0] || block[1] != required[1] || block[2] != required[2]))
        return ERROR_INVALID_VALUE;
    if (shape->shared_memory > allowed || facts->shared_size + shape->shared_memory > largest_shared_memory(device))
        return ERROR_INVALID_VALUE;
    if (!shape->is_cooperative)
        return SUCCESS;
    uint64_t blocks = (uint64_t)shape->grid[0] * shape->grid[1] * shape->grid[2];
    uint64_t resident = (uint64_t)resident_blocks(device, kernel, threads, shape->shared_memory) * (uint64_t)device->processors;
    return blocks <= resident ? SUCCESS : ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
}

void report_launch(struct ptx_kernel *kernel, const struct sim_launch *shape, cudaError_t error)
{
    const uint32_t *grid = shape->grid, *block = shape->block;
    const struct sim_error *known = sim_find_error((int)error);
    if (!atomic_exchange(&kernel->is_launch_reported, true))
        fprintf(stderr, "accelerator: kernel %s is not launched (%s): grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of dynamic"
                " shared memory\n", readable_name(kernel), known ? known->runtime_name : "", grid[0], grid[1], grid[2],
                block[0], block[1], block[2], shape->shared_memory);
}

cudaError_t launch_ptx_kernel(struct stream *stream, struct ptx_kernel *kernel, const struct sim_launch *shape,
                              void **arguments)
{
    const struct sim_device *device = &driver->devices[stream->device];
    RETURN_IF_ERROR(translate(kernel));
    cudaError_t wrong = check_shape(kernel, shape, device);
    if (wrong != SUCCESS) {
        report_launch(kernel, shape, wrong);
        return wrong;
    }
    RETURN_IF_ERROR(find_variables(kernel, stream->device));
    struct ptx_launch *launch = calloc(1, launch_size(kernel));
    RETURN_UNLESS(launch, ERROR_OUT_OF_MEMORY);
    launch->kernel = kernel;
    launch->shape = *shape;
    for (uint32_t i = 0; i < kernel->facts.parameter_count; i++)
        memcpy(launch->parameters + kernel->facts.parameters[i][0], arguments[i], kernel->facts.parameters[i][1]);
    cudaError_t error = submit(stream, &(struct work){.type = &translated_kernel, .launch = launch});
    free(launch);
    return error;
}

enum {
    MAX_THREADS = 0, SHARED_SIZE = 1, CONSTANT_SIZE = 2, LOCAL_SIZE = 3, REGISTERS = 4, PTX_VERSION = 5, BINARY_VERSION = 6,
    DYNAMIC_SHARED_LIMIT = 8, LAST_ATTRIBUTE = 15,
};

cudaError_t read_attribute(const struct ptx_kernel *kernel, const struct sim_device *device, int attribute, int *value)
{
    static const struct sim_kernel_facts none;
    enum { SIMULATED_REGISTERS = 32 };
    const struct sim_kernel_facts *facts = kernel ? &kernel->facts : &none;
    int version = device->major * 10 + device->minor;
    struct resources counted = {.registers = SIMULATED_REGISTERS, .local_size = (int)facts->local_size};
    if (kernel && (attribute == LOCAL_SIZE || attribute == REGISTERS))
        read_resources(&kernel->program->machine_code, kernel->name, &counted);
    switch (attribute) {
    case MAX_THREADS:
        *value = SIM_MAX_THREADS_PER_BLOCK;
        if (facts->thread_limit && facts->thread_limit < SIM_MAX_THREADS_PER_BLOCK)
            *value = (int)facts->thread_limit;
        return SUCCESS;
    case SHARED_SIZE:
        *value = (int)facts->shared_size;
        return SUCCESS;
    case CONSTANT_SIZE:
        *value = (int)facts->constant_size;
        return SUCCESS;
    case LOCAL_SIZE:
        *value = counted.local_size;
        return SUCCESS;
    case REGISTERS:
        *value = counted.registers;
        return SUCCESS;
    case PTX_VERSION:
        *value = facts->ptx_version ? (int)facts->ptx_version : version;
        return SUCCESS;
    case BINARY_VERSION:
        *value = version;
        return SUCCESS;
    case DYNAMIC_SHARED_LIMIT:
        *value = kernel && kernel->dynamic_limit ? kernel->dynamic_limit : STATIC_SHARED_LIMIT - (int)facts->shared_size;
        return SUCCESS;
    default:
        *value = 0;
        return attribute >= 0 && attribute <= LAST_ATTRIBUTE ? SUCCESS : ERROR_INVALID_VALUE;
    }
}

cudaError_t set_attribute(struct ptx_kernel *kernel, const struct sim_device *device, int attribute, int value)
{
    RETURN_UNLESS(attribute >= DYNAMIC_SHARED_LIMIT && attribute <= LAST_ATTRIBUTE, ERROR_INVALID_VALUE);
    if (!kernel || attribute != DYNAMIC_SHARED_LIMIT)
        return SUCCESS;
    if (value < 0 || kernel->facts.shared_size + (size_t)value > largest_shared_memory(device))
        return ERROR_INVALID_VALUE;
    kernel->dynamic_limit = value;
    return SUCCESS;
}
