"""Images of few channels, as a network's first convolution reads them, turned to channels last in their own order.

A network is given images channels first, and runs channels last. Inductor makes the copy in tiles of places and of
channels: with three channels its neighbouring threads write to every third element, and each sector of memory is
written to three times. Here the copy has one dimension, along which neighbouring threads write neighbours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from miofind.torch.fused.ops import ARGUMENTS, LIBRARY
from miofind.torch.inductor.graphs import CONVOLUTIONS, HALVES, added_step, is_pointwise, user_visible
from miofind.torch.inductor.memory_formats import runs_last
from miofind.torch.inductor.writing import SpatialRanks
from miofind.torch.override.formats import dense, is_dense, layout_like

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_CHANNELS = 8
"""Of more a place's channels are the half of a sector, or more."""
_LEAST_SIZE = 1 << 18
"""Elements: the copy of fewer takes as long as a launch. Weights of few channels have fewer, too."""

LIBRARY.define("interleaved(Tensor x) -> Tensor")


def _interleaved(x: Any) -> Any:
    """A copy channels last."""
    last = layout_like(x, channels_last=True)
    return x.clone() if is_dense(x, last) else dense(x, last)


LIBRARY.impl("interleaved", _interleaved, "CompositeExplicitAutograd")


def interleave(graph: fx.Graph, last_ranks: SpatialRanks) -> None:
    """Have convolutions that run channels last read images of few channels that were turned in their own order.

    Args:
        last_ranks: the spatial ranks of convolutions that will be channels last, whatever they were traced as.
    """
    if not _is_lowered():
        return
    for node in _given(graph):
        if not _has_few_channels(node):
            continue
        readers = [*_readers(node, last_ranks)]
        if not readers:
            continue
        with graph.inserting_before(next(step for step in graph.nodes if step in readers)):
            turned = added_step(graph, torch.ops.miofind.interleaved.default, node)
        for reader in readers:
            reader.replace_input_with(node, turned)


def _given(graph: fx.Graph) -> dict[fx.Node, None]:
    """What a graph is given, as it is or computed element by element, in order.

    What else is traced channels first may be written channels last.
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        read = node.all_input_nodes
        if node.op == "placeholder" or (read and is_pointwise(node) and all(each in found for each in read)):
            found[node] = None
    return found


def _has_few_channels(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() not in (3, 4, 5) or value.dtype not in HALVES:
        return False
    if not all(isinstance(size, int) for size in value.shape) or value.numel() < _LEAST_SIZE:
        return False
    return 1 < value.shape[1] <= _MOST_CHANNELS and bool(value.is_contiguous())


def _readers(image: fx.Node, last_ranks: SpatialRanks) -> Iterator[fx.Node]:
    """The convolutions that read an image channels last, and the graph's end where it keeps it for a backward pass."""
    spatial_rank = image.meta["val"].dim() - 2
    convolutions = [user for user in image.users if user.target in (*CONVOLUTIONS, *ARGUMENTS)]
    is_kept_last = spatial_rank in last_ranks - {1}  # PyTorch has no such order of one dimension
    found = [user for user in convolutions if runs_last(user) or (user.target in CONVOLUTIONS and is_kept_last)]
    yield from found
    (output,) = image.graph.find_nodes(op="output")
    is_kept = bool(found) and output in image.users and image.op != "placeholder"
    if is_kept and all(output.args[0][i] is not image for i in user_visible(image.graph)):
        yield output


@functools.cache
def _is_lowered() -> bool:
    """Whether Inductor knows how to make the copy: along one dimension."""
    from torch._inductor import lowering

    try:
        lowering.register_lowering(torch.ops.miofind.interleaved.default, type_promotion_kind=None)(_lowered)
    except (AttributeError, TypeError):  # it is Inductor's own, and may change
        return False
    return True


def _lowered(x: Any) -> Any:
    from torch._inductor import lowering

    n, c, *places = x.get_size()
    order = [0, *range(2, len(places) + 2), 1]
    flat = lowering.view(lowering.permute(x, order), [math.prod([n, c, *places])])
    copied = lowering.clone(flat)
    copied.realize()
    return lowering.permute(lowering.view(copied, [n, *places, c]), [0, len(places) + 1, *range(1, len(places) + 1)])
