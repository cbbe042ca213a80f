"""ConvImplicitGemmHaloSwapped: each pixel loaded once for all taps, and results written while others multiply.

Kernels: kernels_src/implicit_gemm/wgmma_halo_swapped.cu, and wgmma_halo_swapped_planes.cu, whose results are channels
first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.columns import ConfigTable
from miofind.solver.epilogue import epilogue_defines
from miofind.solver.solver import APPLICABLE, OF_IMAGES, Algorithm, Applicability, KernelKey
from miofind.solver.steps import Box, Config, ConfigValue, ConvSolution, KernelStep, TensorMap
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.copies import packed_map
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.wgmma_product import NchwTensors
from miofind.solvers.implicit_gemm.wgmma_halo_shared import HaloSolver
from miofind.solvers.implicit_gemm.wgmma_halo_swapped_tiling import (
    COLUMNS_ALIGNMENT,
    FILTER_STAGES,
    MOST_COLUMNS,
    TILES_H,
    TILES_W,
    SwappedHaloProduct,
    SwappedHaloTiling,
    short_list,
)
from miofind.solvers.implicit_gemm.wgmma_shared import epilogue_maps

_SOURCE = "implicit_gemm/wgmma_halo_swapped.cu"

SHAPE = StructType(
    "Shape",
    parts=DIVISOR,
    column_tiles=DIVISOR,
    row_tiles=DIVISOR,
    units="int32",
    pad_h="int32",
    pad_w="int32",
    filters="int32",
)
"""All numbers of a launch; the kernel's source says what each is."""


