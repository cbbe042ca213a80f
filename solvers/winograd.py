"""ConvWinograd: Winograd's minimal filtering around one batched product by cuBLASLt a chunk of tiles.

Kernels: kernels_src/winograd.cu. The steps and their workspace are made by `miofind.libraries.winograd`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from miofind.device import Device, Library, Place
from miofind.errors import InvalidConfigError
from miofind.geometry import index_bits
from miofind.libraries.listed_algorithms import listed_configs
from miofind.libraries.matmul_choice import (
    TENSOR_ALIGNMENT,
    WORKSPACE_BYTES,
    WORKSPACE_REGION,
    check_int,
    check_library_choice,
    with_library_choice,
)
from miofind.libraries.winograd import SOURCE, WinogradPlan
from miofind.problem import DataType, Direction, Layout, ProblemDescription
from miofind.solution import Config, ConvSolution, Region, WorkspacePlan
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.tiling.correlation import ceil_div, round_up
from miofind.tiling.overlap import has_empty_sums
from miofind.tiling.winograd import MOST_POINTS

_EXACT_TILE = 2
_EXACT_POINTS = 3  # 0, 1 and -1: what small integers become is exact
_TILES = (_EXACT_TILE, 4, 6)
_MOST_TAPS = 5
_LEAST_CHANNELS = 4  # of a group: with fewer, transforms take longer than direct summation
# Errors are those of a whole tile, and the bound is that of an element's own sum: in shorter sums of normal data some
# elements are so much smaller than their tile that they break it. 16 channels leave a factor of two (simulated).
_LEAST_SUMMED = 16
_LEAST_PIXELS = 64
_VECTORS = (1, 2, 4)
_BLOCKS = (4, 1, 8)
# Blocks of a multiprocessor that have registers for so many floats of a thread's tiles, the likely best first: more of
# them where loads of a thread are few, fewer where all its loads may be under way at once.
_BLOCKS_BY_FLOATS = ((32, (4,)), (36, (4, 8)), (72, (4, 1)), (128, (1,)))
_SLICES = (1, 2, 4, 8, 16, 32)
_LEAST_SLICE = 64  # tiles
_CHUNK_BYTES = (24 << 20, 96 << 20, 384 << 20, 1536 << 20)  # of transformed tiles; the first stays in an L2 cache
_MOST_CHUNKS = 512
_DEFAULTS = 8
_RECORDED = 6
_LAYOUTS = frozenset(Layout)
_ROUNDOFF = {DataType.FLOAT16: 2.0**-11, DataType.BFLOAT16: 2.0**-8}
_ROUNDOFF_FLOAT32 = 2.0**-24
_NAMES = frozenset({"tile", "tiles", "slices", "vector", "blocks", "algorithm", "workspace_bytes"})


class ConvWinograd(Solver):
    """Winograd's minimal filtering F(tile, taps) along every axis of more than one tap, stride 1.

    Configuration: `tile`, the outputs of a tile along an axis, for backward weights its pixels of y; `tiles`, how many
    are transformed at once; `slices`, parts of their sum for backward weights; `vector`, channels a thread where they
    are last; `blocks` that a multiprocessor has registers for; the library's `algorithm` and `workspace_bytes`.
    Transformed data has the tensors' type, products and sums are float32. The error bound is wider than direct
    summation's by the product of `Filtering.error_growth` over the axes: 1.7 for F(2x2, 3x3), 10 for F(4x4, 3x3), 46
    for F(6x6, 3x3); 16-bit operands are rounded once more.

    Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.
    """

    id = "ConvWinograd"
    algorithm = Algorithm.WINOGRAD
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.CUBLAS,
            dtypes=frozenset({DataType.FLOAT32, DataType.FLOAT16}),
            layouts=_LAYOUTS,
            min_sm=75,
        ),
        KernelKey(
            place=Place.CUDA,
            library=Library.CUBLAS,
            dtypes=frozenset({DataType.BFLOAT16}),
            layouts=_LAYOUTS,
            min_sm=80,
        ),
    )
    alignment_bytes = TENSOR_ALIGNMENT
    is_dynamic = True
    sources = (SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        conv = ProblemDescription.convolution
        x, w, odd = (3, 32, 9, 8), (32, 16, 3, 3), ((1, 0), (0, 1))
        return (
            *(
                conv(x=x, w=w, padding=odd, groups=2, layout=layout, direction=direction)
                for direction in Direction
                for layout in (Layout.NCHW, Layout.NHWC)
            ),
            conv(x=(2, 18, 9, 8), w=(5, 18, 5, 1), padding=(2, 0), layout=Layout.NHWC),
            conv(x=(2, 6, 12, 20), w=(20, 6, 1, 3), padding=(0, 1), math="tf32", direction="backward_data"),
            conv(x=(1, 16, 20), w=(5, 16, 3), padding=1, dtype=DataType.FLOAT16),
            conv(x=(2, 16, 8, 8), w=(8, 16, 3, 3), padding=1, dtype=DataType.BFLOAT16, layout=Layout.NHWC),
            conv(x=(2, 20, 9, 9), w=(7, 20, 5, 5), padding=2, layout={"x": "NHWC", "w": "NCHW", "y": "NCHW"}),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
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
        is_weights = problem.direction is Direction.BACKWARD_WEIGHTS
        summed, least = _summed(problem), _LEAST_PIXELS if is_weights else _LEAST_SUMMED
        if summed < least:
            what = "pixels" if is_weights else "channels"
            return Applicability(f"keeps its error bound in sums over {least} {what} or more, not {summed}")
        if problem.output.size == 0 or problem.flops == 0:
            return Applicability("has no empty products")
        if has_empty_sums(problem):
            return Applicability("rounds sums of nothing but padding as it does their neighbours, not to 0")
        if index_bits(problem) != 32:
            return Applicability("needs tensors that 32-bit offsets reach")
        if not any(_serves(problem, tile) for tile in _TILES):
            return Applicability("cannot hold what becomes of float16 in tiles for such filters")
        if next(_heuristic_configs(problem), None) is None:
            return Applicability("needs more workspace than 32-bit offsets reach")
        return APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        """The likely best, of every tile the best, so that a bound on the error leaves some, and the smallest."""
        lifted = problem.lifted(3)
        different: dict[tuple[int, ...], Config] = {}  # but for blocks, of which estimates know nothing
        for config in _heuristic_configs(problem):
            different.setdefault(tuple(config[name] for name in ("tile", "tiles", "slices", "vector")), config)
        ranked = sorted(different.values(), key=lambda config: _estimate_ms(lifted, device, config))
        firsts = [next((c for c in ranked if c["tile"] == tile), None) for tile in _TILES]
        best = list(dict.fromkeys([*ranked[:1], *filter(None, firsts), *ranked]))[: _DEFAULTS - 1]
        least = min(ranked, key=lambda config: sum(region.bytes for region in _plan(lifted, config).regions()))
        return (*best, Config({**least, "workspace_bytes": 0}))

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        defaults = self.default_configs(problem, device)
        yield from defaults
        yield from (config for config in _heuristic_configs(problem) if config not in defaults)
        for config in defaults[: len(_TILES)]:
            steps = self.solution(problem, device, config).steps
            yield from listed_configs(problem, steps, config, device, _RECORDED)

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        if set(config) != _NAMES:
            raise InvalidConfigError(f"{self.id}: config {config.json} must have the parameters {sorted(_NAMES)}")
        check_library_choice(self.id, config)
        for name, values in (("tile", _TILES), ("vector", _VECTORS), ("blocks", _BLOCKS), ("slices", _SLICES)):
            if type(config[name]) is not int or config[name] not in values:
                raise InvalidConfigError(f"{self.id}: {name}={config[name]!r} must be one of {list(values)}")
        check_int(self.id, config, "tiles", 1, 2**30)
        if not _serves(problem, config["tile"]):
            raise InvalidConfigError(f"{self.id}: tile={config['tile']} has no points that serve {problem}")
        reason = _refusal(_plan(problem.lifted(3), config))
        if reason:
            raise InvalidConfigError(f"{self.id}: config {config.json} cannot run {problem}: {reason}")

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return _serves(problem, config["tile"]) and not _refusal(_plan(problem.lifted(3), config))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return _estimate_ms(problem.lifted(3), device, config)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        """That of the transforms; operands of 16 bits are rounded to them, which direct summation does not do.

        The bound of their errors is 8 * u of their type, whatever the length of the sum, as 8 * u * sqrt(length) is of
        float32 sums.
        """
        growth = _plan(problem.lifted(3), config).error_growth
        roundoff = _ROUNDOFF.get(problem.x.dtype)
        if roundoff is None:
            return growth
        return growth * (1 + roundoff / (_ROUNDOFF_FLOAT32 * math.sqrt(problem.reduction_length)))

    def is_exact(self, config: Config) -> bool:
        return int(config["tile"]) == _EXACT_TILE

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        plan = _plan(problem.lifted(3), config)
        regions = list(plan.regions())
        if config["workspace_bytes"]:
            regions.append(Region(name=WORKSPACE_REGION, bytes=config["workspace_bytes"]))
        return ConvSolution(
            steps=with_library_choice(tuple(plan.steps()), config), workspace=WorkspacePlan(tuple(regions))
        )


def _plan(lifted: ProblemDescription, config: Mapping[str, int]) -> WinogradPlan:
    return WinogradPlan(
        problem=lifted,
        tile=config["tile"],
        tiles=config["tiles"],
        slices=config["slices"],
        vector=config["vector"],
        blocks=config["blocks"],
    )


def _estimate_ms(lifted: ProblemDescription, device: Device, config: Config) -> float:
    return _plan(lifted, config).estimate_ms(device, config["workspace_bytes"])


def _summed(problem: ProblemDescription) -> int:
    """Channels, or for backward weights pixels, that one result is summed over; not counting taps."""
    taps = 1 if problem.direction is Direction.BACKWARD_WEIGHTS else math.prod(problem.filter)
    return problem.reduction_length // taps


def _serves(problem: ProblemDescription, tile: int) -> bool:
    """Whether there are points for a tile, and for the smallest such as keep small integers exact.

    Larger tiles' inputs become up to 255 times as large, which float16 cannot hold.
    """
    if tile > _EXACT_TILE and problem.x.dtype is DataType.FLOAT16:
        return False
    return tile + max(problem.filter) - 2 <= (_EXACT_POINTS if tile == _EXACT_TILE else MOST_POINTS)


def _refusal(plan: WinogradPlan) -> str:
    """Why a plan is out of bounds, "" if it is not."""
    if plan.tiles > plan.all_tiles:
        return f"{plan.tiles} tiles are more than all {plan.all_tiles}"
    if plan.chunk_count > _MOST_CHUNKS:
        return f"takes {plan.chunk_count} chunks, at most {_MOST_CHUNKS} are allowed"
    if plan.slices > 1 and not plan.is_weights:
        return "only backward weights sums over tiles"
    if plan.slices > 1 and plan.tiles < plan.slices * _LEAST_SLICE:
        return f"slices of fewer than {_LEAST_SLICE} tiles save nothing"
    floats = plan.lanes * plan.places
    if plan.blocks not in next((blocks for most, blocks in _BLOCKS_BY_FLOATS if floats <= most), ()):
        return f"{plan.blocks} blocks are not tried with {floats} floats a thread"
    if plan.vector not in (1, plan.lanes):
        return "no tensor has such vectors"
    return plan.refusal()


def _heuristic_configs(problem: ProblemDescription) -> Iterator[Config]:
    """All configurations that leave the algorithm to the library's heuristics."""
    lifted = problem.lifted(3)
    for tile in _TILES:
        if not _serves(problem, tile):
            continue
        for tiles in _chunk_sizes(lifted, tile):
            for slices, vector, blocks in itertools.product(_SLICES, _VECTORS, _BLOCKS):
                config = {"tile": tile, "tiles": tiles, "slices": slices, "vector": vector, "blocks": blocks}
                if not _refusal(_plan(lifted, config)):
                    yield Config.of(**config, algorithm={}, workspace_bytes=WORKSPACE_BYTES)


def _chunk_sizes(lifted: ProblemDescription, tile: int) -> list[int]:
    """Tiles of even chunks whose transformed data have each of some sizes at most."""
    one = WinogradPlan(problem=lifted, tile=tile, tiles=1)
    sizes: dict[int, None] = {}
    for budget in _CHUNK_BYTES:
        most = max(1, budget // (one.transformed_bytes // one.slice_tiles))
        chunks = ceil_div(one.all_tiles, most)
        sizes[min(one.all_tiles, round_up(ceil_div(one.all_tiles, chunks), 32))] = None
    return list(sizes)


SOLVERS = (ConvWinograd(),)
