"""Verification of fused convolutions on the CPU place: right results pass whatever the epilogue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.runs.fake_invokers import FakeInvoker, Run, compute, right, then

from miofind.core.epilogue import DEFAULT_PARAMETERS, DERIVATIVES, Activation
from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.device.device import Device
from miofind.reference.convolution import numpy_dtype, round_once
from miofind.solver.steps import RUN_PARAMETERS
from miofind.verify import harness_host
from miofind.verify.claims import Claims
from miofind.verify.harness_host import random_values
from miofind.verify.verifier import Verification, Verifier

CLAIMS = Claims()
FORMS = ("{}", "bias.{}", "scale.bias.channel_bias.residual.{}", "float32.scale.{}.residual")


def fused(epilogue: str, dtype: str = "float16", layout: str = "NHWC") -> ProblemDescription:
    words = [word for word in epilogue.split(".") if word != "none" and (word, dtype) != ("float32", "float32")]
    return ProblemDescription.convolution(
        x=(3, 12, 7, 6), w=(18, 4, 3, 3), groups=3, padding=1, dtype=dtype, layout=layout, epilogue=".".join(words)
    )


def verify(problem: ProblemDescription, run: Run, claims: Claims = CLAIMS) -> Verification:
    with Verifier(problem, Device.cpu(), None, seed=7) as verifier:  # type: ignore[arg-type]
        verdict = verifier.verify(FakeInvoker(problem, run), claims)
        if verdict.ok:
            assert verifier.repeat(FakeInvoker(problem, run), claims, verdict.fingerprint) == ""
        return verdict


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("activation", Activation)
def test_right_results_pass(activation: Activation, dtype: str, form: str) -> None:
    if "float32" in form and dtype == "float64":
        form = FORMS[3].removeprefix("float32.")
    problem = fused(form.format(activation), dtype, layout="NCHW" if dtype == "float32" else "NHWC")
    for claims in (Claims(), Claims(exact=False)):
        verdict = verify(problem, right(problem), claims)
        assert verdict.ok, verdict.message
        assert verdict.bound_ratio is not None
        assert verdict.bound_ratio <= 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", ["d{}", "residual.d{}"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_right_gradients_pass(derivative: Activation, dtype: str, form: str) -> None:
    problem = ProblemDescription.convolution(
        x=(3, 12, 8, 6),
        w=(18, 12, 2, 1),
        stride=(3, 2),
        direction="backward_data",
        dtype=dtype,
        layout="NCHW" if dtype == "float32" else "NHWC",
        epilogue=form.format(derivative),
    )
    for claims in (Claims(), Claims(exact=False)):
        verdict = verify(problem, right(problem), claims)
        assert verdict.ok, verdict.message


@pytest.mark.parametrize("activation", Activation)
def test_an_error_in_half_of_the_sums_is_seen_through_any_activation(activation: Activation) -> None:
    """Those below their mean, which a saturating activation lets no one see, and those above it."""
    problem = fused(f"bias.{activation}")

    def wrong(side: int) -> Run:
        def run(tensors: dict[str, Any], _: Any) -> None:
            w = tensors["w"].copy()
            w[:, 0] = 0
            above = side * compute(problem.bare, tensors) > 0
            values = np.where(above, compute(problem, {**tensors, "w": w}), compute(problem, tensors))
            tensors["y"][...] = round_once(values, problem.y.dtype)

        return run

    for side in (-1, 1):
        assert "exact gate" in verify(problem, wrong(side)).message


def test_runs_have_the_default_numbers_or_no_default_among_theirs() -> None:
    problem, seen = fused("scale.bias.residual.relu"), []
    verify(problem, then(right(problem), lambda tensors, _: seen.append(tensors[RUN_PARAMETERS])))
    assert DEFAULT_PARAMETERS in seen, "a library may have made a plan of its own for them"
    others = set(seen) - {DEFAULT_PARAMETERS}
    assert len(others) > 2
    for field in ("alpha", "beta", "low", "high", "slope"):
        assert getattr(DEFAULT_PARAMETERS, field) not in {getattr(each, field) for each in others}


def test_operands_come_in_the_shapes_that_users_have() -> None:
    problem, seen = fused("scale.bias.channel_bias.residual.relu"), []

    def see(tensors: dict[str, Any], _: Any) -> None:
        seen.append({name: each.shape for name, each in tensors.items() if name != RUN_PARAMETERS})

    assert verify(problem, then(right(problem), see)).ok
    assert all(each == {operand.name: operand.shape for operand in problem.operands} for each in seen)


@pytest.mark.parametrize("name", ["scale", "bias", "channel_bias", "residual"])
def test_an_overwritten_operand_is_named(name: str) -> None:
    problem = fused("scale.bias.channel_bias.residual.silu", "float32")

    def spoil(tensors: dict[str, Any], _: Any) -> None:
        tensors[name][(-1,) * tensors[name].ndim] += 1

    assert f"input {name}" in verify(problem, then(right(problem), spoil)).message


@pytest.mark.parametrize("values", [Values.DYADIC, Values.POSITIVE])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_operands_of_exact_trials_are_few_digits_that_every_type_holds(dtype: str, values: Values) -> None:
    tensor = fused("bias", dtype).y
    drawn = random_values(tensor, values, seed=3)
    held = drawn.astype(numpy_dtype(tensor.dtype)).astype(np.float64)
    assert (held == drawn).all()
    assert set((64 * held).reshape(-1).tolist()) <= {*range(-128, 0), *range(1, 129)}
    assert np.unique(held).size > 100
    assert (held.min() > 0) == (values is Values.POSITIVE)


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_meets_its_own_operands(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an output too large to be compared whole."""
    monkeypatch.setattr(harness_host, "_THIN_PRODUCTS", 0)
    monkeypatch.setattr(harness_host, "_DENSE_PRODUCTS", 0)
    problem = fused(form.format("gelu"))
    assert verify(problem, right(problem)).ok

    def spoil(tensors: dict[str, Any], _: Any) -> None:
        tensors["y"][:, 4] = 0

    assert "are wrong" in verify(problem, then(right(problem), spoil)).message
