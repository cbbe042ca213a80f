"""How parts of sums are added: what kernels_src/common/add_parts.cuh is told."""

from __future__ import annotations

from miofind.tiling.correlation import ceil_div


def adding_lanes(splits: int) -> int:
    """Threads that share the addition of one element's parts."""
    return min(32, 1 << max(0, ceil_div(splits, 4) - 1).bit_length())
