"""Shortlists that look at what configurations share once give what each configuration by itself would."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Config
from miofind.solvers.common.product_tiles import ProductBlock, alike, block_kinds
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.depthwise import (
    channels_first,
    channels_first_weights,
    channels_last,
    channels_last_weights,
    mma,
    mma_weights,
    volume,
    volume_weights,
)
from miofind.solvers.direct import tiled_weights
from miofind.solvers.few_channels.solver import FewChannelsSolver
from miofind.solvers.grouped import nchw, nchw_weights, nhwc, nhwc_weights
from miofind.solvers.implicit_gemm import wgmma_shortlist, wgmma_transposed_tiling
from miofind.solvers.implicit_gemm.mma_shortlist import short_list, short_listed
from miofind.solvers.implicit_gemm.wgmma import ConvImplicitGemmWgmma
from miofind.solvers.implicit_gemm.wgmma_cost import estimate_ms
from miofind.solvers.implicit_gemm.wgmma_halo import ConvImplicitGemmHalo
from miofind.solvers.implicit_gemm.wgmma_halo_swapped import ConvImplicitGemmHaloSwapped
from miofind.solvers.implicit_gemm.wgmma_ping_pong import ConvImplicitGemmPingPong
from miofind.solvers.implicit_gemm.wgmma_shared import TiledSolver
from miofind.solvers.implicit_gemm.wgmma_tiling import WgmmaGrid, WgmmaTile, WgmmaTiling
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize("solver_id", ["ConvImplicitGemmWgmma", "ConvChannelsLast"])
def test_a_shortlist_of_wgmma_is_of_valid_tilings_with_their_estimates(solver_id: str, shared_bytes: int) -> None:
    strided = [each for each in ConvImplicitGemmWgmma().examples() if max(each.conv.stride) > 1]
    problems = [*served(solver_id, 150, 3), *strided]  # phases with unequal taps, and some with none
    assert len(problems) > 10
    for problem in problems:
        found = wgmma_shortlist.short_list(WgmmaProduct.of(problem), H200, shared_bytes)
        configs = found.configs(np.arange(len(found.stages)))
        assert len(set(configs)) == len(configs)
        each = [WgmmaTiling.of(problem, config) for config in configs]
        assert all(tiling.is_valid(shared_bytes) for tiling in each), problem
        assert estimate_ms(found, H200).tolist() == [estimate_ms(tiling, H200) for tiling in each], problem


def tilings_of(problem: ProblemDescription, configs: Sequence[Config]) -> WgmmaTiling:
    """The table of configurations of ConvImplicitGemmWgmma."""
    product = WgmmaProduct.of(problem)
    names = ("consumers", "rows", "tile_n", "depth_bytes", "swapped", "stages", "splits", "blocks")
    columns = {name: np.array([config[name] for config in configs]) for name in names}
    m, n, k = np.array([[int(count) for count in config["cluster"].split("x")] for config in configs]).T
    tile = WgmmaTile(
        kind=product.kind,
        consumers=columns["consumers"],
        row_blocks=columns["rows"],
        n=columns["tile_n"],
        k=columns["depth_bytes"] // product.element_bytes,
        swapped=columns["swapped"] != 0,
    )
    others = {name: columns[name] for name in ("stages", "splits", "blocks")}
    return WgmmaTiling(grid=WgmmaGrid(product=product, tile=tile), cluster_m=m, cluster_n=n, cluster_k=k, **others)


def test_a_table_of_wgmma_is_what_each_of_its_configurations_is() -> None:
    """Valid or not, with any parameters."""
    solver = ConvImplicitGemmWgmma()
    size = math.prod(map(len, solver.parameters.values()))
    for problem in (*solver.examples(), *served("ConvImplicitGemmWgmma", 60, 13)):
        points = random.Random(problem.network_config).sample(range(size), 300)
        configs = [*solver.drawn_configs(problem, H200, 300), *map(solver._point, points)]
        table, each = tilings_of(problem, configs), [WgmmaTiling.of(problem, config) for config in configs]
        places = np.flatnonzero(table.is_valid(SHARED_BYTES[0])).tolist()
        assert places == [place for place, tiling in enumerate(each) if tiling.is_valid(SHARED_BYTES[0])], problem
        assert table.shared_bytes.tolist() == [tiling.shared_bytes for tiling in each], problem
        assert estimate_ms(table, H200).tolist() == [estimate_ms(tiling, H200) for tiling in each], problem


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
    "ConvDepthwiseChannelsLastWeights": (*channels_last_weights._FALLBACKS, *channels_last_weights._SHORT_LIST),
    "ConvDepthwiseMma": mma._SHORT_LIST,
    "ConvDepthwiseMmaWeights": mma_weights._SHORT_LIST,
    "ConvDepthwiseVolume": volume._SHORT_LIST,
    "ConvDepthwiseVolumeWeights": volume_weights._SHORT_LIST,
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


@pytest.mark.sampled(3)
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


def test_a_shortlist_of_transposed_products_is_of_valid_tilings_with_their_estimates() -> None:
    for problem in ConvImplicitGemmWgmmaTurned().examples():
        product = WgmmaProduct.of(problem)
        for device in (H200, replace(H200, sm_count=3)):
            found = wgmma_transposed_tiling.short_list(product, device, SHARED_BYTES[0])
            configs = list(map(found.config, range(len(found.splits))))
            assert len(set(configs)) == len(configs) > 0
            tilings = [wgmma_transposed_tiling.TransposedTiling.of(product, config) for config in configs]
            assert all(tiling.is_valid(SHARED_BYTES[0]) for tiling in tilings), problem
            alone = [wgmma_transposed_tiling.estimate_ms(each, device, SHARED_BYTES[0]) for each in tilings]
            assert wgmma_transposed_tiling.estimate_ms(found, device, SHARED_BYTES[0]).tolist() == alone, problem


@pytest.mark.sampled(2)
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
@pytest.mark.parametrize(
    "solver",
    [ConvImplicitGemmHalo(), ConvImplicitGemmHaloSwapped(), ConvImplicitGemmPingPong()],
    ids=["halo", "swapped", "ping-pong"],
)
def test_a_table_of_tilings_is_ranked_as_each_configuration_by_itself(solver: TiledSolver, device: Device) -> None:
    """Limits of rows and columns differ by problem, and rings have as many stages as there is room for."""
    problems = [problem for problem in (*solver.examples(), *drawn(300, 12)) if solver.applicability(problem, device)]
    assert len(problems) > 8
    for problem in problems[:20]:
        plain = solver.ranked(problem, device, solver.short_list(problem).configs)
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


@pytest.mark.sampled(3)
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
