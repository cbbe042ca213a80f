"""ConvDepthwiseBands: depthwise convolution of NCHW tensors on tensor cores, with filters of up to 8 columns.

Forward and backward data. Kernel: kernels_src/depthwise/toeplitz.cu. ConvDepthwiseBandsWeights serves backward weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, resident_blocks
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
from miofind.solvers.common.correlation import Correlation, ceil_div, correlations, round_up
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.depthwise.toeplitz_tiling import (
    KEYS,
    ToeplitzAxis,
    images_begin_alike,
    refuse_toeplitz,
    toeplitz_pitch,
)

_SHARED_BYTES = 48 << 10
_ITEMSIZE = 2
_DEFAULTS = 8
_MAX_WHOLE = 60  # words of an image that a thread keeps
_MAX_REGISTERS = 208
_MAX_PRODUCTS = 1200  # of unrolled code
_MAX_THREADS = 512
_LEAST_DIRECT = 1536  # elements of a channel of an image


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to one correlation: what the kernel's constants come to.

    kernels_src/depthwise/toeplitz.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        across: columns of inputs and outputs.
        ring: rows of inputs that a thread keeps.
        is_whole: whether they are all that an image's outputs meet.
        target: where outputs go: over the inputs, beside them, or to device memory at once.
        shared_bytes: of a block.
        registers: of a thread, about.
        products: of unrolled code.
    """

    across: ToeplitzAxis
    ring: int
    is_whole: bool
    target: int
    shared_bytes: int
    registers: int
    products: int
    threads: int
    blocks: int

    @staticmethod
    @functools.lru_cache(maxsize=256)  # whether it is valid is asked before its estimate
    def of(conv: Correlation, config: Config) -> _Tiling:
        height, width = conv.axes
        channels, images, row_blocks, rows = (config[name] for name in ("channels", "images", "bands", "rows"))
        across = ToeplitzAxis.of(width.size, width.outputs, width.taps, width.pad)
        blocks, words = across.blocks, across.words
        met = height.outputs + height.taps - 1
        is_whole = row_blocks == 1 and height.size * words <= _MAX_WHOLE
        ring = round_up(met if is_whole else 2 * rows + height.taps - 1, rows)
        same = height.size == height.outputs and width.size == width.outputs
        # Where images are of odd size, a word is of two channels, which two warps would read and write.
        apart = channels == 1 or height.size * width.size % 2 == 0
        target = 2 if config["direct"] else 0 if same and row_blocks == 1 and apart else 1
        pitches = [
            toeplitz_pitch(channels * area) for area in (height.size * width.size, height.outputs * width.outputs)
        ]
        has_quads = not across.is_odd and width.outputs % 4 == 0
        matrices = (1.5 if across.is_odd else 1) * (6 if has_quads else min(6, 2 * words)) * height.taps
        iterations = ceil_div(height.outputs, rows) if is_whole else ring // rows
        return _Tiling(
            across=across,
            ring=ring,
            is_whole=is_whole or (row_blocks == 1 and ring >= met),
            target=target,
            shared_bytes=_ITEMSIZE * images * (pitches[0] + (pitches[1] if target == 1 else 0)),
            registers=round_up(
                min(ring, height.size) * words
                + 4 * blocks * rows
                + math.ceil(matrices)
                + epilogue_registers(conv.problem, 2, 4 * blocks * rows)
                + 44,
                8,
            ),
            products=iterations * rows * height.taps * blocks * min(2, words),
            threads=32 * channels * row_blocks,
            blocks=ceil_div(conv.problem.c, channels) * ceil_div(conv.problem.n, images),
        )

    def resident(self, device: Device) -> int:
        """Blocks that a multiprocessor holds at once."""
        return max(1, resident_blocks(self.registers, self.threads, self.shared_bytes, SmLimits.of(device)))


def _launch(conv: Correlation, config: Config, device: Device) -> KernelStep:
    tiling = _Tiling.of(conv, config)
    source, target = ("y", "x") if conv.flipped else ("x", "y")
    return KernelStep(
        source="depthwise/toeplitz.cu",
        entry="depthwise_toeplitz",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(conv, config, device),
        args=(
            *(Pointer(buffer=name) for name in (source, "w", target)),
            *int32s(conv.problem.n, conv.problem.c),
            *epilogue_arguments(conv.problem),
        ),
    )


