"""ConvDepthwiseChannelsFirstWeights: backward weights of depthwise convolution of NCHW tensors, small filters.

Splits share the images; a cluster or a split-K reduction adds their float32 partials in a fixed order. Kernels:
kernels_src/depthwise/channels_first_weights.cu.
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
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import APPLICABLE, OF_WEIGHTS, Algorithm, Applicability, EstimatedConfig, RankedTable, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer, int32s
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.split_k import SplitK
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
)
from miofind.solvers.depthwise.register_tile_cost import Load, estimate_ms, row_reads

_SOURCE = "depthwise/channels_first_weights.cu"
_SHARED_BYTES = 48 << 10
_MAX_REGISTERS = 168
_ROWS, _COLUMNS = (1, 2, 4, 7), (4, 7, 8, 14)
_MAX_THREADS = 256
_REDUCTION_THREADS = 128
_MAX_BLOCKS = 4096
_MIN_CLUSTER_SM = 90
_MAX_CLUSTER = 8  # blocks of a cluster that every device has


@dataclass(frozen=True, kw_only=True)
class _Tiling(RegisterTiling):
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/depthwise/channels_first_weights.cu computes the same from the defines and refuses to compile where it
    differs.

    Attributes:
        units, buffers, splits, clustered: as configured. A unit is an image, or a row block of one.
    """

    units: int
    buffers: int
    splits: int
    clustered: bool

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        planar = problem.lifted(2)
        down, across = register_tile_axes(planar, config, transposed=False)
        return _Tiling(
            problem=planar,
            down=down,
            across=across,
            row_blocks=row_blocks_of(down, config["band"]),
            channel_images=config["planes"],
            **{name: config[name] for name in ("units", "buffers", "splits", "clustered")},
        )

    @cached_property
    def items(self) -> int:
        """Tiles of a stage of a block."""
        return self.channel_images * self.units * self.row_block_tiles * self.across.count

    @cached_property
    def threads(self) -> int:
        """Of a block: one a tile, up to a limit."""
        return round_up(ceil_div(self.items, ceil_div(self.items, _MAX_THREADS)), 32)

    @cached_property
    def stages(self) -> int:
        """Of all blocks that share filters."""
        return ceil_div(self.problem.n * self.row_blocks, self.units)

    @property
    def split_k(self) -> SplitK:
        """What the reduction adds; a cluster adds the partials of its blocks itself."""
        return SplitK.of(self.problem, chosen(self.clustered, 1, self.splits))

    @cached_property
    def blocks(self) -> int:
        return ceil_div(self.problem.k, self.channel_images) * self.splits

    @cached_property
    def stage_elements(self) -> int:
        """Elements of shared memory for a stage."""
        x, dy = self.sources * self.source_elements, self.channel_images * self.elements
        return self.units * (_odd_padded_size(self.itemsize, x) + _odd_padded_size(self.itemsize, dy))

    @cached_property
    def shared_bytes(self) -> int:
        totals = chosen(self.clustered, round_up(self.channel_images * self.taps, 4), 0)
        staged = self.itemsize * (self.zeros + self.buffers * self.stage_elements)
        return larger(staged, 4 * (self.taps * self.threads + totals))

    @cached_property
    def registers(self) -> int:
        """Registers of a thread that spills nothing: sums, a tile, a window's row, and addresses."""
        return round_up(self.down.length * self.across.length + self.taps + self.across.met + 54, 8)

    def fits_registers(self, device: Device) -> bool:
        """Whether threads spill nothing, and a multiprocessor has registers for a block."""
        held = resident_blocks(self.registers, self.threads, 0, SmLimits.of(device))
        return (self.registers <= _MAX_REGISTERS) & (held > 0)

    def resident(self, device: Device) -> int:
        """Blocks that a multiprocessor holds at once."""
        return larger(1, resident_blocks(self.registers, self.threads, self.shared_bytes, SmLimits.of(device)))


