"""What solvers share that multiply on Hopper's tensor cores what TMA loads in im2col mode: steps, tilings, refusals.

Kernel: kernels_src/implicit_gemm/wgmma.cu, and wgmma_volume.cu of three dimensions. TMA loads channels-last pixels in
im2col mode, so that no columns are laid out in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from miofind.core.epilogue import EPILOGUE_TENSORS
from miofind.core.problem import DataType, Direction, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import (
    Box,
    Config,
    ConfigValue,
    ConvSolution,
    EpilogueArgument,
    Im2col,
    KernelStep,
    Pointer,
    Region,
    TensorMap,
    WorkspacePlan,
    int32s,
)
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.copies import packed_map, pixels_map, refuse_copies
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.limits import refuse_mixed_dtypes
from miofind.solvers.common.split_k import RESULT_ORDER, SplitK
from miofind.solvers.common.statistics import PARTIAL_STATISTICS, partial_statistics, with_statistics
from miofind.solvers.common.wgmma_product import SWIZZLES_BYTES, NchwTensors, Phase, WgmmaProduct
from miofind.solvers.implicit_gemm.tile_scheduler import (
    MAX_PHASES,
    NO_PHASE_AXIS,
    PHASE_AXIS,
    PIXEL_WALK,
    TILE_GRID,
    phase_axes,
    phase_axis,
    pixel_walk,
)
from miofind.solvers.implicit_gemm.transpose import Transposition, transpose_step
from miofind.solvers.implicit_gemm.wgmma_cost import estimate_ms
from miofind.solvers.implicit_gemm.wgmma_shortlist import CLUSTER_SPLITS, SPLITS, STAGES, WIDTHS, short_list, varied
from miofind.solvers.implicit_gemm.wgmma_tiling import WGMMA_M, WgmmaTiling

SOURCES = {2: "implicit_gemm/wgmma.cu", 3: "implicit_gemm/wgmma_volume.cu"}
"""Where the kernels are, by the problem's spatial dimensions; one dimension is lifted to two."""

_FILTERS = "filters"
_PARTIAL_BIAS_GRADIENT = "partial bias gradient"
_FILTERS_OF_BLOCK = 32  # whose bias gradient a block of the reduction adds, as in the kernel
_MAX_INT = 2**31 - 1
_SHARED_BYTES = 227 << 10
_MAX_DATA_STRIDE = 2
_DEFAULTS = 8
_KINDS = {Direction.FORWARD: "FORWARD", Direction.BACKWARD_DATA: "DATA", Direction.BACKWARD_WEIGHTS: "WEIGHTS"}

PHASE = StructType("Phase", h=PHASE_AXIS, w=PHASE_AXIS, log2_cluster_k="int32")
_NO_PHASE = PHASE(h=NO_PHASE_AXIS, w=NO_PHASE_AXIS, log2_cluster_k=0)
PHASE_OF_VOLUME = StructType("Phase", d=PHASE_AXIS, h=PHASE_AXIS, w=PHASE_AXIS, log2_cluster_k="int32")
_NO_PHASE_OF_VOLUME = PHASE_OF_VOLUME(d=NO_PHASE_AXIS, h=NO_PHASE_AXIS, w=NO_PHASE_AXIS, log2_cluster_k=0)
_MAX_PHASES_OF_VOLUME = 8
VOLUME = StructType(
    "Volume",
    depth=DIVISOR,
    image=DIVISOR,
    plane_taps_y=DIVISOR,
    stride_d="int32",
    low_d="int32",
    dilation_d="int32",
    tap_stride_d="int32",
    dx_depth="int32",
)
_SHAPE_FIELDS: dict[str, Any] = {
    "walk": PIXEL_WALK,
    "grid": TILE_GRID,
    "size_m": "int32",
    "size_n": "int32",
    "groups": "int32",
    "channels": "int32",
    "taps_y": "int32",
    "taps_x": DIVISOR,
    "tap_blocks": DIVISOR,
    "image_pixels": "int32",
    "out_size": "int32",
    "dx_height": "int32",
    "dx_width": "int32",
    "tap_stride_h": "int32",
    "tap_stride_w": "int32",
    "phases": (PHASE, MAX_PHASES),
    "phases_with_taps": "int32",
    "phase_count": "int32",
}
SHAPE = StructType("Shape", **_SHAPE_FIELDS)
"""All numbers of a launch; kernels_src/implicit_gemm/wgmma_tiling.cuh says what each is."""
SHAPE_OF_VOLUME = StructType(
    "Shape", **_SHAPE_FIELDS | {"phases": (PHASE_OF_VOLUME, _MAX_PHASES_OF_VOLUME)}, volume=VOLUME
)
"""The same for three dimensions."""


