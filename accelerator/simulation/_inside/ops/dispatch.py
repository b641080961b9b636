"""How a kernel override runs: CPU aliases of the arguments, the CPU's kernel, CUDA tensors for the results."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import assertions, bindings, runtime
from .aliases import FreedError
from .bindings import DispatchKey
from .call import Call, tensors_in
from .engine import engine
from .error_texts import accepted_arguments, computes_wider, cuda_error
from .op import Op
from .runtime import has_faults, streams_need_checks
from .schemas import operator_of

_Tensor = torch.Tensor
_NOT_RESIZABLE = "not resizable"
_CPU_KEY = DispatchKey.CPU


def _run(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op.is_foreach and spans_devices(args[0]):
        results = run_each(lambda *each, **named: _run(op, each, named), args, kwargs)
        return results if op.results else None
    call = Call(op)
    with bindings.without_torch_function():
        try:
            cpu_args, cpu_kwargs = call.convert(args, kwargs)
        except FreedError:
            _fail_by_access(call)
            raise AssertionError("an illegal memory access raised no error") from None
        needs_check = streams_need_checks.value or has_faults()
        if needs_check and call.device is not None and runtime.wait_unless_capturing(call.device):
            return call.record(args, kwargs)
        if op.waits_for_stream(args, kwargs):
            # torch's own wait, for set_sync_debug_mode and the trace of synchronizations.
            torch.cuda.current_stream(call.device).synchronize()
        state = call.save_state(args, kwargs)
        try:
            try:
                computed = call.compute(cpu_args, cpu_kwargs)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                if call.device is not None and assertions.is_failed(op.short_name, error):
                    computed = _fail_on_device(call, error, cpu_args, cpu_kwargs)
                    return call.results(computed, args, kwargs)
                if (accepted := accepted_arguments(op.short_name, error, cpu_args)) is not None:
                    return call.results(call.compute(accepted, cpu_kwargs), args, kwargs)
                widens = computes_wider(op.short_name, error, cpu_args)
                if not widens and (not call.written or _NOT_RESIZABLE not in str(error)):
                    raise cuda_error(op.short_name, error) from None
                # The op has warned that it enlarges an argument; the second run has arguments that can grow.
                call.undraw()
                call = Call(op, may_resize=not widens, widens=widens)
                cpu_args, cpu_kwargs = call.convert(args, kwargs)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    computed = call.compute(cpu_args, cpu_kwargs)
            results = call.results(computed, args, kwargs)
            if needs_check and has_faults() and call.device is not None:
                runtime.flip_bit(results, call.device)
            return results
        except Exception:
            for alias, values in state:
                alias.copy_(values)
            call.undraw()
            raise


def _fail_by_access(call: Call) -> None:
    """Break the context, as a kernel does that reads or writes a storage that was freed, and raise torch's error.

    A GPU raises it at the next wait.
    """
    assert call.device is not None
    print(f"{call.op.name} accesses {call.argument} on {call.device}, whose memory was freed", file=sys.stderr, flush=True)
    runtime.break_context(call.device, runtime.ILLEGAL_ADDRESS)
    runtime.raise_error(call.device)


def _fail_on_device(call: Call, error: Exception, cpu_args: list[Any], cpu_kwargs: dict[str, Any]) -> Any:
    """Break the context, and return results of other values: nobody can read them, but torch needs them."""
    assert call.device is not None
    name = call.op.short_name
    computed, problem = None, None
    if not name.startswith(("_assert_async", "masked_scatter")):  # which make no new tensors
        try:
            call.undraw()  # before the context is broken, whose generators cannot be read
            computed = call.compute(assertions.with_valid_values(cpu_args), assertions.with_valid_values(cpu_kwargs))
        except (RuntimeError, IndexError) as invalid:  # there are no valid indices, of a dimension without elements
            problem = invalid
    assertions.fail(name, error, call.device)
    if problem is not None:
        runtime.raise_error(call.device)
        raise problem
    return computed


def spans_devices(tensors: Any) -> bool:
    """Return whether a value is a list of CUDA tensors on several devices."""
    return isinstance(tensors, list) and len({tensor.device for tensor in tensors if tensor.is_cuda}) > 1


def run_each(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Run an op over lists once for each item, as torch does if the tensors are on several devices; return all results."""
    count = len(args[0])

    def item(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, list) and len(value) == count else value

    results: list[Any] = []
    for index in range(count):
        result = run(*(item(value, index) for value in args), **{name: item(value, index) for name, value in kwargs.items()})
        results += result or ()
    return results


