"""Forward convolutions of a graph with what follows them: steps of channels, additions, an activation, statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from miofind.torch.fused.calls import Forward
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.inductor.batch_statistics import put_statistics
from miofind.torch.inductor.decompositions import activation_of
from miofind.torch.inductor.graphs import is_widened
from miofind.torch.inductor.writing import Writing

aten, prims = torch.ops.aten, torch.ops.prims
_CONVERSION = prims.convert_element_type.default


def replace_forward(writing: Writing, node: fx.Node, *, fuses: bool = False) -> bool:
    """Whether an operator was put in for a convolution with what follows it: where a FindDB answers.

    Args:
        fuses: whether a kernel must do all of it.
    """
    if put_statistics(writing, node):
        return True
    for chain in _chains(node):
        end = chain.nodes[-1]
        with writing.graph.inserting_before(end):
            made = _put_forward(writing, chain, fuses=fuses)
        if made is not None:
            end.replace_all_uses_with(made)
            for each in reversed(chain.nodes):
                if not each.users:
                    writing.graph.erase_node(each)
        writing.tidy()
        if made is not None:
            return True
    return False


@dataclass(slots=True)
class _Chain:
    """A convolution and what follows it.

    Attributes:
        nodes: in order, the convolution first.
        channel_steps: "sub", "mul" or "add" with what has a number for each channel, on what the convolution gives.
        channel_bias: what is added to each image's channels after them, None for nothing.
        residual: what is added, None for nothing.
        numbers: the activation, and what is done with the residual.
    """

    nodes: list[fx.Node]
    channel_steps: list[tuple[str, fx.Node]] = field(default_factory=list)
    channel_bias: fx.Node | None = None
    residual: fx.Node | None = None
    numbers: Nonlinearity = field(default_factory=Nonlinearity)

    @property
    def is_fused(self) -> bool:
        """Whether anything follows but conversions."""
        added = (self.channel_bias, self.residual)
        return bool(self.channel_steps) or any(added) or self.numbers.activation != "none"


def _chains(convolution: fx.Node) -> list[_Chain]:
    """What follows a convolution and is used by nothing else, as far as it goes, longest first.

    Each ends with a tensor of the convolution's dtype.
    """
    chain, ends = _Chain([convolution]), list[_Chain]()
    while True:
        end = chain.nodes[-1]
        if chain.is_fused and end.meta["val"].dtype == convolution.meta["val"].dtype:
            ends.append(replace(chain, nodes=[*chain.nodes], channel_steps=[*chain.channel_steps]))
        if not _takes_next(chain):
            return ends[::-1]


def _takes_next(chain: _Chain) -> bool:
    """Whether the step after a chain was taken into it."""
    end = chain.nodes[-1]
    if chain.numbers.activation == "none" and (found := activation_of(end)) is not None:
        chain.numbers = replace(found.numbers, beta=chain.numbers.beta)
        chain.nodes += found.steps
        return True
    if len(end.users) != 1:
        return False
    (user,) = end.users
    if user.target is _CONVERSION:
        dtype = chain.nodes[0].meta["val"].dtype
        is_taken = user.args[1] in (dtype, torch.promote_types(torch.float32, dtype))
    else:
        is_taken = any(takes(chain, user) for takes in (_takes_channel_step, _takes_channel_bias, _takes_residual))
    chain.nodes += [user] if is_taken else []
    return is_taken


def _takes_channel_step(chain: _Chain, user: fx.Node) -> bool:
    kinds = {aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.add.Tensor: "add"}
    is_begun = chain.channel_bias is not None or chain.residual is not None or chain.numbers.activation != "none"
    if user.target not in kinds or user.kwargs or is_begun:
        return False
    end, convolution = chain.nodes[-1], chain.nodes[0]
    first, second = user.args
    kind, other = kinds[user.target], second if first is end else first
    is_subtracted = kind != "sub" or first is end
    if not is_subtracted or not _is_of_channels(other, convolution.meta["val"].shape):
        return False
    chain.channel_steps.append((kind, other))
    return True


def _is_of_channels(node: Any, shape: Sequence[int]) -> bool:
    """Whether a step gives a number for each channel of a tensor of that shape."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    ones = (1,) * (len(shape) - 2)
    return tuple(value.shape) in ((shape[1], *ones), (1, shape[1], *ones))


