"""A problem's sizes and strides as kernel arguments: the host side of kernels_src/common/geometry.cuh.

Kernels that take them serve any rank, layout and shape with one compilation.
"""

from __future__ import annotations

import functools

from miofind.core.problem import ProblemDescription, TensorDescriptor
from miofind.solver.structs import Struct, StructType

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


def geometry_defines(problem: ProblemDescription) -> tuple[tuple[str, str | int], ...]:
    """The defines of a kernel that includes common/geometry.cuh."""
    bits = index_bits(problem)
    strides, geometry = _types(bits)
    return ("INDEX_BITS", bits), strides.define, geometry.define


def geometry(problem: ProblemDescription) -> Struct:
    """What such a kernel takes as `Geometry`."""
    lifted = problem.lifted(3)
    conv = lifted.conv
    strides, geometry = _types(index_bits(problem))
    x, w, y = (_strides(tensor) for tensor in (lifted.x, lifted.w, lifted.y))
    return geometry(
        n=lifted.n,
        c=lifted.c,
        k=lifted.k,
        groups=lifted.groups,
        size=lifted.spatial,
        taps=lifted.filter,
        out=lifted.out_spatial,
        pad=conv.pad_before,
        stride=conv.stride,
        dilation=conv.dilation,
        **{name: strides(n=n, c=c, at=at) for name, (n, c, *at) in zip("xwy", (x, w, y), strict=True)},
    )


@functools.cache
def _types(bits: int) -> tuple[StructType, StructType]:
    """Strides, where `n` counts output channels for w, and geometry with offsets of so many bits."""
    index = f"int{bits}"
    strides = StructType("Strides", n=index, c=index, at=(index, 3))
    sizes = dict.fromkeys(("n", "c", "k", "groups"), index)
    spatial = dict.fromkeys(("size", "taps", "out", "pad", "stride", "dilation"), (index, 3))
    return strides, StructType("Geometry", **sizes, **spatial, **dict.fromkeys("xwy", strides))


def _strides(tensor: TensorDescriptor) -> tuple[int, ...]:
    """Strides in elements, 0 along dimensions of size 1, where a stride is never used but may be large."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.strides, strict=True))
