"""Batch norms folded into weights and bias, or into an epilogue's scale and bias, against their formula."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import miofind
from miofind.errors import InvalidArrayError, InvalidOptionError
from miofind.reference.convolution import reference_on_host

PROBLEM = miofind.ProblemDescription.convolution(x=(2, 4, 6, 5), w=(6, 2, 3, 3), padding=1, groups=2)
GENERATOR = np.random.default_rng(0)
STATISTICS = {
    "mean": GENERATOR.standard_normal(6).astype(np.float32),
    "variance": GENERATOR.uniform(0.1, 4, 6).astype(np.float32),
    "gamma": GENERATOR.standard_normal(6).astype(np.float32),
    "beta": GENERATOR.standard_normal(6).astype(np.float32),
}
X = GENERATOR.standard_normal((2, 4, 6, 5))
W = GENERATOR.standard_normal((6, 2, 3, 3))
BIAS = GENERATOR.standard_normal(6)


def wanted(w: Any, bias: Any, mean: Any, variance: Any, gamma: Any = 1.0, beta: Any = 0.0) -> Any:
    """The convolution, its bias and then the batch norm, in float64."""

    def of_channel(values: Any) -> Any:
        return np.broadcast_to(np.asarray(values, np.float64), 6).reshape(6, 1, 1)

    sums = reference_on_host(PROBLEM, x=X, w=np.asarray(w, np.float64)) + of_channel(bias)
    normal = (sums - of_channel(mean)) / np.sqrt(of_channel(variance) + 1e-5)
    return normal * of_channel(gamma) + of_channel(beta)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("names", [("mean", "variance"), tuple(STATISTICS)], ids=["plain", "affine"])
def test_folded_weights_do_what_both_did(dtype: Any, has_bias: bool, names: tuple[str, ...]) -> None:
    w, bias = W.astype(dtype), BIAS.astype(np.float32) if has_bias else None
    statistics = {name: STATISTICS[name] for name in names}
    folded, shift = miofind.fold_batch_norm(w, bias, **statistics)
    assert (folded.dtype, folded.shape) == (w.dtype, w.shape)
    assert (shift.dtype, shift.shape) == (np.float32 if has_bias else w.dtype, (6,))
    sums = reference_on_host(PROBLEM, x=X, w=folded.astype(np.float64))
    y = sums + shift.astype(np.float64).reshape(6, 1, 1)
    roundoff = float(max(ml_dtypes.finfo(dtype).eps, ml_dtypes.finfo(shift.dtype).eps))
    np.testing.assert_allclose(y, wanted(w, bias if has_bias else 0.0, **statistics), atol=64 * roundoff)


def test_folding_rounds_once_and_keeps_the_layout() -> None:
    w = np.moveaxis(np.ascontiguousarray(np.moveaxis(W.astype(np.float16), 1, -1)), -1, 1)
    folded, _ = miofind.fold_batch_norm(w, None, **STATISTICS)
    scale = STATISTICS["gamma"].astype(np.float64) / np.sqrt(STATISTICS["variance"].astype(np.float64) + 1e-5)
    np.testing.assert_array_equal(folded, (w.astype(np.float64) * scale.reshape(6, 1, 1, 1)).astype(np.float16))
    assert folded.strides == w.strides


def test_a_batch_norm_as_scale_and_bias_leaves_the_weights() -> None:
    scale, shift = miofind.batch_norm_as_scale_and_bias(**STATISTICS, bias=BIAS.astype(np.float32))
    assert scale.dtype == shift.dtype == np.float32
    y = reference_on_host(PROBLEM, x=X, w=W) * scale.reshape(6, 1, 1) + shift.reshape(6, 1, 1)
    np.testing.assert_allclose(y, wanted(W, BIAS.astype(np.float32), **STATISTICS), atol=1e-5)
    wide = {name: array.astype(np.float64) for name, array in STATISTICS.items()}
    assert {each.dtype for each in miofind.batch_norm_as_scale_and_bias(**wide)} == {np.dtype(np.float64)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mean": np.zeros(5, np.float32)}, r"mean has shape \(5,\): \(6,\) is needed, one a channel of w"),
        ({"bias": np.zeros((1, 6), np.float32)}, r"bias has shape \(1, 6\): \(6,\) is needed"),
        ({"variance": None}, "variance is a NoneType"),
        ({"gamma": 1.0}, "gamma is a float"),
        ({"w": np.float32(1.0)}, "w is a float32"),
        ({"beta": np.zeros(6, np.int64)}, "beta has dtype int64"),
    ],
    ids=["mean", "bias", "variance", "gamma", "w", "beta"],
)
def test_other_arrays_are_refused_by_name(change: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"w": W.astype(np.float32), "bias": None, **STATISTICS, **change}
    with pytest.raises(InvalidArrayError, match=told):
        miofind.fold_batch_norm(**given)


def test_statistics_without_channels_are_refused() -> None:
    with pytest.raises(InvalidArrayError, match=r"mean has shape \(\): \(k,\) is needed"):
        miofind.batch_norm_as_scale_and_bias(np.array(1.0), np.array(1.0))


@pytest.mark.parametrize("epsilon", [-1e-5, float("nan"), float("inf"), True, "1e-5"])
def test_an_epsilon_is_a_number(epsilon: Any) -> None:
    with pytest.raises(InvalidOptionError, match="epsilon="):
        miofind.fold_batch_norm(W, None, **STATISTICS, epsilon=epsilon)


def test_tensors_of_pytorch_are_folded_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array) for name, array in STATISTICS.items()}
    w = torch.from_numpy(W.astype(np.float32)).to(torch.bfloat16).to(memory_format=torch.channels_last)
    folded, bias = miofind.fold_batch_norm(w, None, **tensors)
    assert folded.dtype is bias.dtype is torch.bfloat16
    assert folded.is_contiguous(memory_format=torch.channels_last)
    assert {each.dtype for each in miofind.batch_norm_as_scale_and_bias(**tensors)} == {torch.float32}
    y = torch.nn.functional.conv2d(torch.from_numpy(X), w.double(), padding=1, groups=2)
    normal = torch.nn.functional.batch_norm(
        y, *(tensors[name].double() for name in ("mean", "variance", "gamma", "beta"))
    )
    z = torch.nn.functional.conv2d(torch.from_numpy(X), folded.double(), bias.double(), padding=1, groups=2)
    torch.testing.assert_close(z, normal, rtol=2e-2, atol=0.2)
    with pytest.raises(InvalidArrayError, match="mean is of another library"):
        miofind.fold_batch_norm(w, None, **STATISTICS)
