"""The package has every method of DeepSpeed's accelerator interface, so that the module can replace DeepSpeed's object."""

from __future__ import annotations

import inspect

import pytest

import accelerator as acc

# DeepSpeed's methods, abstract and concrete, including those that 0.19.8 added, and the number of their positional arguments.
METHODS = {
    "is_synchronized_device": 0,
    "use_host_timers": 0,
    "resolves_data_dependency": 0,
    "handles_memory_backpressure": 0,
    "device_name": 1,
    "device": 1,
    "set_device": 1,
    "current_device": 0,
    "current_device_name": 0,
    "device_count": 0,
    "synchronize": 1,
    "random": 0,
    "set_rng_state": 2,
    "get_rng_state": 1,
    "manual_seed": 1,
    "manual_seed_all": 1,
    "initial_seed": 0,
    "default_generator": 1,
    "stream": 1,
    "current_stream": 1,
    "default_stream": 1,
    "empty_cache": 0,
    "memory_allocated": 1,
    "max_memory_allocated": 1,
    "reset_max_memory_allocated": 1,
    "memory_cached": 1,
    "max_memory_cached": 1,
    "reset_max_memory_cached": 1,
    "memory_stats": 1,
    "reset_peak_memory_stats": 1,
    "memory_reserved": 1,
    "max_memory_reserved": 1,
    "total_memory": 1,
    "available_memory": 1,
    "is_bf16_supported": 0,
    "is_fp16_supported": 0,
    "is_fp64_supported": 0,
    "supported_dtypes": 0,
    "is_available": 0,
    "range_push": 3,
    "range_pop": 1,
    "lazy_call": 1,
    "communication_backend_name": 0,
    "communication_backend_version": 0,
    "is_triton_supported": 0,
    "prefer_triton_grouped_mm": 0,
    "create_graph": 0,
    "capture_to_graph": 3,
    "replay_graph": 1,
    "is_current_stream_capturing": 0,
    "pin_memory": 2,
    "is_pinned": 1,
    "unpin_memory": 1,
    "pin_memory_alignment": 0,
    "pin_empty": 1,
    "pin_empty_like": 3,
    "register_host_memory": 2,
    "unregister_host_memory": 1,
    "on_accelerator": 1,
    "op_builder_dir": 0,
    "create_op_builder": 1,
    "get_op_builder": 1,
    "build_extension": 0,
    "export_envs": 0,
    "visible_devices_envs": 0,
    "set_visible_devices_envs": 2,
    "get_compile_backend": 0,
    "set_compile_backend": 1,
}

# DeepSpeed's properties: classes, or functions that create a tensor from a list.
PROPERTIES = (
    "Stream",
    "Event",
    "BFloat16Tensor",
    "ByteTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
)

# Names with which DeepSpeed selects an accelerator. DeepSpeed uses its own modules because importing them from here fails.
NEVER = ("get_accelerator", "set_accelerator", "abstract_accelerator", "real_accelerator", "cuda_accelerator")


@pytest.mark.parametrize("name", METHODS)
def test_deepspeed_methods_are_public_functions(name: str) -> None:
    assert name in acc.__all__
    function = getattr(acc, name)
    assert callable(function)
    inspect.signature(function).bind(*range(METHODS[name]))


@pytest.mark.parametrize("name", PROPERTIES)
def test_deepspeed_properties_are_public_callables(name: str) -> None:
    assert name in acc.__all__
    assert callable(getattr(acc, name))


@pytest.mark.parametrize("name", NEVER)
def test_names_of_deepspeeds_modules_are_not_importable(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(acc, name)
    with pytest.raises(ImportError):
        exec(f"from accelerator import {name}")
    with pytest.raises(ImportError):
        exec(f"import accelerator.{name}")


def test_only_listed_public_names_equal_submodule_names() -> None:
    import pkgutil

    submodules = {module.name for module in pkgutil.iter_modules(acc.__path__)}
    assert submodules & set(acc.__all__) == {"random", "checkpointing", "simulation"} & submodules
    assert not [name for name in submodules if name.endswith("_accelerator")]
