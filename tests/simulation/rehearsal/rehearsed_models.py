"""``python -m tests.simulation.rehearsal.rehearsed_models FILE [NAME...]``: the peaks of memory of small models of many kinds.

As `rehearsed_programs`, whose programs are of modules, optimizers and kinds of training.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from .rehearsed_programs import STEPS, measure

PROGRAMS: dict[str, Callable[[], object]] = {}


def program(function: Callable[[], object]) -> Callable[[], object]:
    PROGRAMS[function.__name__] = function
    return function


def _train(model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def _dense(*widths: int) -> nn.Sequential:
    layers = [[nn.Linear(first, second), nn.SiLU()] for first, second in itertools.pairwise(widths)]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1]).cuda()


@program
def variational_autoencoder() -> None:
    encoder, decoder = _dense(784, 256, 64), _dense(32, 256, 784)
    x = torch.rand(128, 784, device="cuda")

    def loss() -> torch.Tensor:
        mean, variance = encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, F.softplus(variance) + 1e-3, validate_args=False)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        decoded = decoder(posterior.rsample())
        return F.mse_loss(decoded, x) + torch.distributions.kl_divergence(posterior, prior).mean()

    _train(nn.ModuleList([encoder, decoder]), loss)


@program
def adversarial() -> None:
    generator, judge = _dense(64, 256, 784), _dense(784, 256, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, judge)]
    for _ in range(STEPS):
        made = generator(torch.randn(64, 64, device="cuda"))
        real = judge(torch.rand(64, 784, device="cuda"))
        (F.softplus(-real) + F.softplus(judge(made.detach()))).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        F.softplus(-judge(made)).mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()


@program
def diffusion_of_images() -> None:
    down, middle = nn.Conv2d(3, 32, 3, 2, 1).cuda(), nn.Conv2d(32, 32, 3, 1, 1).cuda()
    up, norm = nn.ConvTranspose2d(32, 3, 4, 2, 1).cuda(), nn.GroupNorm(8, 32).cuda()
    x = torch.rand(8, 3, 32, 32, device="cuda")

    def loss() -> torch.Tensor:
        noise, steps = torch.randn_like(x), torch.rand(8, 1, 1, 1, device="cuda")
        hidden = down(x * steps + noise * (1 - steps))
        return F.mse_loss(up(hidden + middle(F.silu(norm(hidden)))), noise)

    _train(nn.ModuleList([down, middle, up, norm]), loss)


@program
def vision_transformer() -> None:
    patches = nn.Conv2d(3, 64, 8, 8).cuda()
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True).cuda()
    head = nn.Linear(64, 10).cuda()
    x, y = torch.rand(8, 3, 64, 64, device="cuda"), torch.randint(10, (8,)).cuda()
    model = nn.ModuleList([patches, layer, head])
    _train(model, lambda: F.cross_entropy(head(layer(patches(x).flatten(2).mT).mean(1)), y))


@program
def low_rank_adapters() -> None:
    base = _dense(512, 1024, 512).requires_grad_(False)
    down, up = nn.Linear(512, 8).cuda(), nn.Linear(8, 512).cuda()
    x = torch.randn(256, 512, device="cuda")
    _train(nn.ModuleList([down, up]), lambda: (base(x) + up(down(x))).square().mean())


@program
def distillation() -> None:
    teacher, student = _dense(256, 1024, 100), _dense(256, 64, 100)
    x = torch.randn(512, 256, device="cuda")

    def loss() -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        return F.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean")

    _train(student, loss)


@program
def selective_state_space() -> None:
    project = nn.Linear(64, 3 * 64).cuda()
    x = torch.randn(8, 256, 64, device="cuda")

    def loss() -> torch.Tensor:
        gate, decay, value = project(x).chunk(3, -1)
        weights = F.logsigmoid(decay).cumsum(1).exp()
        return ((weights * value).cumsum(1) / (weights + 1e-3) * F.silu(gate)).square().mean()

    _train(project, loss)


@program
def rotated_grouped_attention() -> None:
    query, key = nn.Linear(256, 256).cuda(), nn.Linear(256, 128).cuda()
    x = torch.randn(2, 128, 256, device="cuda")
    angles = torch.outer(torch.arange(128.0, device="cuda"), torch.rand(16, device="cuda"))
    turns = torch.polar(torch.ones_like(angles), angles)

    def turn(heads: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def loss() -> torch.Tensor:
        queries, keys = (model(x).unflatten(-1, (-1, 32)).transpose(1, 2) for model in (query, key))
        attended = F.scaled_dot_product_attention(turn(queries), turn(keys), keys, is_causal=True, enable_gqa=True)
        return attended.square().mean()

    _train(nn.ModuleList([query, key]), loss)


@program
def generation_with_a_cache() -> None:
    words, layer, head = nn.Embedding(1000, 128).cuda(), nn.Linear(128, 384).cuda(), nn.Linear(128, 1000).cuda()
    with torch.inference_mode():
        tokens = torch.randint(1000, (4, 16)).cuda()
        keys, values = (torch.empty(4, 0, 128, device="cuda") for _ in range(2))
        for _ in range(32):
            query, key, value = layer(words(tokens)).chunk(3, -1)
            keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
            attended = F.scaled_dot_product_attention(query, keys, values)
            tokens = head(attended[:, -1:]).argmax(-1)


@program
def search_of_beams() -> None:
    words, cell, head = nn.Embedding(500, 64).cuda(), nn.GRUCell(64, 64).cuda(), nn.Linear(64, 500).cuda()
    with torch.no_grad():
        tokens, state = torch.zeros(8, dtype=torch.long, device="cuda"), torch.zeros(8, 64, device="cuda")
        scores = torch.zeros(8, 1, device="cuda")
        for _ in range(10):
            state = cell(words(tokens), state)
            best, chosen = (scores + head(state).log_softmax(-1)).flatten().topk(8)
            tokens, state, scores = chosen % 500, state[chosen // 500], best[:, None]


@program
def graph_network() -> None:
    first, second = nn.Linear(32, 64).cuda(), nn.Linear(64, 8).cuda()
    nodes = torch.randn(500, 32, device="cuda")
    sources, targets = (torch.randint(500, (3000,)).cuda() for _ in range(2))

    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, targets, x[sources])

    def loss() -> torch.Tensor:
        return spread(second(F.relu(spread(first(nodes))))).square().mean()

    _train(nn.ModuleList([first, second]), loss)


@program
def spectrograms() -> None:
    model = nn.Conv1d(1, 16, 9, 4).cuda()
    sound = torch.randn(4, 1, 8000, device="cuda")
    window = torch.hann_window(256, device="cuda")

    def loss() -> torch.Tensor:
        return torch.stft(model(sound)[:, 0], 256, window=window, return_complex=True).abs().mean()

    _train(model, loss)


@program
def loss_in_chunks() -> None:
    hidden, head = nn.Linear(128, 128).cuda(), nn.Linear(128, 20000, bias=False).cuda()
    x, y = torch.randn(512, 128, device="cuda"), torch.randint(20000, (512,)).cuda()

    def loss() -> torch.Tensor:
        parts = zip(hidden(x).chunk(4), y.chunk(4), strict=True)
        compute = lambda part, wanted: F.cross_entropy(head(part), wanted, reduction="sum")  # noqa: E731
        losses = [torch.utils.checkpoint.checkpoint(compute, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / 512

    _train(nn.ModuleList([hidden, head]), loss)


@program
def step_in_the_backward() -> None:
    model, x = _dense(256, 512, 512, 256), torch.randn(128, 256, device="cuda")
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        model(x).square().mean().backward()


@program
def activations_on_the_host() -> None:
    model, x = _dense(256, 1024, 256), torch.randn(256, 256, device="cuda")

    def loss() -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(x).square().mean()

    _train(model, loss)


@program
def gradient_penalty() -> None:
    judge = _dense(128, 256, 1)

    def loss() -> torch.Tensor:
        x = torch.randn(64, 128, device="cuda", requires_grad=True)
        output = judge(x)
        [gradient] = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.mean() + (gradient.norm(dim=-1) - 1).square().mean()

    _train(judge, loss)


@program
def forward_mode() -> None:
    model, x = _dense(128, 256, 128), torch.randn(64, 128, device="cuda")
    for _ in range(STEPS):
        torch.func.jvp(model, (x,), (torch.ones_like(x),))


@program
def quantized_training() -> None:
    model, x = nn.Linear(256, 256).cuda(), torch.randn(128, 256, device="cuda")

    def loss() -> torch.Tensor:
        weight = torch.fake_quantize_per_tensor_affine(model.weight, 0.1, 0, -128, 127)
        return F.linear(x, weight, model.bias).square().mean()

    _train(model, loss)


@program
def adaptive_softmax() -> None:
    hidden = nn.Linear(64, 64).cuda()
    head = nn.AdaptiveLogSoftmaxWithLoss(64, 1000, [100, 500]).cuda()
    x, y = torch.randn(256, 64, device="cuda"), (torch.arange(256) * 3).cuda()
    _train(nn.ModuleList([hidden, head]), lambda: head(hidden(x), y).loss)


@program
def value_iteration() -> None:
    """Reinforcement learning: states of a buffer, and a second net that follows the first."""
    values, target = _dense(32, 128, 4), _dense(32, 128, 4)
    buffer = torch.randn(1000, 32, device="cuda")

    def loss() -> torch.Tensor:
        rows = torch.randint(1000, (256,), device="cuda")
        with torch.no_grad():
            wanted = target(buffer[rows]).amax(-1) * 0.99
            for slow, fast in zip(target.parameters(), values.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        return F.smooth_l1_loss(values(buffer[rows]).gather(-1, rows[:, None] % 4)[:, 0], wanted)

    _train(values, loss)


def main() -> None:
    file, *names = sys.argv[1:]
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # the workspace of cuBLAS
    figures = {name: measure(PROGRAMS[name]) for name in names or PROGRAMS}
    failed = {name: error for name, error in figures.items() if isinstance(error, str)}
    assert not failed, failed
    Path(file).write_bytes(pickle.dumps(figures))


if __name__ == "__main__":
    main()
