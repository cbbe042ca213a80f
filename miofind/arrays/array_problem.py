"""The problem that given arrays pose: shapes from their shapes, layouts from their strides."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miofind.arrays import arrays
from miofind.arrays.arrays import ArrayView
from miofind.core.problem import ProblemDescription
from miofind.core.tensor import DataType, Direction, one_size, sizes
from miofind.errors import InvalidArrayError, InvalidProblemError, brief, suggestion

_ARRAYS = frozenset({"x", "w", "dy", "out", "x_shape", "w_shape"})
_ARGUMENTS = frozenset({"padding", "stride", "dilation", "groups", "math"})


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
    """The problem of two inputs and perhaps the output, cached by what of them matters.

    Args:
        direction: which tensor is computed.
        views: by tensor name, "x", "w" or "y"; dy is "y".
        missing_shape: shape of the output where the inputs leave it open: x for backward data, w for backward weights.
        arguments: padding, stride, dilation, groups and math as in `ProblemDescription.convolution`.
        others: names of the caller's other keywords, for its message.

    Raises:
        InvalidArrayError, InvalidProblemError: the message names the array or field.
    """
    unknown = set(arguments) - _ARGUMENTS
    if unknown:
        known = sorted(_ARGUMENTS | others)
        near = suggestion(min(unknown), known) or "."
        raise InvalidProblemError(f"unknown arguments {sorted(unknown)}{near} Known are {', '.join(known)}")
    facts = tuple(_Facts(name, v.shape, v.strides, v.dtype) for name, v in views.items())
    output = direction.output
    if missing_shape is None and output not in views and direction is not Direction.FORWARD:
        raise InvalidProblemError(f"{direction} needs {output}_shape: several forward shapes give the same dy")
    shape = None if missing_shape is None else sizes(_sequence(missing_shape), f"{output}_shape")
    given = tuple((name, _hashable(name, value)) for name, value in sorted(arguments.items()))
    return _problem(direction, facts, shape, given)


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
    layouts = arrays.infer_layouts({name: (fact.shape, fact.strides) for name, fact in by_name.items()})
    leading = layouts[direction.inputs[0]]
    names = (*direction.inputs, direction.output)
    problem = ProblemDescription.convolution(
        x=shapes["x"],
        w=shapes["w"],
        direction=direction,
        dtype={name: by_name[name].dtype if name in by_name else dtype for name in names},
        layout={name: layouts.get(name, leading) for name in names},
        **dict(arguments),
    )
    for name, fact in by_name.items():
        if fact.shape != problem.tensor(name).shape:
            given = "dy" if name == "y" and direction is not Direction.FORWARD else name
            raise InvalidArrayError(f"{given} has shape {fact.shape}, the convolution has {problem.tensor(name).shape}")
    return problem


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
    views = {name.removeprefix("d"): arrays.view(array, name) for name, array in given.items()}
    if out is not None:
        views[direction.output] = arrays.view(out, "out")
    return problem_from_views(direction, views, missing, arguments, _ARRAYS)
