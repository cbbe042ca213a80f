"""The problem that given arrays pose: shapes from their shapes, layouts from their strides."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miofind.arrays import arrays, operands
from miofind.arrays.arrays import ArrayView, strides_fit
from miofind.arrays.facts import LIKE, Facts, Form, batched, filled, packed, user_name
from miofind.core.arguments import EPILOGUE_OF_DIRECTION, ConvolutionArguments, PosedEpilogue
from miofind.core.epilogue import (
    DERIVATIVES,
    EPILOGUE_OPERANDS,
    EPILOGUE_TENSORS,
    EPILOGUE_VECTORS,
    NO_EPILOGUE,
    OUTPUT_SWITCHES,
    SECOND_OUTPUTS,
    STATISTICS,
    Activation,
    Epilogue,
    ResidualPosition,
)
from miofind.core.operand import Operand
from miofind.core.problem import ProblemDescription
from miofind.core.tensor import Direction, enum_value, one_size, sizes
from miofind.errors import InvalidArrayError, InvalidProblemError, brief, suggestion

EPILOGUE_ARGUMENTS = frozenset(PosedEpilogue.__annotations__) - set(EPILOGUE_OPERANDS)
"""What else says which epilogue a problem has."""

_ARRAYS = frozenset({"x", "w", "dy", "out", "x_shape", "w_shape", *EPILOGUE_OPERANDS})
_ARGUMENTS = frozenset(ConvolutionArguments.__annotations__)

_SAME_AS = {"relu6": Activation.CLAMP.value}
"""Activations under names of others: clamp's bounds are 0 and 6 unless a run is given others."""


@dataclass(frozen=True, slots=True)
class Posed:
    """The problem of given arrays, and what must become of them before it is run with them.

    Attributes:
        problem: of packed arrays with a batch of one image at least.
        copied: names of the inputs that lie in memory in another order than the problem's.
        unbatched: the images have no batch.
        empty: the batch has no images; the problem is that of one.
    """

    problem: ProblemDescription
    copied: frozenset[str] = frozenset()
    unbatched: bool = False
    empty: bool = False

    @property
    def fits(self) -> bool:
        """Whether the problem is run with the arrays as they are."""
        return not (self.copied or self.unbatched or self.empty)


def posed(
    direction: Direction,
    views: Mapping[str, ArrayView],
    missing_shape: Sequence[int] | None,
    arguments: Mapping[str, Any],
    others: frozenset[str] = frozenset(),
    *,
    strict: bool = False,
) -> Posed:
    """The problem of two inputs, perhaps the output, and what an epilogue reads; cached by what of them matters.

    Args:
        direction: which tensor is computed.
        views: by tensor name, "x", "w" or "y", then those of EPILOGUE_OPERANDS and SECOND_OUTPUTS; dy is "y". An array
            named LIKE stands for an output that is not there.
        missing_shape: shape of the output where the inputs leave it open: x for backward data, w for backward weights.
        arguments: padding, stride, dilation, groups and math as in `ProblemDescription.convolution`; forward,
            activation, residual_position and statistics; derivative for backward data, bias_gradient for backward
            weights.
        others: names of the caller's other keywords, for its message.
        strict: refuse arrays that the problem is not run with as they are.

    Raises:
        InvalidArrayError, InvalidProblemError: the message names the array or field.
    """
    asked = EPILOGUE_ARGUMENTS & EPILOGUE_OF_DIRECTION[direction]
    if not arguments.keys() <= _ARGUMENTS | asked:
        refuse_unknown(arguments.keys() - _ARGUMENTS - asked, _ARGUMENTS | asked | others)
    facts = tuple(Facts(name, v.shape, v.strides, v.dtype) for name, v in views.items())
    output = direction.output
    if missing_shape is None and direction is not Direction.FORWARD and output not in views and LIKE not in views:
        raise InvalidProblemError(f"{direction} needs {output}_shape: several forward shapes give the same dy")
    shape = None if missing_shape is None else sizes(_sequence(missing_shape), f"{output}_shape", least=0)
    given = tuple((name, _hashable(name, value)) for name, value in sorted(arguments.items()))
    return _strict(direction, facts, shape, given) if strict else _posed(direction, facts, shape, given)


def refuse_unknown(unknown: Collection[str], known: Collection[str]) -> None:
    """Do nothing where no keywords are unknown.

    Raises:
        InvalidProblemError: some are; the message suggests one that was meant.
    """
    if unknown:
        names = sorted(known)
        near = suggestion(min(unknown), names) or "."
        raise InvalidProblemError(f"unknown arguments {sorted(unknown)}{near} Known are {', '.join(names)}")


