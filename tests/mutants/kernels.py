"""Faults in the simulated kernels."""

from __future__ import annotations

from .mutant import Mutant

_KERNELS = "simulation/test_kernels_simulated.py"
_COMPOSITIONS = "simulation/test_compositions_simulated.py"


def _kernel(file: str, old: str, new: str, *tests: str, where: str = _KERNELS) -> Mutant:
    return Mutant(f"simulation/_kernels/{file}", old, new, tuple(f"{where}::{test}" for test in tests))


MUTANTS = (
    _kernel(
        "dispatch.py",
        "elif self.device != device and not self.operation.is_copy:",
        "elif False:",
        "TestDevices::test_tensors_on_two_devices_are_refused",
    ),
    _kernel(
        "dispatch.py",
        "if self.host is not None and not self.operation.takes_host_tensors:",
        "if False:",
        "TestDevices::test_tensors_of_the_host_are_refused",
    ),
    _kernel(
        "dispatch.py",
        "if not is_plain or captures.value or _mode_count()",
        "if not is_plain or _mode_count()",
        "TestGraphs::test_nothing_runs_while_capturing",
    ),
    _kernel(
        "dispatch.py",
        "captures.value or _mode_count() or",
        "captures.value or",
        "TestArguments::test_modes_do_not_see_what_compiled_code_computes",
    ),
    _kernel(
        "dispatch.py",
        ' or (is_cast and _is_autocasting("cpu"))',
        "",
        "TestArguments::test_autocast_of_the_cpu_does_not_reach_in",
    ),
    _kernel(
        "dispatch.py",
        "if kind in _LISTED and wants_tensor[len(here)]:",
        "if False:",
        "TestArguments::test_numbers_beside_tensors_of_an_op_without_a_python_function",
    ),
    _kernel(
        "dispatch.py",
        " or index != _current_device():",
        ":",
        "TestDevices::test_results_are_where_the_arguments_are",
    ),
    _kernel(
        "operations.py",
        'if torch._C._dispatch_has_kernel_for_dispatch_key(self.name, "Negative"):',
        "if False:",
        "TestArguments::test_conjugates_and_negatives",
    ),
    _kernel(
        "dispatch.py",
        "if result.layout is not _STRIDED:",
        "if False:",
        "TestEmbeddings::test_sparse_gradients",
        where="simulation/test_trainings_simulated.py",
    ),
    _kernel(
        "dispatch.py",
        "        and other.is_contiguous()\n",
        "",
        "TestDevices::test_copies_between_devices_with_strides_and_types",
    ),
    _kernel(
        "dispatch.py",
        "again.find_generator(here, named).graphsafe_get_state()",
        "again.find_generator(here, named).clone_state()",
        "TestGraphs::test_replays_draw_new_numbers_and_states_repeat",
    ),
    _kernel(
        "operations.py",
        "_C.TensorBase)",
        "_C.TensorBase, _C._nn)",
        "TestArguments::test_defaults_are_those_of_the_op",
    ),
    _kernel(
        "operations.py",
        "if (other := self.with_numbers(numbers)) is not None:",
        "if (other := None) is not None:",
        "TestArguments::test_numbers_in_every_place_where_ops_take_them",
    ),
    _kernel(
        "registration.py",
        "    _leave_out_those_in_python()\n    library",
        "    library",
        "TestArguments::test_an_outer_product_for_which_torch_has_a_triton_kernel",
    ),
    _kernel(
        "registration.py",
        "raise not_simulated(name)",
        "return args[0]",
        "TestNotSimulated::test_it_says_so_by_name",
    ),
    _kernel(
        "capture.py",
        "            _computations.pop(number, None)",
        "            pass",
        "TestGraphs::test_computations_go_with_their_graph",
    ),
    _kernel(
        "capture.py",
        "        return False",
        "        return True",
        "TestGraphs::test_an_error_at_a_replay_is_an_error",
    ),
    _kernel(
        "random.py",
        "generator.set_offset(offset + _STEP)",
        "generator.set_offset(offset)",
        "TestRandom::test_the_generator_of_the_caller",
    ),
    _kernel(
        "random.py",
        "(generator.initial_seed() + ",
        "(",
        "TestRandom::test_seeds_repeat_and_differ",
    ),
    _kernel(
        "random.py",
        "            default.set_state(before)",
        "            pass",
        "TestRandom::test_the_cpus_generator_is_left_alone",
    ),
    _kernel(
        "memory.py",
        "    return result.conj() if dtype.is_complex and tensor.is_conj() else result",
        "    return result",
        "TestArguments::test_conjugates_and_negatives",
    ),
    _kernel(
        "memory.py",
        "        torch.ops.aten.resize_(tensor, result.size())",
        "        pass",
        "TestArguments::test_out_that_is_a_view_grows_as_on_a_gpu",
    ),
    _kernel(
        "sparse.py",
        "            is_coalesced=tensor.is_coalesced(),",
        "            is_coalesced=True,",
        "TestParts::test_sparse",
    ),
    _kernel(
        "compositions/filling.py",
        " or not tensor.is_contiguous()",
        "",
        "TestArguments::test_zeroing_a_large_part",
    ),
    _kernel(
        "compositions/normalization.py",
        "(scaled - normalized * (scaled * normalized)",
        "(scaled + normalized * (scaled * normalized)",
        "TestRmsNorm::test_without_weight",
        where=_COMPOSITIONS,
    ),
    _kernel(
        "compositions/normalization.py",
        "squares / (total - 1)",
        "squares / total",
        "TestBatchNorm::test_statistics_of_parts_are_those_of_the_whole",
        where=_COMPOSITIONS,
    ),
    _kernel(
        "compositions/recurrent.py",
        "    hy = new + update * (widened(hx) - new)",
        "    hy = new + (1 - update) * (widened(hx) - new)",
        "TestRecurrentCells::test_cell",
        where=_COMPOSITIONS,
    ),
    _kernel(
        "compositions/matmul.py",
        "    return self.to(out_dtype) @ mat2.to(out_dtype)\n\n\ndef mm_out",
        "    return (self @ mat2).to(out_dtype)\n\n\ndef mm_out",
        "TestTypedProducts::test_mm_and_bmm",
        where=_COMPOSITIONS,
    ),
    _kernel(
        "compositions/dropout.py",
        "mask.to(self.dtype) * scale",
        "mask.to(self.dtype)",
        "TestDropout",
        where=_COMPOSITIONS,
    ),
    Mutant(
        "simulation/_kernels/compositions/attention.py",
        'is not simulated")\n    return _Mask(right=0)\n',
        'is not simulated")\n    return _Mask(right=1)\n',
        ("simulation/test_compositions_simulated.py::TestPackedAttention::test_cudnn[True]",),
    ),
    Mutant(
        "simulation/_kernels/compositions/matmul.py",
        "scale = scale.repeat_interleave(128, dim)",
        "scale = scale.roll(1, dim).repeat_interleave(128, dim)",
        ("simulation/test_compositions_simulated.py::TestScaledProducts::test_scale_for_each_block",),
    ),
)
