"""Fused convolutions: the epilogue reads the wrong numbers, comes in another order, or leaves a part out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from miofind.core.epilogue import Activation, EpilogueParameters
from miofind.reference.convolution import round_once
from miofind.reference.epilogue import (
    activated,
    apply_epilogue,
    before_activation,
    derivative_terms,
    differentiated,
)
from mutants.base import conv
from mutants.host import Call, Wide, control, mutant

EVERYTHING = conv(epilogue="scale.bias.channel_bias.residual.relu")
LAST = conv(epilogue="scale.bias.channel_bias.residual.relu", layout="NHWC", dtype="float16")
BIAS_RELU = conv(epilogue="bias.relu", dtype="float16", layout="NHWC")
CLAMP = conv(epilogue="bias.clamp", dtype="bfloat16")
LEAKY = conv(epilogue="leaky_relu")
AFTER = conv(epilogue="bias.silu.residual", dtype="float16", layout="NHWC")
BEFORE = conv(epilogue="residual.relu", dtype="bfloat16", layout="NHWC")
SILU = conv(epilogue="bias.silu")
GELU = conv(epilogue="gelu", dtype="float16")
WIDE_BIAS = conv(epilogue="float32.bias.silu", dtype="float16")
SCALE = conv(epilogue="scale", dtype="float16")
MASKED = conv(direction="backward_data", epilogue="residual.drelu", dtype="float16", layout="NHWC")
CLAMPED = conv(direction="backward_data", epilogue="residual.dclamp", dtype="bfloat16")
LEAKY_GRADIENT = conv(direction="backward_data", epilogue="dleaky_relu")
SILU_GRADIENT = conv(direction="backward_data", epilogue="residual.dsilu", dtype="float16")
GELU_GRADIENT = conv(direction="backward_data", epilogue="dgelu", layout="NHWC")
HARDSWISH_GRADIENT = conv(direction="backward_data", epilogue="dhardswish", dtype="bfloat16")
LONG = conv(x=(2, 64, 9, 9), w=(8, 32, 3, 3), dtype="float16", epilogue="bias.relu")


def _with_numbers(call: Call, **changed: float | None) -> None:
    parameters = replace(call.parameters, **changed)  # type: ignore[arg-type]
    call.write(apply_epilogue(call.problem, call.sums(), call.tensors, parameters))


def _zeros(call: Call, name: str) -> Wide:
    return np.zeros(call.tensors[name].shape)


@mutant(BIAS_RELU)
def bias_ignored(call: Call) -> None:
    """The bias is not added."""
    call.write(call.finished(call.sums(), bias=_zeros(call, "bias")))


@mutant(EVERYTHING)
def scale_ignored(call: Call) -> None:
    """The scale is not multiplied by."""
    call.write(call.finished(call.sums(), scale=_zeros(call, "scale") + 1))


@mutant(LAST)
def residual_ignored(call: Call) -> None:
    """The residual is not added."""
    call.write(call.finished(call.sums(), residual=_zeros(call, "residual")))


@mutant(BIAS_RELU)
def activation_ignored(call: Call) -> None:
    """Results do not go through the activation."""
    call.write(before_activation(call.problem, call.sums(), call.tensors, call.parameters))


@mutant(LONG)
def bias_of_each_split(call: Call) -> None:
    """Both parts of a sum get the bias."""
    call.write(call.finished(call.sums(), bias=2 * call.tensors["bias"].astype(np.float64)))


@mutant(EVERYTHING)
def activation_of_each_split(call: Call) -> None:
    """Parts of a sum go through the activation before they are added up."""
    w = call.inputs["w"]
    first = np.where(np.arange(w.shape[1])[:, None, None] == 0, w, 0.0)
    nothing = {name: _zeros(call, name) for name in ("bias", "channel_bias", "residual")}
    part = call.finished(call.sums(w=first), **nothing)
    call.write(part + call.finished(call.sums(w=w - first)))


@mutant(BEFORE)
def activation_before_the_residual(call: Call) -> None:
    """The residual is added after the activation, where it comes before it."""
    call.write(_moved(call, "relu.residual"))


@mutant(AFTER)
def activation_after_the_residual(call: Call) -> None:
    """The residual is added before the activation, where it comes after it."""
    call.write(_moved(call, "bias.residual.silu"))


def _moved(call: Call, epilogue: str) -> Wide:
    other = conv(epilogue=epilogue, dtype=call.problem.y.dtype)
    return apply_epilogue(other, call.sums(), call.tensors, call.parameters)


@mutant(EVERYTHING)
def scale_and_bias_swapped(call: Call) -> None:
    """The scale is added and the bias multiplied by."""
    scale, bias = call.tensors["scale"], call.tensors["bias"]
    call.write(call.finished(call.sums(), scale=bias, bias=scale))


@mutant(EVERYTHING)
def bias_before_the_scale(call: Call) -> None:
    """The bias is scaled, too."""
    scale, bias = (call.tensors[name].astype(np.float64) for name in ("scale", "bias"))
    call.write(call.finished(call.sums(), bias=scale * bias))


@mutant(CLAMP)
def bounds_ignored(call: Call) -> None:
    """Results are clamped to PyTorch's bounds of relu6, whatever the run's."""
    _with_numbers(call, low=0.0, high=6.0)


@mutant(CLAMP)
def upper_bound_ignored(call: Call) -> None:
    """Results have no upper bound."""
    _with_numbers(call, high=float("inf"))


@mutant(LEAKY)
def slope_ignored(call: Call) -> None:
    """The slope is the default, whatever the run's."""
    _with_numbers(call, slope=None)