def epilogue_arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays of an epilogue that are there, taken out of the arguments."""
    taken = {name: arguments.pop(name) for name in EPILOGUE_OPERANDS if name in arguments}
    return {name: array for name, array in taken.items() if array is not None}


def output_views(direction: Direction, out: Any, arguments: Mapping[str, Any]) -> dict[str, ArrayView]:
    """Views of the outputs that are given, by tensor name.

    Args:
        out: an array, or a tuple of one for each output, None for those that are not given; None for none.
        arguments: that say which outputs there are.

    Raises:
        InvalidArrayError: one is no array, or there are not as many as outputs.
    """
    seconds: tuple[str, ...] = ("bias_gradient",) if arguments.get("bias_gradient") is True else ()
    seconds += STATISTICS if arguments.get("statistics") is True else ()
    if out is None:
        return {}
    if not seconds:
        return {direction.output: arrays.view(out, "out")}
    main = direction.output if direction is Direction.FORWARD else f"d{direction.output}"
    first, *others = operands.several_outputs(out, (main, *seconds))
    views = {} if first is None else {direction.output: arrays.view(first, "out")}
    return views | {
        name: arrays.view(array, name) for name, array in zip(seconds, others, strict=True) if array is not None
    }


def refuse_epilogue(direction: Direction, names: Iterable[str]) -> None:
    """Do nothing where the arguments of an epilogue go with a direction.

    Raises:
        InvalidProblemError: one of them does not.
    """
    wrong = sorted(set(names) - EPILOGUE_OF_DIRECTION[direction])
    if wrong:
        takers = [d for d in Direction if wrong[0] in EPILOGUE_OF_DIRECTION[d]]
        told = f"{', '.join(wrong)}: {direction} takes none"
        raise InvalidProblemError(f"{told}: {wrong[0]} is of the epilogues of {' and '.join(takers)}")


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
    if name in OUTPUT_SWITCHES:
        if not isinstance(value, bool):
            raise InvalidProblemError(f"{name}={brief(value)} must be True or False")
        return value
    if name in EPILOGUE_ARGUMENTS and not isinstance(value, str):
        if name in ("activation", "derivative") and value is None:
            return Activation.NONE.value
        raise InvalidProblemError(f"{name}={brief(value)} must be a name")
    return value if isinstance(value, str) else one_size(value, name, 0)


@functools.lru_cache(maxsize=4096)
def _posed(
    direction: Direction,
    facts: tuple[Facts, ...],
    missing_shape: tuple[int, ...] | None,
    arguments: tuple[tuple[str, Any], ...],
) -> Posed:
    form = batched(direction, Form({fact.name: fact for fact in facts}, missing_shape))
    form = filled(direction, form)
    read = [name for name in form.facts if name in (*direction.inputs, *EPILOGUE_TENSORS, LIKE)]
    copies = packed(form.facts, read)
    problem = _problem(direction, {**form.facts, **copies}, form.missing_shape, arguments)
    inputs = [operand for operand in problem.inputs if operand.name in form.facts]
    copied = frozenset(
        operand.name for operand in inputs if not strides_fit(operand.array, form.facts[operand.name].strides)
    )
    return Posed(problem, copied, form.unbatched, form.empty)


@functools.lru_cache(maxsize=4096)
def _strict(
    direction: Direction,
    facts: tuple[Facts, ...],
    missing_shape: tuple[int, ...] | None,
    arguments: tuple[tuple[str, Any], ...],
) -> Posed:
    by_name = {fact.name: fact for fact in facts}
    problem = _problem(direction, by_name, missing_shape, arguments)
    for operand in problem.operands:
        if operand.name in by_name:
            _check_strides(operand, by_name[operand.name], direction)
    return Posed(problem)


def _problem(
    direction: Direction,
    by_name: Mapping[str, Facts],
    missing_shape: tuple[int, ...] | None,
    arguments: tuple[tuple[str, Any], ...],
) -> ProblemDescription:
    """The problem of packed arrays; the inputs may lie in another memory order than it has."""
    known = {direction.output if name == LIKE else name: fact for name, fact in by_name.items()}
    shapes = {name: fact.shape for name, fact in known.items()}
    if missing_shape is not None:
        shapes[direction.output] = missing_shape
    dtype = known[direction.inputs[0]].dtype
    options = dict(arguments)
    asked = {name: options.pop(name) for name in EPILOGUE_ARGUMENTS & options.keys()}
    epilogue = _epilogue(known, **asked)
    spatial = {name: fact for name, fact in known.items() if name not in (*EPILOGUE_VECTORS, *SECOND_OUTPUTS)}
    _refuse_no_elements(spatial.values(), direction)
    layouts = arrays.infer_layouts({name: (fact.shape, fact.strides) for name, fact in spatial.items()})
    leading = layouts[direction.inputs[0]]
    names = (*direction.inputs, direction.output)
    problem = ProblemDescription.convolution(
        x=shapes["x"],
        w=shapes["w"],
        direction=direction,
        dtype={name: known[name].dtype if name in known else dtype for name in names},
        layout={name: layouts.get(name, leading) for name in names},
        epilogue=epilogue,
        **options,
    )
    for operand in problem.operands:
        if operand.name in known:
            _check_fits(operand, known[operand.name], direction)
    for operand in problem.outputs:
        if operand.name in by_name:
            _check_strides(operand, by_name[operand.name], direction)
    return problem


def _refuse_no_elements(facts: Iterable[Facts], direction: Direction) -> None:
    """Do nothing where arrays have elements.

    Raises:
        InvalidArrayError: one has none.
    """
    for fact in facts:
        if 0 in fact.shape:
            told = f"{user_name(fact.name, direction)} has shape {fact.shape}, without elements"
            raise InvalidArrayError(f"{told}: the batch alone may be 0, in calls that find and run at once")


def _check_fits(operand: Operand, fact: Facts, direction: Direction) -> None:
    """Do nothing where an array has the shape that the problem wants of it and, of an epilogue's, the dtype.

    Raises:
        InvalidArrayError: it has others.
    """
    name, wanted = operand.name, operand.array
    if fact.shape != wanted.shape:
        given = user_name(name, direction)
        advice = f": pass {given}.reshape{wanted.shape}" if arrays.is_reshaped(fact.shape, wanted.shape) else ""
        raise InvalidArrayError(f"{given} has shape {fact.shape}, the convolution has {wanted.shape}{advice}")
    if fact.dtype is not wanted.dtype:  # x, w and y have their own
        told = f"{name} has dtype {fact.dtype}"
        if name in SECOND_OUTPUTS:
            raise InvalidArrayError(f"{told}, the convolution writes {wanted.dtype}: pass such an array, or None")
        output = "y" if direction is Direction.FORWARD else f"d{direction.output}"
        raise InvalidArrayError(f"{told}, {output} has {wanted.dtype}: convert {name}")


def _check_strides(operand: Operand, fact: Facts, direction: Direction) -> None:
    """Do nothing where an array lies in memory as the problem wants it.

    Raises:
        InvalidArrayError: it does not.
    """
    name, wanted = operand.name, operand.array
    if strides_fit(wanted, fact.strides):
        return
    if name in EPILOGUE_TENSORS:
        output, other = ("y", "x") if direction is Direction.FORWARD else ("dx", "dy")
        raise InvalidArrayError(
            f"{name} of shape {fact.shape} has strides {fact.strides}, {output} is {operand.tensor.layout} and wants "
            f"{wanted.strides} (out decides {output}'s layout, else {other}): pass a copy of the {name} in that "
            f"layout, or {other} and out in the layout of {name}"
        )
    raise InvalidArrayError(f"{name} of shape {fact.shape} has strides {fact.strides}: pass a contiguous copy")


def _epilogue(
    facts: Mapping[str, Facts],
    activation: Any = "none",
    residual_position: Any = "before",
    derivative: Any = "none",
    statistics: bool = False,
    bias_gradient: bool = False,
) -> Epilogue:
    """The epilogue that reads the arrays that are there, and writes what is asked for.

    Raises:
        InvalidArrayError: scale and bias of two element types.
        InvalidProblemError: an unknown activation or position, or a derivative without what was saved.
    """
    activation = enum_value(Activation, _SAME_AS.get(str(activation).lower(), activation), "activation")
    derivative = _derivative(facts, derivative)
    position = enum_value(ResidualPosition, residual_position, "residual_position")
    if position is ResidualPosition.NONE:
        raise InvalidProblemError("residual_position=none is unknown: use one of before, after")
    if bias_gradient:
        given = facts.get("bias_gradient")
        return Epilogue(bias_gradient=True, parameter_dtype=None if given is None else given.dtype)
    if activation is Activation.NONE and not statistics and not any(name in facts for name in EPILOGUE_OPERANDS):
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
        statistics=statistics,
        derivative=derivative,
    )


def _derivative(facts: Mapping[str, Facts], name: Any) -> Activation:
    """The activation of that name, by whose derivative at `saved` results are multiplied.

    Raises:
        InvalidProblemError: an unknown one, one without `saved`, or `saved` without one.
    """
    derivative = enum_value(Activation, _SAME_AS.get(str(name).lower(), name), "derivative")
    if "saved" in facts and derivative is Activation.NONE:
        raise InvalidProblemError(f"saved is what a derivative is taken at: name it, derivative={DERIVATIVES[0]}")
    if "saved" not in facts and derivative is not Activation.NONE:
        raise InvalidProblemError(f"derivative={derivative} is taken at an array: pass saved, of the shape of dx")
    return derivative


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
    views |= output_views(direction, out, arguments)
    views |= {name: arrays.view(array, name) for name, array in read.items()}
    return posed(direction, views, missing, arguments, _ARRAYS, strict=True).problem
