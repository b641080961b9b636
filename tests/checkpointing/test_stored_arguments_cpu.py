"""Unit tests of the storage of a checkpoint's arguments."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from accelerator.checkpointing import arguments, bindings, debug_checks, partition
from accelerator.checkpointing.arguments import KeptArguments, PackedByHook, StoredArguments, keep_arguments
from accelerator.checkpointing.buffers import Buffers
from accelerator.checkpointing.configuration import Settings
from accelerator.checkpointing.groups import SINGLE_RANK
from accelerator.checkpointing.partition import StoredActivation

KEPT = Settings()
STORED = Settings(checkpoint_in_cpu=True)
IDENTITY: Any = (lambda tensor: tensor, lambda tensor: tensor)
META = torch.device("meta")

needs_reported_hooks = pytest.mark.skipif(bindings.innermost_hooks is None, reason="torch does not report the innermost hooks")


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return settings with which even a single rank copies each activation, into a buffer."""
    monkeypatch.setattr(partition, "partition_group", lambda settings: SINGLE_RANK)
    return Settings(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3, buffers=Buffers(3))


def edited(name: str) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{name} of a checkpointed function"
    )


def assert_edit_raises(kept: Any, name: str) -> None:
    with pytest.raises(RuntimeError) as error:
        kept.restore()
    assert str(error.value) == edited(name)


@needs_reported_hooks
def test_keep_arguments_stores_only_if_needed() -> None:
    assert isinstance(keep_arguments((1,), {}, KEPT, None, nested=False), KeptArguments)
    for settings, hooks in ((KEPT, IDENTITY), (STORED, None), (STORED, IDENTITY)):
        assert isinstance(keep_arguments((1,), {}, settings, hooks, nested=False), StoredArguments)


def test_arguments_are_stored_if_torch_does_not_report_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "innermost_hooks", None)
    tensor = torch.ones(2, requires_grad=True) * 1
    stored: Any = keep_arguments((tensor, 7), {}, KEPT, None, nested=False)
    assert isinstance(stored, StoredArguments)
    (restored, seven), _ = stored.restore()
    assert torch.equal(restored, tensor)
    assert seven == 7
    # Autograd has saved the tensor and detects the edit.
    tensor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stored.restore()


def test_autograd_saves_tensors_without_using_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "innermost_hooks", None)
    with torch.device("meta"):
        stored: Any = keep_arguments((torch.ones(2, device="cpu"),), {}, KEPT, None, nested=False)
    assert stored._saved._output.device.type == "cpu"
    with pytest.raises(AssertionError) as error:
        arguments._SaveTensors.backward(None)
    assert str(error.value) == "this operation only saves tensors and has no gradient"


def test_settings_and_hooks_reach_store_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(arguments, "store_activation", lambda *passed: calls.append(passed))
    tensor = torch.ones(2)
    for nested in (False, True):
        stored: Any = keep_arguments((tensor,), {}, STORED, IDENTITY, nested=nested)
        assert isinstance(stored._tensors[0], PackedByHook)
    assert len(calls) == 1  # nested checkpoints neither partition nor offload
    assert calls[0][0] is tensor
    assert calls[0][1:] == (STORED, 0, IDENTITY)


@needs_reported_hooks
@pytest.mark.parametrize("stored", [lambda tensor: KeptArguments((tensor,), {}), lambda tensor: stored_argument(tensor)])
def test_only_tensors_with_a_version_can_be_found_edited(stored: Callable[[torch.Tensor], Any]) -> None:
    with torch.inference_mode():
        without_version = torch.ones(2)
        kept = stored(without_version)
        without_version.add_(1)
    assert kept.restore()[0][0] is without_version
    with_version = torch.ones(2)
    kept = stored(with_version)
    with_version.add_(1)
    with pytest.raises(RuntimeError, match="argument 0"):
        kept.restore()


