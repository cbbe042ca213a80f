"""Calls like earlier ones: what runs them is remembered by the shapes, strides and dtypes of their arrays.

A handle forgets it with its answers. A runner checks its arrays on every run: what a key leaves out (devices,
addresses, gradients) is refused there, and such a call goes the long way.
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


def repeated(direction: Direction, given: Mapping[str, Any], missing_shape: Any, arguments: Mapping[str, Any]) -> Any:
    """What a call returns that is like an earlier one; MISS where none was, or a runner refuses its arrays.

    Args:
        direction: which tensor is computed.
        given: the two inputs by tensor name, in the order of the direction.
        missing_shape: of the output where the inputs leave it open.
        arguments: all keywords of the call.
    """
    first, second = given.values()
    try:
        known = _calls(first, arguments).get(_key(direction, first, second, missing_shape, arguments))
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
    run, get = known.runner, arguments.get
    try:
        if _OF_RUN.isdisjoint(arguments):
            return run.run(x, w, dy, get("out"), get("workspace"), get("stream"))
        read = {name: arguments[name] for name in _OF_RUN.intersection(arguments) if arguments[name] is not None}
        return run.run_fused(read, x, w, dy, get("out"), get("workspace"), get("stream"))
    except InvalidArrayError:
        return MISS


class Place(NamedTuple):
    """Where what runs a call is remembered."""

    calls: dict[object, Known]
    key: object

    def keep(self, runner: Runner, options: FindOptions | None) -> None:
        """Remember it, but where the options have every call measure."""
        if not measures_always(options):
            if len(self.calls) >= _MAX_CALLS:
                self.calls.clear()
            self.calls[self.key] = Known(runner, options)


def place_of(
    direction: Direction, given: Mapping[str, Any], missing_shape: Any, arguments: Mapping[str, Any]
) -> Place | None:
    """Where what runs a call is remembered; None where calls of its form are not.

    Taken before solutions are looked up: where answers change meanwhile, what is put there is forgotten with them.
    """
    first, second = given.values()
    try:
        key = _key(direction, first, second, missing_shape, arguments)
        hash(key)
        return Place(_calls(first, arguments), key)
    except (TypeError, AttributeError):
        return None


def _calls(first: Any, arguments: Mapping[str, Any]) -> dict[object, Known]:
    """Where the handle of a call keeps what runs it."""
    handle: Handle | None = arguments.get("handle")
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
