"""Right at first and wrong later, or other bits each time: results depend on more than the inputs."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.reference.convolution import round_once
from mutants.base import conv
from mutants.host import Array, Call, Wide, mutant

FORWARD = conv()
DATA = conv(direction="backward_data")
WEIGHTS = conv(direction="backward_weights")
HALF = conv(dtype="float16", layout="NHWC")
# Far faster than the right solver on any machine, so that a race has all its rounds for the mutant.
TINY = ProblemDescription.convolution(x=(1, 2, 5, 5), w=(2, 2, 1, 1))
LONG = ProblemDescription.convolution(x=(2, 64, 7, 7), w=(8, 64, 3, 3), padding=1)


def _wrong_if(call: Call, is_due: bool) -> None:
    values = call.sums()
    if is_due:
        values[-1, -1] += 1
    call.write(values)


@mutant(FORWARD)
def wrong_from_second_run(call: Call) -> None:
    """The second run and all later ones are wrong."""
    _wrong_if(call, call.count() >= 2)


@mutant(DATA, exact=False)
def inexact_and_wrong_from_second_run(call: Call) -> None:
    """The second run and all later ones are wrong, of an algorithm whose small integers need not come out exact."""
    _wrong_if(call, call.count() >= 2)


@mutant(WEIGHTS)
def wrong_from_third_run(call: Call) -> None:
    """The third run and all later ones are wrong."""
    _wrong_if(call, call.count() >= 3)


@mutant(HALF)
def wrong_from_fifth_run(call: Call) -> None:
    """The fifth run and all later ones are wrong, when the race has begun."""
    _wrong_if(call, call.count() >= 5)


@mutant(FORWARD, workspace_bytes=512)
def wrong_from_tenth_run(call: Call) -> None:
    """The tenth run and all later ones are wrong."""
    _wrong_if(call, call.count() >= 10)


@mutant(FORWARD)
def nan_from_tenth_run(call: Call) -> None:
    """The tenth run and all later ones leave a NaN."""
    values = call.sums()
    if call.count() >= 10:
        values[0, 0, 0, 0] = np.nan
    call.write(values)


@mutant(TINY)
def wrong_from_twentieth_run(call: Call) -> None:
    """The twentieth run and all later ones are wrong, in the last rounds of the race."""
    _wrong_if(call, call.count() >= 20)


@mutant(FORWARD)
def writes_nothing_from_tenth_run(call: Call) -> None:
    """From the tenth run on nothing is written, since the output is thought to be there already."""
    if call.count() < 10:
        call.write(call.sums())


@mutant(TINY)
def wrong_every_second_run(call: Call) -> None:
    """Every second run is wrong once the race has begun, as with two buffers of which one is not cleared."""
    number = call.count()
    _wrong_if(call, number > 4 and number % 2 == 0)


@mutant(TINY)
def wrong_every_seventh_run(call: Call) -> None:
    """Every seventh run is wrong."""
    time.sleep(0.0011)  # rows of one run, so that which run ends a row does not depend on times
    _wrong_if(call, call.count() % 7 == 0)


@mutant(FORWARD)
def slow_and_wrong_from_fourth_run(call: Call) -> None:
    """Left behind in the race, and wrong from the fourth run on."""
    time.sleep(0.02)
    _wrong_if(call, call.count() >= 4)


@mutant(DATA, estimate_ms=3.0)
def cut_off_and_wrong_from_third_run(call: Call) -> None:
    """Tried last, cut off after its first timed run, and wrong from the third run on."""
    time.sleep(0.1)
    _wrong_if(call, call.count() >= 3)


@mutant(DATA)
def overwrites_input_later(call: Call) -> None:
    """An input is overwritten from the sixth run on."""
    call.write(call.sums())
    if call.count() >= 6:
        call.tensors["w"][0, 0, 0, 0] = 0


@mutant(FORWARD)
def writes_after_output_later(call: Call) -> None:
    """Bytes behind the output are overwritten from the sixth run on."""
    call.write(call.sums())
    if call.count() >= 6:
        out = call.out
        memory = np.lib.stride_tricks.as_strided(out.reshape(-1), (out.size + 4,), (out.itemsize,))
        memory[-4:] = 0


@mutant(FORWARD, workspace_bytes=256)
def writes_after_workspace_later(call: Call) -> None:
    """Bytes behind the workspace are overwritten from the sixth run on."""
    assert call.scratch is not None
    call.write(call.sums())
    if call.count() >= 6:
        np.lib.stride_tricks.as_strided(call.scratch, (320,), (1,))[256:] = 0


def _kept(call: Call, key: Any, make: Callable[[], Array]) -> Array:
    """What was made for a key the first time."""
    made = call.state.setdefault("kept", {})
    if key not in made:
        made[key] = make()
    return made[key]  # type: ignore[no-any-return]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@mutant(FORWARD)
def replays_first_output(call: Call) -> None:
    """The first output is kept and given for all inputs."""
    call.write(_kept(call, "output", call.sums))


@mutant(DATA, exact=False)
def inexact_and_replays_first_output(call: Call) -> None:
    """The first output is kept and given for all inputs, of an algorithm that need not be exact."""
    call.write(_kept(call, "output", call.sums))


@mutant(WEIGHTS)
def replays_output_by_address(call: Call) -> None:
    """An output is kept by the addresses of its inputs and given whatever these hold later."""
    addresses = tuple(_address(call.tensors[name]) for name in call.problem.direction.inputs)
    call.write(_kept(call, addresses, call.sums))


@mutant(FORWARD)
def keeps_weights_by_address(call: Call) -> None:
    """Transformed weights are kept by their address and not made again when the weights there change."""
    call.write(call.sums(w=_kept(call, _address(call.tensors["w"]), lambda: call.inputs["w"])))


@mutant(DATA, spreads_nonfinite=True)
def keeps_weights_of_gradients_by_address(call: Call) -> None:
    """Transformed weights are kept by their address, where no infinity among weights gives it away."""
    call.write(call.sums(w=_kept(call, _address(call.tensors["w"]), lambda: call.inputs["w"])))


@mutant(DATA, exact=False)
def inexact_and_keeps_weights(call: Call) -> None:
    """Transformed weights are kept by shape, of an algorithm that need not be exact."""
    call.write(call.sums(w=_kept(call, "w", lambda: call.inputs["w"])))


@mutant(HALF)
def keeps_images_by_address(call: Call) -> None:
    """A copy of x in another layout is kept by its address."""
    call.write(call.sums(x=_kept(call, _address(call.tensors["x"]), lambda: call.inputs["x"])))


def _contents(array: Array) -> int:
    return zlib.crc32(array.tobytes())


@mutant(FORWARD)
def keeps_output_by_weights(call: Call) -> None:
    """An output is kept by what the weights hold, whatever x holds."""
    call.write(_kept(call, _contents(call.tensors["w"]), call.sums))


@mutant(FORWARD)
def keeps_output_by_images(call: Call) -> None:
    """An output is kept by what x holds, whatever the weights hold."""
    call.write(_kept(call, _contents(call.tensors["x"]), call.sums))


@mutant(WEIGHTS, exact=False)
def inexact_and_keeps_output_by_gradients(call: Call) -> None:
    """An output is kept by what dy holds, whatever x holds, of an algorithm that need not be exact."""
    call.write(_kept(call, _contents(call.tensors["y"]), call.sums))


@mutant(DATA)
def shares_memory_between_runs(call: Call) -> None:
    """Sums lie in memory that two runs at the same time share."""
    call.state["shared"] = call.sums()
    call.state["inside"] = call.state.get("inside", 0) + 1
    while call.state["inside"] % 2 and _runs_beside_another():  # for another that has written there, too
        time.sleep(0.001)
    call.state["inside"] += call.state["inside"] % 2
    call.write(call.state["shared"])


def _runs_beside_another() -> bool:
    """Whether this is one of several runs of the verifier at one time, another of which has not ended."""
    own = threading.current_thread()
    others = [each for each in threading.enumerate() if each is not own and each.name == own.name]
    return own is not threading.main_thread() and bool(others)


def last_bits(call: Call, values: Wide, change: Array) -> None:
    """Write values whose last bit is another where `change` says so."""
    rounded = round_once(values, call.problem.output.dtype)
    call.out[...] = np.where(change, np.nextafter(rounded, rounded.dtype.type(np.inf)), rounded)


def some(values: Wide, seed: int) -> Array:
    """A third of the elements that had to be rounded, chosen by a seed.

    Multiples of small integers are exact in any order, and so are sums of subnormal numbers.
    """
    is_rounded = np.isfinite(values) & (values != values.astype(np.float32)) & (np.abs(values) > 2.0**-100)
    return is_rounded & (np.random.default_rng(seed).random(values.shape) < 0.3)


@mutant(FORWARD)
def other_last_bits_each_run(call: Call) -> None:
    """The last bits are others each time, as where atomics add in any order; said to be deterministic."""
    values = call.sums()
    last_bits(call, values, some(values, call.count()))


@mutant(DATA, exact=False)
def inexact_and_other_last_bits(call: Call) -> None:
    """The last bits are others each time, of an algorithm that need not be exact."""
    values = call.sums()
    last_bits(call, values, some(values, call.count()))


@mutant(FORWARD)
def other_last_bits_from_eighth_run(call: Call) -> None:
    """Once warm it adds in another order: other last bits than before."""
    values = call.sums()
    is_warm = call.count() >= 8
    last_bits(call, values, some(values, 0) & is_warm)


@mutant(WEIGHTS)
def last_bits_by_the_clock(call: Call) -> None:
    """The last bits are those of a clock."""
    values = call.sums()
    last_bits(call, values, some(values, time.monotonic_ns()))


@mutant(LONG)
def last_bits_by_the_output(call: Call) -> None:
    """The last bits depend on what the output held."""
    values = call.sums()
    is_written = call.out.view(np.uint32) != 0xFFFFFFFF
    last_bits(call, values, some(values, 0) & is_written)
