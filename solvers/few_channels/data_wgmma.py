"""ConvFirstLayerDataWgmma: backward data of convolutions of few channels by Hopper's warpgroup products.

Kernel: kernels_src/few_channels/data_wgmma.cu. Its tiling: data_wgmma_tiling.py.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, mapped, smaller
from miofind.solver.occupancy import register_limit
from miofind.solver.solver import APPLICABLE, Applicability, EstimatedConfig
from miofind.solver.steps import Box, Config, ConfigValue, ConvSolution, KernelStep, Pointer, TensorMap
from miofind.solvers.common.copies import packed_map
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import divide_by
from miofind.solvers.few_channels.data_wgmma_tiling import DataWgmmaTiling
from miofind.solvers.few_channels.shapes import DATA_WGMMA_SHAPE, images
from miofind.solvers.few_channels.solver import HOPPER_KEYS, FewChannelsSolver, gradient_defines

_MAX_THREADS = 512
_MAX_WARPGROUPS = 4
_MAX_PRODUCTS = 128  # of a row of dy: they are unrolled
_MAX_REGISTERS = 232
_SHARED_BYTES = 227 << 10
_TILES_W = (16, 32, 64, 128, 256)


def _defines(problem: ProblemDescription, config: Config, tiling: DataWgmmaTiling) -> tuple[tuple[str, str | int], ...]:
    return (
        *gradient_defines(problem),
        ("S2D_STRIDES", config["widen"]),
        ("S2D_OFFSET", tiling.s2d_offset),
        ("OUT_VECTOR", tiling.out_vector),
        ("COLUMNS", tiling.columns),
        ("TEAMS", config["teams"]),
        ("STAGES", config["stages"]),
        *_staging(tiling),
        ("MIN_BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        DATA_WGMMA_SHAPE.define,
    )


def _staging(tiling: DataWgmmaTiling) -> tuple[tuple[str, int], ...]:
    boxes = tiling.boxes
    if not boxes:
        return (("IN_VECTOR", tiling.in_vector),)
    return ("BOX_COLUMNS", boxes.columns), ("LEAD_COLUMNS", boxes.lead)


def _gradients(problem: ProblemDescription, tiling: DataWgmmaTiling) -> Pointer | TensorMap:
    """dy as the kernel takes it: in boxes rows of all images are one dimension."""
    if not (boxes := tiling.boxes):
        return Pointer(buffer="y")
    height, width = problem.out_spatial
    box = Box(sizes=(boxes.swizzle_bytes // 2, boxes.rows, 1), steps=(1, boxes.phases, 1))
    return packed_map(problem, "y", (boxes.columns * problem.k, width // boxes.columns, problem.n * height), box)


def _narrower(tile_w: int) -> int:
    """The next smaller width of a tile, 0 if there is none."""
    return max((width for width in _TILES_W if width < tile_w), default=0)


def _spills(tiling: DataWgmmaTiling) -> bool:
    """Whether a thread lacks registers beside as many blocks as the kernel is told to leave room for.

    Fitted to 1,500 kernels for sm_90a, most of them tight. Elements that are written one by one take addresses and
    bounds of their own, and rows of a single s2d block leave where filters are in registers, for each product.
    """
    needed = tiling.columns // 2 + 56
    by_one = (tiling.out_vector == 1) & ((tiling.columns >= 64) | (tiling.entry_rows >= 36))
    needed += chosen(by_one, tiling.columns // 3, chosen(tiling.columns >= 200, 16, 0))
    if tiling.height.met == 1:
        needed += chosen(tiling.warpgroups > 1, 2 * tiling.products, 0)
    return needed > register_limit(larger(1, tiling.resident), tiling.threads)


# What default_configs ranks by estimate.
_SHORT_LIST = Config.product(
    {
        "tile_w": _TILES_W,
        "widen": (1, 2, 4),
        ("teams", "resident"): ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (1, 3)),
        "stages": (2, 3, 4),
    }
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


_DEFAULTS = 8

# Fitted to 1,200 configurations of 33 problems on an H200, the fastest of which it misses by 13 %. Cycles of a
# multiprocessor: of its tensor cores for a product of 16 filters by a column, of shared memory for 128 bytes, and to
# write an element, or two side by side, of 32 lanes. Cycles that a team alone takes for a row (barriers, and copies
# that are begun), for a product's latency, and to complete 8 s2d blocks; cycles of a block before its first row, and
# of a scheduler for a word of filters that is laid out, of which one warp alone reaches but a share. Bytes that a
# multiprocessor needs under way to move as many as it may. Share of the bandwidth that is reached, and of the time to
# move all tensors, or to compute if that is shorter, that the other does not hide. What the copy engine takes for boxes
# is hidden.
_PRODUCT = 0.5
_SHARED = 1.16
_WRITTEN = 4.0
_ROW = 138.0
_LATENCY = 26.0
_COMPLETED = 22.5
_BEGIN = 1780.0
_LAID = 0.32
_ALONE = 0.2
_UNDER_WAY = 27e3
_COPIED = {1: 290.0, 2: 100.0, 4: 40.0, 8: 0.0}
"""Cycles of a thread for each load of so many elements of a row of dy that is channels first, as 150 configurations of
19 problems took: one element is loaded and stored, and the next one waits for it."""
_LAUNCH_MS = 0.0026
_REACHED = 0.92
_EXPOSED = 0.5


class ConvFirstLayerDataWgmma(FewChannelsSolver):
    """Backward data for up to four channels: wgmma of filters by rows of dy, whose columns shift in place.

    dx is completed in registers, in space-to-depth (s2d) blocks of a stride's rows and columns. dy is read once but for
    the ends of strips and tiles. Zeros around filters and rows of dy are multiplied: an infinity or NaN of dy spreads
    to pixels of the s2d blocks that it meets, and one of the filter to pixels at the border. Accumulators are float32;
    equal inputs give equal bits.

    Configuration: each of the `teams` of a thread block goes down a strip of up to `tile_w` s2d blocks, each `widen`
    strides wide; its rows of dy are in `stages` buffers. There are as many strips as fill multiprocessors with
    `resident` thread blocks.
    """

    id = "ConvFirstLayerDataWgmma"
    direction = Direction.BACKWARD_DATA
    kind = ("tile_w", "widen")
    keys = HOPPER_KEYS
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_w": _TILES_W,
        "widen": (1, 2, 4),
        "teams": (1, 2, 3, 4),
        "stages": (2, 3, 4, 6),
        "resident": (1, 2, 3, 4),
    }
    sources = ("few_channels/data_wgmma.cu",)

    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = DataWgmmaTiling.of(problem, config, device)
        narrower = mapped(_narrower, config["tile_w"])
        has_own_tiles = (narrower == 0) | (ceil_div(tiling.s2d_blocks, larger(1, narrower)) != tiling.tiles)
        is_valid: bool = (
            (tiling.warpgroups <= _MAX_WARPGROUPS)
            & (tiling.threads <= _MAX_THREADS)
            & (tiling.products <= _MAX_PRODUCTS)
            & has_own_tiles
            & (config["teams"] <= tiling.strips.count)  # each has a strip, and stages have rows
            & (config["stages"] <= larger(2, tiling.strips.steps + 1))
            & (tiling.registers <= _MAX_REGISTERS)
            & (tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
            & (tiling.resident == config["resident"])
            & (_spills(tiling) == 0)
        )
        return is_valid

    def refuse_problem(self, problem: ProblemDescription) -> Applicability:
        if (answer := super().refuse_problem(problem)).refused:
            return answer
        if problem.y.layout.channels_last and problem.k % 8:
            return Applicability(
                f"copies filters of NHWC pixels in 16-byte words: needs k in multiples of 8, not {problem.k}"
            )
        return APPLICABLE

    def examples(self) -> tuple[ProblemDescription, ...]:
        return tuple(problem for problem in super().examples() if not self.refuse_problem(problem).refused)

    def short_list(self) -> ConfigTable:
        return _short_list()

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        """The least estimates that differ in more than stages, two for s2d blocks of a width in tiles of a width."""
        first: dict[tuple[ConfigValue, ...], EstimatedConfig] = {}
        alike: Counter[tuple[ConfigValue, ...]] = Counter()
        for each in self.ranked_list(problem, device):
            kind = tuple(each.config[name] for name in self.kind)
            beside = (*kind, each.config["teams"] * each.config["resident"])
            if beside not in first and alike[kind] < self.most_alike:
                first[beside] = each
                alike[kind] += 1
        return tuple(itertools.islice(first.values(), _DEFAULTS))

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        """Time to move all tensors and to compute, of which the longer hides most of the other.

        A row's products take the tensor cores, or shared memory that holds their operands and that the row is staged
        in; a team alone waits for each and then writes pixels, which other teams of the multiprocessor can fill.
        """
        tiling = DataWgmmaTiling.of(problem, config, device)
        columns, teams = tiling.columns, tiling.resident * config["teams"]
        together = smaller(teams, ceil_div(tiling.blocks, device.sm_count) * config["teams"])
        halves = 1 + tiling.entry_rows / 8  # of 8 rows of the product, that an entry meets
        written = halves * columns / 8 * _WRITTEN * (2 / tiling.out_vector)
        row_products = tiling.warpgroups * tiling.products
        tensor = _PRODUCT * row_products * columns
        operands = row_products * (16 + columns / 4) + (tiling.stage_bytes + 2 * tiling.transposed_bytes) / 128
        busy = together * larger(tensor, _SHARED * operands + written)
        alone = _ROW + tiling.products * larger(_LATENCY, _PRODUCT * columns)
        alone += _COMPLETED * smaller(2, halves) * columns / 8
        if not tiling.boxes:
            copies = tiling.stage_bytes / (2 * tiling.in_vector) * config["teams"] / tiling.threads
            alone += _COPIED[tiling.in_vector] * copies
        turns = ceil_div(tiling.strips.count, device.sm_count * teams)
        words = 2 * tiling.products * tiling.height.met * tiling.entry_rows * tiling.resident
        laid = _LAID * words / smaller(1.0, _ALONE * tiling.resident * tiling.threads / 128)
        cycles = turns * (_BEGIN + laid + tiling.strips.steps * larger(busy, alone))
        busy_ms = 1e3 * cycles / device.clock_hz
        ahead = together * (config["stages"] - 1) * tiling.stage_bytes
        reached = _REACHED * smaller(1.0, ahead / _UNDER_WAY)
        moved_ms = 1e3 * problem.bytes / (reached * device.bandwidth_bytes_per_s)
        ms: float = _LAUNCH_MS + larger(moved_ms, busy_ms) + _EXPOSED * smaller(moved_ms, busy_ms)
        return ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = DataWgmmaTiling.of(problem, config, device)
        step = KernelStep(
            source="few_channels/data_wgmma.cu",
            entry="few_channels_data_wgmma",
            grid=(tiling.blocks, 1, 1),
            block=(tiling.threads, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=_defines(problem, config, tiling),
            args=(
                _gradients(problem, tiling),
                *(Pointer(buffer=name) for name in ("w", "x")),
                DATA_WGMMA_SHAPE(
                    **images(problem),
                    s2d_top=problem.conv.pad_before[0],
                    s2d_left=tiling.left,
                    columns_ahead=tiling.ahead,
                    first_row=tiling.height.first,
                    end_row=tiling.height.end,
                    first_s2d=tiling.first_s2d,
                    strip_steps=tiling.strips.steps,
                    strips=tiling.strips.count,
                    strip_rows=tiling.strips.rows,
                    image_strips=divide_by(tiling.strips.image_strips),
                    s2d_tiles=divide_by(tiling.tiles),
                ),
            ),
        )
        return ConvSolution(steps=(step,))


SOLVERS = (ConvFirstLayerDataWgmma(),)
