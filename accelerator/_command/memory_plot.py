"""Draws the memory of a rehearsal as SVG: allocated by what holds it, reserved, and the size of the GPU."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..simulation._settings.rehearsal_record import CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..simulation._settings.rehearsal_record import Curve, Rank

_WIDTH, _HEIGHT = 800, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 56
_LIMIT = "#d62728"
_COLORS = {
    "parameters": "#4269d0",
    "gradients": "#efb118",
    "optimizer state": "#6cc5b0",
    "activations": "#ff725c",
    "other": "#9c9c9c",
}
_TEXT = "#777777"  # readable on light and on dark pages
_GIB = 2**30


def write(file: Path, ranks: Sequence[Rank]) -> None:
    """Write one picture, or one for each rank and device with its name before the suffix."""
    count = sum(len(rank.curves) for rank in ranks)
    for rank in ranks:
        totals = {device.device: device.total for device in rank.record.devices}
        for curve in rank.curves:
            device = f"-cuda{curve.device}" if len(rank.curves) > 1 else ""
            name = "" if count == 1 else f"-rank{rank.rank}{device}"
            path = file.with_name(f"{file.stem}{name}{file.suffix}")
            path.write_text(draw(rank.rank, curve, totals.get(curve.device, 0)), encoding="utf-8")


def draw(rank: int, curve: Curve, total: int) -> str:
    """Return the picture of one rank's memory on a GPU with that many bytes."""
    points = curve.points
    top = max([total, *(point[-1] for point in points)]) * 1.05
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(index: int) -> float:
        return _LEFT + (right - _LEFT) * index / max(1, len(points) - 1)

    def y(size: float) -> float:
        return bottom - (bottom - _TOP) * size / top

    def line(sizes: list[int]) -> str:
        return " ".join(f"{x(index):.1f},{y(size):.1f}" for index, size in enumerate(sizes))

    title = f"Memory of rank {rank}, cuda:{curve.device}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<text x="{_LEFT}" y="20" fill="{_TEXT}" font-size="15">{escape(title)}</text>',
    ]
    parts += [_grid_line(y(size), right, f"{size / _GIB:g} GiB") for size in _ticks(top)]
    below = [0] * len(points)
    for position, category in enumerate(CATEGORIES):
        above = [size + point[position] for size, point in zip(below, points, strict=True)]
        reverse = " ".join(reversed(line(below).split(" ")))
        parts.append(f'<polygon points="{line(above)} {reverse}" fill="{_COLORS[category]}" fill-opacity="0.85"/>')
        below = above
    parts.append(
        f'<polyline points="{line([point[-1] for point in points])}" fill="none" stroke="{_TEXT}" stroke-width="1.5"/>'
    )
    parts.append(
        f'<line x1="{_LEFT}" x2="{right}" y1="{y(total):.1f}" y2="{y(total):.1f}" stroke="{_LIMIT}" stroke-dasharray="6 4"/>'
        f'<text x="{right}" y="{y(total) - 5:.1f}" fill="{_LIMIT}" text-anchor="end">the GPU: {total / _GIB:.1f} GiB</text>'
    )
    parts.append(
        f'<text x="{right}" y="{bottom + 16}" fill="{_TEXT}" text-anchor="end">allocations and frees, in their order</text>'
    )
    parts.append(_legend(CATEGORIES, bottom + 42))
    return "\n".join([*parts, "</svg>", ""])


def _ticks(top: float) -> list[float]:
    """Return about five round sizes."""
    step = 2.0**-10
    while top / _GIB / step > 6:
        step *= 2
    return [index * step * _GIB for index in range(int(top / _GIB / step) + 1)]


def _grid_line(height: float, right: int, label: str) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}" stroke="{_TEXT}" stroke-opacity="0.25"/>'
        f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" fill="{_TEXT}" text-anchor="end">{label}</text>'
    )


def _legend(categories: Sequence[str], height: float) -> str:
    left, parts = float(_LEFT), list[str]()
    for name, color in (*((category, _COLORS[category]) for category in categories), ("reserved", "")):
        mark = (
            f'<rect x="{left}" y="{height - 10}" width="12" height="12" fill="{color}" fill-opacity="0.85"/>'
            if color
            else f'<line x1="{left}" x2="{left + 12}" y1="{height - 4}" y2="{height - 4}" stroke="{_TEXT}" stroke-width="1.5"/>'
        )
        parts.append(f'{mark}<text x="{left + 17}" y="{height}" fill="{_TEXT}">{name}</text>')
        left += 17 + 7.5 * len(name) + 18
    return "".join(parts)
