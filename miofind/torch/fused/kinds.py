"""What the steps of a graph give, where that is known: tensors, sizes, numbers.

Arguments of a network are taken for tensors. Of PyTorch's operators their schemas tell, of its functions in Python the
annotations.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from miofind.torch.fused.graph_steps import is_changed, is_convolution
from miofind.torch.fused.module import FusedConvolution
from miofind.torch.fused.sizes import EXTREMES, NUMBERS, ROUNDING
from miofind.torch.fused.writes import IN_PLACE_OPERATORS

Kind = type | None
"""A class; None where it is not known."""
TENSOR: type = torch.Tensor
PARAMETER: type = nn.Parameter


class Tensors(tuple[Any, ...]):
    """The kind of tuples of tensors."""


_OF_SCHEMA: Mapping[str, type] = {
    "Tensor": TENSOR,
    "List[Tensor]": Tensors,
    "List[int]": tuple,
    "int": int,
    "bool": bool,
}
_OF_ATTRIBUTES: Mapping[str, type] = {
    **dict.fromkeys(("T", "mT", "H", "mH", "data", "real", "imag"), TENSOR),
    **dict.fromkeys(("ndim", "nbytes", "itemsize"), int),
    **dict.fromkeys(("is_cuda", "requires_grad", "is_quantized", "is_sparse", "is_meta"), bool),
    "shape": torch.Size,
    "dtype": torch.dtype,
    "device": torch.device,
}
_CONVERSIONS = ("float", "half", "double", "bfloat16", "int", "long", "short", "char", "byte", "bool", "cpu", "cuda")
_MODULES = {
    f"torch.nn.modules.{each}"
    for each in (
        *("activation", "batchnorm", "channelshuffle", "conv", "dropout", "flatten", "fold", "instancenorm", "linear"),
        *("normalization", "padding", "pixelshuffle", "pooling", "sparse", "upsampling"),
    )
}
_OF_NUMBERS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.neg, operator.pos),
)
"""Operators that give numbers of numbers, and of integers alone integers where they do not divide."""
_ARITHMETIC = (
    *_OF_NUMBERS,
    *(operator.pow, operator.matmul, operator.abs, operator.and_, operator.or_, operator.xor),
    *(operator.invert, operator.lshift, operator.rshift, operator.lt, operator.le, operator.gt, operator.ge),
    *IN_PLACE_OPERATORS,
)
_OF_TUPLES = (operator.add, operator.mul)


def kind_of(node: fx.Node, kinds: Mapping[fx.Node, Kind], root: Any) -> Kind:
    """What a step gives.

    Args:
        kinds: what the steps before give.
        root: has the modules and tensors that the graph names.
    """
    if node.op == "placeholder":
        return _of_argument(node)
    if node.op == "get_attr":
        return _of_what_it_has(root, str(node.target))
    given: list[Kind] = [kinds.get(each) if isinstance(each, fx.Node) else type(each) for each in node.args]
    if node.op == "call_module":
        return _of_module(_submodule(root, str(node.target)), given)
    if node.op == "call_method":
        return _of_method(str(node.target), given)
    return _of_function(node, given) if node.op == "call_function" else None


def kind_of_attribute(kind: Kind, name: str) -> Kind:
    """What an attribute of something is."""
    return _OF_ATTRIBUTES.get(name) if is_tensor(kind) else None


def needs_tensor(module: Any) -> bool:
    """Whether a module computes a tensor of one, as PyTorch's convolutions, norms and activations do."""
    if type(module) is FusedConvolution or is_convolution(module):
        return not is_changed(module)
    cls = type(module)
    is_one = cls.__module__ in _MODULES and cls not in (nn.Identity, nn.MultiheadAttention, nn.Bilinear)
    return is_one and not getattr(module, "return_indices", False) and not is_changed(module)


def is_tensor(kind: Kind) -> bool:
    """Whether a kind is that of tensors."""
    return kind is not None and issubclass(kind, TENSOR)


def _of_argument(node: fx.Node) -> Kind:
    name = str(node.target)
    if name.startswith("*"):
        return dict if name.startswith("**") else Tensors
    has_default = node.args and node.args[0] is not None
    return None if has_default else TENSOR  # else it may be what is no tensor where it is left out


def _of_what_it_has(root: Any, name: str) -> Kind:
    """Of parameters and buffers: code is given stand-ins of these alone, and what is constant itself."""
    path, _, last = name.rpartition(".")
    return PARAMETER if last in _submodule(root, path)._parameters else TENSOR


def _submodule(root: Any, path: str) -> Any:
    """As by `get_submodule`, which asks for attributes: torch.fx is told of each while it traces."""
    module = root
    for name in path.split(".") if path else ():
        if name not in module._modules:  # what has it hands on what is asked of it
            return root.get_submodule(path)
        module = module._modules[name]
    return module


def _of_module(module: Any, given: list[Kind]) -> Kind:
    if type(module) is nn.Identity and not is_changed(module):
        return given[0] if given else None
    return TENSOR if needs_tensor(module) else None


def _of_method(name: str, given: list[Kind]) -> Kind:
    if not given or not is_tensor(given[0]):
        return None
    if name == "size":
        return torch.Size if len(given) == 1 else int
    return TENSOR if name in _CONVERSIONS else _of_operator(name)


def _of_function(node: fx.Node, given: list[Kind]) -> Kind:
    function: Any = node.target
    if function is getattr:
        return kind_of_attribute(given[0], str(node.args[1]))
    if function is operator.getitem:
        return _of_item(given[0], node.args[1])
    if function in _ARITHMETIC:
        if function in _OF_TUPLES and {Tensors, tuple}.intersection(given) and torch.Size not in given:
            return tuple
        if any(is_tensor(each) for each in given):
            return TENSOR
    if all(each in NUMBERS for each in given):
        if function in ROUNDING:
            return int
        if function in _OF_NUMBERS:
            is_float = float in given or function in (operator.truediv, operator.itruediv)
            return float if is_float else int
        if function in EXTREMES and len(set(given)) == 1:
            return given[0]
    return _of_pytorchs(function)


def _of_item(kind: Kind, index: Any) -> Kind:
    if kind is torch.Size:
        return torch.Size if isinstance(index, slice) else int
    is_one = kind is Tensors and isinstance(index, int)
    is_part = is_tensor(kind) and not isinstance(index, str)  # which is a key of what is no tensor after all
    return TENSOR if is_one or is_part else None


@functools.cache
def _of_pytorchs(function: Any) -> Kind:
    """What a function of PyTorch's gives; None of others."""
    if hasattr(function, "_schema"):
        return _of_schemas([function._schema])
    if str(getattr(function, "__module__", "")).partition(".")[0] != "torch":
        return None
    is_python = isinstance(function, FunctionType)
    if is_python and inspect.signature(function).return_annotation in (TENSOR, "Tensor"):
        return TENSOR
    return _of_operator(getattr(function, "__name__", ""))


@functools.cache
def _of_operator(name: str) -> Kind:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return _of_schemas([each for each in schemas if any("Tensor" in str(given.type) for given in each.arguments)])


def _of_schemas(schemas: list[Any]) -> Kind:
    """What operators give, where all give the same."""
    given = {_OF_SCHEMA.get(str(each.returns[0].type)) if len(each.returns) == 1 else None for each in schemas}
    return given.pop() if len(given) == 1 else None