def kernel_override(name: str, key: DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of an op. It handles all calls; with the engine, those that the engine does not handle."""
    op: Op | None = None  # described at the first call: to describe every op would take longer than many programs run

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal op
        if engine is not None:
            engine.check_fork()
        if op is None:
            op = _describe(name, key)
        return _run(op, args, kwargs)

    return run


def _describe(name: str, key: DispatchKey) -> Op:
    op = Op(name, key)
    if engine is not None:
        engine.describe(op)
    return op


def override_with_own_kernel(
    library: Any, name: str, override: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Override the kernels of another library's op with a function that may call them.

    Args:
        library: A library of torch, with which the override is registered.
        name: The name of the op.
        override: Gets the op's own kernel for the device of its arguments, which autograd no longer records, and the arguments.
    """
    # The dispatcher visits this key for tensors of every device, before the key of the device.
    below = bindings.keys_after(DispatchKey.BackendSelect)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return override(functools.partial(operator_of(name).redispatch, keyset & below), args, kwargs)

    library.impl(name, DispatchKey.BackendSelect, run, True)


def override_library_op(library: Any, name: str) -> None:
    """Let the CPU's kernel of another library's op compute if its CUDA kernel launches one that cannot run, from then on.

    The first time says so on stderr. Autograd knows nothing of what such ops change, on GPUs either: version counters stay.

    Args:
        library: A library of torch, with which the override is registered.
        name: The name of the op.
    """
    compute = kernel_override(name)
    is_refused = False

    def run(own_kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal is_refused
        if not any(tensor.is_cuda for tensor in tensors_in((args, kwargs))):
            return own_kernel(*args, **kwargs)
        if not is_refused:
            result = None
            with runtime.noting_refusals() as note:
                try:
                    result = own_kernel(*args, **kwargs)
                except RuntimeError:  # of a program that checks its launches
                    if not note.value:
                        raise
            if not note.value:
                return result
            is_refused = True
            print(f"the CPU's kernel of {name} computes: {note.value.decode(errors='replace')}", file=sys.stderr, flush=True)
        return compute(*args, **kwargs)

    override_with_own_kernel(library, name, run)


def copy_override(key: DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of ``copy_``: torch's own kernel if it copies bytes, else the CPU's.

    torch's kernel copies on streams and between devices.
    """
    compute = kernel_override("aten::copy_", key)
    by_key = bindings.get_overload("aten::copy_", "")[1]
    torch_key = DispatchKey.CompositeExplicitAutograd
    is_described = False

    def run(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        nonlocal is_described
        if engine is not None:
            engine.check_fork()
        if not is_described:
            is_described = True
            _describe("aten::copy_", key)
        if not isinstance(src, _Tensor):
            return self.fill_(src)
        if self.is_cuda and src.is_cuda and not _have_same_layout(self, src):
            compute(self, src.expand_as(self), non_blocking)
        else:
            device = self.device if self.is_cuda else src.device
            if streams_need_checks.value:
                # The runtime does a copy on one device when the work before it ends.
                (runtime.check if self.device == src.device else runtime.wait_for_pending)(device)
            if has_faults():
                runtime.begin_op(device)
                if streams_need_checks.value and runtime.has_bit_to_flip(device):
                    runtime.wait_for_pending(device)  # so that the copy is not later than the flip
            by_key(torch_key, self, src, non_blocking)
            if has_faults():
                runtime.flip_bit(self, device)
        return self

    return run


def _have_same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether a copy from one tensor to the other copies bytes in their order."""
    return (
        first.dtype == second.dtype
        and first.size() == second.size()
        and first.is_contiguous()
        and second.is_contiguous()
        and not (first.is_neg() or second.is_neg() or first.is_conj() or second.is_conj())
        and first.data_ptr() != 0
        and second.data_ptr() != 0
    )
