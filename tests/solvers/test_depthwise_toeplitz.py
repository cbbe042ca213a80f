"""Depthwise convolution by band matrices: windows, targets, refusals and configurations. Needs no GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, KernelStep

H200 = Device.virtual("90a")
SOLVER = Registry.default()["ConvDepthwiseBands"]


def depthwise(c: int = 32, **fields: Any) -> ProblemDescription:
    shape = {"x": (16, c, 14, 14), "w": (c, 1, 5, 5), "padding": 2, "dtype": "float16", "layout": "NCHW", "groups": c}
    return ProblemDescription.convolution(**{**shape, **fields})


def defines_of(problem: ProblemDescription, config: Config) -> dict[str, int]:
    step = SOLVER.solution(problem, H200, config).steps[0]
    assert isinstance(step, KernelStep)
    return {name: int(value) for name, value in step.defines if isinstance(value, int)}


@given(
    width=st.integers(1, 40),
    taps=st.integers(3, 8),
    pads=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    back=st.booleans(),
)
def test_windows_have_every_input_that_a_block_meets(width: int, taps: int, pads: tuple[int, int], back: bool) -> None:
    assume(width + sum(pads) >= taps)
    problem = depthwise(
        x=(8, 32, 9, width),
        w=(32, 1, 3, taps),
        padding=((1, 1), pads),
        direction="backward_data" if back else "forward",
    )
    assume(SOLVER.applicability(problem, H200))
    defines = defines_of(problem, SOLVER.default_configs(problem, H200)[0])
    size, outputs, pad, shift = (defines[name] for name in ("W", "OUT_W", "PAD_W", "SHIFT"))
    odd = size % 2 or outputs % 2
    late = (0, 1) if odd else (0,)  # how many columns windows and blocks begin before their even places
    for output, tap, window, block in itertools.product(range(outputs), range(taps), late, late):
        column = output - pad + tap
        if not 0 <= column < size:
            continue
        first = (output + block) // 16 * 16 - shift - window
        assert 0 <= column - first < (16 if max(size, outputs) + odd <= 16 else 24)


def test_outputs_replace_inputs_only_of_equal_images() -> None:
    config = Config.of(channels=2, images=8, bands=1, rows=2, direct=False)
    assert defines_of(depthwise(), config)["TARGET"] == 0
    assert defines_of(depthwise(padding=1), config)["TARGET"] == 1
    assert defines_of(depthwise(x=(8, 32, 56, 56)), Config({**config, "bands": 2}))["TARGET"] == 1
    assert defines_of(depthwise(), Config({**config, "direct": True}))["TARGET"] == 2


def test_warps_never_write_words_that_others_read() -> None:
    """Planes of odd size: a word has the last element of a channel and the first one of the next."""
    config = Config.of(channels=2, images=8, bands=1, rows=2, direct=False)
    assert defines_of(depthwise(x=(8, 32, 7, 7)), config)["TARGET"] == 1
    assert defines_of(depthwise(x=(8, 32, 7, 7)), Config({**config, "channels": 1}))["TARGET"] == 0
    assert defines_of(depthwise(x=(8, 32, 8, 7)), config)["TARGET"] == 0


def test_rows_of_odd_length_are_computed_in_pairs_and_staged() -> None:
    problem = depthwise(x=(16, 32, 7, 7))
    configs = list(SOLVER.configs(problem, H200))
    assert configs
    assert all(config["rows"] % 2 == 0 and not config["direct"] for config in configs)


def test_all_rows_of_small_images_are_in_registers() -> None:
    defines = defines_of(depthwise(), Config.of(channels=2, images=8, bands=1, rows=2, direct=False))
    assert defines["RING"] == 18
    problem = depthwise(x=(8, 32, 56, 56))
    assert defines_of(problem, Config.of(channels=1, images=8, bands=4, rows=1, direct=True))["RING"] == 6


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"w": (64, 1, 5, 5)}, "one filter a channel"),
        ({"stride": 2}, "stride 1"),
        ({"dilation": 2, "padding": 4}, "dilation 1"),
        ({"layout": "NHWC"}, "NHWC"),
        ({"w": (32, 1, 9, 9), "padding": 4}, "taps"),
        ({"dtype": "float32"}, "float32"),
        ({"x": (8, 32, 200, 200)}, "too large"),
        ({"c": 5, "x": (8, 5, 7, 7), "w": (5, 1, 5, 5)}, "too large"),
        ({"direction": "backward_weights"}, "computes forward and backward_data"),
    ],
)
def test_refusals_name_their_reason(fields: dict[str, Any], reason: str) -> None:
    c = fields.pop("c", 32)
    answer = SOLVER.applicability(depthwise(c, **fields), H200)
    assert not answer
    assert reason in answer.reason


@pytest.mark.parametrize("size", [14, 28, 56])
@pytest.mark.parametrize("taps", [3, 5, 7])
@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_images_have_a_space_worth_searching(size: int, taps: int, direction: str) -> None:
    problem = depthwise(96, x=(32, 96, size, size), w=(96, 1, taps, taps), padding=taps // 2, direction=direction)
    assert 20 <= sum(1 for _ in SOLVER.configs(problem, H200)) <= 2000


def test_estimates_grow_with_the_problem() -> None:
    def best_ms(problem: ProblemDescription) -> float:
        return min(SOLVER.estimate_ms(problem, H200, c) for c in SOLVER.default_configs(problem, H200))

    assert best_ms(depthwise(x=(8, 32, 28, 28))) < best_ms(depthwise(512, x=(64, 512, 28, 28), w=(512, 1, 5, 5)))
