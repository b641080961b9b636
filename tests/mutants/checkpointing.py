"""Faults in activation checkpointing."""

from __future__ import annotations

from .mutant import Mutant

_ARGUMENTS = "checkpointing/test_arguments_cpu.py"
_DEFECTS = "checkpointing/test_defects_cpu.py"
_DEVICES = "checkpointing/test_devices_simulated.py"
_ENGINE = "checkpointing/test_engine_cpu.py"
_MEMORY = "checkpointing/test_memory_cpu.py"
_SURROUNDINGS = "checkpointing/test_forward_state_cpu.py"
_TORCH = "checkpointing/test_torch_cpu.py"
_TORCH_NESTED = "checkpointing/test_torch_nested_cpu.py"
_TORCH_SELECTIVE = "checkpointing/test_torch_selective_cpu.py"
_VALUES = "checkpointing/test_values_simulated.py"

MUTANTS: tuple[Mutant, ...] = (
    # Nothing is copied to the host, or nothing back.
    Mutant(
        "checkpointing/transfers.py",
        "            host.copy_(source, non_blocking=True)\n",
        "",
        (f"{_VALUES}::test_the_bytes_that_go_to_the_host_and_come_back[100-dtype0]",),
    ),
    Mutant(
        "checkpointing/transfers.py",
        "            here.copy_(self._host, non_blocking=True)\n",
        "",
        (f"{_VALUES}::test_gradients_come_from_what_is_on_the_host[cpu]",),
    ),
    # The streams of computation and copies do not wait for each other: on leaving, at the end of it, and on the way back.
    Mutant(
        "checkpointing/transfers.py",
        "        side.stream.wait_stream(self._stream)\n        with side.module.stream(side.stream):\n            host.copy_",
        "        with side.module.stream(side.stream):\n            host.copy_",
        (f"{_DEVICES}::test_computation_and_copies_wait_for_each_other",),
    ),
    Mutant(
        "checkpointing/transfers.py",
        "            self._stream.wait_event(self._event)\n",
        "",
        (f"{_DEVICES}::test_computation_and_copies_wait_for_each_other",),
    ),
    Mutant(
        "checkpointing/transfers.py",
        "            stream.wait_event(self._arrival)\n",
        "",
        (f"{_DEVICES}::test_computation_and_copies_wait_for_each_other",),
    ),
    # Memory that a copy still writes to is handed out.
    Mutant(
        "checkpointing/transfers.py",
        "            self._here.record_stream(self._side.stream)\n",
        "            pass\n",
        (f"{_DEVICES}::test_memory_under_a_copy_is_not_handed_out[fetched ahead]",),
    ),
    Mutant(
        "checkpointing/transfers.py",
        'device="cpu", pin_memory=',
        "pin_memory=",
        (f"{_DEVICES}::test_offload_under_a_default_device",),
    ),
    # Two threads recompute at once, or wait for each other for ever.
    Mutant(
        "checkpointing/frames.py",
        "            if running[0] is not replay:\n",
        "            if False:\n",
        (f"{_DEVICES}::test_one_recomputation_serves_the_threads_of_two_devices",),
    ),
    Mutant(
        "checkpointing/frames.py",
        "each.thread != replay.thread and not _waits(each.thread)",
        "each.thread != replay.thread",
        (f"{_DEVICES}::test_a_gradient_on_another_device_inside_of_the_recomputation",),
    ),
    # The recomputed graph keeps its checkpoint alive.
    Mutant(
        "checkpointing/frames.py",
        "            replay.frame = None\n",
        "",
        (f"{_MEMORY}::test_what_a_function_keeps_dies_with_it[closure-plain]",),
    ),
    Mutant(
        "checkpointing/frames.py",
        "    if tensor._version != version:\n",
        "    if False:\n",
        (f"{_ENGINE}::test_in_place_edit_in_the_middle_is_an_error",),
    ),
    # A slot of a buffer is what the function gets.
    Mutant(
        "checkpointing/partition.py",
        "                elements = elements.clone()\n",
        "                pass\n",
        (f"{_MEMORY}::test_a_slot_is_not_what_the_function_gets",),
    ),
    # Ranks whose part is shorter gather at other times than the others.
    Mutant(
        "checkpointing/partition.py",
        "        if host:\n",
        "        if host and part.numel() == size:\n",
        ("checkpointing/test_nccl.py::test_as_without_checkpoints[two-partition+cpu-odd]",),
    ),
    Mutant(
        "checkpointing/buffers.py",
        "(not fits and len(buffer.free) == buffer.count)",
        "False",
        (f"{_MEMORY}::test_buffers_follow_other_sizes",),
    ),
    Mutant(
        "checkpointing/buffers.py",
        "            elif not fits or not buffer.free:\n",
        "            elif not fits:\n",
        (f"{_DEFECTS}::test_11_too_many_and_other_sizes_get_memory_of_their_own",),
    ),
    # What was in force in forward is not in force in the recomputation, or stays so.
    Mutant(
        "checkpointing/forward_state.py",
        "            if device != self._device:\n",
        "            if False:\n",
        (f"{_SURROUNDINGS}::test_in_force_again[a device-nothing-True]",),
    ),
    Mutant(
        "checkpointing/bindings.py",
        "            return mode.device\n",
        "            return torch.empty(0).device\n",
        (f"{_DEVICES}::test_a_default_device_without_an_index_follows_the_current_device[context]",),
    ),
    Mutant(
        "checkpointing/forward_state.py",
        "cache_enabled=cached)",
        "cache_enabled=True)",
        (f"{_SURROUNDINGS}::test_a_cast_weight_is_computed_again_without_the_cache",),
    ),
    Mutant(
        "checkpointing/forward_state.py",
        "                for device in devices or ():\n",
        "                for device in ():\n",
        (f"{_DEVICES}::test_tensors_inside_of_arguments_count_too",),
    ),
    Mutant(
        "checkpointing/forward_state.py",
        "if type(state) is not tuple or state != now:",
        "if type(state) is not tuple:",
        (f"{_VALUES}::test_gradients_under_dropout_and_autocast[checkpoint-plain-float32-cuda:0]",),
    ),
    Mutant(
        "checkpointing/forward_state.py",
        "                _write_cpu(self._cpu)\n",
        "",
        (f"{_TORCH}::test_dropout_draws_the_same_again[checkpoint]",),
    ),
    Mutant(
        "checkpointing/forward_state.py",
        "                _write_cpu(cpu)\n",
        "",
        (f"{_DEFECTS}::test_4_random_states_are_restored_after_an_exception",),
    ),
    # Containers of a kind of their own are kept as they are.
    Mutant(
        "checkpointing/arguments.py",
        "    if isinstance(item, dict):\n",
        "    if kind is dict:\n",
        (f"{_ARGUMENTS}::test_what_is_done_to_containers_later[caller-default dict-plain]",),
    ),
    Mutant(
        "checkpointing/engine.py",
        "frame.largest >= LARGE or",
        "frame.largest >= 0 or",
        (f"{_TORCH}::test_early_stop_is_decided_by_size_where_nobody_says",),
    ),
    # What DeepSpeed's code asks of the parts of an activation.
    Mutant(
        "checkpointing/compatibility.py",
        'return partition.part_size(_numel(item, "get_partition_start"), group.size) * group.rank',
        'return _numel(item, "get_partition_start") * group.rank // group.size',
        ("checkpointing/test_deepspeed_cpu.py::test_where_parts_start",),
    ),
    # Two checkpoints get one slot.
    Mutant(
        "checkpointing/buffers.py",
        "            number = buffer.free.pop()\n",
        "            number = buffer.free[-1]\n",
        (f"{_MEMORY}::test_ten_thousand_checkpoints_have_their_values[contiguous]",),
    ),
    # What a backward reads is not the tensor that was saved.
    Mutant(
        "checkpointing/frames.py",
        "        if tensor.requires_grad:\n            tensor = tensor.detach()\n",
        "        tensor = tensor.detach()\n",
        (f"{_TORCH_NESTED}::test_what_a_backward_reads_is_the_object_that_was_saved[checkpoint]",),
    ),
    # Backwards of a group are not told from each other, or a recomputation runs without its context.
    Mutant(
        "checkpointing/frames.py",
        "    backward = _backward_group() or _backward_id()\n",
        "    backward = _backward_id()\n",
        (f"{_TORCH_NESTED}::test_backwards_of_a_group_may_not_overlap[checkpoint]",),
    ),
    Mutant(
        "checkpointing/frames.py",
        "                self.surroundings.run(self.function, args, kwargs, self.context)\n        except _Stop:",
        "                self.surroundings.run(self.function, args, kwargs, None)\n        except _Stop:",
        (f"{_TORCH_SELECTIVE}::test_what_is_saved_is_not_recomputed",),
    ),
    # Tensors that come while backward is called inside of the function are taken for a difference.
    Mutant(
        "checkpointing/frames.py",
        "        self.open_end = not frame.done and not frame.stops\n",
        "        self.open_end = False\n",
        (f"{_TORCH_NESTED}::test_gradients_of_checkpoints_of_gradients",),
    ),
    Mutant(
        "checkpointing/checks.py",
        ".resolve_conj()",
        "",
        ("checkpointing/test_engine_cpu.py::test_debug_compares_conjugates_too",),
    ),
    Mutant(
        "checkpointing/engine.py",
        "if settings.preserve_rng_state and frame.surroundings.up is None and accelerator() is not None:",
        "if False:",
        ("checkpointing/test_devices_simulated.py::test_an_accelerator_that_is_initialized_inside_of_a_checkpoint",),
    ),
    Mutant(
        "checkpointing/frames.py",
        "                self.count = number\n                raise _Stop",
        "                raise _Stop",
        ("checkpointing/test_engine_cpu.py::test_early_stop_survives_being_caught_all_the_same",),
    ),
)
