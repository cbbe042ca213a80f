"""ConvImplicitGemmHalo: up to 64 channels on Hopper's tensor cores, each pixel loaded once for all taps.

Kernel: kernels_src/implicit_gemm/wgmma_halo.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.columns import ConfigTable
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import OF_IMAGES, Algorithm, Applicability, KernelKey
from miofind.solver.steps import Box, Config, ConfigValue, ConvSolution, KernelStep, Pointer, TensorMap
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.copies import packed_map
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.implicit_gemm.wgmma_halo_shared import HaloSolver
from miofind.solvers.implicit_gemm.wgmma_halo_tiling import (
    MOST_CHANNELS,
    TILES_H,
    TILES_W,
    HaloProduct,
    HaloTiling,
    short_list,
)

_SOURCE = "implicit_gemm/wgmma_halo.cu"

SHAPE = StructType(
    "Shape",
    column_tiles=DIVISOR,
    row_tiles=DIVISOR,
    filter_tiles=DIVISOR,
    parts=DIVISOR,
    part_depth="int32",
    depth="int32",
    pad_d="int32",
    pad_h="int32",
    pad_w="int32",
    out_depth="int32",
    out_height="int32",
    out_width="int32",
    out_channels="int32",
    image_stride="int32",
    depth_stride="int32",
    row_stride="int32",
    images_of_row="int32",
)
"""All numbers of a launch; the kernel's source says what each is."""


