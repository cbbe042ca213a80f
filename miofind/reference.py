"""What a convolution is: the reference in float64, on the host and as a kernel step.

`reference_on_host` is the definition; the kernel of kernels_src/reference.cu is tested against it and answers for
listed elements of problems that are too large for the host. Knows nothing of solvers or of how results are judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from miofind.arrays import NUMPY_DTYPES
from miofind.geometry import geometry_scalars, index_bits
from miofind.problem import DataType, Direction, ProblemDescription
from miofind.solution import KernelStep, Pointer, Scalar

_MAX_BLOCKS = 2**20


def numpy_dtype(dtype: DataType) -> np.dtype[Any]:
    """NumPy's dtype of an element type; bfloat16 is that of ml_dtypes."""
    return NUMPY_DTYPES[dtype]


def round_once(values: NDArray[np.float64], dtype: DataType) -> NDArray[Any]:
    """float64 values rounded once, to nearest even, to an element type; out of range becomes infinite."""
    with np.errstate(all="ignore"):  # whatever the caller has NumPy do
        if dtype is not DataType.BFLOAT16:
            return values.astype(NUMPY_DTYPES[dtype])
        return _round_to_odd(values).astype(ml_dtypes.bfloat16)


def _round_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 whose last bit is set where inexact, so that rounding it further equals rounding `values` once."""
    nearest = values.astype(np.float32)
    inexact = nearest.astype(np.float64) != values
    bits = nearest.view(np.uint32)
    toward_zero = bits - (np.abs(nearest) > np.abs(values)).astype(np.uint32)
    return np.where(inexact, toward_zero | np.uint32(1), bits).astype(np.uint32).view(np.float32)


def reference_step(problem: ProblemDescription, count: int) -> KernelStep:
    """The launch that computes `count` listed elements of the output, with two bounds an element.

    Buffers: the two inputs of the direction among "x", "w", "y"; "indices", int64 (count,), flat indices into the
    output in logical order; "sums", float64 (count, 3), written: sum a*b, sum |a|*|b| and sum a^2 * b^2 over the
    products a*b that make the element.
    """
    inputs = tuple(Pointer(buffer=name) for name in problem.direction.inputs)
    return KernelStep(
        source="reference.cu",
        entry=f"reference_{problem.direction.value}",
        grid=(max(1, min(count, _MAX_BLOCKS)), 1, 1),
        block=(_threads(problem), 1, 1),
        defines=(
            ("T_X", problem.x.dtype.value),
            ("T_W", problem.w.dtype.value),
            ("T_Y", problem.y.dtype.value),
            ("INDEX_BITS", index_bits(problem)),
            ("THREADS", _threads(problem)),
        ),
        args=(
            *inputs,
            Pointer(buffer="indices"),
            Pointer(buffer="sums"),
            Scalar(ctype="int64", value=count),
            *geometry_scalars(problem),
        ),
    )


def _threads(problem: ProblemDescription) -> int:
    """Threads that share one element: a warp for short reductions."""
    return 32 if problem.reduction_length <= 1024 else 256


@dataclass(frozen=True, slots=True)
class _Tap:
    """Indices of one filter position in w, and of the padded inputs that it meets, one an output."""

    at: tuple[Any, ...]
    window: tuple[Any, ...]


def _taps(problem: ProblemDescription) -> Iterator[_Tap]:
    conv = problem.conv
    for at in product(*(range(size) for size in problem.filter)):
        spans = zip(at, conv.dilation, problem.out_spatial, conv.stride, strict=True)
        window = (
            slice(t * dilation, t * dilation + (out - 1) * stride + 1, stride) for t, dilation, out, stride in spans
        )
        yield _Tap((..., *at), (..., *window))


def reference_on_host(
    problem: ProblemDescription,
    *,
    x: NDArray[Any] | None = None,
    w: NDArray[Any] | None = None,
    y: NDArray[Any] | None = None,
    indices: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """The convolution or gradient that a problem names, in float64.

    Give the two inputs of the direction, in any dtype and of logical shape: x (n, c, *spatial),
    w (k, c/groups, *filter), y (n, k, *out_spatial), where y stands for dy in the backward directions.

    Args:
        indices: flat logical indices of the output elements to return; all, in the output's shape, if left out.

    Raises:
        ValueError: an input of the direction is missing or has another shape.
    """
    given = {"x": x, "w": w, "y": y}
    first, second = (_grouped(problem, name, given[name]) for name in problem.direction.inputs)
    compute = {
        Direction.FORWARD: _forward,
        Direction.BACKWARD_DATA: _backward_data,
        Direction.BACKWARD_WEIGHTS: _backward_weights,
    }[problem.direction]
    with np.errstate(all="ignore"):  # whatever the caller has NumPy do: infinities are summed as IEEE has it
        full = compute(problem, first, second).reshape(problem.output.shape)
    return full if indices is None else full.reshape(-1)[indices]


def _grouped(problem: ProblemDescription, name: str, array: NDArray[Any] | None) -> NDArray[np.float64]:
    """x as (n, groups, c/groups, *spatial), w as (groups, k/groups, c/groups, *filter), y like x."""
    shape = problem.tensor(name).shape
    if array is None or array.shape != shape:
        given = "missing" if array is None else f"of shape {array.shape}"
        raise ValueError(f"{name} is {given}: {problem.direction} of {problem} needs {shape}")
    groups = problem.groups
    if name == "w":
        split: tuple[int, ...] = (groups, shape[0] // groups, *shape[1:])
    else:
        split = (shape[0], groups, shape[1] // groups, *shape[2:])
    return np.ascontiguousarray(array, dtype=np.float64).reshape(split)


def _padded(problem: ProblemDescription, x: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """x (n, groups, c/groups, *spatial) inside its zero padding, or the zeros alone."""
    conv = problem.conv
    spatial = [
        before + size + after
        for before, size, after in zip(conv.pad_before, problem.spatial, conv.pad_after, strict=True)
    ]
    padded = np.zeros((problem.n, problem.groups, problem.c // problem.groups, *spatial))
    if x is not None:
        padded[_interior(problem)] = x
    return padded


def _interior(problem: ProblemDescription) -> tuple[Any, ...]:
    """Where x lies inside its padding."""
    spans = zip(problem.conv.pad_before, problem.spatial, strict=True)
    return (..., *(slice(before, before + size) for before, size in spans))


def _forward(problem: ProblemDescription, x: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    padded = _padded(problem, x)
    n, groups, c = padded.shape[:3]
    y = np.zeros((n, groups, w.shape[1], int(np.prod(problem.out_spatial))))
    for tap in _taps(problem):
        y += w[tap.at] @ padded[tap.window].reshape(n, groups, c, -1)
    return y


def _backward_data(problem: ProblemDescription, dy: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    padded = _padded(problem, None)
    flat = dy.reshape(*dy.shape[:3], -1)
    for tap in _taps(problem):
        part = np.swapaxes(w[tap.at], 1, 2) @ flat
        padded[tap.window] += part.reshape(*padded.shape[:3], *problem.out_spatial)
    return np.ascontiguousarray(padded[_interior(problem)])


def _backward_weights(
    problem: ProblemDescription, dy: NDArray[np.float64], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    padded = _padded(problem, x)
    flat = dy.reshape(*dy.shape[:3], -1)
    dw = np.empty((problem.groups, dy.shape[2], padded.shape[2], *problem.filter))
    for tap in _taps(problem):
        window = padded[tap.window].reshape(*padded.shape[:3], -1)
        dw[tap.at] = (flat @ np.swapaxes(window, 2, 3)).sum(axis=0)
    return dw