def _map(
    product: WgmmaProduct, buffer: str, sizes: Sequence[int], copy: Box | Im2col, *, loads: bool = True
) -> TensorMap:
    return packed_map(product.problem, buffer, sizes, copy, loads=loads)


def _pixels(tiling: WgmmaTiling) -> TensorMap:
    """Tensor map of the operand of pixels."""
    product, tile = tiling.product, tiling.tile
    if product.has_nchw_n:
        return _nchw_map(product, product.pixels, tile.block_n, tile.k)
    if product.has_nchw_k:
        return _nchw_map(product, product.pixels, tile.k, tile.n)
    if product.is_weights:
        wide, count = tile.block_n, tile.k // tiling.cluster_m
    else:
        wide, count = tile.k, (tile.n if tile.has_pixels_as_n else tile.m // tiling.cluster_n)
    return pixels_map(product, wide, count, boxes=product.is_pointwise)


def _nchw_map(product: WgmmaProduct, buffer: str, pixels: int, channels: int, *, loads: bool = True) -> TensorMap:
    """Tensor map of an NCHW tensor, in boxes of pixels of one image by channels."""
    tensor = product.problem.tensor(buffer)
    sizes = (math.prod(tensor.shape[2:]), tensor.shape[1], tensor.shape[0])
    return _map(product, buffer, sizes, Box(sizes=(pixels, channels, 1)), loads=loads)


def _maps(tiling: WgmmaTiling) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Tensor maps of A, B and the output."""
    product, tile = tiling.product, tiling.tile
    problem, groups, taps = product.problem, product.problem.groups, math.prod(product.taps)
    c, k = problem.c // groups, problem.k // groups
    in_images = product.image * problem.n
    pixels, across = _pixels(tiling), tile.has_pixels_as_n
    out = Box(sizes=(WGMMA_M if tile.swapped else tile.block_n, 1, WGMMA_M))
    if product.is_weights:
        if product.nchw is NchwTensors.NONE:
            rows = _map(product, "y", (k, groups, in_images), Box(sizes=(WGMMA_M, 1, tile.k // tiling.cluster_n)))
        else:
            rows = _nchw_map(product, "y", tile.k, tile.m)
        return rows, pixels, _map(product, "w", (c, taps, problem.k), out, loads=False)
    if product.has_k_major_filters:
        box = Box(sizes=(tile.k, 1, tile.m if across else tile.n // tiling.cluster_m))
    else:
        box = Box(sizes=(WGMMA_M if across else tile.block_n, 1, tile.k // tiling.cluster_m))
    if product.transposes_filters:
        tile_k, _, length = box.sizes
        filters = _map(product, _FILTERS, (k, c, groups * taps), Box(sizes=(tile_k, length, 1)))
    else:
        filters = _map(product, "w", (c, taps, problem.k), box)
    if product.has_nchw_n:
        target = _nchw_map(product, problem.direction.output, tile.block_n, WGMMA_M, loads=False)
    elif product.nchw is NchwTensors.OUTPUT:
        target = filters  # threads store, not copies
    else:
        results = k if problem.direction is Direction.FORWARD else c
        target = _map(product, problem.direction.output, (results, groups, in_images), out, loads=False)
    return (filters, pixels, target) if across else (pixels, filters, target)


def _phases(tiling: WgmmaTiling) -> tuple[Struct, ...]:
    """The phases by their rank; zeros, which no kernel reads, beyond the last."""
    product = tiling.product
    most, nothing = (_MAX_PHASES_OF_VOLUME, _NO_PHASE_OF_VOLUME) if product.is_volume else (MAX_PHASES, _NO_PHASE)
    clusters_k = (*tiling.phase_cluster_k, *(1 for _ in product.phases))
    found = [_phase(product, phase, cluster_k) for phase, cluster_k in zip(product.phases, clusters_k, strict=False)]
    return (*found, *[nothing] * (most - len(found)))


def _phase(product: WgmmaProduct, phase: Phase, cluster_k: int) -> Struct:
    h, w = phase_axes(product, phase)
    log2_cluster_k = cluster_k.bit_length() - 1
    if not product.is_volume:
        return PHASE(h=h, w=w, log2_cluster_k=log2_cluster_k)
    return PHASE_OF_VOLUME(d=phase_axis(product.depth_axes[phase.plane]), h=h, w=w, log2_cluster_k=log2_cluster_k)


def _grid(tiling: WgmmaTiling) -> Struct:
    tiles_m, tiles_n = tiling.tiles
    return TILE_GRID(
        tiles_m=divide_by(tiles_m),
        tiles_n=divide_by(tiles_n),
        splits=divide_by(tiling.splits * tiling.cluster_k),
        k_tiles=tiling.grid.k_tiles,
        work_tiles=tiling.work_tiles,
    )


def _shape(tiling: WgmmaTiling) -> Struct:
    product, problem = tiling.product, tiling.product.problem
    *_, height, width = problem.spatial
    *_, tap_stride_h, tap_stride_w = product.tap_strides
    shape, more = (SHAPE_OF_VOLUME, {"volume": _volume(product)}) if product.is_volume else (SHAPE, {})
    return shape(
        walk=pixel_walk(product, tiling.grid.walked),
        grid=_grid(tiling),
        size_m=tiling.grid.size_m,
        size_n=tiling.grid.size_n,
        groups=problem.groups,
        channels=product.channels,
        taps_y=product.taps[0],
        taps_x=divide_by(product.taps[1]),
        tap_blocks=divide_by(tiling.grid.tap_blocks),
        image_pixels=product.image,
        out_size=problem.output.size,
        dx_height=height,
        dx_width=width,
        tap_stride_h=tap_stride_h,
        tap_stride_w=tap_stride_w,
        phases=_phases(tiling),
        phases_with_taps=len(tiling.phase_cluster_k),
        phase_count=len(product.phases),
        **more,
    )


def _volume(product: WgmmaProduct) -> Struct:
    """What the walk over a volume's planes, and over its filter's, does not know."""
    problem = product.problem
    is_data = problem.direction is Direction.BACKWARD_DATA
    stride, dx_depth = problem.conv.stride[0], problem.spatial[0]
    return VOLUME(
        depth=divide_by(ceil_div(dx_depth, stride) if is_data else problem.out_spatial[0]),
        image=divide_by(product.image),
        plane_taps_y=divide_by(problem.filter[1]),
        stride_d=stride,
        low_d=product.low[0],
        dilation_d=product.dilation[0],
        tap_stride_d=product.tap_strides[0],
        dx_depth=dx_depth,
    )


def _multiply(tiling: WgmmaTiling, device: Device) -> KernelStep:
    blocks = tiling.cluster_blocks
    clusters = tiling.work_tiles  # cluster split-K takes one work tile a cluster
    if tiling.cluster_k == 1:
        clusters = min(clusters, max(1, device.sm_count * tiling.blocks // blocks))
    return KernelStep(
        source=SOURCES[tiling.product.problem.spatial_dims],
        entry="implicit_gemm_wgmma",
        grid=(clusters * blocks, 1, 1),
        block=(tiling.tile.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(tiling),
        args=(
            *_maps(tiling),
            Pointer(buffer=_split_k(tiling).target),
            _shape(tiling),
            *_epilogue(tiling),
        ),
        pdl=True,
    )


def _split_k(tiling: WgmmaTiling) -> SplitK:
    return SplitK.of(tiling.product.problem, tiling.splits)


def _workspace(tiling: WgmmaTiling) -> WorkspacePlan:
    """Filters that are turned, and the partials of split sums; not those of statistics."""
    problem, regions = tiling.product.problem, []
    if tiling.product.transposes_filters:
        regions.append(Region(name=_FILTERS, bytes=problem.w.bytes))
    if tiling.splits > 1:
        regions.append(_split_k(tiling).partials)
        if problem.epilogue.bias_gradient:
            regions.append(Region(name=_PARTIAL_BIAS_GRADIENT, bytes=4 * tiling.splits * problem.k))
    return WorkspacePlan(tuple(regions))


def _transposition(tiling: WgmmaTiling) -> Transposition:
    """The filter made K-major: for each group (k, taps c) to (taps c, k)."""
    product = tiling.product
    problem, channels = product.problem, product.problem.c // product.problem.groups
    return Transposition(
        source="w",
        target=_FILTERS,
        dtype=problem.w.dtype,
        batch=problem.groups,
        rows=problem.k // problem.groups,
        columns=math.prod(product.taps) * channels,
    )


def _defines(tiling: WgmmaTiling) -> tuple[tuple[str, str | int], ...]:
    product, tile = tiling.product, tiling.tile
    return (
        ("ELEMENT", product.problem.x.dtype.value),
        ("KIND", _KINDS[product.problem.direction]),
        ("TILE_N", tile.n),
        ("TILE_K", tile.k),
        ("BLOCK_N", tile.block_n),
        ("STAGES", tiling.stages),
        ("CONSUMERS", tile.consumers),
        ("ROWS", tile.row_blocks),
        ("BLOCKS", tiling.blocks),
        ("CLUSTER_M", tiling.cluster_m),
        ("CLUSTER_N", tiling.cluster_n),
        ("CLUSTER_K", tiling.cluster_k),
        ("SWAPPED", int(tile.swapped)),
        ("POINTWISE", int(product.is_pointwise)),
        ("NCHW", product.nchw.value),
        ("SEGMENT", tiling.segment),
        ("STRIDED", int(product.is_strided)),
        *(struct.define for struct in _structs(product)),
        *_fused_defines(product.problem),
    )


def _structs(product: WgmmaProduct) -> tuple[StructType, ...]:
    """The structures that the kernel declares with fields from here."""
    common = (PIXEL_WALK, TILE_GRID, PHASE_AXIS)
    return (*common, PHASE_OF_VOLUME, VOLUME, SHAPE_OF_VOLUME) if product.is_volume else (*common, PHASE, SHAPE)


def _reduction(tiling: WgmmaTiling, first: KernelStep) -> KernelStep:
    """The step that adds the partials of split-K; a fused one takes where partials of second outputs are, too."""
    split_k, problem = _split_k(tiling), tiling.product.problem
    if problem.epilogue.statistics:
        return split_k.summing_reduction(first, problem, PARTIAL_STATISTICS)
    reduction = split_k.fused_reduction(split_k.vector_reduction(first), problem)
    reduction = replace(reduction, args=(*reduction.args, *_sums(tiling)))
    if not problem.epilogue.bias_gradient:
        return reduction
    blocks, _, _ = reduction.grid
    return replace(
        reduction,
        grid=(blocks + ceil_div(problem.k, _FILTERS_OF_BLOCK), 1, 1),
        args=(*reduction.args, Pointer(buffer="bias_gradient"), *int32s(problem.k)),
    )


def _sums(tiling: WgmmaTiling) -> tuple[Pointer, ...]:
    """Where a fused kernel leaves sums for second outputs; the output, to which it leaves none, without them."""
    problem = tiling.product.problem
    if not problem.epilogue.bias_gradient:
        return partial_statistics(problem)
    return (Pointer(buffer=_PARTIAL_BIAS_GRADIENT if tiling.splits > 1 else "bias_gradient"),)


def _epilogue(tiling: WgmmaTiling) -> tuple[TensorMap | Pointer | EpilogueArgument, ...]:
    """Tensor maps of what is read with the output, statistics and the epilogue; nothing for a bare problem.

    Two maps, laid out as the output: of the residual and of `saved`, of one of them first, else of the output.
    """
    problem = tiling.product.problem
    if not problem.epilogue:
        return ()
    target = _maps(tiling)[2]
    read = [name for name in EPILOGUE_TENSORS if name in problem.epilogue.operands]
    if target.pointer.buffer != problem.direction.output:
        read = []
    maps = [replace(target, pointer=Pointer(buffer=name)) for name in read]
    first, second, *_ = (*maps, target, target)
    return first, second, *_sums(tiling), *epilogue_arguments(problem)


def _fused_defines(problem: ProblemDescription) -> tuple[tuple[str, str | int], ...]:
    return (*epilogue_defines(problem), RESULT_ORDER.define) if problem.epilogue else ()


def _shared_bytes(device: Device) -> int:
    """Of a multiprocessor, for one block."""
    return device.shared_bytes or _SHARED_BYTES


def _refuse_layouts(problem: ProblemDescription) -> Applicability:
    """Why tensors' layouts are not served, or that they are."""
    nchw = NchwTensors.of(problem)
    if nchw is None:
        return Applicability("takes channels-last operands, or channels-first ones for a filter of one tap")
    if nchw is NchwTensors.NONE:
        return APPLICABLE
    if nchw is NchwTensors.OUTPUT:
        is_strided = problem.direction is Direction.BACKWARD_DATA and max(problem.conv.stride) > 1
        return Applicability("writes channels-first results of backward data with stride 1" if is_strided else "")
    product, itemsize = WgmmaProduct.of(problem), problem.x.dtype.itemsize
    if nchw is NchwTensors.A:
        tile_k, image = SWIZZLES_BYTES[0] // itemsize, product.image
        return Applicability(
            f"takes y alone channels first in multiples of {tile_k} pixels, not {image}" if image % tile_k else ""
        )
    if not product.is_pointwise:
        return Applicability("takes channels-first operands for a filter of one tap, stride 1 and no padding")
    if product.image * itemsize % 16:
        return Applicability(f"copies 16 bytes: images of {product.image} elements take no multiple")
    if itemsize > 2 and not product.is_weights:
        return Applicability("takes channels-first operands in 16 bits: TF32 products take no transposed operands")
    return APPLICABLE


@functools.lru_cache(maxsize=16)  # of problems: whether there are tilings is asked before which
def _short_list(problem: ProblemDescription, device: Device) -> WgmmaTiling:
    return short_list(WgmmaProduct.of(problem), device, _shared_bytes(device))


class Im2colWgmmaSolver(Solver):
    """A convolution as a matrix product on wgmma whose pixels TMA loads in im2col mode; its subclasses name layouts.

    Source: NVIDIA CUTLASS, include/cutlass/conv, for im2col copies of each direction; PTX ISA, wgmma.
    """

    algorithm = Algorithm.IMPLICIT_GEMM
    alignment_bytes = 16
    is_dynamic = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "consumers": (1, 2, 3),
        "rows": (1, 2),
        "tile_n": WIDTHS,
        "depth_bytes": tuple(reversed(SWIZZLES_BYTES)),
        "stages": STAGES,
        "splits": (1, *SPLITS),
        "blocks": (1, 2),
        "cluster": ("1x1x1", "2x1x1", "1x2x1", *(f"1x1x{shares}" for shares in CLUSTER_SPLITS)),
        "swapped": (0, 1),
    }

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        if problem.direction is Direction.BACKWARD_DATA:
            return APPLICABLE
        if not problem.epilogue.outputs:
            return super().fuses_training(problem)
        what = "results" if problem.epilogue.statistics else "gradients"
        return Applicability("" if problem.y.dtype.itemsize == 2 else f"sums up 16-bit {what} alone")

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_mixed_dtypes(problem)).refused:
            return answer
        if problem.x.dtype is DataType.FLOAT32:
            if problem.math is not MathMode.TF32:
                return Applicability("multiplies float32 as TF32, which math='tf32' allows")
            if problem.direction is Direction.BACKWARD_WEIGHTS and NchwTensors.of(problem) is not NchwTensors.ALL:
                return Applicability("serves backward weights in 16 bits: TF32 products take no transposed operands")
        c, k = problem.c // problem.groups, problem.k // problem.groups
        unit = 16 // problem.x.dtype.itemsize
        if c % unit or k % unit:
            return Applicability(f"copies 16 bytes: {c} channels or {k} filters a group are no multiple of {unit}")
        conv = problem.conv
        if problem.direction is Direction.BACKWARD_DATA and max(conv.stride) > _MAX_DATA_STRIDE:
            return Applicability(f"backward data is served with strides of 1 and 2, not {conv.stride}")
        if (answer := _refuse_layouts(problem)).refused:
            return answer
        if problem.output.size == 0 or problem.flops == 0:
            return Applicability("has no empty products")
        if max(tensor.size for tensor in (problem.x, problem.w, problem.y)) > _MAX_INT:
            return Applicability(f"counts elements in 32 bits: a tensor has more than {_MAX_INT}")
        product = WgmmaProduct.of(problem)
        if (answer := refuse_copies(product)).refused:
            return answer
        if not len(_short_list(problem, device).stages):
            return Applicability("has groups whose channels or filters fit no tile")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return bool(WgmmaTiling.of(problem, config).is_valid(_shared_bytes(device)))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        likely = _short_list(problem, device)
        times = estimate_ms(likely, device)
        ranked = np.argsort(times, kind="stable")
        tile = likely.tile
        tiles = zip(*(column[ranked].tolist() for column in (tile.m, tile.n, tile.swapped)), strict=True)
        best = ranked[varied(tiles, _DEFAULTS)]
        return tuple(map(EstimatedConfig, likely.configs(best), times[best].tolist()))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return float(estimate_ms(WgmmaTiling.of(problem, config), device))

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        if problem.epilogue.statistics:  # whose partials their steps bring
            return super().workspace_bytes(problem, device, config)
        return _workspace(WgmmaTiling.of(problem, config)).bytes

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = WgmmaTiling.of(problem, config)
        multiply = _multiply(tiling, device)
        steps = [multiply]
        if tiling.product.transposes_filters:
            steps.insert(0, transpose_step((_transposition(tiling),)))
        if tiling.splits > 1:
            steps.append(_reduction(tiling, multiply))
        solution = ConvSolution(steps=tuple(steps), workspace=_workspace(tiling))
        return with_statistics(solution, problem, tiling.summed_parts)