def _takes_channel_bias(chain: _Chain, user: fx.Node) -> bool:
    """Whether a step adds a number to each channel of each image, before anything is added to each element."""
    is_begun = chain.channel_bias is not None or chain.residual is not None or chain.numbers.activation != "none"
    if user.target is not aten.add.Tensor or user.kwargs or is_begun:
        return False
    first, second = user.args
    other, value = second if first is chain.nodes[-1] else first, chain.nodes[0].meta["val"]
    given = other.meta.get("val") if isinstance(other, fx.Node) else None
    shape = (*value.shape[:2], *(1,) * (value.dim() - 2))
    if not isinstance(given, torch.Tensor) or tuple(given.shape) != shape or given.dtype != value.dtype:
        return False
    chain.channel_bias = other
    return True


def _takes_residual(chain: _Chain, user: fx.Node) -> bool:
    if user.target is not aten.add.Tensor or chain.residual is not None or user.kwargs.keys() - {"alpha"}:
        return False
    end, value = chain.nodes[-1], chain.nodes[0].meta["val"]
    first, second = user.args
    is_first = first is end
    other, alpha = second if is_first else first, user.kwargs.get("alpha", 1)
    if first is second or not isinstance(other, fx.Node) or (alpha != 1 and not is_first):
        return False
    if not math.isfinite(alpha):
        return False
    given = other.meta.get("val")
    if not isinstance(given, torch.Tensor):
        return False
    if other.target is _CONVERSION:
        before = other.args[0].meta["val"]
        if before.dtype == value.dtype and is_widened(before, given):
            other, given = other.args[0], before
    if given.shape != value.shape or given.dtype != value.dtype:
        return False
    position = "before" if chain.numbers.activation == "none" else "after"
    chain.residual = other
    chain.numbers = replace(chain.numbers, residual_position=position, beta=float(alpha))
    return True


def _put_forward(writing: Writing, chain: _Chain, *, fuses: bool) -> fx.Node | None:
    """The operator for a chain; with steps of channels, in the first form that a FindDB answers.

    These are scale and bias in float32; weights times the scale and a bias in float32; the same with a bias of x's
    dtype, as a network has whose batch norms are folded.
    """
    x, w, bias, stride, padding, dilation, _, _, groups = chain.nodes[0].args
    numbers, value = chain.numbers, chain.nodes[0].meta["val"]
    call = Forward(
        x,
        w,
        bias,
        None,
        chain.residual,
        numbers.activation,
        stride,
        padding,
        dilation,
        groups,
        numbers.residual_position,
        numbers.beta,
        numbers.low,
        numbers.high,
        numbers.slope,
        writing.is_last(value),
        None if chain.channel_bias is None else writing.step(aten.reshape.default, chain.channel_bias, value.shape[:2]),
    )
    if not chain.channel_steps:
        return writing.put(call, fuses=fuses)
    scale, shift = _scale_and_shift(writing, chain, bias)
    made = writing.put(call._replace(scale=scale, bias=shift), fuses=fuses)
    if made is not None:
        return made
    if scale is not None:
        factors = writing.step(aten.reshape.default, scale, [-1, *(1,) * (value.dim() - 1)])
        product = writing.step(aten.mul.Tensor, w, factors)
        call = call._replace(w=_converted(writing, product, w.meta["val"].dtype))
        made = writing.put(call._replace(bias=shift), fuses=fuses)
    if made is None and shift is not None:
        made = writing.put(call._replace(bias=_converted(writing, shift, value.dtype)), fuses=fuses)
    return made


def _scale_and_shift(writing: Writing, chain: _Chain, bias: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """The factor and the summand of each channel that a chain's steps make together, in float32 or wider."""
    wide = torch.promote_types(torch.float32, chain.nodes[0].meta["val"].dtype)
    scale, shift = None, None if bias is None else _converted(writing, bias, wide)
    for kind, node in chain.channel_steps:
        vector = _converted(writing, writing.step(aten.reshape.default, node, [-1]), wide)
        if kind == "mul":
            scale = vector if scale is None else writing.step(aten.mul.Tensor, scale, vector)
            shift = None if shift is None else writing.step(aten.mul.Tensor, shift, vector)
        elif shift is None:
            shift = writing.step(aten.neg.default, vector) if kind == "sub" else vector
        else:
            shift = writing.step(aten.sub.Tensor if kind == "sub" else aten.add.Tensor, shift, vector)
    return scale, shift


def _converted(writing: Writing, node: fx.Node, dtype: Any) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else writing.step(_CONVERSION, node, dtype)
