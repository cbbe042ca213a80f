"""Right solvers that look odd: none of them may be called wrong."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.reference.convolution import reference_on_host
from mutants.base import conv
from mutants.host import Call, Packed, Wide, control
from mutants.host_packed import FORWARD, pack, run
from mutants.host_packed import right as _whole
from mutants.host_state import last_bits, some

DATA = conv(direction="backward_data")
WEIGHTS = conv(direction="backward_weights")


def _with_error(call: Call, factor: float) -> Wide:
    """The right sums, each with an error of some times the root of its products' squares."""
    values, size = call.sums(), call.sums(**{name: array**2 for name, array in call.inputs.items()})
    return np.where(np.isfinite(values), values + factor * np.sqrt(size), values)


@control(conv(), deterministic=False)
def adds_in_any_order(call: Call) -> None:
    """The last bits are others each time, as where sums come in any order, and the solver says so."""
    values = call.sums()
    last_bits(call, values, some(values, call.count()))


@control(DATA, spreads_nonfinite=True)
def says_that_it_spreads(call: Call) -> None:
    """An infinity makes all outputs NaN, and the solver says so."""
    call.write(call.sums() + 0 * sum(array.sum() for array in call.inputs.values()))


@control(conv(), exact=False, error_growth=200.0)
def says_that_its_bound_is_wide(call: Call) -> None:
    """Errors are fifty times those of direct summation, and the solver says so."""
    call.write(_with_error(call, 50 * 2.0**-24))


@control(WEIGHTS, exact=False)
def says_that_it_is_inexact(call: Call) -> None:
    """Small integers come out with a small error, as of F(4,3), and the solver says so."""
    call.write(_with_error(call, 2.0**-24))


@control(conv(), alignment_bytes=16)
def says_that_it_needs_alignment(call: Call) -> None:
    """Addresses must be multiples of 16, and the solver says so."""
    if any(call.tensors[name].__array_interface__["data"][0] % 16 for name in "xwy"):
        raise ValueError("misaligned")
    call.write(call.sums())


@control(DATA, workspace_bytes=3 << 20)
def uses_a_large_workspace(call: Call) -> None:
    """It writes all of a large workspace before it reads it, and leaves numbers there."""
    assert call.scratch is not None
    values = call.sums()
    call.scratch[:] = 0x41
    call.scratch[: values.nbytes] = values.reshape(-1).view(np.uint8)
    call.write(call.scratch[: values.nbytes].view(np.float64).reshape(values.shape).copy())


@control(FORWARD, Packed(pack, run, lambda problem: 8 * problem.w.size))
def packs_rightly(call: Call) -> None:
    """Weights can be packed."""
    _whole(call)


@control(FORWARD, Packed(pack, run, lambda problem: 8 * problem.w.size), workspace_bytes=512)
def packs_rightly_with_workspace(call: Call) -> None:
    """Weights can be packed, with a workspace."""
    _whole(call)


@control(conv())
def is_slow(call: Call) -> None:
    """A run takes much longer than the right solver's."""
    time.sleep(0.02)
    call.write(call.sums())


@control(conv(dtype="float16", layout="NHWC"))
def sums_half_in_single(call: Call) -> None:
    """float16 with sums in float32: subnormal numbers, overflow and infinities as IEEE 754 has them."""
    call.write(call.sums().astype(np.float32).astype(np.float64))


@control(conv(dtype="bfloat16"))
def sums_bfloat16_in_single(call: Call) -> None:
    """bfloat16 with sums in float32."""
    call.write(call.sums().astype(np.float32).astype(np.float64))


@control(conv(math="tf32"))
def cuts_to_tf32(call: Call) -> None:
    """Inputs are cut to TF32, as the problem allows."""

    def cut(array: Wide) -> Wide:
        return (array.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)

    call.write(call.sums(**{name: cut(array) for name, array in call.inputs.items()}))


@control(conv(dtype="float64", direction="backward_weights"))
def is_exact_in_double(call: Call) -> None:
    """float64 with sums in float64."""
    call.write(call.sums())


@control(ProblemDescription.convolution(x=(2, 16, 9, 9), w=(8, 16, 3, 3), padding=1))
def sums_in_another_order(call: Call) -> None:
    """Sums are formed in float32, one channel after another."""
    x, w = call.inputs["x"], call.inputs["w"]
    one = ProblemDescription.convolution(x=(2, 1, 9, 9), w=(8, 1, 3, 3), padding=1)
    total = np.zeros(call.problem.y.shape, np.float32)
    for i in range(w.shape[1]):
        total += reference_on_host(one, x=x[:, i : i + 1], w=w[:, i : i + 1]).astype(np.float32)
    call.write(total.astype(np.float64))


@control(conv(x=(3, 6, 11, 12)))
def keeps_a_plan(call: Call) -> None:
    """What depends on the shape alone is kept from run to run."""
    call.state.setdefault("plan", call.problem.network_config)
    call.write(call.sums())


@control(conv(dtype={"x": "float16", "w": "bfloat16", "y": "float32"}))
def mixes_types(call: Call) -> None:
    """float16, bfloat16 and float32 in one problem."""
    assert call.tensors["w"].dtype == ml_dtypes.bfloat16
    call.write(call.sums().astype(np.float32).astype(np.float64))
