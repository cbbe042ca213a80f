"""Outputs besides the convolution's own, on the CPU place: what calls return, what `out` may be, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.errors import InvalidArrayError, InvalidOptionError, InvalidProblemError

pytestmark = pytest.mark.sampled(2)

RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((2, 8, 9, 7)).astype(np.float32)
W = RANDOM.standard_normal((12, 8, 3, 3)).astype(np.float32)
DY = RANDOM.standard_normal((2, 12, 7, 5)).astype(np.float32)
OVER = (0, 2, 3)


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    with miofind.Handle("cpu", database=str(Path(tmp_path_factory.mktemp("db")) / "own.db")) as made:
        yield made


def statistics_of(y: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    wide = y.astype(np.float64)
    return wide.sum(OVER), np.square(wide).sum(OVER)


@pytest.mark.parametrize("epilogue", [{}, {"activation": "relu", "alpha": 2.0}, {"bias": np.ones(12, np.float32)}])
@pytest.mark.parametrize("channels_last", [False, True])
def test_statistics_are_of_y_as_it_is_returned(
    handle: miofind.Handle, channels_last: bool, epilogue: dict[str, Any]
) -> None:
    x = X.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2) if channels_last else X
    found = miofind.convolution(x, W, statistics=True, handle=handle, **epilogue)
    assert isinstance(found, miofind.OutputStatistics)
    bare = miofind.convolution(x, W, handle=handle, **epilogue)  # of another solver, maybe
    np.testing.assert_allclose(found.y, bare, rtol=1e-4, atol=1e-4)
    y, total, squares = found
    for got, wanted in zip((total, squares), statistics_of(y), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)


def test_float16_statistics_are_of_rounded_results(handle: miofind.Handle) -> None:
    half = {"x": X.astype(np.float16), "w": W.astype(np.float16)}
    y, total, squares = miofind.convolution(**half, statistics=True, handle=handle)
    assert (y.dtype, total.dtype, squares.dtype) == (np.float16, np.float32, np.float32)
    for got, wanted in zip((total, squares), statistics_of(y), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_bias_gradient_is_the_sum_of_dy(handle: miofind.Handle, dtype: Any) -> None:
    dy, x = DY.astype(dtype), X.astype(dtype)
    found = miofind.convolution_backward_weights(dy, x, W.shape, bias_gradient=True, handle=handle)
    assert isinstance(found, miofind.ParameterGradients)
    bare = miofind.convolution_backward_weights(dy, x, W.shape, handle=handle)
    np.testing.assert_allclose(found.dw, bare, rtol=1e-2, atol=5e-2)
    assert found.bias_gradient.dtype == dtype
    np.testing.assert_allclose(found.bias_gradient, dy.astype(np.float64).sum(OVER), rtol=2**-10, atol=1e-3)


def test_out_decides_the_bias_gradients_dtype(handle: miofind.Handle) -> None:
    dy, x = DY.astype(np.float16), X.astype(np.float16)
    out = (None, np.empty(12, np.float32))
    found = miofind.convolution_backward_weights(dy, x, W.shape, bias_gradient=True, out=out, handle=handle)
    assert found.bias_gradient is out[1]
    np.testing.assert_allclose(out[1], dy.astype(np.float64).sum(OVER), rtol=1e-6, atol=1e-5)


def test_what_a_run_returned_is_the_next_ones_out(handle: miofind.Handle) -> None:
    problem = miofind.ProblemDescription.from_arrays(x=X, w=W, statistics=True)
    solution = miofind.find_solutions(problem, handle=handle)[0]
    first = miofind.run_solution(solution, X, W)
    kept = [array.copy() for array in first]
    for array in first:
        array[...] = np.nan
    again = miofind.run_solution(solution, X, W, out=first)
    assert all(mine is theirs for mine, theirs in zip(again, first, strict=True))
    for array, wanted in zip(again, kept, strict=True):
        np.testing.assert_array_equal(array, wanted)
    partly = miofind.run_solution(solution, X, W, out=[first.y, None, None])
    assert partly.y is first.y
    np.testing.assert_array_equal(partly.sum, kept[1])
    packed = solution.pack(W)
    np.testing.assert_array_equal(packed.run(X).sum_of_squares, kept[2])


def test_a_saved_solution_has_its_second_outputs(handle: miofind.Handle, tmp_path: Path) -> None:
    problem = miofind.ProblemDescription.from_arrays(dy=DY, x=X, w_shape=W.shape, bias_gradient=True)
    solution = miofind.find_solutions(problem, handle=handle)[0]
    solution.save(tmp_path / "saved.json")
    loaded = miofind.Solution.load(tmp_path / "saved.json", handle)
    assert loaded.problem == problem
    wanted, found = (miofind.run_solution(each, dy=DY, x=X) for each in (solution, loaded))
    np.testing.assert_array_equal(found.bias_gradient, wanted.bias_gradient)


def test_several_outputs_are_a_tuple_of_as_many(handle: miofind.Handle) -> None:
    y, total, squares = miofind.convolution(X, W, statistics=True, handle=handle)
    for out in (y, (y, total), (y, total, squares, squares)):
        with pytest.raises(InvalidArrayError, match=r"must be a tuple of 3 arrays: \(y, sum, sum_of_squares\)"):
            miofind.convolution(X, W, statistics=True, out=out, handle=handle)
    solution = miofind.find_solutions(miofind.ProblemDescription.from_arrays(x=X, w=W, statistics=True), handle=handle)
    with pytest.raises(InvalidArrayError, match=r"must be a tuple of 3 arrays: \(y, sum, sum_of_squares\)"):
        miofind.run_solution(solution[0], X, W, out=y)


def test_second_outputs_share_no_memory(handle: miofind.Handle) -> None:
    y, total, _ = miofind.convolution(X, W, statistics=True, handle=handle)
    for out in ((y, total, total), (y, total, y.reshape(-1)[:12]), (y, W.reshape(-1)[:12], total)):
        with pytest.raises(InvalidArrayError, match="shares memory with another array"):
            miofind.convolution(X, W, statistics=True, out=out, handle=handle)
    with pytest.raises(InvalidArrayError, match="sum has dtype float64, the convolution writes float32"):
        miofind.convolution(X, W, statistics=True, out=(y, total.astype(np.float64), None), handle=handle)


def test_second_outputs_go_with_their_direction(handle: miofind.Handle) -> None:
    with pytest.raises(InvalidProblemError, match="bias_gradient is of the epilogues of backward_weights"):
        miofind.convolution(X, W, bias_gradient=True, handle=handle)
    with pytest.raises(InvalidProblemError, match="statistics: backward_weights takes none"):
        miofind.convolution_backward_weights(DY, X, W.shape, statistics=True, handle=handle)
    with pytest.raises(InvalidProblemError, match="bias_gradient: backward_data takes none"):
        miofind.convolution_backward_data(DY, W, X.shape, bias_gradient=True, handle=handle)
    with pytest.raises(InvalidProblemError, match="statistics=1 must be True or False"):
        miofind.convolution(X, W, statistics=1, handle=handle)
    with pytest.raises(InvalidOptionError, match="the epilogue statistics has no factor"):
        miofind.convolution(X, W, statistics=True, alpha=2.0, handle=handle)


def test_second_outputs_begin_anywhere(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever alignment a solution wants of tensors, and without a copy of these."""
    solver = handle.registry["ConvCpuDirect"]
    monkeypatch.setattr(type(solver), "alignment_bytes", 64)
    handle.forget()  # invokers of other tests have another alignment
    x, w, y = (_aligned(shape) for shape in (X.shape, W.shape, DY.shape))
    x[:], w[:] = X, W
    both = np.zeros(25, np.float32)
    out = (y, both[1:13], both[13:])
    options = miofind.FindOptions(only=(f"{solver.id}+Pointwise",))
    found = miofind.convolution(x, w, out=out, statistics=True, handle=handle, options=options)
    assert found.y is y
    for got, wanted in zip((both[1:13], both[13:]), statistics_of(y), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)
    problem = miofind.ProblemDescription.from_arrays(x=x, w=w, statistics=True)
    solution = miofind.find_solutions(problem, options=options, handle=handle)[0]
    assert solution.runner.alignment_bytes == 64
    both[:] = 0
    miofind.run_solution(solution, x, w, out=out)
    np.testing.assert_allclose(both[1:13], statistics_of(y)[0], rtol=1e-6, atol=1e-5)
    with pytest.raises(InvalidArrayError, match="out begins at address"):
        miofind.run_solution(solution, x, w, out=(_aligned(DY.shape, 4), both[1:13], both[13:]))


def _aligned(shape: tuple[int, ...], beyond: int = 0) -> np.ndarray[Any, Any]:
    """A float32 array that begins `beyond` bytes behind a multiple of 64."""
    size = 4 * int(np.prod(shape))
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + beyond
    return memory[start : start + size].view(np.float32).reshape(shape)
