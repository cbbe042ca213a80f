"""The product's kernel of ConvImplicitGemmWgmma in NumPy: what its launch copies, multiplies, stores and adds.

Knows a launch by its maps, numbers and defines alone, and how kernels_src/implicit_gemm/wgmma.cu counts with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from miofind.solver.steps import Box, Im2col, KernelStep, TensorMap

Array = NDArray[np.float64]


def viewed(tensor_map: TensorMap, memory: Array) -> Array:
    """A tensor as its map has it, dimensions outermost first; the map covers its buffer and no more."""
    itemsize = 2 if tensor_map.element in ("float16", "bfloat16") else 4
    assert tensor_map.pointer.offset_bytes == 0
    assert math.prod(tensor_map.sizes) == memory.size
    strides = [stride // itemsize for stride in reversed(tensor_map.strides_bytes)] + [1]
    sizes = tensor_map.sizes[::-1]
    assert sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) < memory.size
    return np.lib.stride_tricks.as_strided(memory, sizes, [memory.itemsize * stride for stride in strides])


def overlap(sizes: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...]) -> tuple[Any, Any]:
    """Where a box meets a tensor, in the tensor and in the box."""
    first = [max(0, start) for start in at]
    last = [max(f, min(size, start + length)) for f, size, start, length in zip(first, sizes, at, box, strict=True)]
    tensor = tuple(slice(f, end) for f, end in zip(first, last, strict=True))
    return tensor, tuple(slice(f - start, end - start) for f, end, start in zip(first, last, at, strict=True))


def copied_box(tensor_map: TensorMap, memory: Array, *at: int) -> Array:
    """A box of one index of an axis, which begins at a place, innermost first: (length, width), zeros beyond."""
    assert isinstance(tensor_map.copy, Box)
    tensor, sizes = viewed(tensor_map, memory), tensor_map.copy.sizes[::-1]
    copied = np.zeros(sizes)
    there, here = overlap(tensor.shape, sizes, at[::-1])
    copied[here] = tensor[there]
    return _matrix(copied)


def _matrix(box: Array) -> Array:
    """Without the one axis of length 1, which is not the innermost."""
    [axis] = [axis for axis, size in enumerate(box.shape[:-1]) if size == 1]
    return np.squeeze(box, axis)


def walked_pixels(tensor_map: TensorMap, image: Array, at: tuple[int, ...], tap: tuple[int, ...]) -> tuple[Any, Any]:
    """Where pixels are in a tensor and in a copy (pixels, channels), in the order of a walk from one (channel, w, h, n)
    on, of a volume (channel, w, h, d, n), moved by a tap (w, h) or (w, h, d); those inside alone.
    """
    walk = tensor_map.copy
    assert isinstance(walk, Im2col)
    channel, *corner, n = at
    dims = range(len(corner))
    axes = [range(walk.lower[i], tensor_map.sizes[1 + i] + walk.upper[i], walk.strides[i]) for i in dims]
    number = n
    for axis, place in reversed(list(zip(axes, corner, strict=True))):
        number = number * len(axis) + axis.index(place)  # the walk comes there
    rest, inside, places = number + np.arange(walk.pixels), np.full(walk.pixels, True), []
    for i, axis in zip(dims, axes, strict=True):
        rest, place = np.divmod(rest, len(axis))
        places.append(np.array(axis)[place] + tap[i])
        inside &= (places[-1] >= 0) & (places[-1] < image.shape[-2 - i])
    inside &= rest < image.shape[0]
    channels = max(0, min(walk.channels, image.shape[-1] - channel))
    there = tuple(place[inside] for place in (rest, *reversed(places)))
    return (*there, slice(channel, channel + channels)), (inside, slice(channels))


def copied_pixels(tensor_map: TensorMap, memory: Array, at: tuple[int, ...], tap: tuple[int, ...]) -> Array:
    """Pixels in the order of such a walk: (pixels, channels)."""
    image, walk = viewed(tensor_map, memory), tensor_map.copy
    assert isinstance(walk, Im2col)
    there, here = walked_pixels(tensor_map, image, at, tap)
    copied = np.zeros((walk.pixels, walk.channels))
    copied[here] = image[there]
    return copied


def store_box(tensor_map: TensorMap, memory: Array, values: Array, *at: int) -> None:
    """Writes (length, width) to a place, innermost first, cut off at the tensor's ends; nothing is written twice."""
    assert isinstance(tensor_map.copy, Box)
    tensor, sizes = viewed(tensor_map, memory), tensor_map.copy.sizes[::-1]
    box = values.reshape(sizes)
    assert _matrix(box).shape == values.shape
    there, here = overlap(tensor.shape, sizes, at[::-1])
    assert np.isnan(tensor[there]).all()
    tensor[there] = box[here]