@mutant(AFTER)
def beta_ignored(call: Call) -> None:
    """The residual is added as it is."""
    _with_numbers(call, beta=1.0)


@mutant(SCALE)
def alpha_ignored(call: Call) -> None:
    """Sums are not multiplied by alpha."""
    _with_numbers(call, alpha=1.0)


@mutant(LEAKY)
def numbers_of_the_first_run(call: Call) -> None:
    """The run's numbers are those of the first run, as in a graph that was captured then."""
    kept = call.state.setdefault("numbers", call.parameters)
    call.write(apply_epilogue(call.problem, call.sums(), call.tensors, kept))


@mutant(SCALE)
def scale_of_the_first_run(call: Call) -> None:
    """The scale is multiplied into the weights once, and kept by its address."""
    kept = call.state.setdefault(call.tensors["scale"].ctypes.data, call.tensors["scale"].copy())
    call.write(call.finished(call.sums(), scale=kept))


@mutant(BEFORE)
def residual_of_the_neighbouring_pixel(call: Call) -> None:
    """The residual is that of the next pixel of its row."""
    call.write(call.finished(call.sums(), residual=np.roll(call.tensors["residual"], 1, axis=-1)))


@mutant(LAST)
def residual_in_another_layout(call: Call) -> None:
    """The residual is read channels first, and lies channels last."""
    residual = call.tensors["residual"]
    there = np.moveaxis(residual, 1, -1).reshape(residual.shape)
    call.write(call.finished(call.sums(), residual=there))


@mutant(AFTER)
def residual_of_the_last_pixel_missing(call: Call) -> None:
    """The last pixel of the last image gets no residual."""
    residual = call.tensors["residual"].copy()
    residual[-1, :, -1, -1] = 0
    call.write(call.finished(call.sums(), residual=residual))


@mutant(BIAS_RELU)
def channels_of_the_first_group(call: Call) -> None:
    """Each group's channels get the bias of the first group's."""
    size = call.problem.k // call.problem.groups
    bias = call.tensors["bias"][np.arange(call.problem.k) % size]
    call.write(call.finished(call.sums(), bias=bias))


@mutant(EVERYTHING)
def wrong_channel_at_the_border_of_a_group(call: Call) -> None:
    """The first channel of the second group gets the scale of the channel before it."""
    size = call.problem.k // call.problem.groups
    scale = call.tensors["scale"].copy()
    scale[size] = scale[size - 1]
    call.write(call.finished(call.sums(), scale=scale))


@mutant(EVERYTHING)
def channel_bias_of_another_image(call: Call) -> None:
    """Each image gets what is to be added to the next one."""
    call.write(call.finished(call.sums(), channel_bias=np.roll(call.tensors["channel_bias"], 1, axis=0)))


@mutant(LAST)
def channel_bias_of_the_first_image(call: Call) -> None:
    """All images get what is to be added to the first one."""
    first = call.tensors["channel_bias"][:1]
    call.write(call.finished(call.sums(), channel_bias=np.broadcast_to(first, call.tensors["channel_bias"].shape)))


@mutant(BIAS_RELU)
def relu_loses_nan(call: Call) -> None:
    """The larger of NaN and 0 is 0."""
    call.write(np.fmax(before_activation(call.problem, call.sums(), call.tensors, call.parameters), 0.0))


@mutant(GELU)
def another_gelu(call: Call) -> None:
    """The other one, gelu_tanh, which differs by 0.0005 at most."""
    call.write(activated(call.parameters.alpha * call.sums(), Activation.GELU_TANH))


