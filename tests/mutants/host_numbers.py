"""Numbers are too coarse, or right in the middle of their range alone."""

from __future__ import annotations

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.reference.convolution import reference_on_host, round_once
from mutants.base import conv
from mutants.host import Array, Call, Wide, mutant

SINGLE = conv()
DATA = conv(direction="backward_data")
WEIGHTS = conv(direction="backward_weights")
HALF = conv(dtype="float16")
BRAIN = conv(dtype="bfloat16", layout="NHWC")
DOUBLE = conv(dtype="float64")
TF32 = conv(math="tf32")
LONG = ProblemDescription.convolution(x=(2, 64, 6, 6), w=(6, 64, 3, 3), dtype="float16")
LONG_SINGLE = ProblemDescription.convolution(x=(2, 128, 6, 6), w=(6, 128, 3, 3))

_LEAST_HALF, _MOST_HALF = 2.0**-14, 65504.0
_LEAST_SINGLE, _MOST_SINGLE = 2.0**-126, 3.4028234663852886e38


def _with_inputs(call: Call, change: object) -> Wide:
    """The sums of inputs that are rounded, clamped or otherwise changed."""
    return call.sums(**{name: change(array).astype(np.float64) for name, array in call.inputs.items()})  # type: ignore[operator]


def _flushed(values: Array, least: float) -> Array:
    return np.where(np.abs(values) < least, 0.0, values)


@mutant(LONG)
def sums_in_half(call: Call) -> None:
    """Sums are kept in float16."""
    x, w = call.inputs["x"], call.inputs["w"]
    one = ProblemDescription.convolution(x=(2, 1, 6, 6), w=(6, 1, 3, 3))
    total = np.zeros(call.problem.y.shape, np.float16)
    for i in range(w.shape[1]):
        total = (total + reference_on_host(one, x=x[:, i : i + 1], w=w[:, i : i + 1])).astype(np.float16)
    call.out[...] = total


@mutant(SINGLE)
def inputs_in_tf32(call: Call) -> None:
    """Inputs are cut to TF32 though the problem wants ieee."""
    call.write(_with_inputs(call, lambda a: (a.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)))


@mutant(WEIGHTS)
def inputs_in_half(call: Call) -> None:
    """Inputs are rounded to float16."""
    call.write(_with_inputs(call, lambda a: a.astype(np.float16)))


@mutant(DOUBLE)
def double_in_single(call: Call) -> None:
    """float64 is computed as float32."""
    call.write(_with_inputs(call, lambda a: a.astype(np.float32)))


@mutant(HALF)
def cut_to_half(call: Call) -> None:
    """The output is cut, not rounded, to float16."""
    values = call.sums()
    nearest = values.astype(np.float16)
    is_beyond = np.abs(nearest.astype(np.float64)) > np.abs(values)
    call.out[...] = np.where(is_beyond, np.nextafter(nearest, np.float16(0)), nearest)


@mutant(BRAIN)
def cut_to_bfloat16(call: Call) -> None:
    """The output is cut, not rounded, to bfloat16."""
    bits = call.sums().astype(np.float32).view(np.uint32) & 0xFFFF0000
    call.out[...] = bits.view(np.float32)


@mutant(LONG_SINGLE)
def error_grows_with_length(call: Call) -> None:
    """A small share of each product is lost, which a long sum shows."""
    call.write(call.sums() * (1 - 2.0**-22 * np.sqrt(call.problem.reduction_length)))


@mutant(SINGLE)
def a_wider_bound_than_declared(call: Call) -> None:
    """Errors are a hundred times those of direct summation, which the solver does not say."""
    values = call.sums()
    call.write(values + (values != np.round(values)) * 2e-5)


@mutant(SINGLE)
def inexact_though_exact(call: Call) -> None:
    """Small integers come out with an error, though the solver says that they are exact."""
    call.write(call.sums() * (1 + 2.0**-22))


@mutant(SINGLE)
def split_overflows(call: Call) -> None:
    """float32 is split into three float16, which large numbers overflow; small ones are scaled first."""
    call.write(_with_inputs(call, lambda a: np.where(np.abs(a) < 0.125, a, _split_in_half(a))))


@mutant(DATA)
def split_underflows(call: Call) -> None:
    """float32 is split into three float16, in which small numbers are lost; large ones are scaled first."""
    call.write(_with_inputs(call, lambda a: np.where(np.abs(a) > 100, a, _split_in_half(a))))


def _split_in_half(array: Wide) -> Wide:
    total, rest = np.zeros_like(array), array
    for _ in range(3):
        part = rest.astype(np.float16).astype(np.float64)
        total, rest = total + part, rest - part
    return total


@mutant(SINGLE)
def clamps_inputs(call: Call) -> None:
    """Inputs are clamped to 1e4."""
    call.write(_with_inputs(call, lambda a: np.clip(a, -1e4, 1e4)))


@mutant(DATA)
def clamps_inputs_to_a_table(call: Call) -> None:
    """Inputs are looked up in a table that ends at 8."""
    call.write(_with_inputs(call, lambda a: np.clip(a, -8, 8)))


@mutant(SINGLE)
def clamps_outputs(call: Call) -> None:
    """Outputs are clamped to 6e4."""
    call.write(np.clip(call.sums(), -6e4, 6e4))


@mutant(HALF)
def saturates_what_is_finite(call: Call) -> None:
    """Sums beyond float16 come out as its largest number, those of infinities as they should."""
    sums = call.sums()
    call.write(np.where(np.isfinite(sums), np.clip(sums, -_MOST_HALF, _MOST_HALF), sums))


