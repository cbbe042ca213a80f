"""Tensors that a network has beside its parameters and buffers, as attributes, in lists or made by its code.

torch.fx makes buffers of them, which take the dtype that the network is given later; in the network itself they do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class Constant(torch.nn.Module):
    """Gives a tensor that moves with the network to another device, and keeps its dtype.

    Attributes:
        value: the tensor.
        held: the same where it has content, which no file of weights gives back: on the meta device `value` has none.
    """

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = self.held = value

    def forward(self) -> Any:
        """The tensor."""
        return self.value

    def _apply(self, move: Any, *arguments: Any, **named: Any) -> Any:
        made = super()._apply(move, *arguments, **named)
        device, held = move(torch.empty(0, device=self.value.device)).device, self.held
        if held.is_meta:  # as the network was given
            return made
        # Without a history, with which it could be neither copied nor pickled.
        self.value = held if held.device == device else held.detach().to(device).requires_grad_(held.requires_grad)
        if not self.value.is_meta:
            self.held = self.value
        return made


def keep_constants(made: fx.GraphModule, module: Any) -> None:
    """Have a graph, whose code is yet to be generated, read what is no buffer of its module from a `Constant`."""
    constants: dict[str, str] = {}
    for node in list(made.graph.find_nodes(op="get_attr")):
        path, _, name = node.target.rpartition(".")
        buffers = made.get_submodule(path)._buffers
        if node.target not in constants:
            if name not in buffers or name in module.get_submodule(path)._buffers:
                continue
            constants[node.target] = place = _free(made, f"{node.target.replace('.', '_')}_constant")
            made.add_submodule(place, Constant(buffers.pop(name)))
        with made.graph.inserting_before(node):
            node.replace_all_uses_with(made.graph.call_module(constants[node.target]))
        made.graph.erase_node(node)


def _free(made: fx.GraphModule, name: str) -> str:
    """A name that a module has nothing by."""
    while hasattr(made, name):
        name = f"{name}_"
    return name
