"""The pictures of a rehearsal's memory: their files, and that all of a picture is inside of it and to scale."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from accelerator._command import memory_plot
from accelerator.simulation._settings.rehearsal_record import CATEGORIES, Curve, DeviceRecord, ProcessRecord, Rank, Statistics

pytestmark = pytest.mark.torch_free

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"


def curve(device: int = 0, *reserved: int) -> Curve:
    """Return a curve with one GiB of each category in turn, and the reserved memory."""
    sizes = reserved or (6 * GIB, 7 * GIB)
    return Curve(device, [[GIB, 0, 2 * GIB, GIB, 0, size] for size in sizes])


def rank(number: int, *curves: Curve) -> Rank:
    """Return a rank whose devices have 8 GiB, and 10 more for each rank, and one more for each device."""
    devices = [DeviceRecord(each.device, Statistics(), (8 + number * 10 + each.device) * GIB, None) for each in curves]
    return Rank(number, ProcessRecord(number, 0.0, 0, devices, []), 0, list(curves), None)


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        ([(0, 0)], ["plot.svg"]),
        ([(3, 1)], ["plot.svg"]),
        ([(0, 0), (1, 0)], ["plot-rank0.svg", "plot-rank1.svg"]),
        ([(0, 0), (0, 1)], ["plot-rank0-cuda0.svg", "plot-rank0-cuda1.svg"]),
        ([(0, 0), (1, 0), (1, 1)], ["plot-rank0.svg", "plot-rank1-cuda0.svg", "plot-rank1-cuda1.svg"]),
    ],
)
def test_each_rank_and_device_has_a_picture(devices: list[tuple[int, int]], names: list[str], tmp_path: Path) -> None:
    numbers = dict.fromkeys(number for number, _ in devices)
    ranks = [rank(number, *(curve(device) for each, device in devices if each == number)) for number in numbers]
    memory_plot.write(tmp_path / "plot.svg", ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for (number, device), name in zip(devices, names, strict=True):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert f">Memory of rank {number}, cuda:{device}<" in text
        assert f">the GPU: {8 + number * 10 + device}.0 GiB<" in text


def pairs(points: str | None) -> list[tuple[float, float]]:
    assert points
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


@pytest.mark.parametrize("reserved", [(6, 7), (7, 6, 30, 6), (8,)])
@pytest.mark.parametrize("total", [0, 8, 24])
def test_everything_is_inside_and_to_scale(total: int, reserved: tuple[int, ...]) -> None:
    drawn = curve(0, *(size * GIB for size in reserved))
    root = ElementTree.fromstring(memory_plot.draw(0, drawn, total * GIB))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    areas = [pairs(each.get("points")) for each in root.iter(f"{SVG}polygon")]
    [line] = [pairs(each.get("points")) for each in root.iter(f"{SVG}polyline")]
    numbers = [float(each.attrib[name]) for each in root.iter() for name in ("y", "y1", "y2") if name in each.attrib]
    assert all(0 <= x <= width and 0 <= y <= height for area in (*areas, line) for x, y in area)
    assert all(0 <= y <= height for y in numbers)
    assert len(areas) == len(CATEGORIES)

    count, bottom = len(reserved), areas[0][-1][1]  # an area is its upper edge, then its lower edge backwards
    per_gib = (bottom - line[0][1]) / reserved[0]
    below = [bottom] * count
    for area, size in zip(areas, drawn.points[0], strict=False):
        above, lower = [y for _, y in area[:count]], [y for _, y in area[count:]]
        assert lower[::-1] == below, "each category lies on the one before"
        assert [below[0] - y for y in above] == pytest.approx([size / GIB * per_gib] * count, abs=0.5)
        below = above
    assert [bottom - y for _, y in line] == pytest.approx([size * per_gib for size in reserved], abs=0.5)
    [of_gpu] = [float(each.attrib["y1"]) for each in root.iter(f"{SVG}line") if "stroke-dasharray" in each.attrib]
    assert bottom - of_gpu == pytest.approx(total * per_gib, abs=0.5)
    assert [x for x, _ in line] == pytest.approx([64 + 720 * index / max(1, count - 1) for index in range(count)], abs=0.1)
    labels = [each.text for each in root.iter(f"{SVG}text")]
    assert labels[-len(CATEGORIES) - 1 :] == [*CATEGORIES, "reserved"]
    # The legend has the colors of the areas, and the scale the sizes of its lines.
    colors = [each.attrib["fill"] for each in root.iter(f"{SVG}polygon")]
    assert [each.attrib["fill"] for each in root.iter(f"{SVG}rect")] == colors
    assert len({*colors}) == len(CATEGORIES)
    sizes = [each for each in root.iter(f"{SVG}text") if (each.text or "").endswith(" GiB") and "GPU" not in (each.text or "")]
    grid = [float(each.attrib["y1"]) for each in root.iter(f"{SVG}line") if "stroke-opacity" in each.attrib]
    assert len(sizes) == len(grid) >= 3
    for label, height in zip(sizes, grid, strict=True):
        assert bottom - height == pytest.approx(float((label.text or "").removesuffix(" GiB")) * per_gib, abs=0.5)
        assert float(label.attrib["y"]) == pytest.approx(height + 4, abs=0.1)
