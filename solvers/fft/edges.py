"""Results near corners that are sums of few products: kernels_src/fft/edges.cu sums them directly.

Knows nothing of transforms but that their errors are alike over a tile.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import Direction, ProblemDescription, TensorDescriptor
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.steps import KernelStep, Pointer
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import DIVISOR, divide_by

EDGES_SOURCE = "fft/edges.cu"

_THREADS = 128
_AXIS = StructType(
    "Axis",
    **dict.fromkeys(("source_size", "result_size", "taps", "pad"), "int32"),
    stride=DIVISOR,
    leading="int32",
    edges=DIVISOR,
    **dict.fromkeys(("source_stride", "filter_stride", "result_stride"), "int32"),
)
_SHAPE = StructType(
    "Shape",
    **dict.fromkeys(("results", "limit", "terms"), "int32"),
    channels=DIVISOR,
    group_channels=DIVISOR,
    **dict.fromkeys(("source_image_stride", "source_channel_stride"), "int32"),
    **dict.fromkeys(("filter_term_stride", "filter_channel_stride", "filter_group_stride"), "int32"),
    **dict.fromkeys(("result_image_stride", "result_channel_stride"), "int32"),
    rows=_AXIS,
    columns=_AXIS,
)


def edges_step(problem: ProblemDescription, limit: int) -> KernelStep:
    """The step that writes what are sums of fewer than `limit` products; of two spatial dimensions, not of filters."""
    is_backward = problem.direction is Direction.BACKWARD_DATA
    source, result = ("y", "x") if is_backward else ("x", "y")
    tensors = problem.tensor(source), problem.w, problem.tensor(result)
    dtypes = zip(("T_SOURCE", "T_W", "T_RESULT"), tensors, strict=True)
    return KernelStep(
        source=EDGES_SOURCE,
        entry="fft_edges",
        defines=(
            *((name, tensor.dtype.value) for name, tensor in dtypes),
            ("BACKWARD", int(is_backward)),
            _AXIS.define,
            _SHAPE.define,
            *epilogue_defines(problem),
        ),
        grid=(ceil_div(edge_items(problem, limit), _THREADS), 1, 1),
        block=(_THREADS, 1, 1),
        args=(
            *(Pointer(buffer=name) for name in (source, "w", result)),
            _shape(problem, tensors, limit),
            *epilogue_arguments(problem),
        ),
    )


def _shape(problem: ProblemDescription, tensors: tuple[TensorDescriptor, ...], limit: int) -> Struct:
    (image, channel, *_), (filter_k, filter_c, *_), (result_image, result_channel, *_) = map(strides, tensors)
    is_backward = problem.direction is Direction.BACKWARD_DATA
    term, filter_channel = (filter_k, filter_c) if is_backward else (filter_c, filter_k)
    channels = problem.output.shape[1]
    return _SHAPE(
        results=edge_items(problem, limit),
        limit=limit,
        terms=_terms(problem),
        channels=divide_by(channels),
        group_channels=divide_by(channels // problem.groups),
        source_image_stride=image,
        source_channel_stride=channel,
        filter_term_stride=term,
        filter_channel_stride=filter_channel,
        filter_group_stride=problem.k // problem.groups * filter_k,
        result_image_stride=result_image,
        result_channel_stride=result_channel,
        rows=_axis(problem, 0, tensors, limit),
        columns=_axis(problem, 1, tensors, limit),
    )


def edge_items(problem: ProblemDescription, limit: int) -> int:
    """Results that the step asks about."""
    result = problem.output
    return result.shape[0] * result.shape[1] * math.prod(sum(_asked(problem, axis, limit)) for axis in (0, 1))


def strides(tensor: TensorDescriptor) -> tuple[int, ...]:
    """Elements from one to the next along n, c, h and w."""
    _, c, h, w = tensor.shape
    return (c * h * w, 1, w * c, c) if tensor.layout.channels_last else (c * h * w, h * w, w, 1)


def _axis(problem: ProblemDescription, axis: int, tensors: tuple[TensorDescriptor, ...], limit: int) -> Struct:
    source, _, result = tensors
    leading, trailing = _asked(problem, axis, limit)
    source_stride, filter_stride, result_stride = (strides(tensor)[2 + axis] for tensor in tensors)
    return _AXIS(
        source_size=source.shape[2 + axis],
        result_size=result.shape[2 + axis],
        taps=problem.filter[axis],
        pad=problem.conv.pad_before[axis],
        stride=divide_by(problem.conv.stride[axis]),
        leading=leading,
        edges=divide_by(leading + trailing),
        source_stride=source_stride,
        filter_stride=filter_stride,
        result_stride=result_stride,
    )


def _terms(problem: ProblemDescription) -> int:
    """Channels that a result is summed over."""
    return (problem.k if problem.direction is Direction.BACKWARD_DATA else problem.c) // problem.groups


def _asked(problem: ProblemDescription, axis: int, limit: int) -> tuple[int, int]:
    """Results from an axis' first and from its last that may meet too few taps, whatever the other axis adds."""
    least = int(_met(problem, 1 - axis).min())
    few = np.flatnonzero(_met(problem, axis) * least * _terms(problem) < limit)
    size = problem.output.shape[2 + axis]
    leading, trailing = few[few < size // 2], few[few >= size // 2]
    return (int(leading[-1]) + 1 if leading.size else 0), (size - int(trailing[0]) if trailing.size else 0)


@functools.lru_cache(maxsize=256)  # every configuration of a problem asks
def _met(problem: ProblemDescription, axis: int) -> NDArray[np.int64]:
    """Taps that each result meets along an axis."""
    taps, stride, pad = problem.filter[axis], problem.conv.stride[axis], problem.conv.pad_before[axis]
    at = np.arange(problem.output.shape[2 + axis], dtype=np.int64)
    if problem.direction is Direction.FORWARD:
        start = at * stride - pad
        inside: NDArray[np.int64] = np.minimum(taps, problem.spatial[axis] - start) - np.maximum(0, -start)
        return inside
    at += pad
    first = np.maximum(at % stride, at - (problem.out_spatial[axis] - 1) * stride)
    met: NDArray[np.int64] = np.maximum(0, np.minimum(taps, at + 1) - first + stride - 1) // stride
    return met
