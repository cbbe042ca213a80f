"""ConvDepthwiseMma: depthwise convolution of NHWC tensors on tensor cores, forward and backward data.

Kernel: kernels_src/depthwise/mma.cu. ConvDepthwiseMmaWeights serves backward weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, smaller
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.solver import (
    APPLICABLE,
    OF_IMAGES,
    Algorithm,
    Applicability,
    EstimatedConfig,
    Solver,
    first_of_kinds,
)
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer, int32s
from miofind.solvers.common.axis_defines import axis_defines
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.packed_groups import SOURCE, least_ample
from miofind.solvers.depthwise.mma_tiling import KEYS, DepthwiseTiling, refuse_mma, unbalance, unit_axes

_DEFAULTS = 8
_ROWS, _COLUMNS, _CHANNELS = (2, 4, 7, 8, 14), (8, 16), (16, 32, 64)
_MAX_PRODUCTS = 1000  # of a walk, all unrolled
_MAX_REGISTERS = 255
_MAX_GRID = 2**16 - 1


def _resident(tiling: DepthwiseTiling, device: Device) -> int:
    """Blocks that a multiprocessor holds at once."""
    return resident_blocks(tiling.registers, tiling.threads, tiling.shared_bytes, SmLimits.of(device))


def _launch(problem: ProblemDescription, config: Config, device: Device) -> KernelStep:
    tiling = DepthwiseTiling.of(problem, config)
    channel_tiles, row_tiles, column_tiles, image_tiles = tiling.tiles
    source, target = SOURCE[problem.direction], problem.direction.output
    return KernelStep(
        source="depthwise/mma.cu",
        entry="depthwise_mma",
        grid=(channel_tiles, row_tiles * column_tiles, image_tiles),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem.lifted(2), tiling, _resident(tiling, device)),
        args=(
            *(Pointer(buffer=name) for name in (source, "w", target)),
            *int32s(problem.n),
            *epilogue_arguments(problem),
        ),
    )


def _defines(planar: ProblemDescription, tiling: DepthwiseTiling, resident: int) -> tuple[tuple[str, str | int], ...]:
    read, written = planar.tensor(SOURCE[planar.direction]).shape, planar.output.shape
    return (
        ("ELEMENT", planar.x.dtype.value),
        ("FLIPPED", int(planar.direction is Direction.BACKWARD_DATA)),
        *axis_defines(planar, IN=read[2:], OUT=written[2:]),
        ("TILE_ROWS", tiling.rows),
        ("PAIRS", tiling.pairs),
        ("IMAGES", tiling.images),
        ("CHANNELS", tiling.channels),
        ("WARP_CHANNELS", tiling.warp_channels),
        ("ROW_TILES", tiling.tiles[1]),
        ("COLUMN_TILES", tiling.tiles[2]),
        ("ALL_CHANNELS", planar.c),
        ("MIN_BLOCKS", resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        *epilogue_defines(planar),
    )


# Set against 165 measurements on an H200. Cycles of a multiprocessor for a product of depth 16; instructions of a warp
# for a product, to start copying 32 words of 16 bytes, to store a row of 8 pairs of 16 channels, and for each tap at
# first; cycles of a block at least, for each product of a warp and for each row of a walk.
_PRODUCT, _PRODUCT_SLOTS = 2.8, 2.4
_COPY, _STORE, _TAP = 14, 39, 14
_BLOCK_LATENCY, _PRODUCT_LATENCY, _ROW_LATENCY = 500, 2.45, 100
_SLOTS = 3.6  # instructions that a multiprocessor issues a cycle
_AGAIN = 0.06  # share of bytes read once more that device memory sees
_SERIAL_SHARE, _ALONE = (
    0.21,
    0.27,
)  # share of the shorter of memory and multiprocessors that does not overlap; with one block
_BANDWIDTH_SHARE = 0.773  # of the nominal one that copies reach
_LAUNCH_MS = 0.00256


def _work_ms(problem: ProblemDescription, device: Device, tiling: DepthwiseTiling, resident: int) -> float:
    """Milliseconds of multiprocessors and memory together."""
    height, width = tiling.axes
    warps = tiling.threads // 32
    walked = (tiling.rows - 1) * height.stride + height.reach + 1
    in_rows = problem.lifted(2).tensor(SOURCE[problem.direction]).shape[2]
    rows_read = (height.outputs - 1) * height.stride + height.reach + 1
    met = min(1.0, in_rows / rows_read + 0.02)  # share of rows that are not padding
    products = met * tiling.products * width.phases
    halves = tiling.warp_channels // 8
    loads = met * walked * tiling.fragments * width.phases * halves
    stores = tiling.rows * height.phases * width.phases * _STORE * halves / 2
    copies = tiling.images * tiling.staged_rows * tiling.pixels.columns * tiling.channels / 8 / 32
    walks = tiling.iterations * tiling.channels / tiling.warp_channels
    taps = halves * height.taps * width.taps
    slots = walks * (products * _PRODUCT_SLOTS + loads + stores) + copies * _COPY + warps * (taps * _TAP + 100)
    shared = walks * (4 * loads + stores / 4) + 4 * copies
    busy = larger(larger(slots / _SLOTS, shared), walks * products * _PRODUCT)
    alone = _BLOCK_LATENCY + taps * _TAP + 32 * copies * _COPY / tiling.threads
    alone += tiling.iterations * (products * _PRODUCT_LATENCY + walked * _ROW_LATENCY * width.phases)
    cycles = cycles_of_waves(
        tiling.blocks, resident, device, lambda blocks: larger(blocks * busy * unbalance(blocks * warps), alone)
    )
    processing = 1e3 * cycles / device.clock_hz
    again = larger(0.0, 512 * copies * tiling.blocks - problem.bytes / 2)
    through = problem.bytes * (1 + 4 / tiling.channels) + _AGAIN * again
    through += chosen(halves == 1, problem.output.bytes, 0)  # 8 channels: half of a sector, which counts as a whole one
    memory = 1e3 * through / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    together = smaller(resident, ceil_div(tiling.blocks, device.sm_count))
    return larger(memory, processing) + smaller(memory, processing) * (_SERIAL_SHARE + _ALONE / together)


# What default_configs ranks by estimate; the last is valid for every applicable problem.
_SHORT_LIST = (
    *Config.product(
        {
            "rows": _ROWS,
            ("columns", "images"): ((8, 1), (8, 2), (16, 1)),
            "channels": (32, 64),
            "warp_channels": (8, 16),
        }
    ),
    Config.of(rows=2, columns=8, images=1, channels=16, warp_channels=8),
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


class ConvDepthwiseMma(Solver):
    """Depthwise convolution as products of pixels with diagonal matrices of taps, with float32 accumulators.

    The zeros of those matrices are multiplied: an infinity or NaN of the input becomes NaN in the results of all 8
    channels of its matrix. Columns of padding are multiplied as zeros: an infinity or NaN of the filter spreads to
    outputs at the border.

    Configuration: a warp computes `rows` rows of 8 pairs of neighbouring pixels, of `warp_channels` channels, at a
    time. A block computes about `columns` columns, `images` images and `channels` channels.
    """

    id = "ConvDepthwiseMma"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_IMAGES
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "rows": _ROWS,
        "columns": _COLUMNS,
        "images": (1, 2),
        "channels": _CHANNELS,
        "warp_channels": (8, 16),
    }
    sources = ("depthwise/mma.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        depthwise = functools.partial(depthwise_example, dtype=DataType.FLOAT16, layout=Layout.NHWC)
        brain, data = DataType.BFLOAT16, Direction.BACKWARD_DATA
        return (
            depthwise(64, x=(2, 64, 14, 14), w=(3, 3), padding=1),
            depthwise(48, x=(3, 48, 28, 27), w=(5, 5), padding=2, stride=2, dtype=brain),
            depthwise(24, x=(3, 24, 7, 7), w=(7, 7), padding=3),
            depthwise(8, x=(2, 8, 13, 9), w=(5, 3), padding=((4, 0), (1, 5)), dilation=(1, 2)),
            depthwise(72, x=(2, 72, 9, 12), w=(2, 4), padding=1, stride=(3, 1), dtype=brain),
            depthwise(40, x=(2, 40, 15, 14), w=(3, 3), padding=1, stride=2, direction=data),
            depthwise(16, x=(1, 16, 56, 57), w=(7, 7), padding=3, direction=data, dtype=brain),
            depthwise(8, x=(2, 8, 11, 12), w=(4, 3), stride=(2, 4), dilation=(3, 1), direction=data),
            depthwise(16, x=(2, 16, 50), w=(7,), stride=2, padding=3, layout=Layout.NWC),
            depthwise(48, x=(3, 48, 14, 15), w=(3, 3), padding=1, epilogue="bias.clamp"),
            depthwise(24, x=(2, 24, 9, 7), w=(7, 7), padding=3, dtype=brain, epilogue="scale.bias.residual.relu"),
            depthwise(40, x=(2, 40, 15, 14), w=(5, 5), padding=2, stride=2, epilogue="channel_bias.silu.residual"),
            depthwise(40, x=(2, 40, 15, 14), w=(5, 5), padding=2, direction=data, epilogue="residual.drelu"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        if problem.direction is not Direction.BACKWARD_DATA:
            return super().fuses_training(problem)
        is_strided = max(problem.conv.stride) > 1
        return Applicability(f"fuses gradients of stride 1, not {problem.conv.stride}" if is_strided else "")

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_mma(problem)).refused:
            return answer
        if not self.is_valid_config(problem, device, _SHORT_LIST[-1]):
            return Applicability(f"filter {problem.filter} is too large for a thread, or the image for a grid")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        height, width = unit_axes(problem)
        tiling = DepthwiseTiling.of(problem, config)
        is_valid: bool = (
            (tiling.rows <= least_ample(_ROWS, height.outputs))
            & (config["columns"] <= least_ample(_COLUMNS, width.outputs))
            & (tiling.images < 2 * problem.n)
            & (tiling.channels <= least_ample(_CHANNELS, problem.c))
            & ((tiling.products <= _MAX_PRODUCTS) | (tiling.rows == min(_ROWS)))
            & (tiling.tiles[1] * tiling.tiles[2] <= _MAX_GRID)
            & (tiling.tiles[3] <= _MAX_GRID)
            & (tiling.registers <= _MAX_REGISTERS)
            & (_resident(tiling, device) > 0)
        )
        return is_valid

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        # The best of each shape of a warp's and a block's work: estimates of one shape err alike.
        return first_of_kinds(
            self._ranked(problem, device),
            lambda each: (each.config["warp_channels"], each.config["rows"], each.config["channels"]),
            _DEFAULTS,
        )

    def _ranked(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """The short list as far as it is valid, the least estimate first."""
        return self.ranked_valid(problem, device, _short_list())

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = DepthwiseTiling.of(problem, config)
        resident = _resident(tiling, device)
        return _LAUNCH_MS + _work_ms(problem, device, tiling, resident)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(_launch(problem, config, device),))


SOLVERS = (ConvDepthwiseMma(),)