def _defines(conv: Correlation, config: Config, device: Device) -> tuple[tuple[str, str | int], ...]:
    tiling = _Tiling.of(conv, config)
    height, width = conv.axes
    return (
        ("ELEMENT", conv.problem.x.dtype.value),
        ("H", height.size),
        ("W", width.size),
        ("OUT_H", height.outputs),
        ("OUT_W", width.outputs),
        ("FILTER_Y", height.taps),
        ("FILTER_X", width.taps),
        ("PAD_H", height.pad),
        ("PAD_W", width.pad),
        ("FLIPPED", int(conv.flipped)),
        ("SHIFT", tiling.across.shift),
        ("CHANNELS", config["channels"]),
        ("IMAGES", config["images"]),
        ("ROW_BLOCKS", config["bands"]),
        ("TILE_ROWS", config["rows"]),
        ("TARGET", tiling.target),
        ("RING", tiling.ring),
        ("PARTIAL_WORDS", int(_has_partial_words(conv, config))),
        ("ALIKE", int(images_begin_alike(conv.problem))),
        ("MIN_BLOCKS", tiling.resident(device)),
        ("SHARED_BYTES", tiling.shared_bytes),
        *epilogue_defines(conv.problem),
    )


# A launch, in milliseconds. Cycles of a scheduler: for a product of depth 16 and of depth 8, a word of inputs read and
# of outputs written (beside that, where rows are of odd length; to device memory at once), a row of a filter, a word
# copied. Cycles that a block waits: for a word that each of its threads copies, a group of images, a product whose sums
# the next one needs. Fitted to 430 times of an H200, of forward and backward data, float16, but for the cycles of a row
# of a filter and of a word copied, which are fewer in the kernel as it is: of 171 times of that, configurations ranked
# first take 1.04 times the best.
_LAUNCH_MS = 0.0029
_PRODUCT, _HALF_PRODUCT, _READ, _READ_ODD, _WRITE, _WRITE_DIRECT, _TAPS, _COPY = 4.2, 4.0, 5.8, 11.8, 20, 58, 5, 12
_COPY_WAIT, _EDGE_WAIT, _GROUP_WAIT, _PRODUCT_WAIT = 60, 60, 110, 3.3
_SERIAL_SHARE = 0.3  # of the shorter of moving and computing, which does not overlap the longer
_BANDWIDTH_SHARE = 0.85


def _busy_ms(conv: Correlation, config: Config, device: Device) -> float:
    """Milliseconds of the multiprocessors, device memory aside."""
    tiling = _Tiling.of(conv, config)
    height, width = conv.axes
    across, rows, images = tiling.across, height.outputs / config["bands"], config["images"]
    # Rows of padding are left out where the compiler knows them.
    met = 1 - height.taps / (4 * height.size + height.taps) if tiling.is_whole else 1.0
    row_products = rows * height.taps * met
    products = row_products * across.blocks
    halves = row_products * min(across.blocks, across.words - across.blocks - 1)
    if across.words <= 2:
        products, halves = (row_products, 0.0) if across.words == 2 else (0.0, row_products)
    reads = (height.size / config["bands"] + (0 if tiling.is_whole else tiling.ring)) * across.words
    writes = rows * ceil_div(width.outputs, 8)
    groups = ceil_div(min(images, conv.problem.n), 8)
    sizes = [height.size * width.size, 0 if config["direct"] else height.outputs * width.outputs]
    copies = sum(images * (config["channels"] * size / 8 + 1) / tiling.threads for size in sizes if size)
    edges = 32 * images / tiling.threads if not config["direct"] and _has_partial_words(conv, config) else 0
    group = (
        products * _PRODUCT
        + halves * _HALF_PRODUCT
        + reads * (_READ + _READ_ODD * across.is_odd)
        + writes * (_WRITE if not config["direct"] else _WRITE_DIRECT / (2 if width.outputs % 4 == 0 else 1))
    )
    per_warp = groups * group + _TAPS * height.taps * (2 if across.is_odd else 1) + copies * _COPY
    chain = (products + halves) / (config["rows"] * across.blocks)
    alone = copies * _COPY_WAIT + edges * _EDGE_WAIT + groups * (_GROUP_WAIT + chain * _PRODUCT_WAIT)
    blocks = ceil_div(tiling.blocks, device.sm_count)
    waves = max(1.0, blocks / tiling.resident(device))
    cycles = blocks * tiling.threads / 128 * per_warp + waves * alone
    return float(1e3 * cycles / device.clock_hz)


# What default_configs ranks by estimate; the last are valid for every applicable problem.
_SHORT_LIST = (
    *Config.product(
        {"channels": (1, 2, 4, 8), "images": (8, 16), "bands": (1, 2), "rows": (1, 2, 4), "direct": (False,)}
    ),
    *Config.product(
        {
            ("channels", "bands"): ((1, 1), (2, 1), (1, 2), (1, 4), (2, 4)),
            "images": (8,),
            "rows": (1, 2),
            "direct": (True,),
        }
    ),
)
_SHAPE = ("channels", "images", "bands", "direct")
_FALLBACKS = tuple(
    Config.of(channels=channels, images=8, bands=1, rows=rows, direct=False)
    for channels, rows in ((1, 1), (1, 2), (2, 2))
)


