"""ConvFirstLayerDataRows: backward data of convolutions of few channels on tensor cores, from rows streamed once.

Kernel: kernels_src/few_channels/data_rows.cu. Strips and tiles: solvers/few_channels/row_streaming.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, larger, smaller
from miofind.solver.steps import Config, ConfigValue, ConvSolution
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.few_channels.row_streaming import RowStreaming, StreamingCost, warps
from miofind.solvers.few_channels.solver import FewChannelsSolver

_MAX_HELD = 184
_MAX_WARPS = 12
_MAX_REGISTERS = 240
_SHARED_BYTES = 48 << 10


# What default_configs ranks by estimate.
_SHORT_LIST = Config.product(
    {
        "blocks": (1, 2, 3, 4),
        ("warps_m", "warps_n", "warps_k"): (
            *((4, 1, 1), (7, 1, 1), (8, 1, 1), (4, 2, 1), (2, 2, 1), (4, 3, 1), (2, 3, 1)),
            *((1, 1, 4), (2, 1, 4), (1, 2, 4), (2, 1, 2), (4, 1, 2)),
            *((2, 4, 1), (1, 4, 2), (2, 5, 1), (1, 5, 2), (2, 6, 1), (1, 6, 2), (1, 7, 1)),  # rows of long filters
        ),
        ("stages", "resident"): ((4, 1), (3, 2), (4, 2), (3, 3), (6, 1)),
    }
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


# Cycles of a multiprocessor for a product of fragments, to read one, to stage 16 bytes, and to write or add 32 products
# through shared memory; cycles that a block waits for a row, a warp for a product, and a block before its first row.
# Share of the time to move all tensors, or to compute if that is shorter, that the other does not hide, and of the time
# to read dy that rows and columns cost which several blocks read. Fitted to 168 measurements on an H200, the order of
# the fastest first: the configuration with the least estimate takes 5 % longer than the best. Products and reads stand
# for the instructions that come with them.
_PRODUCT = 3.32
_READ = 11.0
_STAGED = 0.0776
_FOLDED = 3.13
_ROW = 966.0
_LATENCY = 25.2
_COST = StreamingCost(begin_cycles=453.0, launch_ms=0.00261, exposed=0.358, rows_again=0.0325, columns_again=0.015)


class ConvFirstLayerDataRows(FewChannelsSolver):
    """Backward data for up to four channels: rows of dy times all filters; products that meet a pixel are added.

    For all filters, strides and layouts; ConvFirstLayerData is faster for some with strides above 1. dy is read once
    but for the ends of strips. Accumulators are float32; equal inputs give equal bits.

    Configuration: a block of `warps_m` x `warps_n` x `warps_k` warps has rows in `stages` buffers; a warp multiplies
    `blocks` blocks of 16 outputs, `warps_n` warps share the taps of a row and `warps_k` the filters; there are as many
    strips as fill multiprocessors with `resident` blocks.
    """

    id = "ConvFirstLayerDataRows"
    version = 2
    direction = Direction.BACKWARD_DATA
    kind = ("blocks", "warps_m", "resident")
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "blocks": (1, 2, 3, 4),
        "warps_m": (1, 2, 4, 7, 8),
        "warps_n": (1, 2, 3, 4, 5, 6, 7),
        "warps_k": (1, 2, 4),
        "stages": (3, 4, 6),
        "resident": (1, 2, 3, 4),
    }
    sources = ("few_channels/data_rows.cu",)

    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = RowStreaming.of(problem, config, device)
        is_valid: bool = (
            (tiling.tap_blocks % config["warps_n"] == 0)
            & (tiling.steps >= config["warps_k"])
            & (config["blocks"] == ceil_div(tiling.tiles.columns // 16, config["warps_m"]))
            & (tiling.held_registers <= _MAX_HELD)
            & (tiling.registers <= _MAX_REGISTERS)
            & (tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
            & (tiling.resident == config["resident"])
        )
        return is_valid

    def is_of_size(self, problem: ProblemDescription, config: Config) -> bool:
        return (warps(config) >= 4) & (warps(config) <= _MAX_WARPS)

    def short_list(self) -> ConfigTable:
        return _short_list()

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = RowStreaming.of(problem, config, device)
        blocks = tiling.tiles.columns // 16
        turn = config["blocks"] * problem.filter[0] * tiling.tap_blocks // config["warps_n"]
        turn *= ceil_div(tiling.steps, config["warps_k"])
        reads = blocks * tiling.steps * config["warps_n"]
        staged = tiling.tiles.columns * problem.k / tiling.in_vector
        written = tiling.product_floats / 32
        added = written * min(problem.conv.stride[0], problem.filter[0]) / problem.conv.stride[0]
        shared = _READ * reads + _STAGED * staged + _FOLDED * (written + added)
        together = smaller(tiling.resident, ceil_div(tiling.strips.count, device.sm_count))
        busy = larger(_PRODUCT * 4 * ceil_div(together * warps(config), 4) * turn, together * shared)
        alone = _ROW + _LATENCY * turn + _STAGED * staged * 2
        return _COST.ms(problem, device, tiling, larger(busy, alone))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = RowStreaming.of(problem, config, device)
        return ConvSolution(steps=(tiling.step("data_rows", problem, config),))


SOLVERS = (ConvFirstLayerDataRows(),)
