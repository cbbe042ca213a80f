"""Derivatives of leaky ReLUs and clamps, taken at results that are kept for the gradients of weights.

PyTorch takes them at what the activation is given, and Inductor keeps the mask of that: the activation cannot be
written with the convolution before it, and where it is backward the mask has to be read beside. The result of either
activation tells as much, and the convolution after it keeps that one anyway. Both masks are equal to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.inductor import decompositions
from miofind.torch.inductor.decompositions import Applied, activation_ending, derivative_ending

aten = torch.ops.aten

_BACKWARD = aten.convolution_backward.default
_NAMES = ("leaky_relu", "clamp")


class MaskPass(CustomGraphPass):
    """The pass, over Inductor's joint graphs of a forward and a backward pass; one may be used for any number."""

    def __call__(self, graph: fx.Graph) -> None:
        take_at_results(graph)

    def uuid(self) -> Any:
        """Changes with what the pass does."""
        sources = (Path(str(path)).read_bytes() for path in (__file__, decompositions.__file__))
        return hashlib.sha256(b"".join(sources)).hexdigest()


def take_at_results(graph: fx.Graph) -> None:
    """Take derivatives at the results of their activations that convolutions keep."""
    kept = {node.args[1]: None for node in graph.find_nodes(op="call_function", target=_BACKWARD)}
    results = {(each.given, each.numbers): node for node in kept for each in _found(activation_ending, node)}
    for node in list(graph.nodes) if results else ():
        for found in _found(derivative_ending, node):
            result = results.get((found.given, found.numbers))
            if result is not None and _is_alone(found):
                for step in found.steps:
                    step.replace_input_with(found.given, result)


def _found(ending: Callable[[str, fx.Node], Applied | None], node: fx.Node) -> list[Applied]:
    """What ends at a step of activations whose results tell the derivative."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return []
    found = (ending(name, node) for name in _NAMES)
    return [each for each in found if each is not None and _tells(each.numbers, value.dtype)]


def _tells(of: Nonlinearity, dtype: Any) -> bool:
    """Whether results of a dtype are where the derivative changes where what was given is."""
    if of.activation == "leaky_relu":
        return of.leak >= 0
    return all(torch.tensor(bound, dtype=dtype).item() == bound for bound in (of.low, of.high))


def _is_alone(found: Applied) -> bool:
    """Whether nothing but the derivative reads its mask or what the mask is computed from."""
    steps = {*found.steps}
    masks = (each for each in steps if found.given in each.all_input_nodes or each.meta["val"].dtype is torch.bool)
    return all(user in steps for mask in masks for user in mask.users)
