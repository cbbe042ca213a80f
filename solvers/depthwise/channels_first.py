"""ConvDepthwiseChannelsFirst: depthwise convolution of NCHW tensors with small filters, forward and backward data.

Kernel: kernels_src/depthwise/channels_first.cu. ConvDepthwiseChannelsFirstWeights serves backward weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer, int32s
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.depthwise.register_tile import (
    COPY_BYTES,
    KEYS,
    MAX_DEFAULTS,
    MAX_WINDOW,
    RegisterTileAxis,
    RegisterTiling,
    padded_size,
    refuse_register_tiles,
    row_blocks_of,
    tap_pitch,
    vector,
)
from miofind.solvers.depthwise.register_tile_cost import Load, estimate_ms, row_reads

_SOURCE = "depthwise/channels_first.cu"
_SHARED_BYTES = 48 << 10
_MAX_THREADS = 512
_LEAST_ROLLED = 4  # rows of filters whose code is long enough to be a loop
_MAX_REGISTERS = 168
_ROWS, _COLUMNS = (1, 2, 4, 7), (4, 7, 8, 14, 28)


@dataclass(frozen=True, kw_only=True)
class _Tiling(RegisterTiling):
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/depthwise/channels_first.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        rolled: whether filter rows are a loop.
    """

    rolled: bool

    @staticmethod
    @functools.lru_cache(maxsize=1 << 11)  # a ranking asks to check a configuration, then to estimate it
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        planar, transposed = problem.lifted(2), problem.direction is Direction.BACKWARD_DATA
        down = RegisterTileAxis.of(planar, 0, config["rows"], transposed=transposed)
        return _Tiling(
            problem=planar,
            down=down,
            across=RegisterTileAxis.of(planar, 1, config["columns"], transposed=transposed),
            channel_images=config["planes"],
            row_blocks=row_blocks_of(down, config["band"]),
            rolled=config["rolled"],
        )

    @property
    def all_channel_images(self) -> int:
        """Channels of all images of the result."""
        return self.problem.n * (self.problem.c if self.transposed else self.problem.k)

    @property
    def terms(self) -> int:
        """Filters that a result sums over."""
        return self.multiplier if self.transposed else 1

    @property
    def staged(self) -> bool:
        """Whether results pass through shared memory: where threads cannot write 16 bytes at once (an H200: 2x)."""
        return self.vector * self.itemsize < COPY_BYTES

    @functools.cached_property
    def items(self) -> int:
        """Tiles of a block."""
        return self.channel_images * self.row_block_tiles * self.across.count

    @functools.cached_property
    def threads(self) -> int:
        """Of a block: one a tile, up to a limit."""
        return round_up(ceil_div(self.items, ceil_div(self.items, _MAX_THREADS)), 32)

    @functools.cached_property
    def blocks(self) -> int:
        return ceil_div(self.all_channel_images, self.channel_images) * self.row_blocks

    @functools.cached_property
    def shared_bytes(self) -> int:
        if self.row_blocks == 1:
            read = padded_size(self.itemsize, self.sources * self.source_elements)
        else:
            read = self.sources * padded_size(self.itemsize, self.source_elements)
        written = padded_size(self.itemsize, self.channel_images * self.elements) if self.staged else 0
        return 4 * self.channel_images * self.terms * tap_pitch(self.taps) + self.itemsize * (
            self.zeros + read + written
        )

    @functools.cached_property
    def registers(self) -> int:
        """Registers of a thread that spills nothing: sums, taps, a window's row, and addresses."""
        taps = self.across.taps if self.rolled else self.taps
        is_odd = self.across.leaves and vector(self.itemsize, self.across.size, self.across.step) == 1
        beside = 54 if is_odd else 38  # each source of a row is then tested by itself
        tile = self.down.length * self.across.length
        beside += epilogue_registers(self.problem, 1, self.across.length if self.staged else tile)
        return round_up(tile + taps + self.across.met + beside, 8)

    def resident(self, device: Device) -> int:
        """Blocks that a multiprocessor holds at once."""
        return max(1, resident_blocks(self.registers, self.threads, self.shared_bytes, SmLimits.of(device)))


