"""ConvFirstLayerData: backward data of convolutions of few channels on tensor cores.

The input is divided into cells that all meet outputs in the same way. Kernel: kernels_src/first_layer_data.cu. Knows
nothing of how candidates are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.device import Device
from miofind.few_channels import FewChannelsSolver
from miofind.problem import Direction, ProblemDescription
from miofind.solution import Config, ConfigValue, ConvSolution, KernelStep, Pointer, int32s
from miofind.tiling.cells import Cells
from miofind.tiling.correlation import ceil_div, round_up
from miofind.tiling.divisor import divisors
from miofind.tiling.grouped import resident_blocks

_MAX_SUMS = 96
_MAX_FRAGMENTS = 64
_MAX_WARPS = 8
_MAX_REGISTERS = 232
_SHARED_BYTES = 48 << 10
_MAX_RESIDENT = 8
_DEPTHS = (32, 64, 96, 512)


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
    def of(problem: ProblemDescription, config: Config, device: Device) -> _Tiling:
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
        moved = 0 if last else 64 if in_vector >= 4 else 32
        registers = round_up(sums + max(fragments + 8, moved) + (56 if column_blocks <= 2 else 64), 8)
        resident = resident_blocks(registers, threads, shared_bytes, device.shared_bytes or _SHARED_BYTES)
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
            resident=min(resident, _MAX_RESIDENT),
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


def _config(rows: int, warps_y: int, warps_x: int, warps_k: int, depth: int, stages: int) -> Config:
    return Config.of(rows=rows, warps_y=warps_y, warps_x=warps_x, warps_k=warps_k, depth=depth, stages=stages)


# What default_configs ranks by estimate.
_SHORT_LIST = tuple(
    _config(rows, *warps, depth, stages)
    for rows in (1, 2, 4, 8)
    for warps in ((1, 1, 4), (1, 1, 8), (2, 1, 2), (1, 2, 2), (1, 4, 1), (2, 2, 1), (4, 1, 1), (2, 4, 1), (4, 2, 1))
    for depth in _DEPTHS
    for stages in (1, 2)
)

# Cycles of a multiprocessor for a product of fragments, to read one, to stage 8 filters of an output, channels last or
# first, to store or to join a sum, and to lay out 8 taps; cycles that a block waits for a chunk and for its loads, and
# a warp for a product. Share of the time to move all tensors, or to compute if that is shorter, that the other does not
# hide. Fitted to 359 measurements on an H200: root mean square of the error 15 %; the configuration with the least
# estimate takes 3 % longer than the best. Laying out and turning are set lower: both take fewer instructions since.
_PRODUCT = 1.8
_READ = 3.9
_STAGED = 0.326
_TURNED = 0.7
_STORED = 2.75
_JOIN = 1.13
_TILE = 2120.0
_LOAD = 334.0
_LATENCY = 11.2
_LAID = 1.5
_LAUNCH_MS = 0.00136
_EXPOSED = 0.998


class ConvFirstLayerData(FewChannelsSolver):
    """Backward data for up to four channels: products of outputs and filters, for all pixels that a stride divides.

    Products with zeros complete the filters: an infinity or NaN of dy spreads to pixels near those that meet it. Sums
    are float32; equal inputs give equal bits.

    Configuration: a block of `warps_y` x `warps_x` x `warps_k` warps stages `depth` filters of dy in `stages` buffers;
    a warp computes `rows` rows of 16 cells of pixels, and `warps_k` warps share the filters.
    """

    id = "ConvFirstLayerData"
    direction = Direction.BACKWARD_DATA
    kind = ("rows", "warps_y", "warps_x")
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "rows": (1, 2, 4, 8),
        "warps_y": (1, 2, 4),
        "warps_x": (1, 2, 4),
        "warps_k": (1, 2, 4, 8),
        "depth": _DEPTHS,
        "stages": (1, 2),
    }
    sources = ("first_layer_data.cu",)

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        if not 4 <= config["warps_y"] * config["warps_x"] * config["warps_k"] <= _MAX_WARPS:
            return False
        if any(problem.k <= depth < config["depth"] for depth in _DEPTHS):
            return False
        tiling = _Tiling.of(problem, config, device)
        if config["warps_k"] > max(4, tiling.depth // 16):
            return False
        if config["rows"] * config["warps_y"] >= 2 * max(4, tiling.height.count):
            return False
        if config["warps_x"] > 1 and 16 * config["warps_x"] >= 2 * max(16, tiling.width.count):
            return False
        if tiling.sums > _MAX_SUMS or tiling.fragments > _MAX_FRAGMENTS or tiling.registers > _MAX_REGISTERS:
            return False
        if config["stages"] == 2 and not problem.y.layout.channels_last:
            return False
        return tiling.resident > 0

    def short_list(self) -> Sequence[Config]:
        return _SHORT_LIST

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config, device)
        moved_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
        rows, taps_y = config["rows"], tiling.height.taps
        steps = tiling.width.taps * tiling.depth // 16 * tiling.chunks
        warps = config["warps_y"] * config["warps_x"]
        products = steps * rows * taps_y * tiling.column_blocks
        reads = steps * (rows + taps_y - 1 + taps_y * tiling.column_blocks / 2)
        words = tiling.in_pixels * tiling.depth * tiling.chunks / 8
        staged = words * (_STAGED if problem.y.layout.channels_last else _TURNED) * 8 / tiling.in_vector
        stored = warps * tiling.sums * (_STORED + _JOIN * (config["warps_k"] - 1))
        busy = warps * max(_PRODUCT * products, _READ * reads) + staged + stored
        alone = _TILE * tiling.chunks + _LATENCY * products / config["warps_k"] + stored
        if config["stages"] == 1 or (tiling.chunks == 1 and tiling.tiles <= tiling.blocks(device)):
            alone += _LOAD * tiling.chunks + staged
        blocks = tiling.blocks(device)
        together, turns = min(tiling.resident, ceil_div(blocks, device.sm_count)), ceil_div(tiling.tiles, blocks)
        laid = tiling.column_blocks * taps_y * tiling.width.taps * tiling.depth * tiling.chunks
        cycles = _LAID * together * laid + turns * max(together * busy, alone)
        busy_ms = 1e3 * cycles / device.clock_hz
        return float(_LAUNCH_MS + max(moved_ms, busy_ms) + _EXPOSED * min(moved_ms, busy_ms))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config, device)
        step = KernelStep(
            source="first_layer_data.cu",
            entry="first_layer_data",
            grid=(tiling.blocks(device), 1, 1),
            block=(tiling.threads, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=_defines(problem, config, tiling),
            args=(
                *(Pointer(buffer=name) for name in ("y", "w", "x")),
                *int32s(*problem.spatial, *problem.out_spatial, tiling.height.first, tiling.width.first, tiling.tiles),
                *divisors(tiling.row_tiles * tiling.column_tiles, tiling.column_tiles),
            ),
        )
        return ConvSolution(steps=(step,))


SOLVERS = (ConvFirstLayerData(),)
