"""Convolutions that are prepared once: what they run, keep, refuse, and their gradients."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.api import solutions
from miofind.errors import InvalidArrayError, InvalidProblemError, WorkspaceError
from miofind.reference.convolution import reference_on_host

FAST = miofind.FindOptions(find_mode="fast", on_miss="estimate")
GENERATOR = np.random.default_rng(0)
X, W, BIAS = (GENERATOR.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 6, 5), (6, 4, 3, 3), (6,)))
RESIDUAL = GENERATOR.standard_normal((2, 6, 6, 5)).astype(np.float32)
PROBLEM = miofind.ProblemDescription.from_arrays(x=X, w=W, padding=1)
Y = reference_on_host(PROBLEM, x=X, w=W)
DY = RESIDUAL


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    database = tmp_path_factory.mktemp("bound") / "finddb.db"
    with miofind.Handle("cpu", database=database, strict=True) as handle:
        yield {"handle": handle, "options": FAST}


def close(result: Any, wanted: Any) -> None:
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_the_four_forms_of_a_call(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    conv = miofind.Convolution.of(X, W, padding=1, **found).prepare()
    monkeypatch.setattr(solutions, "find", lambda *_: pytest.fail("something was found"))
    out, workspace = np.empty_like(RESIDUAL), np.empty(conv.workspace_bytes, np.uint8)
    close(conv(X), Y)
    close(conv(X, 2 * W), 2 * Y)
    assert conv(X, out=out, workspace=workspace) is out
    close(out, Y)
    close(conv(X, 2 * W, out=out), 2 * Y)
    assert conv.problem == PROBLEM


@pytest.mark.parametrize("direction", list(miofind.Direction))
def test_a_convolution_of_a_problem_takes_its_inputs_in_order(
    found: dict[str, Any], direction: miofind.Direction
) -> None:
    problem = PROBLEM.in_direction(direction)
    given = {"x": X, "w": W, "y": DY}
    first, second = (given[name] for name in direction.inputs)
    conv: miofind.Convolution[Any, Any] = miofind.Convolution(problem, **found)
    wanted = reference_on_host(problem, **{name: given[name] for name in direction.inputs})
    close(conv(first, second), wanted)
    with pytest.raises(InvalidArrayError, match=f"a {direction} solution takes .* and"):
        conv(first)


def test_scale_and_bias_are_kept_and_numbers_are_of_each_call(found: dict[str, Any]) -> None:
    conv = miofind.Convolution.of(X, W, bias=BIAS, residual=RESIDUAL, activation="relu", padding=1, **found)
    for alpha in (1.0, 0.5):
        wanted = np.maximum(alpha * Y + BIAS[:, None, None] + RESIDUAL, 0)
        close(conv(X, residual=RESIDUAL, alpha=alpha), wanted)
    close(conv(X, residual=RESIDUAL, bias=0 * BIAS), np.maximum(Y + RESIDUAL, 0))
    with pytest.raises(InvalidArrayError, match="takes x, w, bias and residual; given: x, w, bias"):
        conv(X)
    result = miofind.Convolution.of(X, W, statistics=True, padding=1, **found)(X)
    assert isinstance(result, miofind.OutputStatistics)
    close(result.sum, Y.sum((0, 2, 3)))


def test_calls_are_as_strict_as_a_run(found: dict[str, Any]) -> None:
    conv = miofind.Convolution.of(X, W, padding=1, **found)
    with pytest.raises(InvalidArrayError, match="x has strides"):
        conv(np.asfortranarray(X))
    with pytest.raises(InvalidArrayError, match="x has dtype float64"):
        conv(X.astype(np.float64))
    options = miofind.FindOptions(find_mode="fast", only="ConvCpuIm2colGemm")
    needy: miofind.Convolution[Any, Any] = miofind.Convolution(PROBLEM, handle=found["handle"], options=options)
    with pytest.raises(WorkspaceError, match=f"the solution needs {needy.workspace_bytes}"):
        needy(X, W, workspace=np.empty(1, np.uint8))
    with pytest.raises(InvalidArrayError, match="neither packed"):
        miofind.Convolution.of(np.asfortranarray(X), W, padding=1, **found)
    with pytest.raises(InvalidProblemError, match="Did you mean padding"):
        miofind.Convolution.of(X, W, pading=1, **found)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="pickle its problem"):
        pickle.dumps(conv)


def test_gradients_are_bound_too(found: dict[str, Any]) -> None:
    gradients = miofind.Convolution.of(X, W, bias=BIAS, padding=1, **found).gradients.prepare()
    wanted = {
        "x": reference_on_host(PROBLEM.in_direction(miofind.Direction.BACKWARD_DATA), w=W, y=DY),
        "w": reference_on_host(PROBLEM.in_direction(miofind.Direction.BACKWARD_WEIGHTS), x=X, y=DY),
        "bias": DY.sum((0, 2, 3)),
    }
    close(gradients.data(DY), wanted["x"])
    close(gradients.weights(DY, X), wanted["w"])
    everything = gradients(DY, X)
    assert gradients(DY, X, out=everything).dw is everything.dw
    for names in (("x", "w", "bias"), ("w",), ("bias",), ("x",)):
        result = gradients(DY, X, wanted=names)
        for name, array in zip(wanted, result, strict=True):
            assert (array is not None) == (name in names)
            if array is not None:
                close(array, wanted[name])
    with pytest.raises(InvalidArrayError, match="dy has shape"):
        gradients(DY[:1], wanted="bias")


def test_bound_gradients_share_no_memory(found: dict[str, Any]) -> None:
    """Not with w either that is kept."""
    x, w, dy = np.concatenate([X, X[:, :2]], 1), np.concatenate([W, W[:, :2]], 1), DY.copy()
    gradients = miofind.Convolution.of(x, w, padding=1, **found).gradients
    memory = np.empty(x.size, np.float32)
    for out, told in (
        ((x, None, None), "dx of out shares memory with x"),
        ((None, w, None), "dw of out shares memory with w"),
        ((None, None, w.reshape(-1)[:6]), "bias of out shares memory with w"),
        ((memory.reshape(x.shape), memory[: w.size].reshape(w.shape), None), "dw of out shares memory with dx of out"),
    ):
        with pytest.raises(InvalidArrayError, match=told):
            gradients(dy, x, out=out)
    with pytest.raises(InvalidArrayError, match="bias of out shares memory with dy"):
        gradients(dy, wanted="bias", out=(None, None, dy.reshape(-1)[:6]))
    np.testing.assert_array_equal(dy, DY)
    wanted = gradients(dy, x, w)
    np.testing.assert_array_equal(gradients(dy, x, wanted="w", out=(None, w, None)).dw, wanted.dw)


def test_a_bound_bias_gradient_alone_is_as_strict(found: dict[str, Any]) -> None:
    gradients = miofind.Convolution.of(X, W, padding=1, **found).gradients
    read_only = np.empty(6, np.float32)
    read_only.flags.writeable = False
    for dy, bias, told in (
        (DY.astype(np.float64), None, "dy has dtype float64, the problem wants float32"),
        (DY[:, :4], None, "dy has shape"),
        (np.asfortranarray(DY), None, "dy has strides"),
        (DY, read_only, "bias of out is read-only"),
        (DY, np.empty(6), "bias of out has dtype float64"),
    ):
        with pytest.raises(InvalidArrayError, match=told):
            gradients(dy, wanted="bias", out=(None, None, bias))


def test_gradients_begin_at_the_sums(found: dict[str, Any]) -> None:
    with pytest.raises(InvalidProblemError, match=r"epilogue=relu: gradients begin at the sums"):
        _ = miofind.Convolution.of(X, W, activation="relu", padding=1, **found).gradients
    backward: miofind.Convolution[Any, Any] = miofind.Convolution(
        PROBLEM.in_direction(miofind.Direction.BACKWARD_DATA), **found
    )
    with pytest.raises(InvalidProblemError, match="backward_data has no gradients"):
        _ = backward.gradients
