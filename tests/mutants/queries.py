"""Faults in the questions and what they stand on."""

from __future__ import annotations

from .mutant import Mutant

_FAILURES = "queries/test_failures.py"
_FORK = "queries/test_fork.py"
_LAUNCHING = "queries/test_launching.py"
_MONITORING = "queries/test_monitoring.py"
_ROCM = "queries/test_rocm.py"

MUTANTS: tuple[Mutant, ...] = (
    # The host's memory for a GPU's.
    Mutant(
        "_machine/description.py",
        "        except NotSupported:\n            pass\n    available, total",
        "        except (NotSupported, Failed):\n            pass\n    available, total",
        (f"{_FAILURES}::test_memory_is_never_the_hosts",),
    ),
    Mutant(
        "_machine/description.py",
        "        return asked.compute_capability if asked else None",
        "        return None",
        (f"{_FAILURES}::test_a_capability_that_nvml_does_not_tell",),
    ),
    Mutant(
        "_machine/nvml.py",
        "        if error.code != _UNINITIALIZED:\n            raise\n",
        "        raise\n",
        (f"{_FAILURES}::test_an_extra_shutdown_heals_everywhere",),
    ),
    # A child keeps the session of the process that it was forked from.
    Mutant(
        "_machine/nvml.py",
        "    _lock, _session = threading.RLock(), None\n",
        "    _lock = threading.RLock()\n",
        (f"{_FORK}::test_a_child_begins_a_session_of_its_own_with_nvml",),
    ),
    # NVML's own exceptions let through.
    Mutant(
        "_machine/nvml.py",
        "        raise _translated(session.binding, function, error) from None",
        "        raise",
        (f"{_FAILURES}::test_no_nvml_error_escapes",),
    ),
    # One bad GPU blinds all.
    Mutant(
        "_machine/nvml.py",
        "    except (NotSupported, Failed) as error:\n        problem = str(error)",
        "    except NotSupported as error:\n        problem = str(error)",
        (f"{_FAILURES}::test_one_bad_gpu_leaves_the_others_answering",),
    ),
    # A failed start kept for ever.
    Mutant(
        "_machine/nvml.py",
        "(isinstance(_session, _Failure) and time.monotonic() > _session.until)",
        "(isinstance(_session, _Failure) and False)",
        ("queries/test_discovery_sources.py::test_a_failed_start_is_remembered_for_a_second_only",),
    ),
    # A question that changes another's answer.
    Mutant(
        "_machine/cuda.py",
        "    if answer.error:\n        return seen, False\n",
        "    if answer.error:\n        return (), True\n",
        (f"{_FAILURES}::test_a_question_does_not_change_another_s_answer",),
    ),
    Mutant(
        "_machine/cuda.py",
        "    if grammar.hides_all(visible):\n        return _none(f",
        "    if False:\n        return _none(f",
        (f"{_FAILURES}::test_what_hides_every_device_needs_no_child",),
    ),
    Mutant(
        "_machine/cuda.py",
        "seen.driver is not None or seen.uuid is None",
        "True",
        (f"{_FAILURES}::test_a_capability_that_nvml_does_not_tell",),
    ),
    # What failed kept as long as what lasts.
    Mutant(
        "_machine/discovery_cache.py",
        '    until = float("inf") if found.lasting else time.monotonic() + RETRY_AFTER_S',
        '    until = float("inf")',
        (f"{_FAILURES}::test_a_failed_child_is_forgotten_after_a_second_and_leaves_nothing",),
    ),
    # The answer of one environment kept under another.
    Mutant(
        "_machine/discovery_cache.py",
        '    until = float("inf") if found.lasting else time.monotonic() + RETRY_AFTER_S',
        '    until = float("inf")\n    whole_key = (_driver_count(), _torch_accelerator(), _environment()), False',
        (f"{_FAILURES}::test_an_answer_belongs_to_the_environment_it_was_asked_in",),
    ),
    Mutant(
        "_machine/process.py",
        "    _in_bad_fork = bool(in_bad_fork and in_bad_fork())",
        "    _in_bad_fork = False",
        (f"{_FAILURES}::test_torch_s_veto_counts",),
    ),
    Mutant(
        "_machine/process.py",
        "    _release(_importing)\n",
        "",
        (f"{_FORK}::test_threads_that_fork_at_once_leave_no_lock_held",),
    ),
    Mutant(
        "_machine/process.py",
        '    *("._machine.discovery_cache", "._machine.host_memory", "._machine.description", "._machine.device_argument"),\n',
        "",
        (f"{_FORK}::test_first_imports_are_short_pieces",),
    ),
    # Busy kept for a second, as a failure is.
    Mutant(
        "_machine/probe.py",
        "    return 0.0 if any(map(is_busy, answer.unusable)) else time.monotonic() + RETRY_AFTER_S",
        "    return time.monotonic() + RETRY_AFTER_S",
        (f"{_FAILURES}::test_busy_is_never_remembered_and_strict_leaves_no_trace",),
    ),
    # What else is printed taken for the answer.
    Mutant(
        "_machine/probe.py",
        'json.loads(output.split(f"\\n{mark}\\n".encode())[1])',
        'json.loads(output.replace(mark.encode(), b""))',
        (f"{_FAILURES}::test_what_a_library_prints_is_no_answer",),
    ),
    # As many children as threads that ask.
    Mutant(
        "_machine/probe.py",
        "            kept = None if anew else answers.get(question)",
        "            kept = None",
        (f"{_FAILURES}::test_one_child_whoever_asks",),
    ),
    # A zombie.
    Mutant(
        "_machine/probe.py",
        "        child.wait(RETRY_AFTER_S)",
        "        pass",
        (f"{_FAILURES}::test_a_failed_child_is_forgotten_after_a_second_and_leaves_nothing",),
    ),
    Mutant(
        "_machine/usability.py",
        "    if error is None or (busy and own):",
        "    if error is None:",
        (f"{_FAILURES}::test_a_device_of_one_s_own_is_not_busy",),
    ),
    Mutant(
        "_machine/usability.py",
        "_try_out(found, anew=True)",
        "_try_out(found, anew=False)",
        (f"{_FAILURES}::test_busy_is_never_remembered_and_strict_leaves_no_trace",),
    ),
    Mutant(
        "_machine/device_argument.py",
        "    elif isinstance(device, bool):\n        _refuse(device)\n",
        "",
        (f"{_FAILURES}::test_wrong_kinds",),
    ),
    Mutant(
        "_machine/grammar.py",
        "return repr(text) if len(text) <= 200 else",
        "return repr(text) if True else",
        (f"{_FAILURES}::test_long_and_undecodable_variables",),
    ),
    Mutant(
        "_machine/rocm.py",
        '    for variable in ("ROCR_VISIBLE_DEVICES", limiting(env)):',
        '    for variable in (limiting(env), "ROCR_VISIBLE_DEVICES"):',
        (f"{_ROCM}::test_visible_devices_through_amdsmi",),
    ),
    Mutant(
        "_machine/amdsmi.py",
        '_number(usage["vram_total"]) << 20, _number(usage["vram_used"]) << 20',
        '_number(usage["vram_total"]) << 20, _number(usage["vram_used"]) << 10',
        (f"{_ROCM}::test_memory_through_amdsmi",),
    ),
    # Bindings and drivers that are too old for the newest function.
    Mutant(
        "_machine/nvml.py",
        "_MISSING = (13, 25)",
        "_MISSING = (25,)",
        (f"{_MONITORING}::test_processes_of_older_drivers",),
    ),
    Mutant(
        "discovery.py",
        "    if found.number == 0 or process.is_in_bad_fork():\n        return ()",
        "    if found.number == 0:\n        return ()",
        (f"{_FORK}::test_a_child_of_a_process_whose_driver_was_up",),
    ),
    Mutant(
        "monitoring.py",
        "        if device.uuid == seen.uuid if device.uuid else",
        "        if device.uuid == device.uuid if device.uuid else",
        (f"{_MONITORING}::test_every_entry_of_both_lists",),
    ),
    Mutant(
        "memory_info.py",
        "    if process.is_in_bad_fork():\n",
        "    if False:\n",
        (f"{_FORK}::test_a_child_of_a_process_whose_driver_was_up",),
    ),
    # Other vendors' variables read with CUDA's grammar.
    Mutant(
        "launching.py",
        "        entries = _tiles(value, whole_cards=",
        "        entries = grammar.listed(value) or _tiles(value, whole_cards=",
        (f"{_LAUNCHING}::test_level_zero_s_masks_have_tiles",),
    ),
    Mutant(
        "launching.py",
        "    let_through = _let_through(current_env, variable)",
        '    let_through = _LetThrough(variable, "", None)',
        (f"{_LAUNCHING}::test_ids_count_what_is_let_through",),
    ),
    # ROCm.
    Mutant(
        "_machine/amdsmi.py",
        "return None if node < 0 else node",
        "return node",
        ("queries/test_rocm.py::test_links_nodes_and_fans_through_amdsmi",),
    ),
    Mutant(
        "_machine/amdsmi.py",
        '["type"]) == xgmi',
        '["type"]) != xgmi',
        ("queries/test_rocm.py::test_links_nodes_and_fans_through_amdsmi",),
    ),
    Mutant(
        "_machine/process.py",
        'None if getattr(sys, "frozen", False) else sys.executable or None',
        "sys.executable",
        ("queries/test_failures.py::test_the_architectures_in_a_frozen_program",),
    ),
)
