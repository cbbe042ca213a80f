"""The constants of a two-dimensional problem that kernels take axis by axis."""

from __future__ import annotations

from collections.abc import Iterator

from miofind.core.problem import ProblemDescription


def axis_defines(planar: ProblemDescription, **planes: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """FILTER_Y and _X; STRIDE, DILATION and PAD, then sizes of `planes` by name, each _H and _W."""
    conv = planar.conv
    yield from zip(("FILTER_Y", "FILTER_X"), planar.filter, strict=True)
    sizes = {"STRIDE": conv.stride, "DILATION": conv.dilation, "PAD": conv.pad_before, **planes}
    for name, (height, width) in sizes.items():
        yield f"{name}_H", height
        yield f"{name}_W", width
