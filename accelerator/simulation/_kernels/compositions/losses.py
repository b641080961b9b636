"""Whether a loss goes to cuDNN or MIOpen: never, torch's own kernels compute it."""

from __future__ import annotations


def never(*arguments: object) -> bool:
    return False


COMPOSITIONS = {
    "aten::_use_cudnn_ctc_loss": never,
    "aten::_use_cudnn_ctc_loss.Tensor": never,
    "aten::_use_miopen_ctc_loss": never,
    "aten::_use_miopen_ctc_loss.Tensor": never,
}
