"""How Inductor calls the operators: by their form, with tensors packed in the memory format that was put in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from miofind.core.tensor import Layout
from miofind.torch.formats import strides
from miofind.torch.fused.calls import Call
from miofind.torch.fused.forms import TENSORS, form_of
from miofind.torch.fused.ops import BY_FORM, OPERATORS
from miofind.torch.inductor.memory_formats import TURNED


@functools.cache
def lower_operators() -> None:
    """Have Inductor give the operators their tensors in the memory format that they were put in with.

    Operators of a pass have no strides recorded: without this their inputs come in any order, and are copied.
    """
    from torch._inductor import lowering

    for kind, overload in OPERATORS.items():
        if overload not in lowering.lowerings:
            lowering.add_needs_realized_inputs(overload)
            lowering.add_layout_constraint(overload, _constrained)
            lowering.register_lowering(overload, type_promotion_kind=None)(_lowered(kind))


def _lowered(kind: type[Call]) -> Callable[..., Any]:
    """What makes calls of an operator: of the one that takes a form, unless sizes are not numbers."""
    from torch._inductor import lowering

    as_it_is, by_form = (lowering.fallback_handler(each[kind]) for each in (OPERATORS, BY_FORM))

    def lower(*arguments: Any, **named: Any) -> Any:
        call = kind(*arguments, **named)
        form = form_of(call)
        if form is None:
            return as_it_is(*arguments, **named)
        return by_form(*(getattr(call, name) for name in TENSORS[kind]), form)

    return lower


def _constrained(node: fx.Node, *arguments: Any, **named: Any) -> Any:
    """The arguments of an operator of the pass in its memory format; of others as they were traced."""
    from torch._inductor import ir, lowering

    last = named.get("channels_last")
    if node.meta.get(TURNED):
        last = named["channels_last"] = True
    if last is None:
        return lowering.constrain_to_fx_strides(node, *arguments, **named)

    def required(value: Any) -> Any:
        if not isinstance(value, ir.IRNode) or len(value.get_size()) < 3:
            return value
        value.realize()  # else what else uses it computes it once more
        shape = tuple(map(int, value.get_size()))  # numbers, as the format is named
        packed = strides(shape, Layout.of(len(shape) - 2, channels_last=last))
        return ir.ExternKernel.require_exact_strides(value, packed)

    return tuple(required(value) for value in arguments), named