def _launch(problem: ProblemDescription, config: Config, device: Device) -> KernelStep:
    tiling = _Tiling.of(problem, config)
    source, target = ("y", "x") if tiling.transposed else ("x", "y")
    return KernelStep(
        source=_SOURCE,
        entry="depthwise_channels_first",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(tiling, device),
        args=(
            *(Pointer(buffer=name) for name in (source, "w", target)),
            *int32s(tiling.all_channel_images, problem.tensor(source).size),
            *epilogue_arguments(problem),
        ),
    )


def _defines(tiling: _Tiling, device: Device) -> tuple[tuple[str, str | int], ...]:
    return (
        *tiling.defines,
        ("TRANSPOSED", int(tiling.transposed)),
        ("STAGED", int(tiling.staged)),
        ("ROLLED", int(tiling.rolled)),
        ("THREADS", tiling.threads),
        ("MIN_BLOCKS", tiling.resident(device)),
        ("SHARED_BYTES", tiling.shared_bytes),
        *epilogue_defines(tiling.problem),
    )


# What default_configs ranks by estimate; the last is valid for every applicable problem.
_TILES = (
    *((1, 7), (2, 7), (4, 7), (7, 7), (4, 4), (7, 4), (1, 8), (2, 8), (4, 8), (7, 8)),
    *((1, 14), (2, 14), (1, 28), (2, 28)),
)
_SHORT_LIST = (
    *Config.product(
        {
            "planes": (1, 2, 4, 8, 16, 32, 64),
            "band": (0,),
            ("rows", "columns"): _TILES,
            "rolled": (False, True),
        }
    ),
    *Config.product({"planes": (1,), "band": (8, 16, 28), "rows": (1, 2, 4), "columns": (8,), "rolled": (False, True)}),
    Config.of(planes=1, band=4, rows=1, columns=4, rolled=False),
)
_ROLLED_DEFAULTS = 3
_LEVEL, _LIKELY = 1.02, 1.3  # estimates that do not tell configurations apart, and that leave one a chance