class ClusterCoord(NamedTuple):
    """Of a block in its cluster, along M, N and K."""

    m: int
    n: int
    k: int


class Columns(NamedTuple):
    first: int
    tap: int


@dataclass(frozen=True)
class WorkTile:
    tile_m: int
    tile_n: int
    group: int
    split: int
    k_tiles: range
    phase: int


class PhaseAxis(NamedTuple):
    """What pixels of one axis of a phase meet, from what the kernel takes of it."""

    at: int
    first: int
    taps: int
    offset: int


class Phase(NamedTuple):
    """Of images the depth is one pixel, which one tap meets."""

    h: PhaseAxis
    w: PhaseAxis
    d: PhaseAxis = PhaseAxis(at=0, first=0, taps=1, offset=0)

    @property
    def taps(self) -> int:
        return self.d.taps * self.h.taps * self.w.taps


class Launch:
    """One launch of the product's kernel.

    Args:
        named: the launch's numbers by the names of its structures' fields.
    """

    def __init__(self, step: KernelStep, named: dict[str, Any], memory: dict[str, Array]) -> None:
        defines = dict(step.defines)
        rows, columns, self.target = (arg for arg in step.args if isinstance(arg, TensorMap))
        self.is_volume = "volume" in named
        self.named, self.memory, self.kind = {**named, **named.get("volume", {})}, memory, defines["KIND"]
        self.weights, self.swapped = self.kind == "WEIGHTS", bool(defines["SWAPPED"])
        self.pointwise, self.strided = bool(defines["POINTWISE"]), bool(defines["STRIDED"])
        self.nchw, self.segment = defines["NCHW"], int(defines["SEGMENT"])
        self.pixel_columns = not self.weights and (self.swapped or self.nchw != "NCHW_NONE")
        self.nchw_n = not self.weights and self.nchw == "NCHW_ALL"
        self.nchw_k = self.weights and self.nchw == "NCHW_ALL"
        self.k_major_filter = self.kind == "FORWARD" or (self.kind == "DATA" and defines["ELEMENT"] == "float32")
        self.blocks, self.block_n = int(defines["CONSUMERS"]) * int(defines["ROWS"]), int(defines["BLOCK_N"])
        self.tile_m, self.tile_n, self.tile_k = 64 * self.blocks, int(defines["TILE_N"]), int(defines["TILE_K"])
        self.cluster = ClusterCoord(*(int(defines[f"CLUSTER_{axis}"]) for axis in "MNK"))
        has_pixels_first = not self.weights and not self.pixel_columns
        self.pixels, self.boxes = (rows, columns) if has_pixels_first else (columns, rows)
        self.phases = [
            Phase(**{axis: PhaseAxis(**phase[axis]) for axis in "hwd" if axis in phase})
            for phase in named["phases"][: named["phase_count"]]
        ]
        self.phases_with_taps = named["phases_with_taps"]
        assert [phase.taps > 0 for phase in self.phases] == [
            number < self.phases_with_taps for number in range(len(self.phases))
        ]
        self.grid, self.taps = step.grid[0], named["taps_y"] * named["taps_x"]

    def run(self, size: int) -> Array:
        """Elements of the result in memory, all partials one after another; NaN where nothing was written."""
        splits = 1 if self.cluster.k > 1 else self.named["splits"]
        out = np.full(splits * size, np.nan)
        clusters, rest = divmod(self.grid, math.prod(self.cluster))
        assert rest == 0
        for cluster in range(clusters):
            for turn, first in enumerate(range(0, self.named["work_tiles"], clusters)):
                number = first + (clusters - 1 - cluster if self.strided and turn else cluster)
                if number >= self.named["work_tiles"]:
                    break
                assert self.cluster.k == 1 or number == cluster  # blocks that add what they have have one work tile
                self._compute(number, out, size)
        return out

    def _compute(self, number: int, out: Array, size: int) -> None:
        places = [ClusterCoord(*at) for at in np.ndindex(*self.cluster)]
        works = [self._work_tile(at, number) for at in places]
        sums = [self._multiply(at, work) for at, work in zip(places, works, strict=True)]
        if self.cluster.k > 1:
            for first in [number for number, work in enumerate(works) if work.split == 0]:
                shares = [number for number in range(first, len(works)) if works[number].split == number - first]
                if works[first].group < self.named["groups"]:
                    self._write_rows(works[first], np.sum([sums[number] for number in shares], axis=0), out)
            return
        for work, tile in zip(works, sums, strict=True):
            if self.named["splits"] > 1:
                self._write_rows(work, tile, out[work.split * size : (work.split + 1) * size])
            elif self.strided:
                self._write_rows(work, tile, out)
            elif self.swapped:
                self._store_swapped(work, tile, out)
            elif self.nchw == "NCHW_OUTPUT":
                self._write_nchw(work, tile, out)
            else:
                self._store(work, tile, out)

    def _work_tile(self, at: ClusterCoord, number: int) -> WorkTile:
        named, splits = self.named, self.named["splits"]
        phase, shares, count = 0, self.cluster.k, named["k_tiles"]
        if self.strided:
            phase, shares, number = self._phase_of(at, number)
            count = named["tap_blocks"] * self.phases[phase].taps
            assert count <= named["k_tiles"]
        row, tile_n = divmod(number, named["tiles_n"])
        part, tile_m = divmod(row, named["tiles_m"])
        group, split = (part, at.k % shares) if self.cluster.k > 1 else divmod(part, splits)
        parts = shares if self.cluster.k > 1 else splits
        assert group < named["groups"] or shares < self.cluster.k
        k_tiles = range(count * split // parts, count * (split + 1) // parts)
        assert k_tiles  # or a stage would be freed that was never filled
        return WorkTile(tile_m * self.cluster.m + at.m, tile_n * self.cluster.n + at.n, group, split, k_tiles, phase)

    def _phase_of(self, at: ClusterCoord, number: int) -> tuple[int, int, int]:
        """The phase of a work tile, the shares of its tiles, and the number of a block's tile of that phase."""
        named, phase = self.named, 0
        tiles = named["tiles_m"] * named["tiles_n"] * named["groups"]
        tiles *= 1 if self.cluster.k > 1 else named["splits"]
        while True:
            shares = 1 << named["phases"][phase]["log2_cluster_k"]
            apart = self.cluster.k // shares
            items = -(-tiles // apart)
            if number < items:
                return phase, shares, number * apart + at.k // shares
            number, phase = number - items, phase + 1
            assert phase < self.phases_with_taps

    def _tap(self, work: WorkTile, step: int) -> tuple[int, tuple[int, ...]]:
        """The tap of a step by its number in the filter, and how far its pixels are from where the walk is."""
        named, (h, w, d) = self.named, self.phases[work.phase]
        tap_y, tap_x = divmod(step // named["tap_blocks"], w.taps if self.strided else named["taps_x"])
        number = tap_y * named["taps_x"] + tap_x
        plane_taps_y = named.get("plane_taps_y", named["taps_y"])  # of the filter
        rows = h.taps if self.strided else plane_taps_y
        if self.strided:
            z, y = divmod(tap_y, rows)
            row = (d.first + z * named.get("tap_stride_d", 1)) * plane_taps_y + h.first + y * named["tap_stride_h"]
            number = row * named["taps_x"] + w.first + tap_x * named["tap_stride_w"]
        assert number < self.taps
        moved = self._moved(tap_y, tap_x, rows)
        if self.kind == "DATA":
            offsets = (d.offset, h.offset, w.offset)[-len(moved) :]
            moved = tuple(offset - place for offset, place in zip(offsets, moved, strict=True))
        assert all(0 <= pixels <= (31 if self.is_volume else 255) for pixels in moved)
        return number, moved

    def _moved(self, tap_y: int, tap_x: int, rows: int) -> tuple[int, ...]:
        """How far the pixels of a tap are from those of the first one, outermost first; a plane has so many rows."""
        named = self.named
        if not self.is_volume:
            return tap_y * named["dilation_h"], tap_x * named["dilation_w"]
        tap_z, tap_y = divmod(tap_y, rows)
        return tap_z * named["dilation_d"], tap_y * named["dilation_h"], tap_x * named["dilation_w"]

    def _columns(self, work: WorkTile, block: int) -> Columns | None:
        number = work.tile_n * (self.tile_n // self.block_n) + block
        tap, chunk = divmod(number, self.named["tap_blocks"]) if self.weights else (0, number)
        columns = Columns(chunk * self.block_n, tap)
        is_any = tap < self.taps if self.weights else columns.first < self.named["size_n"]
        return columns if is_any else None

    def _multiply(self, at: ClusterCoord, work: WorkTile) -> Array:
        """A tile's sums: NaN in columns that were not copied."""
        sums = np.zeros((self.tile_m, self.tile_n))
        for step in work.k_tiles:
            if self.nchw_k:
                named, place = self.named, self._in_nchw(step, self.tile_k)
                rows = self._nchw_box(self.boxes, place, work.group * named["size_m"] + work.tile_m * self.tile_m)
                first_column = work.group * named["size_n"] + work.tile_n * self.tile_n
                columns = self._nchw_box(self.pixels, place, first_column)
            elif self.weights:
                rows = self._rows_of_weights(work, step)
                columns = self._columns_of_weights(work, step)
            else:
                rows, columns = self._filters(work, step), self._pixels_at(work, step)
                if not self.pixel_columns:
                    rows, columns = columns, rows
            assert rows.shape == (self.tile_m, self.tile_k)
            assert columns.shape == (self.tile_n, self.tile_k)
            sums += rows @ columns.T
        return sums

    def _in_nchw(self, number: int, length: int) -> tuple[int, int]:
        """Image of a block of pixels, and its first pixel in there."""
        n, block = divmod(number, self.named["width"])
        return n, block * length

    def _nchw_box(self, pixels: TensorMap, place: tuple[int, int], channel: int) -> Array:
        """Pixels of channels from one on: (channels, pixels)."""
        return copied_box(pixels, self.memory[pixels.pointer.buffer], place[1], channel, place[0])

    def _walked(self, number: int, channel: int, moved: tuple[int, ...]) -> Array:
        """Pixels from a number on, moved by a tap, outermost first."""
        named, memory = self.named, self.memory[self.pixels.pointer.buffer]
        row, w = divmod(number, named["width"])
        n, h = divmod(row, named["height"])
        strides = (1, 1) if self.strided else (named["stride_h"], named["stride_w"])
        corner = [w * strides[1] + named["low_w"], h * strides[0] + named["low_h"]]
        if self.is_volume:
            n, d = divmod(n, named["depth"])
            corner.append(d * (1 if self.strided else named["stride_d"]) + named["low_d"])
        return copied_pixels(self.pixels, memory, (channel, *corner, n), moved[::-1])

    def _pixels_at(self, work: WorkTile, step: int) -> Array:
        named, memory = self.named, self.memory[self.pixels.pointer.buffer]
        chunk, (_, moved) = step % named["tap_blocks"], self._tap(work, step)
        length = self.tile_n if self.pixel_columns else self.tile_m
        first, first_k = (work.tile_n if self.pixel_columns else work.tile_m) * length, chunk * self.tile_k
        if self.nchw_n:
            numbers = range(first // self.block_n, (first + length) // self.block_n)
            places = [self._in_nchw(number, self.block_n) for number in numbers]
            channel = work.group * named["channels"] + first_k
            return np.concatenate([self._nchw_box(self.pixels, place, channel).T for place in places])
        shares = []
        for share in range(self.cluster.n):
            number = first + share * (length // self.cluster.n)
            if self.pointwise:
                shares.append(copied_box(self.pixels, memory, first_k, work.group, number))
            else:
                shares.append(self._walked(number, work.group * named["channels"] + first_k, moved))
        return np.concatenate(shares)

    def _filters(self, work: WorkTile, step: int) -> Array:
        named, memory = self.named, self.memory[self.boxes.pointer.buffer]
        chunk, (tap, *_) = step % named["tap_blocks"], self._tap(work, step)
        length, tile = (self.tile_m, work.tile_m) if self.pixel_columns else (self.tile_n, work.tile_n)
        of_group, first_k, shares = (
            named["size_m" if self.pixel_columns else "size_n"],
            chunk * self.tile_k,
            self.cluster.m,
        )
        if self.k_major_filter:
            first = work.group * of_group + tile * length
            firsts = [first + share * (length // shares) for share in range(shares)]
            if self.kind == "DATA":  # the filter has been turned
                lines = work.group * self.taps + tap
                firsts = [first - work.group * of_group for first in firsts]
                return np.concatenate([copied_box(self.boxes, memory, first_k, first, lines) for first in firsts])
            return np.concatenate([copied_box(self.boxes, memory, first_k, tap, first) for first in firsts])
        blocks = []
        for block in range(0, length, 64 if self.pixel_columns else self.block_n):
            first = work.group * named["channels"] + first_k
            firsts = [first + share * (self.tile_k // shares) for share in range(shares)]
            parts = [copied_box(self.boxes, memory, tile * length + block, tap, first) for first in firsts]
            blocks.append(np.concatenate(parts).T)
        return np.concatenate(blocks)

    def _rows_of_weights(self, work: WorkTile, step: int) -> Array:
        if self.nchw == "NCHW_A":
            place = divmod(step * self.tile_k, self.named["height"] * self.named["width"])
            return self._nchw_box(self.boxes, place, work.group * self.named["size_m"] + work.tile_m * self.tile_m)
        memory, shares = self.memory[self.boxes.pointer.buffer], self.cluster.n
        numbers = [step * self.tile_k + share * (self.tile_k // shares) for share in range(shares)]
        firsts = [work.tile_m * self.tile_m + 64 * block for block in range(self.blocks)]
        return np.concatenate(
            [
                np.concatenate([copied_box(self.boxes, memory, first, work.group, number) for number in numbers]).T
                for first in firsts
            ]
        )

    def _columns_of_weights(self, work: WorkTile, step: int) -> Array:
        named, memory, shares = self.named, self.memory[self.pixels.pointer.buffer], self.cluster.m
        copied = np.full((self.tile_n, self.tile_k), np.nan)
        for block in range(self.tile_n // self.block_n):
            columns = self._columns(work, block)
            if columns is None:
                break
            parts = []
            for share in range(shares):
                number = step * self.tile_k + share * (self.tile_k // shares)
                if self.pointwise:
                    parts.append(copied_box(self.pixels, memory, columns.first, work.group, number))
                else:
                    channel = work.group * named["size_n"] + columns.first
                    tap_y, tap_x = divmod(columns.tap, named["taps_x"])
                    rows = named.get("plane_taps_y", named["taps_y"])
                    parts.append(self._walked(number, channel, self._moved(tap_y, tap_x, rows)))
            copied[block * self.block_n : (block + 1) * self.block_n] = np.concatenate(parts).T
        return copied

    def _store(self, work: WorkTile, sums: Array, out: Array) -> None:
        for first in range(0, self.tile_m, 64):
            row = work.tile_m * self.tile_m + first
            if row >= self.named["size_m"]:
                break
            for block in range(self.tile_n // self.block_n):
                columns = self._columns(work, block)
                if columns is None:
                    break
                values = sums[first : first + 64, block * self.block_n : (block + 1) * self.block_n]
                if self.weights:
                    row_of_all = work.group * self.named["size_m"] + row
                    store_box(self.target, out, values, columns.first, columns.tap, row_of_all)
                elif self.nchw_n:
                    n, pixel = self._in_nchw(columns.first // self.block_n, self.block_n)
                    store_box(self.target, out, values, pixel, work.group * self.named["size_m"] + row, n)
                else:
                    store_box(self.target, out, values, columns.first, work.group, row)

    def _store_swapped(self, work: WorkTile, sums: Array, out: Array) -> None:
        for row in range(0, self.tile_m, 64):
            for column in range(0, self.tile_n, 64):
                filters, pixel = work.tile_m * self.tile_m + row, work.tile_n * self.tile_n + column
                if pixel < self.named["size_n"] and filters < self.named["size_m"]:
                    values = sums[row : row + 64, column : column + 64].T
                    store_box(self.target, out, values, filters, work.group, pixel)

    def _write_rows(self, work: WorkTile, sums: Array, out: Array) -> None:
        """What is stored by rows, elements in the order of the tensor; beside the last phase's, zeros."""
        if self.pixel_columns:
            self._write_nchw(work, sums, out)
            return
        named = self.named
        row_of_tile = work.tile_m * self.tile_m
        count = max(0, min(self.tile_m, named["size_m"] - row_of_tile))
        rows = row_of_tile + np.arange(count)
        self._write_lines(work, *self._rows_of_all(work.phase, rows), sums[:count], out)
        if self.strided and work.phase == self.phases_with_taps - 1:
            for phase in range(self.phases_with_taps, len(self.phases)):
                self._write_lines(work, *self._rows_of_all(phase, rows), np.zeros((count, self.tile_n)), out)

    def _write_lines(
        self, work: WorkTile, stored: NDArray[np.bool_], rows: NDArray[np.int64], sums: Array, out: Array
    ) -> None:
        named = self.named
        for block in range(self.tile_n // self.block_n):
            columns = self._columns(work, block)
            if columns is None:
                break
            width = max(0, min(self.block_n, named["size_n"] - columns.first))
            if self.weights:
                lines = (work.group * named["size_m"] + rows) * self.taps + columns.tap
            else:
                lines = rows * named["groups"] + work.group
            places = lines[:, None] * named["size_n"] + columns.first + np.arange(width)
            assert np.isnan(out[places]).all()
            out[places] = sums[stored, block * self.block_n : block * self.block_n + width]

    def _write_nchw(self, work: WorkTile, sums: Array, out: Array) -> None:
        """Likewise where the columns are pixels of planes, run by run."""
        named, image = self.named, self.named["image_pixels"]
        first_row, first = work.tile_m * self.tile_m, work.tile_n * self.tile_n
        rows = np.arange(first_row, min(first_row + self.tile_m, named["size_m"]))
        for column in range(first, min(first + self.tile_n, named["size_n"]), self.segment):
            if self.nchw_n:
                n, pixel = self._in_nchw(column // self.block_n, self.block_n)
                pixel += column % self.block_n
            else:
                n, pixel = divmod(column, self.named["image"] if self.is_volume else image)
            if pixel >= image:
                continue
            assert pixel + self.segment <= image
            planes = (n * named["groups"] + work.group) * named["size_m"] + rows
            places = planes[:, None] * image + pixel + np.arange(self.segment)
            assert (places[:, 0] % self.segment == 0).all()
            assert np.isnan(out[places]).all()
            out[places] = sums[: len(rows), column - first : column - first + self.segment]

    def _rows_of_all(self, phase: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which of a phase's rows are stored, and as which of the result."""
        named = self.named
        if not self.strided:
            return np.full(rows.shape, True), rows
        lines, w = np.divmod(rows, named["width"])
        n, h = np.divmod(lines, named["height"])
        n, d = np.divmod(n, named.get("depth", 1))
        d = d * named.get("stride_d", 1) + self.phases[phase].d.at
        h = h * named["stride_h"] + self.phases[phase].h.at
        w = w * named["stride_w"] + self.phases[phase].w.at
        depth = named.get("dx_depth", 1)
        stored = (d < depth) & (h < named["dx_height"]) & (w < named["dx_width"])
        return stored, (((n * depth + d) * named["dx_height"] + h) * named["dx_width"] + w)[stored]
