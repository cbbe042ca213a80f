"""The structures of kernels_src/implicit_gemm/tile_scheduler.cuh: the walk over pixels, and the grid of work tiles.

And an axis of the phases that kernels cut strided backward data into, which they declare themselves.
"""

from __future__ import annotations

from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.wgmma_product import Phase, PhaseAxis, WgmmaProduct

PIXEL_WALK = StructType(
    "PixelWalk",
    height=DIVISOR,
    width=DIVISOR,
    stride_h="int32",
    stride_w="int32",
    low_h="int32",
    low_w="int32",
    dilation_h="int32",
    dilation_w="int32",
)
TILE_GRID = StructType(
    "TileGrid", tiles_m=DIVISOR, tiles_n=DIVISOR, splits=DIVISOR, k_tiles="int32", work_tiles="int32"
)
PHASE_AXIS = StructType("PhaseAxis", at="int32", first="int32", taps="int32", offset="int32")
MAX_PHASES = 4
"""Of strides up to 2 along each axis."""
NO_PHASE_AXIS = PHASE_AXIS(at=0, first=0, taps=0, offset=0)


def phase_axes(product: WgmmaProduct, phase: Phase) -> tuple[Struct, Struct]:
    """The `PHASE_AXIS` of a phase along the height and the width."""
    height, width = product.phase_axes[0][phase.row], product.phase_axes[1][phase.column]
    return phase_axis(height), phase_axis(width)


def phase_axis(axis: PhaseAxis) -> Struct:
    """The `PHASE_AXIS` of an axis."""
    return PHASE_AXIS(at=axis.at, first=axis.first, taps=axis.taps, offset=axis.offset)


def pixel_walk(product: WgmmaProduct, walked: tuple[int, int]) -> Struct:
    """The `PIXEL_WALK` of a product.

    Args:
        walked: height and width of the pixels of one image or plane, or what the kernel counts in their place.
    """
    (stride_h, stride_w), (low_h, low_w) = product.problem.conv.stride[-2:], product.low[-2:]
    return PIXEL_WALK(
        height=divide_by(walked[0]),
        width=divide_by(walked[1]),
        stride_h=stride_h,
        stride_w=stride_w,
        low_h=low_h,
        low_w=low_w,
        dilation_h=product.dilation[-2],
        dilation_w=product.dilation[-1],
    )
