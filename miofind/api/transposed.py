"""Transposed convolutions: the mirrored directions of a convolution, under PyTorch's shapes.

Where y = x * w turns n, c into n, k, the transposed convolution turns n, k into n, c as its backward data does. Its own
gradients are that convolution's forward and backward weights. Source: PyTorch, torch.nn.functional.conv_transpose2d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack, overload

from miofind.api.array_call import Roles, device_of, run_call
from miofind.api.gradients import (
    NAMES,
    Gradients,
    Wanted,
    checked_names,
    given_outputs,
    refuse_other_dtype,
    refuse_shared_memory,
    refuse_unfit,
    summed_channels,
    with_determinism,
)
from miofind.api.keywords import CallArguments, check_keywords, spelled_out
from miofind.arrays import arrays, operands
from miofind.core.arguments import A, Sizes
from miofind.core.problem import ConvolutionDescriptor, Direction
from miofind.core.tensor import one_size, sizes
from miofind.errors import InvalidArrayError, InvalidProblemError


@spelled_out(CallArguments)
def convolution_transpose(
    x: A,
    w: A,
    *,
    bias: A | None = None,
    output_padding: Sizes = 0,
    out: A | None = None,
    **arguments: Unpack[CallArguments],
) -> A:
    """The transposed convolution of x with w: what the backward data of a convolution makes of its dy.

    Each output has (size - 1) * stride - padding before - padding after + dilation * (filter - 1) + output_padding + 1
    elements along a spatial dimension.

    Args:
        x: (n, c_in, *spatial), or (c_in, *spatial), as in `convolution`.
        w: (c_in, c_out/groups, *filter).
        bias: (c_out,), of the output's library, and of its dtype or the accumulator's (float32, float64 for float64);
            added to the rounded sums, in a pass of that library.
        output_padding: an int or one a dimension, below the stride or the dilation: elements behind the output.
        out: the output, as in `run_solution`; it shares no memory with the bias either.
        arguments: padding (in numbers), stride, dilation, groups, math, options, handle, workspace and stream as in
            `convolution`.

    Returns:
        (n, c_out, *out_spatial), of the kind of x.

    Raises:
        InvalidArrayError, InvalidProblemError: the message names the array or field.
    """
    check_keywords(arguments, "bias", "output_padding", "out")
    mirrored = _mirrored(x, w, output_padding, arguments)
    if bias is not None:
        _check_bias(bias, x, out, mirrored.shape[-len(mirrored.padding) - 1])
    roles = Roles(names={"y": "x"})
    given = {"y": x, "w": w}
    keywords: dict[str, Any] = {**arguments, "padding": mirrored.padding}
    result: A = run_call(Direction.BACKWARD_DATA, given, mirrored.shape, roles, out=out, **keywords)
    if bias is not None:
        index = arrays.view(result, "out").device_index
        with operands.allocating_on(result, arguments.get("stream"), index):
            arrays.add_to_channels(result, bias, len(mirrored.padding), index)
    return result


@overload
def convolution_transpose_gradients(
    dy: A,
    x: A,
    w: A,
    *,
    output_padding: Sizes = 0,
    deterministic: bool = False,
    out: Sequence[A | None] | None = None,
    **arguments: Unpack[CallArguments],
) -> Gradients[A]: ...
@overload
def convolution_transpose_gradients(
    dy: A,
    x: A,
    w: A,
    wanted: Wanted,
    *,
    output_padding: Sizes = 0,
    deterministic: bool = False,
    out: Sequence[A | None] | None = None,
    **arguments: Unpack[CallArguments],
) -> Gradients[A | None]: ...
@spelled_out(CallArguments)
def convolution_transpose_gradients(
    dy: Any,
    x: Any,
    w: Any,
    wanted: Wanted = NAMES,
    *,
    output_padding: Sizes = 0,
    deterministic: bool = False,
    out: Any = None,
    **arguments: Unpack[CallArguments],
) -> Gradients[Any]:
    """The gradients of a transposed convolution by what is wanted of x, w and bias, given dy, that by its result.

    Args:
        dy: (n, c_out, *out_spatial), or (c_out, *out_spatial).
        x, w, output_padding: as in `convolution_transpose`.
        wanted, deterministic, out: as in `convolution_gradients`.
        arguments: as in `convolution_transpose`.

    Raises:
        InvalidArrayError, InvalidProblemError: the message names the array or field.
        InvalidOptionError: `wanted` names something else.
    """
    check_keywords(arguments, "wanted", "output_padding", "deterministic", "out")
    names = checked_names(wanted)
    outs = given_outputs(out, names)
    if out is not None:
        refuse_shared_memory(names, outs, dy, x, w)
    mirrored = _mirrored(x, w, output_padding, arguments)
    shape = arrays.view(dy, "dy").shape
    if shape != mirrored.shape:
        raise InvalidArrayError(f"dy has shape {shape}, the transposed convolution has {mirrored.shape}")
    options = with_determinism(arguments.pop("options", None), deterministic)
    keywords: dict[str, Any] = {**arguments, "padding": mirrored.padding, "options": options}
    if names == ("bias",):
        refuse_unfit({"y": x, "x": dy, "w": w}, keywords)
    dx = dw = total = None
    if "x" in names:
        roles = Roles(x, {"x": "dy", "y": "x"})
        dx = run_call(Direction.FORWARD, {"x": dy, "w": w}, None, roles, out=outs["x"], **keywords)
    if "w" in names:
        roles = Roles(w, {"x": "dy", "y": "x"})
        dw = run_call(Direction.BACKWARD_WEIGHTS, {"y": x, "x": dy}, None, roles, out=outs["w"], **keywords)
    if "bias" in names:
        batch = dy if len(shape) == len(mirrored.padding) + 2 else arrays.with_batch(dy, "dy")
        dtype = arrays.view(w, "w").dtype
        total = summed_channels(batch, "dy", dtype, outs["bias"], arguments.get("stream"))
    return Gradients(dx, dw, total)


@dataclass(frozen=True, slots=True)
class _Mirrored:
    """The convolution whose backward data a transposed one is.

    Attributes:
        shape: of its x, the transposed one's output, without a batch where that has none.
        padding: before and after, a pair a dimension.
    """

    shape: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]


def _mirrored(x: Any, w: Any, output_padding: object, arguments: CallArguments) -> _Mirrored:
    """The convolution whose backward data is asked for.

    Raises:
        InvalidArrayError: x and w are not of one transposed convolution.
        InvalidProblemError: a padding that it cannot have.
    """
    image, weights = arrays.view(x, "x").shape, arrays.view(w, "w").shape
    rank = len(weights) - 2
    if rank not in (1, 2, 3) or len(image) not in (rank + 1, rank + 2):
        raise InvalidArrayError(
            f"x has shape {image} and w {weights}: (n, c_in, *spatial), (c_in, c_out/groups, *filter)"
        )
    if image[-rank - 1] != weights[0]:
        raise InvalidArrayError(
            f"x of shape {image} has {image[-rank - 1]} channels, w of shape {weights} {weights[0]}"
        )
    padding = arguments.get("padding", 0)
    if isinstance(padding, str):
        if padding != "valid":
            raise InvalidProblemError(f"padding={padding!r} has no meaning transposed: give it in numbers")
        padding = 0
    groups = one_size(arguments.get("groups", 1), "groups")
    strides, dilations = arguments.get("stride", 1), arguments.get("dilation", 1)
    conv = ConvolutionDescriptor.of(rank, padding=padding, stride=strides, dilation=dilations, groups=groups)
    extra = sizes(output_padding, "output_padding", rank, 0)
    spatial, pairs = [], []
    for i in range(rank):
        spatial.append(_output_size(image[i - rank], weights[i - rank], conv, extra[i], i))
        pairs.append((conv.pad_before[i], _padding_after(conv, extra[i], i)))
    return _Mirrored((*image[: -rank - 1], weights[1] * groups, *spatial), tuple(pairs))


def _output_size(size: int, taps: int, conv: ConvolutionDescriptor, extra: int, i: int) -> int:
    padding = conv.pad_before[i] + conv.pad_after[i]
    result = (size - 1) * conv.stride[i] - padding + conv.dilation[i] * (taps - 1) + extra + 1
    if size < 1 or taps < 1 or result < 1:
        raise InvalidProblemError(
            f"spatial dimension {i} of size {size} gives an output of {result}: at least 1 is needed"
        )
    return result


def _padding_after(conv: ConvolutionDescriptor, extra: int, i: int) -> int:
    """The mirrored convolution's: what is added behind beyond its last step is padding that it has not."""
    stride = conv.stride[i]
    if extra >= max(stride, conv.dilation[i]):
        known = f"the stride {stride} or the dilation {conv.dilation[i]}"
        raise InvalidProblemError(f"output_padding={extra} of dimension {i} must be below {known}")
    beyond = max(0, extra - (stride - 1))
    if beyond > conv.pad_after[i]:
        raise InvalidProblemError(
            f"output_padding={extra} of dimension {i} is served below the stride {stride}, and beyond it by as much as "
            f"there is padding after: pad the output instead"
        )
    return conv.pad_after[i] - beyond


def _check_bias(bias: Any, x: Any, out: Any, channels: int) -> None:
    """Do nothing where a bias can be added to the output.

    Raises:
        InvalidArrayError: it cannot, or would be overwritten before.
    """
    beside, name = (x, "x") if out is None else (out, "out")
    views = {"bias": arrays.view(bias, "bias"), name: arrays.view(beside, name)}
    if views["bias"].shape != (channels,):
        raise InvalidArrayError(f"bias has shape {views['bias'].shape}, the transposed convolution has {(channels,)}")
    refuse_other_dtype(views["bias"].dtype, "bias", views[name].dtype, name)
    device_of(views, Direction.FORWARD)
    arrays.refuse_other_library(bias, "bias", beside, name)
    if out is not None:
        operands.refuse_shared_memory({"out": out}, {"bias": bias})
