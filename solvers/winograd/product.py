"""The products of a `WinogradPlan` by the library: one a chunk of tiles serves all places, groups and slices."""

from __future__ import annotations

from miofind.core.problem import DataType, Direction, TensorDescriptor
from miofind.libraries.gemm import BatchedGemm, GemmOperand, transpose
from miofind.solvers.winograd.steps import INPUTS, OTHERS, PRODUCTS, WinogradPlan


def library_product(plan: WinogradPlan, count: int, accumulate: bool = False) -> BatchedGemm:
    """The products of a chunk of `count` tiles, summed over channels, or over tiles for backward weights.

    They have no algorithm and no workspace yet.
    """
    p = plan.problem
    k, c = p.k // p.groups, p.w.shape[1]
    filters = _filters(plan, OTHERS, p.w.dtype)
    if p.direction is Direction.BACKWARD_WEIGHTS:
        left, right = transpose(_tiled(plan, OTHERS, p.y, k)), _tiled(plan, INPUTS, p.x, c)
        out, sizes = _filters(plan, PRODUCTS, DataType.FLOAT32), (k, c, plan.slice_tiles)
        return _product(plan, sizes, left, right, out, accumulate=accumulate)
    if p.direction is Direction.FORWARD:
        left, right, out = _tiled(plan, INPUTS, p.x, c), transpose(filters), _tiled(plan, PRODUCTS, p.y, k)
        sizes = (count, k, c)
    else:
        left, right, out = _tiled(plan, INPUTS, p.y, k), filters, _tiled(plan, PRODUCTS, p.x, c)
        sizes = (count, c, k)
    if not out.transposed:
        return _product(plan, sizes, left, right, out)
    rows, columns, depth = sizes
    return _product(plan, (columns, rows, depth), transpose(right), transpose(left), transpose(out))


def _product(
    plan: WinogradPlan,
    sizes: tuple[int, int, int],
    left: GemmOperand,
    right: GemmOperand,
    out: GemmOperand,
    *,
    accumulate: bool = False,
) -> BatchedGemm:
    rows, columns, depth = sizes
    return BatchedGemm(
        rows=rows,
        columns=columns,
        depth=depth,
        left=left,
        right=right,
        out=out,
        images=plan.places,
        groups=plan.problem.groups * plan.slices,
        accumulate=accumulate,
        math=plan.problem.math,
    )


def _tiled(plan: WinogradPlan, buffer: str, tensor: TensorDescriptor, channels: int) -> GemmOperand:
    """Transformed tiles of a tensor: (tiles x channels of a group)."""
    size = plan.slice_tiles * channels
    last = tensor.layout.channels_last
    return GemmOperand(
        buffer=buffer,
        dtype=DataType.FLOAT32 if buffer == PRODUCTS else tensor.dtype,
        ld=channels if last else plan.slice_tiles,
        transposed=not last,
        image_stride=plan.problem.groups * plan.slices * size,
        group_stride=size,
    )


def _filters(plan: WinogradPlan, buffer: str, dtype: DataType) -> GemmOperand:
    """Transformed filters, or products that become filters: (k x c of a group), for backward weights a slice."""
    p = plan.problem
    c = p.w.shape[1]
    size = p.k // p.groups * c
    slices = plan.slices if plan.is_weights else 1
    return GemmOperand(buffer=buffer, dtype=dtype, ld=c, image_stride=p.groups * slices * size, group_stride=size)
