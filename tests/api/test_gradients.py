"""Gradients in one call: what is wanted, where it is written, and what is done once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.api import array_call
from miofind.arrays import arrays
from miofind.errors import InvalidArrayError, InvalidOptionError, InvalidProblemError
from miofind.reference.convolution import reference_on_host

FAST = miofind.FindOptions(find_mode="fast", on_miss="estimate")
PROBLEM = miofind.ProblemDescription.convolution(x=(2, 4, 9, 7), w=(6, 2, 3, 3), padding=1, stride=2, groups=2)
GENERATOR = np.random.default_rng(0)
DY, X, W = (GENERATOR.standard_normal(PROBLEM.tensor(n).shape).astype(np.float32) for n in ("y", "x", "w"))
WANTED = {
    "x": reference_on_host(PROBLEM.in_direction(miofind.Direction.BACKWARD_DATA), w=W, y=DY),
    "w": reference_on_host(PROBLEM.in_direction(miofind.Direction.BACKWARD_WEIGHTS), x=X, y=DY),
    "bias": DY.astype(np.float64).sum((0, 2, 3)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    database = tmp_path_factory.mktemp("gradients") / "finddb.db"
    with miofind.Handle("cpu", database=database, strict=True) as handle:
        yield {"padding": 1, "stride": 2, "groups": 2, "handle": handle, "options": FAST}


def check(result: miofind.Gradients[Any], names: tuple[str, ...]) -> None:
    for name, array in zip(("x", "w", "bias"), result, strict=True):
        assert (array is not None) == (name in names)
        if array is not None:
            np.testing.assert_allclose(array, WANTED[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wanted",
    [("x",), ("w",), ("bias",), ("x", "w"), ("x", "bias"), ("w", "bias"), ("bias", "w", "x"), "w", {"bias"}],
    ids=str,
)
def test_any_gradients_are_computed_and_no_others(run: dict[str, Any], wanted: Any) -> None:
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    check(miofind.convolution_gradients(DY, X, W, wanted, **run), names)


def test_gradients_lie_in_memory_as_what_they_are_of(run: dict[str, Any]) -> None:
    """And an output that is given decides for itself."""
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(X, 1, -1)), -1, 1)
    dx, dw, _ = miofind.convolution_gradients(DY, last, W, **run)
    assert dx is not None
    assert dw is not None
    assert (dx.strides, dw.strides) == (last.strides, W.strides)
    out = (np.empty_like(X), None, np.empty(6, np.float32))
    result = miofind.convolution_gradients(DY, last, W, out=out, **run)
    check(result, ("x", "w", "bias"))
    assert result.dx is out[0]
    assert result.bias is out[2]
    again = miofind.convolution_gradients(DY, X, W, out=result, **run)
    assert [a is b for a, b in zip(again, result, strict=True)] == [True] * 3


def test_the_bias_gradient_comes_with_that_of_the_weights(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "channel_sums", lambda *_: pytest.fail("dy was read a second time"))
    check(miofind.convolution_gradients(DY, X, W, **run), ("x", "w", "bias"))


def test_a_copy_is_made_once(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, ...]] = []
    real = arrays.packed_copy
    monkeypatch.setattr(arrays, "packed_copy", lambda a, *rest: copied.append(a.shape) or real(a, *rest))
    memory = np.zeros((*DY.shape[:-1], 2 * DY.shape[-1]), np.float32)
    memory[..., ::2] = DY
    check(miofind.convolution_gradients(memory[..., ::2], X, W, **run), ("x", "w", "bias"))
    assert copied == [DY.shape]


def test_deterministic_gradients_come_from_deterministic_solutions(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[miofind.FindOptions | None] = []
    real = array_call.find_solutions

    def find(*args: Any, options: miofind.FindOptions | None, handle: miofind.Handle) -> list[miofind.Solution]:
        asked.append(options)
        return real(*args, options=options, handle=handle)

    monkeypatch.setattr(array_call, "find_solutions", find)
    check(miofind.convolution_gradients(DY, X, W, deterministic=True, **run), ("x", "w", "bias"))
    check(miofind.convolution_gradients(DY, X, W, **run), ("x", "w", "bias"))
    assert [options.deterministic for options in asked if options] == [True, True, False, False]
    assert {options.find_mode for options in asked if options} == {FAST.find_mode}


SMALL = tuple(
    GENERATOR.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 6, 5), (2, 4, 6, 5), (4, 4, 3, 3))
)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("places", "told"),
    [
        ({"x": "x"}, "dx of out shares memory with x, which would be overwritten"),
        ({"w": "w"}, "dw of out shares memory with w"),
        ({"x": "memory", "w": "memory"}, "dw of out shares memory with dx of out"),
        ({"x": "memory", "bias": "memory"}, "bias of out shares memory with dx of out"),
        ({"bias": "w"}, "bias of out shares memory with w"),
        ({"bias": "dy", "wanted": ("x", "bias")}, "bias of out shares memory with dy"),
        ({"bias": "dy", "wanted": "bias"}, "bias of out shares memory with dy"),
    ],
)
def test_outputs_share_no_memory_with_what_a_later_run_reads(
    run: dict[str, Any], framework: str, places: dict[str, Any], told: str
) -> None:
    """And nothing is written: each run by itself would take its own operands."""
    dy, x, w = (array.copy() for array in SMALL)
    memory = {"dy": dy, "x": x, "w": w, "memory": np.zeros(x.size, np.float32)}
    shapes = {"x": x.shape, "w": w.shape, "bias": (4,)}
    outs = [
        memory[places[n]].reshape(-1)[: np.prod(shapes[n])].reshape(shapes[n]) if n in places else None for n in shapes
    ]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        dy, x, w = (torch.from_numpy(array) for array in (dy, x, w))
        outs = [None if array is None else torch.from_numpy(array) for array in outs]
    arguments = {"wanted": places.get("wanted", ("x", "w", "bias")), "padding": 1, "handle": run["handle"]}
    with pytest.raises(InvalidArrayError, match=told):
        miofind.convolution_gradients(dy, x, w, out=outs, options=FAST, **arguments)
    assert [np.array_equal(a, b) for a, b in zip((dy, x, w), SMALL, strict=True)] == [True] * 3
    assert not memory["memory"].any()


def test_what_nothing_reads_may_be_written_to(run: dict[str, Any]) -> None:
    """And an array beside another in one memory."""
    dy, x, w = (array.copy() for array in SMALL)
    arguments = {"padding": 1, "handle": run["handle"], "options": FAST}
    wanted = miofind.convolution_gradients(dy, x, w, **arguments)
    memory = np.empty(x.size + w.size + 4, np.float32)
    dx, dw, bias = np.split(memory, (x.size, x.size + w.size))
    result = miofind.convolution_gradients(dy, x, w, out=(dx.reshape(x.shape), dw.reshape(w.shape), bias), **arguments)
    for array, other in zip(result, wanted, strict=True):
        np.testing.assert_array_equal(array, other)
    both = miofind.convolution_gradients(dy, x, w, ("x", "bias"), out=(x, None, None), **arguments)
    assert both.dx is x
    np.testing.assert_array_equal(x, wanted.dx)
    np.testing.assert_array_equal(both.bias, wanted.bias)


@pytest.mark.parametrize(
    "given",
    [
        {"dy": DY[:, :3]},
        {"dy": DY[:1]},
        {"dy": DY[:, :, :2]},
        {"dy": DY.astype(np.float64)},
        {"x": X[:, :2]},
        {"w": W[:4]},
        {"stride": 3},
    ],
    ids=["channels", "batch", "size", "dtype", "x", "w", "stride"],
)
def test_a_bias_gradient_alone_is_of_a_convolution(run: dict[str, Any], given: dict[str, Any]) -> None:
    """It says the same as with dw."""
    told = []
    for names in (("w", "bias"), ("bias",)):
        with pytest.raises((InvalidArrayError, InvalidProblemError)) as raised:
            miofind.convolution_gradients(**{"dy": DY, "x": X, "w": W, "wanted": names, **run, **given})
        told.append(str(raised.value))
    assert told[0] == told[1]


def read_only() -> Any:
    array = np.empty(6, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("bias", "told"),
    [
        (read_only(), "bias of out is read-only: pass an array that can be written"),
        (np.empty(6), "bias of out has dtype float64: use float32, as w has"),
        (np.empty(6, np.float16), "bias of out has dtype float16: use float32, as w has"),
        (np.empty(12, np.float32)[::2], "bias of out has strides"),
    ],
    ids=["read-only", "float64", "float16", "gaps"],
)
@pytest.mark.parametrize("wanted", ["bias", ("x", "bias")], ids=str)
def test_a_bias_gradient_alone_is_written_to_such_an_array(
    run: dict[str, Any], wanted: Any, bias: Any, told: str
) -> None:
    with pytest.raises(InvalidArrayError, match=told):
        miofind.convolution_gradients(DY, X, W, wanted, out=(None, None, bias), **run)


def test_a_bias_gradient_alone_is_written_by_the_library_that_sums(run: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArrayError, match="bias of out is an array of torch, dy of numpy: pass both of one"):
        miofind.convolution_gradients(DY, X, W, "bias", out=(None, None, torch.empty(6)), **run)
    dy, x, w = (torch.from_numpy(array) for array in (DY, X, W))
    with pytest.raises(InvalidArrayError, match="bias of out is an array of numpy, dy of torch"):
        miofind.convolution_gradients(dy, x, w, "bias", out=(None, None, np.empty(6, np.float32)), **run)


def test_a_bias_gradient_alone_is_rounded_once(run: dict[str, Any]) -> None:
    """To float32 where it is written so, not to float16 before."""
    dy, x, w = (array.astype(np.float16) for array in (DY, X, W))
    bias = np.empty(6, np.float32)
    assert miofind.convolution_gradients(dy, x, w, "bias", out=(None, None, bias), **run).bias is bias
    np.testing.assert_array_equal(bias, dy.astype(np.float64).sum((0, 2, 3)).astype(np.float32))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"wanted": "y"}, "wanted='y' must be some of x, w, bias"),
        ({"wanted": ()}, "must be some of x, w, bias"),
        ({"wanted": None}, "wanted=None must be some of"),
        ({"wanted": "x", "out": (None, W, None)}, "out has an array for the gradient of w, which is not wanted"),
        ({"out": W}, r"must be a tuple of 3 arrays: \(dx, dw, bias\)"),
        ({"wanted": "bias", "out": (None, None, np.zeros(5))}, r"bias of out has shape \(5,\), dy has 6"),
        ({"x": X[0]}, "dy has shape .* and x .*: give both a batch or none"),
        ({"x": X[:, :, :4]}, "dy has shape"),
        ({"bias_gradient": True}, r"unknown arguments \['bias_gradient'\]"),
        ({"determinstic": True}, r"Did you mean deterministic\? Known are .* wanted"),
    ],
)
def test_what_is_wrong_is_named(run: dict[str, Any], arguments: dict[str, Any], told: str) -> None:
    given = {"dy": DY, "x": X, "w": W, **arguments}
    with pytest.raises((InvalidArrayError, InvalidOptionError, InvalidProblemError), match=told):
        miofind.convolution_gradients(**given, **run)
