"""Faults in the actions and what they stand on."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "graphs.py",
        "    streams.synchronize()\n    # Older torches",
        "    # Older torches",
        ("runtime/test_graph_functions_simulated.py::test_the_work_before_a_capture_is_done",),
    ),
    Mutant(
        "graphs.py",
        'mode = capture_error_mode if self.capture_error_mode == "default" else self.capture_error_mode',
        "mode = capture_error_mode",
        ("runtime/test_graph_functions_simulated.py::test_what_is_unsafe_is_as_the_mode_says",),
    ),
    Mutant(
        "graphs.py",
        "super().capture_begin(self.graph_pool if pool is None else pool, mode",
        "super().capture_begin(pool, mode",
        ("runtime/test_graph_functions_simulated.py::test_the_pool_of_the_graph_is_used_when_none_is_given",),
    ),
    Mutant(
        "graphs.py",
        "    if number not in _capture_streams:",
        "    number = 0\n    if number not in _capture_streams:",
        ("runtime/test_graph_functions_simulated.py::test_each_device_has_a_capture_stream_of_its_own_and_keeps_it",),
    ),
    Mutant(
        "_torch/contexts.py",
        "restore_index(self._leave_again() if self._again else self._before)",
        "restore_index(self._before)",
        ("runtime/test_contexts_simulated.py::test_entered_while_it_is_entered",),
    ),
    Mutant(
        "_torch/contexts.py",
        "for place in reversed(range(len(_mine.entered))):",
        "for place in range(len(_mine.entered)):",
        ("runtime/test_contexts_simulated.py::test_entered_while_it_is_entered",),
    ),
    Mutant(
        "_torch/contexts.py",
        "if index == here else (get_stream(index), get_stream(here))",
        "if index == here else (get_stream(here),)",
        ("runtime/test_streams_simulated.py::test_context_restores",),
    ),
    Mutant(
        "_torch/contexts.py",
        "        runtime.initialize(self._to)\n",
        "",
        ("runtime/test_devices_streams_memory.py::test_a_context_entered_in_a_child_that_cannot_says_so",),
    ),
    Mutant(
        "devices.py",
        "return DeviceContext(seen.given) if seen.up else FirstDeviceContext(seen.given)",
        "runtime.initialize()\n    return DeviceContext(seen.given)",
        ("runtime/test_devices_streams_memory.py::test_contexts_initialize_when_they_are_entered",),
    ),
    Mutant(
        "_machine/device_argument.py",
        'if accelerator == "cpu" and number >= 0:',
        'if accelerator == "cpu" and number == 0:',
        ("runtime/test_devices_cpu.py::test_devices_as_values",),
    ),
    Mutant(
        "_torch/tracing.py",
        "getattr(torch, kind()).empty_cache()",
        "pass",
        ("runtime/test_tracing.py::test_effects_come_at_every_call_and_not_while_tracing",),
    ),
    Mutant(
        "_torch/tracing.py",
        'return torch.device(kind()) if number is None or kind() == "cpu" else torch.device(kind(), number)',
        "return torch.device(kind())",
        ("runtime/test_tracing.py::test_one_program_traces_on_the_cpu_and_on_devices",),
    ),
    Mutant(
        "pinning.py",
        'dtype=torch.uint8, device="cpu", pin_memory=pin)',
        "dtype=torch.uint8, pin_memory=pin)",
        ("runtime/test_pinning_simulated.py::test_the_default_device_has_no_say",),
    ),
    Mutant(
        "pinning.py",
        "pin=True).copy_(tensor)",
        "pin=True)",
        ("runtime/test_pinning_simulated.py::test_addresses_are_aligned_as_asked",),
    ),
    Mutant(
        "pinning.py",
        "    _check(cudart, cudart.cudaHostRegister(address, size, 0))\n",
        "    cudart.cudaHostRegister(address, size, 0)\n",
        ("runtime/test_pinning_simulated.py::test_memory_can_be_registered_once_at_a_time",),
    ),
    Mutant(
        "memory.py",
        "_tell_allocator(runtime.reset_peak_memory_stats, seen.number)",
        "_tell_allocator(runtime.reset_peak_memory_stats, 0)",
        ("runtime/test_memory_simulated.py::test_resetting_concerns_one_device",),
    ),
    Mutant(
        "snapshots.py",
        "arguments = () if mempool_id is None and include_traces else (mempool_id,)",
        "arguments = ()",
        ("runtime/test_snapshots_simulated.py::test_segments_of_a_pool",),
    ),
    Mutant(
        "snapshots.py",
        "snapshot(*arguments) if include_traces else snapshot(*arguments, include_traces=False)",
        "[]",
        ("runtime/test_snapshots_simulated.py::test_segments_hold_what_was_allocated",),
    ),
    Mutant(
        "random.py",
        "runtime.generator(runtime.get_index() if number is None else number).set_state(state)",
        "runtime.generator(runtime.get_index()).set_state(state)",
        ("runtime/test_random_simulated.py::test_set_rng_state_sets_what_torch_cuda_sets",),
    ),
    Mutant(
        "random.py",
        "states = [_checked_state(state) for state in new_states]",
        "states = list(new_states)",
        ("runtime/test_random_simulated.py::test_states_of_the_wrong_kind_are_refused_and_change_nothing",),
    ),
    Mutant(
        "streams.py",
        'return cpu_stream() if seen.kind == "cpu" else _plain(runtime.function("default_stream")(seen.number))',
        'return cpu_stream() if seen.kind == "cpu" else runtime.function("default_stream")(seen.number)',
        ("runtime/test_streams_simulated.py::test_default_stream_is_torch_s",),
    ),
    Mutant(
        "tensors.py",
        "dtype, copy=given)",
        "dtype)",
        ("runtime/test_tensors_simulated.py::test_tensors_are_copied_without_a_warning",),
    ),
    Mutant(
        "dtypes.py",
        "return runtime.compute_capability() >= (8, 0)",
        "return runtime.compute_capability() >= (7, 5)",
        ("runtime/test_capability.py::test_answers_are_those_of_the_current_device",),
    ),
    Mutant(
        "properties.py",
        'runtime.function("can_device_access_peer")(runtime.look(device).number, peer.number)',
        'runtime.function("can_device_access_peer")(peer.number, peer.number)',
        ("runtime/test_properties_simulated.py::test_peer_access_is_torch_s",),
    ),
    Mutant(
        "profiling.py",
        "        range_pop(self._range[1])",
        "        range_pop()",
        ("runtime/test_profiling.py::test_annotations_pop_on_exceptions_and_nest",),
    ),
    Mutant(
        "extensions.py",
        'return "op_builder" if hasattr(package, "__deepspeed__") else "deepspeed.ops.op_builder"',
        'return "op_builder" if package else "deepspeed.ops.op_builder"',
        ("runtime/test_extensions.py::test_anothers_package_of_that_name_is_left_alone",),
    ),
    Mutant(
        "extensions.py",
        "            torch.cuda.is_available = ask\n",
        "            pass\n",
        ("runtime/test_extensions.py::test_build_extension_is_torchs_and_asking_for_it_is_silent",),
    ),
    Mutant(
        "extensions.py",
        'return [*_BUILDER_CLASS.findall(source), *_BUILDER_NAME.findall(" ".join(_PUBLIC.findall(source)))]',
        "return _BUILDER_CLASS.findall(source)",
        ("runtime/test_extensions.py::test_a_builder_that_a_module_hands_on_is_found_there",),
    ),
    Mutant(
        "_torch/tracing.py",
        'return torch.cuda.stream(stream) if kind() == "cuda" else stream\n',
        'return torch.cuda.stream(stream) if kind() == "cuda" else nullcontext()\n',
        ("runtime/test_other_accelerator.py::test_a_stream_is_entered_in_compiled_code",),
    ),
    Mutant(
        "profiling.py",
        "supports_nvtx_domain = True",
        "supports_nvtx_domain = False",
        ("runtime/test_profiling.py::test_deepspeed_is_told_that_domains_are_taken",),
    ),
    Mutant(
        "low_level.py",
        "if mode != runtime.get_sync_debug_mode():",
        "if mode > runtime.get_sync_debug_mode():",
        ("runtime/test_low_level_simulated.py::test_sync_debug_mode",),
    ),
    Mutant(
        "_torch/lazy_calls.py",
        "(__name__, _RANDOM,",
        '(__name__, "accelerator.random",',
        ("queries/test_packaging.py::test_seeds_wait_in_order_where_it_is_vendored",),
    ),
    Mutant(
        "_torch/runtime.py",
        "return count if up else discovery.device_count()",
        "return discovery.device_count()",
        ("runtime/test_capability.py::test_an_environment_that_changes_too_late_changes_nothing",),
    ),
    Mutant(
        "graphs.py",
        "            finally:\n                graph.graph_pool = own\n",
        "            finally:\n                pass\n",
        ("runtime/test_graph_functions_simulated.py::test_the_pool_of_the_graph_is_used_when_none_is_given",),
    ),
)
