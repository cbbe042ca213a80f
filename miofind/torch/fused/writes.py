"""What operators write to, and what names the memory of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def is_mutable(step: Any) -> bool:
    """Whether an operator writes to what it is given; what is none writes nothing in graphs of AOTAutograd."""
    return isinstance(step, torch._ops.OpOverload) and bool(step._schema.is_mutable)


def may_write(function: Any) -> bool:
    """Whether a function may write to what it is given: an operator by its schemas, whatever is none may."""
    function = getattr(function, "_opoverload", function)  # that of what torch.library.custom_op makes
    if isinstance(function, torch._ops.OpOverload):
        return is_mutable(function)
    if isinstance(function, torch._ops.OpOverloadPacket):  # `out` of others is in their names
        return any(is_mutable(getattr(function, name)) for name in function.overloads() if "out" not in name)
    return True


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an operator writes to."""
    if not is_mutable(func):
        return []
    given = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [tensor for tensor in pytree.tree_leaves(given) if isinstance(tensor, torch.Tensor)]


def storage_of(tensor: Any) -> int:
    """What names the memory of a tensor as long as that is in use; 0 for tensors that have none to name."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):  # sparse ones, those of lazy modules
        return 0
