"""ConvImplicitGemmPingPong: a matrix product whose results are written while the next tile is multiplied.

Kernel: kernels_src/implicit_gemm/wgmma_ping_pong.cu.
"""

from __future__ import annotations

import functools

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.columns import ConfigTable
from miofind.solver.epilogue import epilogue_defines
from miofind.solver.solver import OF_IMAGES, Algorithm, Applicability, KernelKey
from miofind.solver.steps import Box, Config, ConvSolution, KernelStep, TensorMap
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.copies import packed_map, pixels_map, refuse_copies
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.implicit_gemm.tile_scheduler import PIXEL_WALK, TILE_GRID, pixel_walk
from miofind.solvers.implicit_gemm.wgmma_ping_pong_tiling import (
    PARAMETERS,
    STAGED_PIXELS,
    THREADS,
    PingPongProduct,
    PingPongTiling,
    short_list,
)
from miofind.solvers.implicit_gemm.wgmma_shared import TiledSolver, epilogue_maps

_SOURCE = "implicit_gemm/wgmma_ping_pong.cu"

SHAPE = StructType(
    "Shape",
    walk=PIXEL_WALK,
    filter_tiles=DIVISOR,
    image_pixels=DIVISOR,
    tiles="int32",
    taps_h="int32",
    taps_w="int32",
    chunks="int32",
    filters="int32",
    images="int32",
)
"""All numbers of a launch; the kernel's source says what each is."""


