"""What steps of a graph give that are computed of numbers alone, as indices and weights of interpolations are."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from miofind.torch.fused.writes import is_mutable

aten, prims = torch.ops.aten, torch.ops.prims

_PURE = (prims.iota.default, aten.full.default, aten.cat.default, aten.stack.default)
"""Beside views and what PyTorch says is point-wise."""
_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
"""Of which the host computes everything."""
_MOST = 1 << 20
"""Numbers that a step gives: of more it is not computed here."""


class Constants:
    """Computes them on the host, each once, outside of the modes in which graphs are traced."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor that a step gives whatever the graph is given; None where it depends on that, or is not known."""
        left = [node]
        while left:
            last = left[-1]
            unknown = [each for each in last.all_input_nodes if each not in self._known] if _is_pure(last) else []
            if unknown:
                left += unknown
                continue
            left.pop()
            if last not in self._known:
                self._known[last] = self._computed(last)
        found = self._known[node]
        return found if isinstance(found, torch.Tensor) else None

    def _computed(self, node: fx.Node) -> Any:
        read = {each: self._known.get(each) for each in node.all_input_nodes}
        if not _is_pure(node) or any(value is None for value in read.values()):
            return None
        arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: read[each])
        if "device" in named:
            named = {**named, "device": torch.device("cpu")}
        try:
            return node.target(*arguments, **named)
        except RuntimeError:  # whole numbers divided by 0, of which a GPU makes something that is not read, it may be
            return None


def _is_pure(node: fx.Node) -> bool:
    """Whether a step gives the same numbers for the same, not too many, and may be computed anywhere."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or is_mutable(node.target):
        return False
    tags = node.target.tags
    if torch.Tag.nondeterministic_seeded in tags:  # of those that are point-wise aten.rrelu
        return False
    is_known = node.target in _PURE or node.target.is_view or torch.Tag.pointwise in tags
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return is_known and all(isinstance(each, torch.Tensor) and _is_plain(each) for each in values)


def _is_plain(value: torch.Tensor) -> bool:
    return value.dtype in _DTYPES and all(isinstance(size, int) for size in value.shape) and value.numel() <= _MOST
