"""The problem that given arrays pose: shapes from their shapes, layouts from their strides."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miofind.arrays import arrays
from miofind.arrays.arrays import ArrayView
from miofind.core.epilogue import (
    EPILOGUE_OPERANDS,
    EPILOGUE_VECTORS,
    NO_EPILOGUE,
    Activation,
    Epilogue,
    ResidualPosition,
)
from miofind.core.operand import Operand
from miofind.core.problem import ProblemDescription
from miofind.core.tensor import DataType, Direction, enum_value, one_size, sizes
from miofind.errors import InvalidArrayError, InvalidProblemError, brief, suggestion

EPILOGUE_ARGUMENTS = frozenset({"activation", "residual_position"})
"""What else says which epilogue a problem has."""

_ARRAYS = frozenset({"x", "w", "dy", "out", "x_shape", "w_shape", *EPILOGUE_OPERANDS})
_ARGUMENTS = frozenset({"padding", "stride", "dilation", "groups", "math"})

_SAME_AS = {"relu6": Activation.CLAMP.value}
"""Activations under names of others: clamp's bounds are 0 and 6 unless a run is given others."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What of an array shapes the problem."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DataType


def problem_from_views(
    direction: Direction,
    views: Mapping[str, ArrayView],
    missing_shape: Sequence[int] | None,
    arguments: Mapping[str, Any],
    others: frozenset[str] = frozenset(),
) -> ProblemDescription:
    """The problem of two inputs, perhaps the output, and what an epilogue reads; cached by what of them matters.

    Args:
        direction: which tensor is computed.
        views: by tensor name, "x", "w" or "y", then those of EPILOGUE_OPERANDS; dy is "y".
        missing_shape: shape of the output where the inputs leave it open: x for backward data, w for backward weights.
        arguments: padding, stride, dilation, groups and math as in `ProblemDescription.convolution`; forward,
            activation and residual_position.
        others: names of the caller's other keywords, for its message.

    Raises:
        InvalidArrayError, InvalidProblemError: the message names the array or field.
    """
    unknown = set(arguments) - _ARGUMENTS
    if unknown and direction is Direction.FORWARD:
        unknown -= EPILOGUE_ARGUMENTS
    if unknown:
        of_forward = EPILOGUE_ARGUMENTS if direction is Direction.FORWARD else frozenset()
        known = sorted(_ARGUMENTS | of_forward | others)
        near = suggestion(min(unknown), known) or "."
        raise InvalidProblemError(f"unknown arguments {sorted(unknown)}{near} Known are {', '.join(known)}")
    facts = tuple(_Facts(name, v.shape, v.strides, v.dtype) for name, v in views.items())
    output = direction.output
    if missing_shape is None and output not in views and direction is not Direction.FORWARD:
        raise InvalidProblemError(f"{direction} needs {output}_shape: several forward shapes give the same dy")
    shape = None if missing_shape is None else sizes(_sequence(missing_shape), f"{output}_shape")
    given = tuple((name, _hashable(name, value)) for name, value in sorted(arguments.items()))
    return _problem(direction, facts, shape, given)


