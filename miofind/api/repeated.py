"""Calls like earlier ones: what runs them is remembered by the shapes, strides and dtypes of their arrays.

A handle forgets it with its answers. A runner checks its arrays on every run: what a key leaves out (devices,
addresses, gradients) is refused there, and such a call goes the long way.

A forward call with `out` costs less yet, if its keywords are those of the last one of its shapes (`like_last`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from miofind.api.directions import BACKWARD_DATA, FORWARD
from miofind.api.solutions import measures_always
from miofind.core.epilogue import EPILOGUE_NUMBERS, EPILOGUE_OPERANDS
from miofind.core.problem import Direction
from miofind.errors import InvalidArrayError
from miofind.options import FindOptions
from miofind.runtime.handle import Handle, RememberedCalls, known_handle
from miofind.runtime.runner import EPILOGUE_NAMES, Runner

MISS = object()
"""What `repeated` gives where the call is to go the long way."""

_MAX_CALLS = 4096
_ARRAYS, _NUMBERS, _OF_RUN = frozenset(EPILOGUE_OPERANDS), frozenset(EPILOGUE_NUMBERS), frozenset(EPILOGUE_NAMES)
_LEFT_OUT = frozenset({"out", "workspace", "stream", "handle"})

_strides_attribute: Callable[[Any], Any] = attrgetter("strides")


class Last(NamedTuple):
    """The last forward call with `out`, kept by the shapes of x and w.

    Another one is like it if its keywords are. The runner checks the rest.

    Attributes:
        arguments: its keywords, without those of `_LEFT_OUT`; numbers, texts, tuples and options, which cannot change.
        has_same: whether keywords that equal these have the same numbers and tuples: True equals 1, and is refused.
        runner: what ran it.
    """

    arguments: Mapping[str, Any]
    has_same: Callable[[Mapping[str, Any]], bool]
    runner: Runner

    @staticmethod
    def of(arguments: Mapping[str, Any], runner: Runner) -> Last:
        """That of a call with such keywords, of `_LEFT_OUT`, too."""
        kept = {name: value for name, value in arguments.items() if name not in _LEFT_OUT}
        numbers = [(n, v) for n, v in kept.items() if not (v is None or isinstance(v, (str, FindOptions)))]
        if len(numbers) != 1:
            return Last(kept, lambda given: all(given[name] is value for name, value in numbers), runner)
        ((name, value),) = numbers
        return Last(kept, lambda given: given[name] is value, runner)


@dataclass(slots=True)
class Known:
    """What runs a call.

    Attributes:
        runner: of the solution that was found.
        options: that it was found with: held, as the key has no more of them than their address.
        last: as which `like_last` may have it, of a forward call with `out`.
    """

    runner: Runner
    options: FindOptions | None
    last: Last | None = None


def like_last(
    x: Any, w: Any, out: Any, workspace: Any, stream: Any, handle: Handle | None, arguments: Mapping[str, Any]
) -> Any:
    """What a forward call returns that is like the last one of its shapes; MISS where none was.

    Args:
        x, w, out, workspace, stream, handle: of the call.
        arguments: its other keywords.
    """
    try:
        last = _calls(x, handle).last.get((x.shape, w.shape))
        if last is None or arguments != last.arguments or not last.has_same(arguments):
            return MISS
    except (TypeError, AttributeError, ValueError):  # these are no arrays, or a keyword is one
        return MISS
    try:
        return last.runner.run(x, w, None, out, workspace, stream)
    except InvalidArrayError:
        return MISS


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
        calls = _calls(first, get("handle"))
        known = calls.by_key.get(_key(direction, first, second, missing_shape, arguments))
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
    runner, out = known.runner, get("out")
    try:
        if not _OF_RUN.isdisjoint(arguments):
            read = {name: arguments[name] for name in _OF_RUN.intersection(arguments) if arguments[name] is not None}
            return runner.run_fused(read, x, w, dy, out, get("workspace"), get("stream"))
        made = runner.run(x, w, dy, out, get("workspace"), get("stream"))
    except InvalidArrayError:
        return MISS
    if direction is FORWARD and out is not None:
        if known.last is None:
            known.last = Last.of(arguments, runner)
        _keep_last(calls.last, (x.shape, w.shape), known.last)
    return made


def _keep_last(kept: dict[object, Last | None], shapes: object, last: Last) -> None:
    """Have `like_last` know a call that ran.

    Where calls of equal keywords are of several problems, as those of several dtypes are, it knows none from then on.
    """
    before = kept.get(shapes, MISS)
    if before is last or before is None:
        return
    if isinstance(before, Last) and before.arguments == last.arguments:
        kept[shapes] = None
    else:
        _keep(kept, shapes, last)


def _keep(kept: dict[object, Any], key: object, value: object) -> None:
    if len(kept) >= _MAX_CALLS and key not in kept:
        kept.clear()
    kept[key] = value


class Place(NamedTuple):
    """Where what runs a call is remembered."""

    calls: RememberedCalls
    key: object

    def keep(self, runner: Runner, options: FindOptions | None) -> None:
        """Remember it, but where the options have every call measure."""
        if not measures_always(options):
            _keep(self.calls.by_key, self.key, Known(runner, options))


def place_of(
    direction: Direction, first: Any, second: Any, missing_shape: Any, arguments: Mapping[str, Any]
) -> Place | None:
    """Where what runs a call is remembered; None where calls of its form are not.

    Taken before solutions are looked up: where answers change meanwhile, what is put there is forgotten with them.
    """
    try:
        key = _key(direction, first, second, missing_shape, arguments)
        hash(key)
        return Place(_calls(first, arguments.get("handle")), key)
    except (TypeError, AttributeError):
        return None


def _calls(first: Any, handle: Handle | None) -> RememberedCalls:
    """What is remembered of calls by the handle of a call, whose first array is given; by the default one for None.

    Raises:
        TypeError, AttributeError: there is no default handle yet, or the first is no array.
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
