"""ConvDepthwiseVolume: depthwise convolution of volumes with small filters, forward and backward data.

Kernel: kernels_src/depthwise/volume.cu. ConvDepthwiseVolumeWeights serves backward weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.cached import cached_property
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, is_one_of, larger, smaller
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import cycles_of_waves
from miofind.solver.solver import OF_IMAGES
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.depthwise.volume_solver import DepthwiseVolumeSolver
from miofind.solvers.depthwise.volume_tiling import MOST_SHARED_BYTES, VECTOR_CHANNELS, VolumeTiling

_SOURCE = "depthwise/volume.cu"
_MOST_HELD = 64  # taps of a thread's channels that stay in registers
_MOST_PRODUCTS = 3200


@dataclass(frozen=True, kw_only=True)
class _Tiling(VolumeTiling):
    """A configuration applied to a problem: what the kernel's constants come to."""

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        return _Tiling(**VolumeTiling.attributes(problem, config))  # type: ignore[arg-type]

    @property
    def taps(self) -> int:
        return math.prod(self.problem.filter)

    @cached_property
    def held(self) -> bool:
        """Whether filters stay in registers."""
        return self.taps * self.vector <= _MOST_HELD

    @cached_property
    def rolled(self) -> bool:
        """Whether rows of the filters are a loop: where they are read again for each plane, and neighbours meet."""
        is_walked = not self.backward or self.height.stride == 1
        return (self.held == 0) & is_walked

    @cached_property
    def staged(self) -> bool:
        """Whether results pass through shared memory, since threads cannot write 16 bytes, or all theirs, at once."""
        if self.channels_last:
            return False
        return (self.out_vector * self.itemsize < 16) & (self.out_vector < self.columns * self.width.outs)

    @cached_property
    def outs(self) -> int:
        """Results of a thread and a plane."""
        return self.rows * self.height.outs * self.columns * self.width.outs * self.vector

    @cached_property
    def products(self) -> int:
        """Of a thread and the planes of an iteration."""
        return self.taps * self.rows * self.columns * self.vector

    @cached_property
    def filter_elements(self) -> int:
        """Of shared memory, as float32."""
        row = self.depth.taps * self.width.taps
        if self.channels_last:
            return self.height.taps * row * self.channels
        return 4 * (self.height.taps * round_up(row, 4) // 4 | 1) * self.channels

    @cached_property
    def shared_bytes(self) -> int:
        block = self.channels * self.block_rows * self.rows * self.height.outs
        results = chosen(self.staged, self.depth.outs * block * self.block_columns * self.columns * self.width.outs, 0)
        staged = self.staged_elements + round_up(results, 8)
        return 4 * round_up(self.filter_elements, 4) + self.itemsize * staged

    @cached_property
    def registers(self) -> int:
        """Of a thread, about."""
        sums = self.depth.span * self.depth.outs * self.outs
        taps = chosen(self.held, self.taps, self.depth.taps * self.width.taps) * self.vector
        window = self.width.window(self.columns) * self.vector
        return (
            sums
            + taps
            + window
            + self.copy_registers
            + epilogue_registers(self.problem, self.vector, self.outs // self.rows)
            + 44
        )

    def resident_here(self, device: Device) -> int:
        return self.resident(self.registers, self.shared_bytes, device)


def _launch(problem: ProblemDescription, config: Config, device: Device) -> KernelStep:
    tiling = _Tiling.of(problem, config)
    source, target = ("y", "x") if tiling.backward else ("x", "y")
    return KernelStep(
        source=_SOURCE,
        entry="depthwise_volume",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=(
            *tiling.defines,
            ("FILTER_D", tiling.depth.taps),
            ("HELD", int(tiling.held)),
            ("ROLLED", int(tiling.rolled)),
            ("STAGED", int(tiling.staged)),
            ("MIN_BLOCKS", tiling.resident_here(device)),
            ("SHARED_BYTES", tiling.shared_bytes),
            *epilogue_defines(problem),
        ),
        args=(
            *(Pointer(buffer=name) for name in (source, "w", target)),
            tiling.volume,
            *epilogue_arguments(problem),
        ),
    )


# Set against 319 times of an H200, float16 and float32: configurations ranked first take 1.07 times the best.
_LAUNCH_MS, _SERIAL, _BANDWIDTH_SHARE, _ISSUE, _ALONE = 0.0027, 0.45, 0.6, 1.25, 1.5
_AGAIN = 0.35  # of what blocks read again, which caches serve in part
_SECTORS = 0.3  # of what sectors hold besides a block's channels
_SHARED = 3.6  # instructions that are issued while shared memory is busy for a cycle


def _instructions(tiling: _Tiling) -> float:
    """Of a thread."""
    converts = tiling.problem.x.dtype is not DataType.FLOAT32
    rows = chosen(tiling.rolled, tiling.rows * tiling.height.taps, tiling.height.window(tiling.rows))
    window = tiling.width.window(tiling.columns)
    reads = chosen(tiling.channels_last, window, ceil_div(window, tiling.read_vector) + 2)
    row = reads + converts * window * tiling.vector
    taps = chosen(tiling.held, 0.0, 1.0 * tiling.taps / chosen(tiling.channels_last, 1, 4))
    steps = tiling.depth.stride if not tiling.backward else 1
    issued = tiling.products / steps + rows * row + taps / steps + 5 * tiling.copies + 40
    plane = larger(issued, _SHARED * (rows * tiling.wavefronts + taps / steps))
    stores = tiling.outs * (0.5 + 0.5 * converts) + tiling.outs / tiling.out_vector * chosen(tiling.staged, 8, 2)
    shift = tiling.depth.outs * tiling.outs
    units = tiling.part_units + tiling.depth.span - 1
    return (
        200
        + tiling.taps * tiling.vector
        + 12 * tiling.copies
        + tiling.met_planes * plane
        + units * (shift + 10)
        + tiling.part_units * tiling.depth.outs * (stores + 10)
    )


def _moved_bytes(tiling: _Tiling) -> float:
    """Through device memory, with a share of what blocks read of their neighbours' planes."""
    source = tiling.problem.y if tiling.backward else tiling.problem.x
    met = tiling.blocks * tiling.met_planes * tiling.plane * tiling.itemsize
    own = 1 + _SECTORS * (tiling.sector_share - 1)
    return tiling.problem.bytes * own + _AGAIN * larger(0.0, met - source.bytes)


def _time_ms(problem: ProblemDescription, tiling: _Tiling, device: Device) -> float:
    resident = tiling.resident_here(device)

    def wave(blocks: int) -> float:
        return larger(_ALONE, _ISSUE * ceil_div(blocks * tiling.threads, 128))

    cycles = cycles_of_waves(tiling.blocks, resident, device, wave)
    busy_ms = 1e3 * cycles * _instructions(tiling) / device.clock_hz
    moved_ms = 1e3 * _moved_bytes(tiling) / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    return _LAUNCH_MS + larger(busy_ms, moved_ms) + _SERIAL * smaller(busy_ms, moved_ms)


_FALLBACKS = (
    Config.of(vector=1, channels=16, rows=1, columns=2, height=4, width=8, depth=8, stages=2),
    Config.of(vector=1, channels=1, rows=1, columns=1, height=4, width=8, depth=8, stages=2),
    Config.of(vector=1, channels=1, rows=1, columns=1, height=8, width=32, depth=8, stages=2),
)
_SHORT_LIST = (
    *Config.product(
        {
            ("vector", "channels"): VECTOR_CHANNELS,
            ("rows", "columns"): ((1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8)),
            ("height", "width"): ((4, 8), (8, 8), (8, 16), (8, 32), (16, 16), (16, 64)),
            "depth": (4, 8, 16, 64),
            "stages": (3,),
        }
    ),
    _FALLBACKS[0],
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


class ConvDepthwiseVolume(DepthwiseVolumeSolver):
    """Depthwise convolution of volumes, one filter a channel, with float32 accumulators.

    Configuration: a block computes a tile of up to `height` x `width` units of `channels` channels, and marches along
    up to `depth` of them, with planes in `stages` stages. A thread computes `rows` x `columns` units of `vector`
    channels. A unit is an output, or of backward data those of a whole stride.
    """

    id = "ConvDepthwiseVolume"
    directions = OF_IMAGES
    fallbacks = _FALLBACKS
    applies_epilogues = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "vector": (1, 2),
        "channels": (1, 4, 8, 16, 32, 64, 128),
        "rows": (1, 2, 4),
        "columns": (1, 2, 4, 8),
        "height": (4, 8, 16, 32),
        "width": (8, 16, 32, 64),
        "depth": (4, 8, 16, 64),
        "stages": (2, 3, 4),
    }
    sources = (_SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        last = functools.partial(depthwise_example, layout=Layout.NDHWC)
        first = functools.partial(depthwise_example, layout=Layout.NCDHW)
        half, brain, back = DataType.FLOAT16, DataType.BFLOAT16, Direction.BACKWARD_DATA
        return (
            last(54, x=(2, 54, 8, 14, 14), w=(3, 3, 3), padding=1, dtype=half),
            first(24, x=(2, 24, 8, 14, 14), w=(3, 3, 3), padding=1, dtype=half),
            last(24, x=(2, 24, 7, 15, 13), w=(3, 3, 3), padding=1, stride=(1, 2, 2), dtype=brain),
            first(12, x=(2, 12, 7, 15, 12), w=(3, 3, 3), padding=1, stride=2, dtype=brain),
            last(16, x=(1, 16, 9, 10, 11), w=(5, 5, 5), padding=2, direction=back),
            first(5, x=(2, 5, 6, 9, 7), w=(3, 5, 5), padding=((2, 0), (1, 3), (4, 1)), dtype=half),
            last(20, x=(2, 20, 7, 11, 12), w=(3, 3, 3), padding=1, stride=(2, 2, 2), dtype=half, direction=back),
            first(6, x=(2, 6, 5, 13, 14), w=(3, 3, 3), padding=1, stride=(1, 2, 2), direction=back, dtype=half),
            last(24, x=(1, 24, 5, 26, 56), w=(3, 3, 3), padding=1, stride=(1, 2, 2), dtype=half, direction=back),
            first(6, x=(1, 6, 9, 29, 31), w=(3, 3, 3), padding=1, stride=2, direction=back),
            first(4, x=(1, 4, 9, 17, 24), w=(7, 7, 7), padding=3),
            last(8, x=(1, 8, 12, 11, 10), w=(2, 3, 3), padding=2, dilation=(2, 1, 3), dtype=half),
            first(3, x=(2, 3, 12, 11, 10), w=(3, 2, 3), padding=2, dilation=(3, 2, 1), dtype=brain, direction=back),
            last(7, x=(1, 7, 5, 6, 7), w=(3, 3, 3), padding=1, dtype=half, direction=back),
            last(32, x=(2, 32, 6, 9, 10), w=(3, 3, 3), padding=1, dtype=half, epilogue="scale.bias.residual.relu"),
            first(8, x=(2, 8, 6, 9, 10), w=(3, 3, 3), padding=1, stride=(1, 2, 2), epilogue="channel_bias.silu"),
            first(8, x=(2, 8, 6, 8, 14), w=(3, 3, 3), padding=1, dtype=half, epilogue="bias.silu.residual"),
            first(
                8, x=(2, 8, 6, 8, 14), w=(3, 3, 3), padding=1, dtype=brain, direction=back, epilogue="residual.drelu"
            ),
        )

    def short_list(self) -> ConfigTable:
        return _short_list()

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config)
        is_valid: bool = (
            (is_one_of(config, self.fallbacks) | tiling.is_economical(config))
            & tiling.fits
            & tiling.holds(tiling.registers, device)
            & (chosen(tiling.rolled, tiling.products / tiling.height.taps, tiling.products) <= _MOST_PRODUCTS)
            & (tiling.shared_bytes <= (device.shared_bytes or MOST_SHARED_BYTES))
        )
        return is_valid

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return _time_ms(problem, _Tiling.of(problem, config), device)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(_launch(problem, config, device),))


SOLVERS = (ConvDepthwiseVolume(),)
