"""Derivatives of leaky ReLUs and clamps, taken at results that are kept for the gradients of weights.

PyTorch takes them at what the activation is given, and Inductor keeps the mask of that: the activation cannot be
written with the convolution before it, and where it is backward the mask has to be read beside. The result of either
activation tells as much, and the convolution after it keeps that one anyway. Behind a norm they stay: its
backward pass reads what the norm was given, of which the mask is computed once more for nothing.
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
    """The pass, over Inductor's joint graphs of a forward and a backward pass; one may be used for any number.

    Args:
        before: a pass that Inductor was configured with, or several: they are run first.
    """

    def __init__(self, before: Any = None) -> None:
        self._before = before if isinstance(before, (list, tuple)) else [before] if before is not None else []

    def __call__(self, graph: fx.Graph) -> None:
        for each in self._before:
            each(graph)
        take_at_results(graph)

    def uuid(self) -> Any:
        """Changes with what the pass does; None, which has no graphs kept, where one before it has none."""
        others = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._before]
        if None in others:
            return None
        sources = (Path(str(path)).read_bytes() for path in (__file__, decompositions.__file__))
        return hashlib.sha256(b"".join((*sources, repr(others).encode()))).hexdigest()


def take_at_results(graph: fx.Graph) -> None:
    """Take derivatives at the results of their activations that convolutions keep."""
    kept = {node.args[1]: None for node in graph.find_nodes(op="call_function", target=_BACKWARD)}
    results = {(each.given, each.numbers): node for node in kept for each in _found(activation_ending, node)}
    for node in list(graph.nodes) if results else ():
        for found in _found(derivative_ending, node):
            result = results.get((found.given, found.numbers))
            if result is not None and _is_kept(found.given) and _is_alone(found):
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


def _is_kept(value: fx.Node) -> bool:
    """Whether a step's result is not computed once more: a convolution's, or a sum of it and another tensor."""
    if value.target is aten.add.Tensor:
        shapes = [node.meta["val"].shape for node in value.all_input_nodes]
        return shapes == [value.meta["val"].shape] * 2  # one with a vector ends a norm
    return value.target is aten.convolution.default


def _is_alone(found: Applied) -> bool:
    """Whether nothing but the derivative reads its mask or what the mask is computed from."""
    steps = {*found.steps}
    masks = (each for each in steps if found.given in each.all_input_nodes or each.meta["val"].dtype is torch.bool)
    return all(user in steps for mask in masks for user in mask.users)
