"""Some elements are wrong: the wrong products are summed for them, or they are not written."""

from __future__ import annotations

import numpy as np

from miofind.core.problem import ProblemDescription
from mutants.base import conv
from mutants.host import Call, Wide, mutant

FORWARD = conv()
DATA = conv(direction="backward_data")
WEIGHTS = conv(direction="backward_weights")
ONE_DIMENSION = ProblemDescription.convolution(x=(2, 5, 40), w=(7, 5, 5), padding=2)
THREE_DIMENSIONS = ProblemDescription.convolution(x=(1, 3, 5, 6, 7), w=(4, 3, 2, 3, 2), padding=1, layout="NDHWC")
CHANNELS_LAST = conv(layout="NHWC", dtype="float16")
# Too large for the whole output to be compared: a part of the images, or of the channels, stands for it.
MANY_IMAGES = ProblemDescription.convolution(x=(64, 4, 96, 96), w=(4, 4, 3, 3), padding=1)
MANY_FILTERS = ProblemDescription.convolution(
    x=(6, 96, 28, 28), w=(96, 96, 3, 3), padding=1, direction="backward_weights"
)


def _without(array: Wide, at: tuple[object, ...]) -> Wide:
    array = array.copy()
    array[at] = 0
    return array


@mutant(FORWARD)
def dropped_tap(call: Call) -> None:
    """The last tap of the filter is not summed."""
    call.write(call.sums(w=_without(call.inputs["w"], (..., -1, -1))))


@mutant(DATA)
def dropped_last_filter(call: Call) -> None:
    """The last filter of a group is not summed into dx."""
    call.write(call.sums(w=_without(call.inputs["w"], (-1,))))


@mutant(CHANNELS_LAST)
def dropped_last_channel(call: Call) -> None:
    """The last channel of a group is not summed."""
    call.write(call.sums(w=_without(call.inputs["w"], (slice(None), -1))))


@mutant(WEIGHTS)
def dropped_last_image(call: Call) -> None:
    """The last image is not summed into dw."""
    call.write(call.sums(x=_without(call.inputs["x"], (-1,))))


@mutant(ONE_DIMENSION)
def dropped_tap_at_one_element(call: Call) -> None:
    """One product is missing from one element."""
    values = call.sums()
    values[1, 3, 20] -= call.inputs["x"][1, 2, 20] * call.inputs["w"][3, 2, 2]
    call.write(values)


@mutant(MANY_IMAGES)
def wrong_middle_image(call: Call) -> None:
    """One image in the middle of the batch is wrong."""
    values = call.sums().copy()
    values[37] *= 2
    call.write(values)


@mutant(MANY_IMAGES)
def wrong_tile(call: Call) -> None:
    """A tile of 32 by 32 pixels is wrong in one image, in all its channels."""
    values = call.sums().copy()
    values[22, :, 32:64, 32:64] += 1
    call.write(values)


@mutant(MANY_IMAGES)
def wrong_row_of_an_image(call: Call) -> None:
    """One row in the middle of one image is wrong."""
    values = call.sums().copy()
    values[41, :, 50] = 0
    call.write(values)


@mutant(MANY_IMAGES)
def swapped_images(call: Call) -> None:
    """Two neighbouring images in the middle of the batch come out in each other's place."""
    values = call.sums().copy()
    values[[30, 31]] = values[[31, 30]]
    call.write(values)


@mutant(MANY_FILTERS)
def wrong_middle_filter(call: Call) -> None:
    """The gradient of one filter in the middle is wrong."""
    values = call.sums().copy()
    values[53] *= 2
    call.write(values)


@mutant(MANY_FILTERS)
def wrong_middle_channel(call: Call) -> None:
    """The gradient of one channel in the middle is wrong in every filter."""
    values = call.sums().copy()
    values[:, 45] *= -1
    call.write(values)


