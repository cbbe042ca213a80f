"""The kernel of ConvImplicitGemmPingPong in NumPy: what its launch copies into shared memory, meets and stores.

Knows a launch by its maps, numbers and defines alone, and how kernels_src/implicit_gemm/wgmma_ping_pong.cu counts with
them. Stages are filled when a consumer comes to them: that is in order, but says nothing of whether one was free, which
helpers/runs/ping_pong_barriers.py does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from helpers.in_numpy.epilogue import Finish
from helpers.in_numpy.shared_memory import ELEMENT, PATTERN, Addresses, SharedMemory, round_up, swizzled
from helpers.in_numpy.wgmma import Array
from helpers.problems.struct_fields import fields_of

from miofind.solver.steps import EpilogueArgument, KernelStep, TensorMap
from miofind.solver.structs import Struct

UNIT = 64
"""Pixels of a channel side by side, where channels are first."""
UNIT_ROW = ELEMENT * UNIT


class Tile(NamedTuple):
    """What a block computes at a time: from which of a phase's pixels and which filter on."""

    pixel: int
    filter: int
    phase: int


class Launch:
    """One launch of the kernel.

    Args:
        memory: tensors by name, flat, in their memory order; the output is all NaN.
    """

    def __init__(self, step: KernelStep, memory: dict[str, Array]) -> None:
        self.pixels, self.filters, *results = (arg for arg in step.args if isinstance(arg, TensorMap))
        [struct] = [arg for arg in step.args if isinstance(arg, Struct)]
        self.shape, self.blocks = fields_of(struct), step.grid[0]
        self.walk = self.shape["walk"]
        defines: dict[str, Any] = dict(step.defines)
        self.phases = self.shape["phases"][: int(defines["PHASES"])]
        self.phases_in_turn = bool(defines["PHASES_IN_TURN"])
        maps = 1 if len(self.phases) == 1 else 4
        self.target, *self.read = (results[first : first + maps] for first in range(0, len(results), maps))
        self.finish = Finish.of(next((arg for arg in step.args if isinstance(arg, EpilogueArgument)), None), defines)
        names = ("ROWS", "TILE_N", "CHANNELS", "LAST_K_STEPS", "OUT_CHANNELS", "STAGES", "KEPT_TILES", "OUT_STAGES")
        self.rows, self.tile_n, self.channels, self.last_k_steps = (int(defines[name]) for name in names[:4])
        self.out_channels, self.stages, self.kept_tiles, self.places = (int(defines[name]) for name in names[4:])
        self.is_data, self.is_ordered = bool(defines["DATA"]), bool(defines["ORDERED"])
        self.in_first, self.out_first = defines["NCHW"] == "NCHW_ALL", defines["NCHW"] != "NCHW_NONE"
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
        assert self.kept_tiles in (0, sum(map(self.k_tiles, self.phases)))
        self.shared = SharedMemory(step.shared_bytes, memory)

    def run(self) -> None:
        """Stores all results; each is stored once."""
        for block in range(self.blocks):
            self.shared.forget()
            before = 0
            for item, number in enumerate(range(block, self.shape["tiles"], self.blocks)):
                tile = self.tile(number)
                self._store(tile, item, self._multiply(tile, item, before))
                before += self.k_tiles(self.phases[tile.phase])

    def tile(self, number: int) -> Tile:
        """The tile of that number."""
        group, filters = divmod(number, self.shape["filter_tiles"])
        phase, pixels = 0, group
        if len(self.phases) > 1:
            phase, pixels = divmod(group, self.shape["phase_step"])
            if self.phases_in_turn:
                phase, pixels = group % len(self.phases), phase
                phase = (phase + pixels) % len(self.phases)
        return Tile(pixels * self.tile_n, filters * 64 * self.rows, phase)

    def k_tiles(self, phase: dict[str, Any]) -> int:
        """Of a tile of a phase."""
        return phase["h"]["taps"] * phase["w"]["taps"] * self.shape["chunks"]

    def _multiply(self, tile: Tile, item: int, before: int) -> Array:
        """The sums of a block's tile, (rows, 64, pixels); `before` k-tiles were multiplied for those before."""
        sums, phase = np.zeros((self.rows, 64, self.tile_n)), self.phases[tile.phase]
        for k_tile in range(self.k_tiles(phase)):
            number, chunk = divmod(k_tile, self.shape["chunks"])
            tap = divmod(number, phase["w"]["taps"])
            stage = self.shared.base + (before + k_tile) % self.stages * self.stage_bytes
            self.shared.forget(stage, self.stage_bytes)
            self._load_pixels(stage, tile, tap, chunk)
            filters = (
                self.kept_at + k_tile * self.rows * self.block_bytes if self.kept_tiles else stage + self.filters_at
            )
            if not self.kept_tiles or item == 0:
                self._load_filters(filters, tile, tap, chunk)
            is_last = chunk == self.shape["chunks"] - 1
            terms = np.arange(16 * (self.last_k_steps if is_last else self.channels // 16))
            addresses, span = self._addresses(stage, terms, self.channels, are_first=self.in_first)
            b = self.shared.met(addresses, span)
            for row in range(self.rows):
                start = filters + row * self.block_bytes
                sums[row] += self.shared.rows_of_filters(start, terms, self.filter_row, are_columns=self.is_data) @ b.T
        return sums

    def _addresses(self, start: int, channels: Addresses, count: int, *, are_first: bool) -> tuple[Addresses, int]:
        """Where a tile's pixels by `count` channels are, before they are swizzled, and over how many bytes."""
        pixels = np.arange(self.tile_n)[:, None]
        if not are_first:
            return start + pixels * ELEMENT * count + ELEMENT * channels, ELEMENT * count
        unit, pixel = np.divmod(pixels, UNIT)
        return start + (unit * count + channels) * UNIT_ROW + ELEMENT * pixel, UNIT_ROW

    def _units(self, tile: Tile) -> list[tuple[int, int]]:
        """The image and first pixel there of each of a tile's units."""
        places = range(tile.pixel, tile.pixel + self.tile_n, UNIT)
        return [divmod(place, self.shape["image_pixels"]) for place in places]

    def _pixel(self, tile: Tile) -> tuple[int, int, int]:
        """The image, row and column of a tile's first pixel, among those of its phase."""
        line, w = divmod(tile.pixel, self.walk["width"])
        return (*divmod(line, self.walk["height"]), w)

    def _load_pixels(self, stage: int, tile: Tile, tap: tuple[int, int], chunk: int) -> None:
        walk, channel = self.walk, chunk * self.channels
        if self.in_first:
            for i, (image, pixel) in enumerate(self._units(tile)):
                self.shared.load_box(self.pixels, stage + i * self.channels * UNIT_ROW, (pixel, channel, image))
            return
        if self.is_ordered:
            self.shared.load_box(self.pixels, stage, (channel, 0, tile.pixel))
            return
        n, h, w = self._pixel(tile)
        step_h, step_w = (1, 1) if self.is_data else (walk["stride_h"], walk["stride_w"])
        corner = (channel, w * step_w + walk["low_w"], h * step_h + walk["low_h"], n)
        phase, sign = self.phases[tile.phase], -1 if self.is_data else 1
        r, s = (
            axis["offset"] + sign * number * walk[dilation]
            for axis, number, dilation in zip((phase["h"], phase["w"]), tap, ("dilation_h", "dilation_w"), strict=True)
        )
        assert min(r, s) >= 0
        self.shared.load_pixels(self.pixels, stage, corner, (s, r))

    def _load_filters(self, to: int, tile: Tile, tap: tuple[int, int], chunk: int) -> None:
        """All rows at once; of backward data, whose filters lie along a row, 64 of them each."""
        phase, shape = self.phases[tile.phase], self.shape
        row = phase["h"]["first"] + tap[0] * shape["tap_step_h"]
        number = row * shape["filter_w"] + phase["w"]["first"] + tap[1] * shape["tap_step_w"]
        if not self.is_data:
            self.shared.load_box(self.filters, to, (chunk * self.channels, number, tile.filter))
            return
        for row in range(self.rows):
            corner = (tile.filter + 64 * row, number, chunk * self.channels)
            self.shared.load_box(self.filters, to + row * self.block_bytes, corner)

    def _copy_results(self, maps: list[TensorMap], place: int, tile: Tile, filter_: int, *, stores: bool) -> None:
        """What is laid out as results of 64 filters, to a place, or from there."""
        if len(self.phases) == 1:
            copy = self.shared.store_box if stores else self.shared.load_box
            if self.out_first:
                for i, (image, pixel) in enumerate(self._units(tile)):
                    copy(maps[0], place + i * self.out_channels * UNIT_ROW, (pixel, filter_, image))
            else:
                copy(maps[0], place, (filter_, 0, tile.pixel))
            return
        n, h, w = self._pixel(tile)
        phase, walk = self.phases[tile.phase], self.walk
        corner = (
            filter_,
            w * walk["stride_w"] + phase["w"]["at"],
            h * walk["stride_h"] + phase["h"]["at"],
            n,
        )
        if stores:
            self.shared.store_pixels(maps[tile.phase], place, corner)
        else:
            self.shared.load_pixels(maps[tile.phase], place, corner, (0, 0))

    def _store(self, tile: Tile, item: int, sums: Array) -> None:
        """Stages a tile's results where what is read with them is, and copies them out."""
        place = self.places_at + item % self.places * self.place_bytes
        self.shared.forget(place, self.place_bytes)
        for row in range(self.rows):
            to, first = place + row * self.out_bytes, tile.filter + 64 * row
            for number, name in enumerate(self.finish.tensors):
                assert {each.pointer.buffer for each in self.read[number]} == {name}
                beside = to + number * self.rows * self.out_bytes
                self._copy_results(self.read[number], beside, tile, first, stores=False)
            self._stage(tile._replace(filter=first), to, sums[row, : self.out_channels].T)
            self._copy_results(self.target, to, tile, first, stores=True)

    def _stage(self, tile: Tile, to: int, sums: Array) -> None:
        """What the epilogue makes of sums, pixels by filters; channel_bias is of each pixel's image."""
        pixels, channels = np.arange(self.tile_n)[:, None], np.arange(self.out_channels)
        addresses = swizzled(*self._addresses(to, channels, self.out_channels, are_first=self.out_first))
        apart = self.rows * self.out_bytes
        read = {name: addresses + number * apart for number, name in enumerate(self.finish.tensors)}
        images = np.minimum((tile.pixel + pixels) // self.shape["image_pixels"], self.shape["images"] - 1)
        filters = np.minimum(tile.filter + channels, self.shape["filters"] - 1)
        place = (images, filters, ...)
        results = self.finish(sums, place, self.shape["filters"], self.shared.beside(read))
        self.shared.elements[addresses // ELEMENT] = results
