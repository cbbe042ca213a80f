"""`max` and `min` of stand-ins for numbers as steps of a graph.

Python's own ask which is the larger one by `>`, and are to be told True or False, which nobody knows while a network is
traced. So they are replaced meanwhile.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from miofind.torch.fused.sizes import EXTREMES, NUMBERS
from miofind.torch.fused.stand_ins import StandIn


@contextlib.contextmanager
def extremes_are_steps() -> Iterator[None]:
    """Have `max` and `min` of stand-ins for numbers be steps; those of all else, in other threads, too, are as before.

    As torch.fx itself, for one network at a time: of two that are traced at once, one may not be traced.
    """
    before = builtins.max, builtins.min
    builtins.max, builtins.min = map(_extreme, before, EXTREMES)
    try:
        yield
    finally:
        builtins.max, builtins.min = before


def _extreme(function: Any, step: Any) -> Any:
    @functools.wraps(function)
    def extreme(*given: Any, **named: Any) -> Any:
        values = given[0] if len(given) == 1 and type(given[0]) in (list, tuple) else given
        is_step = not named and len(values) > 1 and any(issubclass(type(each), StandIn) for each in values)
        return functools.reduce(step, values) if is_step and all(map(_is_number, values)) else function(*given, **named)

    return extreme


def _is_number(value: Any) -> bool:
    return (value.stands_for if issubclass(type(value), StandIn) else type(value)) in NUMBERS
