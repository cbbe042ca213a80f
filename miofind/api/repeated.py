"""Calls like earlier ones: what runs them is remembered by the shapes, strides and dtypes of their arrays.

A handle forgets it with its answers. A runner checks its arrays on every run: what a key leaves out (devices,
addresses, gradients) is refused there, and such a call goes the long way.

A forward call into a given output, with the very keyword values that the last one of its shapes had, needs no key of
all that (`Last`): what else its arrays are, the runner's checks say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from miofind.api.directions import BACKWARD_DATA, FORWARD
from miofind.api.solutions import measures_always
from miofind.core.epilogue import EPILOGUE_NUMBERS, EPILOGUE_OPERANDS
from miofind.core.problem import Direction
from miofind.errors import InvalidArrayError
from miofind.options import FindOptions
from miofind.runtime.handle import Handle, known_handle
from miofind.runtime.runner import EPILOGUE_NAMES, Runner

MISS = object()
"""What `repeated` gives where the call is to go the long way."""

_MAX_CALLS = 4096
_ARRAYS, _NUMBERS, _OF_RUN = frozenset(EPILOGUE_OPERANDS), frozenset(EPILOGUE_NUMBERS), frozenset(EPILOGUE_NAMES)
_LEFT_OUT = frozenset({"out", "workspace", "stream", "handle"})

_strides_attribute: Callable[[Any], Any] = attrgetter("strides")


class Known(NamedTuple):
    """What runs a call.

    Attributes:
        runner: of the solution that was found.
        options: that it was found with: held, as the key has no more of them than their address.
    """

    runner: Runner
    options: FindOptions | None


class Last(NamedTuple):
    """The last forward call into a given output, of its shapes and names of keywords, by which `calls_of` has it.

    Another one is like it whose values are these very objects.

    Attributes:
        values: of its keywords: none of a type whose values change.
        runner: what ran it.
    """

    values: tuple[Any, ...]
    runner: Runner


def repeated(direction: Direction, first: Any, second: Any, missing_shape: Any, arguments: Mapping[str, Any]) -> Any:
    """What a call returns that is like an earlier one; MISS where none was, or a runner refuses its arrays.

    Args:
        direction: which tensor is computed.
        first, second: the two inputs, in the order of the direction.
        missing_shape: of the output where the inputs leave it open.
        arguments: all keywords of the call.
    """
    get = arguments.get
    try:
        calls = calls_of(first, get("handle"))
        known = calls.get(_key(direction, first, second, missing_shape, arguments))
    except (TypeError, AttributeError):  # no array, or a value that no key has: told of on the long way
        return MISS
    if known is None:
        return MISS
    if direction is FORWARD:
        x, w, dy = first, second, None
    elif direction is BACKWARD_DATA:
        x, w, dy = None, second, first
    else:
        x, w, dy = second, None, first
    run, out = known.runner, get("out")
    try:
        if not _OF_RUN.isdisjoint(arguments):
            read = {name: arguments[name] for name in _OF_RUN.intersection(arguments) if arguments[name] is not None}
            return run.run_fused(read, x, w, dy, out, get("workspace"), get("stream"))
        if direction is FORWARD and out is not None:
            _keep_last(calls, x, w, arguments, run)
        return run.run(x, w, dy, out, get("workspace"), get("stream"))
    except InvalidArrayError:
        return MISS


def _keep_last(calls: dict[object, Any], x: Any, w: Any, arguments: Mapping[str, Any], runner: Runner) -> None:
    """Remember a call as the last of its shapes, but where another one was: those are told apart by their keys."""
    of_problem = {name: value for name, value in arguments.items() if name not in _LEFT_OUT}
    place = (x.shape, w.shape, *of_problem)
    _keep(calls, place, None if place in calls else Last(tuple(of_problem.values()), runner))


def _keep(calls: dict[object, Any], key: object, value: object) -> None:
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = value


class Place(NamedTuple):
    """Where what runs a call is remembered."""

    calls: dict[object, Any]
    key: object

    def keep(self, runner: Runner, options: FindOptions | None) -> None:
        """Remember it, but where the options have every call measure."""
        if not measures_always(options):
            _keep(self.calls, self.key, Known(runner, options))


def place_of(
    direction: Direction, first: Any, second: Any, missing_shape: Any, arguments: Mapping[str, Any]
) -> Place | None:
    """Where what runs a call is remembered; None where calls of its form are not.

    Taken before solutions are looked up: where answers change meanwhile, what is put there is forgotten with them.
    """
    try:
        key = _key(direction, first, second, missing_shape, arguments)
        hash(key)
        return Place(calls_of(first, arguments.get("handle")), key)
    except (TypeError, AttributeError):
        return None


def calls_of(first: Any, handle: Handle | None = None) -> dict[object, Any]:
    """Where the handle of a call, or the default one, keeps what runs it: a `Known` by its key, a `Last` by shapes.

    Args:
        first: the first of its arrays.

    Raises:
        TypeError, AttributeError: there is no handle yet, or the array is none.
    """
    if handle is None:
        handle = known_handle(_device_index(first))
        if handle is None:
            raise TypeError("no handle was needed so far")
    return handle.calls


def _device_index(array: Any) -> int:
    kind = type(array)
    if kind is np.ndarray:
        return -1
    index: int = array.get_device() if kind.__module__ == "torch" else array.data.device_id
    return index


def _key(direction: Direction, first: Any, second: Any, missing_shape: Any, arguments: Mapping[str, Any]) -> object:
    """Equal for calls that pose the same problem with the same options.

    Raises:
        TypeError, AttributeError: calls of its form are not remembered.
    """
    kind = type(first)
    strides = kind.stride if kind.__module__ == "torch" else _strides_attribute
    words: list[object] = [
        direction, first.shape, strides(first), first.dtype, second.shape, strides(second), second.dtype
    ]  # fmt: skip
    for name, value in arguments.items():
        if name in _LEFT_OUT:
            if name == "out" and value is not None:
                words += strides(value), value.dtype
        elif type(value) is int:
            words += name, value
        else:
            words += name, _word(name, value, strides)
    if missing_shape is not None:
        words.append(_sizes(missing_shape))
    return tuple(words)


def _word(name: str, value: Any, strides: Callable[[Any], Any]) -> object:
    """What of a keyword's value makes a problem: enough to tell it from all others that are taken or refused."""
    if value is None or isinstance(value, str):
        return value
    if name in _NUMBERS:
        return None  # but that it is there: a number is of the run
    if name in _ARRAYS:
        return value.shape, strides(value), value.dtype
    if name == "options":
        return id(value)
    if isinstance(value, bool):
        return bool, value
    return _sizes(value)


def _sizes(value: Any) -> object:
    """A tuple of integers, or of pairs of them, whose equals are such, too: True and 1.0 equal 1."""
    kinds = {*map(type, value)}
    if not isinstance(value, tuple):
        raise TypeError("no tuple")
    if kinds == {int}:
        return value
    return tuple(_sizes(pair) for pair in value)
