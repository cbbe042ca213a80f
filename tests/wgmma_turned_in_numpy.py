"""The product's kernel of ConvImplicitGemmWgmmaTurned in NumPy: what its launch copies, turns, multiplies and writes.

Knows a launch by its maps, scalars and defines alone, and how kernels_src/implicit_gemm/wgmma_transposed.cu counts with
them. Shared memory is modelled word by word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from wgmma_in_numpy import Array, copied_box, copied_pixels

from miofind.solver.steps import KernelStep, TensorMap

WIDE = 32
_WORDS = WIDE * WIDE


def swizzled(block: Array) -> Array:
    """A block of 32 lines of 128 bytes, as a copy lays it into shared memory: words of 16 bytes are exchanged."""
    line, at = np.indices(block.shape)
    words = np.empty(_WORDS)
    words[line * WIDE + 4 * (at // 4 ^ line % 8) + at % 4] = block
    return words


def turned(words: Array) -> Array:
    """A block after a warp has turned it: lane by lane, as `turn` of the kernel reads and writes."""
    lane = np.arange(32)
    pixels = np.stack([words[m * WIDE + 4 * (lane // 4 ^ m % 8) + lane % 4] for m in range(32)])
    out = np.full(_WORDS, np.nan)
    for word in range(8):
        first = word // 2 * 8 + word % 2
        for i in range(4):
            out[lane * WIDE + 4 * (word ^ lane % 8) + i] = pixels[first + 2 * i]
    return out


def terms_of_columns(words: Array, product: int) -> Array:
    """(8, 32): what the product of that number reads of a turned block: depth side by side, swizzled by 128 bytes.

    Source: PTX ISA, wgmma, K-major operands with 128-byte swizzling.
    """
    k, n = np.indices((8, WIDE))
    return words[n * WIDE + 4 * ((2 * product + k // 4) ^ n % 8) + k % 4]


def terms_of_rows(words: Array, product: int, rows: int, half: int) -> tuple[Array, Array]:
    """(16 * rows, 8): fragments that a warp loads of a block, and (16 * rows,) which of its channels each row is.

    Source: PTX ISA, wgmma.m64nNk8, fragments of a: row g + 8 * (i % 2), term t + 4 * (i // 2) in register i.
    """
    found, channels = np.full((16 * rows, 8), np.nan), np.full(16 * rows, -1)
    for lane in range(32):
        g, t = divmod(lane, 4)
        channel = 4 * g if rows == 2 else 16 * half + 2 * g
        low = 2 * t * 128 + 16 * (channel // 4 ^ 2 * t) + 4 * (channel % 4)
        for later, at in enumerate((low, (low + 128) ^ 16)):
            for i in range(2 * rows):
                row = 16 * (i // 2) + g + 8 * (i % 2)
                found[row, t + 4 * later] = words[(at + product * 8 * 128) // 4 + i]
                channels[row] = channel + i
    return found, channels


def multiplied(x: Array, dy: Array, rows: int) -> Array:
    """(32 channels, 32 filters): the product of blocks (32 pixels, 32), by the ways of the kernel."""
    a, b = swizzled(x), turned(swizzled(dy))
    sums = np.zeros((WIDE, WIDE))
    for product in range(4):
        for half in range(3 - rows):
            terms, channels = terms_of_rows(a, product, rows, half)
            sums[channels] += terms @ terms_of_columns(b, product)
    return sums


class Launch:
    """One launch of the product's kernel.

    Args:
        named: the launch's scalars by the names of the kernel's parameters.
    """

    def __init__(self, step: KernelStep, named: dict[str, Any], memory: dict[str, Array]) -> None:
        defines = dict(step.defines)
        self.x, self.y = (arg for arg in step.args if isinstance(arg, TensorMap))
        self.named, self.memory, self.grid = named, memory, step.grid[0]
        self.rows, self.pointwise = int(defines["ROWS"]), bool(defines["POINTWISE"])
        self.row_blocks = 2 * int(defines["CONSUMERS"]) * self.rows
        self.column_blocks, self.shares = int(defines["TILE_N"]) // WIDE, int(defines["SHARES"])

    def run(self) -> Array:
        """Elements of the result in memory, all parts one after another; NaN where nothing was written."""
        out = np.full(self.named["splits"] * self.named["out_size"], np.nan)
        clusters, rest = divmod(self.grid, self.shares)
        assert rest == 0
        # blocks that add what they have take one work tile each
        assert self.shares == 1 or clusters == self.named["work_tiles"]
        for cluster in range(clusters):
            for number in range(cluster, self.named["work_tiles"], clusters):
                self._compute(number, out)
        return out

    def _compute(self, number: int, out: Array) -> None:
        named = self.named
        row, tile_n = divmod(number, named["tiles_n"])
        part, tile_m = divmod(row, named["tiles_m"])
        group, split = divmod(part, named["splits"])
        ends = [self._first_step(split, share) for share in range(self.shares + 1)]
        assert ends[-1] == self._first_step(split + 1, 0)
        assert ends == sorted(set(ends))  # none is empty
        for block in range(self.row_blocks):
            tap, chunk = divmod(tile_m * self.row_blocks + block, named["tap_blocks"])
            if tap >= named["taps"]:
                break
            for column in range(self.column_blocks):
                filters = (tile_n * self.column_blocks + column) * WIDE
                sums = np.zeros((WIDE, WIDE))
                for pixel in range(ends[0] * WIDE, ends[-1] * WIDE, WIDE):
                    x = self._pixels(group, tap, chunk * WIDE, pixel)
                    sums += multiplied(x, copied_box(self.y, self.memory["y"], filters, group, pixel), self.rows)
                self._write(out, split, (group, filters, tap, chunk * WIDE), sums)

    def _first_step(self, split: int, share: int) -> int:
        return int(self.named["k_tiles"] * (split * self.shares + share) // self.named["splits"] // self.shares)

    def _pixels(self, group: int, tap: int, channel: int, pixel: int) -> Array:
        named, memory = self.named, self.memory["x"]
        if self.pointwise:
            return copied_box(self.x, memory, channel, group, pixel)
        line, w = divmod(pixel, named["width"])
        n, h = divmod(line, named["height"])
        tap_y, tap_x = divmod(tap, named["taps_x"])
        reach = (tap_x * named["dilation_w"], tap_y * named["dilation_h"])
        corner = (w * named["stride_w"] + named["low_w"], h * named["stride_h"] + named["low_h"])
        return copied_pixels(self.x, memory, (group * named["channels"] + channel, *corner, n), reach)

    def _write(self, out: Array, split: int, at: tuple[int, int, int, int], sums: Array) -> None:
        named, (group, filters, tap, channel) = self.named, at
        part = out[split * named["out_size"] :][: named["out_size"]]
        tensor = part.reshape(named["groups"], named["filters"], named["taps"], named["channels"])
        to = tensor[group, filters : filters + WIDE, tap, channel : channel + WIDE]
        assert np.isnan(to).all()  # nothing is written twice
        to[:] = sums.T[: to.shape[0], : to.shape[1]]
