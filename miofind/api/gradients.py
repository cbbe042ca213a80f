"""The gradients of a convolution in one call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, Unpack, overload

from miofind.api.array_call import Roles, device_of, run_call
from miofind.api.keywords import KEYWORDS, CallArguments, check_keywords, spelled_out
from miofind.arrays import arrays, operands
from miofind.arrays.array_problem import posed
from miofind.arrays.facts import LIKE
from miofind.core.arguments import A
from miofind.core.operand import FlatTensor
from miofind.core.problem import DataType, Direction
from miofind.errors import InvalidArrayError, InvalidOptionError, brief, suggestion
from miofind.options import FindOptions

GradientName: TypeAlias = Literal["x", "w", "bias"]
Wanted: TypeAlias = Sequence[GradientName] | GradientName

NAMES: tuple[GradientName, ...] = ("x", "w", "bias")

_BIAS = "bias of out"
_OF_OUT: Mapping[str, str] = {"x": "dx of out", "w": "dw of out", "bias": _BIAS}
"""What a user calls the outputs that are given, by what they are the gradients of."""

G = TypeVar("G")
"""A gradient: an array, or None where it was not wanted."""


class Gradients(NamedTuple, Generic[G]):
    """What `convolution_gradients` returns; None for what was not wanted.

    Attributes:
        dx: of x's shape, dtype and memory order.
        dw: of w's shape, dtype and memory order.
        bias: (k,), the sum of dy over n and space, in w's dtype, or in the dtype that it has in `out`.
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
        out: (dx, dw, bias) to write to, such as what an earlier call returned; one that is None is allocated. They
            share no memory with each other, nor with what is read for the gradients that are wanted.
        arguments: padding, stride, dilation, groups, math, options, handle, workspace and stream as in `convolution`.

    Raises:
        InvalidArrayError, InvalidProblemError: the message names the array or field.
        InvalidOptionError: `wanted` names something else.
    """
    check_keywords(arguments, "wanted", "deterministic", "out")
    names = checked_names(wanted)
    outs = given_outputs(out, names)
    if out is not None:
        refuse_shared_memory(names, outs, dy, x, w)
    options = with_determinism(arguments.pop("options", None), deterministic)
    call = _Call(dy, x, w, {**arguments, "options": options})
    unbatched = call.lift(outs)
    if names == ("bias",):
        call.check()
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

    def check(self) -> None:
        """Do nothing where the arrays are of one convolution: runs find out by themselves, a plain sum does not.

        Raises:
            InvalidArrayError, InvalidProblemError: they are not.
        """
        refuse_unfit(self._given, self._arguments)

    def data(self, out: Any) -> Any:
        return self._run(Direction.BACKWARD_DATA, "x", out)

    def parameters(self, names: Sequence[str], outs: Mapping[str, Any]) -> tuple[Any, Any]:
        """dw and the bias gradient; None for what is not wanted."""
        dw, bias = outs.get("w"), outs.get("bias")
        if "w" not in names:
            return None, self._summed(bias) if "bias" in names else None
        if "bias" not in names:
            return self._run(Direction.BACKWARD_WEIGHTS, "w", dw), None
        both = None if dw is None and bias is None else (dw, bias)
        result = self._run(Direction.BACKWARD_WEIGHTS, "w", both, bias_gradient=True)
        return result.dw, result.bias_gradient

    def _run(self, direction: Direction, like: str, out: Any, **more: Any) -> Any:
        given = {name: self._given[name] for name in direction.inputs}
        roles = Roles(like=self._given[like])
        result = run_call(direction, given, None, roles, out=out, **{**self._arguments, **more})
        self._given |= given
        return result

    def _summed(self, out: Any) -> Any:
        dtype = arrays.view(self._given["w"], "w").dtype
        return summed_channels(self._given["y"], "dy", dtype, out, self._arguments.get("stream"))


def refuse_unfit(given: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Do nothing where backward weights take y and x, and give such a w.

    Args:
        given: by tensor name.
        arguments: all keywords of the call.

    Raises:
        InvalidArrayError, InvalidProblemError: they do not.
    """
    views = {LIKE if name == "w" else name: arrays.view(array, name) for name, array in given.items()}
    of_problem = {name: value for name, value in arguments.items() if name not in KEYWORDS}
    posed(Direction.BACKWARD_WEIGHTS, views, None, of_problem, KEYWORDS)


def summed_channels(array: Any, name: str, dtype: DataType, out: Any, stream: Any) -> Any:
    """The sum of each channel over n and space, (k,), by the array's library.

    Args:
        array: (n, k, *spatial).
        name: what a user calls it.
        dtype: of the sums, where `out` does not decide.
        out: the sums, of the array's library and of `dtype` or that of accumulators; None for none.
        stream: as in `run_solution`.

    Raises:
        InvalidArrayError: `out` is something else, or cannot be written.
    """
    views = {name: arrays.view(array, name)}
    if out is not None:
        views[_BIAS] = arrays.view(out, _BIAS)
    index = device_of(views, Direction.BACKWARD_WEIGHTS).index
    if out is not None:
        arrays.refuse_other_library(out, _BIAS, array, name)
        if views[_BIAS].shape != views[name].shape[1:2]:
            told = f"{_BIAS} has shape {views[_BIAS].shape}, {name} has {views[name].shape[1]} channels"
            raise InvalidArrayError(f"{told}: pass such an array, or None")
        refuse_other_dtype(views[_BIAS].dtype, _BIAS, dtype, "w")
        dtype = views[_BIAS].dtype
        sums = FlatTensor(shape=views[_BIAS].shape, dtype=dtype)
        operands.strict_check(_BIAS, sums, index, 1, is_written=True)(out)
    with operands.allocating_on(array, stream, index):
        return arrays.channel_sums(array, dtype, index, out)


def refuse_other_dtype(given: DataType, name: str, wanted: DataType, like: str) -> None:
    """Do nothing where a vector of channels has the dtype of a tensor, or that of accumulators.

    Raises:
        InvalidArrayError: it has another.
    """
    if given not in (wanted, wanted.accumulator):
        other = "" if wanted is wanted.accumulator else f", or {wanted.accumulator}"
        raise InvalidArrayError(f"{name} has dtype {given}: use {wanted}, as {like} has{other}")


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


def refuse_shared_memory(names: Sequence[str], outs: Mapping[str, Any], dy: Any, x: Any, w: Any) -> None:
    """Do nothing where the outputs share no memory with what is read for the gradients, nor with each other.

    Each run checks its own operands alone: one gradient would be written over what the next one reads.

    Raises:
        InvalidArrayError: two share memory.
    """
    written = {_OF_OUT[name]: array for name, array in outs.items() if array is not None}
    read = {"dy": dy, "x": x if "w" in names else None, "w": w if "x" in names else None}
    operands.refuse_shared_memory(written, read)


@functools.lru_cache(maxsize=64)
def with_determinism(options: FindOptions | None, deterministic: bool) -> FindOptions | None:
    """The options, restricted to deterministic solutions where that is asked for."""
    if not deterministic:
        return options
    return replace(FindOptions() if options is None else options, deterministic=True)
