"""Statistics by kernels that write results: the workspace of their partials, the steps, who refuses them."""

from __future__ import annotations

from typing import Any

import pytest

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import KernelStep, Pointer, int32s
from miofind.solvers.common.statistics import PARTIAL_STATISTICS, Statistics

DEVICE = Device.virtual("90a")
WGMMA = Registry.default()["ConvImplicitGemmWgmma"]
NHWC = {"dtype": "float16", "layout": "NHWC"}


def problem(**fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**{"epilogue": "statistics", **NHWC, **fields})


@pytest.mark.parametrize("channels", [8, 24, 64, 1000])
def test_the_last_step_covers_every_channel_of_both_sums(channels: int) -> None:
    first = KernelStep(source="a/b.cu", entry="multiply", grid=(3, 1, 1), block=(32, 1, 1), args=())
    statistics = Statistics(channels=channels, parts=7)
    step = statistics.finish(first)
    assert step.block[0] >= 8 * 32  # a warp adds up what the others have of one channel
    assert (step.source, step.entry) == ("a/b.cu", "multiply_statistics")
    assert step.grid[0] * 8 >= channels > (step.grid[0] - 1) * 8
    assert step.grid[1] == 2
    assert step.args[3:] == int32s(channels, 7)
    assert statistics.partials.bytes == 2 * 7 * channels * 4


@pytest.mark.parametrize(
    "fields",
    [
        {"x": (32, 64, 56, 56), "w": (256, 64, 1, 1)},
        {"x": (32, 512, 7, 7), "w": (512, 512, 3, 3), "padding": 1},
        {"x": (3, 136, 16, 17), "w": (72, 136, 1, 1), "layout": "NCHW"},
    ],
)
def test_wgmma_leaves_partials_and_adds_them_last(fields: dict[str, Any]) -> None:
    own = problem(**fields)
    for config in WGMMA.default_configs(own, DEVICE):
        solution = WGMMA.solution(own, DEVICE, config)
        first, last = solution.kernels[0], solution.kernels[-1]
        assert Pointer(buffer=PARTIAL_STATISTICS) in first.args
        assert last.entry == "implicit_gemm_wgmma_statistics"
        region = next(each for each in solution.workspace.regions if each.name == PARTIAL_STATISTICS)
        parts = last.args[-1].value  # type: ignore[union-attr]
        assert region.bytes == 8 * parts * own.k
        bare = WGMMA.solution(own.bare, DEVICE, config)
        assert len(solution.kernels) == len(bare.kernels) + 1
        assert bare.kernels[0].grid == first.grid


def test_a_part_is_a_block_of_pixels_or_of_swapped_tiles_the_tile() -> None:
    own = problem(x=(5, 64, 9, 9), w=(64, 64, 3, 3), padding=1)
    base = {"blocks": 1, "cluster": "1x1x1", "consumers": 1, "depth_bytes": 128, "rows": 1, "stages": 3}
    config = type(WGMMA.default_configs(own, DEVICE)[0])
    pixels = 5 * 9 * 9
    for own_values, parts in (
        ({"tile_n": 64, "splits": 1, "swapped": 0}, -(-pixels // 64)),
        ({"tile_n": 128, "splits": 1, "swapped": 1}, -(-pixels // 128)),
        ({"tile_n": 64, "splits": 2, "swapped": 0}, -(-pixels // 64)),
    ):
        chosen = config({**base, **own_values})
        WGMMA.check_config(own, DEVICE, chosen)
        steps = WGMMA.solution(own, DEVICE, chosen).kernels
        assert steps[-1].args[-1] == int32s(parts)[0]
        if own_values["splits"] > 1:
            assert steps[1].grid == (parts * 2, 1, 1)
            assert steps[1].args[-1] == Pointer(buffer=PARTIAL_STATISTICS)


def test_wgmma_sums_nothing_within_a_cluster_that_splits_k() -> None:
    own = problem(x=(1, 512, 7, 7), w=(512, 512, 3, 3), padding=1)
    clustered = [each for each in WGMMA.default_configs(own.bare, DEVICE) if str(each["cluster"]).startswith("1x1x")]
    clustered = [each for each in clustered if each["cluster"] != "1x1x1"]
    assert clustered
    for config in clustered:
        assert WGMMA.is_valid_config(own.bare, DEVICE, config)
        assert not WGMMA.is_valid_config(own, DEVICE, config)
    assert all(str(each["cluster"])[-1] == "1" for each in WGMMA.default_configs(own, DEVICE))


@pytest.mark.parametrize(("w", "stride"), [((72, 3, 7, 7), 2), ((20, 3, 3, 3), 1)])
def test_first_layers_leave_a_part_for_each_row_of_warpgroups(w: tuple[int, ...], stride: int) -> None:
    solver, own = Registry.default()["ConvFirstLayerWgmma"], problem(x=(8, 3, 64, 60), w=w, stride=stride)
    for config in solver.default_configs(own, DEVICE):
        first, last = solver.solution(own, DEVICE, config).kernels
        filters = config["blocks"] * 64 // (1 + stride % 2)
        parts = first.grid[0] // -(-own.k // filters) * config["rows"]
        assert (last.entry, last.args[-1]) == ("few_channels_forward_wgmma_statistics", int32s(parts)[0])
        assert len(solver.solution(own.bare, DEVICE, config).steps) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_depthwise_blocks_of_equal_channels_leave_a_part_each(dtype: str) -> None:
    solver = Registry.default()["ConvDepthwiseChannelsLast"]
    own = problem(x=(4, 72, 28, 28), w=(72, 1, 3, 3), padding=1, groups=72, dtype=dtype)
    for config in solver.default_configs(own, DEVICE):
        first, last = solver.solution(own, DEVICE, config).kernels
        parts = first.grid[0] // -(-own.k // config["channels"])
        assert (last.entry, last.args[-1]) == ("depthwise_channels_last_statistics", int32s(parts)[0])


def test_a_depthwise_kernel_sums_one_output_of_each_channel() -> None:
    solver = Registry.default()["ConvDepthwiseChannelsLast"]
    own = problem(x=(2, 8, 9, 10), w=(24, 1, 3, 3), groups=8)
    assert "one output" in solver.applicability(own, DEVICE).reason
    assert solver.applicability(own.bare, DEVICE)


def test_wgmma_sums_no_float32_results() -> None:
    own = problem(x=(2, 36, 14, 14), w=(20, 36, 3, 3), dtype="float32", math="tf32")
    assert "16-bit" in WGMMA.applicability(own, DEVICE).reason
    assert WGMMA.applicability(own.bare, DEVICE)