class ConvDepthwiseChannelsFirst(Solver):
    """Depthwise convolution of NCHW tensors with filters of up to 64 taps, in registers, with float32 accumulators.

    Where a row takes several register tiles, taps that meet padding beside the image multiply zeros. All other taps
    that meet no element are left out.

    Configuration: a block computes `planes` channels of an image or, where `band` is not 0, a row block of about `band`
    rows of one channel. A thread computes register tiles of `rows` x `columns`. Filter rows are a loop if `rolled`.
    """

    id = "ConvDepthwiseChannelsFirst"
    algorithm = Algorithm.DIRECT
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "planes": (1, 2, 4, 8, 16, 32, 64),
        "band": (0, 4, 8, 16, 28, 56),
        "rows": _ROWS,
        "columns": _COLUMNS,
        "rolled": (False, True),
    }
    sources = (_SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        back = Direction.BACKWARD_DATA
        return (
            depthwise_example(40, w=(3, 3), x=(4, 40, 7, 7), padding=1, dtype=half),
            depthwise_example(24, w=(5, 5), x=(3, 24, 14, 14), padding=2, dtype=brain, direction=back),
            depthwise_example(8, w=(7, 7), x=(2, 8, 28, 28), padding=3, dtype=half),
            depthwise_example(16, w=(3, 3), x=(2, 16, 28, 28), padding=1, stride=2, direction=back, dtype=half),
            depthwise_example(4, w=(3, 5), k=12, x=(2, 4, 33, 45), padding=((2, 4), (9, 0)), dilation=(2, 1)),
            depthwise_example(
                5, w=(2, 3), k=10, x=(1, 5, 19, 17), stride=(3, 2), padding=1, direction=back, dtype=brain
            ),
            depthwise_example(3, w=(15,), x=(2, 3, 300), padding=((20, 1),), dtype=half),
            depthwise_example(20, w=(3, 3), x=(4, 20, 7, 7), padding=1, dtype=half, epilogue="bias.residual.relu"),
            depthwise_example(8, w=(5, 5), x=(2, 8, 24, 24), padding=2, dtype=brain, epilogue="scale.bias.silu"),
            depthwise_example(4, w=(3, 3), k=12, x=(3, 4, 13, 12), stride=2, epilogue="channel_bias.silu.residual"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if problem.direction is Direction.BACKWARD_WEIGHTS:
            return Applicability(
                "serves forward and backward data: ConvDepthwiseChannelsFirstWeights serves backward weights"
            )
        if (answer := refuse_register_tiles(problem)).refused:
            return answer
        if not self.is_valid_config(problem, device, _SHORT_LIST[-1]):
            return Applicability(f"a row of {problem.x.shape} and {problem.y.shape} is too long for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config)
        is_last = config == _SHORT_LIST[-1]
        if not is_last and not _is_sensible(tiling, config):
            return False
        if tiling.channel_images > 1 and tiling.row_blocks > 1:
            return False
        if tiling.rolled and tiling.transposed and tiling.down.stride > 1:
            return False
        if tiling.row_blocks > 1 and (tiling.row_blocks - 1) * tiling.row_block_tiles >= tiling.down.count:
            return False
        if max(tiling.down.window, tiling.across.window) > MAX_WINDOW:
            return False
        fits_registers = (
            tiling.registers <= _MAX_REGISTERS
            and resident_blocks(tiling.registers, tiling.threads, 0, SmLimits.of(device)) > 0
        )
        fits_shared = tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)
        return (fits_registers or is_last) and fits_shared

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        ranked = self.ranked(problem, device, _SHORT_LIST)
        if problem.direction is Direction.BACKWARD_DATA and max(problem.conv.stride) > 1:
            return self._strided_defaults(problem, device, ranked)
        rolled = [config for config in ranked if config["rolled"]][:_ROLLED_DEFAULTS]
        likely = [config for config in ranked if not config["rolled"]][: MAX_DEFAULTS - len(rolled)] + rolled
        return tuple(sorted(likely, key=ranked.index))

    def _strided_defaults(
        self, problem: ProblemDescription, device: Device, ranked: Sequence[Config]
    ) -> tuple[Config, ...]:
        """One of each register tile, and what else is likely: estimates of one tile err alike.

        Tiles are of whole strides, so that several configurations come to one tiling. Four channels a block tend to be
        faster than others of the same estimate (H200).
        """
        likely_ms = _LIKELY * self.estimate_ms(problem, device, ranked[0])
        likely = [config for config in ranked if self.estimate_ms(problem, device, config) <= likely_ms]
        tilings = {_Tiling.of(problem, config): config for config in reversed(likely)}
        tiles: dict[tuple[int, int], Config] = {}
        for tiling, config in reversed(tilings.items()):
            tile = (tiling.down.length, tiling.across.length)
            best = tiles.setdefault(tile, config)
            least_ms = self.estimate_ms(problem, device, best)
            if tiling.channel_images == 4 and self.estimate_ms(problem, device, config) <= _LEVEL * least_ms:
                tiles[tile] = config
        chosen = tuple(dict.fromkeys((*tiles.values(), *reversed(tilings.values()))))
        return tuple(sorted(chosen[:MAX_DEFAULTS], key=ranked.index))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return estimate_ms(_load(_Tiling.of(problem, config), device), device)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(_launch(problem, config, device),))


def _is_sensible(tiling: _Tiling, config: Config) -> bool:
    """Whether a configuration is neither another's equal nor a waste of threads, registers or code."""
    if any(config["rows"] > rows >= tiling.down.outputs for rows in _ROWS):
        return False
    if any(config["columns"] > columns >= tiling.across.outputs for columns in _COLUMNS):
        return False
    if config["band"] and (tiling.row_blocks == 1 or config["planes"] > 1):
        return False
    if tiling.channel_images >= 2 * tiling.all_channel_images or tiling.items < 24 <= tiling.all_channel_images:
        return False
    if tiling.rolled and tiling.down.taps < _LEAST_ROLLED:
        return False
    return not tiling.is_wasteful(_ROWS, _COLUMNS)


def _load(tiling: _Tiling, device: Device) -> Load:
    down, across = tiling.down, tiling.across
    iterations = ceil_div(tiling.items, tiling.threads) * tiling.terms
    stores = down.length * across.length / tiling.vector * (2 if tiling.staged else 1)
    rows = down.length * down.taps if tiling.rolled else down.met
    tile = tiling.products + rows * (across.met + 4) + tiling.taps / 4 + stores + 40
    copies = tiling.shared_bytes / 16 / tiling.threads
    return Load(
        blocks=tiling.blocks,
        threads=tiling.threads,
        resident=tiling.resident(device),
        instructions=iterations * tile + 12 * copies + 100,
        reads=iterations * (rows * row_reads(tiling.itemsize, across) + stores),
        bytes=tiling.problem.bytes,
    )


SOLVERS = (ConvDepthwiseChannelsFirst(),)
