"""Activations and their derivatives as Inductor's decompositions write them, and where a graph has them.

Each, as `unfused` computes it, is traced with the installed PyTorch's own decompositions, and graphs are compared with
what comes out: what another release writes differently is matched there, or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from miofind.core.epilogue import Activation
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.unfused import activated, derivative
from miofind.torch.inductor.graphs import VIEWS

aten = torch.ops.aten

_NUMBERS = {"low": -0.123456789, "high": 0.987654321, "slope": 0.135792468}
"""Stand for any number of that name."""

_DERIVATIVES = ("clamp", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish")
"""Activations whose derivatives are traced; relu's mask is written in several ways."""


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


@dataclass(frozen=True, slots=True)
class Applied:
    """An activation, or a gradient times the derivative of one.

    Attributes:
        numbers: of the activation.
        given: what it is applied to, or what the derivative is taken at.
        steps: those of it, the last of which gives the result where they are in order.
    """

    numbers: Nonlinearity
    given: fx.Node
    steps: tuple[fx.Node, ...]


def derivative_of(gradient: fx.Node) -> Applied | None:
    """The derivative that alone uses a gradient, if it is known here, and is relu's or taken at what a graph is given.

    What is computed once more, as a batch norm's result is, Inductor computes where it is used: an operator would have
    it written. Relu's result is kept.
    """
    dtype = gradient.meta["val"].dtype
    if not dtype.is_floating_point:
        return None
    if len(gradient.users) == 1:
        (mask,) = gradient.users
        saved = _relu_saved(mask, gradient)
        if saved is not None:
            return Applied(Nonlinearity(activation="relu"), saved, (mask,))
    found = (_derivative(name, graph, gradient) for name, graph in _derivative_templates(dtype).items())
    return next((each for each in found if each is not None), None)


def activation_ending(name: str, node: fx.Node) -> Applied | None:
    """The activation of that name whose result a step gives, whatever else reads its steps."""
    return _ending(name, _templates(node.meta["val"].dtype)[name], node)


def derivative_ending(name: str, node: fx.Node) -> Applied | None:
    """A gradient times the derivative of the activation of that name, where a step gives it; as `activation_ending`."""
    return _ending(name, _derivative_templates(node.meta["val"].dtype)[name], node)


def _ending(name: str, template: fx.Graph, node: fx.Node) -> Applied | None:
    arguments = template.find_nodes(op="placeholder")
    (result,) = template.output_node().all_input_nodes
    places, numbers = dict[fx.Node, fx.Node](), dict[str, float]()
    if not _fits(result, node, places, numbers):
        return None
    found = {places[each] for each in arguments}
    if len(found) != len(arguments):  # a leaky ReLU is its derivative times what it is given
        return None
    if any(each.meta["val"].dtype != node.meta["val"].dtype for each in found):  # both of 16 bits, but not the same
        return None
    steps = (place for step, place in places.items() if step.op != "placeholder")
    made = _nonlinearity(name, numbers)
    return Applied(made, places[arguments[-1]], (*steps,)) if made.is_valid else None


@functools.cache
def _templates(dtype: Any) -> dict[str, fx.Graph]:
    """The graphs of all activations of tensors of a dtype."""
    names = (each.value for each in Activation if each is not Activation.NONE)
    return {name: _traced(activated, name, dtype, 1) for name in names}


@functools.cache
def _derivative_templates(dtype: Any) -> dict[str, fx.Graph]:
    """The graphs of derivatives: of a gradient and of what was saved, of a dtype."""
    return {name: _traced(derivative, name, dtype, 2) for name in _DERIVATIVES}


def _traced(function: Callable[..., Any], name: str, dtype: Any, count: int) -> fx.Graph:
    """The graph of a function of so many tensors of a dtype, and of the activation of that name, decomposed."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    low, high, slope = (_NUMBERS[each] for each in ("low", "high", "slope"))
    of = Nonlinearity(activation=name, low=low, high=high, slope=slope)
    examples, table = [torch.ones(2, 2, 2, 2, dtype=dtype) for _ in range(count)], select_decomp_table()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        made: fx.Graph = make_fx(lambda *values: function(*values, of), decomposition_table=table)(*examples).graph
    return made


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
    made = _nonlinearity(name, numbers)
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
    if isinstance(wanted, torch.device):  # templates are traced on the CPU
        return isinstance(given, torch.device)
    for name, number in _NUMBERS.items():
        if isinstance(wanted, float) and wanted == number:
            is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
            return is_number and numbers.setdefault(name, float(given)) == given
    return (type(wanted) is type(given) and bool(wanted == given)) or (
        isinstance(wanted, (int, float)) and isinstance(given, (int, float)) and wanted == given
    )


def _relu_saved(mask: fx.Node, gradient: fx.Node) -> fx.Node | None:
    """What relu's derivative is taken at, where a step is where(saved <= 0, 0, gradient)."""
    if mask.target is not aten.where.self or mask.args[2] is not gradient or mask.args[1] is gradient:
        return None
    condition, zero, _ = mask.args
    constant = _constant(zero) if isinstance(zero, fx.Node) else None
    if constant is None or constant[0] != 0:
        return None
    if not isinstance(condition, fx.Node) or condition.target is not aten.le.Scalar:
        return None
    saved, bound = condition.args
    given, value = saved.meta.get("val"), gradient.meta["val"]
    is_alike = isinstance(given, torch.Tensor) and given.shape == value.shape and given.dtype == value.dtype
    return saved if bound == 0 and is_alike and mask.meta["val"].dtype == value.dtype else None


