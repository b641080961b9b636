"""``python -m tests.simulation.rehearsal.rehearsed_programs FILE [NAME...]``: the peaks of memory of small programs.

Writes the peaks of allocated and reserved memory of each program. Run it on a simulated machine that computes and on one that
does not, and compare the files. The names are those of ``PROGRAMS``, and ``module.NAME`` for modules of torch's database.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accelerator as acc
from tests.simulation.ops import operators
from tests.simulation.trainings import trainings
from tests.simulation.trainings.trainings import train

STEPS = 3  # the second step has optimizer state, the third finds all memory cached

PROGRAMS: dict[str, Callable[[], object]] = {}


def program(function: Callable[[], object]) -> Callable[[], object]:
    PROGRAMS[function.__name__] = function
    return function


def _train(name: str, make: Callable[[], nn.Module], data: Any, **options: Any) -> None:
    PROGRAMS[name] = partial(train, make, data, "cuda", steps=STEPS, **options)


def _wide_language(**options: Any) -> nn.Module:
    return trainings.Language(width=256, **options)


_images, _tokens = trainings.pictures(), trainings.tokens()
_channels_last = _images[0].to(memory_format=torch.channels_last), _images[1]
_train("images", trainings.Images, _images)
_train("images_channels_last", trainings.Images, _channels_last, wrap=lambda m: m.to(memory_format=torch.channels_last))
_train("volumes", trainings.Volumes, trainings.pictures("cpu", 2, 7, 7, 7))
for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    _train(f"{_kind.__name__.lower()}", partial(trainings.Recurrent, _kind, num_layers=2), _tokens)
    _train(f"{_kind.__name__.lower()}_packed", partial(trainings.Recurrent, _kind, packed=True, bidirectional=True), _tokens)
_train("lstm_projected", partial(trainings.Recurrent, nn.LSTM, proj_size=3), _tokens)
_train("lstm_cell", partial(trainings.Cells, nn.LSTMCell), _tokens)
_train("gru_cell", partial(trainings.Cells, nn.GRUCell), _tokens)
_train("encoder", partial(trainings.Encoder, True), _tokens)
_train("encoder_norm_last", partial(trainings.Encoder, False), _tokens)
for _mode in ("sum", "mean"):
    _train(f"bags_{_mode}", partial(trainings.Bags, _mode), (_tokens[0], _images[1]))
_train("language", trainings.Language, _tokens)
_train("language_wide", _wide_language, _tokens)
_train("language_dropout", partial(_wide_language, dropout=0.1), _tokens)
_train("language_bfloat16", _wide_language, _tokens, autocast=torch.bfloat16)
_train("language_half", _wide_language, _tokens, wrap=lambda model: model.bfloat16())
for _name, _optimizer in {
    "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd_fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam_foreach": partial(torch.optim.Adam, foreach=True),
    "adam_fused": partial(torch.optim.Adam, fused=True),
    "adam_capturable": partial(torch.optim.Adam, capturable=True),
    "adamw_amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "adamw_single": partial(torch.optim.AdamW, foreach=False),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
}.items():
    _train(f"language_{_name}", _wide_language, _tokens, optimizer=_optimizer)


@program
def language_scaler() -> None:
    train(
        *(_wide_language, _tokens, "cuda"),
        autocast=torch.float16,
        scaler=torch.amp.GradScaler("cuda"),
        optimizer=partial(torch.optim.AdamW, fused=True),
        steps=STEPS,
    )


class _Checkpointed(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = _wide_language(), function

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.words(tokens) + self.model.places
        for block in self.model.blocks:
            x = self.function(block, x)
        return self.model.head(x)


_train("checkpointed_by_torch", partial(_Checkpointed, partial(checkpoint, use_reentrant=False)), _tokens)
_train("checkpointed_reentrant", partial(_Checkpointed, partial(checkpoint, use_reentrant=True)), _tokens)
_train("checkpointed", partial(_Checkpointed, acc.checkpointing.checkpoint), _tokens)


def _steps(step: Callable[[], object]) -> None:
    for _ in range(STEPS):
        step()


@program
def accumulated_and_clipped() -> None:
    model, (tokens, target) = _wide_language().cuda(), trainings.tokens("cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(2):
            (trainings.cross_entropy(model(tokens), target) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    _steps(step)


@program
def steps_of_finite_gradients() -> None:
    model, (tokens, target) = _wide_language().cuda(), trainings.tokens("cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        trainings.cross_entropy(model(tokens), target).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        overflows = any((~torch.isfinite(gradient)).any().item() for gradient in gradients)
        if not overflows and not (~torch.isfinite(norm) | (norm < 0)).any() and all(g.isfinite().all() for g in gradients):
            optimizer.step()

    _steps(step)


@program
def averaged_weights() -> None:
    model, (tokens, target) = _wide_language().cuda(), trainings.tokens("cuda")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        trainings.cross_entropy(model(tokens), target).backward()
        optimizer.step()
        averaged.update_parameters(model)

    _steps(step)


@program
def inference() -> None:
    model, (tokens, _) = _wide_language().cuda().eval(), trainings.tokens("cuda")
    with torch.inference_mode():
        _steps(lambda: model(tokens).softmax(-1).argmax(-1))


@program
def captured_graph() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    x = torch.ones(64, 256, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _steps(step)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    _steps(graph.replay)


@program
def second_order() -> None:
    model, x = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)).cuda(), torch.ones(64, 128).cuda()
    x.requires_grad_()

    def step() -> None:
        [gradient] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    _steps(step)


@program
def per_sample_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).cuda(), torch.ones(32, 64).cuda()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, sample).sum()

    _steps(lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x))


@program
def contrastive() -> None:
    first, second = (nn.Linear(256, 128).cuda() for _ in range(2))
    x, y = torch.ones(512, 256).cuda(), torch.ones(512, 256).cuda()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], fused=True)

    def step() -> None:
        logits = F.normalize(first(x), dim=-1) @ F.normalize(second(y), dim=-1).T
        F.cross_entropy(logits, torch.arange(512, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()

    _steps(step)


@program
def sparse_embedding() -> None:
    embedding, words = nn.Embedding(1000, 64, sparse=True).cuda(), torch.arange(48, device="cuda")
    optimizer = torch.optim.SparseAdam(embedding.parameters())

    def step() -> None:
        embedding(words).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    _steps(step)


@program
def sparse_bags() -> None:
    bags, words = nn.EmbeddingBag(1000, 64, sparse=True).cuda(), torch.arange(500, device="cuda")
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.1)

    def step() -> None:
        bags(words, words[::50]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    _steps(step)


@program
def large_embedding() -> None:
    embedding = nn.Embedding(2000, 64).cuda()
    words = torch.randint(2000, (8192,)).cuda()
    _steps(lambda: embedding(words).square().sum().backward())


@program
def selections() -> None:
    x = torch.ones(64, 4096, device="cuda", requires_grad=True)

    def step() -> None:
        values, _ = x.sort(-1)
        largest, _ = x.topk(100, -1)
        (values.cumsum(-1).sum() + largest.sum() + x.median(-1).values.sum() + x.logcumsumexp(-1).sum()).backward()

    _steps(step)


@program
def linear_algebra() -> None:
    x = torch.eye(64, device="cuda", requires_grad=True)

    def step() -> None:
        product = torch.linalg.cholesky(x @ x.T + torch.eye(64, device="cuda"))
        (torch.linalg.inv(product).sum() + torch.linalg.solve(product, x).sum() + torch.fft.rfft2(x).abs().sum()).backward()

    _steps(step)


def _distributed(wrap: Callable[[nn.Module], nn.Module]) -> None:
    import torch.distributed as dist

    from tests.simulation.rehearsal.rehearsed_ranks import release_finished_works  # which imports this module

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, (tokens, target) = wrap(_wide_language().cuda()), trainings.tokens("cuda")
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            trainings.cross_entropy(model(tokens), target).backward()
            optimizer.step()
            release_finished_works()

        _steps(step)
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


@program
def distributed() -> None:
    _distributed(nn.parallel.DistributedDataParallel)


@program
def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        return fully_shard(model)

    _distributed(wrap)


@program
def fully_sharded_first() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _distributed(partial(FullyShardedDataParallel, use_orig_params=True))


def modules() -> dict[str, Any]:
    """Return the entries of torch's module database by name."""
    operators.database()  # prepares the import of torch's test utilities
    from torch.testing._internal.common_modules import module_db

    return {f"module.{entry.name.removeprefix('nn.')}": entry for entry in module_db}


