"""Shortlists that look at what configurations share once give what each configuration by itself would."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solvers.common.product_tiles import ProductBlock, alike, block_kinds
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.depthwise import channels_first, channels_first_weights, channels_last, mma_weights
from miofind.solvers.direct import tiled_weights
from miofind.solvers.few_channels.solver import FewChannelsSolver
from miofind.solvers.grouped import nchw, nchw_weights, nhwc, nhwc_weights
from miofind.solvers.implicit_gemm import wgmma_shortlist, wgmma_transposed_tiling
from miofind.solvers.implicit_gemm.mma_shortlist import short_list, short_listed
from miofind.solvers.implicit_gemm.wgmma import ConvImplicitGemmWgmma
from miofind.solvers.implicit_gemm.wgmma_cost import estimate_ms
from miofind.solvers.implicit_gemm.wgmma_halo import ConvImplicitGemmHalo
from miofind.solvers.implicit_gemm.wgmma_halo_tiling import HaloProduct
from miofind.solvers.implicit_gemm.wgmma_halo_tiling import short_list as short_list_of_halos
from miofind.solvers.implicit_gemm.wgmma_shortlist import Shortlist
from miofind.solvers.implicit_gemm.wgmma_shortlist_cost import estimates_ms
from miofind.solvers.implicit_gemm.wgmma_tiling import WGMMA_M, WgmmaTiling
from miofind.solvers.implicit_gemm.wgmma_transposed import ConvImplicitGemmWgmmaTurned
from miofind.solvers.winograd import fused
from miofind.suites import load_suite

H200 = replace(Device.virtual("90a"), clock_hz=1.98e9, bandwidth_bytes_per_s=4.9e12)
SMALL = replace(Device.virtual("86"), sm_count=20)
TYPES = (
    (DataType.FLOAT16, MathMode.IEEE),
    (DataType.BFLOAT16, MathMode.IEEE),
    (DataType.FLOAT32, MathMode.IEEE),
    (DataType.FLOAT32, MathMode.TF32),
)
SHARED_BYTES = (232448, 101376)
"""That a block of an H200 has, and of a device of compute capability 8.6."""


def drawn(count: int, seed: int) -> list[ProblemDescription]:
    """Random problems of the suites wild and wild_3d, in random types, layouts and directions."""
    draw = random.Random(seed)
    rows = [row.problem for name in ("wild", "wild_3d") for row in load_suite(name).problems()]
    found = []
    for base in draw.choices(rows, k=count):
        dtype, math_mode = draw.choice(TYPES)
        conv = base.conv
        found.append(
            ProblemDescription.convolution(
                x=base.x.shape,
                w=base.w.shape,
                padding=tuple(zip(conv.pad_before, conv.pad_after, strict=True)),
                stride=conv.stride,
                dilation=conv.dilation,
                groups=base.groups,
                dtype=dtype,
                layout=Layout.of(base.spatial_dims, channels_last=draw.random() < 0.5),
                direction=draw.choice(list(Direction)),
                math=math_mode,
            )
        )
    return found


def served(solver_id: str, count: int, seed: int, device: Device = H200) -> list[ProblemDescription]:
    """Those of so many random problems that a solver serves."""
    solver = Registry.default()[solver_id]
    return [problem for problem in drawn(count, seed) if solver.applicability(problem, device)]


@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "small"])
def test_a_shortlist_of_mma_is_that_of_each_configuration_by_itself(device: Device) -> None:
    solver = Registry.default()["ConvImplicitGemmMma"]
    problems = served("ConvImplicitGemmMma", 40, 1, device)
    assert len(problems) > 20
    for problem in problems:
        plain = solver.ranked(problem, device, short_list(problem.x.dtype.itemsize).configs)
        estimates = [solver.estimate_ms(problem, device, config) for config in plain]
        assert list(short_listed(problem, device)) == list(zip(plain, estimates, strict=True)), problem


def test_limits_of_many_splits_are_kept_in_a_shortlist_of_mma() -> None:
    """A result so large that no split's partials are few enough."""
    problem = ProblemDescription.convolution(
        x=(64, 2048, 64, 64), w=(2048, 2048, 1, 1), dtype=DataType.FLOAT16, layout=Layout.NHWC
    )
    listed = [each.config for each in short_listed(problem, H200)]
    assert {config["splits"] for config in listed} == {1}
    solver = Registry.default()["ConvImplicitGemmMma"]
    assert listed == solver.ranked(problem, H200, short_list(2).configs)


