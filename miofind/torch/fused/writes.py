"""What operators write to, and what names the memory of tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import fx
from torch.utils import _pytree as pytree

IN_PLACE_OPERATORS = (
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.imatmul,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
)
_EMBEDDINGS = ("embedding", "embedding_bag")
_OBSERVERS = ("fused_moving_avg_obs_fake_quant", "_fused_moving_avg_obs_fq_helper")
_WRITING = ("setitem", "__setitem__", "setattr")
_TOLD_BY_NAMES = frozenset({"torch", "operator", "_operator", "math", "builtins", "miofind"})


def is_mutable(step: Any) -> bool:
    """Whether an operator writes to what it is given; what is none writes nothing in graphs of AOTAutograd."""
    return isinstance(step, torch._ops.OpOverload) and bool(step._schema.is_mutable)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an operator writes to."""
    return _of_kind(torch.Tensor, _written_arguments(func, args, kwargs))


def _written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    if not is_mutable(func):
        return []
    arguments: list[Any] = func._schema.arguments
    return [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _written_by_some(packet: Any, step: fx.Node) -> list[fx.Node]:
    """What the overloads of an operator that take what a step gives may write to."""
    found: list[fx.Node] = []
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = [each for each in overload._schema.arguments if each.alias_info is not None]
        outs = {each.name for each in arguments if each.alias_info.is_write and each.kwarg_only}
        if outs <= step.kwargs.keys():  # what is named so is given by name
            found += _of_kind(fx.Node, _written_arguments(overload, step.args, step.kwargs))
    return found


def _of_kind(kind: type, values: Any) -> list[Any]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, kind)]


def written_by_call(step: fx.Node) -> list[fx.Node]:
    """What a step that calls a function or method may write to, of what it is given.

    An operator says so by its schema, but for statistics of norms; PyTorch's and Python's functions by their names; of
    others nobody knows, so that it may be all.
    """
    if statistics := _written_statistics(step):
        return statistics
    function = getattr(step.target, "_opoverload", step.target)  # that of what torch.library.custom_op makes
    if isinstance(function, torch._ops.OpOverload):
        return _of_kind(fx.Node, _written_arguments(function, step.args, step.kwargs))
    if isinstance(function, torch._ops.OpOverloadPacket):
        return _written_by_some(function, step)
    if "out" in step.kwargs:
        return _of_kind(fx.Node, step.kwargs["out"])
    if name_of(step) in _OBSERVERS:
        return _written_by_some(getattr(torch.ops.aten, name_of(step)), step)
    if name_of(step) in _EMBEDDINGS:
        return _renormalized(step)
    inputs: list[fx.Node] = step.all_input_nodes
    if not is_told_by_name(step):
        return inputs
    name = name_of(step)
    if _is_flagged(step) or name.endswith("_") or name in _WRITING or step.target in IN_PLACE_OPERATORS:
        return _of_kind(fx.Node, step.args[:1]) or inputs
    return []


def _renormalized(step: fx.Node) -> list[fx.Node]:
    """The table of an embedding that its rows' norms are limited in."""
    given = dict(enumerate(step.args)) | step.kwargs
    is_limited = given.get("max_norm", given.get(3)) is not None
    return _of_kind(fx.Node, given.get("weight", given.get(1))) if is_limited else []


def _is_flagged(step: fx.Node) -> bool:
    """Whether `inplace` is set, or may be: a function of torch.nn.functional is given True by position."""
    is_functional = getattr(step.target, "__module__", "") == functional.__name__
    return step.kwargs.get("inplace", False) is not False or (
        is_functional and any(value is True for value in step.args)
    )


def name_of(step: fx.Node) -> str:
    """The name of the function or method that a step calls."""
    return step.target if isinstance(step.target, str) else str(getattr(step.target, "__name__", "_"))


def is_told_by_name(step: fx.Node) -> bool:
    """Whether a step calls a method, or a function of PyTorch's or Python's: those that write are named so."""
    home = str(getattr(step.target, "__module__", None) or type(step.target).__module__)
    return step.op == "call_method" or home.partition(".")[0] in _TOLD_BY_NAMES


def _written_statistics(step: fx.Node) -> list[fx.Node]:
    """What a norm that is computed by a function or an operator writes its statistics to."""
    name = name_of(step).partition(".")[0]
    if not name.endswith(("batch_norm", "instance_norm")):
        return []
    is_functional = step.target in (functional.batch_norm, functional.instance_norm)
    given = dict(enumerate(step.args)) | step.kwargs
    flag = given.get("training", given.get("use_input_stats", given.get(5, step.target is not functional.batch_norm)))
    if flag is False:
        return []
    mean, variance = (1, 2) if is_functional else (3, 4)
    kept = [given.get(name, given.get(place)) for name, place in (("running_mean", mean), ("running_var", variance))]
    return _of_kind(fx.Node, kept)


def storage_of(tensor: Any) -> int:
    """What names the memory of a tensor as long as that is in use; 0 for tensors that have none to name."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):  # sparse ones, those of lazy modules
        return 0
