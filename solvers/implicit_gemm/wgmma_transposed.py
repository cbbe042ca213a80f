"""ConvImplicitGemmWgmmaTurned: backward weights of float32 as TF32 on Hopper's tensor cores, channels last.

Kernel: kernels_src/implicit_gemm/wgmma_transposed.cu, which transposes dy in shared memory. ConvImplicitGemmWgmma
serves other types and directions.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import (
    APPLICABLE,
    OF_WEIGHTS,
    Algorithm,
    Applicability,
    EstimatedConfig,
    KernelKey,
    Solver,
    first_refusal,
)
from miofind.solver.steps import (
    Box,
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
    TensorMap,
)
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.copies import packed_map, pixels_map, refuse_copies
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.limits import refuse_mixed, refuse_oversized
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.implicit_gemm.tile_scheduler import PIXEL_WALK, TILE_GRID, pixel_walk
from miofind.solvers.implicit_gemm.wgmma_transposed_tiling import (
    BLOCK,
    CLUSTER_SPLITS,
    SPLITS,
    TILE_K,
    WIDTHS,
    TransposedTiling,
    estimate_ms,
    short_list,
)

_SOURCE = "implicit_gemm/wgmma_transposed.cu"
_SHARED_BYTES = 227 << 10
_DEFAULTS, _ALIKE = 8, 2
_VECTOR = 4  # elements of 16 bytes, which copies move

SHAPE = StructType(
    "Shape",
    walk=PIXEL_WALK,
    grid=TILE_GRID,
    filters="int32",
    channels="int32",
    taps="int32",
    taps_x=DIVISOR,
    tap_blocks=DIVISOR,
    out_size="int32",
)
"""All numbers of a launch; filters and channels of one group, `tap_blocks` blocks of 32 channels a tap."""


def _filters(product: WgmmaProduct) -> TensorMap:
    """Map of dy: 32 filters of 32 pixels."""
    problem = product.problem
    sizes = (problem.k // problem.groups, problem.groups, product.image * problem.n)
    return packed_map(problem, "y", sizes, Box(sizes=(BLOCK, 1, TILE_K)))


def _defines(tiling: TransposedTiling, stages: int) -> tuple[tuple[str, str | int], ...]:
    return (
        ("TILE_N", tiling.tile_n),
        ("STAGES", stages),
        ("CONSUMERS", tiling.consumers),
        ("ROWS", tiling.row_blocks),
        ("BLOCKS", tiling.blocks),
        ("CLUSTER_K", tiling.cluster_k),
        ("K_BATCH", tiling.together),
        ("POINTWISE", int(tiling.product.is_pointwise)),
        *(struct.define for struct in (PIXEL_WALK, TILE_GRID, SHAPE)),
    )


def _shape(tiling: TransposedTiling) -> Struct:
    product, (tiles_m, tiles_n) = tiling.product, tiling.tiles
    return SHAPE(
        walk=pixel_walk(product, product.walked),
        grid=TILE_GRID(
            tiles_m=divide_by(tiles_m),
            tiles_n=divide_by(tiles_n),
            splits=divide_by(tiling.splits),
            k_tiles=tiling.k_tiles,
            work_tiles=tiling.work_tiles,
        ),
        filters=tiling.filters,
        channels=product.size_n,
        taps=math.prod(product.taps),
        taps_x=divide_by(product.taps[1]),
        tap_blocks=divide_by(tiling.tap_blocks),
        out_size=product.problem.output.size,
    )


def _multiply(tiling: TransposedTiling, device: Device) -> KernelStep:
    product = tiling.product
    stages = tiling.stages(_shared_bytes(device))
    # Blocks that add what they have take one item each.
    persistent = min(tiling.work_tiles, max(1, device.sm_count) * tiling.blocks)
    blocks = tiling.work_tiles * tiling.cluster_k if tiling.cluster_k > 1 else persistent
    return KernelStep(
        source=_SOURCE,
        entry="implicit_gemm_wgmma_transposed",
        grid=(blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes(stages),
        defines=_defines(tiling, stages),
        args=(
            pixels_map(product, BLOCK, TILE_K, boxes=product.is_pointwise),
            _filters(product),
            Pointer(buffer=_split_k(tiling).target),
            _shape(tiling),
        ),
        pdl=True,
    )


def _split_k(tiling: TransposedTiling) -> SplitK:
    return SplitK.of(tiling.product.problem, tiling.splits)


def _shared_bytes(device: Device) -> int:
    """Of a multiprocessor, for one block."""
    return device.shared_bytes or _SHARED_BYTES


@functools.lru_cache(maxsize=16)  # of problems: whether there are tilings is asked before which
def _short_list(problem: ProblemDescription, device: Device) -> TransposedTiling:
    return short_list(WgmmaProduct.of(problem), device, _shared_bytes(device))


class ConvImplicitGemmWgmmaTurned(Solver):
    """Backward weights of float32 as TF32: a matrix product on wgmma and TMA, NHWC, with float32 accumulators.

    TF32 wgmma takes operands in shared memory K-major only, and K is pixels here: x comes through registers, and dy is
    transposed in shared memory. Channels and filters of a group are multiples of 4. Split-K partials are added in
    order, within a cluster and by a reduction kernel, so equal inputs give equal bits.

    Configuration: `consumers` warpgroups multiply `rows` blocks of 64 channels by `tile_n` filters each; pixels (K) are
    cut into `splits`, each of which `shares` blocks of a cluster split again; a multiprocessor has `blocks` blocks.

    Source: NVIDIA CUTLASS, include/cutlass/conv, for im2col copies; PTX ISA, wgmma.
    """

    id = "ConvImplicitGemmWgmmaTurned"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_WEIGHTS
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT32}),
            layouts=frozenset({Layout.NWC, Layout.NHWC}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    alignment_bytes = 16
    is_dynamic = True
    sources = (_SOURCE,)
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "consumers": (1, 2, 3),
        "rows": (1, 2),
        "tile_n": WIDTHS,
        "splits": SPLITS,
        "shares": CLUSTER_SPLITS,
        "blocks": (1, 2),
    }

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(**values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT32, "math": "tf32", "layout": Layout.NHWC} | values
            return ProblemDescription.convolution(direction=Direction.BACKWARD_WEIGHTS, **given)  # type: ignore[arg-type]

        return (
            conv(x=(2, 64, 14, 14), w=(72, 64, 3, 3), padding=1),
            conv(x=(3, 24, 15, 9), w=(40, 24, 3, 2), padding=((1, 2), (0, 1)), stride=2),
            conv(x=(2, 128, 9, 9), w=(96, 64, 1, 1), groups=2),
            conv(x=(5, 36, 14, 14), w=(20, 36, 3, 3), padding=2, dilation=2),
            conv(x=(3, 260, 12, 11), w=(132, 260, 1, 1)),
            conv(x=(3, 40, 13, 12), w=(104, 20, 5, 3), padding=(4, 1), stride=(1, 2), groups=2),
            conv(x=(4, 64, 70), w=(200, 64, 5), padding=2, layout=Layout.NWC),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if problem.math is not MathMode.TF32:
            return Applicability("multiplies float32 as TF32, which math='tf32' allows")
        c, k = problem.c // problem.groups, problem.k // problem.groups
        if c % _VECTOR or k % _VECTOR:
            return Applicability(f"copies 16 bytes: {c} channels or {k} filters a group are no multiple of {_VECTOR}")
        if problem.output.size == 0 or problem.flops == 0:
            return Applicability("has no empty products")
        if (answer := first_refusal(refuse_mixed(problem), refuse_oversized(problem))).refused:
            return answer
        product = WgmmaProduct.of(problem)
        if (answer := refuse_copies(product)).refused:
            return answer
        if not len(_short_list(problem, device).splits):
            return Applicability("has more tiles or pixels than are counted in 32 bits")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return TransposedTiling.of(WgmmaProduct.of(problem), config).is_valid(_shared_bytes(device))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        likely = _short_list(problem, device)
        times = estimate_ms(likely, device, _shared_bytes(device))
        seen: Counter[tuple[int, int]] = Counter()
        found: list[EstimatedConfig] = []
        for place in np.argsort(times, kind="stable").tolist():
            tile = int(likely.tile_m[place]), int(likely.tile_n[place])
            seen[tile] += 1
            if seen[tile] <= _ALIKE:
                found.append(EstimatedConfig(likely.config(place), float(times[place])))
            if len(found) == _DEFAULTS:
                break
        return tuple(found)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return float(estimate_ms(TransposedTiling.of(WgmmaProduct.of(problem), config), device, _shared_bytes(device)))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = TransposedTiling.of(WgmmaProduct.of(problem), config)
        step = _multiply(tiling, device)
        split_k = _split_k(tiling)
        return split_k.solution(step, split_k.vector_reduction(step, lanes=tiling.lanes(device)))


SOLVERS = (ConvImplicitGemmWgmmaTurned(),)
