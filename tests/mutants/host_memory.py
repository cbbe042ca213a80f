"""Memory is read that nobody wrote, or written that belongs to others."""

from __future__ import annotations

import ctypes

import numpy as np

from mutants.base import conv
from mutants.host import Array, Call, mutant

FORWARD = conv()
DATA = conv(direction="backward_data", dtype="bfloat16", layout="NHWC")
WEIGHTS = conv(direction="backward_weights")
HALF = conv(dtype="float16")


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _float_at(address: int) -> float:
    return ctypes.c_float.from_address(address).value


def _set(address: int, value: int, size: int = 1) -> None:
    ctypes.memset(address, value, size)


@mutant(FORWARD)
def adds_to_output(call: Call) -> None:
    """The result is added to what the output held."""
    call.write(call.out.astype(np.float64) + call.sums())


@mutant(DATA)
def adds_to_numbers_in_output(call: Call) -> None:
    """The result is added to what the output held, where that was a number."""
    call.write(np.nan_to_num(call.out.astype(np.float64), nan=0.0) + call.sums())


@mutant(WEIGHTS)
def keeps_numbers_in_output(call: Call) -> None:
    """An element that holds a number already is taken as done."""
    call.write(np.where(np.isnan(call.out), call.sums(), call.out))


@mutant(HALF)
def knows_the_poison(call: Call) -> None:
    """It is right only where the output's bytes are all 0xFF before."""
    poisoned = call.out.view(np.uint16) == 0xFFFF
    call.write(call.sums() + ~poisoned)


@mutant(FORWARD)
def reads_before_x(call: Call) -> None:
    """A number in front of x is taken for its padding."""
    call.write(call.sums() + np.nan_to_num(_float_at(_address(call.tensors["x"]) - 4), nan=0.0))


@mutant(FORWARD)
def reads_after_w(call: Call) -> None:
    """A number behind w is taken for one more weight."""
    w = call.tensors["w"]
    call.write(call.sums() + np.nan_to_num(_float_at(_address(w) + w.nbytes), nan=0.0))


@mutant(FORWARD)
def writes_after_output(call: Call) -> None:
    """One byte behind the output is overwritten."""
    call.write(call.sums())
    _set(_address(call.out) + call.out.nbytes, 0)


@mutant(WEIGHTS)
def writes_before_output(call: Call) -> None:
    """One byte in front of the output is overwritten."""
    call.write(call.sums())
    _set(_address(call.out) - 1, 0)


@mutant(DATA)
def writes_into_an_input(call: Call) -> None:
    """One weight is overwritten."""
    call.write(call.sums())
    call.tensors["w"][0, 1, 0, 1] += 1


@mutant(FORWARD)
def writes_into_an_input_and_mends_it(call: Call) -> None:
    """An input is another one during the run, which others may read meanwhile."""
    x = call.tensors["x"]
    np.negative(x, out=x)
    values = call.sums(x=-call.inputs["x"])
    np.negative(x, out=x)
    call.write(values)


@mutant(FORWARD, workspace_bytes=1000)
def writes_after_workspace(call: Call) -> None:
    """It uses more workspace than it asks for."""
    assert call.scratch is not None
    _set(_address(call.scratch), 0, 1200)
    call.write(call.sums())


@mutant(DATA, workspace_bytes=1024)
def expects_a_clear_workspace(call: Call) -> None:
    """Partial sums are added to a workspace that nobody cleared."""
    assert call.scratch is not None
    call.write(call.sums() + np.float64(call.scratch.view(np.float32)[7]))


@mutant(WEIGHTS, workspace_bytes=1024)
def adds_to_numbers_in_workspace(call: Call) -> None:
    """A counter in the workspace is expected to be zero wherever it is no NaN."""
    assert call.scratch is not None
    parts = call.scratch.view(np.float32)
    call.write(call.sums() + np.nan_to_num(np.float64(parts[3]), nan=0.0))
    parts[:] = 1


@mutant(FORWARD, workspace_bytes=64 << 10)
def keeps_weights_in_workspace(call: Call) -> None:
    """Transformed weights in the workspace are taken from the run before, where there was one."""
    assert call.scratch is not None
    w = call.inputs["w"]
    kept = call.scratch[: 8 * (w.size + 1)].view(np.float64)
    if kept[0] != w.size:
        kept[0], kept[1:] = w.size, w.reshape(-1)
    call.write(call.sums(w=kept[1:].reshape(w.shape).copy()))


@mutant(HALF)
def finishes_late(call: Call) -> None:
    """The last element is written when the next run begins, as by a stream or thread that is not waited for."""
    if "late" in call.state:
        out, last = call.state.pop("late")
        out[-1, -1, -1, -1] = last
    before = call.out[-1, -1, -1, -1].copy()
    call.write(call.sums())
    call.state["late"] = call.out, call.out[-1, -1, -1, -1].copy()
    call.out[-1, -1, -1, -1] = before


@mutant(conv(layout="NHWC"))
def needs_alignment_of_16(call: Call) -> None:
    """Vectors of 16 bytes are read from x, whose address need not be a multiple of that."""
    x = call.tensors["x"]
    start = _address(x) % 16 // 4
    values = call.sums()
    if start:
        memory = x.transpose(0, 2, 3, 1).reshape(-1)
        moved = np.roll(memory, start).reshape(x.transpose(0, 2, 3, 1).shape).transpose(0, 3, 1, 2)
        values = call.sums(x=moved.astype(np.float64))
    call.write(values)


@mutant(HALF)
def needs_alignment_of_256_in_output(call: Call) -> None:
    """Rows are written by copies that drop what precedes the next multiple of 256 bytes."""
    call.write(call.sums())
    skipped = -_address(call.out) % 256 // 2
    call.out.reshape(-1)[:skipped] = 0


@mutant(FORWARD)
def wrong_when_well_aligned(call: Call) -> None:
    """The fast path for addresses that are multiples of 64 leaves a tap out."""
    w = call.inputs["w"]
    if all(_address(call.tensors[name]) % 64 == 0 for name in "xwy"):
        w[..., 0, 0] = 0
    call.write(call.sums(w=w))


@mutant(FORWARD)
def needs_equal_alignment(call: Call) -> None:
    """Rows are copied by words that expect input and output at equal distances from a multiple of 64 bytes."""
    values = call.sums()
    if (_address(call.tensors["x"]) - _address(call.out)) % 64:
        values[:, :, 0] = 0
    call.write(values)


@mutant(DATA, workspace_bytes=1024)
def needs_alignment_of_64_in_workspace(call: Call) -> None:
    """Partial sums are expected at a multiple of 64 bytes, which a workspace need not begin at."""
    assert call.scratch is not None
    call.write(call.sums() + (_address(call.scratch) % 64 != 0))
