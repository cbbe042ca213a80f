"""Transposition of tensors between NCHW and NHWC: tiles and launches of kernels_src/implicit_gemm/transpose.cu.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from miofind.core.cached import cached_property
from miofind.core.problem import DataType, ProblemDescription
from miofind.solver.steps import Argument, KernelStep, Pointer, int32s
from miofind.solver.structs import StructType
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import DIVISOR, divide_by

SOURCE = "implicit_gemm/transpose.cu"

MATRICES = StructType("Matrices", rows="int32", columns="int32", tiles_down=DIVISOR, tiles_across=DIVISOR)
"""What the kernel takes of a tensor: the size of its matrices, and how many tiles each has down and across."""

BANDWIDTH_SHARE = 0.73
"""Of the device's nominal bandwidth, which transpose_step reaches on an H200 where tensors are large."""

_THREADS = 256
_LENGTH = 64  # elements of a line that a tile takes where it takes no whole lines
_LONGEST_ODD = 256  # elements of a line that is taken whole so that its vectors are wide
_TILE_BYTES = 8 << 10


@dataclass(frozen=True, kw_only=True)
class Transposition:
    """One tensor's transposition: rows x columns, for each matrix of a batch, to columns x rows.

    Attributes:
        source, target: buffers.
    """

    source: str
    target: str
    dtype: DataType
    batch: int
    rows: int
    columns: int

    @staticmethod
    def to_channels_last(problem: ProblemDescription, name: str) -> Transposition:
        """From a tensor (n, c, ...) of the problem with its channels first to a buffer named `<name>_last`."""
        tensor = problem.tensor(name)
        batch, channels, *spatial = tensor.shape
        return Transposition(
            source=name,
            target=f"{name}_last",
            dtype=tensor.dtype,
            batch=batch,
            rows=channels,
            columns=math.prod(spatial),
        )

    @property
    def is_needed(self) -> bool:
        """Whether the order of elements differs at all."""
        return self.rows > 1 and self.columns > 1

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return self.batch * self.rows * self.columns * self.dtype.itemsize

    @property
    def back(self) -> Transposition:
        """The inverse transposition."""
        return replace(self, source=self.target, target=self.source, rows=self.columns, columns=self.rows)

    @cached_property
    def tile(self) -> TransposeTile:
        """What a block moves.

        In shared memory it lies in lines along which vectors move whole; elements that move together across lines need
        a multiple of as many lines. Lines are rows or columns, whichever are the better multiple.
        """
        widest = 16 // self.dtype.itemsize
        scatters = math.gcd(widest, self.columns) > math.gcd(widest, self.rows)
        all_lines, all_of_line = (self.columns, self.rows) if scatters else (self.rows, self.columns)
        is_odd = math.gcd(widest, all_of_line) < widest // 2  # vectors of 8 bytes do as well as whole lines (H200)
        is_whole = all_of_line <= (_LONGEST_ODD if is_odd else _LENGTH)
        run, most = 8 * widest, _TILE_BYTES // self.dtype.itemsize
        if is_whole:
            length = all_of_line
            lines = all_lines if all_lines <= run else _share(all_lines, run, most // length)
            along = math.gcd(widest, all_lines * length, lines * length)
        else:
            lines = min(all_lines, run)
            length = _share(all_of_line, _LENGTH, most // lines)
            along = math.gcd(widest, all_of_line)
        across = math.gcd(widest, all_lines)
        return TransposeTile(
            rows=length if scatters else lines,
            columns=lines if scatters else length,
            loaded=across if scatters else along,
            stored=along if scatters else across,
            scatters=scatters,
            is_whole=is_whole,
        )

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles down and across a matrix."""
        return ceil_div(self.rows, self.tile.rows), ceil_div(self.columns, self.tile.columns)

    @property
    def blocks(self) -> int:
        """Blocks of a launch that move it."""
        return self.batch * math.prod(self.tiles)

    @property
    def args(self) -> tuple[Argument, ...]:
        """What the kernel is told of it."""
        down, across = map(divide_by, self.tiles)
        return (
            Pointer(buffer=self.source),
            Pointer(buffer=self.target),
            MATRICES(rows=self.rows, columns=self.columns, tiles_down=down, tiles_across=across),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposeTile:
    """Elements of a matrix that a block moves.

    Attributes:
        rows, columns: of the matrix, before it is transposed.
        loaded, stored: elements that a thread loads and stores at once.
        scatters: its lines in shared memory are columns, which vectors are scattered to, not rows.
        is_whole: its lines are as long as the matrix's, so that neighbouring ones are one run of memory.
    """

    rows: int
    columns: int
    loaded: int
    stored: int
    scatters: bool
    is_whole: bool

    @property
    def define(self) -> str:
        """As the kernel takes it."""
        values = (self.rows, self.columns, self.loaded, self.stored, int(self.scatters), int(self.is_whole))
        return ",".join(map(str, values))


def transpose_step(transpositions: tuple[Transposition, ...]) -> KernelStep:
    """The launch that transposes one tensor, or two of one type.

    Args:
        transpositions: one or two.
    """
    blocks = [each.blocks for each in transpositions]
    return KernelStep(
        source=SOURCE,
        entry="transpose" if len(transpositions) == 1 else "transpose_two",
        grid=(sum(blocks), 1, 1),
        block=(_THREADS, 1, 1),
        defines=(
            ("ELEMENT", transpositions[0].dtype.value),
            *zip(("FIRST", "SECOND"), (each.tile.define for each in transpositions), strict=False),
            MATRICES.define,
        ),
        args=(
            *(arg for each in transpositions for arg in each.args),
            *int32s(*blocks[:-1]),
        ),
        pdl=True,
    )


def _share(length: int, step: int, most: int) -> int:
    """Elements of a length, in steps, that each of equal tiles takes; more than a step only up to `most`."""
    tiles = ceil_div(length, max(step, most // step * step))
    return ceil_div(ceil_div(length, tiles), step) * step
