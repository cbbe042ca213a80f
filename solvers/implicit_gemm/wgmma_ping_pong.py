"""ConvImplicitGemmPingPong: a matrix product whose results are written while the next tile is multiplied.

Kernel: kernels_src/implicit_gemm/wgmma_ping_pong.cu.
"""

from __future__ import annotations

import functools

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.columns import ConfigTable
from miofind.solver.epilogue import epilogue_defines
from miofind.solver.solver import APPLICABLE, OF_IMAGES, Algorithm, Applicability, KernelKey
from miofind.solver.steps import Box, Config, ConvSolution, Im2col, KernelStep, TensorMap
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.copies import packed_map, pixels_map, refuse_copies
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.wgmma_product import NchwTensors, Phase, WgmmaProduct
from miofind.solvers.implicit_gemm.tile_scheduler import (
    MAX_PHASES,
    NO_PHASE_AXIS,
    PHASE_AXIS,
    PIXEL_WALK,
    TILE_GRID,
    phase_axes,
    pixel_walk,
)
from miofind.solvers.implicit_gemm.wgmma_ping_pong_tiling import (
    PARAMETERS,
    STAGED_PIXELS,
    THREADS,
    UNIT,
    PingPongProduct,
    PingPongTiling,
    short_list,
)
from miofind.solvers.implicit_gemm.wgmma_shared import TiledSolver, epilogue_maps

_SOURCE = "implicit_gemm/wgmma_ping_pong.cu"
_MAX_DATA_STRIDE = 2

PHASE = StructType("Phase", h=PHASE_AXIS, w=PHASE_AXIS)
_NO_PHASE = PHASE(h=NO_PHASE_AXIS, w=NO_PHASE_AXIS)
SHAPE = StructType(
    "Shape",
    walk=PIXEL_WALK,
    filter_tiles=DIVISOR,
    image_pixels=DIVISOR,
    phase_step=DIVISOR,
    phases=(PHASE, MAX_PHASES),
    tiles="int32",
    tap_step_h="int32",
    tap_step_w="int32",
    filter_w="int32",
    chunks="int32",
    filters="int32",
    images="int32",
)
"""All numbers of a launch; the kernel's source says what each is."""