def run_module(entry: Any) -> None:
    """Run the forward and the backward of a module for each of its inputs."""
    # These inputs have random samples in double precision.
    dtype = torch.float64 if entry.name.startswith("nn.FractionalMaxPool") else torch.float32
    inputs = entry.module_inputs_func(entry, device="cuda", dtype=dtype, requires_grad=True, training=True)
    for given in inputs:
        if given.forward_input is None:
            continue
        made = entry.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).cuda().train()
        output = made(*given.forward_input.args, **given.forward_input.kwargs)
        leaves = [
            leaf for leaf in operators.pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if leaves:
            torch.autograd.backward([leaf.sum() for leaf in leaves])


def measure(run: Callable[[], object]) -> dict[str, int] | str:
    """Return the peaks of a program, or its error."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    try:
        # In another thread, the backward would free memory after it has returned.
        with torch.autograd.set_multithreading_enabled(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return {
        "allocated": torch.cuda.max_memory_allocated() - before[0],
        "reserved": torch.cuda.max_memory_reserved() - before[1],
        "kept": torch.cuda.memory_allocated() - before[0],
    }


def main() -> None:
    file, *names = sys.argv[1:]
    every = dict(PROGRAMS)
    if not names or any(name.startswith("module.") for name in names):
        every |= {name: partial(run_module, entry) for name, entry in modules().items()}
    gc.freeze()
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # the workspace of cuBLAS
    figures = {name: measure(every[name]) for name in names or every}
    failed = {name: error for name, error in figures.items() if isinstance(error, str)}
    assert not failed, failed
    Path(file).write_bytes(pickle.dumps(figures))


if __name__ == "__main__":
    main()