def test_blocks_that_count_as_alike_are() -> None:
    for problem in served("ConvImplicitGemmMma", 40, 2):
        for kind in block_kinds(problem):
            for config in short_list(problem.x.dtype.itemsize).configs[::7]:
                block = ProductBlock.of(kind, config)
                assert block == ProductBlock.of(kind, alike(kind, config)), (problem, config)


def _plain_splits(tile: WgmmaTiling, device: Device) -> Iterator[WgmmaTiling]:
    yield tile
    if tile.swapped:
        return
    work_tiles, most, processors = tile.work_tiles, tile.k_tiles // 2, device.sm_count
    for cluster_k in wgmma_shortlist.CLUSTER_SPLITS:
        clustered = replace(tile, cluster=(1, 1, cluster_k))
        if cluster_k <= most and clustered.work_tiles * cluster_k <= processors:
            yield clustered
    fitting = [count for count in wgmma_shortlist.SPLITS if count <= min(most, 4 * processors // work_tiles)]
    for splits in [count for count in fitting if work_tiles * count >= 0.25 * processors] or fitting[-1:]:
        yield replace(tile, splits=splits)


def _plain_filled(tile: WgmmaTiling, device: Device, shared_bytes: int) -> Iterator[WgmmaTiling]:
    stages_of = wgmma_shortlist.STAGES
    k_tiles = math.ceil(tile.k_tiles / (tile.splits * tile.cluster[2]))
    enough = min((count for count in stages_of if count >= k_tiles + 2), default=stages_of[-1])
    is_small = tile.tile_m == WGMMA_M and tile.tile_m * tile.tile_n <= WGMMA_M * 96
    is_whole = tile.splits == 1 and tile.cluster == (1, 1, 1)
    gains = is_whole and not tile.product.is_weights and (is_small or (k_tiles <= 4 and tile.row_blocks == 2))
    for blocks in (1, 2) if tile.work_tiles * math.prod(tile.cluster) > device.sm_count else (1,):
        for stages in reversed(stages_of):
            filled = replace(tile, stages=stages, blocks=blocks)
            if stages <= enough and filled.is_valid(shared_bytes):
                yield filled
                multicasting = replace(filled, cluster=(2, 1, 1))
                if gains and multicasting.is_valid(shared_bytes):
                    yield multicasting
                break


def plain_tilings(product: WgmmaProduct, device: Device, shared_bytes: int) -> Iterator[WgmmaTiling]:
    """What a `Shortlist` holds, each made by itself."""
    tiles = itertools.product(wgmma_shortlist._k_tiles(product), wgmma_shortlist._WARPGROUPS, wgmma_shortlist.WIDTHS)
    for length, (consumers, row_blocks), tile_n in tiles:
        for swapped in (False, True) if product.size_n <= WGMMA_M and consumers == 1 else (False,):
            tile = WgmmaTiling(
                product=product,
                consumers=consumers,
                row_blocks=row_blocks,
                tile_m=WGMMA_M * consumers * row_blocks,
                tile_n=tile_n,
                tile_k=length,
                stages=3,
                splits=1,
                blocks=1,
                cluster=(1, 1, 1),
                swapped=swapped,
            )
            if tile.may_be_valid:
                for split in _plain_splits(tile, device):
                    yield from _plain_filled(split, device, shared_bytes)


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize("solver_id", ["ConvImplicitGemmWgmma", "ConvChannelsLast"])
def test_a_shortlist_of_wgmma_is_that_of_each_tiling_by_itself(solver_id: str, shared_bytes: int) -> None:
    problems = served(solver_id, 150, 3)
    assert len(problems) > 10
    for problem in problems:
        product = WgmmaProduct.of(problem)
        found = Shortlist.of(product, H200, shared_bytes)
        plain = list(plain_tilings(product, H200, shared_bytes))
        assert [found.config(place) for place in range(len(found))] == [each.config for each in plain], problem
        assert estimates_ms(found, H200).tolist() == [estimate_ms(each, H200) for each in plain], problem


def test_a_shortlist_of_strided_backward_data_is_that_of_each_tiling_by_itself() -> None:
    """Phases with unequal taps, and some with none."""
    for problem in ConvImplicitGemmWgmma().examples():
        if max(problem.conv.stride) > 1 and problem.direction is Direction.BACKWARD_DATA:
            product = WgmmaProduct.of(problem)
            found, plain = Shortlist.of(product, H200, SHARED_BYTES[0]), plain_tilings(product, H200, SHARED_BYTES[0])
            assert estimates_ms(found, H200).tolist() == [estimate_ms(each, H200) for each in plain], problem


def test_a_tiling_of_tiled_weights_with_many_splits_is_that_of_one_with_more_blocks() -> None:
    problems = served("ConvDirectTiledWeights", 60, 4)
    assert len(problems) > 10
    for problem in problems:
        for config in tiled_weights._split_short_list():
            alone = tiled_weights._Tiling.of_one_split(problem, config)
            assert tiled_weights._Tiling.of(problem, config) == replace(alone, blocks=alone.blocks * config["splits"])


def test_the_split_short_list_of_tiled_weights_has_each_configuration_with_each_number_of_splits() -> None:
    splits = tiled_weights.ConvDirectTiledWeights.parameters["splits"]
    listed = tiled_weights._split_short_list()
    assert len(set(listed)) == len(listed) == len(tiled_weights._SHORT_LIST) * len(splits)
    assert [config["splits"] for config in listed] == list(splits) * len(tiled_weights._SHORT_LIST)


@pytest.mark.parametrize("solver_id", ["ConvDirectTiled", "ConvDirectTiledWeights", "ConvIm2colGemm"])
@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "small"])
def test_no_estimate_is_below_what_a_solver_says_of_all(solver_id: str, device: Device) -> None:
    solver = Registry.default()[solver_id]
    problems = served(solver_id, 60, 6, device)
    assert len(problems) > 10
    for problem in problems:
        drawn = solver.drawn_configs(problem, device, 200) if solver.parameters else solver.configs(problem, device)
        configs = [*solver.default_configs(problem, device), *drawn]
        least_ms = solver.least_ms(problem, device)
        assert 0 < least_ms <= min(solver.estimate_ms(problem, device, config) for config in configs), problem