@mutant(SILU)
def coarse_sigmoid(call: Call) -> None:
    """The sigmoid comes from a hyperbolic tangent of eleven bits, as PTX's tanh.approx."""
    v = before_activation(call.problem, call.sums(), call.tensors, call.parameters)
    coarse = round_once(np.tanh(v / 2), call.problem.y.dtype).astype(np.float16).astype(np.float64)
    call.write(v * (0.5 + 0.5 * coarse))


@mutant(GELU)
def cancelling_gelu(call: Call) -> None:
    """Far below 0 the sum of 1 and a hyperbolic tangent of few bits cancels."""
    v = call.parameters.alpha * call.sums()
    cubic = 0.7978845608028654 * (v + 0.044715 * v**3)
    call.write(0.5 * v * (1 + np.tanh(cubic).astype(np.float16).astype(np.float64)))


@mutant(SILU)
def overflowing_sigmoid(call: Call) -> None:
    """Large negative numbers times 1 / exp(-v) is NaN where that is infinite."""
    v = before_activation(call.problem, call.sums(), call.tensors, call.parameters)
    small = np.exp(-v.astype(np.float32)).astype(np.float64)
    call.write(v * (1 - small / (1 + small)))


@mutant(LONG)
def rounds_twice_unsaid(call: Call) -> None:
    """Sums are rounded to float16 before the epilogue, which the solver does not say."""
    call.write(call.finished(round_once(call.sums(), call.problem.y.dtype).astype(np.float64)))


@mutant(WIDE_BIAS)
def wide_bias_in_half(call: Call) -> None:
    """A bias of float32 is rounded to float16."""
    call.write(call.finished(call.sums(), bias=call.tensors["bias"].astype(np.float16)))


@mutant(BEFORE)
def adds_in_the_residual(call: Call) -> None:
    """The result is put together where the residual lies."""
    call.tensors["residual"][...] = round_once(call.finished(call.sums()), call.problem.y.dtype)
    call.out[...] = call.tensors["residual"]


@mutant(AFTER)
def residual_is_the_output(call: Call) -> None:
    """What the output holds is added in place of the residual."""
    call.write(call.finished(call.sums(), residual=call.out.astype(np.float64)))


@control(LONG, rounds_twice=True)
def says_that_it_rounds_twice(call: Call) -> None:
    """Sums are rounded to float16 before the epilogue, and the solver says so."""
    call.write(call.finished(round_once(call.sums(), call.problem.y.dtype).astype(np.float64)))


@control(conv(dtype="bfloat16", epilogue="bias.channel_bias.gelu"), rounds_twice=True)
def says_that_it_rounds_twice_to_bfloat16(call: Call) -> None:
    """Sums are rounded to bfloat16 before the epilogue, and the solver says so."""
    call.write(call.finished(round_once(call.sums(), call.problem.y.dtype).astype(np.float64)))


@control(EVERYTHING, deterministic=False)
def epilogue_in_another_order(call: Call) -> None:
    """The summands are added up first, and alpha is multiplied into the scale, in float32."""
    single = {
        name: np.asarray(call.tensors[name], np.float32) for name in ("scale", "bias", "channel_bias", "residual")
    }
    numbers: EpilogueParameters = call.parameters
    factor = (np.float32(numbers.alpha) * single["scale"])[:, None, None]
    added = (single["bias"] + single["channel_bias"])[:, :, None, None] + np.float32(numbers.beta) * single["residual"]
    v = factor * call.sums().astype(np.float32) + added
    call.write(activated(v.astype(np.float64), Activation.RELU))


def _accumulated(call: Call) -> Wide:
    """What a derivative is multiplied with."""
    return before_activation(call.problem, call.sums(), call.tensors, call.parameters)


@mutant(MASKED)
def mask_before_the_residual(call: Call) -> None:
    """The residual is added to what is multiplied by the derivative already."""
    residual = call.parameters.beta * call.tensors["residual"].astype(np.float64)
    call.write(call.finished(call.sums(), residual=_zeros(call, "residual")) + residual)


@mutant(MASKED)
def mask_of_the_neighbouring_pixel(call: Call) -> None:
    """The derivative is taken at the next pixel of the row."""
    call.write(call.finished(call.sums(), saved=np.roll(call.tensors["saved"], 1, axis=-1)))


@mutant(MASKED)
def mask_keeps_zeros(call: Call) -> None:
    """The derivative of relu at 0 is 1."""
    call.write(np.where(call.tensors["saved"] < 0, 0.0, _accumulated(call)))


@mutant(MASKED)
def mask_keeps_negative_zeros(call: Call) -> None:
    """The mask is the sign's bit."""
    call.write(np.where(np.signbit(call.tensors["saved"]), 0.0, _accumulated(call)))


