"""ConvWinogradFused: Winograd's F(2x2, 3x3) in one kernel, for forward and backward data.

Kernels: kernels_src/winograd/fused.cu and, for the filters, kernels_src/winograd/fused_filters.cu. How work is dealt
out: solvers/winograd/fused_tiling.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription, TensorDescriptor
from miofind.device.device import Device, Library, Place
from miofind.solver.columns import ConfigTable, chosen, larger, smaller
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import (
    APPLICABLE,
    OF_IMAGES,
    Algorithm,
    Applicability,
    EstimatedConfig,
    KernelKey,
    Reach,
    Solver,
)
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Packing,
    Pointer,
    Region,
    WorkspacePlan,
)
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.minimal_filtering import Filtering, bound_growth
from miofind.solvers.winograd.choice import refuse_winograd
from miofind.solvers.winograd.fused_tiling import COLS, ROWS, FusedTiling

_FILTERS = "filters"
_DEFAULTS, _MOST_ALIKE = 8, 2
_MAX_THREADS = 512
_MAX_BLOCKS, _MAX_FILTER_BYTES = 2**30, 4 * 2**30
_FILTER_WARPS = 4  # of a block that transforms filters
_MOST_WASTE = 1.34  # tiles of all blocks over the fewest that blocks of as many tiles have
# Tensor cores truncate running sums, by 0.7 * 2**-24 of what they are on average. Three products for 8 channels each,
# in a sum that grows as a root does, lose 0.18 * 2**-24 of it a channel: with so many channels for each of a sum's
# square root 2.3 * 2**-24 of the bound's 8 * 3, where the sum is as large as its deviation, and half where it is five
# times as large.
_CHAIN = 13.0

_IMAGES = StructType(
    "Images",
    **dict.fromkeys(("channels", "height", "width"), "int32"),
    **dict.fromkeys(("image_stride", "channel_stride", "row_stride", "column_stride"), "int32"),
)
_SHAPE = StructType(
    "Shape",
    batch="int32",
    x=_IMAGES,
    y=_IMAGES,
    pad_top="int32",
    pad_left="int32",
    **dict.fromkeys(("filter_blocks", "groups", "column_blocks", "row_blocks"), DIVISOR),
)
_FILTER_SHAPE = StructType(
    "Shape",
    **dict.fromkeys(("out_channels", "channels"), "int32"),
    **dict.fromkeys(("group_stride", "out_channel_stride", "channel_stride", "tap_stride"), "int32"),
    **dict.fromkeys(("out_channel_blocks", "channel_blocks"), DIVISOR),
    blocks="int32",
)


# What default_configs ranks by estimate. The smallest, of whatever rows and columns, serve what nothing else does.
_SHORT_LIST = Config.product(
    {
        ("tiles", "filters", "warps_t", "warps_k", "warps_c", "stages"): (
            (32, 32, 1, 1, 1, 3),
            (32, 32, 1, 1, 2, 2),
            (32, 32, 2, 1, 1, 3),
            (32, 32, 1, 2, 1, 3),
            (32, 16, 1, 1, 2, 3),
            (16, 32, 1, 1, 2, 3),
            (16, 32, 1, 1, 4, 2),
            (16, 16, 1, 1, 4, 3),
            (16, 8, 1, 1, 4, 3),
            (16, 16, 1, 1, 2, 3),
            (16, 16, 1, 1, 1, 2),
        ),
        "rows": ROWS,
        "cols": COLS,
    }
)


class ConvWinogradFused(Solver):
    """Winograd's minimal filtering F(2x2, 3x3), float32, transformed and multiplied by one kernel on tensor cores.

    Filters are transformed by a first launch, once where they are packed. float32 is split into two tf32, of which
    three products are added (3xTF32); where tf32 is allowed, it is cut to it. The error bound is direct summation's.

    Configuration: a warp computes one of four rows of a tile's places of `tiles` tiles and `filters` filters; a block
    has `warps_t` times as many tiles, `rows` x `cols` of each image, and `warps_k` times as many filters; `warps_c`
    warps share a sum over channels; `stages` buffers.

    Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.
    """

    id = "ConvWinogradFused"
    algorithm = Algorithm.WINOGRAD
    directions = OF_IMAGES
    applies_epilogues = True
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT32}),
            layouts=frozenset({Layout.NCHW, Layout.NHWC}),
            min_sm=80,
        ),
    )
    alignment_bytes = 16
    is_dynamic = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tiles": (16, 32),
        "filters": (8, 16, 32),
        "warps_t": (1, 2),
        "warps_k": (1, 2),
        "warps_c": (1, 2, 4),
        "rows": ROWS,
        "cols": COLS,
        "stages": (2, 3, 4),
    }
    sources = ("winograd/fused.cu", "winograd/fused_filters.cu")

    def examples(self) -> tuple[ProblemDescription, ...]:
        conv, data = ProblemDescription.convolution, Direction.BACKWARD_DATA
        odd = ((1, 0), (0, 1))
        return (
            conv(x=(1, 64, 28, 28), w=(64, 64, 3, 3), padding=1),
            conv(x=(2, 48, 9, 15), w=(40, 48, 3, 3), padding=odd, layout=Layout.NHWC),
            conv(x=(3, 34, 7, 7), w=(38, 17, 3, 3), padding=1, groups=2),
            conv(x=(3, 34, 8, 7), w=(38, 17, 3, 3), padding=1, groups=2, layout=Layout.NHWC, direction=data),
            conv(x=(1, 32, 14, 13), w=(64, 32, 3, 3), padding=odd, direction=data),
            conv(x=(5, 128, 4, 5), w=(20, 128, 3, 3), math="tf32"),
            conv(x=(2, 20, 9, 9), w=(18, 20, 3, 3), padding=2, layout={"x": "NHWC", "w": "NCHW", "y": "NHWC"}),
            conv(x=(3, 34, 7, 7), w=(38, 17, 3, 3), padding=1, groups=2, epilogue="scale.bias.channel_bias.silu"),
            conv(x=(1, 64, 28, 28), w=(64, 64, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(x=(2, 20, 9, 9), w=(24, 20, 3, 3), math="tf32", layout=Layout.NHWC, epilogue="bias.gelu.residual"),
            conv(x=(1, 64, 14, 13), w=(32, 64, 3, 3), padding=odd, direction=data, epilogue="residual.drelu"),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if problem.filter != (3, 3):
            return Applicability(f"serves filters of 3 x 3 taps, not {problem.filter}")
        if problem.x.layout.channels_last != problem.y.layout.channels_last:
            return Applicability("needs one layout for x and y")
        if (answer := refuse_winograd(problem)).refused:
            return answer
        if not any(self.is_valid_config(problem, device, config) for config in reversed(_SHORT_LIST)):
            return Applicability("sums over too many channels, or has more blocks than a grid")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = FusedTiling.of(problem, config)
        return _is_of_size(tiling) and _fits(tiling, device)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        axis = Filtering.of(2, 3)
        return bound_growth((axis, axis))

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        return Reach.INPUTS  # F(2x2, 3x3) is local

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return _varied(self._ranked(problem, device))

    def _ranked(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """The short list as far as it is valid, the least estimate first."""
        of_size = _short_list().valid(lambda config: _is_of_size(FusedTiling.of(problem, config)))
        fitting = of_size.valid(lambda config: _fits(FusedTiling.of(problem, config), device))
        return self.ranked_table(problem, device, fitting)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return FusedTiling.of(problem, config).estimate_ms(device)

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        tiling = FusedTiling.of(problem, config)
        pack, run = _filters_step(tiling), _step(tiling, device)
        return Packing(
            pack=ConvSolution(steps=(pack.on_buffers({_FILTERS: "y"}),)),
            run=ConvSolution(steps=(replace(run, pdl=False).on_buffers({_FILTERS: "w"}),)),
            bytes=tiling.filter_bytes,
            form=f"winograd fragments {problem.direction} {problem.groups}",
        )

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = FusedTiling.of(problem, config)
        return ConvSolution(
            steps=(_filters_step(tiling), _step(tiling, device)),
            workspace=WorkspacePlan((Region(name=_FILTERS, bytes=tiling.filter_bytes),)),
        )


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


def _varied(ranked: Sequence[EstimatedConfig]) -> tuple[EstimatedConfig, ...]:
    """The likely best, at most two of each split of the work: estimates of others differ by less than they are off."""
    taken: Counter[tuple[int, ...]] = Counter()
    likely = []
    for each in ranked:
        shape = tuple(each.config[name] for name in ("tiles", "filters", "warps_t", "warps_k", "warps_c"))
        if taken[shape] < _MOST_ALIKE:
            likely.append(each)
        taken[shape] += 1
        if len(likely) == _DEFAULTS:
            break
    return tuple(likely)


def _is_of_size(tiling: FusedTiling) -> bool:
    """Whether a block has tiles, and neither is mostly empty nor has few products for what it transforms."""
    least_channels = 8 * (tiling.warps_c // 2)
    return (
        (tiling.images >= 1)
        & (tiling.threads <= _MAX_THREADS)
        & (tiling.filters >= tiling.tiles // 2)
        & (tiling.block_filters < 2 * max(16, tiling.results))
        & ((tiling.warps_c == 1) | (least_channels < tiling.channels))
        & (tiling.stages <= larger(2, tiling.k_iterations))
        & ((tiling.products != 3) | (8 * tiling.k_iterations <= _CHAIN * math.sqrt(tiling.channels)))
    )


def _fits(tiling: FusedTiling, device: Device) -> bool:
    """Whether a multiprocessor and a grid hold what a tiling with images takes, and few blocks of it are empty."""
    return (
        (math.prod(tiling.tile_grid) <= _MOST_WASTE * _fewest(tiling))
        & (tiling.blocks <= _MAX_BLOCKS)
        & (tiling.filter_bytes <= _MAX_FILTER_BYTES)
        & (tiling.shared_bytes <= (device.shared_bytes or 99 << 10))
        & (tiling.resident(device) > 0)
    )


def _fewest(tiling: FusedTiling) -> float:
    """Blocks along tiles with the rows and columns that need the fewest."""
    n, _, height, width = tiling.problem.output.shape
    fewest = math.inf
    for rows, cols in itertools.product(ROWS, COLS):
        images = tiling.block_tiles // (rows * cols)
        count = ceil_div(n, larger(1, images)) * ceil_div(height, 2 * rows) * ceil_div(width, 2 * cols)
        fewest = smaller(fewest, chosen(images > 0, count, math.inf))
    return fewest


def _images(tensor: TensorDescriptor, group_channels: int) -> Struct:
    """The kernel's `Images`, dense as their layout says."""
    _, channels, height, width = tensor.shape
    last = tensor.layout.channels_last
    return _IMAGES(
        channels=group_channels,
        height=height,
        width=width,
        image_stride=channels * height * width,
        channel_stride=1 if last else height * width,
        row_stride=width * channels if last else width,
        column_stride=channels if last else 1,
    )


