"""Batch normalisation in inference, folded into the convolution before it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from miofind.arrays.arrays import Framework, framework_of, view
from miofind.core.arguments import A
from miofind.core.tensor import DataType
from miofind.errors import InvalidArrayError, InvalidOptionError, brief


def fold_batch_norm(
    w: A,
    bias: A | None,
    mean: A,
    variance: A,
    gamma: A | None = None,
    beta: A | None = None,
    epsilon: float = 1e-5,
) -> tuple[A, A]:
    """Weights and bias of the one convolution that does what a convolution and the batch norm after it do.

    With scale = gamma / sqrt(variance + epsilon), of each output channel: w * scale and (bias - mean) * scale + beta,
    computed in float64, then rounded: the weights to w's dtype, the bias to that of `bias`, to w's without one. Give a
    float32 bias (zeros, say) to have a float32 bias. Waits for a GPU's stream where arrays are PyTorch's, unless that
    is captured.

    Args:
        w: (k, c/groups, *filter), as `miofind.convolution` takes it: an array of PyTorch, CuPy or NumPy.
        bias: (k,), or None for a convolution without; as all that follows an array of w's library and device.
        mean, variance: (k,), the running statistics.
        gamma, beta: (k,), the batch norm's weight and bias; None for 1 and 0.
        epsilon: added to the variance.

    Returns:
        w in its layout, and a bias, (k,).

    Raises:
        InvalidArrayError: an array of another shape, library or device, or a tensor that requires gradients.
        InvalidOptionError: epsilon is no finite number of at least 0.
    """
    vectors = {"bias": bias, "mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
    weights = view(w, "w")
    wide = _widened({"w": w, **vectors}, weights.shape[:1])
    scale, shift = _scale_and_shift(wide, epsilon)
    folded = wide["w"] * scale.reshape(-1, *(1,) * (len(weights.shape) - 1))
    return _as(w, folded), _as(w if bias is None else bias, shift)


def batch_norm_as_scale_and_bias(
    mean: A,
    variance: A,
    gamma: A | None = None,
    beta: A | None = None,
    epsilon: float = 1e-5,
    bias: A | None = None,
) -> tuple[A, A]:
    """Scale and bias of an epilogue that does what a batch norm does: the convolution's weights stay as they are.

    scale = gamma / sqrt(variance + epsilon) and (bias - mean) * scale + beta, computed in float64 and rounded to
    float32; float64 where `mean` is.

    Args:
        mean, variance, gamma, beta, epsilon: as `fold_batch_norm` takes them.
        bias: (k,), of the convolution before the batch norm; None for none.

    Returns:
        scale and bias, (k,), as `miofind.convolution` takes them.

    Raises:
        InvalidArrayError, InvalidOptionError: as of `fold_batch_norm`.
    """
    statistics = view(mean, "mean")
    vectors = {"mean": mean, "variance": variance, "gamma": gamma, "beta": beta, "bias": bias}
    pair = _scale_and_shift(_widened(vectors, statistics.shape[:1]), epsilon)
    if statistics.dtype is DataType.FLOAT64:
        return pair
    float32 = sys.modules["torch"].float32 if statistics.framework is Framework.TORCH else np.float32
    scale, shift = (_rounded(each, float32) for each in pair)
    return scale, shift


def _scale_and_shift(wide: Mapping[str, Any], epsilon: Any) -> tuple[Any, Any]:
    """Factor and summand of each channel's sums, in float64."""
    is_number = isinstance(epsilon, Real) and not isinstance(epsilon, bool)
    if not is_number or not 0 <= float(epsilon) < math.inf:
        raise InvalidOptionError(f"epsilon={brief(epsilon)} must be a finite number of at least 0")
    scale = _inverse_root(wide["variance"] + float(epsilon))
    if "gamma" in wide:
        scale = scale * wide["gamma"]
    if "bias" in wide:
        shift = (wide["bias"] - wide["mean"]) * scale
        return scale, shift + wide["beta"] if "beta" in wide else shift
    shift = wide["mean"] * scale
    return scale, wide["beta"] - shift if "beta" in wide else -shift


def _inverse_root(array: Any) -> Any:
    """1 / sqrt(array); on the host for a GPU's tensor, since PyTorch's kernel of powers takes 25 ms to load."""
    is_on_gpu = framework_of(array) is Framework.TORCH and array.is_cuda
    if is_on_gpu and not sys.modules["torch"].cuda.is_current_stream_capturing():
        return (array.cpu() ** -0.5).to(array.device)
    return array**-0.5


def _widened(given: Mapping[str, Any], channels: tuple[int, ...]) -> dict[str, Any]:
    """Those arrays that are there, in float64.

    Raises:
        InvalidArrayError: one that is needed is missing, has another shape, or is of another library or device.
    """
    there = {name: array for name, array in given.items() if array is not None or name in ("mean", "variance")}
    views = {name: view(array, name) for name, array in there.items()}
    first, *_ = views
    wanted = f"({channels[0]},)" if channels else "(k,)"
    for name, each in views.items():
        if each.framework is Framework.OTHER:
            raise InvalidArrayError(f"{name} is a {type(there[name]).__name__}: pass a PyTorch, CuPy or NumPy array")
        if (each.framework, each.device_index) != (views[first].framework, views[first].device_index):
            raise InvalidArrayError(f"{name} is of another library or device than {first}: pass all of one")
        if not channels or (name != "w" and each.shape != channels):
            raise InvalidArrayError(f"{name} has shape {each.shape}: {wanted} is needed, one a channel of {first}")
    return {name: _wide(array) for name, array in there.items()}


def _wide(array: Any) -> Any:
    return array.detach().double() if framework_of(array) is Framework.TORCH else array.astype(np.float64)


def _as(like: A, array: Any) -> A:
    """The array rounded to the dtype of another."""
    typed: Any = like
    result: A = _rounded(array, typed.dtype)
    return result


def _rounded(array: Any, dtype: Any) -> Any:
    return array.to(dtype) if framework_of(array) is Framework.TORCH else array.astype(dtype)
