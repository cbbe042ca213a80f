"""ConvFirstLayer: forward convolution of few channels on tensor cores, from input tiles of pixels of four channels.

Kernel: kernels_src/few_channels/forward.cu. Windows and tiles: solvers/few_channels/window_rows.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, mapped, smaller
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, register_limit, resident_blocks
from miofind.solver.solver import APPLICABLE, Applicability, EstimatedConfig
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.few_channels.shapes import TILED_SHAPE
from miofind.solvers.few_channels.solver import FewChannelsSolver, problem_defines
from miofind.solvers.few_channels.tile_schedule import TileSchedule
from miofind.solvers.few_channels.window_rows import WindowTile, is_same_load

_MAX_ACCUMULATORS = 128
_MAX_REGISTERS = 216
_MAX_RESIDENT = 8
_UNROLLED_DEPTH = 256  # of a laid out filter, beyond which the kernel goes through its rows in a loop
_FINISHING = 8  # registers of an epilogue's arithmetic
_DEFAULTS, _LONGER = 8, 2  # how many there are, and with loads of four pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/few_channels/forward.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        tile: of outputs.
        depth: elements of a laid out filter.
        out_vector: elements that are stored at once.
        threads: of a block.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        schedule: of tiles.
    """

    tile: WindowTile
    depth: int
    out_vector: int
    threads: int
    registers: int
    shared_bytes: int
    resident: int
    schedule: TileSchedule

    @staticmethod
    @functools.lru_cache(maxsize=16)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config, device: Device) -> _Tiling:
        tile = WindowTile.of(problem, config["tile_h"], config["tile_w"], config["vector"])
        tile_k, threads = config["tile_k"], 32 * config["warps"]
        last = problem.y.layout.channels_last
        depth = 16 * problem.filter[0] * tile.row_steps
        filters = 2 * tile.outputs * tile_k * (depth + 8)
        raw = round_up(2 * tile_k * problem.c * math.prod(problem.filter), 16)
        shared_bytes = filters + larger(tile.input_tile_bytes, raw)
        out_vector = math.gcd(8, problem.k) if last else tile.channels_first_vector(problem)
        registers = _registers(problem, config, tile, 0 if last else 8 // out_vector)
        resident = smaller(_MAX_RESIDENT, resident_blocks(registers, threads, shared_bytes, SmLimits.of(device)))
        return _Tiling(
            tile=tile,
            depth=depth,
            out_vector=out_vector,
            threads=threads,
            registers=registers,
            shared_bytes=shared_bytes,
            resident=resident,
            schedule=TileSchedule.of(problem, tile_k, tile.image, device.sm_count * resident),
        )


def _registers(problem: ProblemDescription, config: Config, tile: WindowTile, offsets: int) -> int:
    """Registers of a thread that spills nothing: accumulators, fragments, loads, `offsets` and addresses."""
    blocks = config["blocks"]
    accumulators = blocks * tile.outputs * config["tile_k"] // 2
    load = tile.input_tile_load(problem.c, 32 * config["warps"])
    moved = chosen(load.is_whole, load.registers, 0)  # else accumulators are not yet there
    steps = tile.row_steps if not problem.x.layout.channels_last and tile.outputs * problem.conv.stride[1] == 2 else 1
    last = problem.y.layout.channels_last
    finishing = epilogue_registers(problem, 8 if last else 1, 16 * blocks * tile.outputs if last else 8)
    finishing += _FINISHING if problem.epilogue else 0
    return round_up(accumulators + moved + blocks * (4 + steps) + offsets + finishing + 48, 8)


def _spills(problem: ProblemDescription, config: Config, tiling: _Tiling) -> bool:
    """Whether a thread lacks registers beside as many blocks as the kernel is told to leave room for.

    As 3,600 kernels for sm_90a have shown, some of odd sizes: little is to spare, and there are addresses of vectors of
    eight pixels beside many accumulators, or two blocks of windows of one output each beside a large filter's rows, or
    beside more accumulators than leave room for a fourth warp of a scheduler.
    """
    tile, held = tiling.tile, register_limit(larger(1, tiling.resident), tiling.threads)
    spare = held - tiling.registers
    row_steps, depth = (2, _UNROLLED_DEPTH) if problem.x.layout.channels_last else (3, 2 * _UNROLLED_DEPTH)
    is_large = tile.row_steps > row_steps and tiling.depth > depth
    of_one = (config["blocks"] > 1) & (is_large | ((held > 128) & (spare < 8)))
    of_two = (tile.vector == 8) & (config["tile_k"] >= 96)
    spills: bool = (spare < 16) & (of_two if tile.outputs == 2 else of_one)
    return spills


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    tile = tiling.tile
    return (
        *problem_defines(problem),
        ("TILE_H", tile.tile_h),
        ("TILE_W", tile.tile_w),
        ("TILE_K", config["tile_k"]),
        ("WARPS", config["warps"]),
        ("BLOCKS", config["blocks"]),
        ("OFFSET", tile.offset),
        ("IN_VECTOR", tile.vector),
        ("OUT_VECTOR", tiling.out_vector),
        ("MIN_BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        TILED_SHAPE.define,
        *epilogue_defines(problem),
    )


# What default_configs ranks by estimate.
_SHORT_LIST = Config.product(
    {
        "tile_h": (1, 2, 4, 7, 8, 14),
        "tile_w": (32, 64, 128, 256, 512),
        "tile_k": (32, 64, 96, 128),
        ("warps", "blocks"): ((8, 2), (4, 2), (8, 1), (4, 1)),
        "vector": (2,),
    }
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


# Cycles of a multiprocessor for a product of fragments, to read one, to stage a pixel of x by vectors of some length,
# to store a vector, and to lay out 8 taps; cycles that a block waits for a tile, and a warp for a product. Share of the
# time to move all tensors, or to compute if that is shorter, that the other does not hide. Fitted to 310 measurements
# on an H200, the order of the fastest first: the configuration with the least estimate takes 3 % longer than the best.
_PRODUCT = 2.11
_READ = 1.08
_STAGED: Mapping[int, float] = {8: 0.5, 4: 0.35, 2: 0.3, 1: 0.4}
_STORED = 0.214
_STORED_ALONE = 1.3  # each element of rows of an odd length that are channels first: 53 configurations of 7 problems
_TILE = 977.0
_LATENCY = 14.8
_LAID = 0.839
_LAUNCH_MS = 0.00288
_EXPOSED = 0.747


class ConvFirstLayer(FewChannelsSolver):
    """Implicit GEMM for up to four channels: windows of a staged input tile are operands of tensor cores as they lie.

    Zeros around a filter's rows are multiplied: an infinity or NaN of the input spreads to outputs up to 17 columns
    away, and one of the filter to outputs at the border. Accumulators are float32.

    Configuration: a block computes `tile_h` x `tile_w` outputs of `tile_k` filters at a time; each of its `warps` warps
    takes `blocks` blocks of 16 windows at once. A thread loads up to `vector` pixels of x at once.
    """

    id = "ConvFirstLayer"
    direction = Direction.FORWARD
    kind = ("tile_h", "tile_w")
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_h": (1, 2, 4, 7, 8, 14),
        "tile_w": (32, 64, 128, 256, 512),
        "tile_k": (32, 64, 96, 128),
        "warps": (4, 8),
        "blocks": (1, 2),
        "vector": (2, 4, 8),
    }
    sources = ("few_channels/forward.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain, last = DataType.FLOAT16, DataType.BFLOAT16, Layout.NHWC
        conv = ProblemDescription.convolution
        return (
            *super().examples(),
            conv(x=(2, 3, 64, 60), w=(64, 3, 7, 7), padding=3, stride=2, dtype=half, layout=last, epilogue="bias.relu"),
            conv(x=(2, 3, 32, 40), w=(40, 3, 3, 3), padding=1, dtype=brain, epilogue="scale.bias.residual.silu"),
            conv(x=(3, 3, 31, 33), w=(20, 3, 3, 3), dtype=half, layout=last, epilogue="channel_bias.silu.residual"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config, device)
        shares = ceil_div(tiling.tile.windows, 16 * config["blocks"])
        is_valid: bool = (
            ((config["warps"] <= 4) | (config["warps"] < 2 * shares))
            & (tiling.registers <= _MAX_REGISTERS)
            & (tiling.resident > 0)
            & (_spills(problem, config, tiling) == 0)
        )
        return is_valid

    def is_of_size(self, problem: ProblemDescription, config: Config) -> bool:
        (out_h, out_w), last = problem.out_spatial, problem.x.layout.channels_last
        outputs = 1 + problem.conv.stride[1] % 2
        is_of_size: bool = (
            (config["tile_h"] < 2 * out_h)
            & (config["tile_w"] < 2 * max(32, out_w))
            & (config["tile_k"] < 32 + round_up(problem.k, 32))
            & (is_same_load(problem, config["vector"]) == 0)
            & (last | (config["blocks"] * outputs % 2 == 0))
            & (config["blocks"] * outputs * config["tile_k"] // 2 <= _MAX_ACCUMULATORS)
        )
        return is_of_size

    def short_list(self) -> ConfigTable:
        return _short_list()

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        """Those of the least estimates, and the first of them with longer loads: estimates do not tell these apart."""
        likely = super().estimated_defaults(problem, device)
        candidates = (Config({**each.config, "vector": 4}) for each in likely[:_LONGER])
        longer = [
            EstimatedConfig(config, self.estimate_ms(problem, device, config))
            for config in candidates
            if self.is_valid_config(problem, device, config)
        ]
        return (*likely[: _DEFAULTS - len(longer)], *longer)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config, device)
        moved_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
        tile, blocks = tiling.tile, tiling.schedule.blocks
        steps, columns = tiling.depth // 16, tile.outputs * config["tile_k"] // 8
        shares = ceil_div(ceil_div(tile.windows, 16), config["blocks"])
        fragments = shares * config["blocks"] * steps
        products, reads = fragments * columns, fragments * (1 + columns / 2 / config["blocks"])
        staged = tile.in_rows * tile.in_columns
        stored = tile.tile_h * tile.tile_w * config["tile_k"] / tiling.out_vector
        moved = mapped(_STAGED.__getitem__, tile.vector) * staged
        written = _STORED * stored
        if not problem.y.layout.channels_last and problem.out_spatial[-1] % 2:
            written = written + _STORED_ALONE * tile.tile_h * tile.tile_w * config["tile_k"]
        busy = larger(_PRODUCT * products, _READ * reads) + moved + written
        turn = ceil_div(shares, config["warps"]) * config["blocks"] * steps * columns
        alone = _TILE + _LATENCY * turn + moved + written
        turns = ceil_div(tiling.schedule.tiles * tiling.schedule.filter_tiles, blocks)
        together = smaller(tiling.resident, ceil_div(blocks, device.sm_count))
        laid = tile.outputs * config["tile_k"] * tiling.depth / 8
        cycles = _LAID * together * laid + turns * larger(together * busy, alone)
        busy_ms = 1e3 * cycles / device.clock_hz
        ms: float = _LAUNCH_MS + larger(moved_ms, busy_ms) + _EXPOSED * smaller(moved_ms, busy_ms)
        return ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config, device)
        step = KernelStep(
            source="few_channels/forward.cu",
            entry="few_channels_forward",
            grid=(tiling.schedule.blocks, 1, 1),
            block=(tiling.threads, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=_defines(problem, config, tiling),
            args=(
                *(Pointer(buffer=name) for name in ("x", "w", "y")),
                TILED_SHAPE(**tiling.schedule.fields(problem)),
                *epilogue_arguments(problem),
            ),
        )
        return ConvSolution(steps=(step,))


SOLVERS = (ConvFirstLayer(),)
