"""Which problems products of Fourier transforms serve on GPUs, and by which plans.

A configuration has "tile", "chunk_mib" and "product" of a `FftPlan`, and "planes" for transforms of our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Library, Place
from miofind.solver.geometry import index_bits
from miofind.solver.solver import APPLICABLE, Applicability, KernelKey
from miofind.solver.steps import WorkspacePlan
from miofind.solvers.common.fourier import whole_length
from miofind.solvers.common.overlap import least_products
from miofind.solvers.fft.error import DIRECT_ERROR, LEAST_PRODUCTS
from miofind.solvers.fft.own_blocks import own_height, own_line, own_width
from miofind.solvers.fft.steps import FftPlan

OWN_KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}),
        layouts=frozenset(Layout),
        min_sm=80,
    ),
)
"""What transforms of our own are made for, in all directions."""

CHUNKS_MIB = (16, 64, 256, 1024, 4096)  # the first stays in an L2 cache

_TF32_ERROR = 16.0 * 2**13  # of inputs rounded to TF32, in roundoffs of float32
_LEAST_TAPS = 25
_LEAST_TILE = 2  # times the taps along an axis that is cut
_MOST_WORKSPACE = 64 << 30


def refuse_fft(problem: ProblemDescription) -> Applicability:
    """Why transforms do not serve a problem, whatever the plan; APPLICABLE if they do."""
    if max(problem.conv.dilation) > 1:
        return Applicability("transforms filters without gaps: dilation 1")
    if problem.spatial_dims > 2:
        return Applicability("serves one or two spatial dimensions")
    if math.prod(problem.filter) < _LEAST_TAPS * math.prod(problem.conv.stride):
        return Applicability(f"saves nothing with fewer than {_LEAST_TAPS} taps for each output of stride 1")
    if problem.output.size == 0 or problem.flops == 0:
        return Applicability("has no empty products")
    if index_bits(problem) != 32:
        return Applicability("needs tensors that 32-bit offsets reach")
    if least_products(problem) == 0:
        return Applicability("rounds sums of nothing but padding as it does their neighbours, not to 0")
    least, is_weights = least_products(problem), problem.direction is Direction.BACKWARD_WEIGHTS
    if is_weights and least < LEAST_PRODUCTS:
        return Applicability(f"keeps its error bound in sums of {LEAST_PRODUCTS} products or more, not {least}")
    return APPLICABLE


def is_valid(problem: ProblemDescription, config: Mapping[str, Any]) -> bool:
    """Whether a configuration's tiles serve, its chunks differ from smaller ones, and all is within bounds."""
    if not tile_serves(problem, config["tile"], is_own="planes" in config):
        return False
    plan = FftPlan.of(problem, config)
    if not plan.product.serves(*plan.sizes(plan.at_once)[:2]) or plan.refuse_sizes().refused:
        return False
    if max(least_products(problem), plan.summed_directly) < LEAST_PRODUCTS:
        return False
    if plan.planes and plan.own_block.repeats_fewer_planes:
        return False
    smaller = max((size for size in CHUNKS_MIB if size < config["chunk_mib"]), default=0)
    if smaller and FftPlan.of(problem, {**config, "chunk_mib": smaller}).at_once == plan.at_once:
        return False
    return WorkspacePlan(plan.regions()).bytes <= _MOST_WORKSPACE


def tile_serves(problem: ProblemDescription, tile: int, *, is_own: bool) -> bool:
    """Whether a tile is shorter than some axis and half of it at least is kept, and there are transforms so long."""
    whole = [whole_length(problem, axis) for axis in range(problem.spatial_dims) if problem.filter[axis] > 1]
    taps = [taps for taps in problem.filter if taps > 1]
    if tile and not any(tile < length for length in whole):
        return False
    if tile and any(tile < length and tile < _LEAST_TILE * count for length, count in zip(whole, taps, strict=True)):
        return False
    lengths = [min(tile, length) if tile else length for length in whole]
    fits = (own_height, own_width) if len(lengths) > 1 else (own_line,)
    return not is_own or all(fit(length) > 0 for fit, length in zip(fits, lengths, strict=True))


def error_growth(problem: ProblemDescription, config: Mapping[str, Any]) -> float:
    """Of the error of a result whose own products are the fewest, over direct summation's of the longest sum."""
    plan, length = FftPlan.of(problem, config), problem.reduction_length
    edge = math.sqrt(length / min(length, max(least_products(problem), plan.summed_directly)))
    direct = DIRECT_ERROR * math.sqrt(length) + (_TF32_ERROR if problem.math is MathMode.TF32 else 0.0)
    return max(1.0, edge * plan.error / direct)
