"""A rehearsal says where values that it does not have mattered, and where they did not it says nothing."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [needs_cuda_torch, pytest.mark.xdist_group("known values")]

PRELUDE = """
import torch._dynamo
import torch
import json, sys
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x = torch.randn(64, 256, device="cuda")
y = torch.randint(10, (64,), device="cuda")
model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss():
    return F.cross_entropy(model(x), y)
def step(scaler=None):
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return value
"""
# Each program has the definitions of the prelude to itself.
RUN = """
import torch._dynamo
import torch
import json, sys

prelude, programs = json.loads(sys.argv[1])
found = {}
for name, code in programs.items():
    names, failure = {}, []
    try:
        exec(compile(prelude, "prelude", "exec"), names)
        exec(compile(code, "program", "exec"), names)
    except BaseException as error:
        failure = [(repr(error), None, 1)]
    missing_values = sys.modules["_accelerator_simulation._inside.rehearsal.missing_values"]
    found[name] = [*missing_values.noted(), *failure]
    missing_values.forget_noted()
print(json.dumps(found))
"""


def notes(programs: Mapping[str, str]) -> dict[str, list[Any]]:
    """Run programs in one process and return the places of each: op, line of the program from 1 on, and count."""
    dedented = {name: textwrap.dedent(code) for name, code in programs.items()}
    environment = simulated_environment(gpus=1, compute=False, memory="80GiB")
    output = support.run(RUN, environment, json.dumps([PRELUDE, dedented]))
    return {name: [_with_number(*place) for place in found] for name, found in json.loads(output.splitlines()[-1]).items()}


def _with_number(op: str, place: str | None, count: int) -> tuple[str, int | str | None, int]:
    """Replace a line of the program by its number. A failure has no line, and other lines stay as they are."""
    file, _, line = str(place).partition(" ")[0].rpartition(":")
    return op, int(line) if file == "program" else place, count


STEERED = {
    "LBFGS": (
        """
        optimizer = torch.optim.LBFGS(model.parameters())
        def closure():
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value
        optimizer.step(closure)
        """,
        [("aten::item", 8)],
    ),
    "selection": ("x[x > 0] = 1\nx[x > 0]", [("aten::index.Tensor", 2)]),
    "stop when a loss is reached": ("for _ in range(3):\n    if step().item() < 0.1:\n        break", [("aten::item", 2)]),
    "best loss": ("best = float('inf')\nfor _ in range(2):\n    best = min(best, step().item())", [("aten::item", 3)]),
    "condition": ("if loss() > 1:\n    pass", [("aten::item", 1)]),
    "experts": (
        """
        experts = model(x).topk(2).indices
        counts = experts.flatten().bincount(minlength=10)
        parts = torch.empty(128, 256, device="cuda").split(counts.tolist())
        """,
        [("aten::bincount", 3), ("aten::tolist", 4)],
    ),
    "tokens until the last": (
        """
        for _ in range(3):
            token = model(x[:1]).argmax(-1).cpu()
            if token == 3:
                break
        """,
        [("aten::item", 4)],
    ),
    "boxes": (
        "boxes = x.sigmoid()\nkept = (boxes > 0.5).nonzero()\nunique = x.long().unique()",
        [("aten::nonzero", 2), ("aten::_unique2", 3)],
    ),
    "norms that steer": (
        """
        norm = torch.linalg.vector_norm(x)
        for value in (norm, norm.item()):
            if value > 1 or value <= 0:
                pass
            if value - 1 < 0 or -value < 0 or value * -1.0 < 0:
                pass
            if value + x.mean() < 0:
                pass
        norm[()] = x.sum()
        if norm < 0:
            pass
        pair = torch.tensor([-1.0, 1.0], device="cuda")
        pair[1] = x.norm()
        if (pair < 0).any():
            pass
        norms = torch.stack([x.norm(), x.norm()])
        norms[0] = -1.0
        if (norms < 0).any() or (x.norm() ** torch.tensor([2.0, 1.0], device="cuda") - 1 < 0).any():
            pass
        if torch.where(x[0, :2] > 0, torch.tensor([-1.0, -1.0], device="cuda"), torch.exp(x[0, :2])).sum() < 0:
            pass
        if x.norm().log() < 0 or x.norm().neg_() < 0 or (x.norm() * torch.tensor(-2.0, device="cuda")) < 0:
            pass
        """,
        [("aten::item", line) for line in (4, 6, 8, 11, 15, 19, 21, 23)],
    ),
    "size of a mean": ("size = round(x.mean().item())\nn = int(x.sum())", [("aten::item", 1), ("aten::item", 2)]),
    "decisions of NumPy": ("scores = x.cpu().numpy()\nbest = x.argmax().cpu().numpy()", [("numpy", 1), ("numpy", 2)]),
    "memory that an extension writes": (
        "sizes = torch.empty(4, dtype=torch.int32, device='cuda')\nsizes.tolist()",
        [("aten::tolist", 2)],
    ),
    "conditions of the host": (
        "scores = x.cpu()\nif (scores.softmax(-1) > 0.5).any():\n    scores[scores > 0.5]",
        [("aten::item", 2)],
    ),
    "selections of the host": (
        """
        scores = x.cpu()
        scores[scores > 0.5]
        scores.nonzero()
        torch.masked_select(scores, scores > 0.5)
        x.argmax(-1).cpu().bincount(minlength=10)
        scores.unique()
        if scores.topk(2).indices[0, 0] == 3:
            pass
        scores[torch.tensor([0, 1])]  # of known indices
        """,
        [
            ("aten::index.Tensor", 3),
            ("aten::nonzero", 4),
            ("aten::masked_select", 5),
            ("aten::bincount", 6),
            ("aten::_unique2", 7),
            ("aten::item", 8),
        ],
    ),
    "memory that a program resizes": (
        """
        torch.full((4,), 7.0, device="cuda")  # whose memory the storage gets
        storage = torch.UntypedStorage(0, device="cuda")
        assert storage.resize_(512) is storage
        if torch.empty(0, device="cuda").set_(storage, 0, (4,)).sum() > 0:
            pass
        """,
        [("aten::item", 5)],
    ),
    "equal": ("torch.equal(x, x + 1)", [("aten::equal", 1)]),
}
NOT_STEERED = {
    "printed losses": """
        total = 0.0
        for _ in range(2):
            value = step()
            total += value.item()
            print(value, f"{value:.3f} {value.item():.3f} {round(value.item(), 2)}", value.tolist(), x)
            print(value.detach().cpu().numpy())
        print(total / 2, json.dumps({"loss": total}), sum([total, total]))
        """,
    "clipped gradients": """
        loss().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(norm.item(), norm.cpu())
        """,
    "GradScaler": """
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                value = loss()
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 65536
        """,
    "finite numbers": """
        value = step()
        large = torch.randn(2**21, device="cuda")
        if not torch.isfinite(value) or torch.isnan(large).any() or (large == float("inf")).any() or not large.isfinite().all():
            raise SystemExit("not finite")
        import math
        if not math.isfinite(value.item()) or value.item() == float("inf") or (value != value):
            raise SystemExit("not finite")
        """,
    "norms that are checked": """
        def mask_infinite(norm):
            norm.masked_fill_(norm.isnan().logical_or(norm.isinf()), torch.tensor(-1.0, device="cuda"))
            return norm
        def is_invalid(norm):
            if torch.is_tensor(norm):
                return bool((~torch.isfinite(norm) | (norm < 0)).any())
            return norm < 0 or norm == -1 or not norm >= 0
        loss().backward()
        norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters()]
        norm = mask_infinite(torch.stack(norms).pow(2.0).sum().float().pow(0.5))
        group = torch.stack([torch.where(norm >= 0, norm * 256.0, norm), torch.tensor(0.0).cuda()])
        invalid = (~torch.isfinite(group) | (group < 0)).any()
        combined = torch.linalg.vector_norm(group)
        combined = torch.where(invalid, torch.full_like(combined, float("inf")), combined)
        first, second = combined.cpu(), combined.cpu()  # ops of the host are followed from the first copy on
        if is_invalid(combined / 256) or is_invalid(combined.item() ** 2.0) or is_invalid(first) or is_invalid(second):
            raise SystemExit("a norm is not negative")
        total = 0.0
        for each in norms:
            total += each.item() ** 2
        if is_invalid(total ** 0.5) or is_invalid(x.abs().max()) or -1 > combined.item():
            raise SystemExit("nor is what is made of norms")
        """,
    "accuracy": """
        correct = 0
        for _ in range(2):
            correct += (model(x).argmax(1) == y).sum().item()
        print(f"{correct} of {len(y)}: {100 * correct / len(y):.1f} %")
        """,
    "accuracy on the host": """
        correct = (model(x).argmax(1).cpu() == y.cpu()).sum()
        print(correct.item() / len(y), f"{correct.item()}")
        """,
    "lengths": """
        lengths = torch.tensor([3, 5, 2]).cuda()
        longest = int(lengths.max())
        mask = torch.arange(longest, device="cuda") < lengths[:, None]
        torch.randn(3, 5, 8, device="cuda")[mask]
        ends = torch.empty(4, dtype=torch.int32, device="cuda")
        ends[0] = 0
        ends[1:] = lengths.cumsum(0)
        assert ends.tolist() == [0, 3, 8, 10] and mask.sum().item() == 10
        """,
    "fused and capturable optimizers": """
        for options in ({"fused": True}, {"capturable": True}, {"foreach": False}):
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            for _ in range(2):
                step()
        assert optimizer.state_dict()["state"][0]["step"].item() == 2
        """,
    "checkpoint on the host": """
        import copy, io
        saved = {name: value.cpu() for name, value in model.state_dict().items()}
        torch.save(saved, io.BytesIO())
        model.load_state_dict(saved)
        """,
    "a buffer on the host": """
        on_host = torch.empty(())
        on_host.copy_(model(x).sum())
        on_host.copy_(torch.ones((), device="cuda"))
        if on_host != 1:
            raise SystemExit("the last value is known")
        """,
    "distributions": """
        noise = torch.distributions.Normal(model(x), torch.exp(model(x))).rsample()
        action = torch.distributions.Categorical(logits=model(x)).sample()
        torch.distributions.Normal(torch.zeros(2, device="cuda"), torch.rand(2, device="cuda") + 0.1).log_prob(noise[0, :2])
        try:
            torch.distributions.Normal(torch.zeros(2, device="cuda"), torch.tensor([1.0, -1.0]).cuda())
        except ValueError:
            pass
        else:
            raise SystemExit("values that are known are validated")
        """,
    "attention with a mask": """
        layer = nn.TransformerEncoderLayer(256, 4, batch_first=True, device="cuda")
        mask = torch.zeros(4, 16, dtype=torch.bool, device="cuda")
        mask[:, 12:] = True
        nn.TransformerEncoder(layer, 2)(torch.randn(4, 16, 256, device="cuda"), src_key_padding_mask=mask).sum().backward()
        layer.eval()(torch.randn(4, 16, 256, device="cuda"), src_key_padding_mask=mask)
        """,
    "recurrent nets and losses of sequences": """
        lengths = torch.tensor([16, 12, 3])
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 16, 8, device="cuda"), lengths, batch_first=True)
        nn.utils.rnn.pad_packed_sequence(nn.LSTM(8, 8).cuda()(packed)[0])
        logs, labels = torch.randn(16, 3, 15, device="cuda"), torch.randint(1, 15, (3, 4), device="cuda")
        F.ctc_loss(logs.log_softmax(2), labels, lengths.cuda(), torch.tensor([4, 4, 1]).cuda())
        """,
    "small numbers": """
        boxes = torch.tensor([[1.0, 2.0, 3.0, 5.0]]).cuda() * 2
        assert (boxes[:, 2:] > boxes[:, :2]).all() and boxes.tolist() == [[2, 4, 6, 10]]
        noise = torch.rand(8, device="cuda").clamp(0.1, 0.9)
        if noise.max() > 1 or noise.std().item() <= 0:
            raise SystemExit("random numbers are in a range")
        if torch.arange(4.0, device="cuda").sum() != 6 or torch.bernoulli(torch.ones(4, device="cuda")).sum() != 4:
            raise SystemExit("ranges and probabilities are known")
        """,
}


# The memory of these must not be that of another program, and one is a slow test.
ALONE = {"memory that an extension writes", "memory that a program resizes", "LBFGS"}


@cache
def notes_together() -> dict[str, list[Any]]:
    return notes({name: code for name, (code, _) in STEERED.items() if name not in ALONE} | NOT_STEERED)


@pytest.mark.parametrize("name", support.sample(STEERED, *(STEERED.keys() - {"LBFGS"})))
def test_values_that_steer_are_told(name: str) -> None:
    code, expected = STEERED[name]
    found = [place[:2] for place in (notes({name: code}) if name in ALONE else notes_together())[name]]
    assert [place for place in found if place in expected] == expected
    assert {line for _, line in found} == {line for _, line in expected}


def test_each_place_is_told_with_its_count() -> None:
    """What asks a number that is not known for its value. Arithmetic and text do not."""
    reads = (
        *("float(x.mean())", "value == 1", "value != 1", "value >= 1", "value <= 1", "value > 1", "1 > value", "bool(value)"),
        *("int(value)", "math.floor(value)", "math.ceil(value)", "math.trunc(value)", "round(value)", "not number"),
        *("number > 1", "x.sum(0).tolist()[1] < 1", "-abs(value) + 1 < 1", "divmod(number, 2)[1] == 1"),
    )
    begin = "import math\nvalue, number = x.mean().item(), (x > 1).sum().item()\n"
    found = notes({"": begin + "\n".join(reads) + "\nfor _ in range(3):\n    value > 1\n"})[""]
    assert found == [*(("aten::item", line, 1) for line in range(3, 3 + len(reads))), ("aten::item", 4 + len(reads), 3)]


@pytest.mark.parametrize("name", NOT_STEERED)
def test_values_that_do_not_steer_are_not_told(name: str) -> None:
    assert notes_together()[name] == []


def test_numbers_that_are_not_known_are_numbers() -> None:
    support.run(
        """
        import torch._dynamo
        import torch
        import copy, json, math, pickle
        value = torch.empty(1000, device="cuda").sum().item()
        for other in (value, value + 1, 1 - value, value * 2, -value, abs(value), round(value, 2), sum([value]), value / 3):
            assert isinstance(other, float) and type(other) is not float
        assert type(pickle.loads(pickle.dumps(value))) is float and type(copy.copy(value)) is float
        assert (str(value), f"{value:.1f}", json.dumps([value]), math.exp(value)) == ("0.0", "0.0", "[0.0]", 1.0)
        assert torch.full((2,), value).tolist() == [0.0, 0.0] and {value: 1}[0.0] == 1
        number = (torch.empty(1000, device="cuda") > 1).sum().item()
        assert isinstance(number, int) and type(number) is not int and isinstance(number / 2, float) and [1, 2][number] == 1
        notes = __import__("sys").modules["_accelerator_simulation._inside.rehearsal.missing_values"]
        """,
        simulated_environment(gpus=1, compute=False),
    )


def test_large_unsigned_numbers_are_read() -> None:
    support.run(
        """
        import torch._dynamo
        import torch
        number = torch.tensor([2**63 + 5], dtype=torch.uint64)
        assert number.item() == number.cuda().item() == 2**63 + 5
        assert torch.tensor([7], dtype=torch.uint64).cuda().item() == 7
        """,
        simulated_environment(gpus=1, compute=False),
    )


def test_ranks_tell_together(tmp_path: Path) -> None:
    """The values of collectives are known if those are that the rank passes."""
    support.run(
        """
        import torch._dynamo
        import torch, os, sys
        import torch.distributed as dist
        rank = int(os.fork() == 0)
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
        counts = torch.tensor([rank, rank + 2]).cuda()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        assert received.tolist() == [2 * rank, 2 * rank + 1]
        every = [torch.empty_like(counts) for _ in range(2)]
        dist.all_gather(every, counts)
        assert [each.tolist() for each in every] == [[0, 2], [1, 3]]
        def new(count=2):  # whose values are known only if a collective writes such
            return torch.empty(count, dtype=torch.int64, device="cuda")
        parts = list(counts[:, None])
        def check(tensor, expected):
            assert tensor.tolist() == expected, (tensor.tolist(), expected)
        received = new(4)
        dist.all_gather_into_tensor(received, counts)
        check(received, [0, 2, 1, 3])
        for target, source in ((new(1), counts), (new(1), parts)):
            (dist.reduce_scatter_tensor if source is counts else dist.reduce_scatter)(target, source)
            check(target, [1 if rank == 0 else 5])
        target = [new(1), new(1)]
        dist.all_to_all(target, parts)
        check(torch.cat(target), [2 * rank, 2 * rank + 1])
        target = [new(), new()] if rank == 0 else None
        dist.gather(counts, target)
        if rank == 0:
            check(torch.cat(target), [0, 2, 1, 3])
        received = new(1)
        dist.scatter(received, parts if rank == 1 else None, src=1)
        check(received, [1 + 2 * rank])
        overflow = torch.isinf(torch.empty(1000, device="cuda")).any().byte()
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        assert overflow.item() == 0
        missing_values = sys.modules["_accelerator_simulation._inside.rehearsal.missing_values"]
        assert missing_values.noted() == [], missing_values.noted()
        unknown = torch.empty(1000, device="cuda").topk(2).indices
        received = new()
        dist.all_to_all_single(received, unknown)
        received.tolist()
        assert [op for op, *_ in missing_values.noted()] == ["aten::tolist"]
        # Nothing is known of what another rank sends.
        received = torch.zeros_like(counts)
        if rank == 0:
            dist.send(counts, 1)
        else:
            dist.recv(received, 0)
            assert int(received[1]) == 2
        assert [op for op, *_ in missing_values.noted()] == ["aten::tolist", "aten::item"][: 1 + rank]
        dist.destroy_process_group()
        if rank == 0:
            assert os.wait()[1] == 0
        """,
        simulated_environment(gpus=2, compute=False, state=str(tmp_path / "state")),
        str(tmp_path / "store"),
    )
