"""What a network's code computes of its own tensors alone: weights of convolutions that it calls as functions.

That is the same in each call of a network for inference, as what weight standardization makes of a parameter.
"""

from __future__ import annotations

import functools
import itertools
import operator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from miofind.torch.fused.graph_steps import Steps
from miofind.torch.fused.sizes import NUMBERS
from miofind.torch.fused.writes import is_told_by_name

_MODULES: dict[Any, tuple[Any, int]] = {
    functional.conv1d: (nn.Conv1d, 1),
    functional.conv2d: (nn.Conv2d, 2),
    functional.conv3d: (nn.Conv3d, 3),
}
"""By function, the module that computes the same, and its number of spatial dimensions."""
_CONVERSIONS = ("float", "half", "double", "bfloat16")
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def calls_convolution(module: Any) -> bool:
    """Whether the code of a module's class names a function of convolution."""
    names = {function.__name__ for function in _MODULES}
    own = (each for each in type(module).__mro__ if not each.__module__.startswith("torch."))
    functions = (value for each in own for value in vars(each).values() if isinstance(value, FunctionType))
    return any(not names.isdisjoint(function.__code__.co_names) for function in functions)


def call_as_modules(made: fx.GraphModule, network: Any, steps: Steps, constants: Constants) -> None:
    """Have modules of PyTorch's do what a graph's functions of convolution do that have constant weights.

    Args:
        network: whose graph it is.
        steps: of the graph; knows the modules afterwards.
    """
    called: dict[Any, list[fx.Node]] = {}
    for node in list(made.graph.nodes):
        module = constants.convolution(node)
        if module is not None:
            with made.graph.inserting_before(node):
                call = made.graph.create_node("call_module", "", (_named(node)["input"],))
            call.meta.update(node.meta)
            node.replace_all_uses_with(call)
            made.graph.erase_node(node)
            called.setdefault(module, []).append(call)
    constants.inline_sizes()
    constants.drop_unread()
    for module, calls in called.items():
        name = _name_for(made, calls[0], network)
        for call in calls:
            call.target = name
        made.add_submodule(name, module)
        steps.add(name, module)


class Constants:
    """The steps of a graph that read nothing but the network's own tensors, which nothing writes to.

    Args:
        network: whose graph it is.
        written: names of the memory that the graph's steps may write to.
    """

    def __init__(self, made: fx.GraphModule, network: Any, steps: Steps, written: set[Any]) -> None:
        self.made = made
        self.values: dict[fx.Node, Any] = {}
        self.first: dict[fx.Node, fx.Node] = {}
        self.same: dict[str, fx.Node] = {}
        self.modules: dict[tuple[Any, ...], Any] = {}
        self.of_one_dtype = _of_one_dtype(made.graph, network)
        self.steps = set[fx.Node]()
        written = written.union(*map(steps.held, made.graph.nodes))
        for node in made.graph.nodes:
            is_step = node.op in ("call_function", "call_method") and is_told_by_name(node) and node.all_input_nodes
            is_read = is_step and not steps.writes(node) and self.steps.issuperset(node.all_input_nodes)
            if (node.op == "get_attr" or is_read) and written.isdisjoint(steps.places(node)):
                self.steps.add(node)

    def convolution(self, node: fx.Node) -> Any:
        """The module that a step's convolution is; None where it is no function's, or not of constant weights."""
        if node.op != "call_function" or node.target not in _MODULES:
            return None
        call = _named(node)
        read = [each for each in node.all_input_nodes if each is not call.get("input")]
        operands = [call.get("weight"), call.get("bias")]
        if "input" not in call or not self.steps.issuperset(read) or len(read) != sum(map(bool, operands)):
            return None  # a number is computed, or an operand is
        if call["input"] in self.of_one_dtype and not self.of_one_dtype.isdisjoint(read):
            return None  # in another dtype than the network may have later, to which its parameters go
        try:
            with torch.no_grad(), _NothingRandom():
                weight, bias = map(self._value, operands)
            numbers = [call.get(name) for name in _ARGUMENTS[3:]]
            key = (node.target, id(weight), id(bias), repr(numbers))
            if key not in self.modules:
                self.modules[key] = _module(*_MODULES[node.target], weight, bias, call)
            return self.modules[key]
        except Exception:  # as the step itself may raise, when it is called
            return None

    def tensor(self, node: fx.Node) -> Any:
        """What a step gives, as long as it lives; None where that is not the same in each call and in each dtype."""
        if node not in self.steps or node in self.of_one_dtype:
            return None
        value = self._known(node)
        return value if isinstance(value, torch.Tensor) else None

    def _value(self, node: fx.Node | None) -> Any:
        """What a step gives; steps that compute the same give one tensor, as those of a module that is called twice."""
        if node is None:
            return None
        if node not in self.values:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            told = fx.map_arg((node.args, node.kwargs), lambda each: self.first[each])
            self.first[node] = self.same.setdefault(f"{node.op} {node.target} {told}", node)
            if self.first[node] is not node:
                value = self.values[self.first[node]]
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(self.made)
            elif node.op == "call_function":
                value = node.target(*args, **kwargs)
            else:
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            self.values[node] = value
        return self.values[node]

    def inline_sizes(self) -> None:
        """Put numbers where steps read them that are computed of sizes of what weights and biases are computed of.

        A layer that pads by the size of its filter would keep its weight for that.
        """
        tensors = {node.target for node in self.values if node.op == "get_attr"}
        sizes = set[fx.Node]()
        for node in self.made.graph.nodes:
            is_size = _is_size(node, tensors) or (node.all_input_nodes and sizes.issuperset(node.all_input_nodes))
            if is_size and node in self.steps:
                sizes.add(node)
            elif not sizes.isdisjoint(node.all_input_nodes):
                inline = functools.partial(self._number_or_step, sizes)
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), inline)

    def _number_or_step(self, sizes: set[fx.Node], node: fx.Node) -> Any:
        value = self._known(node) if node in sizes else None
        return value if type(value) in NUMBERS else node

    def _known(self, node: fx.Node) -> Any:
        """What a step gives; None where it fails, as it does when it is called."""
        try:
            with torch.no_grad(), _NothingRandom():
                return self._value(node)
        except Exception:
            return None

    def drop_unread(self) -> None:
        """Drop the steps that were computed and that no step reads."""
        for node in reversed(list(self.made.graph.nodes)):
            if node in self.values and not node.users:
                self.made.graph.erase_node(node)


