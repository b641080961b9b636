"""The version of the driver that came with a version of CUDA."""

from __future__ import annotations

# The first driver of each version of CUDA for Linux on x86-64, from the table "CUDA Toolkit and Corresponding Driver Versions"
# of NVIDIA's release notes: https://docs.nvidia.com/cuda/archive/13.2.0/cuda-toolkit-release-notes/ and those of 11.8.
_VERSIONS = {
    (11, 0): "450.51.05",
    (11, 1): "455.23.05",
    (11, 2): "460.27.03",
    (11, 3): "465.19.01",
    (11, 4): "470.42.01",
    (11, 5): "495.29.05",
    (11, 6): "510.39.01",
    (11, 7): "515.43.04",
    (11, 8): "520.61.05",
    (12, 0): "525.60.13",
    (12, 1): "530.30.02",
    (12, 2): "535.54.03",
    (12, 3): "545.23.06",
    (12, 4): "550.54.14",
    (12, 5): "555.42.02",
    (12, 6): "560.28.03",
    (12, 8): "570.26",
    (12, 9): "575.51.03",
    (13, 0): "580.65.06",
    (13, 1): "590.44.01",
    (13, 2): "595.45.04",
}


def driver_version(cuda: str) -> str:
    """Return the driver of a CUDA version such as "12.4"; of one that is not in the table, the driver of the one before it."""
    major, minor = map(int, cuda.split("."))
    listed = [version for version in _VERSIONS if version <= (major, minor)]
    return _VERSIONS[max(listed, default=min(_VERSIONS))]
