"""Infinities and NaN of the inputs go where they should not, or get lost; the solver says that they do not spread."""

from __future__ import annotations

import numpy as np

from mutants.base import conv
from mutants.host import Call, Wide, mutant

SINGLE = conv()
DATA = conv(direction="backward_data", dtype="float16")
WEIGHTS = conv(direction="backward_weights", dtype="bfloat16")
DENSE = conv(padding=0, stride=1, dilation=1, groups=1, w=(8, 6, 3, 3))


@mutant(SINGLE)
def spreads_everywhere(call: Call) -> None:
    """Every output adds zero times the sum of the inputs, so that one infinity makes them all NaN."""
    call.write(call.sums() + 0 * sum(array.sum() for array in call.inputs.values()))


@mutant(DATA)
def spreads_to_its_image(call: Call) -> None:
    """Zeros stand for what a strided output does not reach, and are multiplied with an infinity."""
    dy = call.inputs["y"]
    call.write(call.sums() + 0 * dy.sum(axis=(1, 2, 3))[:, None, None, None])


@mutant(DENSE)
def spreads_to_neighbours(call: Call) -> None:
    """An infinity reaches the outputs beside those that sum it, as by a transform of tiles."""
    values = call.sums()
    call.write(values + 0 * np.roll(values, 1, axis=3))


@mutant(WEIGHTS)
def spreads_to_other_filters(call: Call) -> None:
    """An infinity in dy reaches the gradients of other filters."""
    values = call.sums()
    call.write(values + 0 * np.roll(values, 1, axis=0))


@mutant(conv(dtype="float16"))
def spreads_from_weights(call: Call) -> None:
    """A filter that is padded with zeros to the size of a tile meets infinite weights."""
    w = call.inputs["w"]
    call.write(call.sums() + 0 * w.sum())


def _changed(call: Call, change: object) -> Wide:
    return call.sums(**{name: change(array) for name, array in call.inputs.items()})  # type: ignore[operator]


@mutant(SINGLE)
def nan_becomes_zero(call: Call) -> None:
    """NaN in an input is taken for zero, as maxima and comparisons do."""
    call.write(_changed(call, lambda a: np.where(np.isnan(a), 0, a)))


@mutant(conv(direction="backward_data"))
def infinity_becomes_a_number(call: Call) -> None:
    """Infinity in an input is taken for a large number."""
    call.write(_changed(call, lambda a: np.where(np.isinf(a), np.copysign(2.0**100, a), a)))


@mutant(SINGLE)
def infinity_becomes_nan(call: Call) -> None:
    """Infinity in an input is split into itself and a rest that is NaN."""
    call.write(_changed(call, lambda a: a.astype(np.float32) + (a - a)))


@mutant(WEIGHTS)
def nonfinite_images_are_skipped(call: Call) -> None:
    """Images that hold an infinity or NaN are left out of the sum, as a gradient's guard does."""
    x = call.inputs["x"]
    x[~np.isfinite(x).all(axis=(1, 2, 3))] = 0
    call.write(call.sums(x=x))


@mutant(DENSE)
def skips_zeros(call: Call) -> None:
    """A weight of zero is left out, also where it meets an infinity."""
    x, w = call.inputs["x"], call.inputs["w"]
    call.write(call.sums() if np.isfinite(x).all() else call.sums(w=np.where(w == 0, 1e-200, w)))


@mutant(WEIGHTS)
def skips_zeros_of_gradients(call: Call) -> None:
    """A gradient of zero is left out, also where it meets an infinity."""
    x, dy = call.inputs["x"], call.inputs["y"]
    call.write(call.sums() if np.isfinite(x).all() else call.sums(y=np.where(dy == 0, 1e-200, dy)))


@mutant(DATA)
def negative_zero_is_nan(call: Call) -> None:
    """Zeros are told by their bits, and negative ones have others."""
    call.write(_changed(call, lambda a: np.where((a == 0) & np.signbit(a), np.nan, a)))
