"""The fused cells of LSTM and GRU. The LSTM gates i, f, g and o are those of torch.nn.LSTM's formula."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import widened


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return widened(gates) if bias is None else widened(gates) + widened(bias)


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * widened(cx) + i * g
    hy = o * cy.tanh()
    workspace = torch.cat([i, f, g, o], 1)
    dtype = cx.dtype
    return hy.to(dtype), cy.to(dtype), workspace.to(dtype)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = widened(workspace).chunk(4, 1)
    tanh_cy = widened(cy).tanh()
    dhy = torch.zeros_like(tanh_cy) if grad_hy is None else widened(grad_hy)
    dcy = dhy * o * (1 - tanh_cy * tanh_cy)
    if grad_cy is not None:
        dcy = dcy + widened(grad_cy)
    gates = torch.cat(
        [dcy * g * i * (1 - i), dcy * widened(cx) * f * (1 - f), dcy * i * (1 - g * g), dhy * tanh_cy * o * (1 - o)], 1
    ).to(workspace.dtype)
    return gates, (dcy * f).to(cx.dtype), gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    input_reset, input_update, input_new = _biased(input_gates, input_bias).chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset = (input_reset + hidden_reset).sigmoid()
    update = (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    hy = new + update * (widened(hx) - new)
    workspace = torch.cat([reset, update, new, widened(hx), hidden_new], 1)
    return hy.to(hx.dtype), workspace.to(hx.dtype)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    reset, update, new, hx, hidden_new = widened(workspace).chunk(5, 1)
    dhy = widened(grad_hy)
    dupdate = dhy * (hx - new) * update * (1 - update)
    dnew = dhy * (1 - update) * (1 - new * new)
    dreset = dnew * hidden_new * reset * (1 - reset)
    input_gates = torch.cat([dreset, dupdate, dnew], 1).to(workspace.dtype)
    hidden_gates = torch.cat([dreset, dupdate, dnew * reset], 1).to(workspace.dtype)
    grad_hx = (dhy * update).to(workspace.dtype)
    if not has_bias:
        return input_gates, hidden_gates, grad_hx, None, None
    return input_gates, hidden_gates, grad_hx, input_gates.sum(0), hidden_gates.sum(0)


def flatten_weight(weight_arr: list[Tensor], *layout: object) -> Tensor:
    """Return the weights in one tensor. No op reads it: unlike cuDNN's op, this one does not make the weights views of it."""
    return torch.cat([weight.reshape(-1) for weight in weight_arr])


DECOMPOSITIONS = {
    "aten::_cudnn_rnn_flatten_weight": flatten_weight,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
}
