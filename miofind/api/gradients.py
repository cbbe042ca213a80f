"""The gradients of a convolution in one call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, Unpack, overload

from miofind.api.array_call import Roles, device_of, run_call
from miofind.api.keywords import CallArguments, check_keywords, spelled_out
from miofind.arrays import arrays, operands
from miofind.core.arguments import A
from miofind.core.problem import DataType, Direction
from miofind.errors import InvalidArrayError, InvalidOptionError, brief, suggestion
from miofind.options import FindOptions

GradientName: TypeAlias = Literal["x", "w", "bias"]
Wanted: TypeAlias = Sequence[GradientName] | GradientName

NAMES: tuple[GradientName, ...] = ("x", "w", "bias")


G = TypeVar("G")
"""A gradient: an array, or None where it was not wanted."""


class Gradients(NamedTuple, Generic[G]):
    """What `convolution_gradients` returns; None for what was not wanted.

    Attributes:
        dx: of x's shape, dtype and memory order.
        dw: of w's shape, dtype and memory order.
        bias: (k,), the sum of dy over n and space, in w's dtype.
    """

    dx: G
    dw: G
    bias: G


@overload
def convolution_gradients(
    dy: A,
    x: A,
    w: A,
    *,
    deterministic: bool = False,
    out: Sequence[A | None] | None = None,
    **arguments: Unpack[CallArguments],
) -> Gradients[A]: ...
@overload
def convolution_gradients(
    dy: A,
    x: A,
    w: A,
    wanted: Wanted,
    *,
    deterministic: bool = False,
    out: Sequence[A | None] | None = None,
    **arguments: Unpack[CallArguments],
) -> Gradients[A | None]: ...
@spelled_out(CallArguments)
def convolution_gradients(
    dy: Any,
    x: Any,
    w: Any,
    wanted: Wanted = NAMES,
    *,
    deterministic: bool = False,
    out: Any = None,
    **arguments: Unpack[CallArguments],
) -> Gradients[Any]:
    """The gradients of y = x * w + bias by what is wanted of x, w and bias, given dy, that by y.

    The bias gradient comes with that of w where both are wanted, from one pass over dy; else the array library sums it.

    Args:
        dy: (n, k, *out_spatial), or (k, *out_spatial), as in `convolution`.
        x: (n, c, *spatial), or (c, *spatial); for dx alone only its shape, dtype and memory order are looked at.
        w: (k, c/groups, *filter); for dw alone only its shape, dtype and memory order are looked at.
        wanted: which gradients: of "x", "w" and "bias".
        deterministic: take solutions alone that give equal bits for equal inputs.
        out: (dx, dw, bias) to write to, such as what an earlier call returned; one that is None is allocated.
        arguments: padding, stride, dilation, groups, math, options, handle, workspace and stream as in `convolution`.

    Raises:
        InvalidArrayError, InvalidProblemError: the message names the array or field.
        InvalidOptionError: `wanted` names something else.
    """
    check_keywords(arguments, "wanted", "deterministic", "out")
    names = checked_names(wanted)
    outs = given_outputs(out, names)
    options = with_determinism(arguments.pop("options", None), deterministic)
    call = _Call(dy, x, w, {**arguments, "options": options})
    unbatched = call.lift(outs)
    dx = call.data(outs.get("x")) if "x" in names else None
    dw, bias = call.parameters(names, outs)
    if unbatched and dx is not None:
        dx = dx[0] if outs.get("x") is None else out[0]
    return Gradients(dx, dw, bias)


class _Call:
    """The arrays of one call, batched, and as copies where copies had to be made."""

    def __init__(self, dy: Any, x: Any, w: Any, arguments: Mapping[str, Any]) -> None:
        self._given = {"y": dy, "x": x, "w": w}
        self._arguments = arguments

    def lift(self, outs: dict[str, Any]) -> bool:
        """Give images a batch of one where they have none; whether they had none.

        Raises:
            InvalidArrayError: one has a batch and another has none.
        """
        views = {name: arrays.view(array, "dy" if name == "y" else name) for name, array in self._given.items()}
        rank = len(views["w"].shape)
        ranks = {len(views["y"].shape), len(views["x"].shape)}
        if ranks != {rank - 1} or rank not in (3, 4, 5):
            if rank - 1 in ranks and rank in ranks:
                shapes = f"dy has shape {views['y'].shape} and x {views['x'].shape}"
                raise InvalidArrayError(f"{shapes}: give both a batch or none")
            return False
        self._given |= {name: arrays.with_batch(self._given[name], name) for name in ("x", "y")}
        if outs.get("x") is not None:
            outs["x"] = arrays.with_batch(outs["x"], "out")
        return True

    def data(self, out: Any) -> Any:
        return self._run(Direction.BACKWARD_DATA, ("y", "w"), "x", out)

    def parameters(self, names: Sequence[str], outs: Mapping[str, Any]) -> tuple[Any, Any]:
        """dw and the bias gradient; None for what is not wanted."""
        dw, bias = outs.get("w"), outs.get("bias")
        if "w" not in names:
            return None, self._summed(bias) if "bias" in names else None
        if "bias" not in names:
            return self._run(Direction.BACKWARD_WEIGHTS, ("y", "x"), "w", dw), None
        both = None if dw is None and bias is None else (dw, bias)
        result = self._run(Direction.BACKWARD_WEIGHTS, ("y", "x"), "w", both, bias_gradient=True)
        return result.dw, result.bias_gradient

    def _run(self, direction: Direction, inputs: tuple[str, str], like: str, out: Any, **more: Any) -> Any:
        given = {name: self._given[name] for name in inputs}
        roles = Roles(like=self._given[like])
        result = run_call(direction, given, None, roles, out=out, **{**self._arguments, **more})
        self._given |= given
        return result

    def _summed(self, out: Any) -> Any:
        dtype = arrays.view(self._given["w"], "w").dtype
        return summed_channels(self._given["y"], "dy", dtype, out, self._arguments.get("stream"))


def summed_channels(array: Any, name: str, dtype: DataType, out: Any, stream: Any) -> Any:
    """The sum of each channel over n and space, (k,), by the array's library.

    Raises:
        InvalidArrayError: `out` is of another shape or device.
    """
    views = {name: arrays.view(array, name)}
    if out is not None:
        views["bias"] = arrays.view(out, "bias")
        if views["bias"].shape != views[name].shape[1:2]:
            told = f"bias of out has shape {views['bias'].shape}, {name} has {views[name].shape[1]} channels"
            raise InvalidArrayError(f"{told}: pass such an array, or None")
    index = device_of(views, Direction.BACKWARD_WEIGHTS).index
    with operands.allocating_on(array, stream, index):
        return arrays.channel_sums(array, dtype, index, out)


def checked_names(wanted: object) -> tuple[GradientName, ...]:
    """The gradients that are wanted.

    Raises:
        InvalidOptionError: none, or something that no gradient is of.
    """
    given = (wanted,) if isinstance(wanted, str) else wanted
    if not isinstance(given, (tuple, list, set, frozenset)) or not given:
        raise InvalidOptionError(f"wanted={brief(wanted)} must be some of {', '.join(NAMES)}")
    for name in given:
        if name not in NAMES:
            near = suggestion(name, NAMES)
            raise InvalidOptionError(f"wanted={brief(wanted)} must be some of {', '.join(NAMES)}{near}")
    return tuple(name for name in NAMES if name in given)


def given_outputs(out: Any, names: Sequence[str]) -> dict[str, Any]:
    """The outputs that are given, by what they are the gradient of.

    Raises:
        InvalidArrayError: no tuple of three, or one is given whose gradient is not wanted.
    """
    outs = dict(zip(NAMES, operands.several_outputs(out, ("dx", "dw", "bias")), strict=True))
    for name, array in outs.items():
        if array is not None and name not in names:
            raise InvalidArrayError(
                f"out has an array for the gradient of {name}, which is not wanted: pass None there"
            )
    return dict(outs)


@functools.lru_cache(maxsize=64)
def with_determinism(options: FindOptions | None, deterministic: bool) -> FindOptions | None:
    """The options, restricted to deterministic solutions where that is asked for."""
    if not deterministic:
        return options
    return replace(FindOptions() if options is None else options, deterministic=True)
