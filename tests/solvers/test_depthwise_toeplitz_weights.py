"""Depthwise backward weights by diagonals of products: diagonals, bands, refusals and workspace. Needs no GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, KernelStep
from miofind.solvers.depthwise.toeplitz_tiling import ToeplitzAxis, toeplitz_pitch

H200 = Device.virtual("90a")
SOLVER = Registry.default()["ConvDepthwiseBandsWeights"]


def depthwise(c: int = 32, **fields: Any) -> ProblemDescription:
    shape = {"x": (16, c, 14, 14), "w": (c, 1, 5, 5), "padding": 2, "dtype": "float16", "layout": "NCHW", "groups": c}
    return ProblemDescription.convolution(**{**shape, "direction": "backward_weights", **fields})


def defines_of(problem: ProblemDescription, config: Config) -> dict[str, int]:
    step = SOLVER.solution(problem, H200, config).steps[0]
    assert isinstance(step, KernelStep)
    return {name: int(value) for name, value in step.defines if isinstance(value, int)}


@given(size=st.integers(1, 60), taps=st.integers(1, 9), pad=st.integers(-4, 9), after=st.integers(0, 9))
def test_words_of_a_block_hold_what_it_meets(size: int, taps: int, pad: int, after: int) -> None:
    outputs = size + pad + after - taps + 1
    assume(outputs > 0)
    axis = ToeplitzAxis.of(size, outputs, taps, pad)
    assume(axis.is_served)
    late = (0, 1) if axis.is_odd else (0,)
    for output, tap, begins_in, begins_out in itertools.product(range(outputs), range(taps), late, late):
        column = output - pad + tap
        if not 0 <= column < size:
            continue
        block = (output + begins_out) // 16
        word = (column + axis.shift + begins_in) // 8 - 2 * block
        assert 0 <= word < (2 if axis.is_narrow else 3)
        assert 2 * block + word < axis.words
        assert block < axis.blocks


@given(count=st.integers(1, 5000))
def test_eight_images_rows_meet_every_bank(count: int) -> None:
    words = toeplitz_pitch(count) // 8
    assert words % 2 == 1
    assert 8 * words >= count + 7
    assert len({(words * image * 4 + lane) % 32 for image in range(8) for lane in range(4)}) == 32


@pytest.mark.parametrize("rows", [7, 14, 15, 28, 56])
def test_row_blocks_cover_the_rows_and_none_is_empty(rows: int) -> None:
    problem = depthwise(x=(8, 32, rows, 14))
    for config in SOLVER.configs(problem, H200):
        defines = defines_of(problem, config)
        assert (
            (defines["ROW_BLOCKS"] - 1) * defines["ROW_BLOCK_ROWS"]
            < rows
            <= defines["ROW_BLOCKS"] * defines["ROW_BLOCK_ROWS"]
        )
        assert defines["ROW_BLOCKS"] == 1 or defines["ROW_BLOCK_ROWS"] % 2 == 0


def test_partials_are_in_the_workspace() -> None:
    problem = depthwise(x=(40, 32, 28, 28))
    for config in SOLVER.configs(problem, H200):
        solution = SOLVER.solution(problem, H200, config)
        splits = defines_of(problem, config)["SPLITS"]
        assert splits == math.ceil(40 / config["images"]) * config["bands"]
        assert len(solution.steps) == (2 if splits > 1 else 1)
        partials = [4 * splits * problem.w.size] if splits > 1 else []
        assert [region.bytes for region in solution.workspace.regions] == partials


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"w": (64, 1, 5, 5)}, "one filter a channel"),
        ({"stride": 2}, "stride 1"),
        ({"layout": "NHWC"}, "NHWC"),
        ({"w": (32, 1, 9, 9), "padding": 4}, "taps"),
        ({"dtype": "float32"}, "float32"),
        ({"c": 5, "x": (8, 5, 7, 7), "w": (5, 1, 5, 5)}, "too large"),
        ({"direction": "forward"}, "computes backward_weights"),
    ],
)
def test_refusals_name_their_reason(fields: dict[str, Any], reason: str) -> None:
    c = fields.pop("c", 32)
    answer = SOLVER.applicability(depthwise(c, **fields), H200)
    assert not answer
    assert reason in answer.reason


@pytest.mark.parametrize("size", [7, 14, 28])
@pytest.mark.parametrize("taps", [3, 5, 7])
def test_images_have_a_space_worth_searching(size: int, taps: int) -> None:
    problem = depthwise(96, x=(32, 96, size, size), w=(96, 1, taps, taps), padding=taps // 2)
    assert 30 <= sum(1 for _ in SOLVER.configs(problem, H200)) <= 2000


@pytest.mark.parametrize(("pad", "valid"), [((0, 40), False), ((0, 3), True), ((1, 1), True)])
def test_no_band_meets_padding_alone(pad: tuple[int, int], valid: bool) -> None:
    """The kernel copies rows of x for each band."""
    problem = ProblemDescription.convolution(
        x=(8, 8, 8, 7), w=(8, 1, 3, 3), padding=(pad, 1), groups=8, dtype="float16", direction="backward_weights"
    )
    assert SOLVER.is_valid_config(problem, H200, Config.of(channels=1, images=8, bands=1, warps=1))
    assert SOLVER.is_valid_config(problem, H200, Config.of(channels=1, images=8, bands=2, warps=1)) is valid