def _derivative(name: str, template: fx.Graph, gradient: fx.Node) -> Applied | None:
    """Where a template's steps begin at a gradient, which they alone use up to the last of them."""
    of_gradient, of_saved, *_, output = template.nodes
    (result,) = output.all_input_nodes
    for end in _ends(of_gradient, result, gradient):
        places, numbers = {of_gradient: gradient}, dict[str, float]()
        if not _fits(result, end, places, numbers) or of_saved not in places:
            continue
        steps = _behind(gradient, {*places.values()})
        if not _is_given(places[of_saved]):
            continue
        is_alone = all(user in steps for node in (gradient, *steps) if node is not end for user in node.users)
        saved, value = places[of_saved].meta["val"], gradient.meta["val"]
        if not is_alone or saved.shape != value.shape or saved.dtype != value.dtype:
            continue
        made = _nonlinearity(name, numbers)
        return Applied(made, places[of_saved], (*steps,)) if made.is_valid else None
    return None


def _nonlinearity(name: str, numbers: Mapping[str, float]) -> Nonlinearity:
    """An activation with the numbers that were found."""
    low, high, slope = (numbers.get(each) for each in _NUMBERS)
    return Nonlinearity(activation=name, low=low or 0.0, high=6.0 if high is None else high, slope=slope)


def _is_given(node: fx.Node) -> bool:
    """Whether a step is what a graph is given, or a view of it."""
    while node.target in (*VIEWS, aten.permute.default):
        node = node.args[0]
    return bool(node.op == "placeholder")


def _ends(begin: fx.Node, result: fx.Node, gradient: fx.Node) -> dict[fx.Node, None]:
    """What a gradient leads to as a template's begin leads to its result, by the kinds of the steps."""
    ways: dict[fx.Node, dict[fx.Node, None]] = {begin: {gradient: None}}
    for step in begin.graph.nodes:
        for read in step.all_input_nodes:
            users = (user for node in ways.get(read, ()) for user in node.users if user.target == step.target)
            ways[step] = ways.get(step, {}) | dict.fromkeys(users)
    return ways[result]


def _fits(step: fx.Node, node: fx.Node, places: dict[fx.Node, fx.Node], numbers: dict[str, float]) -> bool:
    """Whether a node is computed as a template's step is; notes the places of what the step is computed from."""
    if step in places:
        return places[step] is node
    if step.op == "placeholder":
        places[step] = node
        return isinstance(node.meta.get("val"), torch.Tensor)
    if step.target is aten.scalar_tensor.default and _constant(node) == (step.args[0], step.kwargs["dtype"]):
        places[step] = node
        return True
    if node.op != "call_function" or node.target != step.target or len(node.args) != len(step.args):
        return False
    pairs = [*zip(step.args, node.args, strict=True)]
    pairs += [(value, node.kwargs.get(name)) for name, value in step.kwargs.items()]
    if node.kwargs.keys() != step.kwargs.keys():
        return False
    for wanted, given in pairs:
        if isinstance(wanted, fx.Node):
            if not isinstance(given, fx.Node) or not _fits(wanted, given, places, numbers):
                return False
        elif not _is_equal(wanted, given, places, numbers):
            return False
    places[step] = node
    return True


def _constant(node: fx.Node) -> tuple[Any, Any] | None:
    """The number and the dtype of a tensor without dimensions, as decompositions or Inductor's own passes write it."""
    if node.target is aten.scalar_tensor.default:
        return node.args[0], node.kwargs.get("dtype")
    if node.target is aten.full.default and [*node.args[0]] == []:
        return node.args[1], node.kwargs.get("dtype")
    return None


def _behind(begin: fx.Node, among: set[fx.Node]) -> list[fx.Node]:
    """Those of some nodes that are computed from one of them, in order, without it."""
    found = {begin: None}
    for node in begin.graph.nodes:
        if node in among and any(read in found for read in node.all_input_nodes):
            found[node] = None
    return [*found][1:]
