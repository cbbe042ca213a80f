"""What a network's code computes of sizes by Python's functions, as steps of its graph.

`max` and `min` ask which number is the larger one, which torch.fx cannot tell; their answer is a number again, which
shares no memory with anything. Layers that pad by the size of their input compute with such numbers alone.

While torch.jit.trace runs a graph, sizes are tensors, of which Python's functions would make constants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

_MAX, _MIN, _CEIL, _FLOOR = max, min, math.ceil, math.floor  # others are in their places while a network is traced


def _step(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is a step of graphs: of proxies it gives one."""

    @functools.wraps(function)
    def step(*numbers: Any) -> Any:
        for each in numbers:
            if isinstance(each, fx.Proxy):  # a graph is traced again where it is unpickled, and by other tools
                return each.tracer.create_proxy("call_function", step, numbers, {})
        return function(*numbers)

    return step


@_step
def largest(first: Any, second: Any) -> Any:
    """`max` of two numbers, of the kind of the larger one."""
    if _is_tensor(first, second):
        return torch.where(second > first, second, first)
    return _MAX(first, second)


@_step
def smallest(first: Any, second: Any) -> Any:
    """`min` of two numbers, of the kind of the smaller one."""
    if _is_tensor(first, second):
        return torch.where(second < first, second, first)
    return _MIN(first, second)


@_step
def ceiling(number: Any) -> Any:
    """`math.ceil` of a number."""
    return number.ceil().long() if _is_tensor(number) else _CEIL(number)


@_step
def floor(number: Any) -> Any:
    """`math.floor` of a number."""
    return number.floor().long() if _is_tensor(number) else _FLOOR(number)


def _is_tensor(*numbers: Any) -> bool:
    return any(isinstance(each, torch.Tensor) for each in numbers)


NUMBERS = (int, float)
"""The kinds of what these steps are given."""
EXTREMES = (largest, smallest)
ROUNDING = (ceiling, floor)
STEPS: Mapping[Any, Callable[..., Any]] = {_CEIL: ceiling, _FLOOR: floor}
"""By the function that torch.fx makes a step of, the one that is the step of a number."""
