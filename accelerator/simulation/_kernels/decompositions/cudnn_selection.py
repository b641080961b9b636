"""Ops by which torch selects cuDNN or MIOpen: never, so that torch's own kernels run.

torch calls cuDNN's recurrent nets past the dispatcher, also if a program switches cuDNN on. The host calls these ops, also
while a stream captures; they read no values.
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
