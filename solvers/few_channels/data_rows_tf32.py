"""ConvFirstLayerDataRowsTf32: backward data of float32 convolutions of few channels on tensor cores.

Kernel: kernels_src/few_channels/data_rows_tf32.cu. Strips and tiles: solvers/few_channels/row_streaming_tf32.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, made, mapped, smaller
from miofind.solver.steps import Config, ConfigValue, ConvSolution
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.packed_groups import least_ample
from miofind.solvers.common.product_tiles import products_of_tf32, tf32_error_growth
from miofind.solvers.few_channels.row_streaming import StreamingCost, warps
from miofind.solvers.few_channels.row_streaming_tf32 import MAX_REGISTERS, RowStreamingTf32, TapBlocks, column_tiles
from miofind.solvers.few_channels.solver import FewChannelsSolver

_LEAST_WARPS, _MAX_WARPS = 4, 12
_WARPS_M = (1, 2, 4, 7, 8)
_SHARED_BYTES = 48 << 10


_WARPS = (
    *((4, 1, 1), (7, 1, 1), (8, 1, 1), (4, 2, 1), (2, 2, 1), (4, 3, 1), (2, 3, 1), (2, 4, 1), (1, 4, 1)),
    *((1, 1, 4), (2, 1, 4), (1, 2, 4), (1, 3, 4), (2, 1, 2), (4, 1, 2), (2, 2, 2), (2, 3, 2), (1, 4, 2), (1, 1, 8)),
    *((1, 5, 1), (2, 5, 1), (1, 5, 2), (1, 6, 1), (2, 6, 1), (1, 6, 2), (1, 7, 1)),  # rows of long filters
)
# What default_configs ranks by estimate.
_SHORT_LIST = Config.product(
    {
        "blocks": (1, 2, 3, 4),
        ("warps_m", "warps_n", "warps_k"): _WARPS,
        "filters": ("registers", "shared"),
        ("stages", "resident"): ((3, 1), (4, 1), (2, 1), (3, 2), (2, 2), (3, 3)),
    }
)

# Reckoned: of the time that the fastest configurations of 34 problems took on an H200, the estimate is 0.82 to 1.13.
# Cycles of a multiprocessor for a product of fragments (ConvFirstLayerDataRows was measured to take 3.3 for one of
# twice the depth, all included), to read a fragment of dy and of filters, to stage 16 bytes, and to write or add 32
# products through shared memory; cycles of a scheduler to split an element of a fragment, to add the sums of a chunk
# and to issue a product; share of what takes less that what takes longest does not hide, where a scheduler has one
# warp; cycles that a block waits for a row, a warp for a product, and a block before its first row. Shares of the time
# to move all tensors, or to compute, as in ConvFirstLayerDataRows.
_PRODUCT = 2.6
_READ = 8.0
_READ_FILTERS = 2.5
_STAGED = 0.08
_FOLDED = 3.1
_SPLIT = 5.0
_ADDED = 4.0
_ISSUED = 2.0
_BESIDE = 0.7
_ROW = 966.0
_LATENCY = 9.0
_COST = StreamingCost(begin_cycles=2000.0, launch_ms=0.00261, exposed=0.36, rows_again=0.0325, columns_again=0.015)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


class ConvFirstLayerDataRowsTf32(FewChannelsSolver):
    """Backward data for up to four channels in float32: rows of dy times all filters by products of TF32.

    For all filters, strides and layouts. float32 is split into two tf32, of which three products are added (3xTF32)
    within float32's error bound: an infinity comes out as NaN, as do values within 2**-11 of the largest float32. Where
    math='tf32' allows it, float32 is cut to tf32 and one product is computed. dy is read once but for the ends of
    strips. Accumulators are float32; equal inputs give equal bits.

    Configuration: a block of `warps_m` x `warps_n` x `warps_k` warps has rows in `stages` buffers; a warp multiplies
    `blocks` blocks of 16 outputs, `warps_n` warps share the taps of a row and `warps_k` the filters, which are kept
    where `filters` says; there are as many strips as fill multiprocessors with `resident` blocks.
    """

    id = "ConvFirstLayerDataRowsTf32"
    direction = Direction.BACKWARD_DATA
    keys = (replace(FewChannelsSolver.keys[0], dtypes=frozenset({DataType.FLOAT32})),)
    kind = ("warps_m", "warps_n", "warps_k", "filters")
    most_alike = 1
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "blocks": (1, 2, 3, 4),
        "warps_m": _WARPS_M,
        "warps_n": (1, 2, 3, 4, 5, 6, 7),
        "warps_k": (1, 2, 4, 8),
        "stages": (2, 3, 4),
        "resident": (1, 2, 3, 4),
        "filters": ("registers", "shared"),
    }
    sources = ("few_channels/data_rows_tf32.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        last, tf32 = Layout.NHWC, MathMode.TF32

        def conv(**fields: object) -> ProblemDescription:
            return ProblemDescription.convolution(direction=self.direction, dtype=DataType.FLOAT32, **fields)  # type: ignore[arg-type]

        return (
            conv(x=(2, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2, layout=last),
            conv(x=(2, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2),
            conv(x=(2, 3, 32, 40), w=(32, 3, 3, 3), padding=1, layout=last, math=tf32),
            conv(x=(2, 3, 32, 40), w=(32, 3, 3, 3), padding=1),
            conv(x=(2, 3, 32, 32), w=(96, 3, 4, 4), stride=4, layout=last),
            conv(x=(1, 4, 24, 20), w=(320, 4, 3, 3), padding=1, stride=(2, 1)),
            conv(x=(3, 1, 28, 28), w=(6, 1, 5, 5), padding=2, math=tf32),
            conv(x=(2, 4, 17, 23), w=(37, 4, 3, 2), padding=((4, 0), (5, 1)), stride=(1, 3), layout=last),
            conv(x=(1, 2, 33, 31), w=(19, 2, 5, 11), padding=2, stride=(3, 1)),
        )

    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = RowStreamingTf32.of(problem, config, device)
        is_valid: bool = (
            (tiling.registers <= MAX_REGISTERS)
            & (tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
            & (tiling.resident == config["resident"])
        )
        return is_valid

    def is_of_size(self, problem: ProblemDescription, config: Config) -> bool:
        warps_m, others = config["warps_m"], config["warps_n"] * config["warps_k"]
        columns = column_tiles(problem, config["blocks"] * warps_m).columns // 16
        taps = made(functools.partial(TapBlocks.of, problem), config["warps_n"])
        needed = larger(columns, ceil_div(_LEAST_WARPS, others))
        is_of_size: bool = (
            (warps_m * others >= _LEAST_WARPS)
            & (warps_m * others <= _MAX_WARPS)
            & (config["warps_k"] <= ceil_div(problem.k, 8))
            & (taps.count % config["warps_n"] == 0)
            & (config["blocks"] == ceil_div(columns, warps_m))
            & (warps_m <= mapped(lambda count: least_ample(_WARPS_M, count), needed))
        )
        return is_of_size

    def short_list(self) -> ConfigTable:
        return _short_list()

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return tf32_error_growth(problem)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return products_of_tf32(problem) == 3

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = RowStreamingTf32.of(problem, config, device)
        warp_steps = tiling.steps // config["warps_k"]
        turn = config["blocks"] * tiling.warp_blocks * warp_steps * tiling.products
        shared = self._shared_cycles(problem, config, tiling)
        issued = self._issued_cycles(config, tiling)
        together = smaller(tiling.resident, ceil_div(tiling.strips.count, device.sm_count))
        scheduled = ceil_div(together * warps(config), 4)
        uses = (_PRODUCT * 4 * scheduled * turn, scheduled * (issued + _ISSUED * turn), together * shared)
        exposed = _BESIDE / scheduled
        busy = (1 - exposed) * functools.reduce(larger, uses) + exposed * sum(uses)
        alone = _ROW + _LATENCY * turn
        return _COST.ms(problem, device, tiling, larger(busy, alone))

    @staticmethod
    def _shared_cycles(problem: ProblemDescription, config: Config, tiling: RowStreamingTf32) -> float:
        """Of a multiprocessor, for a row of dy."""
        steps, columns = tiling.steps, tiling.tiles.columns
        reads = columns // 16 * steps * config["warps_n"]
        laid = config["warps_m"] * steps * tiling.taps.groups * tiling.taps.count
        staged = columns * problem.k / tiling.in_vector
        written = tiling.product_floats / 32
        added = written * min(problem.conv.stride[0], problem.filter[0]) / problem.conv.stride[0]
        cycles: float = _READ * reads + _STAGED * staged + _FOLDED * (written + added)
        cycles += chosen(config["filters"] == "shared", _READ_FILTERS * laid, 0.0)
        return cycles

    @staticmethod
    def _issued_cycles(config: Config, tiling: RowStreamingTf32) -> float:
        """Of a scheduler, for what a warp does with a row of dy besides the products."""
        if tiling.products == 1:
            return 0.0
        warp_steps = tiling.steps // config["warps_k"]
        filters = chosen(config["filters"] == "registers", 0, 2 * tiling.warp_blocks * warp_steps)
        added = config["blocks"] * tiling.warp_blocks * warp_steps // tiling.chunk
        cycles: float = _SPLIT * (4 * config["blocks"] * warp_steps + filters) + _ADDED * added
        return cycles

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = RowStreamingTf32.of(problem, config, device)
        step = tiling.step(
            "data_rows_tf32",
            problem,
            config,
            ("PRODUCTS", tiling.products),
            ("PACKED", int(tiling.taps.packed)),
            ("CHUNK", tiling.chunk),
            ("SHARED_FILTERS", int(config["filters"] == "shared")),
        )
        return ConvSolution(steps=(step,))


SOLVERS = (ConvFirstLayerDataRowsTf32(),)
