"""The bias gradient in ConvImplicitGemmWgmma: how its warps read dy's k-tiles, and the steps and the workspace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, Pointer, int32s

DEVICE = Device.virtual("90a")
WGMMA = Registry.default()["ConvImplicitGemmWgmma"]
NHWC = {"dtype": "float16", "layout": "NHWC"}
BASE = {"blocks": 1, "consumers": 1, "depth_bytes": 128, "rows": 1, "stages": 3, "swapped": 0, "tile_n": 64}

PIXELS, FILTERS = 64, 64
"""Of a k-tile of one block of rows."""


def problem(epilogue: str = "bias_gradient", **fields: Any) -> ProblemDescription:
    given: dict[str, Any] = {"x": (5, 64, 9, 9), "w": (72, 64, 3, 3), "padding": 1, **NHWC, **fields}
    return ProblemDescription.convolution(**given, direction=Direction.BACKWARD_WEIGHTS, epilogue=epilogue)


def _in_shared(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of 64 elements as copies lay them: word w of row r, of 16 bytes, is at w ^ r % 8."""
    words = rows.reshape(rows.shape[0], 8, 8)
    laid = np.empty_like(words)
    for row in range(rows.shape[0]):
        for word in range(8):
            laid[row, word ^ row % 8] = words[row, word]
    return laid.reshape(-1)


def _loaded(shared: NDArray[np.int64], addresses: list[int], *, transposed: bool) -> NDArray[np.int64]:
    """What ldmatrix gives each lane of four 8 x 8 matrices, 8 elements: lanes 8 m ... have the rows of matrix m."""
    found = np.empty((32, 4, 2), np.int64)
    for matrix in range(4):
        rows = np.array([shared[a // 2 : a // 2 + 8] for a in addresses[8 * matrix : 8 * matrix + 8]])
        rows = rows.T if transposed else rows
        for lane in range(32):
            found[lane, matrix] = rows[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
    return found.reshape(32, 8)


@pytest.mark.parametrize("k_major", [False, True])
def test_lanes_read_every_pixel_of_their_filters_once(k_major: bool) -> None:
    """As `add_filters` of kernels_src/implicit_gemm/wgmma_bias_gradient.cuh counts."""
    elements = np.arange(PIXELS)[:, None] + 1000 * np.arange(FILTERS)  # pixel and filter of each
    shared = _in_shared(elements.T if k_major else elements)
    seen: dict[int, list[int]] = {}
    for warp in range(4):
        for i in range(2):
            for part in range(2):
                addresses = []
                for lane in range(32):
                    if k_major:
                        row, word = 16 * warp + 8 * i + lane % 8, 4 * part + lane // 8
                    else:
                        row, word = 32 * part + lane, 2 * warp + i
                    addresses.append(128 * row + 16 * (word ^ row % 8))
                loaded = _loaded(shared, addresses, transposed=not k_major)
                assert len({a // 16 % 8 for a in addresses[:8]}) == 8, "the rows of a matrix are in different banks"
                for lane in range(32):
                    filter_of_lane = 16 * warp + 8 * i + lane // 4
                    assert set(loaded[lane] // 1000) == {filter_of_lane}
                    seen.setdefault(filter_of_lane, []).extend(loaded[lane] % 1000)
    assert {number: sorted(pixels) for number, pixels in seen.items()} == {
        number: list(range(PIXELS)) for number in range(FILTERS)
    }


def test_each_filter_is_written_by_one_lane() -> None:
    """As `write_filter_sums` counts: lanes whose rest is 0 or 1 have the first or the second eight filters."""
    rows = [16 * warp + lane % 4 * 8 + lane // 4 for warp in range(4) for lane in range(32) if lane % 4 < 2]
    assert sorted(rows) == list(range(64))


def test_without_split_k_the_product_writes_the_results() -> None:
    own = problem()
    for cluster in ("1x1x1", "1x2x1", "1x1x2"):
        config = Config({**BASE, "splits": 1, "cluster": cluster})
        WGMMA.check_config(own, DEVICE, config)
        solution = WGMMA.solution(own, DEVICE, config)
        (step,) = solution.kernels
        assert Pointer(buffer="bias_gradient") in step.args
        assert solution.workspace.bytes == 0
        assert ("EPILOGUE_BIAS_GRADIENT", 1) in step.defines
        bare = WGMMA.solution(own.bare, DEVICE, config).kernels[0]
        assert (bare.grid, bare.block, bare.shared_bytes) == (step.grid, step.block, step.shared_bytes)


def test_with_split_k_further_blocks_of_the_reduction_add_the_partials() -> None:
    own, config = problem("float32.bias_gradient"), Config({**BASE, "splits": 2, "cluster": "1x1x1"})
    solution = WGMMA.solution(own, DEVICE, config)
    first, reduction = solution.kernels
    bare, bare_reduction = WGMMA.solution(own.bare, DEVICE, config).kernels
    regions = {region.name: region.bytes for region in solution.workspace.regions}
    assert regions["partial bias gradient"] == 4 * 2 * 72
    assert Pointer(buffer="partial bias gradient") in first.args
    assert Pointer(buffer="bias_gradient") not in first.args
    assert reduction.grid[0] == bare_reduction.grid[0] + 3, "32 filters a block"
    assert reduction.args[-2:] == (Pointer(buffer="bias_gradient"), *int32s(72))
    assert first.grid == bare.grid


def test_sixteen_bits_are_summed_and_tf32_is_left_to_the_composed_form() -> None:
    assert WGMMA.applicability(problem(), DEVICE)
    tf32 = problem(x=(2, 72, 12, 14), w=(64, 72, 1, 1), padding=0, dtype="float32", math="tf32", layout="NCHW")
    assert WGMMA.applicability(tf32.bare, DEVICE)
    assert "sums up 16-bit gradients alone" in WGMMA.applicability(tf32, DEVICE).reason