class ConvImplicitGemmPingPong(TiledSolver):
    """Implicit GEMM by wgmma and TMA whose operand of filters is A, and of pixels is B: two warpgroups take turns, so
    that one writes results while the other multiplies.

    Serves tensors of 16 bits in one and two dimensions, of one group; channels and filters are multiples of 8. Channels
    last: forward with strides up to 8, and backward data with strides of 1 and 2 that divide its sizes; padding and
    filters reach up to 127 pixels beyond an image; with channel_bias images have multiples of 16 pixels. Where images
    have multiples of 64 pixels the output may be channels first, but for strided backward data. All channels first: one
    tap, stride 1 and no padding, and images of multiples of 8 pixels. Accumulators are float32.
    Padding is multiplied as zeros: an infinity or NaN of the filter spreads to outputs at the border. Strided backward
    data is cut into phases, pixels of dx that meet the same taps, which are stored a stride apart.

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
            layouts=frozenset({Layout.NWC, Layout.NHWC, Layout.NCW, Layout.NCHW}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    alignment_bytes = 16
    sources = (_SOURCE,)
    nchw = frozenset({NchwTensors.NONE, NchwTensors.OUTPUT, NchwTensors.ALL})
    parameters = PARAMETERS
    defaults = 6
    none_valid = "needs three stages in a block's shared memory, and fewer than 2^31 k-tiles a block"

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "layout": Layout.NHWC, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, brain, last, first = Direction.BACKWARD_DATA, DataType.BFLOAT16, Layout.NHWC, Layout.NCHW
        y_first, x_first = {"x": last, "w": last, "y": first}, {"x": first, "w": last, "y": last}
        return (
            conv(x=(2, 64, 14, 28), w=(128, 64, 1, 1)),
            conv(x=(3, 200, 9, 11), w=(192, 200, 1, 1), dtype=brain),
            conv(x=(2, 16, 10, 11), w=(24, 16, 1, 1), padding=1),
            conv(x=(3, 72, 15, 9), w=(40, 72, 3, 2), padding=((1, 2), (0, 1)), stride=2, dtype=brain),
            conv(x=(2, 32, 19, 14), w=(72, 32, 3, 5), padding=(1, 2), dilation=(2, 1), stride=(1, 3)),
            conv(data, x=(2, 72, 12, 11), w=(136, 72, 5, 3), padding=(2, 1)),
            conv(data, x=(2, 64, 12, 20), w=(64, 64, 1, 1), dtype=brain),
            conv(data, x=(3, 64, 16, 20), w=(128, 64, 2, 2), stride=2),
            conv(data, x=(2, 40, 14, 18), w=(72, 40, 3, 3), padding=1, stride=2, dtype=brain),
            conv(x=(2, 64, 14, 14), w=(256, 64, 3, 3), padding=1, stride=2, epilogue="bias.residual.relu"),
            conv(x=(2, 96, 9, 20), w=(80, 96, 1, 1), dtype=brain, epilogue="float32.scale.bias.silu.residual"),
            conv(x=(5, 32, 4, 4), w=(32, 32, 3, 3), padding=1, epilogue="channel_bias.residual.leaky_relu"),
            conv(data, x=(2, 256, 12, 11), w=(136, 256, 1, 1), epilogue="residual.drelu"),
            conv(data, x=(2, 128, 7, 9), w=(64, 128, 3, 3), padding=1, epilogue="dsilu"),
            conv(data, x=(2, 64, 14, 14), w=(64, 64, 1, 1), stride=2, epilogue="residual.drelu"),
            conv(x=(3, 40, 70), w=(72, 40, 3), padding=1, stride=2, layout=Layout.NWC, epilogue="bias.gelu_tanh"),
            conv(x=(2, 64, 14, 28), w=(136, 64, 1, 1), layout=first),
            conv(data, x=(3, 40, 16, 13), w=(96, 40, 1, 1), layout=first, dtype=brain),
            conv(x=(3, 32, 8, 11), w=(32, 32, 1, 1), layout=first, epilogue="channel_bias.residual.relu"),
            conv(data, x=(2, 136, 8, 24), w=(64, 136, 1, 1), layout=first, epilogue="residual.drelu"),
            conv(x=(2, 40, 8, 24), w=(72, 40, 3, 3), padding=1, layout=y_first, epilogue="bias.residual.relu"),
            conv(data, x=(2, 24, 16, 8), w=(40, 24, 3, 2), padding=1, layout=x_first, dtype=brain),
            conv(x=(3, 200, 72), w=(16, 200, 1), layout=Layout.NCW, dtype=brain, epilogue="scale.bias.silu"),
        )

    def refuse(self, problem: ProblemDescription) -> Applicability:
        product = WgmmaProduct.of(problem)
        if product.nchw is NchwTensors.ALL:
            return _refuse_channels_first(product)
        if product.nchw is NchwTensors.OUTPUT and (answer := _refuse_results_first(product)).refused:
            return answer
        if problem.direction is Direction.BACKWARD_DATA and (answer := _refuse_strides(problem)).refused:
            return answer
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
                _pixels(tiling),
                _filters(tiling),
                *_results(tiling, problem.direction.output),
                _shape(tiling),
                *epilogue_maps(problem, functools.partial(_results, tiling)),
            ),
        )
        return ConvSolution(steps=(step,))


def _pixels(tiling: PingPongTiling) -> TensorMap:
    """A tile's pixels of a chunk of channels; channels first, a unit of them."""
    product = tiling.product
    if product.product.has_nchw_n:
        return _units(product, product.product.pixels, product.sums, product.channels)
    return pixels_map(product.product, product.channels, tiling.tile_n, boxes=product.is_ordered)


def _units(product: PingPongProduct, buffer: str, channels: int, copied: int) -> TensorMap:
    """The map of a tensor with channels first, of which a copy takes a unit of pixels of `copied` channels."""
    sizes = (product.product.image, channels, product.problem.n)
    return packed_map(product.problem, buffer, sizes, Box(sizes=(UNIT, copied, 1)))


def _filters(tiling: PingPongTiling) -> TensorMap:
    """A tile's filters of one tap; of backward data 64 columns of rows of filters."""
    product = tiling.product
    problem, channels = product.problem, product.channels
    box = (64, 1, channels) if product.is_data else (channels, 1, 64 * tiling.rows)
    return packed_map(problem, "w", (problem.c, product.taps, problem.k), Box(sizes=box))


def _results(tiling: PingPongTiling, buffer: str) -> tuple[TensorMap, ...]:
    """A tile of the output, of `out_channels`, or of what is laid out as that; of each phase, if there are several.

    Channels first, a unit.
    """
    if tiling.product.has_nchw_output:
        return (_units(tiling.product, buffer, tiling.product.results, tiling.product.out_channels),)
    if tiling.product.phases > 1:
        phases = tiling.product.product.phases
        return tuple(_phase_results(tiling, buffer, phases[i % len(phases)]) for i in range(MAX_PHASES))
    product = tiling.product
    box = Box(sizes=(product.out_channels, 1, tiling.tile_n))
    return (packed_map(product.problem, buffer, (product.results, 1, product.pixels), box),)