LISTED = {
    "ConvDepthwiseChannelsFirst": channels_first._SHORT_LIST,
    "ConvDepthwiseChannelsFirstWeights": channels_first_weights._SHORT_LIST,
    "ConvDepthwiseChannelsLast": (*channels_last._FALLBACKS, *channels_last._SHORT_LIST),
    "ConvDepthwiseMmaWeights": mma_weights._SHORT_LIST,
    "ConvGrouped": nhwc._SHORT_LIST,
    "ConvGroupedPlanes": nchw._SHORT_LIST,
    "ConvWinogradFused": fused._SHORT_LIST,
}
"""By solver whose cost model takes a table of configurations, what its defaults are chosen among."""


def depthwise_or_grouped(problem: ProblemDescription) -> ProblemDescription:
    """The same with as many groups as channels, or with groups of a few."""
    conv, shape = problem.conv, problem.x.shape
    channels = shape[1] - shape[1] % 16 or 16
    groups = channels if shape[1] % 3 else channels // 8
    return ProblemDescription.convolution(
        x=(shape[0], channels, *shape[2:]),
        w=(channels, channels // groups, *problem.w.shape[2:]),
        padding=tuple(zip(conv.pad_before, conv.pad_after, strict=True)),
        stride=conv.stride,
        dilation=conv.dilation,
        groups=groups,
        dtype=problem.x.dtype,
        layout=problem.x.layout,
        direction=problem.direction,
        math=problem.math,
    )


@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "small"])
@pytest.mark.parametrize("solver_id", LISTED)
def test_a_table_of_configurations_is_ranked_as_each_by_itself(solver_id: str, device: Device) -> None:
    solver = Registry.default()[solver_id]
    every = [*solver.examples(), *drawn(40, 8), *map(depthwise_or_grouped, drawn(60, 9))]
    problems = [problem for problem in every if solver.applicability(problem, device)][:20]
    assert len(problems) >= min(10, len(solver.examples()))
    for problem in problems:
        plain = solver.ranked(problem, device, LISTED[solver_id])
        estimates = [solver.estimate_ms(problem, device, config) for config in plain]
        assert list(solver._ranked(problem, device)) == list(zip(plain, estimates, strict=True)), problem  # type: ignore[attr-defined]