class ConvImplicitGemmHaloSwapped(HaloSolver):
    """Implicit GEMM by wgmma whose operand of filters is A, and of pixels, a tile of the input with its halo, is B:
    taps are other addresses in it, and warpgroups take turns, so that one writes results while another multiplies.

    Serves channels-last tensors of 16 bits in one and two dimensions, forward and backward data, of one group and
    stride 1; channels and filters are multiples of 8. Accumulators are float32. Padding is multiplied as zeros: an
    infinity or NaN of the filter spreads to outputs at the border.

    Configuration: tiles of at most `tile_h` rows (in one dimension, of as many images) by `tile_w` columns, up to 192
    pixels with the halo between rows where two warpgroups (`consumers`) take turns, 112 where three do; a tile stays
    for `unit_blocks` times 64 filters, and `slots_ahead` chunks of channels are loaded ahead; filters of
    `filter_stages` taps are held, of all if that is 0.

    Source: PTX ISA, wgmma, matrix descriptors and swizzling modes, for addresses of shifted tiles; CUTLASS's public
    description of warp-specialised ping-pong kernels for warpgroups that take turns.
    """

    id = "ConvImplicitGemmHaloSwapped"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_IMAGES
    applies_epilogues = True
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset({Layout.NWC, Layout.NHWC}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    alignment_bytes = 16
    sources = (_SOURCE,)
    limits = (TILES_H, TILES_W)
    defaults = 6
    most_alike = 1
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_h": TILES_H,
        "tile_w": TILES_W,
        "consumers": (2, 3),
        "unit_blocks": (1, 2, 4),
        "slots_ahead": (1, 2),
        "filter_stages": FILTER_STAGES,
    }

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "layout": Layout.NHWC, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, brain = Direction.BACKWARD_DATA, DataType.BFLOAT16
        return (
            conv(x=(2, 64, 14, 28), w=(64, 64, 3, 3), padding=1),
            conv(x=(3, 128, 13, 19), w=(128, 128, 3, 3), padding=1, dtype=brain),
            conv(x=(2, 16, 10, 11), w=(24, 16, 3, 3), padding=((1, 2), (2, 0))),
            conv(x=(2, 40, 9, 14), w=(72, 40, 3, 5), padding=(1, 2), dilation=(2, 1), dtype=brain),
            conv(x=(1, 200, 8, 9), w=(168, 200, 1, 3), padding=(0, 1)),
            conv(data, x=(2, 64, 12, 40), w=(64, 64, 3, 3), padding=1, dtype=brain),
            conv(data, x=(2, 72, 10, 11), w=(136, 72, 2, 3), padding=((1, 0), (2, 1)), dilation=(2, 1)),
            conv(x=(2, 64, 12, 20), w=(64, 64, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(
                x=(2, 96, 9, 20), w=(80, 96, 3, 3), padding=1, dtype=brain, epilogue="float32.scale.bias.silu.residual"
            ),
            conv(x=(2, 32, 9, 20), w=(32, 32, 3, 3), padding=1, epilogue="channel_bias.residual.leaky_relu"),
            conv(data, x=(2, 64, 12, 20), w=(64, 64, 3, 3), padding=1, epilogue="residual.drelu"),
            conv(data, x=(2, 128, 7, 9), w=(64, 128, 3, 3), padding=1, epilogue="dsilu"),
            conv(x=(3, 32, 300), w=(32, 32, 7), padding=9, dilation=3, layout=Layout.NWC, epilogue="bias.leaky_relu"),
            conv(x=(3, 40, 70), w=(72, 40, 3), padding=1, layout=Layout.NWC, epilogue="channel_bias.residual.relu"),
            conv(data, x=(3, 128, 130), w=(56, 128, 11), padding=5, dtype=brain, layout=Layout.NWC),
        )

    def refuse(self, problem: ProblemDescription) -> Applicability:
        if (answer := super().refuse(problem)).refused:
            return answer
        if problem.filter[-1] > MOST_COLUMNS:
            return Applicability(f"takes too long to compile for filters of over {MOST_COLUMNS} columns")
        return APPLICABLE

    def tiling(self, problem: ProblemDescription, device: Device, config: Config) -> SwappedHaloTiling:
        return SwappedHaloTiling.of(SwappedHaloProduct.of(problem), config, device)

    def short_list(self, problem: ProblemDescription) -> ConfigTable:
        return short_list(SwappedHaloProduct.of(problem))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = self.tiling(problem, device, config)
        step = KernelStep(
            source=self.sources[0],
            entry="implicit_gemm_wgmma_halo_swapped",
            grid=(tiling.blocks, 1, 1),
            block=(tiling.threads, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=(*_defines(tiling), *epilogue_defines(problem)),
            args=(
                _pixels(tiling),
                _filters(tiling.product),
                *_results(tiling, problem.direction.output),
                _shape(tiling),
                *epilogue_maps(problem, functools.partial(_results, tiling)),
            ),
        )
        return ConvSolution(steps=(step,))


class ConvImplicitGemmHaloSwappedPlanes(ConvImplicitGemmHaloSwapped):
    """ConvImplicitGemmHaloSwapped for an output alone that is channels first, in two dimensions.

    Its rows of pixels are multiples of 8. So are those of a tile, with and without the halo: pixels that are too many
    are multiplied, and stored nowhere.
    """

    id = "ConvImplicitGemmHaloSwappedPlanes"
    keys = (replace(ConvImplicitGemmHaloSwapped.keys[0], layouts=frozenset({Layout.NHWC, Layout.NCHW})),)
    nchw = frozenset({NchwTensors.OUTPUT})
    sources = ("implicit_gemm/wgmma_halo_swapped_planes.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            layout = dict.fromkeys("xwy", Layout.NHWC) | {direction.output: Layout.NCHW}
            given = {"dtype": DataType.FLOAT16, "layout": layout, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, brain = Direction.BACKWARD_DATA, DataType.BFLOAT16
        return (
            conv(x=(2, 64, 14, 56), w=(64, 64, 3, 3), padding=1),
            conv(x=(3, 128, 13, 40), w=(136, 128, 3, 3), padding=1, dtype=brain),
            conv(x=(2, 16, 10, 22), w=(24, 16, 3, 3), padding=((1, 2), (2, 2))),
            conv(x=(2, 40, 9, 16), w=(72, 40, 3, 5), padding=(1, 2), dilation=(2, 1), dtype=brain),
            conv(x=(1, 200, 8, 72), w=(168, 200, 1, 3), padding=(0, 1)),
            conv(data, x=(2, 64, 12, 64), w=(64, 64, 3, 3), padding=1, dtype=brain),
            conv(data, x=(2, 72, 10, 8), w=(136, 72, 2, 3), padding=((1, 0), (2, 1)), dilation=(2, 1)),
            conv(x=(2, 64, 12, 32), w=(64, 64, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(
                x=(2, 96, 9, 24), w=(80, 96, 3, 3), padding=1, dtype=brain, epilogue="float32.scale.bias.silu.residual"
            ),
            conv(x=(2, 32, 9, 80), w=(32, 32, 3, 3), padding=1, epilogue="channel_bias.residual.leaky_relu"),
            conv(data, x=(2, 64, 12, 48), w=(64, 64, 3, 3), padding=1, epilogue="residual.drelu"),
            conv(data, x=(2, 128, 7, 16), w=(64, 128, 3, 3), padding=1, epilogue="dsilu"),
        )

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        is_least = config["tile_w"] in SwappedHaloProduct.of(problem).column_limits
        return is_least and super().is_valid_config(problem, device, config)

    def refuse(self, problem: ProblemDescription) -> Applicability:
        if (answer := super().refuse(problem)).refused:
            return answer
        columns = problem.output.shape[-1]
        if columns % COLUMNS_ALIGNMENT:
            return Applicability(f"copies 16 bytes: {columns} pixels of a row are no multiple of {COLUMNS_ALIGNMENT}")
        return APPLICABLE


def _pixels(tiling: SwappedHaloTiling) -> TensorMap:
    """Boxes of a tile with its halo, of a chunk's channels."""
    product = tiling.product
    box = Box(sizes=(product.channels, tiling.row_pixels, tiling.rows, 1))
    sizes = (product.sums, product.width.size, product.height.size, product.images)
    return packed_map(product.problem, "y" if product.is_data else "x", sizes, box)


def _filters(product: SwappedHaloProduct) -> TensorMap:
    """Boxes of one tap: 64 filters by channels, or, of backward data, 64 columns of rows of filters."""
    problem = product.problem
    box = Box(sizes=(64, 1, product.channels) if product.is_data else (product.channels, 1, 64))
    return packed_map(problem, "w", (problem.c, product.taps, problem.k), box)


def _results(tiling: SwappedHaloTiling, buffer: str) -> tuple[TensorMap]:
    """Boxes of a tile of the output, or of what is laid out as that."""
    product = tiling.product
    if product.has_nchw_output:
        planes = Box(sizes=(tiling.tile_w, tiling.tile_h, product.out_channels, 1))
        sizes = (product.width.outputs, product.height.outputs, product.results, product.images)
        return (replace(packed_map(product.problem, buffer, sizes, planes), swizzle_bytes=0),)
    box = Box(sizes=(product.out_channels, tiling.tile_w, tiling.tile_h, 1))
    sizes = (product.results, product.width.outputs, product.height.outputs, product.images)
    return (packed_map(product.problem, buffer, sizes, box),)


def _defines(tiling: SwappedHaloTiling) -> tuple[tuple[str, str | int], ...]:
    product = tiling.product
    return (
        ("ELEMENT", product.problem.x.dtype.value),
        ("DATA", int(product.is_data)),
        ("FILTER_H", product.height.taps),
        ("FILTER_W", product.width.taps),
        ("DILATION_H", product.height.dilation),
        ("DILATION_W", product.width.dilation),
        ("TILE_H", tiling.tile_h),
        ("TILE_W", tiling.tile_w),
        ("TILE_N", tiling.tile_n),
        ("CHANNELS", product.channels),
        ("CHUNKS", product.chunks),
        ("LAST_K_STEPS", product.last_k_steps),
        ("OUT_CHANNELS", product.out_channels),
        ("ROWS_ARE_IMAGES", int(product.rows_are_images)),
        ("UNIT_BLOCKS", tiling.unit_blocks),
        ("CONSUMERS", tiling.consumers),
        ("SLOTS", tiling.slots),
        ("FILTER_STAGES", tiling.filter_stages),
        ("SHARED_BYTES", tiling.shared_bytes),
        SHAPE.define,
    )


def _shape(tiling: SwappedHaloTiling) -> Struct:
    product, (row_tiles, column_tiles) = tiling.product, tiling.tiles
    return SHAPE(
        parts=divide_by(tiling.parts),
        column_tiles=divide_by(column_tiles),
        row_tiles=divide_by(row_tiles),
        units=tiling.units,
        pad_h=product.height.pad,
        pad_w=product.width.pad,
        filters=product.results,
    )


SOLVERS = (ConvImplicitGemmHaloSwapped(), ConvImplicitGemmHaloSwappedPlanes())
