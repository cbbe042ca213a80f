"""winograd/batched.cu and its products in NumPy, from what their steps say alone; fails where a vector is torn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers.in_numpy.epilogue import Finish
from helpers.problems.struct_fields import fields_of
from numpy.typing import NDArray

from miofind.solver.steps import KernelStep, MatmulStep, Pointer, Scalar
from miofind.solvers.common.divisor import divide_by

THREADS = 128

Array = NDArray[Any]
Buffers = dict[str, Array]
"""Elements of tensors and regions in the order of their memory, in float64."""


class Arguments:
    """A step's arguments one after another."""

    def __init__(self, step: KernelStep) -> None:
        self.left: Iterator[Any] = iter(step.args)

    def buffer(self) -> str:
        pointer = next(self.left)
        assert isinstance(pointer, Pointer)
        assert pointer.offset_bytes == 0
        return pointer.buffer

    def number(self) -> int:
        scalar = next(self.left)
        assert isinstance(scalar, Scalar)
        return int(scalar.value)

    def fields(self) -> dict[str, Any]:
        return fields_of(next(self.left))

    def divisor(self) -> int:
        value = next(self.left)
        by = int(value.values[0])
        assert value == divide_by(by)
        return by

    def end(self) -> None:
        assert next(self.left, None) is None


@dataclass(frozen=True)
class Tiles:
    """The kernels' struct of that name."""

    first: int
    count: int
    tile_rows: int
    tile_columns: int
    slice_tiles: int
    slices: int

    @staticmethod
    def of(arguments: Arguments) -> Tiles:
        return Tiles(**arguments.fields())

    @property
    def padded(self) -> int:
        return self.slices * self.slice_tiles


@dataclass(frozen=True)
class Operand:
    """The kernels' struct of that name, and the defines of its tensor."""

    channels: int
    height: int
    width: int
    pad_top: int
    pad_left: int
    group_channels: int
    items: int
    last: bool
    lanes: int
    vector: int
    places_within: bool

    @staticmethod
    def of(arguments: Arguments, defines: dict[str, Any], name: str) -> Operand:
        last, lanes, vector = (defines[f"{name}_{field}"] for field in ("LAST", "LANES", "VECTOR"))
        within = bool(defines["PLACES_WITHIN"])
        return Operand(**arguments.fields(), last=bool(last), lanes=lanes, vector=vector, places_within=within)

    def check(self, defines: dict[str, Any], tiles: int) -> int:
        """The threads it takes; vectors are whole."""
        if self.last:
            assert self.vector == 1
            assert self.group_channels % self.lanes == 0
            assert self.items == self.channels // self.lanes
        else:
            assert self.lanes == 1
            assert self.width % self.vector == defines["TILE_W"] % self.vector == 0
            assert self.items == tiles
        return tiles * self.channels // self.lanes

    def images(self, flat: Array) -> Array:
        """A view as (n, channels, height, width)."""
        if self.last:
            return flat.reshape(-1, self.height, self.width, self.channels).transpose(0, 3, 1, 2)
        return flat.reshape(-1, self.channels, self.height, self.width)

    def transformed(self, flat: Array, tiles: Tiles, places: int) -> Array:
        """A view as (places, channels, slices, tiles of a slice)."""
        groups, size = self.channels // self.group_channels, self.group_channels
        flat = flat[: places * self.channels * tiles.padded]
        if self.last and self.places_within:
            assert tiles.slices == 1
            whole = flat.reshape(1, tiles.slice_tiles, places, groups, size).transpose(2, 3, 4, 0, 1)
        elif self.last:
            whole = flat.reshape(places, groups, tiles.slices, tiles.slice_tiles, size).transpose(0, 1, 4, 2, 3)
        else:
            whole = flat.reshape(places, groups, tiles.slices, size, tiles.slice_tiles).transpose(0, 1, 3, 2, 4)
        assert np.shares_memory(whole, flat)
        return whole

    def corner(self, defines: dict[str, Any], tiles: Tiles, tile: int) -> tuple[int, int, int]:
        row, column = divmod(tiles.first + tile, tiles.tile_columns)
        image, row = divmod(row, tiles.tile_rows)
        return image, row * defines["TILE_H"] - self.pad_top, column * defines["TILE_W"] - self.pad_left


def matrix(defines: dict[str, Any], name: str, rows: int) -> Array:
    values = [float(np.float32(text.removesuffix("f"))) for text in defines[name].split(",")]
    return np.array(values).reshape(rows, -1)


def both(defines: dict[str, Any], name: str, rows: tuple[int, int]) -> tuple[Array, Array]:
    down, across = (matrix(defines, f"{name}_{axis}", count) for axis, count in zip("HW", rows, strict=True))
    return down, across