class ConvImplicitGemmPingPong(TiledSolver):
    """Implicit GEMM by wgmma and TMA whose operand of filters is A, and of pixels is B: two warpgroups take turns, so
    that one writes results while the other multiplies.

    Serves channels-last tensors of 16 bits in one and two dimensions, forward with strides up to 8, and backward data
    of stride 1, of one group; channels and filters are multiples of 8, and padding and filters reach up to 127 pixels
    beyond an image; with channel_bias images have multiples of 16 pixels. Accumulators are float32. Padding is
    multiplied as zeros: an infinity or NaN of the filter spreads to outputs at the border.

    Configuration: tiles of `rows` times 64 filters by `tile_n` pixels, counted over all images; `out_stages` for
    results, one for both warpgroups or one each; where `keeps_filters`, all tiles of a block are of the same filters,
    which it loads once. The ring of loads has as many stages as there is room for.

    Source: PTX ISA, wgmma, setmaxnreg and copies in im2col mode; CUTLASS's public description of warp-specialised
    ping-pong kernels.
    """

    id = "ConvImplicitGemmPingPong"
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
    parameters = PARAMETERS
    defaults = 6
    none_valid = "needs three stages in a block's shared memory, and fewer than 2^31 k-tiles a block"

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "layout": Layout.NHWC, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, brain = Direction.BACKWARD_DATA, DataType.BFLOAT16
        return (
            conv(x=(2, 64, 14, 28), w=(128, 64, 1, 1)),
            conv(x=(3, 200, 9, 11), w=(192, 200, 1, 1), dtype=brain),
            conv(x=(2, 16, 10, 11), w=(24, 16, 1, 1), padding=1),
            conv(x=(3, 72, 15, 9), w=(40, 72, 3, 2), padding=((1, 2), (0, 1)), stride=2, dtype=brain),
            conv(x=(2, 32, 19, 14), w=(72, 32, 3, 5), padding=(1, 2), dilation=(2, 1), stride=(1, 3)),
            conv(data, x=(2, 72, 12, 11), w=(136, 72, 5, 3), padding=(2, 1)),
            conv(data, x=(2, 64, 12, 20), w=(64, 64, 1, 1), dtype=brain),
            conv(x=(2, 64, 14, 14), w=(256, 64, 3, 3), padding=1, stride=2, epilogue="bias.residual.relu"),
            conv(x=(2, 96, 9, 20), w=(80, 96, 1, 1), dtype=brain, epilogue="float32.scale.bias.silu.residual"),
            conv(x=(5, 32, 4, 4), w=(32, 32, 3, 3), padding=1, epilogue="channel_bias.residual.leaky_relu"),
            conv(data, x=(2, 256, 12, 11), w=(136, 256, 1, 1), epilogue="residual.drelu"),
            conv(data, x=(2, 128, 7, 9), w=(64, 128, 3, 3), padding=1, epilogue="dsilu"),
            conv(x=(3, 40, 70), w=(72, 40, 3), padding=1, stride=2, layout=Layout.NWC, epilogue="bias.gelu_tanh"),
        )

    def refuse(self, problem: ProblemDescription) -> Applicability:
        conv = problem.conv
        if problem.direction is Direction.BACKWARD_DATA and any(stride != 1 for stride in conv.stride):
            return Applicability(f"backward data needs stride 1, not {conv.stride}")
        product = WgmmaProduct.of(problem)
        if problem.epilogue.channel_bias and product.image % STAGED_PIXELS:
            return Applicability(
                f"finishes {STAGED_PIXELS} pixels of an image at a time: {product.image} are no multiple"
            )
        return refuse_copies(product)

    def tiling(self, problem: ProblemDescription, device: Device, config: Config) -> PingPongTiling:
        return PingPongTiling.of(PingPongProduct.of(problem), config, device)

    def short_list(self, problem: ProblemDescription) -> ConfigTable:
        return short_list()

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = self.tiling(problem, device, config)
        step = KernelStep(
            source=_SOURCE,
            entry="implicit_gemm_wgmma_ping_pong",
            grid=(tiling.blocks, 1, 1),
            block=(THREADS, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=(*_defines(tiling), *epilogue_defines(problem)),
            args=(
                pixels_map(tiling.product.product, tiling.product.channels, tiling.tile_n),
                _filters(tiling),
                _results(tiling, problem.direction.output),
                _shape(tiling),
                *epilogue_maps(problem, functools.partial(_results, tiling)),
            ),
        )
        return ConvSolution(steps=(step,))


def _filters(tiling: PingPongTiling) -> TensorMap:
    """A tile's filters of one tap; of backward data 64 columns of rows of filters."""
    product = tiling.product
    problem, channels = product.problem, product.channels
    box = (64, 1, channels) if product.is_data else (channels, 1, 64 * tiling.rows)
    return packed_map(problem, "w", (problem.c, product.taps, problem.k), Box(sizes=box))


def _results(tiling: PingPongTiling, buffer: str) -> TensorMap:
    """A tile of the output, of `out_channels`, or of what is laid out as that."""
    product = tiling.product
    box = Box(sizes=(product.out_channels, 1, tiling.tile_n))
    return packed_map(product.problem, buffer, (product.results, 1, product.pixels), box)


def _defines(tiling: PingPongTiling) -> tuple[tuple[str, str | int], ...]:
    product = tiling.product
    return (
        ("ELEMENT", product.problem.x.dtype.value),
        ("DATA", int(product.is_data)),
        ("POINTWISE", int(product.product.is_pointwise)),
        ("ROWS", tiling.rows),
        ("TILE_N", tiling.tile_n),
        ("CHANNELS", product.channels),
        ("LAST_K_STEPS", product.last_k_steps),
        ("OUT_CHANNELS", product.out_channels),
        ("STAGES", tiling.stages),
        ("KEPT_TILES", tiling.kept_tiles),
        ("OUT_STAGES", tiling.out_stages),
        ("SHARED_BYTES", tiling.shared_bytes),
        *(struct.define for struct in (PIXEL_WALK, TILE_GRID, SHAPE)),  # TILE_GRID is the walk's header's
    )


def _shape(tiling: PingPongTiling) -> Struct:
    product = tiling.product
    taps_h, taps_w = product.product.taps
    return SHAPE(
        walk=pixel_walk(product.product, product.product.walked),
        filter_tiles=divide_by(tiling.filter_tiles),
        image_pixels=divide_by(product.product.image),
        tiles=tiling.tiles,
        taps_h=taps_h,
        taps_w=taps_w,
        chunks=product.chunks,
        filters=product.results,
        images=product.problem.n,
    )


SOLVERS = (ConvImplicitGemmPingPong(),)