@mutant(FORWARD)
def wrong_middle_row(call: Call) -> None:
    """One row in the middle of every image is wrong."""
    values = call.sums()
    values[:, :, 3] += 1
    call.write(values)


@mutant(ONE_DIMENSION)
def wrong_after_split(call: Call) -> None:
    """The first element after a boundary at 16 pixels is wrong in one channel."""
    values = call.sums()
    values[0, 2, 16] += 1
    call.write(values)


@mutant(FORWARD)
def wrong_last_element(call: Call) -> None:
    """The very last element is wrong."""
    values = call.sums()
    values[-1, -1, -1, -1] += 1
    call.write(values)


@mutant(DATA)
def unwritten_element(call: Call) -> None:
    """One element keeps what was there."""
    kept = call.out[1, 3, 2, 5].copy()
    call.write(call.sums())
    call.out[1, 3, 2, 5] = kept


@mutant(DATA)
def unwritten_between_strides(call: Call) -> None:
    """Elements of dx that no output reads are left unwritten, not zero."""
    kept = call.out.copy()
    values = call.sums()
    call.write(values)
    call.out[values == 0] = kept[values == 0]


@mutant(FORWARD)
def wrong_for_even_filters(call: Call) -> None:
    """Output channels of even number take the next one's filter."""
    w = call.inputs["w"]
    w[0::2] = w[1::2]
    call.write(call.sums(w=w))


@mutant(FORWARD)
def padding_of_ones(call: Call) -> None:
    """Padding is counted as ones."""
    _pad(call, constant_values=1)


@mutant(FORWARD)
def padding_of_edges(call: Call) -> None:
    """Padding repeats the edge."""
    _pad(call, mode="edge")


def _pad(call: Call, **how: object) -> None:
    conv = call.problem.conv
    padding = tuple(zip(conv.pad_before, conv.pad_after, strict=True))
    problem = ProblemDescription.convolution(
        x=(*call.problem.x.shape[:2], *(s + a + b for s, (a, b) in zip(call.problem.spatial, padding, strict=True))),
        w=call.problem.w.shape,
        stride=conv.stride,
        dilation=conv.dilation,
        groups=conv.groups,
    )
    x = np.pad(call.inputs["x"], ((0, 0), (0, 0), *padding), **how)  # type: ignore[call-overload]
    call.write(Call(problem, {**call.tensors, "x": x}, None, {}).sums())


@mutant(FORWARD)
def shifted_by_a_pixel(call: Call) -> None:
    """The stride's phase is off by one pixel."""
    call.write(call.sums(x=np.roll(call.inputs["x"], 1, axis=2)))


@mutant(DATA)
def flipped_filter(call: Call) -> None:
    """The filter is turned around, as in a convolution of signal processing."""
    call.write(call.sums(w=call.inputs["w"][..., ::-1, ::-1]))


@mutant(FORWARD)
def transposed_filter(call: Call) -> None:
    """Rows and columns of the filter are exchanged."""
    call.write(call.sums(w=np.swapaxes(call.inputs["w"], -1, -2)))


@mutant(FORWARD)
def dilation_ignored(call: Call) -> None:
    """The taps of a dilated filter are read as neighbours."""
    x, problem = call.inputs["x"], call.problem
    close = conv(dilation=1, padding=((1, 0), (1, 0)))
    assert close.y.shape == problem.y.shape
    call.write(Call(close, {**call.tensors, "x": x}, None, {}).sums())


@mutant(FORWARD)
def groups_exchanged(call: Call) -> None:
    """Each group reads the other's channels."""
    call.write(call.sums(x=np.roll(call.inputs["x"], 3, axis=1)))


@mutant(THREE_DIMENSIONS)
def depth_ignored(call: Call) -> None:
    """Only the first slice of a filter of three dimensions is summed."""
    call.write(call.sums(w=_without(call.inputs["w"], (slice(None), slice(None), slice(1, None)))))
