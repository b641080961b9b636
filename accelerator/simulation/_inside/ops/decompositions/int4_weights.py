"""Products with 4-bit weights, in the layout of the tensor cores of CUDA (tiles of 8 rows and 16 columns)."""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 32
_ROWS, _COLUMNS = 8, 16  # of a tile
_HIGH, _LOW = range(0, 16, 4), range(16, 32, 4)  # where an int32 holds the high and the low halves of four bytes


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(
            f"Expected {text} to be true, but got false.  (Could this error message be improved?  If so, please report an"
            " enhancement request to PyTorch.)"
        )


def convert_weight_to_int4pack(self: Tensor, innerKTiles: int) -> Tensor:
    """Pack bytes, whose high half is the value of the even column, into one int32 for four bytes of a thread.

    A thread of the tensor core has row ``lane // 4``, and bytes ``lane % 4``, + 4, + 8 and + 12 of two tiles.
    """
    _expect(self.dim() == 2, "in.dim() == 2")
    _expect(self.dtype == torch.uint8, "in.dtype() == at::kByte")
    _expect(self.is_contiguous(), "in.is_contiguous()")
    _expect(innerKTiles in (2, 4, 8), "innerKTiles == 2 || innerKTiles == 4 || innerKTiles == 8")
    rows, size = self.shape
    _expect(size * 2 % (innerKTiles * _COLUMNS) == 0, "isEvenDivisor(in.size(1) * 2, innerKTiles * kKTileSize)")
    padded = torch.nn.functional.pad(self.long(), (0, 0, 0, -rows % _ROWS))
    tiles = padded.reshape(-(-rows // _ROWS), _ROWS, size // (innerKTiles * 8), innerKTiles // 2, 4, 4)
    parts = tiles.permute(0, 2, 1, 5, 3, 4)
    words = sum((parts[..., i] >> 4) << _HIGH[i] | (parts[..., i] & 15) << _LOW[i] for i in range(4))
    assert isinstance(words, Tensor)
    return words.reshape(*words.shape[:2], _LANES, innerKTiles // 2).to(torch.int32)


def _unpack(packed: Tensor) -> Tensor:
    """Return the values, from 0 to 15, as a matrix."""
    row_tiles, column_tiles, _, words = packed.shape
    columns = packed.long().unsqueeze(-1)
    values = torch.stack(((columns >> torch.tensor(_HIGH)) & 15, (columns >> torch.tensor(_LOW)) & 15), -1)
    values = values.reshape(row_tiles, column_tiles, _ROWS, 4, words, 4, 2).permute(0, 2, 1, 4, 5, 3, 6)
    return values.reshape(row_tiles * _ROWS, -1)


def weight_int4pack_mm(self: Tensor, mat2: Tensor, qGroupSize: int, qScaleAndZeros: Tensor) -> Tensor:
    """Multiply by the transposed weights, ``(value - 8) * scale + zero`` with a scale and a zero for each group of columns."""
    _expect(mat2.dim() == 4, "B.dim() == 4")
    _expect(self.dtype == torch.bfloat16, "A.dtype() == at::kBFloat16")
    _expect(self.is_contiguous(), "A.is_contiguous()")
    _expect(self.dim() == 2, "A.dim() == 2")
    _expect(mat2.dtype == torch.int32, "B.dtype() == at::kInt")
    _expect(mat2.is_contiguous(), "B.is_contiguous()")
    columns = self.size(1)
    tiles = mat2.size(3) * 2
    _expect(mat2.size(1) == columns // (tiles * _COLUMNS), "B.size(1) == k / (B_innerKTiles * kKTileSize)")
    _expect(mat2.size(2) == _LANES, "B.size(2) == 32")
    is_known = qGroupSize in (32, 64, 128, 256)
    _expect(is_known, "qGroupSize == 32 || qGroupSize == 64 || qGroupSize == 128 || qGroupSize == 256")
    _expect(qScaleAndZeros.dim() == 3, "qScaleAndZeros.dim() == 3")
    is_divided = columns >= qGroupSize and columns % qGroupSize == 0
    _expect(is_divided, "kTiles * kKTileSize >= qGroupSize && isEvenDivisor(kTiles * kKTileSize, qGroupSize)")
    _expect(qScaleAndZeros.size(1) == mat2.size(0) * _ROWS, "qScaleAndZeros.size(1) == n")
    _expect(qScaleAndZeros.size(2) == 2, "qScaleAndZeros.size(2) == 2")
    scales, zeros = qScaleAndZeros.float().repeat_interleave(qGroupSize, 0).unbind(-1)
    # The GPU rounds each weight to bfloat16, and accumulates in float.
    weights = ((_unpack(mat2).float() - 8) * scales.T + zeros.T).to(torch.bfloat16)
    return (self.float() @ weights.float().T).to(torch.bfloat16)


DECOMPOSITIONS = {
    "aten::_convert_weight_to_int4pack": convert_weight_to_int4pack,
    "aten::_weight_int4pack_mm": weight_int4pack_mm,
}
