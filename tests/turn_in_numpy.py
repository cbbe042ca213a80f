"""kernels_src/transpose.cu in NumPy, block by block and vector by vector; fails where a vector is torn or misplaced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.solution import KernelStep, Pointer, Scalar
from miofind.tiling.divisor import divisor

ENTRIES = {"transpose": 1, "transpose_two": 2}
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}
ARGS = 10
"""A tensor's: two pointers, rows, columns and two divisors."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """One tensor that a step turns."""

    source: str
    target: str
    rows: int
    columns: int
    tiles: tuple[int, int]
    tile: tuple[int, int, int, int]


def tensors(step: KernelStep) -> list[Tensor]:
    """What a step turns, from its arguments and defines alone."""
    defines, count = dict(step.defines), ENTRIES[step.entry]
    assert list(defines) == ["ELEMENT", "FIRST", "SECOND"][: 1 + count]
    assert len(step.args) == (ARGS if count == 1 else 2 * ARGS + 1)
    found = []
    for i, name in enumerate(("FIRST", "SECOND")[:count]):
        source, target, *scalars = step.args[ARGS * i : ARGS * (i + 1)]
        assert isinstance(source, Pointer)
        assert isinstance(target, Pointer)
        values = [int(arg.value) for arg in scalars if isinstance(arg, Scalar)]
        rows, columns, down, across = *values[:2], values[2], values[5]
        assert values[2:] == [scalar.value for by in (down, across) for scalar in divisor(by)]
        tile = tuple(int(value) for value in str(defines[name]).split(","))
        assert len(tile) == 4
        found.append(Tensor(source.buffer, target.buffer, rows, columns, (down, across), tile))
    return found


def carry_out(step: KernelStep, memory: dict[str, Array]) -> None:
    """The step on memory by buffer name; targets come into being."""
    turned = tensors(step)
    itemsize = ITEMSIZES[str(dict(step.defines)["ELEMENT"])]
    blocks = []
    for tensor in turned:
        batch, rest = divmod(memory[tensor.source].size, tensor.rows * tensor.columns)
        assert rest == 0
        blocks.append(batch * math.prod(tensor.tiles))
        assert math.prod(tensor.tile[:2]) * itemsize <= 48 << 10
        assert all(16 % (vector * itemsize) == 0 for vector in tensor.tile[2:])
        memory[tensor.target] = turned_tensor(tensor, memory[tensor.source])
    assert step.grid == (sum(blocks), 1, 1)
    if len(turned) == 2:
        assert step.args[-1] == Scalar(ctype="int32", value=blocks[0])


def turned_tensor(tensor: Tensor, source: Array) -> Array:
    """The tensor's memory with rows and columns exchanged; each element is written once."""
    matrices = source.reshape(-1, tensor.rows * tensor.columns)
    result, writes = np.zeros_like(matrices), np.zeros(matrices.shape[1], int)
    (down, across), (rows, columns, into, out) = tensor.tiles, tensor.tile
    assert rows * columns % into == rows * columns % out == matrices.shape[1] % into == matrices.shape[1] % out == 0
    for first_i in range(0, down * rows, rows):
        for first_j in range(0, across * columns, columns):
            tile = np.zeros((len(matrices), rows * columns), source.dtype)
            i, j = np.divmod(np.arange(0, rows * columns, into), columns)
            inside = (i < tensor.rows - first_i) & (j < tensor.columns - first_j)
            at = ((first_i + i) * tensor.columns + first_j + j)[inside]
            assert (at % into == 0).all()
            for e in range(into):
                tile[:, np.arange(0, rows * columns, into)[inside] + e] = matrices[:, at + e]
            j, i = np.divmod(np.arange(0, rows * columns, out), rows)
            inside = (i < tensor.rows - first_i) & (j < tensor.columns - first_j)
            at = ((first_j + j) * tensor.rows + first_i + i)[inside]
            assert (at % out == 0).all()
            for e in range(out):
                column, row = np.divmod(np.arange(0, rows * columns, out)[inside] + e, rows)
                result[:, at + e] = tile[:, row * columns + column]
                np.add.at(writes, at + e, 1)
    assert (writes == 1).all()
    return result.ravel()