def _is_size(node: fx.Node, tensors: set[Any]) -> bool:
    """Whether a step asks one of the network's tensors for its sizes, or for their product."""
    is_asked = node.target in ("size", "numel") or (node.target is getattr and node.args[1] == "shape")
    owner = node.args[0] if is_asked and node.args else None
    return isinstance(owner, fx.Node) and owner.op == "get_attr" and owner.target in tensors


def _of_one_dtype(graph: fx.Graph, network: Any) -> set[fx.Node]:
    """The steps of a graph that give the same dtype whatever that of the network, as its code names one."""
    found = set[fx.Node]()
    for node in graph.nodes:
        path, _, name = str(node.target).rpartition(".")
        if node.op == "get_attr":
            owner = network.get_submodule(path)
            is_of_one = name not in owner._parameters and name not in owner._buffers
        elif node.target in ("to", "type", "type_as") and len(node.all_input_nodes) > 1:
            is_of_one = node.all_input_nodes[1] in found
        else:
            values = (*node.args, *node.kwargs.values())
            names_one = node.target in _CONVERSIONS or any(isinstance(each, torch.dtype) for each in values)
            is_of_one = names_one or not found.isdisjoint(node.all_input_nodes)
        if is_of_one:
            found.add(node)
    return found


class _NothingRandom(TorchDispatchMode):
    """Refuses operators that give other results in other calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} is random")
        return func(*args, **(kwargs or {}))


def _named(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}


def _module(kind: Any, rank: int, weight: Any, bias: Any, call: dict[str, Any]) -> Any:
    """A convolution of PyTorch's, as a call of a function has it.

    Raises:
        Exception: PyTorch has no such convolution.
    """
    if weight.dim() != rank + 2 or not weight.is_floating_point():
        raise ValueError(f"the weight is {weight.dtype}, of {weight.dim()} dimensions")
    groups, sizes = call.get("groups", 1), {"stride": 1, "padding": 0, "dilation": 1}
    numbers = {name: _of_each(call.get(name, default), rank) for name, default in sizes.items()}
    count, channels, *size = weight.shape
    made = kind(channels * groups, count, tuple(size), **numbers, groups=groups, bias=False, device="meta")
    made.weight = _parameter(weight)
    made.bias = None if bias is None else _parameter(bias)
    return made.eval()


def _of_each(value: Any, rank: int) -> Any:
    """A number for each dimension; functions take a list of one for all."""
    if isinstance(value, str):
        return value
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * rank if len(numbers) == 1 else numbers


def _parameter(tensor: Any) -> Any:
    """A tensor as a parameter, which can be written to: elements of an expanded one share memory."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return nn.Parameter(tensor.detach() if is_dense else tensor.detach().clone(), requires_grad=False)


def _name_for(made: fx.GraphModule, call: fx.Node, network: Any) -> str:
    """The name of the module whose code has a step, where no step names it or a part of it, else one that is new."""
    taken = [str(each.target) for each in made.graph.nodes if each.op in ("call_module", "get_attr")]
    called = [str(each.target) for each in made.graph.nodes if each.op == "call_module" and each.target]
    owner = str(next((path for path, _ in reversed(call.meta.get("nn_module_stack", {}).values())), ""))
    if any(owner.startswith(f"{each}.") for each in called):  # what is called runs what it has
        owner = owner.replace(".", "_")
    elif owner and not _is_taken(owner, taken):
        return owner
    return free_name(f"{owner or 'convolution'}_", 1, made, network)


def _is_taken(name: str, taken: list[str]) -> bool:
    return any(f"{each}.".startswith(f"{name}.") for each in taken)


def free_name(begin: str, start: int, *networks: Any) -> str:
    """A name that begins so, with a number from `start` on behind, and is nobody's in any of these networks."""
    names = (f"{begin}{number}" for number in itertools.count(start))
    return next(name for name in names if not any(_has(each, name) for each in networks))


def _has(network: Any, name: str) -> bool:
    """Whether a network has something by a name, of its own or of a part of it."""
    try:
        operator.attrgetter(name)(network)
    except AttributeError:
        return False
    return True
