"""Second outputs: sums of other numbers, of other places, of other channels, or not all of them; or none at all."""

from __future__ import annotations

import numpy as np

from miofind.reference.convolution import round_once
from mutants.base import conv
from mutants.host import Array, Call, Wide, control, mutant

STATISTICS = conv(epilogue="statistics")
HALF = conv(epilogue="statistics", dtype="float16", layout="NHWC")
BRAIN = conv(epilogue="bias.statistics", dtype="bfloat16", layout="NHWC")
ACTIVE = conv(epilogue="bias.residual.relu.statistics", dtype="float16")
WEIGHTS = conv(epilogue="bias_gradient", direction="backward_weights")
HALF_WEIGHTS = conv(epilogue="bias_gradient", direction="backward_weights", dtype="float16", layout="NHWC")
WIDE_WEIGHTS = conv(epilogue="float32.bias_gradient", direction="backward_weights", dtype="float16")
DOUBLE = conv(epilogue="statistics", dtype="float64")


def _results(call: Call) -> Wide:
    """What the main output holds before it is rounded."""
    sums = call.sums()
    return call.finished(sums) if call.problem.epilogue.changes_results else sums


def _write(call: Call, summed: Wide | None = None) -> Array:
    """Write the right main output, and second ones of another tensor in place of y or dy."""
    call.write(_results(call))
    call.write_sums(summed)
    return call.tensors[call.problem.outputs[-1].name]


def _summed(call: Call) -> Wide:
    """A copy of what is to be summed."""
    call.write(_results(call))
    return call.tensors["y"].astype(np.float64)


@mutant(BRAIN)
def sums_of_results_before_rounding(call: Call) -> None:
    """Statistics are of the results before they are rounded."""
    _write(call, _results(call))


@mutant(BRAIN)
def squares_of_results_before_rounding(call: Call) -> None:
    """The squares that are summed are of the results before they are rounded."""
    _write(call)
    call.tensors["sum_of_squares"][...] = np.square(_results(call)).sum((0, 2, 3))


@mutant(ACTIVE)
def statistics_of_the_bare_convolution(call: Call) -> None:
    """Statistics are of the sums before the epilogue."""
    _write(call, call.sums())


@mutant(HALF)
def a_partial_of_the_statistics_lost(call: Call) -> None:
    """The last pixels of the last image are in no sum."""
    y = _summed(call)
    y[-1, :, -1, -2:] = 0
    _write(call, y)


@mutant(WIDE_WEIGHTS)
def a_partial_of_the_bias_gradient_lost(call: Call) -> None:
    """The last row of dy's first image is in no sum."""
    dy = _summed(call)
    dy[0, :, -1] = 0
    _write(call, dy)


@mutant(STATISTICS)
def a_partial_of_the_statistics_twice(call: Call) -> None:
    """The first pixel of the second image is summed by two blocks."""
    y = _summed(call)
    call.write_sums(
        np.concatenate([y.reshape(*y.shape[:2], -1), y[:, :, 0, :1] * np.array([0, 1, 0])[:, None, None]], 2)
    )


@mutant(HALF)
def statistics_of_the_wrong_channel_at_a_groups_border(call: Call) -> None:
    """The first channel of the second group gets the statistics of the channel before it."""
    y, size = _summed(call), call.problem.k // call.problem.groups
    y[:, size] = y[:, size - 1]
    _write(call, y)


@mutant(HALF_WEIGHTS)
def bias_gradient_of_the_first_group(call: Call) -> None:
    """Each group's channels get the bias gradient of the first group's."""
    size = call.problem.k // call.problem.groups
    _write(call, _summed(call)[:, np.arange(call.problem.k) % size])


@mutant(ACTIVE)
def statistics_of_the_padded_rows_of_a_tile(call: Call) -> None:
    """Rows of a tile behind the last pixel are summed: activations of the bias alone."""
    y = _summed(call)
    bias = np.maximum(call.tensors["bias"].astype(np.float64), 0)
    padded = np.broadcast_to(bias[:, None], (call.problem.n, call.problem.k, 5))
    call.write_sums(np.concatenate([y.reshape(*y.shape[:2], -1), padded], 2))


@mutant(STATISTICS)
def sum_of_squares_not_written(call: Call) -> None:
    """The sum of squares stays as it was."""
    before = call.tensors["sum_of_squares"].copy()
    _write(call)
    call.tensors["sum_of_squares"][...] = before


