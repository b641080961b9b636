"""Every class of torch.nn that can be called: how to make a module of it, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def f(*shape: int) -> torch.Tensor:
    """Numbers that require a gradient."""
    return torch.randn(*shape, requires_grad=True)


def p(*shape: int) -> torch.Tensor:
    """Probabilities, which require a gradient."""
    return torch.rand(*shape).mul_(0.9).add_(0.05).requires_grad_()


def t(*shape: int) -> torch.Tensor:
    """Targets, which do not."""
    return torch.rand(*shape)


def i(high: int, *shape: int) -> torch.Tensor:
    """Integers below a limit."""
    return torch.randint(high, shape)


def sign(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape) * 2.0 - 1


_ELEMENTWISE = (
    "AlphaDropout CELU Dropout ELU FeatureAlphaDropout Flatten GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity "
    "LeakyReLU LogSigmoid Mish PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink"
)
_TRANSFORMER = {"d_model": 4, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 8}
_LOSSES = "HuberLoss L1Loss MSELoss SmoothL1Loss PoissonNLLLoss KLDivLoss"

Row = tuple[str, dict[str, Any] | tuple[Any, ...], Callable[[], tuple[Any, ...]]]


def by_dimension(names: str, arguments: Any, make: Callable[..., torch.Tensor] = f) -> list[Row]:
    """The rows of classes for one, two and three dimensions."""
    return [
        (f"{name}{n}d", arguments, lambda n=n: (make(4, 3, *[4] * n),))  # type: ignore[misc]
        for name in names.split()
        for n in (1, 2, 3)
    ]


# For each class the arguments of its constructor, and a function that makes the inputs; several rows for some classes.
ROWS: list[Row] = [
    *[(name, (), lambda: (f(4, 3),)) for name in _ELEMENTWISE.split()],
    *[(name, (), lambda: (f(4, 3), t(4, 3))) for name in _LOSSES.split()],
    *by_dimension("AdaptiveAvgPool AdaptiveMaxPool AvgPool MaxPool", (2,)),
    *by_dimension("LPPool", (2, 2), p),
    *by_dimension("CircularPad ReflectionPad ReplicationPad ZeroPad", (1,)),
    *by_dimension("ConstantPad", (1, 0.5)),
    *by_dimension("Conv ConvTranspose", (3, 2, 2)),
    *by_dimension("LazyConv LazyConvTranspose", (2, 2)),
    *by_dimension("Dropout LazyBatchNorm", ()),
    *by_dimension("BatchNorm InstanceNorm", (3,)),
    *by_dimension("BatchNorm", {"num_features": 3, "momentum": None}),
    *by_dimension("BatchNorm", {"num_features": 3, "affine": False}),
    *by_dimension("BatchNorm", {"num_features": 3, "track_running_stats": False}),
    *by_dimension("InstanceNorm", {"num_features": 3, "track_running_stats": True}),
    *by_dimension("InstanceNorm", {"num_features": 3, "track_running_stats": True, "affine": True}),
    *by_dimension("LazyInstanceNorm", {"track_running_stats": True}),
    *[(name, (3, 4), lambda: (f(5, 2, 3),)) for name in ("GRU", "LSTM", "RNN")],
    *[(name, (3, 4), lambda: (f(2, 3),)) for name in ("GRUCell", "LSTMCell", "RNNCell")],
    *[(name, (1,), lambda: (f(4, 3),)) for name in ("LogSoftmax", "Softmax", "Softmin")],
    ("AdaptiveLogSoftmaxWithLoss", (3, 8, [2, 4]), lambda: (f(4, 3), i(8, 4))),
    ("BCELoss", (), lambda: (p(4, 3), t(4, 3))),
    ("BCEWithLogitsLoss", (), lambda: (f(4, 3), t(4, 3))),
    ("Bilinear", (3, 2, 4), lambda: (f(4, 3), f(4, 2))),
    ("CTCLoss", (), lambda: (f(5, 2, 4), i(3, 2, 2) + 1, torch.tensor([5, 5]), torch.tensor([2, 2]))),
    ("ChannelShuffle", (2,), lambda: (f(2, 4, 3),)),
    ("CosineEmbeddingLoss", (), lambda: (f(4, 3), f(4, 3), sign(4))),
    ("CosineSimilarity", (), lambda: (f(4, 3), f(4, 3))),
    ("CrossEntropyLoss", (), lambda: (f(4, 3), i(3, 4))),
    ("CrossMapLRN2d", (2,), lambda: (f(2, 3, 4, 4),)),
    ("Embedding", (7, 3), lambda: (i(7, 4),)),
    ("Embedding", {"num_embeddings": 7, "embedding_dim": 3, "max_norm": 0.5}, lambda: (i(7, 4),)),
    ("EmbeddingBag", (7, 3), lambda: (i(7, 4, 2),)),
    ("EmbeddingBag", {"num_embeddings": 7, "embedding_dim": 3, "max_norm": 0.5}, lambda: (i(7, 4, 2),)),
    ("Fold", (4, 2), lambda: (f(2, 12, 9),)),
    ("FractionalMaxPool2d", {"kernel_size": 2, "output_size": 2}, lambda: (f(2, 3, 4, 4),)),
    ("FractionalMaxPool3d", {"kernel_size": 2, "output_size": 2}, lambda: (f(2, 3, 4, 4, 4),)),
    ("GLU", (), lambda: (f(4, 6),)),
    ("GaussianNLLLoss", (), lambda: (f(4, 3), t(4, 3), p(4, 3))),
    ("GroupNorm", (2, 4), lambda: (f(3, 4, 5),)),
    ("HingeEmbeddingLoss", (), lambda: (f(4, 3), sign(4, 3))),
    ("LayerNorm", (3,), lambda: (f(4, 3),)),
    ("LazyLinear", (3,), lambda: (f(4, 2),)),
    ("Linear", (3, 2), lambda: (f(4, 3),)),
    ("LinearCrossEntropyLoss", (3, 5), lambda: (f(4, 3), i(5, 4))),
    ("LocalResponseNorm", (2,), lambda: (f(2, 3, 4),)),
    ("MarginRankingLoss", (), lambda: (f(4), f(4), sign(4))),
    *[(f"MaxUnpool{n}d", (2,), lambda n=n: (f(1, 1, *[2] * n), torch.arange(2**n).view(1, 1, *[2] * n))) for n in (1, 2, 3)],
    ("MultiLabelMarginLoss", (), lambda: (f(2, 3), torch.tensor([[0, 1, -1], [2, -1, 0]]))),
    ("MultiLabelSoftMarginLoss", (), lambda: (f(4, 3), t(4, 3).round())),
    ("MultiMarginLoss", (), lambda: (f(4, 3), i(3, 4))),
    ("MultiheadAttention", (4, 2), lambda: (f(5, 2, 4), f(5, 2, 4), f(5, 2, 4))),
    ("NLLLoss", (), lambda: (f(4, 3), i(3, 4))),
    ("NLLLoss2d", (), lambda: (f(2, 3, 4, 4), i(3, 2, 4, 4))),
    ("PairwiseDistance", (), lambda: (f(4, 3), f(4, 3))),
    ("PixelShuffle", (2,), lambda: (f(2, 4, 3, 3),)),
    ("PixelUnshuffle", (2,), lambda: (f(2, 1, 4, 4),)),
    ("RMSNorm", (3,), lambda: (f(4, 3),)),
    ("SoftMarginLoss", (), lambda: (f(4, 3), sign(4, 3))),
    ("Softmax2d", (), lambda: (f(2, 3, 4, 4),)),
    ("Threshold", (0.1, 0.2), lambda: (f(4, 3),)),
    ("Transformer", _TRANSFORMER, lambda: (f(3, 2, 4), f(3, 2, 4))),
    ("TransformerDecoderLayer", (4, 2, 8), lambda: (f(3, 2, 4), f(3, 2, 4))),
    ("TransformerEncoderLayer", (4, 2, 8), lambda: (f(3, 2, 4),)),
    ("TripletMarginLoss", (), lambda: (f(4, 3), f(4, 3), f(4, 3))),
    ("TripletMarginWithDistanceLoss", (), lambda: (f(4, 3), f(4, 3), f(4, 3))),
    ("Unflatten", (1, (3, 1)), lambda: (f(4, 3),)),
    ("Unfold", (2,), lambda: (f(2, 3, 4, 4),)),
    ("Upsample", {"scale_factor": 2}, lambda: (f(2, 3, 4),)),
    ("UpsamplingBilinear2d", {"scale_factor": 2}, lambda: (f(2, 3, 4, 4),)),
    ("UpsamplingNearest2d", {"scale_factor": 2}, lambda: (f(2, 3, 4, 4),)),
]  # fmt: skip

# Classes that are called with other modules only, or not at all.
WITHOUT_ROWS = {
    *("Container", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "RNNBase", "RNNCellBase"),
    *("Sequential", "TransformerDecoder", "TransformerEncoder"),
    # These need a GPU.
    *("DataParallel", "SyncBatchNorm"),
}


def make(row: Row) -> nn.Module:
    """Make the module of a row."""
    name, arguments, _ = row
    cls: Any = getattr(nn, name)
    module: nn.Module = cls(**arguments) if isinstance(arguments, dict) else cls(*arguments)
    return module
