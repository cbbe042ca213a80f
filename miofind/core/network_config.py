"""The text that names a problem: written, and read back.

Canonical and readable, of every field that changes the answer. A field at its default is left out, so that fields
which come later void no stored result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

from miofind.core.epilogue import Epilogue
from miofind.core.tensor import ConvolutionDescriptor, TensorDescriptor
from miofind.errors import InvalidProblemError, brief

_DEFAULT_MATH = "ieee"
_SIZES = r"\d{1,10}(?:x\d{1,10}){0,2}"
_NETWORK_CONFIG = re.compile(
    rf"conv[123]d-(?P<direction>[a-z_]+)-n(?P<n>\d{{1,10}})-c(?P<c>\d{{1,10}})-i(?P<i>{_SIZES})-k(?P<k>\d{{1,10}})-f(?P<f>{_SIZES})"
    rf"(?:-p(?P<before>{_SIZES})(?:_(?P<after>{_SIZES}))?)?(?:-s(?P<s>{_SIZES}))?(?:-d(?P<d>{_SIZES}))?(?:-g(?P<g>\d{{1,10}}))?"
    r"-(?P<dtype>[a-z0-9.]+)-(?P<layout>[A-Z.]+)(?:-(?P<math>[a-z0-9]+))?(?:-e\.(?P<epilogue>[a-z0-9_.]+))?",
    re.ASCII,
)


class ConvolutionArguments(TypedDict):
    """What `ProblemDescription.convolution` takes."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    direction: str
    dtype: dict[str, str]
    layout: dict[str, str]
    math: str
    epilogue: str


def write_network_config(
    direction: str, tensors: Mapping[str, TensorDescriptor], conv: ConvolutionDescriptor, math: str, epilogue: Epilogue
) -> str:
    """The canonical text of a problem.

    Args:
        direction: "forward", "backward_data" or "backward_weights".
        tensors: the descriptors of "x", "w" and "y", in this order.
        conv: padding, strides, dilations and groups.
        math: "ieee" or "tf32".
        epilogue: what is done to the sums.
    """
    x, w, rank = tensors["x"].shape, tensors["w"].shape, len(conv.stride)
    parts = [f"conv{rank}d", direction, f"n{x[0]}", f"c{x[1]}", f"i{_cross(x[2:])}", f"k{w[0]}", f"f{_cross(w[2:])}"]
    if any(conv.pad_before) or any(conv.pad_after):
        same = conv.pad_before == conv.pad_after
        parts.append(f"p{_cross(conv.pad_before)}" + ("" if same else f"_{_cross(conv.pad_after)}"))
    if conv.stride != (1,) * rank:
        parts.append(f"s{_cross(conv.stride)}")
    if conv.dilation != (1,) * rank:
        parts.append(f"d{_cross(conv.dilation)}")
    if conv.groups != 1:
        parts.append(f"g{conv.groups}")
    for values in ([t.dtype.value for t in tensors.values()], [t.layout.value for t in tensors.values()]):
        parts.append(values[0] if len(set(values)) == 1 else ".".join(values))
    if math != _DEFAULT_MATH:
        parts.append(math)
    if epilogue:
        parts.append(f"e.{epilogue.text}")
    return "-".join(parts)


def end_of_fused(bare: str) -> str:
    """A text behind those of a bare problem and its forms with an epilogue, which follow each other in order."""
    return f"{bare}-e/"  # what comes next to "-e."


def parse_network_config(text: str) -> ConvolutionArguments:
    """What a text names, as the arguments of `ProblemDescription.convolution`, which checks the values.

    Raises:
        InvalidProblemError: the text has not the form of a network_config.
    """
    if not isinstance(text, str):
        raise InvalidProblemError(f"network_config={brief(text)} must be a string")
    match = _NETWORK_CONFIG.fullmatch(text)
    if match is None:
        raise InvalidProblemError(f"{text!r} is not a network_config")
    rank = int(text[4])
    spatial, taps, groups = _sizes(match["i"], rank, 1), _sizes(match["f"], rank, 1), int(match["g"] or 1)
    before = _sizes(match["before"], rank, 0)
    after = before if match["after"] is None else _sizes(match["after"], rank, 0)
    if not len(spatial) == len(taps) == len(before) == len(after) == rank:
        raise InvalidProblemError(f"{text!r} must have {rank} sizes a field")
    if groups < 1:
        raise InvalidProblemError(f"groups={groups} must be at least 1")
    return ConvolutionArguments(
        x=(int(match["n"]), int(match["c"]), *spatial),
        w=(int(match["k"]), max(1, int(match["c"]) // groups), *taps),
        padding=tuple(zip(before, after, strict=True)),
        stride=_sizes(match["s"], rank, 1),
        dilation=_sizes(match["d"], rank, 1),
        groups=groups,
        direction=match["direction"],
        dtype=_tensors(match["dtype"], "dtype", text),
        layout=_tensors(match["layout"], "layout", text),
        math=match["math"] or _DEFAULT_MATH,
        epilogue=match["epilogue"] or "",
    )


def _cross(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _sizes(value: str | None, rank: int, default: int) -> tuple[int, ...]:
    return (default,) * rank if value is None else tuple(map(int, value.split("x")))


def _tensors(value: str, field_name: str, text: str) -> dict[str, str]:
    values = value.split(".")
    if len(values) not in (1, 3):
        raise InvalidProblemError(f"{text!r} must name one {field_name} or three")
    return dict(zip("xwy", values * 3 if len(values) == 1 else values, strict=True))
