"""ConvDepthwiseVolumeWeights: backward weights of depthwise convolution of volumes with small filters.

Splits share the tiles of dy; a split-K reduction adds their float32 partials in a fixed order. Kernels:
kernels_src/depthwise/volume_weights.cu.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.cached import cached_property
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, is_one_of, larger, smaller
from miofind.solver.occupancy import cycles_of_waves
from miofind.solver.solver import OF_WEIGHTS
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer, int32s
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.depthwise.volume_solver import DepthwiseVolumeSolver
from miofind.solvers.depthwise.volume_tiling import MOST_SHARED_BYTES, VECTOR_CHANNELS, VolumeTiling

_SOURCE = "depthwise/volume_weights.cu"
_MOST_SUMS = 125  # of a thread, if one plane of a filter does not take more
_MOST_PRODUCTS = 3200
_MOST_WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class _Tiling(VolumeTiling):
    """A configuration applied to a problem: what the kernel's constants come to.

    Attributes:
        turns: items of a block, about.
    """

    turns: int

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        return _Tiling(**VolumeTiling.attributes(problem, config), turns=config["turns"])  # type: ignore[arg-type]

    @property
    def plane_taps(self) -> int:
        return self.height.taps * self.width.taps

    @cached_property
    def filter_planes(self) -> int:
        """Planes of the filters that a block adds up."""
        most = larger(1, _MOST_SUMS // (self.plane_taps * self.vector))
        groups = ceil_div(self.depth.taps, most)
        return ceil_div(self.depth.taps, groups)

    @cached_property
    def filter_groups(self) -> int:
        return ceil_div(self.depth.taps, self.filter_planes)

    @cached_property
    def splits(self) -> int:
        return ceil_div(self.items, self.turns)

    @property
    def split_k(self) -> SplitK:
        return SplitK.of(self.problem, self.splits)

    @cached_property
    def blocks(self) -> int:
        return self.channel_blocks * self.filter_groups * self.splits

    @cached_property
    def span(self) -> int:
        """Planes of dy that a thread holds."""
        return ceil_div(self.filter_planes, self.depth.stride)

    @cached_property
    def products(self) -> int:
        """Of a thread and the planes of an iteration."""
        return self.filter_planes * self.plane_taps * self.rows * self.columns * self.vector

    @cached_property
    def shared_bytes(self) -> int:
        sums = 4 * self.plane_taps * self.vector * (self.threads + 1)
        return larger(self.itemsize * self.staged_elements, sums)

    @cached_property
    def registers(self) -> int:
        """Of a thread, about."""
        tile = self.rows * self.columns * self.vector
        return (
            self.filter_planes * self.plane_taps * self.vector
            + self.span * tile
            + ceil_div(tile * self.itemsize, 4)
            + self.width.window(self.columns) * self.vector
            + self.copy_registers
            + 44
        )

    def resident_here(self, device: Device) -> int:
        return self.resident(self.registers, self.shared_bytes, device)


def _solution(problem: ProblemDescription, config: Config, device: Device) -> ConvSolution:
    tiling = _Tiling.of(problem, config)
    split_k = tiling.split_k
    # A block that leaves partials to the second kernel is told of the output, too, so that both have one signature.
    first = KernelStep(
        source=_SOURCE,
        entry="depthwise_volume_weights",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=(
            *tiling.defines,
            ("FILTER_D", tiling.filter_planes),
            ("FILTER_DEPTH", tiling.depth.taps),
            ("FILTER_GROUPS", tiling.filter_groups),
            ("SPLITS", tiling.splits),
            ("MIN_BLOCKS", tiling.resident_here(device)),
            ("SHARED_BYTES", tiling.shared_bytes),
        ),
        args=(
            *(Pointer(buffer=name) for name in ("y", "x", "w", split_k.target)),
            tiling.volume,
            *int32s(tiling.items),
        ),
    )
    return split_k.solution(first, split_k.vector_reduction(first, vector=1))


# Set against 154 times of an H200, float16 and float32: configurations ranked first take 1.06 times the best.
_LAUNCH_MS, _REDUCTION_MS, _PARTIALS_COST = 0.0027, 0.0015, 1.5
_SERIAL, _BANDWIDTH_SHARE, _ISSUE, _ALONE = 0.7, 0.6, 1.5, 3.6
_AGAIN = 0.4  # of what blocks read again, which caches serve in part
_SECTORS = 0.05  # of what sectors hold besides a block's channels
_SHARED = 5.0  # instructions that are issued while shared memory is busy for a cycle
_SUM = 12  # instructions of a thread for an accumulator at the end


def _instructions(tiling: _Tiling) -> float:
    """Of a thread."""
    converts = tiling.problem.x.dtype is not DataType.FLOAT32
    window, tile = tiling.width.window(tiling.columns), tiling.rows * tiling.columns * tiling.vector
    reads = chosen(tiling.channels_last, window, ceil_div(window, tiling.read_vector) + 2)
    rows = tiling.height.window(tiling.rows)
    issued = tiling.products / tiling.depth.stride + rows * (reads + converts * window * tiling.vector)
    plane = larger(issued + 5 * tiling.copies + 40, _SHARED * rows * tiling.wavefronts)
    unit = tile * (1 + converts) + 3 * tile / tiling.out_vector + 20
    units = tiling.part_units + tiling.span - 1
    item = 100 + 12 * tiling.copies + tiling.met_planes * plane + units * unit
    sums = tiling.filter_planes * tiling.plane_taps * tiling.vector
    return 200 + tiling.items / tiling.splits * item + _SUM * sums


def _moved_bytes(tiling: _Tiling) -> float:
    """Through device memory, with a share of what blocks read again."""
    again = tiling.items * tiling.channel_blocks * tiling.met_planes * tiling.plane * tiling.itemsize
    again += (tiling.filter_groups - 1) * (again + tiling.problem.y.bytes)
    own = 1 + _SECTORS * (tiling.sector_share - 1)
    return tiling.problem.bytes * own + _AGAIN * larger(0.0, again - tiling.problem.x.bytes)


def _time_ms(tiling: _Tiling, device: Device) -> float:
    def wave(blocks: int) -> float:
        return larger(_ALONE, _ISSUE * ceil_div(blocks * tiling.threads, 128))

    cycles = cycles_of_waves(tiling.blocks, tiling.resident_here(device), device, wave)
    busy_ms = 1e3 * cycles * _instructions(tiling) / device.clock_hz
    moved_ms = 1e3 * _moved_bytes(tiling) / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    partials_ms = 1e3 * _PARTIALS_COST * tiling.split_k.bytes / device.bandwidth_bytes_per_s
    reduced_ms = chosen(tiling.splits > 1, _REDUCTION_MS + partials_ms, 0.0)
    return _LAUNCH_MS + reduced_ms + larger(busy_ms, moved_ms) + _SERIAL * smaller(busy_ms, moved_ms)


_FALLBACKS = (
    Config.of(vector=1, channels=16, rows=1, columns=2, height=4, width=8, depth=64, stages=2, turns=64),
    Config.of(vector=1, channels=1, rows=1, columns=1, height=4, width=8, depth=64, stages=2, turns=64),
    Config.of(vector=1, channels=1, rows=1, columns=1, height=8, width=32, depth=64, stages=2, turns=64),
)
_SHORT_LIST = (
    *Config.product(
        {
            ("vector", "channels"): VECTOR_CHANNELS,
            ("rows", "columns"): ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4)),
            ("height", "width"): ((4, 8), (8, 8), (8, 16), (8, 32), (16, 16), (16, 64)),
            "depth": (8, 16, 64),
            "stages": (3,),
            "turns": (1, 2, 4, 16),
        }
    ),
    _FALLBACKS[0],
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


class ConvDepthwiseVolumeWeights(DepthwiseVolumeSolver):
    """Backward weights of depthwise convolution of volumes, one filter a channel, with float32 accumulators.

    Tiles that reach beyond dy, and planes of dy before and after a part of the depth, are multiplied as zeros.

    Configuration: an item is a tile of up to `height` x `width` outputs and up to `depth` planes of dy, of `channels`
    channels; a block takes about `turns` of them, with planes of x in `stages` stages. A thread takes `rows` x
    `columns` outputs of `vector` channels.
    """

    id = "ConvDepthwiseVolumeWeights"
    directions = OF_WEIGHTS
    fallbacks = _FALLBACKS
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "vector": (1, 2),
        "channels": (1, 4, 8, 16, 32, 64, 128),
        "rows": (1, 2),
        "columns": (1, 2, 4, 8),
        "height": (4, 8, 16, 32),
        "width": (8, 16, 32, 64),
        "depth": (4, 8, 16, 64),
        "stages": (2, 3, 4),
        "turns": (1, 2, 4, 16, 64),
    }
    sources = (_SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        weights = functools.partial(depthwise_example, direction=Direction.BACKWARD_WEIGHTS)
        last = functools.partial(weights, layout=Layout.NDHWC)
        first = functools.partial(weights, layout=Layout.NCDHW)
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        return (
            last(54, x=(2, 54, 8, 14, 14), w=(3, 3, 3), padding=1, dtype=half),
            first(24, x=(2, 24, 8, 14, 14), w=(3, 3, 3), padding=1, dtype=half),
            last(24, x=(2, 24, 7, 15, 13), w=(3, 3, 3), padding=1, stride=(1, 2, 2), dtype=brain),
            first(12, x=(2, 12, 7, 15, 12), w=(3, 3, 3), padding=1, stride=2, dtype=brain),
            last(16, x=(1, 16, 9, 10, 11), w=(5, 5, 5), padding=2),
            first(5, x=(2, 5, 6, 9, 7), w=(3, 5, 5), padding=((2, 0), (1, 3), (4, 1)), dtype=half),
            first(4, x=(1, 4, 9, 17, 24), w=(7, 7, 7), padding=3),
            last(8, x=(1, 8, 12, 11, 10), w=(2, 3, 3), padding=2, dilation=(2, 1, 3), dtype=half),
            first(3, x=(2, 3, 12, 11, 10), w=(3, 2, 3), padding=2, dilation=(3, 2, 1), dtype=brain),
        )

    def short_list(self) -> ConfigTable:
        return _short_list()

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config)
        is_sensible = tiling.is_economical(config) & (tiling.turns < 2 * tiling.items)
        is_valid: bool = (
            (is_one_of(config, self.fallbacks) | is_sensible)
            & (tiling.split_k.bytes <= max(_MOST_WORKSPACE_BYTES, problem.x.bytes))
            & tiling.fits
            & tiling.holds(tiling.registers + tiling.copies, device)  # with the address of each copy
            & (tiling.products <= _MOST_PRODUCTS)
            & (tiling.shared_bytes <= (device.shared_bytes or MOST_SHARED_BYTES))
        )
        return is_valid

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        """Zeros stand for what dy does not have, and meet elements of x that no dy of that tap meets."""
        return True

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return _time_ms(_Tiling.of(problem, config), device)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return _solution(problem, config, device)


SOLVERS = (ConvDepthwiseVolumeWeights(),)
