"""kernels_src/fft*.cu and cuFFT's transforms in NumPy, from what their steps say alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers.in_numpy.epilogue import Finish
from helpers.problems.struct_fields import fields_of
from numpy.typing import NDArray

from miofind.solver.steps import FftStep, KernelStep, Pointer, Scalar
from miofind.solvers.common.divisor import divide_by

Array = NDArray[Any]
Buffers = dict[str, Array]
"""Elements of tensors in the order of their memory, in float64; regions as complex128."""


class Arguments:
    """A step's arguments one after another."""

    def __init__(self, step: KernelStep) -> None:
        self.left: Iterator[Any] = iter(step.args)

    def buffer(self) -> str:
        pointer = next(self.left)
        assert isinstance(pointer, Pointer)
        assert pointer.offset_bytes == 0
        return pointer.buffer

    def number(self) -> Any:
        scalar = next(self.left)
        assert isinstance(scalar, Scalar)
        return scalar.value

    def numbers(self, count: int) -> list[int]:
        return [int(self.number()) for _ in range(count)]

    def fields(self) -> dict[str, Any]:
        return fields_of(next(self.left))

    def divisor(self) -> int:
        value = next(self.left)
        by = int(value.values[0])
        assert value == divide_by(by)
        return by

    def finish(self, step: KernelStep) -> Finish:
        """The epilogue, with which arguments end."""
        return Finish.of(next(self.left, None), dict(step.defines))

    def end(self) -> None:
        assert next(self.left, None) is None


@dataclass(frozen=True)
class Axis:
    """The kernels' `TileAxis`."""

    size: int
    stride: int
    step: int
    shift: int
    low: int
    high: int
    spread: int

    def offset(self, tile: int, position: int) -> int | None:
        ahead = position - self.shift + tile * self.step
        if not self.low <= position < self.high or ahead < 0 or ahead % self.spread:
            return None
        return ahead // self.spread * self.stride if ahead // self.spread < self.size else None


