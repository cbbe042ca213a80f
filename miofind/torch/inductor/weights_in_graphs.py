"""Weights in Inductor's graphs for inference: operators read kept copies, and no call copies, casts or packs them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from miofind.torch.fused.calls import Forward
from miofind.torch.fused.kept_weights import is_constant
from miofind.torch.fused.packed_filters import PackedFilters
from miofind.torch.inductor.graphs import added_step
from miofind.torch.override.formats import is_dense, layout_like

_KEPT = torch.ops.miofind.kept_weights.default
_PACKED = torch.ops.miofind.packed_filters.default
_CONVERSION = torch.ops.prims.convert_element_type.default


def keep_weights(
    graph: fx.Graph, operators: Mapping[fx.Node, bool], packing_of: Callable[[Forward], PackedFilters | None]
) -> None:
    """Have operators read copies that are kept of weights, where a graph would turn, cast or transform them.

    Weights that require gradients stay as they are: see `kept`. So do all in Inductor's own CUDA graphs, which replay
    without asking whether weights were written to, and in code in C++ (`cpp_wrapper`, AOTInductor), which takes a list
    of one tensor for the tensor, and whose weights are no parameters in a package.

    Args:
        operators: of `miofind::convolution`, and whether each runs channels last.
        packing_of: how what runs a call of nodes has filters packed; None where it reads them as they are.
    """
    config = torch._inductor.config
    if config.triton.cudagraphs or config.cpp_wrapper:
        return
    _never_reuse()
    constants = _constants(graph)
    readers: dict[_Form, dict[fx.Node, list[fx.Node]]] = {}
    packed: dict[Any, dict[fx.Node, PackedFilters]] = {}
    for node, last in operators.items():
        weight, value = node.args[1], node.args[1].meta["val"]
        source = weight.args[0] if weight.target is _CONVERSION else weight
        if source not in constants:
            continue
        call = Forward(*node.args, **node.kwargs)._replace(channels_last=last)
        packing = packing_of(call) if source is weight else None
        if packing is not None:
            packed.setdefault(value.device, {})[node] = packing
        elif not _is_ready(source.meta["val"], value.dtype, last):
            readers.setdefault((value.device, value.dtype, last), {}).setdefault(source, []).append(node)
    for form, of_weights in readers.items():
        _put_in(graph, of_weights, form)
    for packings in packed.values():
        _put_packed_in(graph, packings)


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


def _first_step(graph: fx.Graph, weights: Iterable[fx.Node]) -> fx.Node:
    """The first step of a graph, behind some weights."""
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for constant in (weight for weight in weights if weight.op == "get_attr"):
        first.prepend(constant)
    return first


def _put_in(graph: fx.Graph, readers: Mapping[fx.Node, list[fx.Node]], form: _Form) -> None:
    """One step that gives kept copies of weights to the operators that read them."""
    first = _first_step(graph, readers)
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


def _put_packed_in(graph: fx.Graph, packings: Mapping[fx.Node, PackedFilters]) -> None:
    """One step that gives kept packed filters to operators."""
    weights = {node: node.args[1] for node in packings}
    asked = dict.fromkeys((weights[node], packing) for node, packing in packings.items())
    with graph.inserting_before(_first_step(graph, weights.values())):
        kept = added_step(
            graph,
            _PACKED,
            [weight for weight, _ in asked],
            [packing.solution for _, packing in asked],
            [packing.bytes for _, packing in asked],
        )
        items = {each: added_step(graph, operator.getitem, kept, i) for i, each in enumerate(asked)}
    for node, packing in packings.items():
        node.kwargs = {**node.kwargs, "filters": items[weights[node], packing], "packing": packing.name}


@functools.cache
def _never_reuse() -> None:
    """Have Inductor leave the kept copies' memory alone, which it else gives to later tensors of a call."""
    from torch._inductor import lowering

    for step in (_KEPT, _PACKED):
        run = lowering.fallback_handler(step)
        lowering.register_lowering(step, type_promotion_kind=None)(functools.partial(_lowered, run))


def _lowered(run: Callable[..., Any], *arguments: Any) -> Any:
    from torch._inductor.virtualized import V

    made = run(*arguments)
    V.graph.never_reuse_buffers.update(each.get_name() for each in made)
    return made
