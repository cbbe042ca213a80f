"""What a convolution is: the reference in float64, on the host and as a kernel step.

`reference_on_host` is the definition; the kernels of kernels_src/harness/reference.cu are tested against it and answer
for problems that are too large for the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from miofind.arrays.arrays import NUMPY_DTYPES
from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.solver.geometry import geometry, geometry_defines
from miofind.solver.steps import KernelStep, Pointer, Scalar

_MAX_BLOCKS = 2**20
_TILE = 16
_LEAST_FILLED = 1 / 4
# A tile's block takes 80 ns a term of its sums, however few there are; blocks for each of its elements take 1.2 ns
# together (channels first) or 3.1 (last), as long with 68 or 26 tiles.
# Measured on an H200: benchmarks/results/reference_speed_h200.json.
_LEAST_TILES = 48
# From so many elements on a thread for each fills a GPU.
_MANY_ELEMENTS = 2**17
_WHOLE_THREADS = 256


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


def reference_step(problem: ProblemDescription, count: int | None = None) -> KernelStep:
    """The launch that computes `count` listed elements of the output, or the whole output, with two scales an element.

    Buffers: the two inputs of the direction among "x", "w", "y"; "indices", int64 (count,), flat indices into the
    output in logical order, and null for the whole output; "sums", float64 (count,), written: sum a*b over the products
    a*b that make the element; "scales", float32 (count, 2), written unless null: sum |a|*|b| and sqrt(sum a^2 * b^2).
    """
    form = _form(problem, count)
    kernel = f"{problem.direction.value}{form.ending}"
    return KernelStep(
        source=form.source,
        entry=f"reference_{kernel}",
        grid=(max(1, min(form.blocks, _MAX_BLOCKS)), 1, 1),
        block=(form.threads, 1, 1),
        defines=(
            ("T_X", problem.x.dtype.value),
            ("T_W", problem.w.dtype.value),
            ("T_Y", problem.y.dtype.value),
            *geometry_defines(problem),
            form.define,
            (kernel.upper(), 1),
        ),
        args=(
            *(Pointer(buffer=name) for name in problem.direction.inputs),
            *((Pointer(buffer="indices"),) if form.lists else ()),
            Pointer(buffer="sums"),
            Pointer(buffer="scales"),
            Scalar(ctype="int64", value=problem.output.size if count is None else count),
            geometry(problem),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a kernel spreads the elements over a GPU.

    Attributes:
        ending: of its entry.
        lists: whether it is given the elements.
    """

    source: str = "harness/reference.cu"
    ending: str = ""
    blocks: int
    threads: int
    define: tuple[str, int]
    lists: bool = False


def _form(problem: ProblemDescription, count: int | None) -> _Form:
    """The fastest form for so many elements, or for the whole output."""
    size = problem.output.size
    tiles, filled = _tiles(problem)
    if count is None and filled >= _LEAST_FILLED and tiles >= _LEAST_TILES:
        define = ("TILE", _TILE)
        source = "harness/reference_tiled.cu"
        return _Form(source=source, ending="_tiled", blocks=tiles, threads=_TILE**2, define=define)
    if count is None and size >= _MANY_ELEMENTS and problem.direction is not Direction.BACKWARD_WEIGHTS:
        blocks, define = -(-size // _WHOLE_THREADS), ("THREADS", _WHOLE_THREADS)
        return _Form(ending="_whole", blocks=blocks, threads=_WHOLE_THREADS, define=define)
    threads = 32 if problem.reduction_length <= 1024 else 256  # a warp for short reductions
    blocks = size if count is None else count
    return _Form(blocks=blocks, threads=threads, define=("THREADS", threads), lists=True)


def _tiles(problem: ProblemDescription) -> tuple[int, float]:
    """How many tiles reference_tiled.cu makes of the whole output, and the share of a tile that is filled at best.

    Of the form by threads, backward data reads neighbours in memory whatever the layout, and is as fast as tiles.
    """
    group_c, group_k = problem.c // problem.groups, problem.k // problem.groups
    if problem.direction is Direction.FORWARD:
        rows, columns, others = problem.output.size // problem.k, group_k, problem.groups
    elif problem.direction is Direction.BACKWARD_WEIGHTS:
        rows, columns, others = group_k, group_c, problem.groups * math.prod(problem.filter)
    else:
        return 0, 0.0
    tiles = -(-rows // _TILE) * -(-columns // _TILE) * others
    return tiles, min(rows, _TILE) * min(columns, _TILE) / _TILE**2


@dataclass(frozen=True, slots=True)
class _Tap:
    """One filter position that meets an input: its indices in w, the outputs it adds to and the inputs that they read.

    Padding is in none of them: what a reference costs does not grow with it, nor with strides and dilations.
    """

    at: tuple[Any, ...]
    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Met:
    """Where one tap of an axis meets inputs, an output each."""

    tap: int
    outputs: slice
    inputs: slice


def _taps(problem: ProblemDescription) -> Iterator[_Tap]:
    met = (_met(problem, axis) for axis in range(problem.spatial_dims))
    for along in product(*met):
        yield _Tap(
            (..., *(one.tap for one in along)),
            (..., *(one.outputs for one in along)),
            (..., *(one.inputs for one in along)),
        )


def _met(problem: ProblemDescription, axis: int) -> list[_Met]:
    """Those of an axis' taps that meet an input: output o of tap t reads input o * stride - pad + t * dilation."""
    conv, size, outputs = problem.conv, problem.spatial[axis], problem.out_spatial[axis]
    stride = conv.stride[axis]
    found = []
    for tap in range(problem.filter[axis]):
        start = tap * conv.dilation[axis] - conv.pad_before[axis]
        first = max(0, -(start // stride))
        last = min(outputs - 1, (size - 1 - start) // stride)
        if first <= last:
            inputs = slice(first * stride + start, last * stride + start + 1, stride)
            found.append(_Met(tap, slice(first, last + 1), inputs))
    return found


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


def _forward(problem: ProblemDescription, x: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    y = np.zeros((*x.shape[:2], w.shape[1], *problem.out_spatial))
    for tap in _taps(problem):
        y[tap.outputs] += _product(w[tap.at], x[tap.inputs])
    return y


def _backward_data(problem: ProblemDescription, dy: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    dx = np.zeros((*dy.shape[:2], w.shape[2], *problem.spatial))
    for tap in _taps(problem):
        dx[tap.inputs] += _product(np.swapaxes(w[tap.at], 1, 2), dy[tap.outputs])
    return dx


def _backward_weights(
    problem: ProblemDescription, dy: NDArray[np.float64], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    dw = np.zeros((problem.groups, dy.shape[2], x.shape[2], *problem.filter))
    for tap in _taps(problem):
        dw[tap.at] = (_flat(dy[tap.outputs]) @ np.swapaxes(_flat(x[tap.inputs]), 2, 3)).sum(axis=0)
    return dw


def _product(filter_: NDArray[np.float64], pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """One tap (groups, rows, columns) times pixels (n, groups, columns, *spatial), as (n, groups, rows, *spatial)."""
    products: NDArray[np.float64] = filter_ @ _flat(pixels)
    return products.reshape(*products.shape[:3], *pixels.shape[3:])


def _flat(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, groups, channels, *spatial) as (n, groups, channels, pixels)."""
    return pixels.reshape(*pixels.shape[:3], -1)