def _phase_results(tiling: PingPongTiling, buffer: str, phase: Phase) -> TensorMap:
    """A tile of a phase's pixels, which are a stride apart and end inside the tensor."""
    product = tiling.product.product
    (height, width), (stride_h, stride_w) = product.problem.spatial, product.problem.conv.stride
    at_h, at_w = product.phase_axes[0][phase.row].at, product.phase_axes[1][phase.column].at
    walk = Im2col(
        lower=(at_w, at_h),
        upper=(at_w + 1 - stride_w, at_h + 1 - stride_h),
        strides=(stride_w, stride_h),
        channels=tiling.product.out_channels,
        pixels=tiling.tile_n,
    )
    return packed_map(product.problem, buffer, (tiling.product.results, width, height, product.problem.n), walk)


def _refuse_channels_first(product: WgmmaProduct) -> Applicability:
    """Why a product is not served with channels first; APPLICABLE if it is."""
    if not product.is_pointwise:
        return Applicability("with channels first serves one tap, stride 1 and no padding")
    if product.image % 8:
        return Applicability(
            f"copies 16 bytes: {product.image} pixels of an image with channels first are no multiple of 8"
        )
    return APPLICABLE


def _refuse_results_first(product: WgmmaProduct) -> Applicability:
    """Why results alone are not stored with channels first; APPLICABLE if they are."""
    if product.is_strided:
        return Applicability("with the output alone channels first serves backward data of stride 1")
    if product.image % UNIT:
        return Applicability(
            f"stores {UNIT} pixels of a channel at a time: {product.image} of an image are no multiple"
        )
    return APPLICABLE


def _refuse_strides(problem: ProblemDescription) -> Applicability:
    """Why pixels of dx are not stored phase by phase; APPLICABLE if they are.

    Stores in im2col mode must not leave the tensor: all phases have as many pixels.
    """
    strides = problem.conv.stride
    if max(strides) > _MAX_DATA_STRIDE:
        return Applicability(f"backward data needs strides of at most {_MAX_DATA_STRIDE}, not {strides}")
    if any(size % stride for size, stride in zip(problem.spatial, strides, strict=True)):
        return Applicability(f"backward data needs sizes that are multiples of its strides: {problem.spatial}")
    return APPLICABLE


def _defines(tiling: PingPongTiling) -> tuple[tuple[str, str | int], ...]:
    product = tiling.product
    return (
        ("ELEMENT", product.problem.x.dtype.value),
        ("DATA", int(product.is_data)),
        ("NCHW", product.product.nchw.value),
        ("ORDERED", int(product.is_ordered)),
        ("PHASES", product.phases),
        ("PHASES_IN_TURN", int(tiling.phases_in_turn)),
        ("ROWS", tiling.rows),
        ("TILE_N", tiling.tile_n),
        ("CHANNELS", product.channels),
        ("LAST_K_STEPS", product.last_k_steps),
        ("OUT_CHANNELS", product.out_channels),
        ("STAGES", tiling.stages),
        ("KEPT_TILES", tiling.kept_tiles),
        ("OUT_STAGES", tiling.out_stages),
        ("SHARED_BYTES", tiling.shared_bytes),
        *(struct.define for struct in (PIXEL_WALK, TILE_GRID, PHASE_AXIS, PHASE, SHAPE)),  # a header has TILE_GRID
    )


def _shape(tiling: PingPongTiling) -> Struct:
    product = tiling.product
    phases = [PHASE(h=h, w=w) for h, w in (phase_axes(product.product, phase) for phase in product.product.phases)]
    step_h, step_w = product.product.tap_strides
    return SHAPE(
        walk=pixel_walk(product.product, product.product.walked),
        filter_tiles=divide_by(tiling.filter_tiles),
        image_pixels=divide_by(product.image_pixels),
        phase_step=divide_by(product.phases if tiling.phases_in_turn else tiling.pixel_tiles),
        phases=(*phases, *[_NO_PHASE] * (MAX_PHASES - len(phases))),
        tiles=tiling.tiles,
        tap_step_h=step_h,
        tap_step_w=step_w,
        filter_w=product.product.taps[1],
        chunks=product.chunks,
        filters=product.results,
        images=product.problem.n,
    )


SOLVERS = (ConvImplicitGemmPingPong(),)