def test_a_shortlist_of_transposed_products_is_that_of_tilings_made_anew() -> None:
    """Splits and clusters change nothing of what tilings keep of one another."""
    solver = ConvImplicitGemmWgmmaTurned()
    for problem in solver.examples():
        product = WgmmaProduct.of(problem)
        for tiling in wgmma_transposed_tiling.shortlisted_tilings(product, H200, SHARED_BYTES[0]):
            anew = wgmma_transposed_tiling.TransposedTiling.of(product, tiling.config)
            assert tiling == anew
            assert tiling.is_valid(SHARED_BYTES[0])
            assert anew.is_valid(SHARED_BYTES[0])
            found, expected = (
                wgmma_transposed_tiling.estimate_ms(each, H200, SHARED_BYTES[0]) for each in (tiling, anew)
            )
            assert found == expected, (problem, tiling.config)


@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "small"])
@pytest.mark.parametrize("family", [nchw_weights, nhwc_weights])
def test_a_table_of_grouped_weights_is_ranked_as_each_configuration_by_itself(family: Any, device: Device) -> None:
    """Its tables differ by problem."""
    (solver,) = family.SOLVERS
    every = [*solver.examples(), *map(depthwise_or_grouped, drawn(120, 11))]
    problems = [problem for problem in every if solver.applicability(problem, device)][:8]
    assert len(problems) > 5
    for problem in problems:
        table = family._likely(problem, device)
        plain = solver.ranked(problem, device, table.configs)
        estimates = [solver.estimate_ms(problem, device, config) for config in plain]
        assert list(solver._ranked(problem, device, table)) == list(zip(plain, estimates, strict=True)), problem


@pytest.mark.parametrize("device", [H200, replace(H200, sm_count=20)], ids=["H200", "small"])
def test_a_table_of_halos_is_ranked_as_each_configuration_by_itself(device: Device) -> None:
    """Its limits of rows and columns differ by problem."""
    solver = ConvImplicitGemmHalo()
    problems = [problem for problem in (*solver.examples(), *drawn(300, 12)) if solver.applicability(problem, device)]
    assert len(problems) > 8
    for problem in problems[:20]:
        plain = solver.ranked(problem, device, short_list_of_halos(HaloProduct.of(problem)).configs)
        estimates = [solver.estimate_ms(problem, device, config) for config in plain]
        assert list(solver._ranked(problem, device)) == list(zip(plain, estimates, strict=True)), problem


def of_few_channels(problem: ProblemDescription) -> ProblemDescription:
    """The same of three channels, in one group."""
    conv, shape = problem.conv, problem.x.shape
    return ProblemDescription.convolution(
        x=(min(shape[0], 64), 3, *shape[2:]),
        w=(min(problem.k, 128), 3, *problem.w.shape[2:]),
        padding=tuple(zip(conv.pad_before, conv.pad_after, strict=True)),
        stride=conv.stride,
        dtype=problem.x.dtype,
        layout=problem.x.layout,
        direction=problem.direction,
        math=problem.math,
    )


FIRST_LAYERS = [name for name, solver in Registry.default().items() if isinstance(solver, FewChannelsSolver)]


@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "small"])
@pytest.mark.parametrize("solver_id", FIRST_LAYERS)
def test_a_table_of_first_layers_is_ranked_as_each_configuration_by_itself(solver_id: str, device: Device) -> None:
    solver = Registry.default()[solver_id]
    assert isinstance(solver, FewChannelsSolver)
    others = (each for each in drawn(80, 10) if max(each.conv.dilation) == 1 and each.spatial_dims == 2)
    every = [*solver.examples(), *map(of_few_channels, others)]
    problems = [problem for problem in every if solver.applicability(problem, device)][:12]
    assert problems or device is SMALL
    for problem in problems:
        table = solver.short_list()
        plain = solver.ranked(problem, device, table.configs)
        estimates = [solver.estimate_ms(problem, device, config) for config in plain]
        valid = solver.valid_of(problem, device, table)
        assert list(solver.ranked_table(problem, device, valid)) == list(zip(plain, estimates, strict=True)), problem
