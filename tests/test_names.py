"""The public names, written out: the promise that a reader of the documentation was given."""

from __future__ import annotations

import inspect
import typing

import pytest
import torch

import accelerator as acc

NAMES = """
    is_available device_count unavailable_reason visible_devices is_initialized is_in_bad_fork is_fork_safe get_device_name
    refresh driver_version driver_cuda_version Device VisibleDevice Process Telemetry
    physical_devices usable_devices compute_capability is_nvlink_connected numa_node get_device_index PhysicalDevice

    communication_backend_name communication_backend_version export_envs visible_devices_envs set_visible_devices_envs

    utilization memory_usage device_memory_used temperature power_draw clock_rate processes list_gpu_processes telemetry

    current_accelerator current_device_index set_device_index device_index device_of get_device_capability
    get_device_properties can_device_access_peer get_arch_list get_gencode_flags device device_name current_device
    current_device_name set_device current_device_idx set_device_idx

    current_stream set_stream synchronize default_stream stream Stream Event external_stream init lazy_call ipc_collect
    cudart current_blas_handle set_sync_debug_mode get_sync_debug_mode is_synchronized_device use_host_timers
    resolves_data_dependency handles_memory_backpressure

    empty_cache empty_host_cache get_memory_info memory_stats memory_allocated max_memory_allocated memory_reserved
    max_memory_reserved reset_peak_memory_stats reset_accumulated_memory_stats mem_get_info memory_stats_as_nested_dict
    host_memory_stats host_memory_stats_as_nested_dict reset_peak_host_memory_stats reset_accumulated_host_memory_stats
    memory_summary memory_snapshot record_memory_history dump_memory_snapshot
    set_per_process_memory_fraction get_per_process_memory_fraction total_memory available_memory is_out_of_memory_error
    memory_cached max_memory_cached reset_max_memory_cached reset_max_memory_allocated

    manual_seed manual_seed_all seed seed_all initial_seed get_rng_state get_rng_state_all set_rng_state set_rng_state_all
    fork_rng default_generator random

    is_bf16_supported is_fp16_supported is_fp64_supported is_fp8_supported is_tf32_supported supported_dtypes amp

    Graph create_graph capture_to_graph replay_graph graph_pool_handle is_current_stream_capturing make_graphed_callables

    BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor pin_memory is_pinned unpin_memory
    on_accelerator pin_empty pin_empty_like pin_memory_alignment register_host_memory unregister_host_memory

    range_push range_pop annotate supports_nvtx_domain

    use_in_deepspeed

    is_triton_supported prefer_triton_grouped_mm get_compile_backend set_compile_backend

    op_builder_dir register_op_builder get_op_builder create_op_builder build_extension

    checkpointing simulation __version__
""".split()

FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(acc, name))]


def test_these_are_all_and_there_is_none_beside_them() -> None:
    assert sorted(NAMES) == sorted(acc.__all__)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_typed(name: str) -> None:
    function = getattr(acc, name)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
    assert untyped == []
    typing.get_type_hints(inspect.unwrap(function), localns={"torch": torch})
