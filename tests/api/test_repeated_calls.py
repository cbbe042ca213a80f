"""Calls like earlier ones: they look nothing up, and are told from all that are not like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.api import array_call, repeated
from miofind.errors import InvalidArrayError, InvalidOptionError, InvalidProblemError

FAST = miofind.FindOptions(find_mode="fast", on_miss="estimate")
GENERATOR = np.random.default_rng(0)
X, W, BIAS = (GENERATOR.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 6, 5), (4, 4, 3, 3), (4,)))
DY = GENERATOR.standard_normal((2, 4, 6, 5)).astype(np.float32)


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    database = tmp_path_factory.mktemp("repeated") / "finddb.db"
    with miofind.Handle("cpu", database=database, strict=True) as handle:
        yield {"handle": handle, "options": FAST, "padding": 1}


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[miofind.Direction]:
    """The directions of the calls that posed their problem."""
    taken: list[miofind.Direction] = []
    real = array_call.run_call
    monkeypatch.setattr(
        array_call, "run_call", lambda way, *args, **more: taken.append(way) or real(way, *args, **more)
    )
    return taken


CALLS: dict[str, Callable[..., Any]] = {
    "forward": lambda **run: miofind.convolution(X, W, **run),
    "written": lambda **run: miofind.convolution(X, W, out=np.empty_like(DY), **run),
    "pairs": lambda **run: miofind.convolution(X, W, **{**run, "padding": ((1, 0), (0, 1))}),
    "fused": lambda **run: miofind.convolution(X, W, bias=BIAS, residual=DY, activation="relu", alpha=0.5, **run),
    "statistics": lambda **run: miofind.convolution(X, W, statistics=True, **run),
    "data": lambda **run: miofind.convolution_backward_data(DY, W, X.shape, **run),
    "weights": lambda **run: miofind.convolution_backward_weights(DY, X, W.shape, bias_gradient=True, **run),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_an_earlier_one_looks_nothing_up(
    run: dict[str, Any], long_ways: list[miofind.Direction], name: str
) -> None:
    first = CALLS[name](**run)
    for other in CALLS.values():
        other(**run)
    long_ways.clear()
    again = CALLS[name](**run)
    assert long_ways == []
    for one, two in zip(*((r if isinstance(r, tuple) else (r,)) for r in (first, again)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_values_that_differ_are_told_apart(run: dict[str, Any]) -> None:
    """Equal keys have equal problems: numbers of a run, layouts, dtypes, words."""
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(X, 1, -1)), -1, 1)
    for _ in range(2):
        one, two = (miofind.convolution(X, W, bias=BIAS, alpha=alpha, **run) for alpha in (1.0, 2.0))
        np.testing.assert_allclose(two - one, one - BIAS[:, None, None], rtol=1e-4, atol=1e-4)
        assert miofind.convolution(last, W, **run).strides != miofind.convolution(X, W, **run).strides
        assert miofind.convolution(X.astype(np.float64), W.astype(np.float64), **run).dtype == np.float64
        relu = miofind.convolution(X, W, activation="relu", **run)
        np.testing.assert_allclose(relu, np.maximum(miofind.convolution(X, W, activation=None, **run), 0), atol=1e-4)
        assert miofind.convolution(X, W, **{**run, "stride": 2}).shape == (2, 4, 3, 3)
        assert miofind.convolution(X, W, **{**run, "stride": (2, 1)}).shape == (2, 4, 3, 5)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"padding": True}, "padding=True must be an integer"),
        ({"padding": (1, True)}, "padding=True must be an integer"),
        ({"padding": ((1, 1), (1, True))}, "padding=True must be an integer"),
        ({"padding": 1.0}, "padding=1.0 must be an integer"),
        ({"groups": True}, "groups=True must be an integer"),
        ({"statistics": 1}, "statistics=1 must be True or False"),
        ({"activation": "relu6", "high": 5.0}, "relu6 has the bounds 0 and 6"),
        ({"pading": 1}, "Did you mean padding"),
        ({"given": 1, "roles": None}, "unknown arguments .'given', 'roles'."),
    ],
)
def test_what_is_refused_is_refused_though_an_equal_call_is_remembered(
    run: dict[str, Any], arguments: dict[str, Any], told: str
) -> None:
    for taken in ({}, {"padding": (1, 1)}, {"padding": ((1, 1), (1, 1))}, {"groups": 1}, {"statistics": True}):
        for _ in range(2):
            miofind.convolution(X, W, **{**run, **taken})
    miofind.convolution(X, W, activation="clamp", high=5.0, **run)
    miofind.convolution(X, W, activation="relu6", **run)
    for _ in range(2):
        with pytest.raises((InvalidProblemError, InvalidOptionError), match=told):
            miofind.convolution(X, W, **{**run, **arguments})


def test_calls_with_out_that_differ_in_what_their_shapes_leave_open_are_told_apart(run: dict[str, Any]) -> None:
    """Layouts, dtypes, keywords that say as much, their order, and their values."""
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(X, 1, -1)), -1, 1)
    wide = X.astype(np.float64), W.astype(np.float64)
    pairs = ({"stride": 1}, {"stride": 1, "dilation": 1}, {"dilation": 1, "stride": 1}, {"stride": (1, 1)})
    y = miofind.convolution(X, W, **run)
    for x, w, more in [(X, W, {}), (last, W, {}), (*wide, {}), (X, W, {}), *((X, W, pair) for pair in pairs)] * 3:
        out = np.full(y.shape, np.nan, x.dtype)
        assert miofind.convolution(x, w, out=out, **run, **more) is out
        np.testing.assert_allclose(out, y, rtol=1e-4, atol=1e-4)
    one, two = np.empty_like(y), np.empty_like(y)
    for _ in range(3):
        miofind.convolution(X, W, out=one, **{**run, "padding": ((1, 1), (0, 2))})
        miofind.convolution(X, W, out=two, **{**run, "padding": ((1, 1), (2, 0))})
        np.testing.assert_allclose(one[..., :-2], two[..., 2:], rtol=1e-4, atol=1e-4)


def test_what_the_last_call_of_its_shapes_was_not_is_refused(
    run: dict[str, Any], long_ways: list[miofind.Direction]
) -> None:
    out = np.empty_like(DY)
    for _ in range(3):
        for _ in range(3):
            miofind.convolution(X, W, out=out, **run)
        assert len(long_ways) == 1
        with pytest.raises(InvalidArrayError, match="y has shape"):
            miofind.convolution(X, W, out=np.empty((2, 4, 6, 6), np.float32), **run)
        for refused in (True, 1.0):
            with pytest.raises(InvalidProblemError, match=f"padding={refused} must be an integer"):
                miofind.convolution(X, W, out=out, **{**run, "padding": refused})
        del long_ways[1:]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of x in calls of which a key was made."""
    made: list[tuple[int, ...]] = []
    real = repeated._key
    monkeypatch.setattr(repeated, "_key", lambda way, x, *args: made.append(x.shape) or real(way, x, *args))
    return made


