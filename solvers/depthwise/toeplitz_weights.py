"""ConvDepthwiseBandsWeights: backward weights of depthwise convolution of NCHW tensors on tensor cores.

Filters have up to 8 columns. A split-K reduction adds the float32 partials of row blocks and images. Kernels:
kernels_src/depthwise/toeplitz_weights.cu.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import (
    APPLICABLE,
    OF_WEIGHTS,
    Algorithm,
    Applicability,
    EstimatedConfig,
    Solver,
    first_of_kinds,
)
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
    int32s,
)
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.limits import MAX_ELEMENTS
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.depthwise.toeplitz_tiling import (
    KEYS,
    ToeplitzAxis,
    images_begin_alike,
    refuse_toeplitz,
    toeplitz_pitch,
)

_SOURCE = "depthwise/toeplitz_weights.cu"
_SHARED_BYTES = 48 << 10
_ITEMSIZE = 2
_DEFAULTS = 8
_REDUCTION_THREADS = 128
_MAX_WHOLE = 60  # words of an image of x that a thread keeps
_MAX_REGISTERS = 216
_MAX_PRODUCTS = 1200  # of unrolled code
_MAX_WORKSPACE_BYTES = 64 << 20
_ROW_BLOCKS = (1, 2, 4, 8)
_DIVISION = ("images", "warps", "bands")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/depthwise/toeplitz_weights.cu computes the same from the defines, and does not compile where it differs.

    Attributes:
        across: columns of x and of dy.
        row_block_rows: rows of dy of a block.
        row_blocks: of an image.
        ring: rows of x that a thread keeps.
        is_whole: whether they are all that an image of dy meets.
        met: words of x that a block of 16 columns of dy meets.
        splits: blocks that share the same channels.
        registers: of a thread, about.
        products: of unrolled code, of depth 8.
    """

    across: ToeplitzAxis
    row_block_rows: int
    row_blocks: int
    pad: int
    ring: int
    is_whole: bool
    met: int
    splits: int
    blocks: int
    threads: int
    shared_bytes: int
    registers: int
    products: int

    @property
    def last_row(self) -> int:
        """Row of x that the last row block meets first."""
        return (self.row_blocks - 1) * self.row_block_rows - self.pad

    @staticmethod
    @functools.lru_cache(maxsize=256)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        planar = problem.lifted(2)
        (height, width), (out_height, out_width) = planar.spatial, planar.out_spatial
        filter_h, filter_w = planar.filter
        across = ToeplitzAxis.of(width, out_width, filter_w, planar.conv.pad_before[1])
        channels, images, warps = config["channels"], config["images"], config["warps"]
        row_block_rows = out_height if config["bands"] == 1 else round_up(ceil_div(out_height, config["bands"]), 2)
        row_blocks = ceil_div(out_height, row_block_rows)
        met_rows = out_height + filter_h - 1
        is_whole = row_blocks == 1 and height * across.words <= _MAX_WHOLE and out_height <= _MAX_WHOLE
        ring = met_rows if is_whole else round_up(filter_h + 1, 2)
        rows = height if row_blocks == 1 else min(height, row_block_rows + filter_h - 1)
        pitches = toeplitz_pitch(rows * width) + toeplitz_pitch(row_block_rows * out_width)
        met, halves = 2 if across.is_narrow else 3, 1 if out_width + across.is_odd <= 8 else 2
        variants = 2 if across.is_odd else 1
        matrix = 8 * halves * (8 * met + 1)
        own = images * pitches // 2 // warps
        staged_rows = min(filter_h, max(1, own // (variants * matrix)))
        totals = channels * warps * filter_h * filter_w if warps > 1 else 0
        sums = filter_h * (1.5 if across.is_odd else 1) * 2 * halves * min(met, across.words)
        splits = row_blocks * ceil_div(problem.n, images)
        return _Tiling(
            across=across,
            row_block_rows=row_block_rows,
            row_blocks=row_blocks,
            pad=planar.conv.pad_before[0],
            ring=ring,
            is_whole=is_whole or (row_blocks == 1 and ring >= met_rows),
            met=met,
            splits=splits,
            blocks=splits * ceil_div(problem.c, channels),
            threads=32 * channels * warps,
            shared_bytes=4 * (channels * warps * max(staged_rows * variants * matrix, own) + totals),
            registers=round_up(
                math.ceil(min(ring, height) * across.words + sums + 4 * across.blocks + 8 * across.is_odd) + 48, 8
            ),
            products=(out_height if is_whole else ring) * filter_h * across.blocks * min(met, across.words),
        )

    def split_k(self, problem: ProblemDescription) -> SplitK:
        return SplitK.of(problem, self.splits)

    def resident(self, device: Device) -> int:
        """Blocks that a multiprocessor holds at once."""
        return max(1, resident_blocks(self.registers, self.threads, self.shared_bytes, SmLimits.of(device)))


def _solution(problem: ProblemDescription, config: Config, device: Device) -> ConvSolution:
    tiling = _Tiling.of(problem, config)
    defines = _defines(problem, config, device)
    # A block that leaves partials to the second kernel is told of the output, too, so that both have one signature.
    split_k = tiling.split_k(problem)
    first = KernelStep(
        source=_SOURCE,
        entry="depthwise_toeplitz_weights",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=defines,
        args=(*(Pointer(buffer=name) for name in ("y", "x", "w", split_k.target)), *int32s(problem.n, problem.c)),
    )
    reduction = split_k.reduction(
        first,
        *int32s(split_k.results),
        blocks=ceil_div(split_k.results, _REDUCTION_THREADS),
        threads=_REDUCTION_THREADS,
    )
    return split_k.solution(first, reduction)


def _defines(problem: ProblemDescription, config: Config, device: Device) -> tuple[tuple[str, str | int], ...]:
    tiling, planar = _Tiling.of(problem, config), problem.lifted(2)
    pairs = {"": planar.spatial, "OUT_": planar.out_spatial, "PAD_": planar.conv.pad_before}
    return (
        ("ELEMENT", problem.x.dtype.value),
        *(
            (f"{name}{letter}", value)
            for name, values in pairs.items()
            for letter, value in zip("HW", values, strict=True)
        ),
        ("FILTER_Y", planar.filter[0]),
        ("FILTER_X", planar.filter[1]),
        ("SHIFT", tiling.across.shift),
        ("CHANNELS", config["channels"]),
        ("IMAGES", config["images"]),
        ("WARPS", config["warps"]),
        ("ROW_BLOCK_ROWS", tiling.row_block_rows),
        ("ROW_BLOCKS", tiling.row_blocks),
        ("RING", tiling.ring),
        ("SPLITS", tiling.splits),
        ("ALIKE", int(images_begin_alike(problem))),
        ("MIN_BLOCKS", tiling.resident(device)),
        ("SHARED_BYTES", tiling.shared_bytes),
    )


# Launches, in milliseconds. Cycles of a scheduler: for a product of depth 8, a word read, a word copied, and at the end
# for a filter row's sums and for 32 taps. Cycles that a block waits: for a word that each of its threads copies for the
# first groups of images, a product, and sums of warps that share a channel. Fitted to 160 times of an H200, float16 and
# bfloat16.
_LAUNCH_MS, _REDUCTION_MS = 0.0021, 0.0014
_PRODUCT, _READ, _COPY, _SUMS, _TAPS = 2.6, 9.4, 24, 4, 540
_COPY_WAIT, _PRODUCT_WAIT, _SHARED_WAIT = 47, 2.3, 1160
_SERIAL_SHARE = 0.4  # of the shorter of moving and computing, which does not overlap the longer
_BANDWIDTH_SHARE = 0.85


def _busy_ms(problem: ProblemDescription, config: Config, device: Device) -> float:
    """Milliseconds of the multiprocessors, device memory aside."""
    tiling, planar = _Tiling.of(problem, config), problem.lifted(2)
    across, taps = tiling.across, planar.filter[0]
    met = 1 - taps / (4 * planar.spatial[0] + taps) if tiling.is_whole else 1.0
    products = tiling.row_block_rows * taps * met * min(3 * across.blocks, across.blocks * across.words)
    words = (tiling.row_block_rows + taps) * across.words + tiling.row_block_rows * 2 * across.blocks
    groups = ceil_div(min(config["images"], problem.n), 8 * config["warps"])
    rows = tiling.row_block_rows + (0 if tiling.row_blocks == 1 else taps - 1)
    runs = (rows * planar.spatial[1], tiling.row_block_rows * planar.out_spatial[1])
    copies = sum(config["images"] * (run / 8 + 1) / (32 * config["warps"]) for run in runs)
    end = _SUMS * taps * tiling.met * (1.5 if across.is_odd else 1) + _TAPS * ceil_div(taps * planar.filter[1], 32)
    per_warp = groups * (products * _PRODUCT + words * _READ) + copies * _COPY + end
    alone = copies / groups * _COPY_WAIT + groups * products * _PRODUCT_WAIT + (config["warps"] > 1) * _SHARED_WAIT
    blocks = ceil_div(tiling.blocks, device.sm_count)
    waves = max(1.0, blocks / tiling.resident(device))
    cycles = blocks * tiling.threads / 128 * per_warp + waves * alone
    return float(1e3 * cycles / device.clock_hz)


# What default_configs ranks by estimate; one of the fallbacks is valid for every applicable problem.
_SHORT_LIST = Config.product(
    {
        "channels": (1, 2),
        ("images", "warps"): ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4)),
        "bands": _ROW_BLOCKS,
    }
)
_FALLBACKS = Config.product({"channels": (1,), "images": (8,), "bands": _ROW_BLOCKS, "warps": (1,)})