@dataclass(frozen=True)
class Tensor:
    """The kernels' `TiledTensor`."""

    image_stride: int
    channel_stride: int
    channels: int
    grid: dict[str, int]
    axes: tuple[Axis, Axis]

    @staticmethod
    def of(arguments: Arguments) -> Tensor:
        fields = arguments.fields()
        axes = Axis(**fields.pop("rows")), Axis(**fields.pop("columns"))
        return Tensor(**fields, axes=axes)

    def elements(self, tiles: int, lengths: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
        """Plane, row, column and offset in the tensor of every element of a chunk's tiles."""
        for tile in range(tiles):
            image, within = divmod(self.grid["first"] + tile, self.grid["tiles_per_image"])
            at = divmod(within, self.grid["tiles_across"])
            offsets = [
                [axis.offset(place, i) for i in range(n)] for axis, place, n in zip(self.axes, at, lengths, strict=True)
            ]
            for channel in range(self.channels):
                base = image * self.image_stride + channel * self.channel_stride
                for row, down in enumerate(offsets[0]):
                    for column, right in enumerate(offsets[1]):
                        if down is not None and right is not None:
                            yield tile * self.channels + channel, row, column, base + down + right

    def store(self, target: Array, sums: Array, tiles: int, finish: Finish, buffers: Buffers) -> None:
        """Write what an epilogue makes of planes' elements, as far as they are the tensor's."""
        planes, rows, columns, at = np.array(list(self.elements(tiles, sums.shape[1:]))).reshape(-1, 4).T
        image = (self.grid["first"] + planes // self.channels) // self.grid["tiles_per_image"]
        place = (image, planes % self.channels, at)
        target[at] = finish(sums[planes, rows, columns], place, self.channels, buffers)


def carry_out(step: KernelStep | FftStep, buffers: Buffers) -> None:
    """Change the buffers as the step does."""
    if isinstance(step, FftStep):
        _library(step, buffers)
        return
    kernels = {
        "fft_pack": _pack,
        "fft_unpack": _unpack,
        "fft_tiles_forward": _tiles_forward,
        "fft_tiles_backward": _tiles_backward,
        "fft_lines_forward": _tiles_forward,  # the order of frequencies is theirs alone
        "fft_lines_backward": _tiles_backward,
        "fft_depthwise_filters": _depthwise_filters,
        "fft_depthwise": _depthwise,
        "fft_edges": _edges,
        "fft_product": _product,
        "fft_product_direct": _product,
    }
    kernels[step.entry](step, Arguments(step), buffers)


def _library(step: FftStep, buffers: Buffers) -> None:
    *rows, last = step.lengths
    half = last // 2 + 1
    plane = math.prod(rows) * half
    assert step.workspace is None or step.workspace_bytes <= 16 * buffers[step.workspace].size
    first = step.data.offset_bytes // 8
    data = buffers[step.data.buffer][first : first + step.batch * plane]
    axes = tuple(range(1, 1 + len(step.lengths)))
    if step.inverse:
        back = np.fft.irfftn(data.reshape(step.batch, *rows, half), s=step.lengths, axes=axes, norm="forward")
        _set_planes(data, back.reshape(step.batch, -1, last))
    else:
        real = data.reshape(step.batch, -1, half).view(np.float64)[..., :last]
        data[...] = np.fft.rfftn(real.reshape(step.batch, *step.lengths), axes=axes).ravel()


def _set_planes(data: Array, real: Array) -> None:
    """Real rows in place of complex ones; what lies behind them means nothing."""
    planes, rows, last = real.shape
    data[...] = np.nan
    data.reshape(planes, rows, -1).view(np.float64)[..., :last] = real


def _pack(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, target, items = given.buffer(), given.buffer(), int(given.number())
    pairs, row_pairs = given.divisor(), given.divisor()
    tensor = Tensor.of(given)
    given.end()
    tiles = items // (pairs * tensor.channels)
    lengths = (pairs // row_pairs, 2 * row_pairs)
    real = np.zeros((tiles * tensor.channels, *lengths))
    for plane, row, column, offset in tensor.elements(tiles, lengths):
        real[plane, row, column] = buffers[source][offset]
    buffers[target][:items] = real.reshape(-1).view(np.complex128)


def _unpack(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, target, items, scale = given.buffer(), given.buffer(), int(given.number()), given.number()
    kept, kept_row = given.divisor(), given.divisor()
    pairs, row_pairs = given.divisor(), given.divisor()
    tensor, finish = Tensor.of(given), given.finish(step)
    given.end()
    tiles, lengths = items // (kept * tensor.channels), (pairs // row_pairs, 2 * row_pairs)
    assert kept_row <= lengths[1]
    real = buffers[source].view(np.float64).reshape(-1, *lengths)
    tensor.store(buffers[target], scale * real, tiles, finish, buffers)


def _tiles_forward(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, target, planes = given.buffer(), given.buffer(), int(given.number())
    tensor = Tensor.of(given)
    given.end()
    lengths = _lengths(step)
    real = np.zeros((planes, *lengths))
    for plane, row, column, offset in tensor.elements(planes // tensor.channels, lengths):
        real[plane, row, column] = buffers[source][offset]
    found = np.fft.rfftn(real, axes=(1, 2)).ravel()
    buffers[target][: found.size] = found


def _tiles_backward(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, target, planes, scale = given.buffer(), given.buffer(), int(given.number()), given.number()
    tensor, finish = Tensor.of(given), given.finish(step)
    given.end()
    lengths = _lengths(step)
    half = lengths[1] // 2 + 1
    data = buffers[source][: planes * lengths[0] * half].reshape(planes, lengths[0], half)
    real = np.fft.irfftn(data, s=lengths, axes=(1, 2), norm="forward")
    tensor.store(buffers[target], scale * real, planes // tensor.channels, finish, buffers)


def _lengths(step: KernelStep) -> tuple[int, int]:
    defines = dict(step.defines)
    return int(defines.get("LENGTH_H", 1)), int(defines["LENGTH_W" if "LENGTH_W" in defines else "LENGTH"])


def _product(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    names = [given.buffer() for _ in range(3)]
    shape = given.fields()
    given.end()
    rows, columns, terms, bins = (shape[name] for name in ("rows", "columns", "terms", "bins"))
    strides = [tuple(shape[name].values()) for name in ("a", "b", "out")]
    column_blocks, row_blocks, bin_blocks = (shape[f"{name}_blocks"] for name in ("column", "row", "bin"))
    defines = {name: int(value) for name, value in step.defines if not name.endswith("_FIELDS")}
    assert column_blocks * defines["TILE_N"] * defines["BLOCKS_N"] >= columns
    assert row_blocks * defines["TILE_M"] * defines["BLOCKS_M"] >= rows
    assert bin_blocks * defines["BINS"] >= bins
    groups = step.grid[0] // (column_blocks * row_blocks * bin_blocks)
    a, b, out = (buffers[name].reshape(-1, bins) for name in names)
    row, column, term = np.arange(rows)[:, None], np.arange(columns)[:, None], np.arange(terms)
    for group in range(groups):
        left = a[row * strides[0][0] + term * strides[0][1] + group * strides[0][2]]
        right = b[column * strides[1][0] + term * strides[1][1] + group * strides[1][2]]
        left = left.conj() if defines["CONJUGATE_A"] else left
        right = right.conj() if defines["CONJUGATE_B"] else right
        found = np.einsum("itf,jtf->ijf", left, right)
        place = row * strides[2][0] + column.T * strides[2][1] + group * strides[2][2]
        out[place] = found + (out[place] if shape["accumulate"] else 0)


def _depthwise_filters(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, target = given.buffer(), given.buffer()
    channels, taps, channel_step, tap_step = given.numbers(4)
    given.end()
    length = _lengths(step)[1]
    assert step.grid[0] * dict(step.defines)["LINES"] >= channels
    at = np.arange(channels)[:, None] * channel_step + np.arange(taps) * tap_step
    buffers[target][: channels * length] = np.fft.fft(buffers[source][at], length).ravel()


def _depthwise(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, filters, target = given.buffer(), given.buffer(), given.buffer()
    lines, tiles, scale = int(given.number()), int(given.number()), given.number()
    origin, result, finish = Tensor.of(given), Tensor.of(given), given.finish(step)
    given.end()
    channels, length = origin.channels, _lengths(step)[1]
    assert (result.channels, result.grid) == (origin.channels, origin.grid)
    assert lines == (tiles + 1) // 2 * channels
    assert step.grid[0] * dict(step.defines)["LINES"] >= lines
    real = np.zeros((tiles * channels, 1, length))
    for plane, row, column, offset in origin.elements(tiles, (1, length)):
        real[plane, row, column] = buffers[source][offset]
    transforms = buffers[filters][: channels * length].reshape(channels, length)
    transforms = transforms.conj() if dict(step.defines)["CONJUGATE"] else transforms
    spectra = np.fft.fft(real.reshape(tiles, channels, length)) * transforms
    back = scale * length * np.fft.ifft(spectra).real.reshape(tiles * channels, 1, length)
    result.store(buffers[target], back, tiles, finish, buffers)


@dataclass(frozen=True)
class Ends:
    """An axis of fft/edges.cu."""

    source_size: int
    result_size: int
    taps: int
    pad: int
    stride: int
    leading: int
    edges: int
    source_stride: int
    filter_stride: int
    result_stride: int

    def results(self) -> list[int]:
        """Those near its ends."""
        return [*range(self.leading), *range(self.result_size - self.edges + self.leading, self.result_size)]

    def met(self, result: int, *, backward: bool) -> list[tuple[int, int]]:
        """Pairs of a source and a tap."""
        if backward:
            pairs = [divmod(result + self.pad - tap, self.stride) for tap in range(self.taps)]
            found = [(at, tap) for tap, (at, rest) in enumerate(pairs) if rest == 0]
        else:
            found = [(result * self.stride - self.pad + tap, tap) for tap in range(self.taps)]
        return [(at, tap) for at, tap in found if 0 <= at < self.source_size]


def _edges(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, w, result = given.buffer(), given.buffer(), given.buffer()
    shape, finish = given.fields(), given.finish(step)
    given.end()
    items, limit, terms, channels = (shape[name] for name in ("results", "limit", "terms", "channels"))
    rows, columns = Ends(**shape["rows"]), Ends(**shape["columns"])
    backward, term = dict(step.defines)["BACKWARD"] == 1, np.arange(terms)
    asked = [(i, j) for i in rows.results() for j in columns.results()]
    assert items % (channels * len(asked)) == 0
    for image in range(items // (channels * len(asked))):
        for channel in range(channels):
            group, within = divmod(channel, shape["group_channels"])
            for i, j in asked:
                pairs = [(a, b) for a in rows.met(i, backward=backward) for b in columns.met(j, backward=backward)]
                if len(pairs) * terms >= limit:
                    continue
                first = image * shape["source_image_stride"] + group * terms * shape["source_channel_stride"]
                filters = group * shape["filter_group_stride"] + within * shape["filter_channel_stride"]
                total = 0.0
                for (at_row, tap_row), (at_column, tap_column) in pairs:
                    at = first + at_row * rows.source_stride + at_column * columns.source_stride
                    tap = filters + tap_row * rows.filter_stride + tap_column * columns.filter_stride
                    total += float(
                        buffers[source][at + term * shape["source_channel_stride"]]
                        @ buffers[w][tap + term * shape["filter_term_stride"]]
                    )
                place = image * shape["result_image_stride"] + channel * shape["result_channel_stride"]
                place += i * rows.result_stride + j * columns.result_stride
                buffers[result][place] = finish(np.float64(total), (image, channel, place), channels, buffers)
