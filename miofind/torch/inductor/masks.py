"""Derivatives of leaky ReLUs and clamps, taken at the activation's result where a convolution keeps that.

PyTorch takes them at the activation's argument, of which Inductor stores a mask. So the convolution before cannot apply
the activation, and the backward pass reads the mask as well. The result has the same mask, and the convolution after
keeps it for the gradient of its weights. Behind a norm the mask costs nothing, as the norm's own gradient reads what
the argument is computed from: there it stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from miofind.torch.inductor.decompositions import Applied, activation_ending, derivative_ending
from miofind.torch.inductor.graphs import has_numbers

aten = torch.ops.aten

_BACKWARD = aten.convolution_backward.default
_NAMES = ("leaky_relu", "clamp")


def take_at_results(graph: fx.Graph) -> None:
    """Take derivatives at the results of their activations that convolutions keep."""
    gradients = graph.find_nodes(op="call_function", target=_BACKWARD)
    kept = {node.args[1]: None for node in gradients if has_numbers(node)}
    results = {(each.given, each.numbers): node for node in kept for each in _found(activation_ending, node)}
    for node in list(graph.nodes) if results else ():
        for found in _found(derivative_ending, node):
            result = results.get((found.given, found.numbers))
            if result is not None and _is_stored(found.given) and _is_alone(found):
                for step in found.steps:
                    step.replace_input_with(found.given, result)


def _found(ending: Callable[[str, fx.Node], Applied | None], node: fx.Node) -> list[Applied]:
    """What ends at a step of activations whose results tell the derivative."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return []
    found = (ending(name, node) for name in _NAMES)
    return [each for each in found if each is not None and each.numbers.is_told_by_result(value.dtype)]


def _is_stored(value: fx.Node) -> bool:
    """Whether a value is no norm's: a convolution's result, an input of the graph, or a sum of such of one shape."""
    left, seen = [value], set[fx.Node]()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is aten.add.Tensor:
            read = [each for each in node.args if isinstance(each, fx.Node)]
            shapes = [getattr(each.meta.get("val"), "shape", None) for each in read]
            if shapes != [node.meta["val"].shape] * 2:  # a norm may end with the sum with a vector
                return False
            left += read
        elif node.op != "placeholder" and node.target is not aten.convolution.default:
            return False
    return True


def _is_alone(found: Applied) -> bool:
    """Whether nothing but the derivative reads its mask or what the mask is computed from."""
    steps = {*found.steps}
    masks = (each for each in steps if found.given in each.all_input_nodes or each.meta["val"].dtype is torch.bool)
    return all(user in steps for mask in masks for user in mask.users)
