"""ConvFirstLayerData: backward data of convolutions of few channels on tensor cores.

The input is divided into cells that all meet outputs in the same way. Kernel: kernels_src/first_layer_data.cu. Knows
nothing of how candidates are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.device import Device, Library, Place
from miofind.problem import DataType, Direction, Layout, ProblemDescription
from miofind.solution import Config, ConfigValue, ConvSolution, KernelStep, Pointer, Scalar
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.tiling.correlation import ceil_div, round_up
from miofind.tiling.divisor import divisor
from miofind.tiling.windows import unserved

_MAX_SUMS = 96
_MAX_FRAGMENTS = 64
_MAX_WARPS = 8
_MAX_REGISTERS = 232
_SHARED_BYTES = 48 << 10
_SM_SHARED_BYTES = 227 << 10
_MAX_RESIDENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells along one axis of the input: `size` pixels each, of which the first begins `origin` pixels before it.

    Attributes:
        size: pixels of a cell, a multiple of the stride.
        origin: pixels of the first cell before the input.
        count: cells that cover the input.
        first: the first output that a cell meets, less its number times size / stride.
        taps: outputs that it meets from there on.
        last_tap: the tap, which may be none of the filter's, through which that output meets a cell's first pixel.
    """

    size: int
    origin: int
    count: int
    first: int
    taps: int
    last_tap: int

    @staticmethod
    def of(problem: ProblemDescription, axis: int, size: int) -> Cells:
        """Those that meet fewest outputs, and of these, that begin nearest before the input."""
        stride, pad, filter_size = problem.conv.stride[axis], problem.conv.pad_before[axis], problem.filter[axis]

        def meeting(origin: int) -> tuple[int, int]:
            start = pad - origin  # pixel e of cell 0 meets output i through tap start + e - i * stride
            return -((filter_size - 1 - start) // stride), (start + size - 1) // stride

        origin = min(range(size), key=lambda origin: (meeting(origin)[1] - meeting(origin)[0], origin))
        first, last = meeting(origin)
        return Cells(
            size=size,
            origin=origin,
            count=ceil_div(problem.spatial[axis] + origin, size),
            first=first,
            taps=max(1, last - first + 1),
            last_tap=pad - origin - first * stride,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/first_layer_data.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        height, width: cells.
        column_blocks: of 8 elements of a cell.
        depth, chunks: filters that are staged at a time, and how often.
        offset: columns staged before those that the first cell meets.
        in_vector: elements of dy that are loaded at once.
        in_pixels: staged.
        sums, fragments: registers of a thread for sums and for filters.
        threads: of a block.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        row_tiles, column_tiles: of an image.
        tiles: of all images.
    """

    height: Cells
    width: Cells
    column_blocks: int
    depth: int
    chunks: int
    offset: int
    in_vector: int
    in_pixels: int
    sums: int
    fragments: int
    threads: int
    registers: int
    shared_bytes: int
    resident: int
    row_tiles: int
    column_tiles: int
    tiles: int

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        stride_y, stride_x = problem.conv.stride
        step = 2 if stride_x == 1 else 1
        height, width = Cells.of(problem, 0, stride_y), Cells.of(problem, 1, step * stride_x)
        elements, last = height.size * width.size * problem.c, problem.y.layout.channels_last
        column_blocks = 1 if elements <= 8 else 2 * ceil_div(elements, 16)
        chunks = ceil_div(problem.k, config["depth"])
        depth = round_up(ceil_div(problem.k, chunks), 16)
        in_vector = math.gcd(8, problem.k if last else problem.out_spatial[1])
        offset = 0 if last else width.first % in_vector
        rows, warps_y, warps_x, warps_k = (config[name] for name in ("rows", "warps_y", "warps_x", "warps_k"))
        columns = offset + (16 * warps_x - 1) * step + width.taps
        row_pixels = step * ceil_div(columns if last else round_up(columns, in_vector), step)
        in_rows = rows * warps_y + height.taps - 1
        filters = 8 * column_blocks * (2 * height.taps * width.taps * chunks * depth + 16)
        raw = round_up(2 * problem.w.size, 16)
        sums = 4 * rows * column_blocks
        staged = in_rows * row_pixels * (2 * depth + 16)
        joined = (warps_k - 1) * warps_y * warps_x * sums * 128
        shared_bytes = filters + max(config["stages"] * staged + joined, staged + raw)
        threads = 32 * warps_y * warps_x * warps_k
        fragments = round_up(height.taps * column_blocks, 2) * 2
        registers = round_up(sums + max(fragments + 8, 0 if last else 4 * in_vector) + 56, 8)
        by_registers, by_shared = 65536 // (registers * threads), _SM_SHARED_BYTES // (shared_bytes + 1024)
        row_tiles = ceil_div(height.count, rows * warps_y)
        column_tiles = ceil_div(width.count, 16 * warps_x)
        return _Tiling(
            height=height,
            width=width,
            column_blocks=column_blocks,
            depth=depth,
            chunks=chunks,
            offset=offset,
            in_vector=in_vector,
            in_pixels=in_rows * row_pixels,
            sums=sums,
            fragments=fragments,
            threads=threads,
            registers=registers,
            shared_bytes=shared_bytes,
            resident=max(1, min(by_registers, by_shared, 2048 // threads, _MAX_RESIDENT)),
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            tiles=row_tiles * column_tiles * problem.n,
        )

    def blocks(self, device: Device) -> int:
        """Blocks of the grid."""
        return min(self.tiles, max(1, device.sm_count * self.resident))


def _has_pairs(problem: ProblemDescription, tiling: _Tiling) -> bool:
    """Whether two neighbouring elements of a cell are an aligned word of dx."""
    width, columns = tiling.width, problem.spatial[1]
    per_column = problem.c if problem.x.layout.channels_last else 1
    return all(size * per_column % 2 == 0 for size in (width.size, width.origin, columns))


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    height, width, (stride_y, stride_x) = tiling.height, tiling.width, problem.conv.stride
    return (
        ("ELEMENT", problem.x.dtype.value),
        ("CHANNELS", problem.c),
        ("FILTERS", problem.k),
        ("FILTER_Y", problem.filter[0]),
        ("FILTER_X", problem.filter[1]),
        ("STRIDE_Y", stride_y),
        ("STRIDE_X", stride_x),
        ("CELL_X", width.size),
        ("TAPS_Y", height.taps),
        ("TAPS_X", width.taps),
        ("LAST_TAP_Y", height.last_tap),
        ("LAST_TAP_X", width.last_tap),
        ("ORIGIN_Y", height.origin),
        ("ORIGIN_X", width.origin),
        ("OFFSET", tiling.offset),
        *((name.upper(), config[name]) for name in ("rows", "warps_y", "warps_x", "warps_k")),
        ("DEPTH", tiling.depth),
        ("STAGES", config["stages"]),
        ("CHANNELS_LAST", int(problem.x.layout.channels_last)),
        ("IN_VECTOR", tiling.in_vector),
        ("PAIRS", int(_has_pairs(problem, tiling))),
        ("MIN_BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
    )


def _ints(*values: int) -> tuple[Scalar, ...]:
    return tuple(Scalar(ctype="int32", value=value) for value in values)


def _config(rows: int, warps_y: int, warps_x: int, warps_k: int, depth: int, stages: int) -> Config:
    return Config.of(rows=rows, warps_y=warps_y, warps_x=warps_x, warps_k=warps_k, depth=depth, stages=stages)


# What default_configs ranks by estimate.
_SHORT_LIST = tuple(
    _config(rows, *warps, depth, stages)
    for rows in (1, 2, 4, 8)
    for warps in ((1, 1, 4), (1, 1, 8), (2, 1, 2), (1, 2, 2), (1, 4, 1), (2, 2, 1), (4, 1, 1), (2, 4, 1), (4, 2, 1))
    for depth in (32, 64, 96, 512)
    for stages in (1, 2)
)

_LAUNCH_MS = 0.0025
_EXPOSED = 0.4


class ConvFirstLayerData(Solver):
    """Backward data for up to four channels: products of outputs and filters, for all pixels that a stride divides.

    Products with zeros complete the filters: an infinity or NaN of dy spreads to pixels near those that meet it. Sums
    are float32; equal inputs give equal bits.

    Configuration: a block of `warps_y` x `warps_x` x `warps_k` warps stages `depth` filters of dy in `stages` buffers;
    a warp computes `rows` rows of 16 cells of pixels, and `warps_k` warps share the filters.
    """

    id = "ConvFirstLayerData"
    algorithm = Algorithm.IMPLICIT_GEMM
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset({Layout.NCHW, Layout.NHWC}),
            min_sm=80,
        ),
    )
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "rows": (1, 2, 4, 8),
        "warps_y": (1, 2, 4),
        "warps_x": (1, 2, 4),
        "warps_k": (1, 2, 4, 8),
        "depth": (32, 64, 96, 512),
        "stages": (1, 2),
    }
    sources = ("first_layer_data.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain, last = DataType.FLOAT16, DataType.BFLOAT16, Layout.NHWC

        def conv(**fields: object) -> ProblemDescription:
            return ProblemDescription.convolution(direction=Direction.BACKWARD_DATA, **fields)  # type: ignore[arg-type]

        return (
            conv(x=(2, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2, dtype=half, layout=last),
            conv(x=(2, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2, dtype=half),
            conv(x=(2, 3, 32, 40), w=(32, 3, 3, 3), padding=1, dtype=brain, layout=last),
            conv(x=(2, 3, 32, 40), w=(32, 3, 3, 3), padding=1, dtype=brain),
            conv(x=(2, 3, 32, 32), w=(96, 3, 4, 4), stride=4, dtype=half, layout=last),
            conv(x=(3, 1, 28, 28), w=(6, 1, 5, 5), padding=2, dtype=half),
            conv(x=(2, 4, 17, 23), w=(37, 4, 3, 2), padding=((4, 0), (5, 1)), stride=(1, 3), dtype=brain, layout=last),
            conv(x=(1, 2, 33, 31), w=(19, 2, 5, 11), padding=2, stride=(3, 1), dtype=half),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if problem.direction is not Direction.BACKWARD_DATA:
            return Applicability(f"computes backward data only, not {problem.direction}")
        reason = unserved(problem)
        if reason:
            return Applicability(reason)
        if not any(self.is_valid_config(problem, device, config) for config in _SHORT_LIST):
            sizes = f"k={problem.k} filter {problem.filter} stride {problem.conv.stride}"
            return Applicability(f"filters are too large for a block: {sizes}")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        if not 4 <= config["warps_y"] * config["warps_x"] * config["warps_k"] <= _MAX_WARPS:
            return False
        if config["depth"] >= 2 * round_up(problem.k, 32) and config["depth"] > 32 and config["depth"] != 512:
            return False
        if math.prod(problem.conv.stride) * problem.c * 2 > 256:
            return False
        tiling = _Tiling.of(problem, config)
        if config["depth"] == 512 and (tiling.chunks > 1 or problem.k <= 96):
            return False
        if config["warps_k"] > tiling.depth // 16 and config["warps_k"] > 4:
            return False
        if config["rows"] * config["warps_y"] >= 2 * max(4, tiling.height.count):
            return False
        if config["warps_x"] > max(1, tiling.column_tiles * config["warps_x"]):
            return False
        if tiling.sums > _MAX_SUMS or tiling.fragments > _MAX_FRAGMENTS or tiling.registers > _MAX_REGISTERS:
            return False
        if config["stages"] == 2 and not problem.y.layout.channels_last:
            return False
        fits_registers = tiling.registers * tiling.threads <= 65536
        return fits_registers and tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        valid = [config for config in _SHORT_LIST if self.is_valid_config(problem, device, config)]
        ranked = sorted(valid, key=lambda config: self.estimate_ms(problem, device, config))
        return tuple(ranked[:8])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config)
        moved_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
        rows, taps_y = config["rows"], tiling.height.taps
        steps = tiling.width.taps * tiling.depth // 16 * tiling.chunks
        warps = config["warps_y"] * config["warps_x"]
        products = 1.8 * warps * steps * rows * taps_y * tiling.column_blocks
        reads = 4.5 * warps * steps * (rows + taps_y - 1 + taps_y * tiling.column_blocks / 2)
        words = tiling.in_pixels * tiling.depth * tiling.chunks / 8
        staged = words * (1.0 if problem.y.layout.channels_last else 1.6) * 8 / min(8, 2 * tiling.in_vector)
        joined = (config["warps_k"] - 1) * warps * tiling.sums * 2
        stored = warps * tiling.sums * 4
        busy = max(products, reads) + staged + joined + stored
        alone = 1500 * tiling.chunks + 14 * products / warps / config["warps_k"]
        if config["stages"] == 2:
            alone *= 0.7
        blocks = tiling.blocks(device)
        together = min(tiling.resident, ceil_div(blocks, device.sm_count))
        turns = ceil_div(tiling.tiles, blocks)
        laid = 8 * tiling.column_blocks * tiling.height.taps * tiling.width.taps * tiling.depth * tiling.chunks / 16
        cycles = 2000 + together * laid + turns * max(together * busy, alone)
        busy_ms = 1e3 * cycles / device.clock_hz
        return float(_LAUNCH_MS + max(moved_ms, busy_ms) + _EXPOSED * min(moved_ms, busy_ms))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config)
        divisors = (divisor(by) for by in (tiling.row_tiles * tiling.column_tiles, tiling.column_tiles))
        step = KernelStep(
            source="first_layer_data.cu",
            entry="first_layer_data",
            grid=(tiling.blocks(device), 1, 1),
            block=(tiling.threads, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=_defines(problem, config, tiling),
            args=(
                *(Pointer(buffer=name) for name in ("y", "w", "x")),
                *_ints(*problem.spatial, *problem.out_spatial, tiling.height.first, tiling.width.first, tiling.tiles),
                *(number for numbers in divisors for number in numbers),
            ),
        )
        return ConvSolution(steps=(step,))


SOLVERS = (ConvFirstLayerData(),)
