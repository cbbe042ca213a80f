"""Implicit im2col for few channels: what kernels_src/few_channels/input_tile.cuh and window_rows.cuh compute.

A window is the receptive field of one output, or of two neighbours where the stride is odd, in an image whose pixels
hold four channels: of each row pixels side by side. Pure arithmetic on shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.solver.columns import chosen, divisor, larger, smaller
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.limits import refuse_tensors

_MAX_CHANNELS = 4  # of a pixel
_MOST = 8  # elements of 16 bytes
_HELD_WORDS, _HELD_LOADS = 32, 8  # that a thread has on their way at most
_MAX_STRIDE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTileLoad:
    """How a thread moves its part of an input tile.

    Attributes:
        registers: for what it loads at once, and where.
        is_whole: whether that is all of it.
    """

    registers: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTile:
    """A tile of outputs of one image, and the input tile with its halo.

    Attributes:
        tile_h, tile_w: outputs, no more than there are; fewer columns than all in whole vectors of 8.
        row_tiles, column_tiles: of an image.
        outputs: of a window.
        windows: of a tile.
        row_steps: steps of 16 elements along a filter row, zeros around the taps included.
        offset: columns staged before those that the first output meets.
        vector: columns that are loaded at once.
        in_rows, in_columns: of the input tile.
        row_words: 16-byte words from one row of the input tile to the next.
        flat: whether the outputs of a tile are neighbours in NCHW memory.
    """

    tile_h: int
    tile_w: int
    row_tiles: int
    column_tiles: int
    outputs: int
    windows: int
    row_steps: int
    offset: int
    vector: int
    in_rows: int
    in_columns: int
    row_words: int
    flat: bool

    @staticmethod
    def of(problem: ProblemDescription, tile_h: int, tile_w: int, most: int = _MOST) -> WindowTile:
        """Tiles of at most `tile_h` rows and `tile_w` columns, as equal as may be, with vectors of at most `most`."""
        (out_h, out_w), (stride_y, stride_x), (taps_y, taps_x) = (
            problem.out_spatial,
            problem.conv.stride,
            problem.filter,
        )
        column_tiles = ceil_div(out_w, tile_w)
        tile_h = smaller(tile_h, out_h)
        tile_w = chosen(column_tiles == 1, out_w, round_up(ceil_div(out_w, column_tiles), 8))
        outputs = 1 + stride_x % 2
        row_windows = ceil_div(tile_w, outputs)
        row_steps = ceil_div(_MAX_CHANNELS * (taps_x + (outputs - 1) * stride_x), 16)
        vector = divisor(most, problem.spatial[1])
        offset = -problem.conv.pad_before[1] % vector
        met = offset + (row_windows - 1) * outputs * stride_x + 4 * row_steps
        in_rows, in_columns = (tile_h - 1) * stride_y + taps_y, round_up(met, vector)
        return WindowTile(
            tile_h=tile_h,
            tile_w=tile_w,
            row_tiles=ceil_div(out_h, tile_h),
            column_tiles=ceil_div(out_w, tile_w),
            outputs=outputs,
            windows=tile_h * row_windows,
            row_steps=row_steps,
            offset=offset,
            vector=vector,
            in_rows=in_rows,
            in_columns=in_columns,
            row_words=round_up(offset % 2 + in_columns, 16) // 2,
            flat=(tile_w == out_w) & ((tile_h == 1) | (tile_w % outputs == 0)),
        )

    @property
    def image(self) -> tuple[int, int]:
        """Rows and columns of tiles of an image."""
        return self.row_tiles, self.column_tiles

    @property
    def input_tile_bytes(self) -> int:
        """Shared memory of an input tile."""
        return 16 * self.in_rows * self.row_words

    def input_tile_load(self, channels: int, threads: int) -> InputTileLoad:
        """How each of `threads` threads moves an input tile: InputTileLoader of few_channels/input_tile.cuh."""
        loads = ceil_div(self.in_rows * self.in_columns, self.vector * threads)
        words = channels * larger(1, self.vector // 2)
        most = smaller(_HELD_WORDS // words, _HELD_LOADS)
        at_once = smaller(loads, most)
        addresses = (8 + at_once) * self.outputs if self.outputs > 1 or channels == _MAX_CHANNELS else at_once
        addresses = chosen(self.vector == _MOST, 0, addresses)  # of few loads they are not kept
        return InputTileLoad(registers=at_once * words + addresses, is_whole=loads <= most)

    def channels_first_vector(self, problem: ProblemDescription) -> int:
        """Elements of a channel of y that move at once and lie within a row of a tile, or within its rows."""
        out_h, out_w = problem.out_spatial
        within_rows = divisor(_MOST, out_h * out_w, self.tile_h * out_w)
        is_flat = self.flat & (self.tile_w % self.outputs == 0)
        return chosen(is_flat, within_rows, divisor(_MOST, out_w, self.tile_w))


def is_same_load(problem: ProblemDescription, most: int) -> bool:
    """Whether rows of x have no vectors of `most` elements, so that a lower limit means the same."""
    return (most > 2) & (math.gcd(_MOST, problem.spatial[1]) < most)


def refuse_windows(problem: ProblemDescription) -> Applicability:
    """Why the kernels of few channels cannot compute a problem, whatever its direction; APPLICABLE if they can."""
    if (answer := refuse_pixels(problem)).refused:
        return answer
    if any(size != 1 for size in problem.conv.dilation):
        return Applicability(f"needs dilation 1, not {problem.conv.dilation}")
    return refuse_tensors(problem)


def refuse_pixels(problem: ProblemDescription) -> Applicability:
    """Why pixels of few channels cannot be staged: more channels than one has, groups, or strides too large."""
    if problem.groups != 1 or problem.c > _MAX_CHANNELS:
        return Applicability(
            f"serves one group of up to {_MAX_CHANNELS} channels, not groups={problem.groups} c={problem.c}"
        )
    if max(problem.conv.stride) > _MAX_STRIDE:
        return Applicability(f"stages whole windows, of strides up to {_MAX_STRIDE}, not {problem.conv.stride}")
    return APPLICABLE
