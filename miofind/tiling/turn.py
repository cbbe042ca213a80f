"""How tensors are turned between channels first and channels last: tiles and launches of kernels_src/transpose.cu.

Pure arithmetic on shapes: knows nothing of devices or solvers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from miofind.problem import DataType, ProblemDescription
from miofind.solution import KernelStep, Pointer, Scalar
from miofind.tiling.correlation import ceil_div
from miofind.tiling.divisor import divisor

SOURCE = "transpose.cu"

_THREADS = 256
_WIDTH = 64  # columns of a tile of a wide matrix, and the most lines that are taken whole at any length
_LONGEST_ODD = 256  # elements of a line that is taken whole for the sake of wide vectors
_TILE_BYTES = 8 << 10
_MOST_TILE_BYTES = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How one tensor's elements change their order: rows x columns, for each of a batch, to columns x rows.

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
    def to_channels_last(problem: ProblemDescription, name: str) -> Turn:
        """From a tensor (n, c, ...) of the problem with its channels first to a buffer named `<name>_last`."""
        tensor = problem.tensor(name)
        batch, channels, *spatial = tensor.shape
        return Turn(
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
    def back(self) -> Turn:
        """The way back."""
        return replace(self, source=self.target, target=self.source, rows=self.columns, columns=self.rows)

    @property
    def tile(self) -> Tile:
        """What a block moves."""
        widest = 16 // self.dtype.itemsize
        line = 8 * widest  # 128 bytes of a column are written side by side
        most = _TILE_BYTES // self.dtype.itemsize
        takes_rows = _is_taken_whole(self.columns, widest)
        takes_columns = _is_taken_whole(self.rows, widest)
        if takes_rows and self.rows * self.columns * self.dtype.itemsize > _MOST_TILE_BYTES:
            takes_columns = False
        columns = self.columns if takes_rows else _WIDTH
        rows = self.rows if takes_columns else _share(self.rows, line, most // columns)
        if takes_columns and not takes_rows:
            columns = _share(self.columns, _WIDTH, most // rows)
        whole = self.rows * self.columns
        return Tile(
            rows=rows,
            columns=columns,
            in_=math.gcd(widest, *((whole, rows * columns) if takes_rows else (self.columns,))),
            out=math.gcd(widest, *((whole, rows * columns) if takes_columns else (self.rows,))),
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
    def args(self) -> tuple[Pointer | Scalar, ...]:
        """What the kernel is told of it."""
        return (
            Pointer(buffer=self.source),
            Pointer(buffer=self.target),
            *(Scalar(ctype="int32", value=value) for value in (self.rows, self.columns)),
            *(scalar for count in self.tiles for scalar in divisor(count)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Elements of a matrix that a block moves.

    Attributes:
        rows, columns: of the matrix, before it is turned.
        in_, out: elements that a thread loads and stores at once.
    """

    rows: int
    columns: int
    in_: int
    out: int

    @property
    def define(self) -> str:
        """As the kernel takes it."""
        return f"{self.rows},{self.columns},{self.in_},{self.out}"


def turning(turns: tuple[Turn, ...]) -> KernelStep:
    """The launch that turns one tensor, or two of one type.

    Args:
        turns: one or two.
    """
    blocks = [turn.blocks for turn in turns]
    return KernelStep(
        source=SOURCE,
        entry="transpose" if len(turns) == 1 else "transpose_two",
        grid=(sum(blocks), 1, 1),
        block=(_THREADS, 1, 1),
        defines=(
            ("ELEMENT", turns[0].dtype.value),
            *zip(("FIRST", "SECOND"), (turn.tile.define for turn in turns), strict=False),
        ),
        args=(
            *(arg for turn in turns for arg in turn.args),
            *(Scalar(ctype="int32", value=count) for count in blocks[:-1]),
        ),
        waits_itself=True,
    )


def _is_taken_whole(length: int, widest: int) -> bool:
    """Whether tiles have whole lines: where these are short, or too odd for wide vectors."""
    return length <= _WIDTH or (length % widest > 0 and length <= _LONGEST_ODD)


def _share(length: int, step: int, most: int) -> int:
    """Elements of a length, in steps, that each of equal tiles takes; more than a step only up to `most`."""
    tiles = ceil_div(length, max(step, most // step * step))
    return ceil_div(ceil_div(length, tiles), step) * step
