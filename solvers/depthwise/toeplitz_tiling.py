"""Rows of depthwise convolutions by blocks of 16 outputs: the arithmetic of kernels_src/depthwise/toeplitz.cuh.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Library, Place
from miofind.solver.solver import Applicability, KernelKey
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.limits import refuse_tensors
from miofind.solvers.depthwise.register_tile import padded_size

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
        layouts=frozenset({Layout.NCW, Layout.NCHW}),
        min_sm=80,
    ),
)
"""What the kernels are made for, in all directions."""

_OUTPUTS, _DEPTH = 16, 24  # columns of a block of outputs, and of inputs that it meets at most
_WORD = 8
_ITEMSIZE = 2
_MAX_TAPS = 64
_LEAST_FILTER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ToeplitzAxis:
    """Columns of inputs and of outputs of a correlation of stride 1.

    Attributes:
        is_odd: whether rows begin at odd elements, too.
        is_narrow: whether the only block of outputs meets all inputs of a row.
        is_served: whether the words that a block has hold all inputs that it meets.
        shift: input columns before a block of outputs, from which its words begin.
        blocks: of 16 outputs.
        words: of 8 inputs, as far as they exist.
    """

    is_odd: bool
    is_narrow: bool
    is_served: bool
    shift: int
    blocks: int
    words: int

    @staticmethod
    def of(size: int, outputs: int, taps: int, pad: int) -> ToeplitzAxis:
        """That of outputs o that meet inputs o - pad + tap; `pad` may be negative."""
        is_odd = size % 2 != 0 or outputs % 2 != 0
        is_narrow = max(size, outputs) + is_odd <= _OUTPUTS
        shift = 0 if is_narrow else 2 * ceil_div(pad + is_odd, 2)
        blocks = ceil_div(outputs + is_odd, _OUTPUTS)
        return ToeplitzAxis(
            is_odd=is_odd,
            is_narrow=is_narrow,
            is_served=is_narrow or taps + _OUTPUTS - 1 + shift - pad + is_odd <= _DEPTH,
            shift=shift,
            blocks=blocks,
            words=max(1, min(2 * blocks + 1, ceil_div(size + shift + is_odd, _WORD))),
        )


def toeplitz_pitch(count: int) -> int:
    """Elements from one staged run of `count` to the next: an odd number of 16-byte words."""
    return (padded_size(_ITEMSIZE, count) // _WORD | 1) * _WORD


def images_begin_alike(problem: ProblemDescription) -> bool:
    """Whether a channel begins at the same place of a 16-byte word in every image, of inputs and of outputs."""
    return all(math.prod(tensor.shape[1:]) % _WORD == 0 for tensor in (problem.x, problem.y))


def refuse_toeplitz(problem: ProblemDescription) -> Applicability:
    """Why no configuration can compute a problem, whatever its direction; APPLICABLE if one might."""
    if not problem.groups == problem.c == problem.k:
        return Applicability(f"needs one filter a channel: groups={problem.groups} c={problem.c} k={problem.k}")
    if any(size != 1 for size in (*problem.conv.stride, *problem.conv.dilation)):
        return Applicability(f"needs stride 1 and dilation 1, not {problem.conv.stride} and {problem.conv.dilation}")
    if math.prod(problem.filter) > _MAX_TAPS or max(problem.filter) < _LEAST_FILTER:
        return Applicability(
            f"serves filters from {_LEAST_FILTER} columns or rows to {_MAX_TAPS} taps, not {problem.filter}"
        )
    return refuse_tensors(problem)
