"""A problem's sizes and strides as kernel arguments: the host side of kernels_src/common/geometry.cuh.

Kernels that take them serve any rank, layout and shape with one compilation.
"""

from __future__ import annotations

from miofind.core.problem import ProblemDescription, TensorDescriptor
from miofind.solver.steps import Scalar

# Below it, sums and products of two coordinates and loop counters one step past the end stay under 2**31.
_NARROW = 2**30


def index_bits(problem: ProblemDescription) -> int:
    """Bits a kernel needs for offsets into the problem's tensors and for padded coordinates: 32 or 64."""
    conv = problem.conv
    reaches = [
        size + before + after + max(stride, dilation)
        for size, before, after, stride, dilation in zip(
            problem.spatial, conv.pad_before, conv.pad_after, conv.stride, conv.dilation, strict=True
        )
    ]
    return 32 if max(problem.x.size, problem.w.size, problem.y.size, *reaches) < _NARROW else 64


def geometry_scalars(problem: ProblemDescription) -> tuple[Scalar, ...]:
    """The arguments that GEOMETRY_PARAMETERS names, in its order, for a kernel built with `index_bits(problem)`."""
    lifted = problem.lifted(3)
    conv = lifted.conv
    values = (
        (lifted.n, lifted.c, lifted.k, lifted.groups),
        lifted.spatial,
        lifted.filter,
        lifted.out_spatial,
        conv.pad_before,
        conv.stride,
        conv.dilation,
        *(_strides(tensor) for tensor in (lifted.x, lifted.w, lifted.y)),
    )
    ctype = f"int{index_bits(problem)}"
    return tuple(Scalar(ctype=ctype, value=value) for part in values for value in part)


def _strides(tensor: TensorDescriptor) -> tuple[int, ...]:
    """Strides in elements, 0 along dimensions of size 1, where a stride is never used but may be large."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.strides, strict=True))
