"""`convolution`: a convolution with an epilogue that PyTorch differentiates.

Forward and backward run `miofind::convolution` and the operators of its gradients. Where gradients are recorded, what
their formulas cannot take back from the result alone is left to PyTorch: an activation other than relu, clamp and
leaky_relu is a separate operation then, and a scale is multiplied into the weights. Second derivatives, and tangents of
forward mode, are those of PyTorch's own operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._C import _is_any_autocast_enabled
from torch.autograd import forward_ad

from miofind.core.epilogue import Activation, EpilogueParameters, ResidualPosition
from miofind.core.tensor import enum_value
from miofind.errors import InvalidArrayError, InvalidOptionError, brief
from miofind.torch.fused import ops, unfused
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.window import Window

_WITH_AUTOCAST = ("cpu", "cuda")
"""Kinds of devices; "meta", for one, cannot be asked."""
_OF_ARGUMENTS = ("clamp", "leaky_relu")
"""Activations whose derivative is told by the result, and of which PyTorch keeps the argument."""


def convolution(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    scale: Any = None,
    residual: Any = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str = "none",
    residual_position: str = "before",
    beta: float = 1.0,
    low: float = 0.0,
    high: float = 6.0,
    slope: float | None = None,
) -> Any:
    """y = activation(x * w * scale + bias + beta * residual), in one kernel where the FindDB has one, with gradients.

    What is left out is not computed. In one kernel all of it is computed in the type that products are summed in, and
    rounded once. Where the FindDB has no answer the same is computed by PyTorch's convolution and its element-wise
    operations, each of which rounds; nothing is measured. Works under autocast (x, w and residual take its dtype, bias
    and scale keep theirs), torch.compile, torch.export, torch.func and vmap.

    Args:
        x: (n, c, *spatial), 1 to 3 spatial dimensions, or without n.
        w: (k, c/groups, *filter), of x's dtype.
        bias, scale: (k,), of x's dtype or float32.
        residual: of y's shape.
        stride, dilation: a number, or one a spatial dimension.
        padding: the same, or "valid" or "same" (stride 1), as in PyTorch.
        groups: group count.
        activation: a name of `miofind.Activation`, or "relu6", which is clamp with its bounds of 0 and 6.
        residual_position: "before" the activation or "after" it.
        beta: factor of the residual.
        low, high: bounds of clamp.
        slope: of leaky_relu (0.01 if left out) or elu (1).

    Returns:
        (n, k, *out_spatial), of x's dtype and in the memory format that PyTorch's convolution gives it.

    Raises:
        InvalidArrayError: a list or a tuple where a tensor is expected.
        RuntimeError: shapes or dtypes that do not go together.
        InvalidProblemError, InvalidOptionError: an unknown activation, position or padding, or a number that is none.
    """
    _refuse_lists(x=x, w=w, bias=bias, scale=scale, residual=residual)
    rank = w.dim() - 2
    numbers = _numbers(activation, residual_position, beta, low, high, slope)
    window = Window.of(w.shape[2:], stride=stride, padding=padding, dilation=dilation, groups=groups)
    is_single = x.dim() == rank + 1
    if is_single:
        x, residual = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
    y = run(Tensors(x, w, bias, scale, residual), window, numbers)
    return y.squeeze(0) if is_single else y


def _refuse_lists(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, (list, tuple)):
            raise InvalidArrayError(
                f"{name}={brief(value)} must be a tensor, such as torch.tensor(values) or, of a shape, "
                'torch.empty(shape, device="cuda")'
            )


class Tensors(NamedTuple):
    """What a convolution reads; x and residual are batched."""

    x: Any
    w: Any
    bias: Any
    scale: Any
    residual: Any


def need_derivatives(tensors: Tensors) -> bool:
    """Whether a gradient of any of them may be asked for, or tangents are computed."""
    if derivatives_are_off():
        return False
    if has_tangents() or _in_transform():  # tensors of vmap do not tell
        return True
    return any(each is not None and each.requires_grad for each in tensors)


def autocast_dtype(x: Any) -> Any:
    """The dtype of autocast on a tensor's device; None where that is off."""
    if not _is_any_autocast_enabled():
        return None
    kind = x.device.type
    is_on = kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def _without_autocast(x: Any) -> AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if kind in _WITH_AUTOCAST else contextlib.nullcontext()


def _in_transform() -> bool:
    """Whether code runs in a transform of torch.func; torch.compile has no gradients of autograd.Functions in one."""
    return bool(torch._C._are_functorch_transforms_active())


def derivatives_are_off() -> bool:
    """Whether no gradient is asked for, and no tangents are computed, of any tensors."""
    return not (torch.is_grad_enabled() or has_tangents())


def has_tangents() -> bool:
    """Whether tensors may have tangents: under torch.func.jvp, jacfwd and hessian, and in forward_ad.dual_level."""
    return bool(forward_ad._current_level >= 0)


def run(given: Tensors, window: Window, numbers: Nonlinearity, *, may_be_written: bool = False) -> Any:
    """`convolution` of batched tensors, with all arguments checked.

    Args:
        may_be_written: the result may be written to before its gradient is computed, where PyTorch allows that.
    """
    dtype = autocast_dtype(given.x)
    if dtype is not None:
        given = Tensors(*(ops.in_autocast(tensor, dtype) for tensor in given))
        with _without_autocast(given.x):
            return run(given, window, numbers, may_be_written=may_be_written)
    if has_tangents() or (torch.compiler.is_compiling() and _in_transform()):
        return unfused.convolution(given.x, given.w, (given.bias, given.scale, given.residual, None), window, numbers)
    if not need_derivatives(given):
        return torch.ops.miofind.convolution(*given, *arguments_of(window, numbers))
    return _recorded(given, window, numbers, may_be_written)


