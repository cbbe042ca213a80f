"""The kernel of ConvImplicitGemmPingPong in NumPy: what its launch copies into shared memory, meets and stores.

Knows a launch by its maps, numbers and defines alone, and how kernels_src/implicit_gemm/wgmma_ping_pong.cu counts with
them. Stages are filled when a consumer comes to them: that is in order, but says nothing of whether one was free, which
helpers/runs/ping_pong_barriers.py does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from helpers.in_numpy.epilogue import Finish
from helpers.in_numpy.shared_memory import ELEMENT, PATTERN, SharedMemory, round_up, swizzled
from helpers.in_numpy.wgmma import Array
from helpers.problems.struct_fields import fields_of

from miofind.solver.steps import EpilogueArgument, KernelStep, TensorMap
from miofind.solver.structs import Struct


class Tile(NamedTuple):
    """What a block computes at a time: from which pixel of all images and which filter on."""

    pixel: int
    filter: int


class Launch:
    """One launch of the kernel.

    Args:
        memory: tensors by name, flat, channels last; the output is all NaN.
    """

    def __init__(self, step: KernelStep, memory: dict[str, Array]) -> None:
        self.pixels, self.filters, self.target, *self.read = (arg for arg in step.args if isinstance(arg, TensorMap))
        [struct] = [arg for arg in step.args if isinstance(arg, Struct)]
        self.shape, self.blocks = fields_of(struct), step.grid[0]
        self.walk, self.taps = self.shape["walk"], self.shape["taps_h"] * self.shape["taps_w"]
        self.k_tiles = self.taps * self.shape["chunks"]
        defines: dict[str, Any] = dict(step.defines)
        self.finish = Finish.of(next((arg for arg in step.args if isinstance(arg, EpilogueArgument)), None), defines)
        names = ("ROWS", "TILE_N", "CHANNELS", "LAST_K_STEPS", "OUT_CHANNELS", "STAGES", "KEPT_TILES", "OUT_STAGES")
        self.rows, self.tile_n, self.channels, self.last_k_steps = (int(defines[name]) for name in names[:4])
        self.out_channels, self.stages, self.kept_tiles, self.places = (int(defines[name]) for name in names[4:])
        self.is_data, self.is_pointwise = bool(defines["DATA"]), bool(defines["POINTWISE"])
        self.pixel_bytes, self.out_pixel = ELEMENT * self.channels, ELEMENT * self.out_channels
        self.filter_row = 128 if self.is_data else self.pixel_bytes
        self.block_bytes = 128 * self.channels
        self.filters_at = round_up(self.tile_n * self.pixel_bytes, PATTERN)
        filters_bytes = self.rows * self.block_bytes
        self.stage_bytes = self.filters_at + (0 if self.kept_tiles else filters_bytes)
        self.out_bytes = round_up(self.tile_n * self.out_pixel, PATTERN)
        self.place_bytes = max(1, len(self.finish.tensors)) * self.rows * self.out_bytes
        self.kept_at = SharedMemory.base + self.stages * self.stage_bytes
        self.places_at = self.kept_at + self.kept_tiles * filters_bytes
        assert step.shared_bytes == self.places_at + self.places * self.place_bytes
        assert self.kept_tiles in (0, self.k_tiles)
        self.shared = SharedMemory(step.shared_bytes, memory)

    def run(self) -> None:
        """Stores all results; each is stored once."""
        for block in range(self.blocks):
            self.shared.forget()
            for item, number in enumerate(range(block, self.shape["tiles"], self.blocks)):
                pixels, filters = divmod(number, self.shape["filter_tiles"])
                tile = Tile(pixels * self.tile_n, filters * 64 * self.rows)
                self._store(tile, item, self._multiply(tile, item))

    def _multiply(self, tile: Tile, item: int) -> Array:
        """The sums of a block's tile, (rows, 64, pixels)."""
        sums = np.zeros((self.rows, 64, self.tile_n))
        for k_tile in range(self.k_tiles):
            tap, chunk = divmod(k_tile, self.shape["chunks"])
            stage = self.shared.base + (item * self.k_tiles + k_tile) % self.stages * self.stage_bytes
            self.shared.forget(stage, self.stage_bytes)
            self._load_pixels(stage, tile, tap, chunk)
            filters = (
                self.kept_at + k_tile * self.rows * self.block_bytes if self.kept_tiles else stage + self.filters_at
            )
            if not self.kept_tiles or item == 0:
                self._load_filters(filters, tile, tap, chunk)
            is_last = chunk == self.shape["chunks"] - 1
            terms = np.arange(16 * (self.last_k_steps if is_last else self.channels // 16))
            addresses = stage + np.arange(self.tile_n)[:, None] * self.pixel_bytes + ELEMENT * terms
            b = self.shared.met(addresses, self.pixel_bytes)
            for row in range(self.rows):
                start = filters + row * self.block_bytes
                sums[row] += self.shared.rows_of_filters(start, terms, self.filter_row, are_columns=self.is_data) @ b.T
        return sums

    def _load_pixels(self, stage: int, tile: Tile, tap: int, chunk: int) -> None:
        walk, channel = self.walk, chunk * self.channels
        if self.is_pointwise:
            self.shared.load_box(self.pixels, stage, (channel, 0, tile.pixel))
            return
        line, w = divmod(tile.pixel, walk["width"])
        n, h = divmod(line, walk["height"])
        r, s = divmod(tap, self.shape["taps_w"])
        corner = (channel, w * walk["stride_w"] + walk["low_w"], h * walk["stride_h"] + walk["low_h"], n)
        self.shared.load_pixels(self.pixels, stage, corner, (s * walk["dilation_w"], r * walk["dilation_h"]))

    def _load_filters(self, to: int, tile: Tile, tap: int, chunk: int) -> None:
        """All rows at once; of backward data, whose filters lie along a row, 64 of them each."""
        if not self.is_data:
            self.shared.load_box(self.filters, to, (chunk * self.channels, tap, tile.filter))
            return
        for row in range(self.rows):
            corner = (tile.filter + 64 * row, self.taps - 1 - tap, chunk * self.channels)
            self.shared.load_box(self.filters, to + row * self.block_bytes, corner)

    def _store(self, tile: Tile, item: int, sums: Array) -> None:
        """Stages a tile's results where what is read with them is, and copies them out."""
        place = self.places_at + item % self.places * self.place_bytes
        self.shared.forget(place, self.place_bytes)
        for row in range(self.rows):
            to, corner = place + row * self.out_bytes, (tile.filter + 64 * row, 0, tile.pixel)
            for number, name in enumerate(self.finish.tensors):
                assert self.read[number].pointer.buffer == name
                self.shared.load_box(self.read[number], to + number * self.rows * self.out_bytes, corner)
            self._stage(Tile(tile.pixel, tile.filter + 64 * row), to, sums[row, : self.out_channels].T)
            self.shared.store_box(self.target, to, corner)

    def _stage(self, tile: Tile, to: int, sums: Array) -> None:
        """What the epilogue makes of sums, pixels by filters; channel_bias is of each pixel's image."""
        pixels, channels = np.arange(self.tile_n)[:, None], np.arange(self.out_channels)
        addresses = swizzled(to + pixels * self.out_pixel + ELEMENT * channels, self.out_pixel)
        apart = self.rows * self.out_bytes
        read = {name: addresses + number * apart for number, name in enumerate(self.finish.tensors)}
        images = np.minimum((tile.pixel + pixels) // self.shape["image_pixels"], self.shape["images"] - 1)
        filters = np.minimum(tile.filter + channels, self.shape["filters"] - 1)
        place = (images, filters, ...)
        results = self.finish(sums, place, self.shape["filters"], self.shared.beside(read))
        self.shared.elements[addresses // ELEMENT] = results
