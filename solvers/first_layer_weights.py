"""ConvFirstLayerWeights: backward weights of convolutions of few channels on tensor cores.

Tiles of outputs are dealt to blocks; a second kernel adds the blocks' float32 sums in a fixed order.
Kernels: kernels_src/first_layer_weights.cu. Windows and tiles: miofind/tiling/windows.py. Knows nothing of how
candidates are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.device import Device, Library, Place
from miofind.problem import DataType, Direction, Layout, ProblemDescription
from miofind.solution import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
    Region,
    WorkspacePlan,
    int32s,
)
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.tiling.correlation import ceil_div, round_up
from miofind.tiling.divisor import divisors
from miofind.tiling.windows import WindowTile, unserved

_MAX_SUMS = 128
_MAX_WARPS = 8
_MAX_REGISTERS = 248
_MAX_WORKSPACE_BYTES = 1 << 30
_SHARED_BYTES = 48 << 10
_SM_SHARED_BYTES = 227 << 10
_SHARES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/first_layer_weights.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        tile: of outputs.
        filter_tiles: blocks of filters.
        row_words: 16-byte words of a window's row.
        sums: of a thread.
        out_vector: elements of dy that are loaded at once.
        threads: of a block.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        tiles: of all images.
    """

    tile: WindowTile
    filter_tiles: int
    row_words: int
    sums: int
    out_vector: int
    threads: int
    registers: int
    shared_bytes: int
    resident: int
    tiles: int

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        tile = WindowTile.of(problem, config["tile_h"], config["tile_w"])
        tile_k, threads = config["tile_k"], 32 * config["warps_y"] * config["warps_k"] * config["warps_p"]
        last, taps_y = problem.y.layout.channels_last, problem.filter[0]
        row_words = ceil_div(problem.filter[1] + (tile.outputs - 1) * problem.conv.stride[1], 2)
        filters, rows = tile_k // 16 // config["warps_k"], ceil_div(taps_y, config["warps_y"])
        sums = 4 * filters * tile.outputs * rows * row_words
        slots = round_up(tile.windows, 16)
        pitch = 2 * tile_k + 16 if last else round_up(2 * tile.outputs * slots, 32) + 16
        stage = pitch * (tile.outputs * slots if last else tile_k) + tile.patch_bytes
        shared_bytes = max(2 * stage, 4 * tile.outputs * tile_k * (8 * taps_y * row_words + 8))
        registers = round_up(sums + _moved_registers(problem, tile, threads) + 8 * filters * tile.outputs + 60, 8)
        by_shared = _SM_SHARED_BYTES // (shared_bytes + 1024)
        return _Tiling(
            tile=tile,
            filter_tiles=ceil_div(problem.k, tile_k),
            row_words=row_words,
            sums=sums,
            out_vector=math.gcd(8, problem.k) if last else tile.plane_vector(problem),
            threads=threads,
            registers=registers,
            shared_bytes=shared_bytes,
            resident=max(1, min(65536 // (registers * threads), by_shared, config["resident"])),
            tiles=tile.image_tiles * problem.n,
        )

    def splits(self, device: Device) -> int:
        """Blocks that share the tiles of a block of filters."""
        return min(self.tiles, max(1, device.sm_count * self.resident // self.filter_tiles))


def _moved_registers(problem: ProblemDescription, tile: WindowTile, threads: int) -> int:
    """Registers of a patch on its way; none where it is too large to be held."""
    loads, words = ceil_div(tile.in_rows * tile.in_columns, tile.vector * threads), problem.c * max(1, tile.vector // 2)
    most = 32 // words if tile.vector >= 4 else 4
    return loads * words if loads <= most else most * words


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    tile, (stride_y, stride_x) = tiling.tile, problem.conv.stride
    return (
        ("ELEMENT", problem.x.dtype.value),
        ("CHANNELS", problem.c),
        ("FILTER_Y", problem.filter[0]),
        ("FILTER_X", problem.filter[1]),
        ("STRIDE_Y", stride_y),
        ("STRIDE_X", stride_x),
        ("TILE_H", tile.tile_h),
        ("TILE_W", tile.tile_w),
        *((name.upper(), config[name]) for name in ("tile_k", "warps_y", "warps_k", "warps_p")),
        ("CHANNELS_LAST", int(problem.x.layout.channels_last)),
        ("OFFSET", tile.offset),
        ("IN_VECTOR", tile.vector),
        ("OUT_VECTOR", tiling.out_vector),
        ("MIN_BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
    )


def _sum_step(problem: ProblemDescription, device: Device, config: Config, tiling: _Tiling) -> KernelStep:
    tile, splits = tiling.tile, tiling.splits(device)
    return KernelStep(
        source="first_layer_weights.cu",
        entry="first_layer_weights",
        grid=(tiling.filter_tiles * splits, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling),
        args=(
            *(Pointer(buffer=name) for name in ("x", "y", "parts")),
            *int32s(problem.k, *problem.spatial, *problem.out_spatial, *problem.conv.pad_before, tiling.tiles, splits),
            *divisors(tiling.filter_tiles, tile.image_tiles, tile.column_tiles),
        ),
    )


def _finish_step(problem: ProblemDescription, device: Device, config: Config, tiling: _Tiling) -> KernelStep:
    return KernelStep(
        source="first_layer_weights.cu",
        entry="first_layer_weights_finish",
        grid=(ceil_div(problem.w.size, 32), 1, 1),
        block=(32 * _SHARES, 1, 1),
        defines=_defines(problem, config, tiling),
        args=(Pointer(buffer="parts"), Pointer(buffer="w"), *int32s(problem.w.size, tiling.splits(device))),
        waits_itself=True,
    )


def _config(tile_h: int, tile_w: int, tile_k: int, warps_y: int, warps_k: int, warps_p: int, resident: int) -> Config:
    return Config.of(
        tile_h=tile_h,
        tile_w=tile_w,
        tile_k=tile_k,
        warps_y=warps_y,
        warps_k=warps_k,
        warps_p=warps_p,
        resident=resident,
    )


_WARPS = ((1, 1, 8), (1, 1, 4), (1, 2, 4), (1, 2, 2), (2, 1, 4), (2, 2, 2), (4, 1, 2), (4, 1, 1), (4, 2, 1), (8, 1, 1))
# What default_configs ranks by estimate; few filters, for those whose sums fill a warp's registers, come last.
_SHORT_LIST = tuple(
    _config(tile_h, tile_w, tile_k, *warps, resident)
    for tile_k, tiles, most in ((32, (1, 2, 4), 3), (64, (1, 2, 4), 2), (96, (1, 2, 4), 2), (16, (1,), 1))
    for tile_h in tiles
    for tile_w in (32, 64, 128, 256, 512)
    for warps in _WARPS
    for resident in range(1, most + 1)
)

# Cycles of a multiprocessor for a product of fragments, to read one, to stage a vector of x, to load one of dy, and to
# join a sum; cycles that a block waits for a tile, and a warp for a block of windows and for a product. How often parts
# move as long as memory would take. Share of the time to move all tensors, or to compute if that is shorter, that the
# other does not hide. Fitted to 360 measurements on an H200: root mean square of the error 7 %; the configuration with
# the least estimate takes 2 % longer than the best.
_PRODUCT = 1.8
_READ = 3.99
_STAGED = 0.493
_LOADED = 0.255
_TILE = 1350.0
_BLOCK = 159.0
_LATENCY = 13.3
_JOIN = 14.7
_PARTS = 2.87
_LAUNCH_MS = 0.00407
_EXPOSED = 0.591


class ConvFirstLayerWeights(Solver):
    """Backward weights for up to four channels: windows of a staged patch are operands of tensor cores as they lie.

    Zeros around the images and beyond a filter's rows are multiplied: an infinity or NaN spreads over taps that do not
    meet it. Sums are float32; equal inputs give equal bits.

    Configuration: a block computes `tile_k` filters from `tile_h` x `tile_w` outputs at a time; `warps_y` warps share a
    filter's rows, `warps_k` its filters and `warps_p` the outputs; the tiles are dealt to `resident` blocks of a
    multiprocessor.
    """

    id = "ConvFirstLayerWeights"
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
        "tile_h": (1, 2, 4, 8),
        "tile_w": (32, 64, 128, 256, 512),
        "tile_k": (16, 32, 64, 96),
        "warps_y": (1, 2, 4, 8),
        "warps_k": (1, 2),
        "warps_p": (1, 2, 4, 8),
        "resident": (1, 2, 3, 4),
    }
    sources = ("first_layer_weights.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain, last = DataType.FLOAT16, DataType.BFLOAT16, Layout.NHWC

        def conv(**fields: object) -> ProblemDescription:
            return ProblemDescription.convolution(direction=Direction.BACKWARD_WEIGHTS, **fields)  # type: ignore[arg-type]

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
        if problem.direction is not Direction.BACKWARD_WEIGHTS:
            return Applicability(f"computes backward weights only, not {problem.direction}")
        reason = unserved(problem)
        if reason:
            return Applicability(reason)
        if not any(self.is_valid_config(problem, device, config) for config in _SHORT_LIST):
            return Applicability(f"filter {problem.filter} or stride {problem.conv.stride} is too large for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        out_h, out_w = problem.out_spatial
        if config["tile_h"] >= 2 * out_h or config["tile_w"] >= 2 * max(32, out_w):
            return False
        if config["tile_k"] >= 32 + round_up(problem.k, 16) or config["warps_y"] >= 2 * problem.filter[0]:
            return False
        if config["tile_k"] // 16 % config["warps_k"]:
            return False
        warps = config["warps_y"] * config["warps_k"] * config["warps_p"]
        if not 4 <= warps <= _MAX_WARPS:
            return False
        tiling = _Tiling.of(problem, config)
        if tiling.sums > _MAX_SUMS or tiling.registers > _MAX_REGISTERS or tiling.resident < config["resident"]:
            return False
        if 4 * tiling.splits(device) * problem.w.size > _MAX_WORKSPACE_BYTES:
            return False
        return tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(self.ranked(problem, device, _SHORT_LIST)[:8])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config)
        moved_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
        tile, splits = tiling.tile, tiling.splits(device)
        warps_y, warps_k, warps_p = config["warps_y"], config["warps_k"], config["warps_p"]
        filters, rows = config["tile_k"] // 16 * tile.outputs, ceil_div(problem.filter[0], warps_y) * warps_y
        turn = ceil_div(ceil_div(tile.windows, 16), warps_p)
        products = turn * warps_p * filters * rows * tiling.row_words
        reads = turn * warps_p * (filters * warps_y + rows * ceil_div(tiling.row_words, 2) * warps_k)
        staged = tile.in_rows * tile.in_columns / tile.vector * (problem.c + tile.vector)
        loaded = tile.outputs * tile.windows * config["tile_k"] / tiling.out_vector
        moved = _STAGED * staged + _LOADED * loaded
        busy = max(_PRODUCT * products, _READ * reads) + moved
        alone = _TILE + turn * _BLOCK + _LATENCY * products / (warps_y * warps_k * warps_p) + moved
        turns = ceil_div(tiling.tiles, splits)
        together = min(tiling.resident, ceil_div(splits * tiling.filter_tiles, device.sm_count))
        cycles = _JOIN * warps_p * tiling.sums * together + turns * max(together * busy, alone)
        parts_ms = _PARTS * 1e3 * 4 * splits * problem.w.size / device.bandwidth_bytes_per_s
        busy_ms = 1e3 * cycles / device.clock_hz
        return float(_LAUNCH_MS + max(moved_ms, busy_ms) + _EXPOSED * min(moved_ms, busy_ms) + parts_ms)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config)
        steps = (_sum_step(problem, device, config, tiling), _finish_step(problem, device, config, tiling))
        parts = Region(name="parts", bytes=4 * tiling.splits(device) * problem.w.size)
        return ConvSolution(steps=steps, workspace=WorkspacePlan((parts,)))


SOLVERS = (ConvFirstLayerWeights(),)
