"""kernels_src/fft*.cu and cuFFT's transforms in NumPy, from what their steps say alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.solver.steps import FftStep, KernelStep, Pointer, Scalar
from miofind.solvers.common.divisor import divisor

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

    def divisor(self) -> int:
        by = int(self.number())
        assert [self.number(), self.number()] == [scalar.value for scalar in divisor(by)[1:]]
        return by

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

    @staticmethod
    def of(arguments: Arguments) -> Axis:
        return Axis(*arguments.numbers(6), arguments.divisor())

    def offset(self, tile: int, position: int) -> int | None:
        ahead = position - self.shift + tile * self.step
        if not self.low <= position < self.high or ahead < 0 or ahead % self.spread:
            return None
        return ahead // self.spread * self.stride if ahead // self.spread < self.size else None


@dataclass(frozen=True)
class Tensor:
    """TENSOR_OF and GRID_OF."""

    image_stride: int
    channel_stride: int
    channels: int
    first: int
    per_image: int
    across: int

    @staticmethod
    def of(arguments: Arguments) -> Tensor:
        image, channel = arguments.numbers(2)
        channels, first = arguments.divisor(), int(arguments.number())
        return Tensor(image, channel, channels, first, arguments.divisor(), arguments.divisor())

    def elements(self, tiles: int, lengths: tuple[int, int], axes: list[Axis]) -> Iterator[tuple[int, int, int, int]]:
        """Plane, row, column and offset in the tensor of every element of a chunk's tiles."""
        for tile in range(tiles):
            image, within = divmod(self.first + tile, self.per_image)
            at = divmod(within, self.across)
            offsets = [
                [axis.offset(place, i) for i in range(n)] for axis, place, n in zip(axes, at, lengths, strict=True)
            ]
            for channel in range(self.channels):
                base = image * self.image_stride + channel * self.channel_stride
                for row, down in enumerate(offsets[0]):
                    for column, right in enumerate(offsets[1]):
                        if down is not None and right is not None:
                            yield tile * self.channels + channel, row, column, base + down + right


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
    tensor = Tensor.of(given)
    pairs, row_pairs = given.divisor(), given.divisor()
    axes = [Axis.of(given), Axis.of(given)]
    given.end()
    tiles = items // (pairs * tensor.channels)
    lengths = (pairs // row_pairs, 2 * row_pairs)
    real = np.zeros((tiles * tensor.channels, *lengths))
    for plane, row, column, offset in tensor.elements(tiles, lengths, axes):
        real[plane, row, column] = buffers[source][offset]
    buffers[target][:items] = real.reshape(-1).view(np.complex128)


def _unpack(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, target, items, scale = given.buffer(), given.buffer(), int(given.number()), given.number()
    kept, kept_row = given.divisor(), given.divisor()
    tensor = Tensor.of(given)
    pairs, row_pairs = given.divisor(), given.divisor()
    axes = [Axis.of(given), Axis.of(given)]
    given.end()
    tiles, lengths = items // (kept * tensor.channels), (pairs // row_pairs, 2 * row_pairs)
    assert kept_row <= lengths[1]
    real = buffers[source].view(np.float64).reshape(-1, *lengths)
    for plane, row, column, offset in tensor.elements(tiles, lengths, axes):
        buffers[target][offset] = scale * real[plane, row, column]


def _tiles_forward(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, target, planes = given.buffer(), given.buffer(), int(given.number())
    tensor, axes = Tensor.of(given), [Axis.of(given), Axis.of(given)]
    given.end()
    lengths = _lengths(step)
    real = np.zeros((planes, *lengths))
    for plane, row, column, offset in tensor.elements(planes // tensor.channels, lengths, axes):
        real[plane, row, column] = buffers[source][offset]
    found = np.fft.rfftn(real, axes=(1, 2)).ravel()
    buffers[target][: found.size] = found


def _tiles_backward(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    source, target, planes, scale = given.buffer(), given.buffer(), int(given.number()), given.number()
    tensor, axes = Tensor.of(given), [Axis.of(given), Axis.of(given)]
    given.end()
    lengths = _lengths(step)
    half = lengths[1] // 2 + 1
    data = buffers[source][: planes * lengths[0] * half].reshape(planes, lengths[0], half)
    real = np.fft.irfftn(data, s=lengths, axes=(1, 2), norm="forward")
    for plane, row, column, offset in tensor.elements(planes // tensor.channels, lengths, axes):
        buffers[target][offset] = scale * real[plane, row, column]


def _lengths(step: KernelStep) -> tuple[int, int]:
    defines = dict(step.defines)
    return int(defines.get("LENGTH_H", 1)), int(defines["LENGTH_W" if "LENGTH_W" in defines else "LENGTH"])


def _product(step: KernelStep, given: Arguments, buffers: Buffers) -> None:
    names = [given.buffer() for _ in range(3)]
    rows, columns, terms, bins, accumulate = given.numbers(5)
    strides = [given.numbers(3) for _ in range(3)]
    column_blocks, row_blocks, bin_blocks = (given.divisor() for _ in range(3))
    given.end()
    defines = {name: int(value) for name, value in step.defines}
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
        out[place] = found + (out[place] if accumulate else 0)


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
    from_steps, to_steps, channels = given.numbers(2), given.numbers(2), given.divisor()
    first, per_image, across = int(given.number()), given.divisor(), given.divisor()
    axes = [Axis.of(given) for _ in range(4)]
    given.end()
    length = _lengths(step)[1]
    assert lines == (tiles + 1) // 2 * channels
    assert step.grid[0] * dict(step.defines)["LINES"] >= lines
    real = np.zeros((tiles * channels, 1, length))
    origin = Tensor(*from_steps, channels, first, per_image, across)
    for plane, row, column, offset in origin.elements(tiles, (1, length), axes[:2]):
        real[plane, row, column] = buffers[source][offset]
    transforms = buffers[filters][: channels * length].reshape(channels, length)
    transforms = transforms.conj() if dict(step.defines)["CONJUGATE"] else transforms
    spectra = np.fft.fft(real.reshape(tiles, channels, length)) * transforms
    back = scale * length * np.fft.ifft(spectra).real.reshape(tiles * channels, length)
    result = Tensor(*to_steps, channels, first, per_image, across)
    for plane, _, column, offset in result.elements(tiles, (1, length), axes[2:]):
        buffers[target][offset] = back[plane, column]


@dataclass(frozen=True)
class Ends:
    """An axis of fft/edges.cu."""

    source_size: int
    result_size: int
    taps: int
    pad: int
    stride: int
    leading: int
    steps: tuple[int, ...]
    asked: int

    @staticmethod
    def of(arguments: Arguments) -> Ends:
        sizes = arguments.numbers(4)
        stride = arguments.divisor()
        leading, *steps = arguments.numbers(4)
        return Ends(*sizes, stride, leading, tuple(steps), arguments.divisor())

    def results(self) -> list[int]:
        """Those that are asked about."""
        return [*range(self.leading), *range(self.result_size - self.asked + self.leading, self.result_size)]

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
    items, limit, terms = given.numbers(3)
    channels, of_group = given.divisor(), given.divisor()
    image_step, channel_step, term_step, filter_step, group_step, result_image, result_channel = given.numbers(7)
    rows, columns = Ends.of(given), Ends.of(given)
    given.end()
    backward, term = dict(step.defines)["BACKWARD"] == 1, np.arange(terms)
    asked = [(i, j) for i in rows.results() for j in columns.results()]
    assert items % (channels * len(asked)) == 0
    for image in range(items // (channels * len(asked))):
        for channel in range(channels):
            group, within = divmod(channel, of_group)
            for i, j in asked:
                pairs = [(a, b) for a in rows.met(i, backward=backward) for b in columns.met(j, backward=backward)]
                if len(pairs) * terms >= limit:
                    continue
                first = image * image_step + group * terms * channel_step
                filters = group * group_step + within * filter_step
                total = 0.0
                for (at_row, tap_row), (at_column, tap_column) in pairs:
                    at = first + at_row * rows.steps[0] + at_column * columns.steps[0]
                    tap = filters + tap_row * rows.steps[1] + tap_column * columns.steps[1]
                    total += float(buffers[source][at + term * channel_step] @ buffers[w][tap + term * term_step])
                place = image * result_image + channel * result_channel + i * rows.steps[2] + j * columns.steps[2]
                buffers[result][place] = total
