"""ConvDepthwiseChannelsFirst: depthwise convolution of NCHW tensors with small filters, forward and backward data.

Kernel: kernels_src/depthwise/channels_first.cu. ConvDepthwiseChannelsFirstWeights serves backward weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.cached import cached_property
from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, is_config, larger
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import APPLICABLE, OF_IMAGES, Algorithm, Applicability, EstimatedConfig, RankedTable, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer, int32s
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.depthwise.register_tile import (
    COPY_BYTES,
    KEYS,
    MAX_DEFAULTS,
    MAX_WINDOW,
    RegisterTiling,
    padded_size,
    refuse_register_tiles,
    register_tile_axes,
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
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        planar, transposed = problem.lifted(2), problem.direction is Direction.BACKWARD_DATA
        down, across = register_tile_axes(planar, config, transposed=transposed)
        return _Tiling(
            problem=planar,
            down=down,
            across=across,
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

    @cached_property
    def items(self) -> int:
        """Tiles of a block."""
        return self.channel_images * self.row_block_tiles * self.across.count

    @cached_property
    def threads(self) -> int:
        """Of a block: one a tile, up to a limit."""
        return round_up(ceil_div(self.items, ceil_div(self.items, _MAX_THREADS)), 32)

    @cached_property
    def blocks(self) -> int:
        return ceil_div(self.all_channel_images, self.channel_images) * self.row_blocks

    @cached_property
    def shared_bytes(self) -> int:
        together = padded_size(self.itemsize, self.sources * self.source_elements)
        read = chosen(self.row_blocks == 1, together, self.sources * padded_size(self.itemsize, self.source_elements))
        written = chosen(self.staged, padded_size(self.itemsize, self.channel_images * self.elements), 0)
        return 4 * self.channel_images * self.terms * tap_pitch(self.taps) + self.itemsize * (
            self.zeros + read + written
        )

    @cached_property
    def registers(self) -> int:
        """Registers of a thread that spills nothing: sums, taps, a window's row, and addresses."""
        taps = chosen(self.rolled, self.across.taps, self.taps)
        is_odd = self.across.leaves & (vector(self.itemsize, self.across.size, self.across.step) == 1)
        beside = chosen(is_odd, 54, 38)  # each source of a row is then tested by itself
        tile = self.down.length * self.across.length
        beside += epilogue_registers(self.problem, 1, chosen(self.staged, self.across.length, tile))
        return round_up(tile + taps + self.across.met + beside, 8)

    def fits_registers(self, device: Device) -> bool:
        """Whether threads spill nothing, and a multiprocessor has registers for a block."""
        held = resident_blocks(self.registers, self.threads, 0, SmLimits.of(device))
        return (self.registers <= _MAX_REGISTERS) & (held > 0)

    def resident(self, device: Device) -> int:
        """Blocks that a multiprocessor holds at once."""
        return larger(1, resident_blocks(self.registers, self.threads, self.shared_bytes, SmLimits.of(device)))


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


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


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
    directions = OF_IMAGES
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
        if (answer := refuse_register_tiles(problem)).refused:
            return answer
        if not self.is_valid_config(problem, device, _SHORT_LIST[-1]):
            return Applicability(f"a row of {problem.x.shape} and {problem.y.shape} is too long for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config)
        is_last = is_config(config, _SHORT_LIST[-1])
        is_valid: bool = (
            (is_last | _is_sensible(tiling, config))
            & ((tiling.channel_images == 1) | (tiling.row_blocks == 1))
            & ((not tiling.transposed or tiling.down.stride == 1) | (tiling.rolled == 0))
            & tiling.has_whole_row_blocks
            & (larger(tiling.down.window, tiling.across.window) <= MAX_WINDOW)
            & (is_last | tiling.fits_registers(device))
            & (tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
        )
        return is_valid

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        ranked = self._ranked(problem, device)
        if problem.direction is Direction.BACKWARD_DATA and max(problem.conv.stride) > 1:
            return self._strided_defaults(problem, ranked)
        are_rolled = ranked.values("rolled")
        rolled = [place for place, is_rolled in enumerate(are_rolled) if is_rolled][:_ROLLED_DEFAULTS]
        others = [place for place, is_rolled in enumerate(are_rolled) if not is_rolled]
        return tuple(ranked[place] for place in sorted(rolled + others[: MAX_DEFAULTS - len(rolled)]))

    def _ranked(self, problem: ProblemDescription, device: Device) -> RankedTable:
        """The short list as far as it is valid, the least estimate first."""
        return self.ranked_valid(problem, device, _short_list())

    @staticmethod
    def _strided_defaults(
        problem: ProblemDescription, ranked: Sequence[EstimatedConfig]
    ) -> tuple[EstimatedConfig, ...]:
        """One of each register tile, and what else is likely: estimates of one tile err alike.

        Tiles are of whole strides, so that several configurations come to one tiling. Four channels a block tend to be
        faster than others of the same estimate (H200).
        """
        likely = [each for each in ranked if each.estimate_ms <= _LIKELY * ranked[0].estimate_ms]
        tilings = {_Tiling.of(problem, each.config): each for each in reversed(likely)}
        tiles: dict[tuple[int, int], EstimatedConfig] = {}
        for tiling, each in reversed(tilings.items()):
            tile = (tiling.down.length, tiling.across.length)
            best = tiles.setdefault(tile, each)
            if tiling.channel_images == 4 and each.estimate_ms <= _LEVEL * best.estimate_ms:
                tiles[tile] = each
        kept = tuple(dict.fromkeys((*tiles.values(), *reversed(tilings.values()))))
        return tuple(sorted(kept[:MAX_DEFAULTS], key=ranked.index))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return estimate_ms(_load(_Tiling.of(problem, config), device), device)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(_launch(problem, config, device),))


def _is_sensible(tiling: _Tiling, config: Config) -> bool:
    """Whether a configuration is neither another's equal nor a waste of threads, registers or code."""
    is_sensible: bool = (
        tiling.has_least_tile(config, _ROWS, _COLUMNS)
        & ((config["band"] == 0) | ((tiling.row_blocks > 1) & (config["planes"] == 1)))
        & (tiling.channel_images < 2 * tiling.all_channel_images)
        & ((tiling.items >= 24) | (tiling.all_channel_images < 24))
        & ((tiling.rolled == 0) | (tiling.down.taps >= _LEAST_ROLLED))
        & tiling.wastes_little(_ROWS, _COLUMNS)
    )
    return is_sensible


def _load(tiling: _Tiling, device: Device) -> Load:
    down, across = tiling.down, tiling.across
    iterations = ceil_div(tiling.items, tiling.threads) * tiling.terms
    stores = down.length * across.length / tiling.vector * chosen(tiling.staged, 2, 1)
    rows = chosen(tiling.rolled, down.length * down.taps, down.met)
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
