"""ConvFirstLayerData: backward data of convolutions of few channels on tensor cores, complete in registers.

dx is cut into space-to-depth (s2d) blocks, which all meet outputs alike. Kernel: kernels_src/few_channels/data.cu. Its
blocks and strips: data_tiling.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, larger, smaller
from miofind.solver.solver import Applicability
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import divide_by
from miofind.solvers.few_channels.data_tiling import DataTiling
from miofind.solvers.few_channels.s2d_blocks import S2dBlocks
from miofind.solvers.few_channels.shapes import DATA_SHAPE, images
from miofind.solvers.few_channels.solver import FewChannelsSolver, gradient_defines
from miofind.solvers.few_channels.window_rows import refuse_windows

_MAX_HELD = 184
_MAX_REGISTERS = 240
_SHARED_BYTES = 48 << 10


def _defines(problem: ProblemDescription, config: Config, tiling: DataTiling) -> tuple[tuple[str, str | int], ...]:
    return (
        *gradient_defines(problem),
        ("TAPS_X", tiling.width.taps),
        ("LAST_TAP", tiling.width.last_tap),
        ("S2D_BLOCKS", tiling.s2d_blocks),
        *((name.upper(), config[name]) for name in ("blocks", "warps", "stages")),
        ("IN_VECTOR", tiling.in_vector),
        ("OUT_VECTOR", 2 if _has_pairs(problem, tiling) else 1),
        ("MIN_BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        DATA_SHAPE.define,
    )


def _has_pairs(problem: ProblemDescription, tiling: DataTiling) -> bool:
    """Whether two neighbouring elements of a s2d block are an aligned word of dx."""
    width, columns = tiling.width, problem.spatial[1]
    per_column = problem.c if problem.x.layout.channels_last else 1
    return all(size * per_column % 2 == 0 for size in (width.size, width.origin, columns))


def _is_served(problem: ProblemDescription) -> bool:
    """Whether s2d blocks have several pixels, and matrices of dy begin where they can be read."""
    stride = problem.conv.stride[1]
    width = S2dBlocks.of(problem, 1, stride)
    return stride > 1 and (problem.x.layout.channels_last or (width.taps == 1 and width.first == 0))


# What default_configs ranks by estimate.
_SHORT_LIST = Config.product(
    {
        "blocks": (1, 2, 4),
        "warps": (4, 2),
        ("stages", "resident"): ((3, 2), (3, 3), (3, 4), (4, 4), (4, 1)),
    }
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


# Cycles of a multiprocessor to read a fragment of dy; instructions of a warp for a row, to stage 16 bytes a thread, and
# for a product of fragments; cycles that a block waits for a row, a warp for a product, and a block before its first
# row. Share of the time to move all tensors, or to compute if that is shorter, that the other does not hide, and of the
# time to read dy that rows cost which several blocks read. Fitted to 38 measurements on an H200, the order of the
# fastest first: the configuration with the least estimate takes 5 % longer than the best.
_READ = 13.1
_ROW_ISSUED = 74.0
_STAGED_ISSUED = 27.0
_PRODUCT_ISSUED = 0.82
_ROW = 338.0
_LATENCY = 20.8
_BEGIN = 4580.0
_LAUNCH_MS = 0.00248
_EXPOSED = 0.66
_ROWS_AGAIN = 0.48


class ConvFirstLayerData(FewChannelsSolver):
    """Backward data for up to four channels and strides above 1: rows of dy times all filters, complete in registers.

    For few and small filters over large images, and for patches, where it is faster than ConvFirstLayerDataRows, which
    serves the rest: all of the filters must fit a thread's registers, and of NCHW only patches are served.

    Products with zeros complete the filters: an infinity or NaN of dy spreads to pixels near those that meet it.
    Accumulators are float32; equal inputs give equal bits.

    Configuration: a block of `warps` warps has rows of dy in `stages` buffers; a warp multiplies `blocks` blocks of 16
    s2d blocks of a stride's pixels; there are as many strips as fill multiprocessors with `resident` blocks.
    """

    id = "ConvFirstLayerData"
    version = 2
    direction = Direction.BACKWARD_DATA
    kind = ("blocks", "warps", "resident")
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "blocks": (1, 2, 4),
        "warps": (1, 2, 4, 8),
        "stages": (3, 4),
        "resident": (1, 2, 3, 4),
    }
    sources = ("few_channels/data.cu",)

    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = DataTiling.of(problem, config, device)
        is_valid: bool = (
            (config["blocks"] == ceil_div(tiling.s2d_blocks // 16, config["warps"]))
            & (tiling.held_registers <= _MAX_HELD)
            & (tiling.registers <= _MAX_REGISTERS)
            & (tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
            & (tiling.resident == config["resident"])
        )
        return is_valid

    def is_of_size(self, problem: ProblemDescription, config: Config) -> bool:
        return _is_served(problem)

    def short_list(self) -> ConfigTable:
        return _short_list()

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain, last = DataType.FLOAT16, DataType.BFLOAT16, Layout.NHWC

        def conv(**fields: object) -> ProblemDescription:
            return ProblemDescription.convolution(direction=self.direction, **fields)  # type: ignore[arg-type]

        return (
            conv(x=(2, 3, 64, 64), w=(32, 3, 3, 3), padding=1, stride=2, dtype=half, layout=last),
            conv(x=(2, 3, 32, 32), w=(96, 3, 4, 4), stride=4, dtype=brain, layout=last),
            conv(x=(2, 3, 32, 32), w=(96, 3, 4, 4), stride=4, dtype=half),
            conv(x=(2, 4, 17, 23), w=(37, 4, 3, 2), padding=((4, 0), (5, 1)), stride=(1, 3), dtype=brain, layout=last),
            conv(x=(1, 1, 33, 31), w=(19, 1, 2, 2), stride=(1, 2), dtype=brain),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if problem.direction is self.direction and not refuse_windows(problem).refused and not _is_served(problem):
            reason = f"filter {problem.filter} stride {problem.conv.stride} padding {problem.conv.pad_before}"
            return Applicability(
                f"serves strides above 1, and of NCHW those where a pixel meets one column of dy, not {reason}"
            )
        return super().is_applicable(problem, device)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = DataTiling.of(problem, config, device)
        warps, turn = config["warps"], config["blocks"] * tiling.fragments
        shared = _READ * (tiling.s2d_blocks // 16) * tiling.width.taps * tiling.steps
        staged = ceil_div(tiling.columns * problem.k // tiling.in_vector, 32 * warps)
        issued = _ROW_ISSUED + _STAGED_ISSUED * staged + _PRODUCT_ISSUED * turn
        together = smaller(tiling.resident, ceil_div(tiling.strips.count, device.sm_count))
        busy = larger(together * shared, ceil_div(together * warps, 4) * issued)
        alone = _ROW + _LATENCY * turn
        turns = ceil_div(tiling.strips.count, device.sm_count * tiling.resident)
        cycles = turns * (_BEGIN + tiling.strips.steps * larger(busy, alone))
        busy_ms = 1e3 * cycles / device.clock_hz
        again = _ROWS_AGAIN * (tiling.strips.steps / tiling.strips.rows - 1)
        moved_ms = 1e3 * problem.bytes * (1 + again) / device.bandwidth_bytes_per_s
        ms: float = _LAUNCH_MS + larger(moved_ms, busy_ms) + _EXPOSED * smaller(moved_ms, busy_ms)
        return ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = DataTiling.of(problem, config, device)
        step = KernelStep(
            source="few_channels/data.cu",
            entry="few_channels_data",
            grid=(tiling.strips.count, 1, 1),
            block=(32 * config["warps"], 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=_defines(problem, config, tiling),
            args=(
                *(Pointer(buffer=name) for name in ("y", "w", "x")),
                DATA_SHAPE(
                    **images(problem),
                    pad_top=problem.conv.pad_before[0],
                    s2d_left=tiling.width.origin,
                    first_row=tiling.height.first,
                    end_row=tiling.height.end,
                    first_out_column=tiling.width.first,
                    strip_rows=tiling.strips.rows,
                    image_strips=divide_by(tiling.strips.image_strips),
                    s2d_tiles=divide_by(tiling.s2d_tiles),
                ),
            ),
        )
        return ConvSolution(steps=(step,))


SOLVERS = (ConvFirstLayerData(),)