@pytest.mark.parametrize("how", ["in a buffer", "by a hook", "by autograd"])
def test_attributes_of_tensors_are_restored(how: str, buffered: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "by autograd":
        monkeypatch.setattr(bindings, "innermost_hooks", None)
    hooks = (torch.clone, torch.clone) if how == "by a hook" else None
    tensors: list[Any] = [torch.ones(2), torch.ones(2), torch.ones(2)]
    for tensor, tag in zip(tensors, ("first", None, "third"), strict=True):
        if tag is not None:
            tensor.tag = tag
    stored = StoredArguments(tuple(tensors), {}, buffered if how == "in a buffer" else KEPT, hooks, nested=False)
    stored.forward_ended()
    for _ in range(2):
        restored = stored.restore()[0]
        assert all(one is not other for one, other in zip(restored, tensors, strict=True)) or how == "by autograd"
        assert [getattr(each, "tag", None) for each in restored] == ["first", None, "third"]


def stored_argument(tensor: torch.Tensor) -> StoredArguments:
    return StoredArguments((tensor,), {}, KEPT, None, nested=False)


class TestKeptArguments:
    def test_plain_arguments_are_the_same_objects(self) -> None:
        args = (torch.ones(2), 3, "x")
        kept = KeptArguments(args, {})
        restored, kwargs = kept.restore()
        assert restored is args
        assert kwargs == {}
        assert kept.devices == set()
        assert kept.stored == ()
        assert kept.prefetch() is None

    @pytest.mark.parametrize("position", ["argument", "keyword", "list"])
    def test_devices_exclude_the_cpu(self, position: str) -> None:
        tensor = torch.ones(2, device="meta")
        args, kwargs = {"argument": ((tensor,), {}), "keyword": ((), {"x": tensor}), "list": (([tensor],), {})}[position]
        assert KeptArguments(args, kwargs).devices == {META}

    def test_containers_are_copied_at_storage_and_restore(self) -> None:
        tensor = torch.ones(2)
        args, kwargs = ([tensor], 1), {"x": {"y": tensor}}
        kept = KeptArguments(args, kwargs)
        args[0].clear()
        kwargs["x"].clear()
        for _ in range(2):
            (items, one), named = kept.restore()
            assert items[0] is tensor
            assert one == 1
            assert named["x"]["y"] is tensor
            items.clear()
            named["x"].clear()

    @pytest.mark.parametrize(
        ("args", "kwargs", "names"),
        [
            (lambda a, b: (a, 1, b), lambda a, b: {}, ["argument 0", "argument 2"]),
            (lambda a, b: (1, [a, b]), lambda a, b: {}, ["argument 1[0]", "argument 1[1]"]),
            (lambda a, b: (a,), lambda a, b: {"x": b}, ["argument 0", "argument x"]),
        ],
    )
    @pytest.mark.parametrize("in_forward", [False, True])
    def test_error_names_the_edited_tensor(self, args: Any, kwargs: Any, names: list[str], in_forward: bool) -> None:
        for i, name in enumerate(names):
            tensors = torch.ones(2), torch.ones(2)
            kept = KeptArguments(args(*tensors), kwargs(*tensors))
            if not in_forward:
                kept.forward_ended()
            tensors[i].add_(1)
            if in_forward:
                kept.forward_ended()
            assert_edit_raises(kept, name)

    @pytest.mark.parametrize("release", ["edited", "released"])
    def test_nothing_refers_to_released_tensors(self, release: str) -> None:
        tensor = torch.ones(2)
        kept = KeptArguments((tensor,), {"x": [tensor]})
        reference = weakref.ref(tensor)
        kept.forward_ended()
        assert kept.restore()[0] == (tensor,)
        if release == "edited":
            tensor.add_(1)
            kept.forward_ended()
            assert_edit_raises(kept, "argument 0")
        else:
            kept.release()
            assert kept.restore() == ((), {})
        del tensor
        gc.collect()
        assert reference() is None


class TestStoredArguments:
    def stored(self, *args: Any, settings: Settings = STORED, hooks: Any = None, nested: bool = False, **kwargs: Any) -> Any:
        return StoredArguments(args, kwargs, settings, hooks, nested=nested)

    def test_repeated_tensor_is_restored_as_one_object(self) -> None:
        tensor, items = torch.ones(2), [torch.zeros(1)]
        stored = self.stored(tensor, items, 5, tensor, x=tensor, y=items)
        assert len(stored._tensors) == 2
        args, kwargs = stored.restore()
        assert args[0] is args[3] is kwargs["x"]
        assert torch.equal(args[0], tensor)
        assert args[2] == 5
        assert torch.equal(args[1][0], items[0])
        assert args[1] is kwargs["y"]
        assert args[1] is not items

    def test_devices_exclude_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arguments, "store_activation", lambda *passed: None)
        assert self.stored(torch.ones(1), [torch.ones(1, device="meta")]).devices == {META}
        assert self.stored(x=torch.ones(1, device="meta")).devices == {META}
        assert self.stored(torch.ones(1)).devices == set()

    @needs_reported_hooks
    @pytest.mark.parametrize("in_forward", [False, True])
    def test_error_names_the_edited_tensor(self, in_forward: bool) -> None:
        tensor = torch.ones(2)
        stored = self.stored(torch.ones(1), x=[tensor])
        tensor.add_(1)
        if in_forward:
            reference = weakref.ref(tensor)
            stored.forward_ended()
            del tensor
            gc.collect()
            assert reference() is None
        assert_edit_raises(stored, "argument x[0]")

    @needs_reported_hooks
    def test_forward_ended_keeps_an_unchanged_tensor(self) -> None:
        tensor = torch.ones(2)
        stored = self.stored(tensor)
        stored.forward_ended()
        assert stored.restore()[0][0] is tensor
        stored.release()
        assert stored._tensors == []

    @pytest.mark.parametrize("requires_grad", [False, True])
    @pytest.mark.parametrize("unpacked", ["same", "detached", "fresh"])
    def test_hooks_pack_and_unpack(self, requires_grad: bool, unpacked: str) -> None:
        tensor = torch.ones(2, requires_grad=requires_grad)
        restore = {"same": lambda p: p[1], "detached": lambda p: p[1].detach(), "fresh": lambda p: (p[1] * 2).detach()}[
            unpacked
        ]
        stored = self.stored(tensor, settings=KEPT, hooks=(lambda each: ("packed", each), restore))
        assert stored._tensors[0]._packed == ("packed", tensor)
        restored = stored.restore()[0][0]
        assert restored.requires_grad is requires_grad
        assert restored.tolist() == ([2.0, 2.0] if unpacked == "fresh" else [1.0, 1.0])
        if unpacked == "same":
            assert restored is tensor

    def test_restore_clears_requires_grad_set_by_a_hook(self) -> None:
        stored = self.stored(torch.ones(2), settings=KEPT, hooks=(lambda each: each, lambda each: each.requires_grad_()))
        assert not stored.restore()[0][0].requires_grad

    def test_inference_tensors_are_kept_without_reported_hooks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bindings, "innermost_hooks", None)
        with torch.inference_mode():
            tensor = torch.ones(2)
        plain = torch.zeros(3)
        args, _ = self.stored(tensor, plain, torch.ones(1), settings=KEPT).restore()
        assert args[0] is tensor
        assert [each.tolist() for each in args] == [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]]

    def test_activations_take_slots_in_order(self, buffered: Settings) -> None:
        one, two = torch.ones(2, requires_grad=True), torch.zeros(3)
        stored = self.stored(one, torch.arange(4), two, settings=buffered)
        assert buffered.buffers is not None
        assert [position for position, _ in buffered.buffers._buffers] == [0, 1]
        assert [type(each) is StoredActivation for each in stored._tensors] == [True, False, True]
        assert len(stored.stored) == 2
        assert stored.stored[0] is one
        assert stored.stored[1] is two
        args, _ = stored.restore()
        assert [each.tolist() for each in args] == [[1.0, 1.0], [0, 1, 2, 3], [0.0, 0.0, 0.0]]
        assert args[0].requires_grad
        stored.forward_ended()
        assert stored.stored == ()
        stored = self.stored(one, settings=buffered)
        stored.release()
        assert (stored.stored, stored._tensors) == ((), [])

    def test_calls_are_forwarded_to_the_activations(self, buffered: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[str] = []
        for name in ("forward_ended", "prefetch", "start_gathering"):
            monkeypatch.setattr(StoredActivation, name, lambda self, name=name: events.append(name))
        stored = self.stored(torch.ones(2), "x", torch.arange(2), settings=buffered)
        stored.prefetch()
        stored.forward_ended()
        stored.restore()
        assert events == ["prefetch", "forward_ended", "start_gathering"]

    def test_debug_mode_compares_the_arguments_of_ranks(self, buffered: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []
        monkeypatch.setattr(debug_checks, "check_same_on_all_ranks", lambda *passed: calls.append(passed))
        debug = replace(buffered, determinism_check="debug")
        tensor = torch.ones(2)
        self.stored(tensor, settings=buffered)
        self.stored(tensor, settings=debug, nested=True)
        self.stored(tensor, settings=Settings(checkpoint_in_cpu=True, determinism_check="debug"))
        assert calls == []
        self.stored("x", tensor, settings=debug)
        ((pairs, settings),) = calls
        assert settings is debug
        assert [name for _, name in pairs] == ["argument 1"]
        assert pairs[0][0] is tensor

    def test_error_releases_the_stored_tensors(self, buffered: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        store, released = arguments.store_activation, []

        def fail_at_the_second(tensor: torch.Tensor, settings: Settings, position: int, hooks: Any) -> Any:
            if position:
                raise KeyError("second")
            return store(tensor, settings, position, hooks)

        monkeypatch.setattr(arguments, "store_activation", fail_at_the_second)
        monkeypatch.setattr(StoredArguments, "release", lambda self: released.append(len(self._tensors)))
        with pytest.raises(KeyError):
            self.stored(torch.ones(2), torch.ones(2), settings=buffered)
        assert released == [1]
