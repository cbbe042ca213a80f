"""A convolution or one of its gradients in one call: found once, then run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

from miofind.api.array_call import call
from miofind.api.directions import BACKWARD_DATA, BACKWARD_WEIGHTS, FORWARD
from miofind.api.keywords import CallArguments, DataArguments, ForwardArguments, spelled_out
from miofind.api.repeated import MISS, like_last
from miofind.core.arguments import A
from miofind.runtime.runner import OutputStatistics, ParameterGradients


@overload
def convolution(
    x: A, w: A, *, out: A | None = None, statistics: Literal[False] = False, **arguments: Unpack[ForwardArguments]
) -> A: ...
@overload
def convolution(
    x: A,
    w: A,
    *,
    out: tuple[A | None, A | None, A | None] | None = None,
    statistics: Literal[True],
    **arguments: Unpack[ForwardArguments],
) -> OutputStatistics[A]: ...
@spelled_out(ForwardArguments, "out", "statistics")
def convolution(
    x: Any, w: Any, *, out: Any = None, workspace: Any = None, stream: Any = None, handle: Any = None, **arguments: Any
) -> Any:
    """y = x * w, with an epilogue where one is asked for: the fastest solution, found once for each problem.

    An epilogue computes activation(alpha * (x * w) * scale + bias + channel_bias + beta * residual) in the type that
    products are summed in; with residual_position="after" the residual is added to what the activation gives. What is
    left out is not computed.

    Args:
        x: (n, c, *spatial), 1 to 3 spatial dimensions, or (c, *spatial), one image without a batch. Channels first or
            last; inputs that are not packed so are copied. A batch of 0 gives one of 0.
        w: (k, c/groups, *filter).
        arguments: padding, stride, dilation, groups, math as in `ProblemDescription.convolution`; options, handle as in
            `find_solutions`; out, workspace, stream as in `run_solution`. Of the epilogue: scale, bias, channel_bias,
            residual, alpha, beta, low, high and slope as in `run_solution`, with scale and bias both of y's dtype or
            both float32; residual_position, "before" (if left out) or "after" the activation; activation, a name of
            `miofind.Activation`, or "relu6", which is clamp with its bounds of 0 and 6; statistics=True for the sum and
            sum of squares of each channel of y.

    Returns:
        (n, k, *out_spatial), of the kind of x; its layout follows `out` if given, else x. With statistics an
        `OutputStatistics`: y, and sum and sum_of_squares, (k,), float32 (float64 for float64), of y as it is stored.
    """
    if out is not None:
        made = like_last(x, w, out, workspace, stream, handle, arguments)
        if made is not MISS:
            return made
        arguments["out"] = out
    if workspace is not None or stream is not None:
        arguments |= {"workspace": workspace, "stream": stream}
    arguments["handle"] = handle
    return call(FORWARD, x, w, None, arguments)


@spelled_out(DataArguments)
def convolution_backward_data(
    dy: A, w: A, x_shape: Sequence[int], *, out: A | None = None, **arguments: Unpack[DataArguments]
) -> A:
    """dx: the gradient of a convolution's input.

    Args:
        dy: (n, k, *out_spatial), or (k, *out_spatial), as in `convolution`.
        w: (k, c/groups, *filter).
        x_shape: (n, c, *spatial) of the forward convolution, or (c, *spatial).
        out: dx, as in `run_solution`.
        arguments: as in `convolution`, but of the epilogue these: residual, (n, c, *spatial), a gradient that is added;
            derivative, the activation that made the forward x, one of `miofind.Activation` or "relu6", by whose
            derivative the sum is multiplied; saved, (n, c, *spatial), at what: for relu, clamp and leaky_relu what the
            activation gave or was given, for silu, gelu, gelu_tanh and hardswish what it was given; alpha, beta, low,
            high and slope. dx = (alpha * gradient + beta * residual) * derivative(saved).

    Returns:
        (n, c, *spatial), of the kind of dy.
    """
    result: A = call(BACKWARD_DATA, dy, w, x_shape, {"out": out, **arguments})
    return result


@overload
def convolution_backward_weights(
    dy: A,
    x: A,
    w_shape: Sequence[int],
    *,
    out: A | None = None,
    bias_gradient: Literal[False] = False,
    **arguments: Unpack[CallArguments],
) -> A: ...
@overload
def convolution_backward_weights(
    dy: A,
    x: A,
    w_shape: Sequence[int],
    *,
    out: tuple[A | None, A | None] | None = None,
    bias_gradient: Literal[True],
    **arguments: Unpack[CallArguments],
) -> ParameterGradients[A]: ...
@spelled_out(CallArguments, "out", "bias_gradient")
def convolution_backward_weights(dy: Any, x: Any, w_shape: Sequence[int], **arguments: Any) -> Any:
    """dw: the gradient of a convolution's filter.

    Args:
        dy: (n, k, *out_spatial), or (k, *out_spatial), as in `convolution`.
        x: (n, c, *spatial), or (c, *spatial).
        w_shape: (k, c/groups, *filter).
        arguments: as in `convolution`, without those of an epilogue; bias_gradient=True for the sum of dy of each
            channel.

    Returns:
        (k, c/groups, *filter), of the kind of dy. With bias_gradient a `ParameterGradients`: dw, and bias_gradient,
        (k,), of dw's dtype, or of the dtype that it has in `out`.
    """
    return call(BACKWARD_WEIGHTS, dy, x, w_shape, arguments)
