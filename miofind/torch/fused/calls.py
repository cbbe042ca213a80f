"""The arguments of the operators `miofind::convolution...`: what they make, and the problems that they pose."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch

from miofind.core.epilogue import Activation, Epilogue, ResidualPosition
from miofind.core.problem import ProblemDescription
from miofind.core.tensor import Layout, MathMode
from miofind.errors import InvalidProblemError
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.window import Window
from miofind.torch.override.calls import ConvolutionCall, TensorForm, Unserved, served_type
from miofind.torch.override.formats import layout_like, output_layout


class Forward(NamedTuple):
    """The arguments of `miofind::convolution`; see `differentiable.convolution`.

    Attributes:
        channels_last: memory format of y; None for that of PyTorch's own convolution of x and w.
        channel_bias: (n, k), added after the bias, such as a diffusion model's time embedding; None for none.
        filters: those of w, packed; None where they are not.
        packing: name of the `PackedFilters` that packed them. A solution that packs them otherwise reads w.
    """

    x: Any
    w: Any
    bias: Any
    scale: Any
    residual: Any
    activation: str
    stride: Sequence[Any]
    padding: Sequence[Any]
    dilation: Sequence[Any]
    groups: Any
    residual_position: str = "before"
    beta: float = 1.0
    low: float = 0.0
    high: float = 6.0
    slope: float | None = None
    channels_last: bool | None = None
    channel_bias: Any = None
    filters: Any = None
    packing: str = ""

    @property
    def window(self) -> Window:
        """How the filter moves over x."""
        return _window(self)

    @property
    def nonlinearity(self) -> Nonlinearity:
        """The activation with its numbers, and what is done with the residual."""
        return Nonlinearity(
            activation=self.activation,
            residual_position=self.residual_position,
            beta=self.beta,
            low=self.low,
            high=self.high,
            slope=self.slope,
        )

    @property
    def unpacked(self) -> Forward:
        """The same without packed filters."""
        return self._replace(filters=None, packing="")

    def layout(self) -> Layout:
        """The memory order of y."""
        return _layout(self)

    def output(self, layout: Layout) -> Any:
        """A new y, (n, k, *out_spatial)."""
        self.check()
        return empty(self.window.output_shape(self.x.shape, self.w.shape), self.x, layout)

    def check(self) -> None:
        """Do nothing where the tensors go together.

        Raises:
            RuntimeError: they do not.
        """
        x, w = self.x, self.w
        _check_convolution(self)
        shape = self.window.output_shape(x.shape, w.shape)
        _check(all(size >= 0 for size in shape), lambda: f"x {_told(x)} is smaller than the filters of w {_told(w)}")
        for name in ("bias", "scale"):
            vector = getattr(self, name)
            _check_shape(vector, name, (w.shape[0],))
            is_taken = vector is None or vector.dtype in (x.dtype, torch.float32)
            _check(is_taken, lambda: f"bias and scale must have x's {x.dtype}, or torch.float32")
        _check_shape(self.residual, "residual", shape)
        _check_shape(self.channel_bias, "channel_bias", shape[:2])


class Statistics(NamedTuple):
    """The arguments of `miofind::convolution_statistics`: y, and each channel's sum of y and of its squares.

    Attributes:
        x: (n, c, *spatial).
        w: (k, c/groups, *filter).
        bias: (k,), None for none.
        channels_last: memory format of y; None for that of PyTorch's own convolution of x and w.
    """

    x: Any
    w: Any
    bias: Any
    stride: Sequence[Any]
    padding: Sequence[Any]
    dilation: Sequence[Any]
    groups: Any
    channels_last: bool | None = None

    @property
    def window(self) -> Window:
        """How the filter moves over x."""
        return _window(self)

    @property
    def forward(self) -> Forward:
        """The call that makes y alone."""
        window = (self.stride, self.padding, self.dilation, self.groups)
        return Forward(self.x, self.w, self.bias, None, None, "none", *window, channels_last=self.channels_last)

    def layout(self) -> Layout:
        """The memory order of y."""
        return _layout(self)

    def output(self, layout: Layout) -> tuple[Any, Any, Any]:
        """A new y, and sums in the type that products are summed in."""
        y = self.forward.output(layout)
        wide = torch.promote_types(torch.float32, y.dtype)
        return y, *(torch.empty(y.shape[1], dtype=wide, device=y.device) for _ in range(2))

    def check(self) -> None:
        """Do nothing where the tensors go together.

        Raises:
            RuntimeError: they do not.
        """
        self.forward.check()


class BackwardData(NamedTuple):
    """The arguments of `miofind::convolution_backward_data`: dx = (gradient + beta * residual) * derivative'(saved).

    Attributes:
        dy: (n, k, *out_spatial).
        x: (n, c, *spatial), for the shape and strides of dx alone.
        w: (k, c/groups, *filter).
        residual, saved: (n, c, *spatial), or None.
        derivative: a name of `miofind.Activation`, "none" without `saved`.
        channels_last: memory format of dx; None for that of PyTorch's own.
    """

    dy: Any
    x: Any
    w: Any
    residual: Any
    saved: Any
    derivative: str
    stride: Sequence[Any]
    padding: Sequence[Any]
    dilation: Sequence[Any]
    groups: Any
    beta: float = 1.0
    low: float = 0.0
    high: float = 6.0
    slope: float | None = None
    channels_last: bool | None = None

    @property
    def window(self) -> Window:
        """How the filter moves over x."""
        return _window(self)

    @property
    def nonlinearity(self) -> Nonlinearity:
        """The activation whose derivative is taken, with its numbers."""
        return Nonlinearity(activation=self.derivative, beta=self.beta, low=self.low, high=self.high, slope=self.slope)

    def layout(self) -> Layout:
        """The memory order of dx."""
        return _layout(self)

    def output(self, layout: Layout) -> Any:
        """A new dx."""
        self.check()
        return empty(self.x.shape, self.dy, layout)

    def check(self) -> None:
        """Do nothing where the tensors go together.

        Raises:
            RuntimeError: they do not.
        """
        _check_convolution(self)
        _check_dtype(self, "dy")
        _check_shape(self.dy, "dy", self.window.output_shape(self.x.shape, self.w.shape))
        for name in ("residual", "saved"):
            _check_shape(getattr(self, name), name, self.x.shape)
            _check_dtype(self, name)


class BackwardWeights(NamedTuple):
    """The arguments of `miofind::convolution_backward_weights`: dw, and the sum of dy of each channel.

    Attributes:
        dy: (n, k, *out_spatial).
        x: (n, c, *spatial).
        w: (k, c/groups, *filter), for the shape and strides of dw alone.
        bias_dtype: of the bias gradient, (k,); None for none, and an empty tensor in its place.
        channels_last: memory format of dw; None for that of PyTorch's own.
    """

    dy: Any
    x: Any
    w: Any
    stride: Sequence[Any]
    padding: Sequence[Any]
    dilation: Sequence[Any]
    groups: Any
    bias_dtype: Any = None
    channels_last: bool | None = None

    @property
    def window(self) -> Window:
        """How the filter moves over x."""
        return _window(self)

    def layout(self) -> Layout:
        """The memory order of dw."""
        return _layout(self)

    def output(self, layout: Layout) -> tuple[Any, Any]:
        """A new dw and a new bias gradient."""
        self.check()
        size, dtype = (0, self.dy.dtype) if self.bias_dtype is None else (self.w.shape[0], self.bias_dtype)
        return empty(self.w.shape, self.dy, layout), torch.empty(size, dtype=dtype, device=self.dy.device)

    def check(self) -> None:
        """Do nothing where the tensors go together.

        Raises:
            RuntimeError: they do not.
        """
        _check_convolution(self)
        _check_dtype(self, "dy")
        _check_shape(self.dy, "dy", self.window.output_shape(self.x.shape, self.w.shape))


class Short:
    """A call by an operator that takes all that is no tensor as one text, `miofind::short_convolution...`.

    PyTorch takes 2 us to read its arguments, and up to 8 to read those of `miofind::convolution`.

    Attributes:
        tensors: the fields that it takes as they are, in order.
        words: the fields that are in the text.
    """

    __slots__ = ()
    tensors: ClassVar[tuple[str, ...]]
    words: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        fields: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]  # those of the named tuple beside it
        cls.words = tuple(name for name in fields if name not in cls.tensors)

    @classmethod
    def of(cls, *arguments: Any) -> Any:
        """The call that the operator's arguments are."""
        *tensors, words = arguments
        return cls(**dict(zip(cls.tensors, tensors, strict=True)), **_read(cls.words, words))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operator's.

        Raises:
            TypeError: a number is none yet, as in graphs of dynamic shapes.
        """
        words = [getattr(self, name) for name in self.words]
        return (*(getattr(self, name) for name in self.tensors), json.dumps(words, default=_name_of_dtype))


def _name_of_dtype(value: Any) -> str:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{value} is no number of JSON's")
    return str(value).removeprefix("torch.")


@functools.lru_cache(maxsize=4096)
def _read(names: tuple[str, ...], words: str) -> Mapping[str, Any]:
    """What is no tensor of a call, by its names."""
    told = dict(zip(names, json.loads(words), strict=True))
    if told.get("bias_dtype") is not None:
        told["bias_dtype"] = getattr(torch, told["bias_dtype"])
    return told


class ShortForward(Short, Forward):
    """The arguments of `miofind::short_convolution`."""

    __slots__ = ()
    tensors = ("x", "w", "bias", "scale", "residual", "channel_bias", "filters")


class ShortStatistics(Short, Statistics):
    """The arguments of `miofind::short_convolution_statistics`."""

    __slots__ = ()
    tensors = ("x", "w", "bias")


class ShortBackwardData(Short, BackwardData):
    """The arguments of `miofind::short_convolution_backward_data`."""

    __slots__ = ()
    tensors = ("dy", "x", "w", "residual", "saved")


class ShortBackwardWeights(Short, BackwardWeights):
    """The arguments of `miofind::short_convolution_backward_weights`."""

    __slots__ = ()
    tensors = ("dy", "x", "w")


Call = Forward | Statistics | BackwardData | BackwardWeights
SHORT: Mapping[type[Call], type[Short]] = {
    Forward: ShortForward,
    Statistics: ShortStatistics,
    BackwardData: ShortBackwardData,
    BackwardWeights: ShortBackwardWeights,
}
COMPUTED_BY: dict[type, str] = {Forward: "y", Statistics: "y", BackwardData: "dx", BackwardWeights: "dw"}
COMPUTED_BY |= {SHORT[kind]: computed for kind, computed in COMPUTED_BY.items()}
"""What operators with these arguments compute, beside sums."""
OneCall = TypeVar("OneCall", bound=Call)


def empty(shape: Sequence[Any], like: Any, layout: Layout) -> Any:
    """A new packed tensor in a memory order, of the dtype and on the device of another."""
    made = {"dtype": like.dtype, "device": like.device}
    if not layout.channels_last:
        return torch.empty(shape, **made)
    if len(shape) == 3:
        formed = torch.empty((shape[0], shape[1], 1, shape[2]), memory_format=torch.channels_last, **made)
        return formed.squeeze(2)
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, memory_format=memory_format, **made)


def place(call: Call, field: str) -> int:
    """Which of its operator's arguments a call's tensor is."""
    fields = call.tensors if isinstance(call, Short) else call._fields
    return fields.index(field)


def _window(call: Call) -> Window:
    return Window(
        stride=tuple(call.stride), padding=tuple(call.padding), dilation=tuple(call.dilation), groups=call.groups
    )


def _layout(call: Call) -> Layout:
    """The memory order of what a call makes."""
    if call.channels_last is not None:
        return layout_like(call.x, channels_last=call.channels_last)
    return output_layout(call.x, call.w, None, call.window.geometry)


def _check(condition: Any, message: Callable[[], str]) -> None:
    """Raises unless it holds; PyTorch, which would load what it traces symbols by first, is asked of symbols alone."""
    if condition is not True:
        torch._check(condition, lambda: f"miofind::convolution: {message()}")


def _check_convolution(call: Call) -> None:
    x, w = call.x, call.w
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, torch.Tensor):
            _check_device(value, name, x.device)
    _check(w.dim() == x.dim(), lambda: f"x {_told(x)} and w {_told(w)} differ in dimensions")
    window = {name: list(getattr(call, name)) for name in ("stride", "padding", "dilation")}
    are_numbers_of_each = all(len(numbers) == x.dim() - 2 for numbers in window.values())
    _check(are_numbers_of_each, lambda: f"x {_told(x)} needs a number for each spatial dimension: {window}")
    _check(x.dtype == w.dtype, lambda: f"x has {x.dtype} and w {w.dtype}: convert one")
    _check(
        all(n > 0 for n in (*call.stride, *call.dilation)), lambda: f"stride={call.stride}, dilation={call.dilation}"
    )
    _check(w.shape[1] * call.groups == x.shape[1], lambda: f"w {_told(w)}, groups={call.groups}, x {_told(x)}")


def _check_shape(tensor: Any, name: str, shape: Sequence[Any]) -> None:
    if tensor is not None:
        is_same = tensor.dim() == len(shape) and all(a == b for a, b in zip(tensor.shape, shape, strict=True))
        _check(is_same, lambda: f"{name} {_told(tensor)} must have the shape {tuple(shape)}")


def _check_device(tensor: Any, name: str, device: Any) -> None:
    _check(tensor.device == device, lambda: f"x is on {device}, {name} on {tensor.device}: move one")


def _check_dtype(call: Call, name: str) -> None:
    tensor, dtype = getattr(call, name), call.x.dtype
    if tensor is not None:
        _check(tensor.dtype == dtype, lambda: f"x has {dtype} and {name} {tensor.dtype}: convert one")


def _told(tensor: Any) -> str:
    return f"of shape {tuple(tensor.shape)}"


def of_one_dtype(call: OneCall) -> OneCall:
    """A forward call with bias and scale both of x's dtype or both in float32, and the residual of x's dtype."""
    if isinstance(call, Statistics):
        return call._replace(bias=_narrowed(call.forward).bias)
    return cast(OneCall, _narrowed(call)) if isinstance(call, Forward) else call


def _narrowed(call: Forward) -> Forward:
    vectors = [vector for vector in (call.bias, call.scale) if vector is not None]
    if len({vector.dtype for vector in vectors} | {call.x.dtype}) > 1:
        wide = torch.promote_types(torch.float32, call.x.dtype)
        made = [vector if vector is None else vector.to(wide) for vector in (call.bias, call.scale)]
        call = call._replace(bias=made[0], scale=made[1])
    for name in ("residual", "channel_bias"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.dtype != call.x.dtype:
            call = call._replace(**{name: tensor.to(call.x.dtype)})
    return call


def problem_of(call: Call, layout: Layout, math: MathMode) -> ProblemDescription:
    """What a call has solved, all tensors in one memory order.

    Raises:
        Unserved: a convolution that miofind does not have.
    """
    if isinstance(call, Forward):
        like, epilogue = call.x, _forward_epilogue(call)
    elif isinstance(call, Statistics):
        like, epilogue = call.x, replace(_forward_epilogue(call.forward), statistics=True)
    elif isinstance(call, BackwardData):
        like = call.dy
        epilogue = Epilogue(
            residual=ResidualPosition.NONE if call.residual is None else ResidualPosition.BEFORE,
            derivative=Activation.NONE if call.saved is None else Activation(call.derivative),
        )
    else:
        like = call.dy
        of_bias = None if call.bias_dtype is None else served_type(call.bias_dtype)
        epilogue = Epilogue(bias_gradient=of_bias is not None, parameter_dtype=of_bias)
    dtype = TensorForm.of(like).dtype
    window = call.window
    aten = ConvolutionCall(
        x=TensorForm(tuple(call.x.shape), (), dtype),
        w=TensorForm(tuple(call.w.shape), (), dtype),
        stride=window.stride,
        padding=window.padding,
        dilation=window.dilation,
        output_padding=(0,) * len(window.stride),
        transposed=False,
        groups=window.groups,
        backend_format=layout,
    )
    try:
        return replace(aten.problem(COMPUTED_BY[type(call)], math), epilogue=epilogue)
    except InvalidProblemError as error:
        raise Unserved(f"miofind has no such epilogue: {error}") from error


def _forward_epilogue(call: Forward) -> Epilogue:
    vectors = [vector for vector in (call.bias, call.scale) if vector is not None]
    return Epilogue(
        scale=call.scale is not None,
        bias=call.bias is not None,
        channel_bias=call.channel_bias is not None,
        residual=ResidualPosition(call.residual_position) if call.residual is not None else ResidualPosition.NONE,
        activation=Activation(call.activation),
        parameter_dtype=TensorForm.of(vectors[0]).dtype if vectors else None,
    )