def carry_out(step: KernelStep | MatmulStep, buffers: Buffers) -> None:
    """Run a step; regions that it has not written stay what they were."""
    if isinstance(step, MatmulStep):
        _multiply(step, buffers)
        return
    assert step.block == (THREADS, 1, 1)
    defines = dict(step.defines)
    arguments = Arguments(step)
    run = {"winograd_operands": _operands, "winograd_results": _results, "winograd_weights": _weights}[step.entry]
    threads = run(arguments, defines, buffers)
    arguments.end()
    assert step.grid == (sum(-(-count // THREADS) for count in threads), 1, 1)


def _operands(arguments: Arguments, defines: dict[str, Any], buffers: Buffers) -> list[int]:
    source, target, other, others = (arguments.buffer() for _ in range(4))
    other_blocks = arguments.number()
    tiles = Tiles.of(arguments)
    x = Operand.of(arguments, defines, "INPUT")
    assert defines["INPUT_LEAD"] == x.pad_left % x.vector
    _transform(x, tiles, defines, "INPUT", buffers[source], buffers[target])
    threads = [x.check(defines, tiles.padded)]
    if defines["WEIGHTS"]:
        y = Operand.of(arguments, defines, "OTHER")
        _transform(y, tiles, defines, "OTHER", buffers[other], buffers[others])
        threads.append(y.check(defines, tiles.padded))
        assert other_blocks == -(-threads[1] // THREADS)
        return threads
    pairs, channels = arguments.number(), arguments.divisor()
    if other_blocks == 0:
        return threads
    assert other_blocks == -(-pairs // THREADS)
    down, across = both(defines, "OTHER", (defines["PRODUCTS_H"], defines["PRODUCTS_W"]))
    w = _filters(defines, buffers[other], "OTHER", pairs, channels)
    buffers[others][:] = np.einsum("ia,pab,jb->ijp", down, w, across).ravel()
    return [*threads, pairs]


def _filters(defines: dict[str, Any], flat: Array, name: str, pairs: int, channels: int) -> Array:
    """A copy of filters as (pairs, taps down, across)."""
    h, w = defines["TAPS_H"], defines["TAPS_W"]
    if defines[f"{name}_LAST"]:
        return flat.reshape(pairs // channels, h, w, channels).transpose(0, 3, 1, 2).reshape(pairs, h, w)
    return flat.reshape(pairs, h, w)


def _transform(
    operand: Operand, tiles: Tiles, defines: dict[str, Any], name: str, source: Array, target: Array
) -> None:
    down, across = both(defines, name, (defines["PRODUCTS_H"], defines["PRODUCTS_W"]))
    places = len(down) * len(across)
    images = operand.images(source)
    out = operand.transformed(target, tiles, places)
    out[:] = 0
    for tile in range(tiles.count):
        image, top, left = operand.corner(defines, tiles, tile)
        window = np.zeros((operand.channels, down.shape[1], across.shape[1]))
        for i in range(max(0, -top), min(down.shape[1], operand.height - top)):
            for j in range(max(0, -left), min(across.shape[1], operand.width - left)):
                window[:, i, j] = images[image, :, top + i, left + j]
        values = np.einsum("ia,cab,jb->ijc", down, window, across).reshape(places, -1, operand.group_channels)
        out[:, :, :, tile // tiles.slice_tiles, tile % tiles.slice_tiles] = values


def _results(arguments: Arguments, defines: dict[str, Any], buffers: Buffers) -> list[int]:
    source, target = arguments.buffer(), arguments.buffer()
    tiles = Tiles.of(arguments)
    y = Operand.of(arguments, defines, "OUTPUT")
    finish = Finish.of(next(arguments.left, None), defines)
    shape = (defines["TILE_H"], defines["TILE_W"])
    down, across = both(defines, "OUTPUT", shape)
    products = y.transformed(buffers[source], tiles, down.shape[1] * across.shape[1])
    images, elements = y.images(buffers[target]), y.images(np.arange(buffers[target].size))
    channels = np.arange(y.channels)[:, None, None]
    for tile in range(tiles.count):
        image, top, left = y.corner(defines, tiles, tile)
        values = products[:, :, :, 0, tile].reshape(down.shape[1], across.shape[1], y.channels)
        results = np.einsum("ai,ijc,bj->cab", down, values, across)
        rows, columns = min(shape[0], y.height - top), min(shape[1], y.width - left)
        here = (image, slice(None), slice(top, top + rows), slice(left, left + columns))
        place = (image, channels, elements[here])
        images[here] = finish(results[:, :rows, :columns], place, y.channels, buffers)
    return [y.check(defines, tiles.count)]


def _weights(arguments: Arguments, defines: dict[str, Any], buffers: Buffers) -> list[int]:
    source, target = arguments.buffer(), arguments.buffer()
    pairs, slices = arguments.number(), arguments.number()
    channels, group_pairs = arguments.divisor(), arguments.divisor()
    shape = (defines["TAPS_H"], defines["TAPS_W"])
    down, across = both(defines, "OUTPUT", shape)
    products = buffers[source].reshape(down.shape[1], across.shape[1], -1, slices, group_pairs).sum(3)
    filters = np.einsum("ai,ijp,bj->pab", down, products.reshape(*products.shape[:2], pairs), across)
    if defines["OUTPUT_LAST"]:
        filters = filters.reshape(pairs // channels, channels, *shape).transpose(0, 2, 3, 1)
    buffers[target][:] = filters.ravel()
    return [pairs]


def _multiply(step: MatmulStep, buffers: Buffers) -> None:
    """Column-major C = A B + beta C for each of the batch."""

    def view(pointer: Pointer, itemsize: int, sizes: tuple[int, int, int], stride: int) -> Array:
        rows, columns, ld = sizes
        assert ld >= rows
        flat = buffers[pointer.buffer][pointer.offset_bytes // itemsize :]
        assert (step.batch - 1) * stride + (columns - 1) * ld + rows <= len(flat)
        strides = [8 * count for count in (stride, 1, ld)]
        return np.lib.stride_tricks.as_strided(flat, (step.batch, rows, columns), strides)

    size = step.dtype_ab.itemsize
    a_sizes = (step.k, step.m, step.lda) if step.transpose_a else (step.m, step.k, step.lda)
    b_sizes = (step.n, step.k, step.ldb) if step.transpose_b else (step.k, step.n, step.ldb)
    a, b = view(step.a, size, a_sizes, step.stride_a), view(step.b, size, b_sizes, step.stride_b)
    c = view(step.c, step.dtype_c.itemsize, (step.m, step.n, step.ldc), step.stride_c)
    product = (a.swapaxes(1, 2) if step.transpose_a else a) @ (b.swapaxes(1, 2) if step.transpose_b else b)
    c[...] = product + (step.beta * c if step.beta else 0)