def _odd_padded_size(itemsize: int, count: int) -> int:
    """Elements from one segment to the next: an odd number of 16-byte words, so that they begin in different banks."""
    copied = COPY_BYTES // itemsize
    return (padded_size(itemsize, count) // copied | 1) * copied


def _solution(problem: ProblemDescription, config: Config, device: Device) -> ConvSolution:
    tiling = _Tiling.of(problem, config)
    defines = _defines(tiling, device)
    # A block that leaves partials to the second kernel is told of the output, too, so that both have one signature.
    split_k = tiling.split_k
    first = KernelStep(
        source=_SOURCE,
        entry="depthwise_channels_first_weights",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=defines,
        args=(*(Pointer(buffer=name) for name in ("y", "x", "w", split_k.target)), *int32s(problem.n)),
    )
    blocks = ceil_div(split_k.results, _REDUCTION_THREADS)
    return split_k.solution(first, split_k.reduction(first, blocks=blocks, threads=_REDUCTION_THREADS))


def _defines(tiling: _Tiling, device: Device) -> tuple[tuple[str, str | int], ...]:
    return (
        *tiling.defines,
        *((name.upper(), getattr(tiling, name)) for name in ("units", "buffers", "splits", "threads")),
        ("CLUSTERED", int(tiling.clustered)),
        ("MIN_BLOCKS", tiling.resident(device)),
        ("SHARED_BYTES", tiling.shared_bytes),
    )


# Milliseconds of the second kernel, and of a cluster's launch and sums. Instructions of a thread: for a product, an
# element of a row of a tile's window, a tile, a word copied, and at the end for a tap; reads of shared memory cost a
# share of what they cost ConvDepthwiseChannelsFirst. Cycles that a block waits for a stage if it has one buffer. Fitted
# to 235 times of an H200, float16 and float32: configurations ranked first take 1.04 times the best.
_REDUCTION_MS, _CLUSTER_MS = 0.0005, 0.0017
_PRODUCT, _ELEMENT, _TILE, _READ_SHARE, _COPY, _TAP = 0.6, 0.35, 220, 0.35, 6, 30
_STAGE_WAIT = 285


# What default_configs ranks by estimate; the last is valid for every applicable problem.
_SHORT_LIST = (
    *Config.product(
        {
            ("planes", "units"): ((1, 1), (1, 2), (1, 8), (2, 4), (4, 8), (4, 32), (8, 4), (8, 8), (8, 16)),
            "band": (0,),
            ("rows", "columns"): ((2, 4), (4, 4), (2, 8), (4, 8), (2, 14), (7, 7)),
            "buffers": (1, 2),
            ("splits", "clustered"): ((1, False), (4, True), (8, True), (4, False), (16, False)),
        }
    ),
    *(
        Config.of(planes=1, band=band, rows=4, columns=8, units=1, buffers=2, splits=splits, clustered=False)
        for band in (16, 28)
        for splits in (1, 4, 16)
    ),
    Config.of(planes=1, band=4, rows=1, columns=4, units=1, buffers=1, splits=1, clustered=False),
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


_CLUSTERED_DEFAULTS = 4


class ConvDepthwiseChannelsFirstWeights(Solver):
    """Backward weights of depthwise convolution of NCHW tensors, filters of up to 64 taps, float32 accumulators.

    Where a row takes several register tiles, padding beside the image is multiplied as zeros. Nothing else outside the
    tensors is multiplied.

    Configuration: a block computes `planes` filters from `units` units at a time in `buffers` buffers. A unit is an
    image or, where `band` is not 0, a row block of about `band` rows. A thread takes register tiles of `rows` x
    `columns` of dy. `splits` blocks share the units. They add their accumulators as a cluster if `clustered`, else by a
    second kernel.
    """

    id = "ConvDepthwiseChannelsFirstWeights"
    algorithm = Algorithm.DIRECT
    directions = OF_WEIGHTS
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "planes": (1, 2, 4, 8),
        "band": (0, 4, 16, 28),
        "rows": _ROWS,
        "columns": _COLUMNS,
        "units": (1, 2, 4, 8, 16, 32),
        "buffers": (1, 2),
        "splits": (1, 2, 4, 8, 16),
        "clustered": (False, True),
    }
    sources = (_SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        depthwise = functools.partial(depthwise_example, direction=Direction.BACKWARD_WEIGHTS)
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        return (
            depthwise(40, w=(3, 3), x=(4, 40, 7, 7), padding=1, dtype=half),
            depthwise(24, w=(5, 5), x=(3, 24, 14, 14), padding=2, dtype=brain),
            depthwise(8, w=(7, 7), x=(2, 8, 28, 28), padding=3, dtype=half),
            depthwise(16, w=(3, 3), x=(2, 16, 28, 28), padding=1, stride=2, dtype=half),
            depthwise(4, w=(3, 5), k=12, x=(2, 4, 33, 45), padding=((2, 4), (9, 0)), dilation=(2, 1)),
            depthwise(5, w=(2, 3), k=10, x=(1, 5, 19, 17), stride=(3, 2), padding=1, dtype=brain),
            depthwise(3, w=(15,), x=(2, 3, 300), padding=((20, 1),), dtype=half),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_register_tiles(problem)).refused:
            return answer
        if not self.is_valid_config(problem, device, _SHORT_LIST[-1]):
            return Applicability(f"a row of {problem.x.shape} and {problem.y.shape} is too long for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config)
        is_last = is_config(config, _SHORT_LIST[-1])
        is_cluster = (device.sm >= _MIN_CLUSTER_SM) & (tiling.splits > 1) & (tiling.splits <= _MAX_CLUSTER)
        is_valid: bool = (
            (is_last | _is_sensible(tiling, config))
            & ((tiling.clustered == 0) | is_cluster)
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
        are_clustered = ranked.values("clustered")
        clustered = [place for place, is_clustered in enumerate(are_clustered) if is_clustered][:_CLUSTERED_DEFAULTS]
        others = [place for place, is_clustered in enumerate(are_clustered) if not is_clustered]
        return tuple(ranked[place] for place in sorted(clustered + others[: MAX_DEFAULTS - len(clustered)]))

    def _ranked(self, problem: ProblemDescription, device: Device) -> RankedTable:
        """The short list as far as it is valid, the least estimate first."""
        return self.ranked_valid(problem, device, _short_list())

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config)
        clustered_ms = chosen(tiling.clustered, _CLUSTER_MS, 0.0)
        together_ms = chosen(tiling.split_k.splits > 1, _REDUCTION_MS, clustered_ms)
        return estimate_ms(_load(tiling, device), device) + together_ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return _solution(problem, config, device)


def _is_sensible(tiling: _Tiling, config: Config) -> bool:
    """Whether a configuration is neither another's equal nor a waste of threads, registers or code."""
    is_sensible: bool = (
        tiling.has_least_tile(config, _ROWS, _COLUMNS)
        & ((config["band"] == 0) | ((tiling.row_blocks > 1) & (config["planes"] == 1)))
        & (tiling.channel_images < 2 * tiling.problem.k)
        & (tiling.units < 2 * tiling.problem.n * tiling.row_blocks)
        & (tiling.splits <= tiling.stages)
        & (tiling.buffers <= ceil_div(tiling.stages, tiling.splits))
        & (tiling.items >= 64)
        & (tiling.items <= 512)
        & ((tiling.blocks <= _MAX_BLOCKS) | (tiling.splits == 1))
        & tiling.wastes_little(_ROWS, _COLUMNS)
    )
    return is_sensible


def _load(tiling: _Tiling, device: Device) -> Load:
    down, across = tiling.down, tiling.across
    stages = ceil_div(tiling.stages, tiling.splits)
    iterations = ceil_div(tiling.items, tiling.threads) * stages
    tile = down.length * across.length
    elements = down.met * (across.met + 4)
    instructions = _PRODUCT * tiling.products + _ELEMENT * elements + tile * (1 + 1 / tiling.vector) + _TILE
    reads = down.met * row_reads(tiling.itemsize, across) + tile / tiling.vector
    copies = tiling.itemsize * tiling.stage_elements / 16 / tiling.threads * stages
    return Load(
        blocks=tiling.blocks,
        threads=tiling.threads,
        resident=tiling.resident(device),
        instructions=iterations * instructions + _COPY * copies + 150 + _TAP * tiling.taps,
        reads=_READ_SHARE * iterations * reads,
        bytes=tiling.problem.bytes,
        waits=chosen(tiling.buffers == 1, _STAGE_WAIT * stages, 0),
    )


SOLVERS = (ConvDepthwiseChannelsFirstWeights(),)
