"""Weights in Inductor's graphs for inference: operators read kept copies of them, and no call copies or casts them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from miofind.torch.fused.kept_weights import is_constant
from miofind.torch.inductor.graphs import added_step
from miofind.torch.override.formats import is_dense, layout_like

_KEPT = torch.ops.miofind.kept_weights.default
_CONVERSION = torch.ops.prims.convert_element_type.default


def keep_weights(graph: fx.Graph, operators: Mapping[fx.Node, bool]) -> None:
    """Have operators read copies that `miofind::kept_weights` keeps, where a graph would turn or cast their weights.

    Weights that require gradients stay as they are: see `kept`. So do all in Inductor's own CUDA graphs, which replay
    without asking whether weights were written to.

    Args:
        operators: of `miofind::convolution`, and whether each runs channels last.
    """
    if torch._inductor.config.triton.cudagraphs:
        return
    _never_reuse()
    constants = _constants(graph)
    readers: dict[_Form, dict[fx.Node, list[fx.Node]]] = {}
    for node, last in operators.items():
        weight, value = node.args[1], node.args[1].meta["val"]
        source = weight.args[0] if weight.target is _CONVERSION else weight
        if source in constants and not _is_ready(source.meta["val"], value.dtype, last):
            readers.setdefault((value.device, value.dtype, last), {}).setdefault(source, []).append(node)
    for form, of_weights in readers.items():
        _put_in(graph, of_weights, form)


_Form = tuple[Any, Any, bool]
"""The device and dtype of weights as they are read, and whether they are channels last."""


def _is_ready(value: Any, dtype: Any, last: bool) -> bool:
    """Whether a weight lies as it is read."""
    return value.dtype == dtype and is_dense(value, layout_like(value, channels_last=last))


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """The tensors given to a graph that neither it nor an optimizer writes to, as far as that is known."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    told = getattr(getattr(TracingContext.try_get(), "fw_metadata", None), "input_info", ())
    frozen = [node for node in graph.nodes if node.op == "get_attr" and "val" in node.meta]
    found = {node for node in frozen if is_constant(operator.attrgetter(node.target)(graph.owning_module))}
    if len(told) == len(placeholders):
        found |= {node for node, each in zip(placeholders, told, strict=True) if not each.requires_grad}
    return {node for node in found if all(user.target is not torch.ops.aten.copy_.default for user in node.users)}


def _put_in(graph: fx.Graph, readers: Mapping[fx.Node, list[fx.Node]], form: _Form) -> None:
    """One step that gives kept copies of weights to the operators that read them."""
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for constant in (source for source in readers if source.op == "get_attr"):
        first.prepend(constant)
    _, *wanted = form
    casts = dict.fromkeys(user.args[1] for users in readers.values() for user in users)
    with graph.inserting_before(first):
        kept = added_step(graph, _KEPT, [*readers], *wanted)
        for i, users in enumerate(readers.values()):
            item = added_step(graph, operator.getitem, kept, i)
            for user in users:
                user.update_arg(1, item)
    for cast in casts:
        if cast.target is _CONVERSION and not cast.users:
            graph.erase_node(cast)


@functools.cache
def _never_reuse() -> None:
    """Have Inductor leave the kept copies' memory alone, which it else gives to later tensors of a call."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    run = lowering.fallback_handler(_KEPT)

    def lowered(*arguments: Any) -> Any:
        made = run(*arguments)
        V.graph.never_reuse_buffers.update(each.get_name() for each in made)
        return made

    lowering.register_lowering(_KEPT, type_promotion_kind=None)(lowered)
