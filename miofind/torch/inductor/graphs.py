"""What the pass asks of Inductor's graphs, and copies of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from miofind.torch.fused.ops import OPERATORS

aten = torch.ops.aten

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
ARGUMENTS = {operator: kind for kind, operator in OPERATORS.items()}
"""The arguments that operators take."""


def is_plain(node: fx.Node, transposed: Any) -> bool:
    """Whether a convolution is not transposed, and all sizes that it has are numbers."""
    values = [each.meta.get("val") for each in node.all_input_nodes]
    return not transposed and all(
        isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
        for value in values
    )


def trains(graph: fx.Graph) -> bool:
    """Whether a graph is one of training: its weights change from call to call."""
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return any(name.startswith(("primals", "tangents")) for name in names)


def copy_of(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied
