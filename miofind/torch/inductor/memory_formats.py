"""In which memory format operators run, and how their neighbours in a graph come to compute in the same."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from miofind.torch.fused.calls import SHORT, Call, Forward
from miofind.torch.fused.ops import ARGUMENTS, OPERATORS, SHORT_OPERATORS
from miofind.torch.inductor.graphs import CONVOLUTIONS, copy_of, has_numbers, is_pointwise, known_value, trains
from miofind.torch.inductor.writing import SpatialRanks, Writing, spelt, values_of
from miofind.torch.override.formats import dense, is_last, layout_like, packed_strides

aten, prims = torch.ops.aten, torch.ops.prims

_TURNED = "miofind_turned_to_channels_last"
"""What is noted with a node that the lowering runs channels last, whatever it was traced with."""


@functools.cache
def constrain_layouts() -> None:
    """Have Inductor give the operators their tensors in the memory format that they were put in with.

    Operators of a pass have no strides recorded: without this their inputs come in any order, and are copied. Inductor
    may have met one before, in a fused network that was compiled without the pass, and have a constraint of its own,
    which needs what is recorded.
    """
    from torch._inductor import lowering

    for overload in OPERATORS.values():
        lowering.make_fallback(overload, layout_constraint=_constrained, warn=False)
        lowering.register_lowering(overload, type_promotion_kind=None)(_shortened(overload))


def _shortened(overload: Any) -> Callable[..., Any]:
    """What an operator is in the generated code: a short one, where that is Python and all numbers are known.

    PyTorch writes a text into C++ as it is, with the quotation marks in it.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    kind = ARGUMENTS[overload]

    def lowered(*arguments: Any, **named: Any) -> Any:
        operator = overload
        if not V.graph.cpp_wrapper:
            with contextlib.suppress(TypeError):  # a number is one of dynamic shapes
                arguments, named = SHORT[kind](*arguments, **named).arguments, {}
                operator = SHORT_OPERATORS[kind]
        return lowering.fallback_handler(operator, add_to_fallback_set=False)(*arguments, **named)

    return lowered


def _constrained(node: fx.Node, *arguments: Any, **named: Any) -> Any:
    """The arguments of an operator of the pass in its memory format; of others as they were traced."""
    from torch._inductor import ir, lowering

    last = named.get("channels_last")
    if node.meta.get(_TURNED):
        last = named["channels_last"] = True
    if last is None:
        return lowering.constrain_to_fx_strides(node, *arguments, **named)

    def required(value: Any) -> Any:
        if not isinstance(value, ir.IRNode) or len(value.get_size()) < 3:
            return value
        value.realize()  # else what else uses it computes it once more
        shape = tuple(map(int, value.get_size()))  # numbers, as the format is named
        packed = packed_strides(shape, last)
        return ir.ExternKernel.require_exact_strides(value, packed)

    w = arguments[1] if named.get("filters") is not None else None  # of which packed filters are read
    return tuple(value if value is w else required(value) for value in arguments), named


def state_memory_format(node: fx.Node) -> None:
    """Have an operator that the network itself calls name the memory format that it was traced with.

    Then what computes its tensors writes them so. A group norm's result is traced in another format than its input,
    and the operator would copy it.
    """
    call = ARGUMENTS[node.target](*node.args, **node.kwargs)
    if call.channels_last is not None or not has_numbers(node):
        return
    values = values_of(call)
    if values.x.dim() == 3:  # whose memory format strides alone leave open
        return
    with values.x.fake_mode:
        _write(node, call._replace(channels_last=values.layout().channels_last))


def turn_last(writing: Writing) -> None:
    """Have the 2-D operators that the network itself calls run channels last, where FindDBs answer all of them so.

    Where one stayed channels first, tensors would be copied between it and its neighbours. Nodes are marked for the
    lowering, and say what they were traced with: who reads strides (views of outputs, `as_strided`, operators of a
    fixed stride order) is given these by Inductor, as it gives them where it turns convolutions itself.
    """
    operators = [node for node in writing.graph.nodes if node.target is OPERATORS[Forward] and _is_first(node)]
    calls = [Forward(*node.args, **node.kwargs) for node in operators]
    problems = [writing.served(call._replace(channels_last=True)) for call in calls]
    if None in problems:
        return
    for node, call, problem in zip(operators, calls, problems, strict=True):
        assert problem is not None
        _write(node, call)
        node.meta[_TURNED] = True
        writing.put_in.append(problem)


def turn_saved(graph: fx.Graph) -> None:
    """Have tensors be cast to channels last at once that operators read so, and that are kept for backward.

    Inductor does that for its own convolutions. Else it casts what a graph returns in the memory format that was
    traced, and the operators copy it.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    readers = (*CONVOLUTIONS, *OPERATORS.values(), output.target)
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if node.target is not prims.convert_element_type.default or value.dim() < 3 or not value.is_contiguous():
            continue
        if any(map(runs_last, node.users)) and all(user.target in readers for user in node.users):
            with value.fake_mode:
                node.meta["val"] = dense(value, layout_like(value, channels_last=True))


def _write(node: fx.Node, call: Call) -> None:
    """Have a node make a call whose memory format is given by name."""
    node.args, node.kwargs = spelt(call)


def _is_first(node: fx.Node) -> bool:
    """Whether an operator's tensors are 2-D, of sizes that are numbers, and channels first as it was traced."""
    value = node.meta["val"]
    return value.dim() == 4 and has_numbers(node) and bool(value.is_contiguous())


def runs_last(node: fx.Node) -> bool:
    """Whether a step is an operator that is known to run channels last."""
    return node.target in ARGUMENTS and bool(node.meta.get(_TURNED) or node.kwargs.get("channels_last"))


def lying_last(graph: fx.Graph, ranks: SpatialRanks = frozenset()) -> set[fx.Node]:
    """The steps whose results will lie channels last, as far as is known, whatever they were traced with.

    What was traced so, convolutions and operators that run so, and what is computed of these element by element, or
    joined by channels. It says what is fast, and may be wrong: Inductor lays out what is point-wise as it likes.

    Args:
        ranks: the spatial ranks of PyTorch's own convolutions that Inductor will turn.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = known_value(node)
        if value is None or value.dim() < 4:
            continue
        if _is_written_last(node, ranks):
            found.add(node)
        elif is_pointwise(node) or (node.target is aten.cat.default and node.args[1:] == (1,)):
            read = (each for each in node.all_input_nodes if _is_as_large(each, value))
            is_joined = [each in found for each in read]
            if is_joined and all(is_joined):
                found.add(node)
    return found


def _is_written_last(node: fx.Node, ranks: SpatialRanks) -> bool:
    """Whether a step was traced channels last, or is a convolution that runs so."""
    value = node.meta["val"]
    source = node.args[0] if node.target is operator.getitem else node
    is_turned = node.target is aten.convolution.default and value.dim() - 2 in ranks
    return is_turned or runs_last(source) or is_last(value)


def _is_as_large(node: fx.Node, value: Any) -> bool:
    """Whether a step gives images of as many places as others."""
    read = known_value(node)
    return read is not None and read.dim() == value.dim() and read.shape[2:] == value.shape[2:]


def memory_formats(graph: fx.Graph) -> dict[fx.Node, bool]:
    """The forward operators whose memory format is known as they are lowered, and whether that is channels last."""
    known = {}
    for node in graph.nodes:
        if node.target is OPERATORS[Forward] and len(node.args) > 1 and has_numbers(node):
            last = True if node.meta.get(_TURNED) else node.kwargs.get("channels_last")
            known.update({} if last is None else {node: last})
    return known


def prefers_channels_last(graph: fx.Graph) -> bool:
    """Whether Inductor would turn this graph's 2-D convolutions to channels last, the operators' ones among them."""
    from torch._inductor.graph import GraphLowering

    read = SimpleNamespace(graph=_with_convolutions(graph))
    try:
        return bool(GraphLowering.decide_layout_opt(read, is_inference=not trains(graph)))
    except (AttributeError, TypeError, KeyError):  # it is Inductor's own, and may change
        return False


def _with_convolutions(graph: fx.Graph) -> fx.Graph:
    """The graph, or a copy in which PyTorch's own convolutions stand where it has operators."""
    if not any(node.target is OPERATORS[Forward] for node in graph.nodes):
        return graph
    copied = copy_of(graph)
    for node in list(copied.nodes):
        if node.target is OPERATORS[Forward]:
            _as_convolution(copied, node)
    return copied


def _as_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Put PyTorch's own convolution where the operator is, without what follows it."""
    call = Forward(*node.args, **node.kwargs)
    plain = (False, [0] * len(call.stride))
    with graph.inserting_before(node):
        made = graph.call_function(
            aten.convolution.default,
            (call.x, call.w, call.bias, call.stride, call.padding, call.dilation, *plain, call.groups),
        )
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
