"""The numbers that the family's kernels take: one structure each, `Shape` in the sources."""

from __future__ import annotations

from miofind.core.problem import ProblemDescription
from miofind.solver.structs import StructType
from miofind.solvers.common.divisor import DIVISOR

_IMAGES = dict.fromkeys(("height", "width", "out_height", "out_width"), "int32")
_OUTPUTS = {"out_channels": "int32", **_IMAGES, "pad_top": "int32", "pad_left": "int32"}


def images(problem: ProblemDescription) -> dict[str, int]:
    """Sizes of the images of x and y, by field."""
    (height, width), (out_height, out_width) = problem.spatial, problem.out_spatial
    return {"height": height, "width": width, "out_height": out_height, "out_width": out_width}


def outputs(problem: ProblemDescription) -> dict[str, int]:
    """The same, and where filters begin, of kernels that go through outputs."""
    pad_top, pad_left = problem.conv.pad_before
    return {"out_channels": problem.k, **images(problem), "pad_top": pad_top, "pad_left": pad_left}


_TILES: dict[str, str | StructType] = {
    **_OUTPUTS,
    **dict.fromkeys(("tiles", "tile_step"), "int32"),
    **dict.fromkeys(("filter_tiles", "image_tiles", "row_tiles"), DIVISOR),
}
TILED_SHAPE = StructType("Shape", **_TILES)
"""Of kernels that go through tiles of outputs (few_channels/output_tiles.cuh): how many tiles there are of all images,
from one tile of a thread block to its next, blocks of filters, and tiles of an image and of a row of tiles."""

STRIPS_SHAPE = StructType("Shape", **_TILES, strip_rows="int32", longer_strips="int32")
"""Of few_channels/forward_wgmma.cu, whose rows of tiles are strips: also rows of a strip, and how many of an image's
strips have one more."""

_ROWS = dict.fromkeys(("first_row", "end_row"), "int32")

DATA_SHAPE = StructType(
    "Shape",
    **_IMAGES,
    pad_top="int32",
    s2d_left="int32",
    **_ROWS,
    first_out_column="int32",
    strip_rows="int32",
    image_strips=DIVISOR,
    s2d_tiles=DIVISOR,
)
"""Of few_channels/data.cu: strips of groups of rows of s2d blocks, from `first_row` to before `end_row`."""

ROWS_SHAPE = StructType(
    "Shape",
    **_IMAGES,
    **dict.fromkeys(("pad_top", "pad_left"), "int32"),
    **_ROWS,
    **dict.fromkeys(("first_column", "end_column", "first_out_column"), "int32"),
    strip_rows="int32",
    image_strips=DIVISOR,
    column_tiles=DIVISOR,
)
"""Of few_channels/data_rows.cu and data_rows_tf32.cu (row_streaming.cuh): also columns of s2d blocks."""

DATA_WGMMA_SHAPE = StructType(
    "Shape",
    **_IMAGES,
    **dict.fromkeys(("s2d_top", "s2d_left", "columns_ahead"), "int32"),
    **_ROWS,
    **dict.fromkeys(("first_s2d", "strip_steps", "strips"), "int32"),
    strip_rows="int32",
    image_strips=DIVISOR,
    s2d_tiles=DIVISOR,
)
"""Of few_channels/data_wgmma.cu: where s2d blocks begin, and how many rows of dy a strip meets."""
