"""What the steps of a torch.fx graph of modules are: activations, additions, batch norms, and what they write to."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import fx, nn

from miofind.torch.fused.checks import must_be
from miofind.torch.fused.module import FusedConvolution
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.writes import is_told_by_name, name_of, storage_of, written_by_call

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = {nn.BatchNorm1d: 3, nn.BatchNorm2d: 4, nn.BatchNorm3d: 5, nn.SyncBatchNorm: None}
"""Batch norms and the dimensions of what they take; None for any."""
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""Modules that in inference give what they are given."""

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
AFFINE = {
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), "mul"),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, "div", "div_"), "div"),
    **dict.fromkeys(ADDITIONS, "add"),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub", "sub_"), "sub"),
}
"""By function, or by the name of a method: what is done with a number, or with one of each channel."""


def _of(name: str) -> Callable[..., Nonlinearity]:
    """An activation without numbers; `inplace` changes nothing that it gives."""

    def read(inplace: bool = False) -> Nonlinearity:
        return Nonlinearity(activation=name)

    return read


def _relu6(inplace: bool = False) -> Nonlinearity:
    return Nonlinearity(activation="clamp", low=0.0, high=6.0)


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Nonlinearity:
    return Nonlinearity(activation="clamp", low=min_val, high=max_val)


def _clamp(min: float | None = None, max: float | None = None) -> Nonlinearity:
    if min is None and max is None:
        raise TypeError("PyTorch refuses it")
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    return Nonlinearity(activation="clamp", low=low, high=high)


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Nonlinearity:
    return Nonlinearity(activation="leaky_relu", slope=negative_slope)


def _elu(alpha: float = 1.0, inplace: bool = False) -> Nonlinearity:
    return Nonlinearity(activation="elu", slope=alpha)


def _gelu(approximate: str = "none") -> Nonlinearity:
    if approximate not in ("none", "tanh"):
        raise TypeError("PyTorch refuses it")
    return Nonlinearity(activation="gelu_tanh" if approximate == "tanh" else "gelu")


_OF_MODULE: Mapping[type, Callable[[Any], Nonlinearity]] = {
    nn.ReLU: lambda module: _of("relu")(),
    nn.ReLU6: lambda module: _relu6(),
    nn.Hardtanh: lambda module: _hardtanh(module.min_val, module.max_val),
    nn.LeakyReLU: lambda module: _leaky_relu(module.negative_slope),
    nn.SiLU: lambda module: _of("silu")(),
    nn.GELU: lambda module: _gelu(module.approximate),
    nn.Hardswish: lambda module: _of("hardswish")(),
    nn.Sigmoid: lambda module: _of("sigmoid")(),
    nn.Tanh: lambda module: _of("tanh")(),
    nn.ELU: lambda module: _elu(module.alpha),
    nn.Mish: lambda module: _of("mish")(),
}

