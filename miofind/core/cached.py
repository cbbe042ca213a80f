"""Attributes that are reckoned once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801  # named as the decorator of functools that it stands for
    """What follows from an instance, reckoned when it is asked for and kept in its `__dict__`.

    That of functools has a lock before Python 3.12, which takes longer than most of what cost models reckon.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function, self._name, self.__doc__ = function, function.__name__, function.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Value:
        if instance is None:  # asked of the class
            return cast(Value, self)
        found = instance.__dict__[self._name] = self._function(instance)
        return found