@mutant(MASKED)
def mask_drops_nan(call: Call) -> None:
    """Where what was saved is NaN the gradient is 0, as it is not larger than 0."""
    call.write(np.where(call.tensors["saved"] > 0, _accumulated(call), 0.0))


@mutant(MASKED)
def mask_multiplies(call: Call) -> None:
    """An infinity times the derivative 0 is NaN."""
    call.write(_accumulated(call) * np.where(call.tensors["saved"] <= 0, 0.0, 1.0))


@mutant(MASKED)
def nothing_where_no_tap_meets(call: Call) -> None:
    """Pixels that the stride leaves out are 0, without the residual."""
    ones = {name: np.ones_like(values) for name, values in call.inputs.items()}
    met = call.sums(**ones) != 0
    call.write(np.where(met, call.finished(call.sums()), 0.0))


@mutant(MASKED)
def mask_of_the_gradient(call: Call) -> None:
    """The mask is that of the sum, not of what was saved."""
    v = _accumulated(call)
    call.write(np.where(v <= 0, 0.0, v))


@mutant(CLAMPED)
def bounds_belong_to_the_inside(call: Call) -> None:
    """The derivative of clamp at its bounds is 1."""
    saved, numbers = call.tensors["saved"].astype(np.float64), call.parameters
    call.write(np.where((saved < numbers.low) | (saved > numbers.high), 0.0, _accumulated(call)))


@mutant(CLAMPED)
def upper_bound_of_a_derivative_ignored(call: Call) -> None:
    """The derivative is that of a clamp without an upper bound."""
    numbers = replace(call.parameters, high=float("inf"))
    call.write(apply_epilogue(call.problem, call.sums(), call.tensors, numbers))


@mutant(LEAKY_GRADIENT)
def slope_of_a_derivative_ignored(call: Call) -> None:
    """The slope is the default, whatever the run's."""
    _with_numbers(call, slope=None)


@mutant(LEAKY_GRADIENT)
def no_slope_at_zero(call: Call) -> None:
    """The derivative of leaky_relu at 0 is 1."""
    saved, v = call.tensors["saved"], _accumulated(call)
    call.write(np.where(saved < 0, call.parameters.numbers(Activation.LEAKY_RELU)[2] * v, v))


@mutant(SILU_GRADIENT)
def derivative_at_the_result(call: Call) -> None:
    """The derivative is taken at what the activation gave, not at what it was given."""
    call.write(call.finished(call.sums(), saved=activated(call.tensors["saved"].astype(np.float64), Activation.SILU)))


@mutant(SILU_GRADIENT)
def activation_for_its_derivative(call: Call) -> None:
    """The sum is multiplied by the activation."""
    call.write(_accumulated(call) * activated(call.tensors["saved"].astype(np.float64), Activation.SILU))


@mutant(GELU_GRADIENT)
def derivative_of_another_gelu(call: Call) -> None:
    """That of gelu_tanh."""
    saved = call.tensors["saved"].astype(np.float64)
    call.write(differentiated(_accumulated(call), saved, Activation.GELU_TANH))


@mutant(GELU_GRADIENT)
def derivative_without_the_density(call: Call) -> None:
    """The derivative is the factor of the activation alone."""
    factor, _ = derivative_terms(call.tensors["saved"].astype(np.float64), Activation.GELU)
    call.write(_accumulated(call) * factor)


@mutant(HARDSWISH_GRADIENT)
def hardswish_is_curved_at_its_bounds(call: Call) -> None:
    """At -3 and 3 the derivative is that of between."""
    saved, v = call.tensors["saved"].astype(np.float64), _accumulated(call)
    call.write(np.where(saved < -3, 0.0, np.where(saved <= 3, v * (saved / 3 + 0.5), v)))


@control(MASKED, rounds_twice=True)
def masks_behind_a_rounded_gradient(call: Call) -> None:
    """Sums are rounded to float16 before the residual and the mask, and the solver says so."""
    call.write(call.finished(round_once(call.sums(), call.problem.output.dtype).astype(np.float64)))


@control(GELU_GRADIENT, deterministic=False)
def derivative_in_float32(call: Call) -> None:
    """The terms of the derivative are rounded to float32."""
    terms = derivative_terms(call.tensors["saved"].astype(np.float64), Activation.GELU)
    factor, summand = (term.astype(np.float32) for term in terms)
    derivative = (factor + summand).astype(np.float64)
    call.write(np.where(derivative == 0, 0.0, _accumulated(call) * derivative))
