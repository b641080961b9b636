"""Faults in the simulated machine: its libraries, NCCL, the environment, the pytest plug-in."""

from __future__ import annotations

from .mutant import Mutant

_NATIVE = "simulation/native/"

MUTANTS: tuple[Mutant, ...] = (
    # NCCL
    Mutant(
        _NATIVE + "nccl_rendezvous.c",
        "if (board->attached < board->ranks)",
        "if (0)",
        ("simulation/test_nccl.py::TestDeath::test_a_rank_killed_while_others_are_still_to_come",),
    ),
    Mutant(
        _NATIVE + "nccl_rendezvous.c",
        "remove_abandoned(directories[i]);",
        "(void)0;",
        ("simulation/test_nccl.py::TestDeath::test_the_next_communicator_removes_what_was_left",),
    ),
    Mutant(
        _NATIVE + "nccl_progress.c",
        "operation->is_begun ? ncclSuccess : compare_announcements(operation)",
        "ncclSuccess",
        ("simulation/test_nccl.py::TestMisuse::test_calls_that_do_not_match",),
    ),
    Mutant(
        _NATIVE + "nccl_comm.c",
        "if (comm && comm->fork_generation != fork_generation)",
        "if (0)",
        ("simulation/test_nccl.py::TestCommunicators::test_a_forked_child",),
    ),
    Mutant(
        _NATIVE + "nccl_group.c",
        "first.id != 0 ? capture(batch, batch->operations[0].stream, &first) : run_batch(batch)",
        "run_batch(batch)",
        ("simulation/test_nccl.py::TestTorch::test_graphs",),
    ),
    Mutant(
        _NATIVE + "nccl_reduce.c",
        "kept += rest > half || (rest == half && (kept & 1));",
        "kept += rest >= half;",
        ("simulation/test_nccl.py::TestResults::test_sums_with_factors[2]",),
    ),
    Mutant(
        _NATIVE + "nccl_reduce.c",
        "((condition) || (b) != (b) ? (a) : (b))",
        "((condition) ? (a) : (b))",
        ("simulation/test_nccl.py::TestResults::test_edge_values",),
    ),
    # NVML
    Mutant(
        _NATIVE + "nvml_memory.c",
        "memory.used + memory.reserved",
        "memory.used",
        ("simulation/test_nvml_memory.py::test_memory_of_an_idle_gpu",),
    ),
    Mutant(
        _NATIVE + "nvml_devices.c",
        'snprintf(older, sizeof older, "MIG-%s/%d/0", gpu_uuid, instance + 1);',
        'snprintf(older, sizeof older, "MIG-%s/%d/0", gpu_uuid, instance);',
        ("simulation/test_nvml_memory.py::test_identity_of_instances",),
    ),
    Mutant(
        _NATIVE + "nvml_topology.c",
        "if (are_linked(gpu, other) && link-- == 0)",
        "if (link-- == 0)",
        ("simulation/test_nvml_topology.py::test_links_lead_to_the_other_gpus_of_the_group",),
    ),
    # The driver
    Mutant(
        _NATIVE + "driver.c",
        "    is_poisoned = true;\n",
        "",
        ("simulation/test_processes.py::TestFork::test_a_child_of_an_initialized_process_is_refused",),
    ),
    Mutant(
        _NATIVE + "state.c",
        "return row->image == own_image();",
        "return true;",
        ("simulation/test_misuse.py::test_memory_is_released_at_exec",),
    ),
    Mutant(
        _NATIVE + "driver.c",
        "        return ERROR_OPERATING_SYSTEM;\n    sim_state_forget_self(driver_state);\n",
        "        return ERROR_OPERATING_SYSTEM;\n",
        ("simulation/test_misuse.py::test_memory_after_exec_is_the_new_programs",),
    ),
    Mutant(
        _NATIVE + "state.c",
        "    struct row *row = find_own_row(state, gpu, instance);\n    if (row)\n        row->memory -= bytes;",
        "    struct row *row = own_row(state, gpu, instance);\n    if (row)\n        row->memory -= bytes;",
        ("simulation/test_misuse.py::test_memory_that_is_freed_late_is_nobody_elses",),
    ),
    Mutant(
        _NATIVE + "visible.c",
        "    return matches == 1;",
        "    return matches > 0;",
        ("simulation/test_visible_devices.py::TestVisibleDevices::test_a_prefix_that_two_gpus_share_is_ambiguous",),
    ),
    Mutant(
        _NATIVE + "driver_zero.c",
        "((uintptr_t)start + PAGE - 1) / PAGE * PAGE)",
        "(uintptr_t)start / PAGE * PAGE)",
        ("simulation/test_zeroing.py::test_private_memory",),
    ),
    Mutant(
        _NATIVE + "driver_zero.c",
        "size < WORTH_IT || ",
        "1 || ",
        ("simulation/test_zeroing.py::test_private_memory",),
    ),
    # nvidia-smi, and the end of a process
    Mutant(
        _NATIVE + "smi_query.c",
        "failure == NVML_NOT_SUPPORTED || failure == NVML_FUNCTION_NOT_FOUND",
        "failure == NVML_FUNCTION_NOT_FOUND",
        ("simulation/test_nvidia_smi.py::test_errors_of_nvml_show",),
    ),
    Mutant(
        _NATIVE + "smi.c",
        "return failure > 255 ? 255 : failure;",
        "return failure;",
        ("simulation/test_nvidia_smi.py::test_failures",),
    ),
    Mutant(
        _NATIVE + "smi.h",
        "SMI_MAX_PROCESSES = 4096",
        "SMI_MAX_PROCESSES = 256",
        ("simulation/test_nvidia_smi.py::test_as_many_processes_as_there_are",),
    ),
    Mutant(
        _NATIVE + "exit.c",
        "while (is_autograd_thread())",
        "while (false)",
        ("simulation/test_exit.py::test_a_late_autograd_thread_sleeps_instead_of_unwinding",),
    ),
    # Compiling
    Mutant(
        "simulation/_build.py",
        " and not status.st_mode & _OTHERS_MAY_WRITE",
        "",
        ("simulation/test_environment.py::test_a_build_that_cannot_be_trusted_is_replaced",),
    ),
    Mutant(
        "simulation/_build.py",
        '(directory / _LIST).read_text(encoding="ascii") == _sums(directory)',
        "(directory / _LIST).exists()",
        ("simulation/test_environment.py::test_a_build_that_cannot_be_trusted_is_replaced",),
    ),
    Mutant(
        "simulation/_build.py",
        "        fcntl.flock(file, fcntl.LOCK_EX)\n",
        "",
        ("simulation/test_environment.py::test_builds_at_once",),
    ),
    Mutant(
        "simulation/_build.py",
        "shutil.rmtree(left, ignore_errors=True)",
        "pass",
        ("simulation/test_environment.py::test_a_build_that_cannot_be_trusted_is_replaced",),
    ),
    Mutant(
        "simulation/_build.py",
        "(root, parent) if _is_exposed(root) else (parent,)",
        "(parent,)",
        ("simulation/test_environment.py::test_somebody_was_there_first",),
    ),
    # The environment, and the command
    Mutant(
        "simulation/_environment.py",
        '_OF_THE_USER = (f"{_PREFIX}NCCL_TIMEOUT",)',
        "_OF_THE_USER = ()",
        ("simulation/test_environment.py::test_the_time_to_wait_for_a_rank_is_the_users",),
    ),
    Mutant(
        "simulation/_environment.py",
        '    if "absent" not in (driver_is, nvml_is):\n',
        "    if True:\n",
        ("simulation/test_nvidia_smi.py::test_there_is_none_without_a_driver",),
    ),
    Mutant(
        "simulation/_environment.py",
        'if word == "absent" else root for word in',
        "if False else root for word in",
        ("simulation/test_environment.py::test_absence_hides_a_real_library",),
    ),
    Mutant(
        "simulation/_run.py",
        "os.kill(pid, received.si_signo)",
        "os.kill(pid, signal.SIGTERM)",
        ("simulation/test_command.py::test_signals_are_handed_on",),
    ),
    Mutant(
        "simulation/_run.py",
        " and received.si_code <= 0:",
        ":",
        ("simulation/test_command.py::test_interrupting_at_the_terminal_reaches_the_command_once",),
    ),
    Mutant(
        "simulation/_run.py",
        "return code if code >= 0 else _SIGNALLED - code",
        "return abs(code)",
        ("simulation/test_command.py::test_status_of_the_command",),
    ),
    Mutant(
        "simulation/_run.py",
        "is_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN",
        "is_ignored = False",
        ("simulation/test_command.py::test_a_caller_that_ignores_the_end_of_children",),
    ),
    Mutant(
        "simulation/_run.py",
        '"--numa", action="append", ',
        '"--numa", ',
        ("simulation/test_command.py::test_options_may_be_repeated",),
    ),
)
"""Small deliberate faults, each with the tests that must notice it."""
