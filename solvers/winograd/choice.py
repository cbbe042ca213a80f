"""Which problems minimal filtering serves on GPUs, and by which plans.

A configuration has "tile", "tiles", "slices" and "vector" of a `WinogradPlan`, unless a solver has one value of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.errors import InvalidConfigError
from miofind.libraries.matmul_choice import check_int
from miofind.solver.geometry import index_bits
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.minimal_filtering import MOST_POINTS
from miofind.solvers.common.overlap import least_products
from miofind.solvers.winograd.steps import WinogradPlan

EXACT_TILE = 2
TILES = (EXACT_TILE, 4, 6)
PLAN_NAMES = frozenset({"tile", "tiles", "slices", "vector"})

_EXACT_POINTS = 3  # 0, 1 and -1: what small integers become is exact
_MOST_TAPS = 5
_LEAST_CHANNELS = 4  # of a group: with fewer, transforms take longer than direct summation
# Errors are those of a whole tile, and the bound is that of an element's own sum: in shorter sums of normal data some
# elements are so much smaller than their tile that they break it. 16 channels leave a factor of two (simulated).
_LEAST_SUMMED = 16
_LEAST_PIXELS = 64
_VECTORS = (1, 2, 4)
_MOST_FLOATS = 72  # of a thread: with more of them too few threads share a multiprocessor
_SLICES = (1, 2, 4, 8, 16, 32)
_LEAST_SLICE = 64  # tiles
_CHUNK_BYTES = (24 << 20, 96 << 20, 384 << 20, 1536 << 20)  # of transformed tiles
_MOST_CHUNKS = 512


@functools.lru_cache(maxsize=16)  # several solvers ask in turn
def refuse_winograd(problem: ProblemDescription) -> Applicability:
    """Why no plan serves a problem; APPLICABLE if one does."""
    conv = problem.conv
    if max((*conv.stride, *conv.dilation)) > 1:
        return Applicability("computes neighbouring outputs from neighbouring inputs: stride and dilation 1")
    if problem.spatial_dims > 2:
        return Applicability("serves one or two spatial dimensions")
    if max(problem.filter) == 1:
        return Applicability("saves nothing with filters of one tap")
    if max(problem.filter) > _MOST_TAPS:
        return Applicability(f"loses too many digits with more than {_MOST_TAPS} taps along an axis")
    if len({problem.x.dtype, problem.w.dtype, problem.y.dtype}) > 1:
        return Applicability("serves tensors of one dtype")
    if min(problem.w.shape[1], problem.k // problem.groups) < _LEAST_CHANNELS:
        return Applicability(f"saves nothing with fewer than {_LEAST_CHANNELS} channels a group")
    return _refuse_sums(problem)


def _refuse_sums(problem: ProblemDescription) -> Applicability:
    if problem.output.size == 0 or problem.flops == 0:
        return Applicability("has no empty products")
    if least_products(problem) == 0:
        return Applicability("rounds sums of nothing but padding as it does their neighbours, not to 0")
    is_weights = problem.direction is Direction.BACKWARD_WEIGHTS
    summed, least = _summed(problem), _LEAST_PIXELS if is_weights else _LEAST_SUMMED
    if summed < least:
        what = "pixels" if is_weights else "channels"
        return Applicability(f"keeps its error bound in sums over {least} {what} or more, not {summed}")
    if index_bits(problem) != 32:
        return Applicability("needs tensors that 32-bit offsets reach")
    if not any(serves(problem, tile) for tile in TILES):
        return Applicability("cannot hold what becomes of float16 in tiles for such filters")
    if next(plans(problem), None) is None:
        return Applicability("needs more workspace than 32-bit offsets reach")
    return APPLICABLE


def _summed(problem: ProblemDescription) -> int:
    """Channels that one result is summed over, not counting taps; for backward weights pixels, at least."""
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        return least_products(problem)
    return problem.reduction_length // math.prod(problem.filter)


def serves(problem: ProblemDescription, tile: int) -> bool:
    """Whether there are points for a tile, and for the smallest such as keep small integers exact.

    Larger tiles' inputs become up to 255 times as large, which float16 cannot hold.
    """
    if tile > EXACT_TILE and problem.x.dtype is DataType.FLOAT16:
        return False
    return tile + max(problem.filter) - 2 <= (_EXACT_POINTS if tile == EXACT_TILE else MOST_POINTS)


def plan_of(problem: ProblemDescription, config: Mapping[str, Any]) -> WinogradPlan:
    """The plan that a configuration names."""
    return WinogradPlan(
        problem=problem.lifted(3),
        tile=int(config["tile"]),
        tiles=int(config["tiles"]),
        slices=int(config["slices"]),
        vector=int(config["vector"]),
    )


def values_of(plan: WinogradPlan) -> dict[str, int]:
    """The part of a configuration that names a plan."""
    return {name: int(getattr(plan, name)) for name in sorted(PLAN_NAMES)}


def check_plan(solver_id: str, problem: ProblemDescription, config: Mapping[str, Any]) -> None:
    """Do nothing for values that name a plan that can run.

    Raises:
        InvalidConfigError: they do not.
    """
    for name, values in (("tile", TILES), ("vector", _VECTORS), ("slices", _SLICES)):
        if type(config[name]) is not int or config[name] not in values:
            raise InvalidConfigError(f"{solver_id}: {name}={config[name]!r} must be one of {list(values)}")
    check_int(solver_id, config, "tiles", 1, 2**30)
    if not serves(problem, config["tile"]):
        raise InvalidConfigError(f"{solver_id}: tile={config['tile']} has no points that serve {problem}")
    if (answer := refuse_plan(plan_of(problem, config))).refused:
        raise InvalidConfigError(f"{solver_id}: {dict(config)} cannot run {problem}: {answer.reason}")


def refuse_plan(plan: WinogradPlan) -> Applicability:
    """Why a plan is out of bounds; APPLICABLE if it is not."""
    if plan.tiles > plan.all_tiles:
        return Applicability(f"{plan.tiles} tiles are more than all {plan.all_tiles}")
    if plan.chunk_count > _MOST_CHUNKS:
        return Applicability(f"takes {plan.chunk_count} chunks, at most {_MOST_CHUNKS} are allowed")
    if plan.slices > 1 and not plan.is_weights:
        return Applicability("only backward weights sums over tiles")
    if plan.slices > 1 and plan.tiles < plan.slices * _LEAST_SLICE:
        return Applicability(f"slices of fewer than {_LEAST_SLICE} tiles save nothing")
    if plan.vector > 1 and plan.floats > _MOST_FLOATS:
        return Applicability(f"a thread would transform {plan.floats} floats, more than {_MOST_FLOATS}")
    if plan.vector not in (1, plan.lanes):
        return Applicability("no tensor has such vectors")
    return plan.refuse_sizes()


def plans(
    problem: ProblemDescription, *, slices_of: Sequence[int] = _SLICES, vectors: Sequence[int] = _VECTORS
) -> Iterator[WinogradPlan]:
    """All plans that can run, of some slices and vectors."""
    lifted = problem.lifted(3)
    if problem.direction is not Direction.BACKWARD_WEIGHTS:  # others are refused
        slices_of = tuple(slices for slices in slices_of if slices == 1)
    if not any(tensor.layout.channels_last for tensor in (problem.x, problem.y)):
        vectors = tuple(vector for vector in vectors if vector == 1)
    for tile in (tile for tile in TILES if serves(problem, tile)):
        for tiles in _chunk_sizes(lifted, tile):
            for slices, vector in itertools.product(slices_of, vectors):
                plan = WinogradPlan(problem=lifted, tile=tile, tiles=tiles, slices=slices, vector=vector)
                if not refuse_plan(plan).refused:
                    yield plan


def _chunk_sizes(lifted: ProblemDescription, tile: int) -> list[int]:
    """Tiles of even chunks whose transformed data have each of some sizes at most."""
    one = WinogradPlan(problem=lifted, tile=tile, tiles=1)
    sizes: dict[int, None] = {}
    for budget in _CHUNK_BYTES:
        most = max(1, budget // (one.transformed_bytes // one.slice_tiles))
        chunks = ceil_div(one.all_tiles, most)
        sizes[min(one.all_tiles, round_up(ceil_div(one.all_tiles, chunks), 32))] = None
    return list(sizes)
