"""Tensor maps of packed tensors for the copy engine (TMA), and what its copies of pixels cannot do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miofind.core.problem import Direction, ProblemDescription
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solver.steps import Box, Im2col, Pointer, TensorMap
from miofind.solvers.common.wgmma_product import WgmmaProduct

# By spatial dimensions.
_MAX_CORNER = {2: 127, 3: 15}
_MAX_TAP_OFFSET = {2: 255, 3: 31}
_MAX_STRIDE = 8


def packed_map(
    problem: ProblemDescription, buffer: str, sizes: Sequence[int], copy: Box | Im2col, *, loads: bool = True
) -> TensorMap:
    """A map of a packed tensor of the problem's element, dimensions innermost first.

    What a copy takes of the innermost is swizzled together. Loads of float32 are rounded to TF32.
    """
    itemsize, element = problem.x.dtype.itemsize, problem.x.dtype.value
    strides = [itemsize * math.prod(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    innermost = copy.sizes[0] if isinstance(copy, Box) else copy.channels
    return TensorMap(
        pointer=Pointer(buffer=buffer),
        element="tfloat32" if element == "float32" and loads else element,
        sizes=tuple(sizes),
        strides_bytes=tuple(strides),
        copy=copy,
        swizzle_bytes=itemsize * innermost,
    )


def pixels_map(product: WgmmaProduct, channels: int, pixels: int, *, boxes: bool) -> TensorMap:
    """The map of copies of a product's pixels as one tap meets them, one after another over all images.

    Args:
        channels, pixels: of a copy.
        boxes: whether copies are boxes, which is enough where each output meets one pixel, in order; else they are in
            im2col mode, padding as zeros.
    """
    problem, conv = product.problem, product.problem.conv
    _, depth, *image = problem.tensor(product.pixels).shape
    if boxes:
        sizes = (depth // problem.groups, problem.groups, math.prod(image) * problem.n)
        return packed_map(problem, product.pixels, sizes, Box(sizes=(channels, 1, pixels)))
    walk = Im2col(
        lower=product.low[::-1],
        upper=product.high[::-1],
        strides=(1,) * len(image) if problem.direction is Direction.BACKWARD_DATA else conv.stride[::-1],
        channels=channels,
        pixels=pixels,
    )
    return packed_map(problem, product.pixels, (depth, *image[::-1], problem.n), walk)


def refuse_copies(product: WgmmaProduct) -> Applicability:
    """Why copies do not meet all of a product's pixels; APPLICABLE if they do.

    Source: CUDA driver API, cuTensorMapEncodeIm2col.
    """
    conv, dims = product.problem.conv, product.problem.spatial_dims
    if max(map(abs, (*product.low, *product.high))) > (corner := _MAX_CORNER[dims]):
        return Applicability(f"copies meet pixels up to {corner} beyond the tensor: padding or filter is too large")
    reach = max((t - 1) * d for t, d in zip(product.problem.filter, conv.dilation, strict=True))
    if reach > (most := _MAX_TAP_OFFSET[dims]):
        return Applicability(f"taps reach at most {most} pixels: the filter is too large")
    if max(conv.stride) > _MAX_STRIDE:
        return Applicability(f"stride {conv.stride} is more than {_MAX_STRIDE}")
    return APPLICABLE
