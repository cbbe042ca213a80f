"""Verification on the CPU place: right results pass with margin, each kind of fault is caught and named."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest
from helpers.problems.problem_strategies import problems
from helpers.runs.fake_invokers import FakeInvoker, Run, address_of, compute, inputs_of, right, then
from hypothesis import HealthCheck, assume, given, settings

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.reference.convolution import numpy_dtype, round_once
from miofind.verify.claims import Claims
from miofind.verify.verifier import Verification, Verifier

pytestmark = pytest.mark.sampled(2)

SMALL = ProblemDescription.convolution(x=(2, 8, 9, 9), w=(12, 8, 3, 3), padding=1)
HALF = ProblemDescription.convolution(x=(2, 64, 9, 9), w=(12, 64, 3, 3), padding=1, dtype="float16", layout="NHWC")
DIRECTIONS = [
    ProblemDescription.convolution(x=(2, 8, 9, 9), w=(12, 8, 3, 3), padding=1, direction=direction)
    for direction in Direction
]


def verify(problem: ProblemDescription, run: Run, *, exact: bool = True, workspace_bytes: int = 0) -> Verification:
    with Verifier(problem, Device.cpu(), None, seed=7) as verifier:  # type: ignore[arg-type]
        return verifier.verify(FakeInvoker(problem, run, workspace_bytes=workspace_bytes), Claims(exact=exact))


@given(problem=problems())
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_right_results_pass(problem: ProblemDescription) -> None:
    assume(problem.flops < 5e6 and problem.bytes < 2e6)
    verdict = verify(problem, right(problem))
    assert verdict.ok, verdict.message
    assert verdict.message == ""
    assert verdict.bound_ratio is not None
    assert verdict.bound_ratio <= 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("direction", Direction)
def test_accumulation_in_the_usual_type_passes_with_margin(direction: Direction, dtype: str) -> None:
    problem = ProblemDescription.convolution(
        x=(4, 32, 14, 14), w=(48, 32, 3, 3), padding=1, dtype=dtype, direction=direction
    )
    accumulator = np.float64 if dtype == "float64" else np.float32
    verdict = verify(problem, accumulated_in(problem, accumulator))
    assert verdict.ok, verdict.message
    assert verdict.bound_ratio is not None
    assert verdict.bound_ratio < 0.5


@pytest.mark.parametrize("problem", DIRECTIONS, ids=str)
def test_all_zero_output_is_caught(problem: ProblemDescription) -> None:
    verdict = verify(problem, lambda tensors, _: tensors[problem.direction.output].fill(0))
    assert not verdict.ok
    assert "exact gate" in verdict.message
    assert not verify(problem, lambda tensors, _: tensors[problem.direction.output].fill(0), exact=False).ok


@pytest.mark.parametrize("exact", [True, False])
def test_one_dropped_tap_is_caught(exact: bool) -> None:
    def run(tensors: dict[str, Any], _: Any) -> None:
        w = tensors["w"].copy()
        w[-1, -1, -1, -1] = 0
        tensors["y"][...] = compute(SMALL, {**tensors, "w": w})

    verdict = verify(SMALL, run, exact=exact)
    assert not verdict.ok
    assert verdict.message.startswith(f"{'exact' if exact else 'numeric'} gate (x * 2^")
    assert "seed 7: " in verdict.message


@pytest.mark.parametrize("problem", DIRECTIONS, ids=str)
def test_the_exact_gate_tells_wrong_elements_in_whole_numbers(problem: ProblemDescription) -> None:
    """However its inputs are scaled: a reader sees by how many products of -1, 0 and 1 a sum is off."""
    first, second = problem.direction.inputs

    def run(tensors: dict[str, Any], _: Any) -> None:
        negated = {first: -tensors[first], second: tensors[second]}
        tensors[problem.direction.output][...] = compute(problem, tensors | negated)

    message = verify(problem, run).message
    assert message.startswith("exact gate"), message
    told = re.search(r"got (-?\d+)\.0, wanted (-?\d+)\.0 within 0, all times 2\^-?\d+", message)
    assert told, message
    assert int(told[1]) == -int(told[2]) != 0


def test_one_dropped_tap_at_one_place_is_caught() -> None:
    def run(tensors: dict[str, Any], _: Any) -> None:
        right(SMALL)(tensors, None)
        tensors["y"][1, 11, 8, 8] -= tensors["x"][1, 7, 8, 8] * tensors["w"][11, 7, 1, 1]

    verdict = verify(SMALL, run, exact=False)
    assert not verdict.ok
    assert "1 of 1944 checked elements" in verdict.message
    assert "(1, 11, 8, 8)" in verdict.message
    assert re.search(r"got -?\d.*wanted -?\d.* within", verdict.message)


@pytest.mark.parametrize("problem", [SMALL, HALF], ids=str)
def test_one_unwritten_element_is_caught_wherever_it_is(problem: ProblemDescription) -> None:
    def run(tensors: dict[str, Any], _: Any) -> None:
        y = tensors["y"]
        poison = y[1, 3, 2, 5].copy()
        right(problem)(tensors, None)
        y[1, 3, 2, 5] = poison

    verdict = verify(problem, run)
    assert not verdict.ok
    assert f"1 of {problem.y.size} elements of y are unwritten or NaN, the first at (1, 3, 2, 5)" in verdict.message


@pytest.mark.parametrize("offset", [-1, 0], ids=["before", "after"])
@pytest.mark.parametrize("name", ["x", "w", "y"])
def test_an_overwritten_guard_band_is_caught(name: str, offset: int) -> None:
    size = SMALL.tensor(name).bytes

    def damage(tensors: dict[str, Any], _: Any) -> None:
        ctypes.memset(address_of(tensors[name]) + (size if offset == 0 else offset), 0, 1)

    verdict = verify(SMALL, then(right(SMALL), damage))
    assert not verdict.ok
    assert f"the guard band {'after' if offset == 0 else 'before'} {name}" in verdict.message


def test_an_overwritten_guard_band_of_the_workspace_is_caught() -> None:
    def damage(_: dict[str, Any], workspace: Any) -> None:
        ctypes.memset(address_of(workspace) + 1000, 0, 4)

    verdict = verify(SMALL, then(right(SMALL), damage), workspace_bytes=1000)
    assert not verdict.ok
    assert "after the workspace" in verdict.message


def test_a_workspace_expected_to_be_zero_is_caught() -> None:
    def run(tensors: dict[str, Any], workspace: Any) -> None:
        right(SMALL)(tensors, None)
        tensors["y"][0, 0, 0, 0] += workspace.view(np.float32)[0]

    assert not verify(SMALL, run, workspace_bytes=1024).ok


@pytest.mark.parametrize("problem", DIRECTIONS, ids=str)
def test_an_overwritten_input_is_caught_and_mended(problem: ProblemDescription) -> None:
    name = problem.direction.inputs[1]

    def spoil(tensors: dict[str, Any], _: Any) -> None:
        tensors[name].reshape(-1)[5] = 3

    with Verifier(problem, Device.cpu(), None) as verifier:  # type: ignore[arg-type]
        verdict = verifier.verify(FakeInvoker(problem, then(right(problem), spoil)), Claims())
        assert not verdict.ok
        assert f"overwritten: input {name}" in verdict.message
        assert verifier.verify(FakeInvoker(problem, right(problem)), Claims()).ok


@pytest.mark.parametrize("exact", [True, False])
def test_accumulation_in_float16_is_caught(exact: bool) -> None:
    run = accumulated_in(HALF, np.float16)
    verdict = verify(HALF, run, exact=exact)
    assert not verdict.ok
    assert ("exact gate" if exact else "numeric gate") in verdict.message


def test_truncation_to_float16_instead_of_rounding_is_caught() -> None:
    def run(tensors: dict[str, Any], _: Any) -> None:
        exact = compute(HALF, tensors)
        nearest = round_once(exact, HALF.y.dtype)
        too_large = np.abs(nearest.astype(np.float64)) > np.abs(exact)
        tensors["y"][...] = np.where(too_large, np.nextafter(nearest, np.float16(0)), nearest)

    verdict = verify(HALF, run, exact=False)
    assert not verdict.ok
    assert verdict.bound_ratio is not None
    assert verdict.bound_ratio > 1


def test_float32_rounded_to_bfloat16_steps_is_caught() -> None:
    def run(tensors: dict[str, Any], _: Any) -> None:
        tensors["y"][...] = round_once(compute(SMALL, tensors), DataType.BFLOAT16)

    assert not verify(SMALL, run).ok


def test_infinity_and_nan_are_caught() -> None:
    for value in (np.inf, np.nan):

        def run(tensors: dict[str, Any], _: Any, value: float = value) -> None:
            right(SMALL)(tensors, None)
            tensors["y"][0, 1, 2, 3] = value

        assert "(0, 1, 2, 3)" in verify(SMALL, run).message


def test_outputs_that_meet_only_padding_must_be_zero() -> None:
    problem = ProblemDescription.convolution(x=(1, 2, 3, 3), w=(2, 2, 1, 1), padding=2)
    verdict = verify(problem, right(problem))
    assert verdict.ok, verdict.message

    def run(tensors: dict[str, Any], _: Any) -> None:
        right(problem)(tensors, None)
        tensors["y"][0, 0, 0, 0] = 1e-20

    assert not verify(problem, run).ok


def test_growth_widens_the_numeric_gate_alone() -> None:
    noise = 1e-5

    def run(tensors: dict[str, Any], _: Any) -> None:
        y = compute(SMALL, tensors)
        inexact = np.unique(np.abs(tensors["x"])).size > 3  # 0, and 1 times two powers of two
        tensors["y"][...] = y * (1 + noise) if inexact else y

    with Verifier(SMALL, Device.cpu(), None) as verifier:  # type: ignore[arg-type]
        invoker = FakeInvoker(SMALL, run)
        assert not verifier.verify(invoker, Claims()).ok
        verdict = verifier.verify(invoker, Claims(growth=100.0))
        assert verdict.ok
        assert verdict.max_error == pytest.approx(noise, rel=0.9)


def test_inputs_are_fresh_for_each_verifier_and_seeds_repeat_them() -> None:
    seen: list[np.ndarray] = []

    def run(tensors: dict[str, Any], _: Any) -> None:
        seen.append(tensors["x"].copy())
        right(SMALL)(tensors, None)

    firsts = []
    for seed in (None, None, 3, 3):
        seen.clear()
        with Verifier(SMALL, Device.cpu(), None, seed=seed) as verifier:  # type: ignore[arg-type]
            verifier.verify(FakeInvoker(SMALL, run), Claims(exact=False))
        firsts.append(seen[0])
    assert not np.array_equal(firsts[0], firsts[1])
    np.testing.assert_array_equal(firsts[2], firsts[3])


def test_exactness_is_not_asked_of_those_that_do_not_claim_it() -> None:
    values: list[set[float]] = []

    def run(tensors: dict[str, Any], _: Any) -> None:
        values.append(set(np.unique(tensors["x"]).tolist()))
        right(SMALL)(tensors, None)

    signs = {sign * 2.0**power for sign in (-1, 1) for power in (88, -130)}
    verify(SMALL, run, exact=False)
    assert {0.0, *signs} not in values
    values.clear()
    verify(SMALL, run, exact=True)
    assert values[0] == {0.0, *signs}


def test_what_a_candidate_raises_becomes_a_launch_error_with_its_cause() -> None:
    def run(tensors: dict[str, Any], _: Any) -> None:
        raise RuntimeError("plan refused")

    with pytest.raises(LaunchError, match=r"Fake \{\} failed .*plan refused") as caught:
        verify(SMALL, run)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_running_out_of_memory_stays_a_memory_error() -> None:
    def run(tensors: dict[str, Any], _: Any) -> None:
        raise MemoryError("no")

    with pytest.raises(MemoryError):
        verify(SMALL, run)


def test_references_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import miofind.verify.harness_host as harness_host

    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    original = harness_host.reference_on_host
    monkeypatch.setattr(harness_host, "reference_on_host", counted)
    with Verifier(SMALL, Device.cpu(), None) as verifier:  # type: ignore[arg-type]
        for _ in range(3):
            assert verifier.verify(FakeInvoker(SMALL, right(SMALL)), Claims()).ok
    assert calls == 7  # sums; sums, magnitudes and squares; the same with infinities


def test_a_fault_outside_the_sample_is_still_seen_if_unwritten() -> None:
    problem = ProblemDescription.convolution(x=(64, 64, 28, 28), w=(64, 64, 3, 3), padding=1)
    verdict = verify(problem, lambda tensors, _: tensors["y"][:63].fill(1))
    assert f"{64 * 28 * 28} of {problem.y.size} elements of y are unwritten" in verdict.message


def accumulated_in(problem: ProblemDescription, kind: Any) -> Run:
    """Direct convolution whose every product and sum is rounded to `kind`, one tap and channel at a time."""

    def run(tensors: dict[str, Any], _: Any) -> None:
        out = tensors[problem.direction.output]
        out[...] = _accumulated(problem, inputs_of(problem, tensors), kind).astype(numpy_dtype(problem.output.dtype))

    return run


def _accumulated(problem: ProblemDescription, tensors: dict[str, Any], kind: Any) -> np.ndarray:
    assert problem.groups == 1
    n, c, h, w = problem.x.shape
    x = np.zeros((n, c, h + 2, w + 2), kind)
    y = np.zeros(problem.y.shape, kind)
    filters = np.zeros(problem.w.shape, kind)
    forward, data = problem.direction is Direction.FORWARD, problem.direction is Direction.BACKWARD_DATA
    if "x" in tensors:
        x[:, :, 1:-1, 1:-1] = tensors["x"].astype(kind)
    if "y" in tensors:
        y[...] = tensors["y"].astype(kind)
    if "w" in tensors:
        filters[...] = tensors["w"].astype(kind)
    for a in range(problem.filter[0]):
        for b in range(problem.filter[1]):
            window = x[:, :, a : a + h, b : b + w]
            tap = filters[:, :, a, b]
            if forward:
                for channel in range(c):
                    y += window[:, channel, None] * tap[None, :, channel, None, None]
            elif data:
                for k in range(problem.k):
                    window += y[:, k, None] * tap[None, k, :, None, None]
            else:
                for image in range(n):
                    tap += np.einsum("khw,chw->kc", y[image], window[image])
    return y if forward else x[:, :, 1:-1, 1:-1] if data else filters
