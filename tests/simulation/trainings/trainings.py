"""Small trainings that run on any device.

Weights and data are generated on the CPU, so that they are the same for each device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 10


class Attention(nn.Module):
    """Self-attention, which is causal if there is no mask."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class Language(nn.Module):
    """A language model of two blocks."""

    def __init__(self, words: int = 17, width: int = 32, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(8, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Encoder(nn.Module):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(17, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(tokens), src_key_padding_mask=tokens == 0))


class Images(nn.Module):
    """Ordinary, grouped, depthwise and transposed convolutions, with several classes of norms and pooling layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.InstanceNorm2d(4, affine=True),
            nn.AvgPool2d(2),
            nn.Conv2d(4, 8, 3, stride=2, dilation=2, padding=2, groups=2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 5),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


class Volumes(nn.Module):
    """Convolutions in one and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.solid = nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 4, 3, groups=4))
        self.line = nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.AdaptiveMaxPool1d(3), nn.Flatten())
        self.head = nn.Linear(18, 5)

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        return self.head(self.line(self.solid(volumes)))


class Recurrent(nn.Module):
    """A recurrent net, over packed sequences of several lengths or over sequences of one length."""

    def __init__(self, module_class: type[nn.RNNBase], packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.packed = packed
        self.words = nn.Embedding(17, 6)
        self.net = module_class(6, 8, batch_first=True, **options)  # type: ignore[call-arg,misc]
        width = (options.get("proj_size") or 8) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: Any = self.words(tokens)
        if self.packed:
            lengths = torch.tensor([3, 8, 5, 8, 1, 2])
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = self.net(x)
        if self.packed:
            x, _ = nn.utils.rnn.pad_packed_sequence(x, batch_first=True, total_length=8)
        return self.head(x)


class Cells(nn.Module):
    """A recurrent cell that is called once for each word."""

    def __init__(self, module_class: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(17, 6)
        self.cell = module_class(6, 8)  # type: ignore[arg-type]
        self.head = nn.Linear(8, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state: Any = None
        outputs = []
        for x in self.words(tokens).unbind(1):
            state = self.cell(x, state)
            outputs.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs, 1)


class Bags(nn.Module):
    def __init__(self, mode: str, sparse: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(17, 8, mode=mode, sparse=sparse, padding_idx=0)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 3, 8, 10, 30, 31], device=tokens.device)
        return self.head(self.bag(tokens.flatten(), offsets))


def tokens(device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return six sentences of eight words, and for each word the next one as the target."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(17, (6, 8), generator=generator)
    return words.to(device), words.roll(-1, 1).to(device)


def pictures(device: Any = "cpu", *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return six pictures, or samples of another shape, and their classes, of which there are five."""
    generator = torch.Generator().manual_seed(2)
    shape = shape or (3, 12, 12)
    return torch.randn(6, *shape, generator=generator).to(device), torch.tensor([0, 1, 2, 3, 4, 0]).to(device)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def train(
    make: Callable[[], nn.Module],
    data: tuple[torch.Tensor, torch.Tensor],
    device: Any,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    steps: int = STEPS,
) -> list[float]:
    """Train on a device and return the loss of each step."""
    torch.manual_seed(0)
    model = wrap(make().to(device))
    inputs, target = (tensor.to(device) for tensor in data)
    torch_optimizer = optimizer(model.parameters())
    losses = []

    def step() -> torch.Tensor:
        torch_optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, dtype=autocast, enabled=autocast is not None):
            loss = cross_entropy(model(inputs), target)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    for _ in range(steps):
        if isinstance(torch_optimizer, torch.optim.LBFGS):
            losses.append(torch_optimizer.step(step).item())
            continue
        losses.append(step().item())
        if scaler is None:
            torch_optimizer.step()
        else:
            scaler.step(torch_optimizer)
            scaler.update()
    return losses


def assert_same_losses(actual: list[float], expected: list[float], tolerance: float = 1e-4) -> None:
    """Assert that the losses are close, and that they decrease."""
    assert len(actual) == len(expected) >= STEPS
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    assert len(set(actual)) > STEPS // 2
    assert actual[-1] < actual[0]
