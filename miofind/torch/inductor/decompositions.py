"""Activations as Inductor's decompositions write them, and where a graph has them.

Each activation is traced with the installed PyTorch's own decompositions, and graphs are compared with what comes out:
what another release writes differently is matched there, or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import fx

from miofind.torch.fused.nonlinearity import Nonlinearity

_NUMBERS = {"low": -0.123456789, "high": 0.987654321, "slope": 0.135792468}
"""Stand for any number of that name."""

_TRACED: Mapping[str, Callable[[Any], Any]] = {
    "relu": functional.relu,
    "clamp": lambda v: functional.hardtanh(v, _NUMBERS["low"], _NUMBERS["high"]),
    "leaky_relu": lambda v: functional.leaky_relu(v, _NUMBERS["slope"]),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
    "hardswish": functional.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": lambda v: functional.elu(v, _NUMBERS["slope"]),
    "mish": functional.mish,
}


@dataclass(frozen=True, slots=True)
class Found:
    """An activation that a graph has.

    Attributes:
        numbers: which, with its numbers.
        steps: its steps, the last of which gives its result.
    """

    numbers: Nonlinearity
    steps: tuple[fx.Node, ...]


def activation_of(value: fx.Node) -> Found | None:
    """The activation of a step's result that alone uses it; the one of most steps where several fit."""
    dtype = value.meta["val"].dtype
    if not dtype.is_floating_point:
        return None
    found = (_matched(name, graph, value) for name, graph in _templates(dtype).items())
    return max((each for each in found if each is not None), key=lambda each: len(each.steps), default=None)


@functools.cache
def _templates(dtype: Any) -> dict[str, fx.Graph]:
    """The graphs of all activations of tensors of a dtype."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    example, table = torch.ones(2, 2, 2, 2, dtype=dtype), select_decomp_table()

    def traced(function: Callable[[Any], Any]) -> fx.Graph:
        made: fx.Graph = make_fx(lambda v: function(v), decomposition_table=table)(example).graph
        return made

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return {name: traced(function) for name, function in _TRACED.items()}


def _matched(name: str, template: fx.Graph, value: fx.Node) -> Found | None:
    """Where a template's steps begin at a value, each used by the others alone but for the last."""
    placeholder, *steps, output = template.nodes
    places, numbers = {placeholder: value}, dict[str, float]()
    for step in steps:
        users = places[step.all_input_nodes[0]].users
        # of two equal steps each has its own, unless the graph has one for both
        ordered = sorted(users, key=lambda user: user in places.values())
        place = next((user for user in ordered if _is_same(step, user, places, numbers)), None)
        if place is None:
            return None
        places[step] = place
    (result,) = output.all_input_nodes
    if any(
        user not in places.values() for node in places.values() if node is not places[result] for user in node.users
    ):
        return None
    low, high, slope = (numbers.get(name) for name in _NUMBERS)
    made = Nonlinearity(activation=name, low=low or 0.0, high=6.0 if high is None else high, slope=slope)
    if not made.is_valid:
        return None
    inner = dict.fromkeys(node for step, node in places.items() if step not in (placeholder, result))
    return Found(made, (*inner, places[result]))


def _is_same(step: fx.Node, node: fx.Node, places: Mapping[fx.Node, fx.Node], numbers: dict[str, float]) -> bool:
    """Whether a node is a template's step; numbers that the template leaves open are noted where it is."""
    if node.op != "call_function" or node.target != step.target or len(node.args) != len(step.args):
        return False
    noted = dict(numbers)
    pairs = [*zip(step.args, node.args, strict=True)]
    pairs += [(value, node.kwargs.get(name)) for name, value in step.kwargs.items()]
    if node.kwargs.keys() != step.kwargs.keys() or not all(_is_equal(a, b, places, noted) for a, b in pairs):
        return False
    numbers.update(noted)
    return True


def _is_equal(wanted: Any, given: Any, places: Mapping[fx.Node, fx.Node], numbers: dict[str, float]) -> bool:
    if isinstance(wanted, fx.Node):
        return places.get(wanted) is given
    for name, number in _NUMBERS.items():
        if isinstance(wanted, float) and wanted == number:
            is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
            return is_number and numbers.setdefault(name, float(given)) == given
    return (type(wanted) is type(given) and bool(wanted == given)) or (
        isinstance(wanted, (int, float)) and isinstance(given, (int, float)) and wanted == given
    )