class ConvDepthwiseBands(Solver):
    """Depthwise convolution as products with Toeplitz matrices of the filter's rows, with float32 accumulators.

    The zeros of those matrices and rows of padding are multiplied: an infinity or NaN of the input spreads over its
    row's outputs, and one of the filter over its channel.

    Configuration: a block computes `channels` channels of `images` whole images. `bands` warps share a channel's rows,
    `rows` of them at a time. Outputs are staged, or go to memory at once if `direct`.
    """

    id = "ConvDepthwiseBands"
    algorithm = Algorithm.DIRECT
    directions = OF_IMAGES
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "channels": (1, 2, 4, 8),
        "images": (8, 16),
        "bands": (1, 2, 4),
        "rows": (1, 2, 4),
        "direct": (False, True),
    }
    sources = ("depthwise/toeplitz.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        back = Direction.BACKWARD_DATA
        return (
            depthwise_example(32, x=(16, 32, 14, 14), w=(7, 7), padding=3, dtype=half),
            depthwise_example(40, x=(9, 40, 7, 7), w=(5, 5), padding=2, dtype=brain, direction=back),
            depthwise_example(12, x=(8, 12, 56, 56), w=(7, 7), padding=3, dtype=half),
            depthwise_example(6, x=(3, 6, 28, 30), w=(5, 3), padding=((4, 0), (1, 6)), dtype=brain),
            depthwise_example(4, x=(2, 4, 15, 17), w=(4, 6), padding=(1, 2), dtype=half, direction=back),
            depthwise_example(8, x=(5, 8, 100), w=(7,), padding=((6, 0),), dtype=half),
            depthwise_example(16, x=(9, 16, 14, 14), w=(7, 7), padding=3, dtype=half, epilogue="bias.residual.relu"),
            depthwise_example(
                10, x=(5, 10, 7, 9), w=(3, 3), padding=1, dtype=brain, epilogue="scale.channel_bias.residual.silu"
            ),
            depthwise_example(6, x=(9, 6, 28, 28), w=(5, 5), padding=2, dtype=half, epilogue="bias.silu.residual"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_toeplitz(problem)).refused:
            return answer
        if not any(self.is_valid_config(problem, device, config) for config in _FALLBACKS):
            return Applicability(
                f"eight images of {problem.x.shape[2:]}, or a filter of {problem.filter}, are too large"
            )
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        (conv,) = correlations(problem)
        if config not in _FALLBACKS and not _is_economical(conv, config):
            return False
        tiling = _Tiling.of(conv, config)
        if tiling.across.is_odd and not _serves_odd_rows(conv, config):
            return False
        if not tiling.across.is_served:
            return False
        if tiling.target == 2 and tiling.across.is_odd:
            return False
        if tiling.products > _MAX_PRODUCTS or tiling.registers > _MAX_REGISTERS or tiling.threads > _MAX_THREADS:
            return False
        fits_registers = tiling.registers * tiling.threads <= 65536
        return fits_registers and tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        ranked = self.ranked_estimates(problem, device, (*_SHORT_LIST, *_FALLBACKS))
        # The best of each shape of a block: estimates of one shape err alike.
        return first_of_kinds(ranked, lambda each: tuple(each.config[name] for name in _SHAPE), _DEFAULTS)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        (conv,) = correlations(problem)
        busy_ms = _busy_ms(conv, config, device)
        moved_ms = 1e3 * problem.bytes / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
        return _LAUNCH_MS + max(busy_ms, moved_ms) + _SERIAL_SHARE * min(busy_ms, moved_ms)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        (conv,) = correlations(problem)
        return ConvSolution(steps=(_launch(conv, config, device),))


def _serves_odd_rows(conv: Correlation, config: Config) -> bool:
    """Whether rows of all images begin alike, and the rows of all iterations do."""
    height, width = conv.axes
    images = (conv.problem.c * height.size * width.size, conv.problem.c * height.outputs * width.outputs)
    return all(count % 2 == 0 for count in images) and config["rows"] % 2 == 0


def _has_partial_words(conv: Correlation, config: Config) -> bool:
    """Whether some block's segments of outputs begin or end within a word of 16 bytes."""
    area = conv.axes[0].outputs * conv.axes[1].outputs
    return any(channels * area % 8 for channels in (config["channels"], conv.problem.c))


def _is_economical(conv: Correlation, config: Config) -> bool:
    """Whether no smaller value of a parameter does the same."""
    height, width = conv.axes
    rows, blocks = config["rows"], ceil_div(width.outputs, 16)
    if config["channels"] >= 2 * conv.problem.c or config["images"] >= 2 * max(8, conv.problem.n):
        return False
    if config["bands"] > 1 and height.outputs < 8 * config["bands"]:
        return False
    # Words written one by one pay only where staged outputs would leave a multiprocessor few warps.
    if config["direct"] and height.outputs * width.outputs < _LEAST_DIRECT:
        return False
    return bool(rows < height.outputs + 4 and (rows <= 2 or rows * blocks <= 8))


SOLVERS = (ConvDepthwiseBands(),)