class ConvImplicitGemmHalo(HaloSolver):
    """Implicit GEMM by wgmma whose operand of pixels is a tile of the input with its halo: taps are other addresses in
    it.

    Serves channels-last tensors of 16 bits, forward and backward data, of one group and stride 1, whose sums go over up
    to 64 channels; channels and filters are multiples of 8. The first of two or three dimensions takes no dilation.
    Accumulators are float32. Padding is multiplied as zeros: an infinity or NaN of the filter spreads to outputs at the
    border.

    Configuration: blocks compute at most `tile_h` rows (in one and two dimensions, of as many images) by `tile_w`
    columns with `consumers` warpgroups, and go along the first dimension; `slices_ahead` slices are loaded while all
    that are met are held; filters stay, all of them, if `keeps_filters`; a multiprocessor holds `blocks` blocks.

    Source: PTX ISA, wgmma, matrix descriptors and swizzling modes, for addresses of shifted tiles.
    """

    id = "ConvImplicitGemmHalo"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_IMAGES
    applies_epilogues = True
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset({Layout.NWC, Layout.NHWC, Layout.NDHWC}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    alignment_bytes = 16
    sources = (_SOURCE,)
    limits = (TILES_H, TILES_W)
    defaults = 8
    most_alike = 2
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_h": TILES_H,
        "tile_w": TILES_W,
        "consumers": (1, 2, 3, 4),
        "slices_ahead": (0, 1, 2),
        "keeps_filters": (0, 1),
        "blocks": (1, 2),
    }

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "layout": Layout.NDHWC, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, brain = Direction.BACKWARD_DATA, DataType.BFLOAT16
        return (
            conv(x=(2, 32, 9, 12, 64), w=(32, 32, 3, 3, 3), padding=1),
            conv(x=(1, 64, 7, 13, 28), w=(64, 64, 3, 3, 3), padding=1, dtype=brain),
            conv(x=(2, 16, 5, 10, 11), w=(24, 16, 3, 3, 3), padding=((0, 1), (1, 2), (2, 0))),
            conv(x=(2, 40, 6, 9, 14), w=(72, 40, 1, 3, 5), padding=(0, 1, 2), dilation=(1, 1, 2), dtype=brain),
            conv(x=(1, 64, 4, 8, 9), w=(168, 64, 3, 1, 1), padding=(1, 0, 0)),
            conv(data, x=(2, 32, 9, 12, 64), w=(32, 32, 3, 3, 3), padding=1, dtype=brain),
            conv(data, x=(2, 24, 5, 10, 11), w=(40, 24, 3, 2, 3), padding=((0, 1), (1, 0), (2, 1)), dilation=(1, 2, 1)),
            conv(data, x=(1, 72, 6, 9, 14), w=(64, 72, 3, 3, 3), padding=1),
            conv(x=(2, 32, 5, 12, 20), w=(32, 32, 3, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(
                x=(2, 48, 5, 9, 20),
                w=(40, 48, 3, 3, 3),
                padding=1,
                dtype=brain,
                epilogue="float32.scale.bias.silu.residual",
            ),
            conv(x=(2, 16, 5, 9, 20), w=(8, 16, 3, 3, 3), padding=1, epilogue="channel_bias.residual.leaky_relu"),
            conv(data, x=(2, 32, 5, 12, 20), w=(64, 32, 3, 3, 3), padding=1, epilogue="residual.drelu"),
            conv(x=(5, 32, 19, 40), w=(40, 32, 3, 3), padding=1, dilation=(1, 2), layout=Layout.NHWC),
            conv(data, x=(3, 40, 18, 70), w=(64, 40, 3, 5), padding=((0, 1), (2, 3)), layout=Layout.NHWC),
            conv(
                x=(5, 64, 14, 28),
                w=(64, 64, 3, 3),
                padding=1,
                dtype=brain,
                layout=Layout.NHWC,
                epilogue="channel_bias.residual.relu",
            ),
            conv(x=(3, 32, 300), w=(32, 32, 7), padding=9, dilation=3, layout=Layout.NWC, epilogue="bias.leaky_relu"),
            conv(data, x=(3, 24, 130), w=(56, 24, 11), padding=5, dtype=brain, layout=Layout.NWC),
        )

    def refuse(self, problem: ProblemDescription) -> Applicability:
        if (answer := super().refuse(problem)).refused:
            return answer
        conv = problem.conv
        if len(problem.spatial) > 1 and conv.dilation[0] != 1:
            return Applicability(f"goes along the first dimension slice by slice: no dilation {conv.dilation[0]} there")
        pads = zip(conv.pad_before, conv.pad_after, problem.filter, conv.dilation, strict=True)
        if any(max(before, after) > (taps - 1) * dilation for before, after, taps, dilation in pads):
            return Applicability("needs outputs that each meet a pixel: padding is larger than the filter reaches")
        sums = HaloProduct.of(problem).sums
        return Applicability(f"sums over up to {MOST_CHANNELS} channels, not {sums}" if sums > MOST_CHANNELS else "")

    def tiling(self, problem: ProblemDescription, device: Device, config: Config) -> HaloTiling:
        return HaloTiling.of(HaloProduct.of(problem), config, device)

    def short_list(self, problem: ProblemDescription) -> ConfigTable:
        return short_list(HaloProduct.of(problem))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = self.tiling(problem, device, config)
        step = KernelStep(
            source=_SOURCE,
            entry="implicit_gemm_wgmma_halo",
            grid=(tiling.blocks, 1, 1),
            block=(tiling.threads, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=(*_defines(tiling), *epilogue_defines(problem)),
            args=(
                _pixels(tiling),
                _filters(tiling.product),
                Pointer(buffer=problem.direction.output),
                _shape(tiling),
                *epilogue_arguments(problem),
            ),
        )
        return ConvSolution(steps=(step,))


def _pixels(tiling: HaloTiling) -> TensorMap:
    """Boxes of a slice: rows of pixels with the halo; images' slices one after another, or their rows side by side."""
    product = tiling.product
    row, slices = product.width.size * product.sums, product.depth.size * product.images
    strides = (row * product.depth.size, row) if product.rows_are_images else (row, row * product.height.size)
    element = product.problem.x.dtype
    return TensorMap(
        pointer=Pointer(buffer="y" if product.is_data else "x"),
        element=element.value,
        sizes=(product.sums, product.width.size, product.height.size, slices),
        strides_bytes=tuple(element.itemsize * stride for stride in (product.sums, *strides)),
        copy=Box(sizes=(product.channels, tiling.row_pixels, tiling.rows, 1)),
        swizzle_bytes=element.itemsize * product.channels,
    )


def _filters(product: HaloProduct) -> TensorMap:
    """Boxes of one tap: filters by channels, or, of backward data, columns of rows of filters."""
    problem = product.problem
    if product.is_data:
        box = Box(sizes=(product.filter_columns, 1, 16 * product.k_steps))
    else:
        box = Box(sizes=(product.channels, 1, product.tile_n))
    return packed_map(problem, "w", (problem.c, product.taps, problem.k), box)


def _defines(tiling: HaloTiling) -> tuple[tuple[str, str | int], ...]:
    product = tiling.product
    return (
        ("ELEMENT", product.problem.x.dtype.value),
        ("DATA", int(product.is_data)),
        ("FILTER_D", product.depth.taps),
        ("FILTER_H", product.height.taps),
        ("FILTER_W", product.width.taps),
        ("DILATION_H", product.height.dilation),
        ("DILATION_W", product.width.dilation),
        ("TILE_H", tiling.tile_h),
        ("TILE_W", tiling.tile_w),
        ("TILE_N", product.tile_n),
        ("CHANNELS", product.channels),
        ("K_STEPS", product.k_steps),
        ("CONSUMERS", tiling.consumers),
        ("ATOMS", tiling.atoms),
        ("SLICES", tiling.slices),
        ("FILTER_STAGES", tiling.filter_stages),
        ("FILTER_COLUMNS", product.filter_columns),
        ("BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        SHAPE.define,
    )


def _shape(tiling: HaloTiling) -> Struct:
    product, (row_tiles, column_tiles) = tiling.product, tiling.tiles
    row = product.width.outputs * product.results
    plane = row * (product.depth if product.rows_are_images else product.height).outputs
    return SHAPE(
        column_tiles=divide_by(column_tiles),
        row_tiles=divide_by(row_tiles),
        filter_tiles=divide_by(product.filter_tiles),
        parts=divide_by(tiling.parts),
        part_depth=tiling.part_depth,
        depth=product.depth.size,
        pad_d=product.depth.pad,
        pad_h=product.height.pad,
        pad_w=product.width.pad,
        out_depth=product.depth.outputs,
        out_height=product.height.outputs,
        out_width=product.width.outputs,
        out_channels=product.results,
        image_stride=0 if product.rows_are_images else plane * product.depth.outputs,
        depth_stride=row if product.rows_are_images else plane,
        row_stride=plane if product.rows_are_images else row,
        images_of_row=int(product.rows_are_images),
    )


SOLVERS = (ConvImplicitGemmHalo(),)
