"""implicit_gemm/transpose.cu in NumPy, by blocks and vectors; fails where a vector is torn or misplaced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers.problems.struct_fields import fields_of
from numpy.typing import NDArray

from miofind.solver.steps import ConvSolution, KernelStep, Pointer, Scalar
from miofind.solver.structs import Struct
from miofind.solvers.implicit_gemm.transpose import MATRICES

ENTRIES = {"transpose": 1, "transpose_two": 2}
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}
ARGS = 3
"""A tensor's: two pointers and its `MATRICES`."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Tile:
    """The values of a define, in its order."""

    rows: int
    columns: int
    loaded: int
    stored: int
    scatters: bool
    is_whole: bool


@dataclass(frozen=True)
class Tensor:
    """One tensor that a step transposes."""

    source: str
    target: str
    rows: int
    columns: int
    tiles: tuple[int, int]
    tile: Tile


def tensors(step: KernelStep) -> list[Tensor]:
    """What a step transposes, from its arguments and defines alone."""
    (alone,) = ConvSolution(steps=(step,)).kernels
    defines, count = dict(alone.defines), ENTRIES[step.entry]
    assert list(defines) == [*["ELEMENT", "FIRST", "SECOND"][: 1 + count], MATRICES.define[0]]
    assert len(step.args) == (ARGS if count == 1 else 2 * ARGS + 1)
    found = []
    for i, name in enumerate(("FIRST", "SECOND")[:count]):
        source, target, matrices = step.args[ARGS * i : ARGS * (i + 1)]
        assert isinstance(source, Pointer)
        assert isinstance(target, Pointer)
        assert isinstance(matrices, Struct)
        assert matrices.type == MATRICES
        fields = fields_of(matrices)
        *sizes, scatters, is_whole = (int(value) for value in str(defines[name]).split(","))
        tile = Tile(*sizes, bool(scatters), bool(is_whole))
        tiles = fields["tiles_down"], fields["tiles_across"]
        found.append(Tensor(source.buffer, target.buffer, fields["rows"], fields["columns"], tiles, tile))
    return found


def carry_out(step: KernelStep, memory: dict[str, Array]) -> None:
    """The step on memory by buffer name; targets come into being."""
    transposed = tensors(step)
    itemsize = ITEMSIZES[str(dict(step.defines)["ELEMENT"])]
    blocks = []
    for tensor in transposed:
        batch, rest = divmod(memory[tensor.source].size, tensor.rows * tensor.columns)
        assert rest == 0
        blocks.append(batch * math.prod(tensor.tiles))
        gaps = max(tensor.tile.rows, tensor.tile.columns) * 16
        assert tensor.tile.rows * tensor.tile.columns * itemsize + gaps <= 48 << 10
        assert all(16 % (vector * itemsize) == 0 for vector in (tensor.tile.loaded, tensor.tile.stored))
        memory[tensor.target] = transposed_tensor(tensor, memory[tensor.source])
    assert step.grid == (sum(blocks), 1, 1)
    if len(transposed) == 2:
        assert step.args[-1] == Scalar(ctype="int32", value=blocks[0])


def transposed_tensor(tensor: Tensor, source: Array) -> Array:
    """The tensor's memory with rows and columns exchanged; each element is written once."""
    matrices = source.reshape(-1, tensor.rows * tensor.columns)
    result, writes = np.zeros_like(matrices), np.zeros(matrices.shape[1], int)
    (down, across), made = tensor.tiles, tensor.tile
    whole, of_line = (made.rows, tensor.rows) if made.scatters else (made.columns, tensor.columns)
    assert not made.is_whole or whole == of_line
    for first_i in range(0, down * made.rows, made.rows):
        for first_j in range(0, across * made.columns, made.columns):
            tile = np.zeros((len(matrices), made.rows, made.columns), source.dtype)
            left = (tensor.rows - first_i, tensor.columns - first_j)
            i, j = vectors(made, left, made.loaded, is_along=not made.scatters)
            at = (first_i + i[:, :1]) * tensor.columns + first_j + j[:, :1]
            assert (at % made.loaded == matrices.shape[1] % made.loaded).all()
            tile[:, i, j] = matrices[:, at + np.arange(made.loaded)]
            i, j = vectors(made, left, made.stored, is_along=made.scatters)
            at = (first_j + j[:, :1]) * tensor.rows + first_i + i[:, :1]
            assert (at % made.stored == matrices.shape[1] % made.stored).all()
            result[:, at + np.arange(made.stored)] = tile[:, i, j]
            np.add.at(writes, at + np.arange(made.stored), 1)
    assert matrices.shape[1] % made.loaded == matrices.shape[1] % made.stored == 0
    assert (writes == 1).all()
    return result.ravel()


def vectors(made: Tile, left: tuple[int, int], width: int, *, is_along: bool) -> tuple[Array, Array]:
    """Rows and columns of the elements of vectors that are inside the matrix: arrays (vectors, width), all at once."""
    lines, length = (made.columns, made.rows) if made.scatters else (made.rows, made.columns)
    lines_left, length_left = left[::-1] if made.scatters else left
    assert (lines * length if made.is_whole else length if is_along else lines) % width == 0
    if is_along:
        line, position = np.divmod(np.arange(lines * length).reshape(-1, width), length)
    else:
        position, line = np.divmod(np.arange(lines * length).reshape(-1, width), lines)
        assert (position[:, 0] == position[:, -1]).all()
    inside = (line[:, 0] < lines_left) & (position[:, 0] < length_left)
    line, position = line[inside], position[inside]
    assert (line < lines_left).all()
    assert (position < length_left).all()
    return (position, line) if made.scatters else (line, position)