def arguments_of(window: Window, numbers: Nonlinearity) -> tuple[Any, ...]:
    """The arguments of the operator after its tensors."""
    return (
        numbers.activation,
        window.stride,
        window.padding,
        window.dilation,
        window.groups,
        numbers.residual_position,
        numbers.beta,
        numbers.low,
        numbers.high,
        numbers.slope,
    )


def _recorded(given: Tensors, window: Window, numbers: Nonlinearity, may_be_written: bool) -> Any:
    """The same with gradients: what the operator's formulas cannot differentiate stands outside of it."""
    x, w, bias, scale, residual = given
    if scale is not None:
        w = (w * scale.view(-1, *(1,) * (w.dim() - 1))).to(w.dtype)
    inner, after = numbers, None
    is_after = residual is not None and numbers.residual_position == "after"
    if is_after:
        residual, after = None, residual
    is_read_later = may_be_written and numbers.activation in _OF_ARGUMENTS
    if is_read_later or not numbers.is_told_by_result(x.dtype):
        inner = replace(numbers, activation="none")
    y = _Convolution.apply(x, w, bias, residual, window, replace(inner, residual_position="before"))
    if inner.activation != numbers.activation:
        y = unfused.activated(y, numbers)
    return y if after is None else torch.add(y, after.to(y.dtype), alpha=numbers.beta)


class _Convolution(torch.autograd.Function):
    """activation(x * w + bias + beta * residual), where the result tells the activation's derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, w: Any, bias: Any, residual: Any, window: Window, numbers: Nonlinearity) -> Any:
        return torch.ops.miofind.convolution(x, w, bias, None, residual, *arguments_of(window, numbers))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, bias, residual, ctx.window, ctx.numbers = inputs
        has_mask = ctx.numbers.activation != "none"
        ctx.save_for_backward(x, w, output if has_mask else None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
        x, w, y = ctx.saved_tensors
        wants_x, wants_w, wants_bias, wants_residual, *_ = ctx.needs_input_grad
        if y is not None:
            dy = unfused.derivative(dy, y, ctx.numbers)
        call = _Gradients(dy, x, w, ctx.window)
        with _without_autocast(dy):  # as PyTorch's own convolution_backward, in dy's dtype
            if torch.is_grad_enabled():  # the gradients' own gradients are asked for
                dx, dw, of_bias = call.by_pytorch((wants_x, wants_w, wants_bias))
            else:
                dx = call.of_data() if wants_x else None
                dw, of_bias = call.of_weights(ctx.bias_dtype if wants_bias else None, wants_w)
        of_bias = None if of_bias is None else of_bias.to(ctx.bias_dtype)
        of_residual = (dy * ctx.numbers.beta).to(ctx.residual_dtype) if wants_residual else None
        return dx, dw, of_bias, of_residual, None, None


class _Gradients(NamedTuple):
    """The gradients of a convolution's x, w and bias."""

    dy: Any
    x: Any
    w: Any
    window: Window

    def by_pytorch(self, wanted: tuple[bool, bool, bool]) -> tuple[Any, Any, Any]:
        """By operations that have gradients themselves."""
        *_, wants_bias = wanted
        dx, dw, _ = unfused.gradients(self.dy, self.x, self.w, self.window, (*wanted[:2], False))
        return dx, dw, unfused.channel_sums(self.dy) if wants_bias else None

    def of_data(self) -> Any:
        """dx."""
        return torch.ops.miofind.convolution_backward_data(
            self.dy, self.x, self.w, None, None, "none", *self._geometry()
        )

    def of_weights(self, bias_dtype: Any, wants_w: bool) -> tuple[Any, Any]:
        """dw and the bias gradient, each None where it is not wanted."""
        if not wants_w:
            return None, None if bias_dtype is None else unfused.channel_sums(self.dy)
        dw, of_bias = torch.ops.miofind.convolution_backward_weights(
            self.dy, self.x, self.w, *self._geometry(), bias_dtype
        )
        return dw, None if bias_dtype is None else of_bias

    def _geometry(self) -> tuple[Any, ...]:  # no property, which Dynamo of PyTorch 2.9 does not read of a named tuple
        window = self.window
        return window.stride, window.padding, window.dilation, window.groups


def _numbers(activation: str, position: str, beta: float, low: float, high: float, slope: float | None) -> Nonlinearity:
    """The numbers of an epilogue, checked.

    Raises:
        InvalidProblemError, InvalidOptionError: an unknown name, or a number that is none.
    """
    if activation == "relu6":
        activation, low, high = Activation.CLAMP.value, 0.0, 6.0
    name = enum_value(Activation, activation, "activation").value
    place = enum_value(ResidualPosition, position, "residual_position")
    if place is ResidualPosition.NONE:
        raise InvalidOptionError(f"residual_position={position}: use before or after")
    if not torch.compiler.is_compiling():  # Dynamo does not trace its checks
        EpilogueParameters(beta=beta, low=low, high=high, slope=slope)
    return Nonlinearity(activation=name, residual_position=place.value, beta=beta, low=low, high=high, slope=slope)