@mutant(HALF_WEIGHTS)
def bias_gradient_not_written(call: Call) -> None:
    """The bias gradient stays as it was."""
    call.write(call.sums())


@mutant(HALF_WEIGHTS)
def bias_gradient_of_the_last_channel_not_written(call: Call) -> None:
    """The last channel's bias gradient stays as it was."""
    before = call.tensors["bias_gradient"].copy()
    _write(call)[-1] = before[-1]


@mutant(WEIGHTS)
def bias_gradient_added_to_what_was_there(call: Call) -> None:
    """The bias gradient is added to what its memory held, unless that was NaN."""
    before = np.nan_to_num(call.tensors["bias_gradient"].copy())
    out = _write(call)
    out += before


@mutant(STATISTICS)
def statistics_swapped(call: Call) -> None:
    """The sum is written where the sum of squares goes."""
    _write(call)
    first, second = call.tensors["sum"].copy(), call.tensors["sum_of_squares"].copy()
    call.tensors["sum"][...], call.tensors["sum_of_squares"][...] = second, first


@mutant(STATISTICS)
def means_instead_of_sums(call: Call) -> None:
    """Statistics are divided by how many numbers there are."""
    _write(call)
    for name in ("sum", "sum_of_squares"):
        call.tensors[name] /= call.problem.y.size // call.problem.k


@mutant(WIDE_WEIGHTS)
def bias_gradient_in_16_bits(call: Call) -> None:
    """Each image's sum of dy is rounded to 16 bits before they are added up."""
    of_images = round_once(_summed(call).sum((2, 3)), call.problem.y.dtype)
    _write(call)[...] = of_images.astype(np.float64).sum(0)


@mutant(WIDE_WEIGHTS)
def bias_gradient_rounded_to_dws_dtype(call: Call) -> None:
    """The bias gradient is rounded to 16 bits, and is to be float32."""
    out = _write(call)
    out[...] = round_once(out.astype(np.float64), call.problem.w.dtype)


@mutant(DOUBLE)
def statistics_of_float64_in_float32(call: Call) -> None:
    """Statistics of float64 are summed in float32."""
    _write(call)
    for name in ("sum", "sum_of_squares"):
        call.tensors[name][...] = call.tensors[name].astype(np.float32)


@mutant(WEIGHTS)
def bias_gradient_written_behind_its_end(call: Call) -> None:
    """One number more is written than there are channels."""
    out = _write(call)
    np.lib.stride_tricks.as_strided(out, (out.size + 1,), out.strides)[-1] = 0


@mutant(STATISTICS)
def statistics_that_depend_on_time(call: Call) -> None:
    """Partial sums are added in the order in which they come: the last bit changes from run to run."""
    _write(call)
    total = call.tensors["sum"]
    if call.count() % 2 and (total != np.rint(total)).any():
        total[...] = np.nextafter(total, np.float32(np.inf))


@mutant(WEIGHTS)
def bias_gradient_of_the_first_run(call: Call) -> None:
    """The bias gradient is kept by where dy lies."""
    kept = call.state.setdefault(call.tensors["y"].ctypes.data, call.tensors["y"].astype(np.float64))
    _write(call, kept)


@control(ACTIVE)
def statistics_in_blocks(call: Call) -> None:
    """Squares and sums of eight pixels at a time, in float32, then pairwise."""
    call.write(_results(call))
    y = call.tensors["y"].astype(np.float32).swapaxes(0, 1).reshape(call.problem.k, -1)
    padded = np.pad(y, ((0, 0), (0, -y.shape[1] % 8))).reshape(call.problem.k, -1, 8)
    for name, values in (("sum", padded), ("sum_of_squares", padded * padded)):
        partials = np.zeros(values.shape[:2], np.float32)
        for place in range(8):
            partials += values[:, :, place]
        call.tensors[name][...] = partials.sum(1, dtype=np.float32)


@control(HALF_WEIGHTS)
def bias_gradient_image_by_image(call: Call) -> None:
    """Each image's sums in float32, added up, and rounded once."""
    call.write(call.sums())
    of_images = call.tensors["y"].astype(np.float32).sum((2, 3), dtype=np.float32)
    total = np.zeros(call.problem.k, np.float32)
    for image in of_images:
        total += image
    call.tensors["bias_gradient"][...] = total.astype(np.float16)
