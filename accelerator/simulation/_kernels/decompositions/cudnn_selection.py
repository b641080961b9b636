"""Whether work goes to cuDNN or MIOpen, where that is an op: never, torch's own kernels do it.

cuDNN's recurrent nets are reached without a look at the dispatcher, also by a program that switches cuDNN on. These ops are
asked by the host, also while a stream captures, and look at no values.
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
