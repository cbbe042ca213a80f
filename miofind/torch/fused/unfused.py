"""Fused convolutions and their gradients by PyTorch's own operations, one after another.

What the operators of `ops` compute where no solution answers, and what second derivatives go through. Each operation
rounds to the dtype of what it is given, as in a network that nobody fused; with a scale or bias in float32 what follows
it is in float32, and the result is rounded to x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional

from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.window import Window

_ACTIVATIONS: dict[str, Callable[[Any, Nonlinearity], Any]] = {
    "none": lambda v, _: v,
    "relu": lambda v, _: functional.relu(v),
    "clamp": lambda v, numbers: functional.hardtanh(v, numbers.low, numbers.high),
    "leaky_relu": lambda v, numbers: functional.leaky_relu(v, numbers.leak),
    "silu": lambda v, _: functional.silu(v),
    "gelu": lambda v, _: functional.gelu(v),
    "gelu_tanh": lambda v, _: functional.gelu(v, approximate="tanh"),
    "hardswish": lambda v, _: functional.hardswish(v),
    "sigmoid": lambda v, _: torch.sigmoid(v),
    "tanh": lambda v, _: torch.tanh(v),
    "elu": lambda v, numbers: functional.elu(v, numbers.leak),
    "mish": lambda v, _: functional.mish(v),
}


def activated(v: Any, numbers: Nonlinearity) -> Any:
    """An activation of each element, by PyTorch's function of that name, with its gradient."""
    return _ACTIVATIONS[numbers.activation](v, numbers)


def of_channels(vector: Any, rank: int) -> Any:
    """A vector of channels, (k,), as it meets tensors of that rank."""
    return vector.view(1, -1, *(1,) * (rank - 2))


def convolution(x: Any, w: Any, vectors: tuple[Any, Any, Any, Any], window: Window, numbers: Nonlinearity) -> Any:
    """activation(x * w * scale + bias + beta * residual), or with the residual after the activation.

    Args:
        x: (n, c, *spatial).
        w: (k, c/groups, *filter).
        vectors: bias and scale, (k,), residual, (n, k, *out_spatial), and what is added beside the bias, (n, k); None
            for none.
    """
    bias, scale, residual, channel_bias = vectors
    taken = bias if scale is None and bias is not None and bias.dtype == x.dtype else None
    v = _bare(x, w, taken, window)
    if scale is not None:
        v = v * of_channels(scale, v.dim())
    if bias is not None and taken is None:
        v = v + of_channels(bias, v.dim())
    if channel_bias is not None:
        v = v + channel_bias.reshape(*channel_bias.shape, *(1,) * (v.dim() - 2))
    if residual is not None and numbers.residual_position == "before":
        v = torch.add(v, residual, alpha=numbers.beta)
    v = activated(v, numbers)
    if residual is not None and numbers.residual_position == "after":
        v = torch.add(v, residual, alpha=numbers.beta)
    return v.to(x.dtype)


def _bare(x: Any, w: Any, bias: Any, window: Window) -> Any:
    if not x.is_complex():
        return torch.convolution(x, w, bias, *window.geometry)
    function = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[x.dim()]  # which take the parts apart
    return function(x, w, bias, window.stride, window.padding, window.dilation, window.groups)


def derivative(dy: Any, saved: Any, numbers: Nonlinearity) -> Any:
    """dy times the derivative of an activation at what was saved: its result, or its argument.

    The result does for relu, clamp and leaky_relu alone.
    """
    aten = torch.ops.aten
    name = numbers.activation
    if name == "relu":
        return aten.threshold_backward(dy, saved, 0)
    if name == "clamp":
        return aten.hardtanh_backward(dy, saved, numbers.low, numbers.high)
    if name == "leaky_relu":
        return aten.leaky_relu_backward(dy, saved, numbers.leak, False)
    if name == "silu":
        return aten.silu_backward(dy, saved)
    if name in ("gelu", "gelu_tanh"):
        return aten.gelu_backward(dy, saved, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "hardswish":
        return aten.hardswish_backward(dy, saved)
    return dy


def gradients(dy: Any, x: Any, w: Any, window: Window, wanted: tuple[bool, bool, bool]) -> tuple[Any, Any, Any]:
    """dx, dw and the bias gradient of a convolution, each where it is wanted, else None."""
    made: tuple[Any, Any, Any] = torch.ops.aten.convolution_backward(dy, x, w, [w.shape[0]], *window.geometry, wanted)
    return made


def channel_sums(tensor: Any) -> Any:
    """The sum of a tensor of each channel, (k,), in float32, float64 of float64: of dy the bias gradient."""
    wide = torch.promote_types(torch.float32, tensor.dtype)
    return tensor.sum((0, *range(2, tensor.dim())), dtype=wide)
