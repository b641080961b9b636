"""Ops that decide whether torch uses cuDNN or MIOpen. They return False, so that torch runs its own kernels.

torch calls cuDNN's recurrent networks without the dispatcher, so they cannot be overridden, even if a program enables cuDNN.
These ops run on the host, also while a stream captures, because they read no values of tensors.
"""

from __future__ import annotations


def never(*arguments: object) -> bool:
    return False


CUDNN_SELECTION = {
    "aten::cudnn_is_acceptable": never,
    "aten::_use_cudnn_ctc_loss": never,
    "aten::_use_cudnn_ctc_loss.Tensor": never,
    "aten::_use_miopen_ctc_loss": never,
    "aten::_use_miopen_ctc_loss.Tensor": never,
}