class ConvDepthwiseBandsWeights(Solver):
    """Backward weights of depthwise convolution, rows of eight images at a time, with float32 accumulators.

    Padding, and what pads blocks of columns and of images, is multiplied as zeros. Nothing else outside the tensors is
    multiplied.

    Configuration: a block takes one of `bands` row blocks of dy, of `channels` channels of `images` images. `warps`
    warps share the images.
    """

    id = "ConvDepthwiseBandsWeights"
    algorithm = Algorithm.DIRECT
    directions = OF_WEIGHTS
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "channels": (1, 2),
        "images": (8, 16, 32, 64),
        "bands": _ROW_BLOCKS,
        "warps": (1, 2, 4),
    }
    sources = (_SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        depthwise = functools.partial(depthwise_example, direction=Direction.BACKWARD_WEIGHTS)
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        return (
            depthwise(32, x=(16, 32, 14, 14), w=(7, 7), padding=3, dtype=half),
            depthwise(40, x=(9, 40, 7, 7), w=(5, 5), padding=2, dtype=brain),
            depthwise(12, x=(8, 12, 56, 56), w=(7, 7), padding=3, dtype=half),
            depthwise(6, x=(3, 6, 28, 30), w=(5, 3), padding=((4, 0), (1, 6)), dtype=brain),
            depthwise(4, x=(2, 4, 15, 17), w=(4, 6), padding=(1, 2), dtype=half),
            depthwise(8, x=(5, 8, 100), w=(7,), padding=((6, 0),), dtype=half),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_toeplitz(problem)).refused:
            return answer
        if not any(self.is_valid_config(problem, device, config) for config in _FALLBACKS):
            return Applicability(
                f"eight images of {problem.x.shape[2:]}, or a filter of {problem.filter}, are too large"
            )
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config)
        if config["channels"] >= 2 * problem.c or config["images"] >= 2 * max(8, problem.n):
            return False
        if 8 * config["warps"] > config["images"] or tiling.threads > 512:
            return False
        if tiling.row_blocks != config["bands"] or not tiling.across.is_served:
            return False
        if tiling.row_blocks > 1 and tiling.last_row >= problem.lifted(2).spatial[0]:
            return False  # the kernel copies rows for each row block, and the last would meet padding alone
        if tiling.across.is_odd and any(
            problem.c * math.prod(tensor.shape[2:]) % 2 for tensor in (problem.x, problem.y)
        ):
            return False
        if tiling.products > _MAX_PRODUCTS or tiling.registers > _MAX_REGISTERS:
            return False
        if tiling.split_k(problem).bytes > max(_MAX_WORKSPACE_BYTES, problem.x.bytes):
            return False
        fits_registers = tiling.registers * tiling.threads <= 65536 and tiling.blocks <= MAX_ELEMENTS
        return fits_registers and tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        ranked = self.ranked_estimates(problem, device, _SHORT_LIST)
        # The best of each division of images and rows: how many channels a block has matters least.
        return first_of_kinds(ranked, lambda each: tuple(each.config[name] for name in _DIVISION), _DEFAULTS)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config)
        busy_ms = _busy_ms(problem, config, device)
        moved_ms = 1e3 * problem.bytes / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
        launches_ms = _LAUNCH_MS
        if tiling.splits > 1:
            partial_bytes = 2 * tiling.split_k(problem).bytes
            launches_ms += _REDUCTION_MS + 1e3 * partial_bytes / device.bandwidth_bytes_per_s
        return launches_ms + max(busy_ms, moved_ms) + _SERIAL_SHARE * min(busy_ms, moved_ms)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return _solution(problem, config, device)


SOLVERS = (ConvDepthwiseBandsWeights(),)