def epilogue_arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays of an epilogue that are there, taken out of the arguments."""
    taken = {name: arguments.pop(name) for name in EPILOGUE_OPERANDS if name in arguments}
    return {name: array for name, array in taken.items() if array is not None}


def refuse_epilogue(direction: Direction, names: Iterable[str]) -> None:
    """Do nothing forward, or where no argument is an epilogue's.

    Raises:
        InvalidProblemError: a gradient is asked for with one.
    """
    told = ", ".join(sorted(names))
    if told and direction is not Direction.FORWARD:
        raise InvalidProblemError(f"{told}: {direction} takes none: only a forward convolution has an epilogue")


def _sequence(shape: Any) -> Any:
    """A shape given as a one-dimensional NumPy array as a tuple; whatever else as it is."""
    return tuple(shape) if isinstance(shape, np.ndarray) and shape.ndim == 1 else shape


def _hashable(name: str, value: Any) -> Any:
    """An argument as a key that tells True and 1.0 from 1.

    Raises:
        InvalidProblemError: no text, integer or sequence of such.
    """
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(name, item) for item in value)
    if name in EPILOGUE_ARGUMENTS and not isinstance(value, str):
        if name == "activation" and value is None:
            return Activation.NONE.value
        raise InvalidProblemError(f"{name}={brief(value)} must be a name")
    return value if isinstance(value, str) else one_size(value, name, 0)


@functools.lru_cache(maxsize=4096)
def _problem(
    direction: Direction,
    facts: tuple[_Facts, ...],
    missing_shape: tuple[int, ...] | None,
    arguments: tuple[tuple[str, Any], ...],
) -> ProblemDescription:
    by_name = {fact.name: fact for fact in facts}
    shapes = {name: fact.shape for name, fact in by_name.items()}
    if missing_shape is not None:
        shapes[direction.output] = missing_shape
    dtype = by_name[direction.inputs[0]].dtype
    options = dict(arguments)
    epilogue = _epilogue(by_name, options.pop("activation", "none"), options.pop("residual_position", "before"))
    spatial = {name: fact for name, fact in by_name.items() if name not in EPILOGUE_VECTORS}
    layouts = arrays.infer_layouts({name: (fact.shape, fact.strides) for name, fact in spatial.items()})
    leading = layouts[direction.inputs[0]]
    names = (*direction.inputs, direction.output)
    problem = ProblemDescription.convolution(
        x=shapes["x"],
        w=shapes["w"],
        direction=direction,
        dtype={name: by_name[name].dtype if name in by_name else dtype for name in names},
        layout={name: layouts.get(name, leading) for name in names},
        epilogue=epilogue,
        **options,
    )
    for operand in problem.operands:
        if operand.name in by_name:
            _check_fits(operand, by_name[operand.name], direction)
    return problem


def _check_fits(operand: Operand, fact: _Facts, direction: Direction) -> None:
    """Do nothing where an array has the shape that the problem wants of it and, of an epilogue's, dtype and strides.

    Raises:
        InvalidArrayError: it has others.
    """
    name, wanted = operand.name, operand.array
    if fact.shape != wanted.shape:
        given = "dy" if name == "y" and direction is not Direction.FORWARD else name
        advice = f": pass {given}.reshape{wanted.shape}" if arrays.is_reshaped(fact.shape, wanted.shape) else ""
        raise InvalidArrayError(f"{given} has shape {fact.shape}, the convolution has {wanted.shape}{advice}")
    if fact.dtype is not wanted.dtype:  # x, w and y have their own
        raise InvalidArrayError(f"{name} has dtype {fact.dtype}, y has {wanted.dtype}: convert {name}")
    if arrays.strides_fit(wanted, fact.strides):
        return
    if name == "residual":
        raise InvalidArrayError(
            f"residual of shape {fact.shape} has strides {fact.strides}, y is {operand.tensor.layout} and wants "
            f"{wanted.strides} (out decides y's layout, else x): pass a copy of the residual in that layout, or x and "
            "out in the residual's"
        )
    raise InvalidArrayError(f"{name} of shape {fact.shape} has strides {fact.strides}: pass a contiguous copy")


def _epilogue(facts: Mapping[str, _Facts], activation: Any, position: Any) -> Epilogue:
    """The epilogue that reads the arrays that are there.

    Raises:
        InvalidArrayError: scale and bias of two element types.
        InvalidProblemError: an unknown activation or position.
    """
    activation = enum_value(Activation, _SAME_AS.get(str(activation).lower(), activation), "activation")
    position = enum_value(ResidualPosition, position, "residual_position")
    if position is ResidualPosition.NONE:
        raise InvalidProblemError("residual_position=none is unknown: use one of before, after")
    if activation is Activation.NONE and not any(name in facts for name in EPILOGUE_OPERANDS):
        return NO_EPILOGUE
    parameters = [facts[name] for name in ("scale", "bias") if name in facts]
    if len({fact.dtype for fact in parameters}) > 1:
        scale, bias = parameters
        raise InvalidArrayError(
            f"scale has dtype {scale.dtype} and bias {bias.dtype}: both have y's or both float32, convert one"
        )
    return Epilogue(
        scale="scale" in facts,
        bias="bias" in facts,
        channel_bias="channel_bias" in facts,
        residual=position if "residual" in facts else ResidualPosition.NONE,
        activation=activation,
        parameter_dtype=parameters[0].dtype if parameters else None,
    )


def problem_from_arrays(
    *,
    x: Any = None,
    w: Any = None,
    dy: Any = None,
    out: Any = None,
    x_shape: Sequence[int] | None = None,
    w_shape: Sequence[int] | None = None,
    **arguments: Any,
) -> ProblemDescription:
    """See `ProblemDescription.from_arrays`."""
    read = epilogue_arrays(arguments)
    given = {name: array for name, array in (("x", x), ("w", w), ("dy", dy)) if array is not None}
    names = frozenset(given)
    if names == {"x", "w"}:
        direction, missing = Direction.FORWARD, None
    elif names == {"dy", "w"}:
        direction, missing = Direction.BACKWARD_DATA, x_shape
    elif names == {"dy", "x"}:
        direction, missing = Direction.BACKWARD_WEIGHTS, w_shape
    else:
        raise InvalidProblemError(f"given arrays {sorted(names)}: pass x and w, or dy and w, or dy and x")
    for name, shape in (("x", x_shape), ("w", w_shape)):
        if shape is not None and name != direction.output:
            raise InvalidProblemError(f"{name}_shape={brief(shape)} is not for {direction} arrays: leave it out")
    refuse_epilogue(direction, (*read, *(EPILOGUE_ARGUMENTS & arguments.keys())))
    views = {name.removeprefix("d"): arrays.view(array, name) for name, array in given.items()}
    if out is not None:
        views[direction.output] = arrays.view(out, "out")
    views |= {name: arrays.view(array, name) for name, array in read.items()}
    return problem_from_views(direction, views, missing, arguments, _ARRAYS)
