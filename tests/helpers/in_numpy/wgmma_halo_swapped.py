"""The kernel of ConvImplicitGemmHaloSwapped in NumPy: what its launch copies into shared memory, meets and stores.

Knows a launch by its maps, numbers and defines alone, and how kernels_src/implicit_gemm/wgmma_halo_swapped.cu counts
with them. Rings are filled when a consumer comes to a stage: that is in order, but says nothing of whether a stage was
free.
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


class Unit(NamedTuple):
    """What a block computes at a time: a tile of pixels, and from which filter on."""

    image: int
    row: int
    column: int
    filter: int


class Launch:
    """One launch of the kernel.

    Args:
        memory: tensors by name, flat, in their memory order; the output is all NaN.
    """

    def __init__(self, step: KernelStep, memory: dict[str, Array]) -> None:
        self.stores_planes = step.source.endswith("_planes.cu")
        maps = [arg for arg in step.args if isinstance(arg, TensorMap)]
        [struct] = [arg for arg in step.args if isinstance(arg, Struct)]
        self.pixels, self.filters, self.target, *self.read = maps
        self.shape, self.blocks = fields_of(struct), step.grid[0]
        defines: dict[str, Any] = dict(step.defines)
        self.finish = Finish.of(next((arg for arg in step.args if isinstance(arg, EpilogueArgument)), None), defines)
        names = ("FILTER_H", "FILTER_W", "DILATION_H", "DILATION_W", "TILE_H", "TILE_W", "TILE_N", "CHANNELS", "CHUNKS")
        self.filter_h, self.filter_w, self.dilation_h, self.dilation_w = (int(defines[name]) for name in names[:4])
        self.tile_h, self.tile_w, self.tile_n, self.channels, self.chunks = (int(defines[name]) for name in names[4:])
        self.is_data, self.last_k_steps = bool(defines["DATA"]), int(defines["LAST_K_STEPS"])
        self.out_channels, self.unit_blocks = int(defines["OUT_CHANNELS"]), int(defines["UNIT_BLOCKS"])
        self.consumers, self.slots = int(defines["CONSUMERS"]), int(defines["SLOTS"])
        self.stages, self.rows_are_images = int(defines["FILTER_STAGES"]), bool(defines["ROWS_ARE_IMAGES"])
        self.taps = self.filter_h * self.filter_w
        self.keeps_filters = self.stages == self.unit_blocks * self.chunks * self.taps
        self.tensors = self.finish.tensors
        self.pixel_bytes, self.row_pixels = ELEMENT * self.channels, self.tile_w + (self.filter_w - 1) * self.dilation_w
        if self.stores_planes:
            self.row_pixels = round_up(self.row_pixels, 8)
        rows = self.tile_h + (self.filter_h - 1) * self.dilation_h
        self.slot_bytes = round_up(rows * self.row_pixels * self.pixel_bytes, PATTERN)
        self.filter_bytes, self.filter_row = 128 * self.channels, 128 if self.is_data else self.pixel_bytes
        self.out_pixel = ELEMENT * self.out_channels
        self.place_bytes = round_up(self.tile_h * self.tile_w * self.out_pixel, PATTERN)
        places = self.consumers * max(1, len(self.tensors)) * self.place_bytes
        rings = self.slots * self.slot_bytes + self.stages * self.filter_bytes
        assert step.shared_bytes == PATTERN + rings + places
        self.shared = SharedMemory(step.shared_bytes, memory)

    def run(self) -> None:
        """Stores all results; each is stored once."""
        for block in range(self.blocks):
            self.shared.forget()
            self.slots_loaded = self.filters_loaded = item = 0
            while block + item // self.unit_blocks * self.blocks < self.shape["units"]:
                self._take(block, item)
                item += 1

    def _unit(self, number: int) -> Unit:
        tile, part = divmod(number, self.shape["parts"])
        rows, column = divmod(tile, self.shape["column_tiles"])
        image, row = divmod(rows, self.shape["row_tiles"])
        return Unit(image, row * self.tile_h, column * self.tile_w, part * self.unit_blocks * 64)

    def _take(self, block: int, item: int) -> None:
        """Multiplies one block of filters by a unit's tile, and stores the results."""
        of_block, filters = divmod(item, self.unit_blocks)
        unit = self._unit(block + of_block * self.blocks)
        first_filter = unit.filter + 64 * filters
        sums = np.zeros((64, self.tile_n))
        for chunk in range(self.chunks):
            slot = self._slot(unit, of_block * self.chunks + chunk, chunk)
            is_last = chunk == self.chunks - 1
            terms = np.arange(16 * (self.last_k_steps if is_last else self.channels // 16))
            for tap in range(self.taps):
                number = (filters if self.keeps_filters else item) * self.chunks * self.taps + chunk * self.taps + tap
                stage = self._stage(number, first_filter, chunk, tap)
                a = self.shared.rows_of_filters(stage, terms, self.filter_row, are_columns=self.is_data)
                r, s = divmod(tap, self.filter_w)
                start = slot + (r * self.dilation_h * self.row_pixels + s * self.dilation_w) * self.pixel_bytes
                pixels = start + np.arange(self.tile_n)[:, None] * self.pixel_bytes + ELEMENT * terms
                sums += a @ self.shared.met(pixels, self.pixel_bytes).T
        self._store(unit, first_filter, item % self.consumers, sums)

    def _slot(self, unit: Unit, number: int, chunk: int) -> int:
        """Where a chunk of a tile is; it is loaded when it is first met, in order."""
        slot = self.shared.base + number % self.slots * self.slot_bytes
        if number == self.slots_loaded:
            corner = (chunk * self.channels, unit.column - self.shape["pad_w"], unit.row - self.shape["pad_h"])
            self.shared.load_box(self.pixels, slot, (*corner, unit.image))
            self.slots_loaded += 1
        assert self.slots_loaded - self.slots <= number < self.slots_loaded
        return slot

    def _stage(self, number: int, first_filter: int, chunk: int, tap: int) -> int:
        """Where the filters of a tap of a chunk are."""
        stage = self.shared.base + self.slots * self.slot_bytes + number % self.stages * self.filter_bytes
        if number == self.filters_loaded:
            term = chunk * self.channels
            corner = (first_filter, self.taps - 1 - tap, term) if self.is_data else (term, tap, first_filter)
            self.shared.load_box(self.filters, stage, corner)
            self.filters_loaded += 1
        assert self.filters_loaded - self.stages <= number < self.filters_loaded
        return stage

    def _store(self, unit: Unit, first_filter: int, consumer: int, sums: Array) -> None:
        """Stages a tile's results where what is read with them is, and copies them out."""
        corner = (first_filter, unit.column, unit.row, unit.image)
        if self.stores_planes:
            corner = (unit.column, unit.row, first_filter, unit.image)
        rings = self.slots * self.slot_bytes + self.stages * self.filter_bytes
        place = self.shared.base + rings + consumer * max(1, len(self.tensors)) * self.place_bytes
        for number, name in enumerate(self.tensors):
            assert self.read[number].pointer.buffer == name
            self.shared.load_box(self.read[number], place + number * self.place_bytes, corner)
        rows, columns = np.divmod(np.arange(self.tile_n), self.row_pixels)
        inside = np.flatnonzero((rows < self.tile_h) & (columns < self.tile_w))  # not the halo between rows
        pixels = (rows * self.tile_w + columns)[inside, None]
        channels = np.arange(self.out_channels)
        if self.stores_planes:
            addresses = place + ELEMENT * (channels * self.tile_h * self.tile_w + pixels)
        else:
            addresses = swizzled(place + pixels * self.out_pixel + ELEMENT * channels, self.out_pixel)
        results = self._finished(sums[: self.out_channels, inside].T, addresses, first_filter + channels, unit)
        self.shared.elements[addresses // ELEMENT] = results
        self.shared.store_box(self.target, place, corner)

    def _finished(self, sums: Array, addresses: Addresses, filters: Addresses, unit: Unit) -> Array:
        """What the epilogue makes of sums, pixels by filters."""
        filters = np.minimum(filters, self.shape["filters"] - 1)
        places = {name: addresses + number * self.place_bytes for number, name in enumerate(self.tensors)}
        image = unit.row if self.rows_are_images else unit.image
        return self.finish(sums, (image, filters, ...), self.shape["filters"], self.shared.beside(places))