def test_a_call_with_out_and_the_values_of_the_last_needs_no_key(
    run: dict[str, Any], keys: list[tuple[int, ...]]
) -> None:
    """As long as calls of its shapes and values are of one layout and dtype; what was refused changes nothing."""
    y = miofind.convolution(X, W, **run)
    out, others = np.empty_like(y), {**run, "padding": ((1, 1), (2, 0))}
    for given in (run, others, run):
        for _ in range(2):
            miofind.convolution(X, W, out=out, **given)
        with pytest.raises(InvalidArrayError):
            miofind.convolution(X, W, out=out[:, :, :-1], **given)
        keys.clear()
        miofind.convolution(X, W, out=out, **given)
        assert keys == []
    np.testing.assert_array_equal(out, y)
    wide = X.astype(np.float64), W.astype(np.float64), np.empty_like(y, np.float64)
    for _ in range(3):
        miofind.convolution(*wide[:2], out=wide[2], **run)
        miofind.convolution(X, W, out=out, **run)
        np.testing.assert_allclose(out, wide[2], rtol=1e-4, atol=1e-4)
    keys.clear()
    miofind.convolution(X, W, out=out, **run)
    assert keys == [X.shape]


def test_new_answers_are_looked_up(run: dict[str, Any], long_ways: list[miofind.Direction]) -> None:
    """What another find has measured, other options, and what always measures."""
    forward = miofind.Direction.FORWARD
    problem = miofind.ProblemDescription.from_arrays(x=X, w=W, padding=1)
    for _ in range(2):
        miofind.convolution(X, W, **run)
    assert long_ways == [forward]
    miofind.convolution(X, W, **{**run, "options": miofind.FindOptions(find_mode="fast", deterministic=True)})
    assert long_ways == [forward] * 2
    only = miofind.FindOptions(only="ConvCpuDirect")
    miofind.find_solutions(problem, handle=run["handle"], options=only)
    miofind.convolution(X, W, **run)
    assert long_ways == [forward] * 3
    always = miofind.FindOptions(only="ConvCpuDirect", find_mode="normal")
    for _ in range(2):
        miofind.convolution(X, W, **{**run, "options": always})
    assert long_ways == [forward] * 5
    miofind.convolution(X, W, **run)
    run["handle"].forget()
    miofind.convolution(X, W, **run)
    assert long_ways[5:] == [forward] * 2


def test_an_array_at_another_address_goes_the_long_way(
    run: dict[str, Any], long_ways: list[miofind.Direction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what runs it there is not remembered for those that are aligned."""
    solver = run["handle"].registry["ConvCpuDirect"]
    monkeypatch.setattr(type(solver), "alignment_bytes", 64)
    run["options"] = miofind.FindOptions(find_mode="fast", only="ConvCpuDirect")
    memory = np.zeros(X.nbytes + 192, np.uint8)
    start = -memory.ctypes.data % 64
    wanted = miofind.convolution(X, W, **{**run, "options": FAST})
    long_ways.clear()
    for beyond, ways in ((4, 1), (0, 2), (0, 2), (4, 3), (0, 3)):
        x = memory[start + beyond :][: X.nbytes].view(np.float32).reshape(X.shape)
        x[:] = X
        np.testing.assert_allclose(miofind.convolution(x, W64, **run), wanted, rtol=1e-4, atol=1e-4)
        assert len(long_ways) == ways


def _aligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


W64 = _aligned(W)
