"""The structures of kernels_src/implicit_gemm/tile_scheduler.cuh: the walk over pixels, and the grid of work tiles."""

from __future__ import annotations

from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.wgmma_product import WgmmaProduct

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


def pixel_walk(product: WgmmaProduct, walked: tuple[int, int]) -> Struct:
    """The `PIXEL_WALK` of a product.

    Args:
        walked: height and width of the pixels of one image, or what the kernel counts in their place.
    """
    (stride_h, stride_w), (low_h, low_w) = product.problem.conv.stride, product.low
    return PIXEL_WALK(
        height=divide_by(walked[0]),
        width=divide_by(walked[1]),
        stride_h=stride_h,
        stride_w=stride_w,
        low_h=low_h,
        low_w=low_w,
        dilation_h=product.dilation[0],
        dilation_w=product.dilation[1],
    )