def _shape(tiling: FusedTiling) -> Struct:
    p = tiling.problem
    _, row_blocks, column_blocks = tiling.tile_grid
    pad_top, pad_left = tiling.pads
    return _SHAPE(
        batch=p.n,
        x=_images(tiling.source, tiling.channels),
        y=_images(p.output, tiling.results),
        pad_top=pad_top,
        pad_left=pad_left,
        filter_blocks=divide_by(tiling.filter_blocks),
        groups=divide_by(p.groups),
        column_blocks=divide_by(column_blocks),
        row_blocks=divide_by(row_blocks),
    )


def _step(tiling: FusedTiling, device: Device) -> KernelStep:
    p = tiling.problem
    source = "y" if p.direction is Direction.BACKWARD_DATA else "x"
    names = ("warps_t", "warps_k", "warps_c", "stages")
    return KernelStep(
        source="winograd/fused.cu",
        entry="winograd_fused",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=(
            ("IMAGES", tiling.images),
            ("TILE_ROWS", tiling.rows),
            ("TILE_COLUMNS", tiling.cols),
            ("MMA_TILES_M", tiling.tiles // 16),
            ("MMA_TILES_N", tiling.filters // 8),
            *((name.upper(), getattr(tiling, name)) for name in names),
            ("PRODUCTS", tiling.products),
            ("CHANNELS_LAST", int(tiling.is_last)),
            ("VECTOR", tiling.vector),
            ("OUT_VECTOR", tiling.out_vector),
            ("MIN_BLOCKS", tiling.resident(device)),
            ("SHARED_BYTES", tiling.shared_bytes),
            _IMAGES.define,
            _SHAPE.define,
            *epilogue_defines(p),
        ),
        args=(
            *(Pointer(buffer=name) for name in (source, _FILTERS, p.direction.output)),
            _shape(tiling),
            *epilogue_arguments(p),
        ),
        pdl=True,
    )


def _filters_step(tiling: FusedTiling) -> KernelStep:
    p = tiling.problem
    return KernelStep(
        source="winograd/fused_filters.cu",
        entry="winograd_fused_filters",
        grid=(ceil_div(tiling.units, _FILTER_WARPS), 1, 1),
        block=(32 * _FILTER_WARPS, 1, 1),
        defines=(("FLIPPED", int(p.direction is Direction.BACKWARD_DATA)), _FILTER_SHAPE.define),
        args=(Pointer(buffer="w"), Pointer(buffer=_FILTERS), _filter_shape(tiling)),
    )


def _filter_shape(tiling: FusedTiling) -> Struct:
    p = tiling.problem
    k, c = p.k // p.groups, p.w.shape[1]
    of_k, of_c, of_tap = (9 * c, 1, c) if p.w.layout.channels_last else (9 * c, 9, 1)
    is_data = p.direction is Direction.BACKWARD_DATA
    return _FILTER_SHAPE(
        out_channels=tiling.results,
        channels=tiling.channels,
        group_stride=9 * k * c,
        out_channel_stride=of_c if is_data else of_k,
        channel_stride=of_k if is_data else of_c,
        tap_stride=of_tap,
        out_channel_blocks=divide_by(ceil_div(tiling.results, 8)),
        channel_blocks=divide_by(ceil_div(tiling.channels, 8)),
        blocks=tiling.units,
    )


SOLVERS = (ConvWinogradFused(),)