_OF_CALL: Mapping[Any, Callable[..., Nonlinearity]] = {
    **dict.fromkeys((functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"), _of("relu")),
    functional.relu6: _relu6,
    **dict.fromkeys((functional.hardtanh, functional.hardtanh_), _hardtanh),
    **dict.fromkeys((torch.clamp, torch.clamp_, torch.clip, "clamp", "clamp_", "clip"), _clamp),
    **dict.fromkeys((functional.leaky_relu, functional.leaky_relu_), _leaky_relu),
    functional.silu: _of("silu"),
    functional.gelu: _gelu,
    functional.hardswish: _of("hardswish"),
    **dict.fromkeys((functional.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"), _of("sigmoid")),
    **dict.fromkeys((functional.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"), _of("tanh")),
    **dict.fromkeys((functional.elu, functional.elu_), _elu),
    functional.mish: _of("mish"),
}
"""By function, or by the name of a method: takes the call's other arguments."""
ACTIVATION_CALLS = _OF_CALL.keys()

_FRESH_MODULES = (
    FusedConvolution,
    *CONVOLUTIONS,
    *NORMS,
    nn.Linear,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.Upsample,
    nn.Softmax,
    nn.Hardsigmoid,
    nn.PReLU,
    *_OF_MODULE,
)
# fmt: off
_FRESH_NAMES = frozenset({
    "abs", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "add", "addcmul", "addmm", "amax",
    "amin", "avg_pool1d", "avg_pool2d", "avg_pool3d", "baddbmm", "batch_norm", "bmm", "cat", "clone", "conv1d",
    "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "div", "exp", "flip", "gather",
    "group_norm", "hardsigmoid", "index_select", "instance_norm", "interpolate", "layer_norm", "linear", "log",
    "matmul", "max_pool1d", "max_pool2d", "max_pool3d", "maximum", "mean", "minimum", "mm", "mul", "neg", "normalize",
    "pad", "pow", "prelu", "reciprocal", "repeat", "roll", "rsqrt", "scaled_dot_product_attention", "softmax",
    "softplus", "sqrt", "square", "stack", "std", "sub", "sum", "truediv", "var", "where",
})
# fmt: on
"""Functions and methods of PyTorch's that give memory of their own."""

GIVES_TUPLE = "gives_tuple"
"""What is known of a step, in its `meta`."""


def is_convolution(module: Any) -> bool:
    """Whether a module is a convolution of PyTorch's, or of a class below one that computes as that does."""
    if not isinstance(module, CONVOLUTIONS) or not {"weight", "bias"} <= module._parameters.keys():
        return False  # it is another module, or is parametrized
    kind = next(each for each in CONVOLUTIONS if isinstance(module, each))
    names = ("__call__", "forward", "_conv_forward")
    return all(name not in vars(module) and getattr(type(module), name) is getattr(kind, name) for name in names)


def has_hooks(module: Any) -> bool:
    """Whether something is called before or after a module's forward or backward."""
    of_forward = module._forward_hooks or module._forward_pre_hooks
    return bool(of_forward or module._backward_hooks or module._backward_pre_hooks)


def keeps_channels(module: Any) -> bool:
    """Whether a module is known to give as many channels as it is given."""
    return type(module) in (*NORMS, *NOTHING, *_OF_MODULE) and not is_changed(module)


def is_changed(module: Any) -> bool:
    """Whether a module may compute something else than its class tells: it has hooks, or a forward of its own."""
    return has_hooks(module) or "forward" in vars(module)


def is_rank(node: fx.Node) -> bool:
    """Whether a step gives a tensor's number of dimensions."""
    if node.target is getattr:
        return bool(node.args[1] == "ndim")
    return bool(node.op == "call_method" and node.target == "dim")


class Steps:
    """The steps of one graph.

    Args:
        root: has the modules and tensors that the graph names.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._modules = dict(root.named_modules())

    def add(self, name: str, module: Any) -> None:
        """Know a module that the graph calls from now on."""
        self._modules[name] = module

    def module(self, node: fx.Node) -> Any:
        """The module that a step calls, or None."""
        return self._modules.get(node.target) if node.op == "call_module" else None

    def is_nothing(self, node: fx.Node) -> bool:
        """Whether a step gives what it is given: an identity, or dropout in inference."""
        module = self.module(node)
        if module is not None:
            return type(module) in NOTHING and not is_changed(module) and _reads_one(node)
        if node.target is functional.dropout:
            return node.kwargs.get("training") is False
        return _is_function(node, "torchvision.ops.stochastic_depth", "stochastic_depth") and (
            node.kwargs.get("training", node.args[3] if len(node.args) > 3 else True) is False
        )

    def activation(self, node: fx.Node, given: fx.Node) -> Nonlinearity | None:
        """The activation of `given` that a step is, or None."""
        module = self.module(node)
        if module is not None:
            read_module = _OF_MODULE.get(type(module))
            is_plain = read_module is not None and not is_changed(module) and _reads_one(node)
            of_module = read_module(module) if read_module is not None and is_plain else None
            return of_module if of_module is not None and of_module.is_valid else None
        read = _OF_CALL.get(node.target) if node.op in ("call_function", "call_method") else None
        if read is None or not node.args or node.args[0] is not given:
            return None
        try:
            made = read(*node.args[1:], **node.kwargs)
        except TypeError:  # arguments that it does not know
            return None
        return made if made.is_valid else None

    def batch_norm(self, node: fx.Node, given: fx.Node, rank: int) -> dict[str, Any] | None:
        """What of a batch norm of `given` in inference `fold_batch_norm` is given, or None where a step is none.

        Args:
            rank: dimensions of `given`, which PyTorch refuses where they are not those of the module.
        """
        module = self.module(node)
        if module is not None:
            if (
                NORMS.get(type(module), 0) not in (None, rank)
                or is_changed(module)
                or module.running_mean is None
                or not _reads_one(node)
            ):
                return None
            statistics = {"mean": module.running_mean, "variance": module.running_var}
            return {**statistics, "gamma": module.weight, "beta": module.bias, "epsilon": module.eps}
        if node.target is not functional.batch_norm:
            return None
        call = dict(zip(_NORM_ARGUMENTS, node.args, strict=False)) | node.kwargs
        tensors = [self._tensor(call.get(name)) for name in ("running_mean", "running_var", "weight", "bias")]
        is_inference = call.get("training", False) is False and call["input"] is given
        if not is_inference or any(each is _UNKNOWN for each in tensors) or tensors[0] is None or tensors[1] is None:
            return None
        names = ("mean", "variance", "gamma", "beta")
        return dict(zip(names, tensors, strict=True)) | {"epsilon": call.get("eps", 1e-5)}

    def _tensor(self, value: Any) -> Any:
        """A tensor of the network that a step reads, None for None, _UNKNOWN for whatever else."""
        if value is None:
            return None
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return _UNKNOWN
        return operator.attrgetter(str(value.target))(self._root)

    def asserts_rank(self, node: fx.Node) -> bool:
        """Whether a step checks that a convolution's result has the dimensions that it has, as norms of timm do."""
        if node.target not in (torch._assert, must_be) or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        condition = node.args[0]
        is_met_by = operator.eq if node.target is torch._assert or node.args[1] else operator.ne
        if condition.target is not is_met_by or not isinstance(condition.args[0], fx.Node):
            return False
        asked, rank = condition.args
        if not is_rank(asked) or not isinstance(asked.args[0], fx.Node):
            return False
        convolution = self.module(asked.args[0])
        is_plain = isinstance(convolution, CONVOLUTIONS) and not is_changed(convolution)
        return is_plain and bool(convolution.weight.dim() == rank)

    def writes(self, node: fx.Node) -> bool:
        """Whether a step may write to what it is given."""
        return bool(self.written(node))

    def written(self, node: fx.Node) -> list[fx.Node]:
        """What a step may write to, of what it is given."""
        if self.is_nothing(node):
            return []
        if node.op == "call_module":
            module = self.module(node)
            is_in_place = bool(getattr(module, "inplace", False))
            return node.all_input_nodes if is_in_place or not _is_known(module) else []
        if node.op not in ("call_function", "call_method") or node.target is must_be:
            return []
        return written_by_call(node)

    def held(self, node: fx.Node) -> set[Any]:
        """Names of the memory of the tensors of a module that a step calls, where that may write to them."""
        module = self.module(node)
        limits_norms = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        if module is None or (_is_known(module) and not limits_norms):
            return set()
        return {storage_of(each) for each in (*module.parameters(), *module.buffers())}

    def places(self, node: fx.Node) -> set[Any]:
        """Names of the memory that a step's result may lie in: steps that make some, and that of the network's tensors.

        All arguments have one name: a caller may give the same tensor for several.
        """
        return {self._place(each) for each in self.memory(node)}

    def _place(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(self._root)
            return (isinstance(tensor, torch.Tensor) and storage_of(tensor)) or node
        return "argument" if node.op == "placeholder" else node

    def memory(self, node: fx.Node) -> set[fx.Node]:
        """The steps whose results a step's result may share memory with, its own among them."""
        found, pending = set[fx.Node](), [node]
        while pending:
            each = pending.pop()
            if each not in found:
                found.add(each)
                pending += () if self._is_fresh(each) else each.all_input_nodes
        return found

    def _is_fresh(self, node: fx.Node) -> bool:
        if self.writes(node) or (node.meta.get(GIVES_TUPLE) and node.target in (operator.add, operator.mul)):
            return False  # a tuple that is added or multiplied has the same tensors
        if node.op == "call_module":
            return isinstance(self.module(node), _FRESH_MODULES)
        return node.target in _OF_CALL or (is_told_by_name(node) and name_of(node) in _FRESH_NAMES)


def _is_known(module: Any) -> bool:
    """Whether a module writes to nothing, unless it is to work in place."""
    is_pytorchs = type(module).__module__.startswith("torch.nn.modules.")
    is_known = is_pytorchs or type(module) is FusedConvolution or is_convolution(module)
    return is_known and not is_changed(module)


_UNKNOWN = object()
_NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _is_function(node: fx.Node, home: str, name: str) -> bool:
    """Whether a step calls a function of another library, which is not imported for that."""
    told = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
    return node.op == "call_function" and told == (home, name)


def _reads_one(node: fx.Node) -> bool:
    return len(node.args) == 1 and not node.kwargs
