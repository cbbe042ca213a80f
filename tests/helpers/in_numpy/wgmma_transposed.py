"""The product's kernel of ConvImplicitGemmWgmmaTurned in NumPy: what its launch copies, multiplies and writes.

Knows a launch by its maps, numbers and defines alone, and how kernels_src/implicit_gemm/wgmma_transposed.cu counts with
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.in_numpy.wgmma import Array, copied_box, copied_pixels

from miofind.solver.steps import KernelStep, TensorMap

WIDE = 32


class Launch:
    """One launch of the product's kernel.

    Args:
        named: the launch's numbers by the names of its structures' fields.
    """

    def __init__(self, step: KernelStep, named: dict[str, Any], memory: dict[str, Array]) -> None:
        defines = dict(step.defines)
        self.x, self.y = (arg for arg in step.args if isinstance(arg, TensorMap))
        self.named, self.memory, self.grid = named, memory, step.grid[0]
        self.pointwise = bool(defines["POINTWISE"])
        self.row_blocks = 2 * int(defines["CONSUMERS"]) * int(defines["ROWS"])
        self.column_blocks, self.cluster_k = int(defines["TILE_N"]) // WIDE, int(defines["CLUSTER_K"])

    def run(self) -> Array:
        """Elements of the result in memory, all partials one after another; NaN where nothing was written."""
        out = np.full(self.named["splits"] * self.named["out_size"], np.nan)
        clusters, rest = divmod(self.grid, self.cluster_k)
        assert rest == 0
        # clusters that split K take one work tile each
        assert self.cluster_k == 1 or clusters == self.named["work_tiles"]
        for cluster in range(clusters):
            for number in range(cluster, self.named["work_tiles"], clusters):
                self._compute(number, out)
        return out

    def _compute(self, number: int, out: Array) -> None:
        named = self.named
        row, tile_n = divmod(number, named["tiles_n"])
        rest, tile_m = divmod(row, named["tiles_m"])
        group, split = divmod(rest, named["splits"])
        ends = [self._first_k_tile(split, rank) for rank in range(self.cluster_k + 1)]
        assert ends[-1] == self._first_k_tile(split + 1, 0)
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
                    sums += x.T @ copied_box(self.y, self.memory["y"], filters, group, pixel)
                self._write(out, split, (group, filters, tap, chunk * WIDE), sums)

    def _first_k_tile(self, split: int, rank: int) -> int:
        return int(self.named["k_tiles"] * (split * self.cluster_k + rank) // self.named["splits"] // self.cluster_k)

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
        partial = out[split * named["out_size"] :][: named["out_size"]]
        tensor = partial.reshape(-1, named["filters"], named["taps"], named["channels"])
        to = tensor[group, filters : filters + WIDE, tap, channel : channel + WIDE]
        assert np.isnan(to).all()  # nothing is written twice
        to[:] = sums.T[: to.shape[0], : to.shape[1]]