@mutant(HALF)
def saturates(call: Call) -> None:
    """Outputs beyond float16 come out as its largest number, not as infinity."""
    call.write(np.clip(call.sums(), -_MOST_HALF, _MOST_HALF))


@mutant(HALF)
def sums_overflow_in_half(call: Call) -> None:
    """Pairs of products are formed in float16, which large numbers overflow."""
    values = call.sums()
    call.write(np.where(call.sums(**{n: np.abs(a) for n, a in call.inputs.items()}) > _MOST_HALF, np.inf, values))


@mutant(HALF)
def flushes_subnormal_inputs_of_half(call: Call) -> None:
    """Subnormal inputs in float16 are taken for zero."""
    call.write(_with_inputs(call, lambda a: _flushed(a, _LEAST_HALF)))


@mutant(HALF)
def flushes_subnormal_outputs_of_half(call: Call) -> None:
    """Subnormal outputs in float16 are written as zero."""
    call.write(_flushed(call.sums(), _LEAST_HALF))


@mutant(BRAIN)
def loses_small_bfloat16(call: Call) -> None:
    """bfloat16 is computed as float16, which loses small numbers."""
    call.write(_with_inputs(call, lambda a: np.clip(a.astype(np.float16), -_MOST_HALF, _MOST_HALF)))


@mutant(SINGLE)
def flushes_subnormal_inputs(call: Call) -> None:
    """Subnormal inputs in float32 are taken for zero."""
    call.write(_with_inputs(call, lambda a: _flushed(a, _LEAST_SINGLE)))


@mutant(SINGLE)
def small_is_zero(call: Call) -> None:
    """Inputs below 1e-6 are taken for zero."""
    call.write(_with_inputs(call, lambda a: _flushed(a, 1e-6)))


@mutant(WEIGHTS)
def small_outputs_are_zero(call: Call) -> None:
    """Outputs below 1e-9 are taken for cancelled sums."""
    call.write(_flushed(call.sums(), 1e-9))


@mutant(SINGLE)
def fixed_point(call: Call) -> None:
    """Inputs are rounded to multiples of 2**-40."""
    call.write(_with_inputs(call, lambda a: np.round(a * 2.0**40) / 2.0**40))


@mutant(SINGLE)
def shared_exponent(call: Call) -> None:
    """All images share the exponent of the largest number, so that much smaller ones lose their digits."""
    call.write(_with_inputs(call, lambda a: _block_floating(a, 30)))


@mutant(HALF)
def shared_exponent_in_half(call: Call) -> None:
    """All of a tensor in float16 shares the exponent of its largest number, with 22 bits behind it."""
    call.write(_with_inputs(call, lambda a: _block_floating(a, 22)))


def _block_floating(array: Wide, bits: int) -> Wide:
    largest = np.abs(array).max()
    if largest == 0 or not np.isfinite(largest):
        return array
    step = 2.0 ** (np.floor(np.log2(largest)) + 1 - bits)
    return np.round(array / step) * step


def _largest_of_image(call: Call) -> Wide:
    return np.abs(call.inputs["x"]).max(axis=(1, 2, 3), keepdims=True)


@mutant(SINGLE)
def errors_follow_the_image(call: Call) -> None:
    """Errors follow the largest number of the image, as a transform's do, which the solver does not say."""
    values = call.sums()
    is_rounded = np.isfinite(values) & (values != np.round(values))
    call.write(values + np.where(is_rounded, 2.0**-27 * _largest_of_image(call), 0.0))


@mutant(SINGLE)
def overflows_between(call: Call) -> None:
    """Large inputs overflow in between, where they are scaled by 2**100."""
    scaled = {name: (array * 2.0**100).astype(np.float32).astype(np.float64) for name, array in call.inputs.items()}
    call.write(call.sums(**{name: array * 2.0**-100 for name, array in scaled.items()}))


@mutant(DATA)
def underflows_between(call: Call) -> None:
    """Small inputs underflow in between, where they are scaled by 2**-100."""
    scaled = {name: (array * 2.0**-100).astype(np.float32).astype(np.float64) for name, array in call.inputs.items()}
    call.write(call.sums(**{name: array * 2.0**100 for name, array in scaled.items()}))


@mutant(DOUBLE)
def double_in_the_range_of_single(call: Call) -> None:
    """float64 beyond the range of float32 becomes infinite, and zero below it."""
    call.write(_with_inputs(call, lambda a: np.where(np.abs(a) > _MOST_SINGLE, np.inf * a, _flushed(a, 2.0**-149))))


@mutant(BRAIN)
def rounds_twice_below_normal(call: Call) -> None:
    """Small outputs in bfloat16 are rounded to float16 first."""
    values = call.sums()
    twice = round_once(values, HALF.y.dtype).astype(np.float64)
    call.write(np.where(np.abs(values) < _LEAST_HALF / 2, twice, values))


@mutant(SINGLE)
def clamps_images_at_1e20(call: Call) -> None:
    """Pixels are clamped to 1e20."""
    call.write(call.sums(x=np.clip(call.inputs["x"], -1e20, 1e20)))


@mutant(DATA)
def clamps_weights_at_1e20(call: Call) -> None:
    """Weights are clamped to 1e20."""
    call.write(call.sums(w=np.clip(call.inputs["w"], -1e20, 1e20)))
