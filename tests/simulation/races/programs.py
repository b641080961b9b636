"""Programs without races that use streams, events, graphs, pinned memory and threads as real ones do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS: dict[str, Callable[[], object]] = {}


def program(run: Callable[[], object]) -> Callable[[], object]:
    PROGRAMS[run.__name__] = run
    return run


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()


def _train_from_loader(workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.randn(96, 64)), batch_size=16, pin_memory=True, num_workers=workers)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (batch,) in loader:
        model(batch.cuda(non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def loader() -> None:
    _train_from_loader(0)


@program
def loader_with_workers() -> None:
    _train_from_loader(2)


@program
def prefetcher() -> None:
    batches = iter(DataLoader(TensorDataset(torch.randn(96, 64)), batch_size=16, pin_memory=True))
    side, model = torch.cuda.Stream(), _model()

    def load() -> torch.Tensor | None:
        batch = next(batches, None)
        with torch.cuda.stream(side):
            return None if batch is None else batch[0].cuda(non_blocking=True)

    following = load()
    while following is not None:
        torch.cuda.current_stream().wait_stream(side)
        present = following
        present.record_stream(torch.cuda.current_stream())
        following = load()
        model(present).sum().backward()


@program
def graph_of_training_step() -> None:
    model, x, side = _model(), torch.randn(16, 64, device="cuda"), torch.cuda.Stream()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(3):
        x.copy_(torch.randn(16, 64))
        graph.replay()
        loss.item()


@program
def graph_with_side_stream() -> None:
    x, side, graph = torch.zeros(100, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y * 2
        w = y * 3
        torch.cuda.current_stream().wait_stream(side)
        x.copy_(z + w)
    for _ in range(3):
        graph.replay()
    x.cpu()


@program
def offloading_of_torch() -> None:
    model, x = _model(), torch.randn(16, 64, device="cuda")
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            y = model(x).sum()
        y.backward()


@program
def offloading_of_checkpointing() -> None:
    from accelerator import checkpointing

    model, x = _model(), torch.randn(16, 64, device="cuda", requires_grad=True)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    try:
        for _ in range(3):
            y = checkpointing.checkpoint(model[0], x)
            checkpointing.checkpoint(model[1:], y).sum().backward()
    finally:
        checkpointing.reset()


@program
def two_gpus() -> None:
    first, second = nn.Linear(64, 64).to("cuda:0"), nn.Linear(64, 10).to("cuda:1")
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for _ in range(4):
        second(first(torch.randn(16, 64).to("cuda:0")).to("cuda:1")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def data_parallel() -> None:
    model = nn.DataParallel(_model())
    for _ in range(3):
        model(torch.randn(16, 64, device="cuda")).sum().backward()


@program
def mixed_precision() -> None:
    model, scaler = _model(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(16, 64, device="cuda")).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@program
def saving_in_the_background() -> None:
    checkpoint = __import__("torch.distributed.checkpoint", fromlist=["async_save"])
    model = _model()
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoint.async_save(model.state_dict(), checkpoint_id=folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        saved.result()


def run_all(names: list[str]) -> dict[str, list[str]]:
    """Run programs one after the other and return the reports of each."""
    from accelerator import simulation

    found: dict[str, list[str]] = {}
    for name in names:
        before = len(simulation.races())
        PROGRAMS[name]()
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        found[name] = [race.message for race in simulation.races()[before:]]
    return found
