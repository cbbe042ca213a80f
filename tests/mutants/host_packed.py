"""The convolution is right, and its packing for weights that stay the same is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import ProblemDescription
from mutants.base import conv
from mutants.host import Call, Packed, Wide, mutant

Bytes = NDArray[np.uint8]

FORWARD = conv()
DATA = conv(direction="backward_data")
HALF = conv(dtype="float16", layout="NHWC")


def _size(problem: ProblemDescription) -> int:
    return 8 * problem.w.size


def _store(packed: Bytes, weights: Wide) -> None:
    packed[: 8 * weights.size] = np.ascontiguousarray(weights).reshape(-1).view(np.uint8)


def _weights(call: Call, packed: Bytes) -> Wide:
    return packed[: _size(call.problem)].view(np.float64).reshape(call.problem.w.shape)


def _given(call: Call) -> Wide:
    return call.tensors["w"].astype(np.float64)


def pack(call: Call, packed: Bytes) -> None:
    """A right pack."""
    _store(packed, _given(call))


def run(call: Call, packed: Bytes) -> None:
    """A right run."""
    _run_with(call, _weights(call, packed))


def _run_with(call: Call, weights: Wide) -> None:
    image = next(name for name in call.problem.direction.inputs if name != "w")
    call.write(Call(call.problem, {**call.tensors, "w": weights}, None, {}).sums(**{image: call.tensors[image]}))


def right(call: Call) -> None:
    """The whole convolution, which is right."""
    call.write(call.sums())


def _packing(
    pack: Callable[[Call, Bytes], None] = pack,
    run: Callable[[Call, Bytes], None] = run,
    size: Callable[[ProblemDescription], int] = _size,
) -> Packed:
    return Packed(pack, run, size)


def _register(
    problem: ProblemDescription, exact: bool = True, **parts: Any
) -> Callable[[Callable[[Call], None]], object]:
    return mutant(problem, _packing(**parts), exact=exact)


def _changed_pack(change: Callable[[Wide], Wide]) -> Callable[[Call, Bytes], None]:
    return lambda call, packed: _store(packed, change(_given(call)))


def _half(weights: Wide) -> Wide:
    weights[weights.shape[0] // 2 :] = 0
    return weights


@_register(FORWARD, pack=_changed_pack(lambda w: w * (1 + 2.0**-10)))
def packs_coarse_weights(call: Call) -> None:
    """Packed weights are rounded to few digits."""
    right(call)


@_register(DATA, pack=_changed_pack(lambda w: w[..., ::-1, ::-1]))
def packs_a_flipped_filter(call: Call) -> None:
    """Packed weights are turned around."""
    right(call)


@_register(HALF, pack=_changed_pack(np.ones_like))
def packs_ones(call: Call) -> None:
    """Packing does not look at the weights."""
    right(call)


@_register(FORWARD, pack=_changed_pack(_half))
def packs_half_the_filters(call: Call) -> None:
    """The second half of the filters is packed as zeros."""
    right(call)


def _leave_half(call: Call, packed: Bytes) -> None:
    packed[: packed.size // 2] = _given(call).reshape(-1).view(np.uint8)[: packed.size // 2]


@_register(FORWARD, pack=_leave_half)
def leaves_half_unpacked(call: Call) -> None:
    """The second half of the packed weights is not written."""
    right(call)


def _add(call: Call, packed: Bytes) -> None:
    _store(packed, np.nan_to_num(packed.view(np.float64).reshape(call.problem.w.shape)) + _given(call))


@_register(DATA, pack=_add)
def packs_onto_numbers(call: Call) -> None:
    """Packing adds to what was there, where that was a number."""
    right(call)


def _pack_first(call: Call, packed: Bytes) -> None:
    _store(packed, call.state.setdefault("first", _given(call)))


@_register(FORWARD, pack=_pack_first)
def packs_the_first_weights(call: Call) -> None:
    """The first weights that were packed are packed again for all others."""
    right(call)


def _pack_last(call: Call, packed: Bytes) -> None:
    call.state["last"] = _given(call)
    _store(packed, _given(call))


@_register(FORWARD, pack=_pack_last, run=lambda call, packed: _run_with(call, call.state["last"]))
def shares_packed_weights(call: Call) -> None:
    """All that was packed runs with the weights that were packed last."""
    right(call)


def _pack_reference(call: Call, packed: Bytes) -> None:
    call.state["original"] = call.tensors["w"]
    _store(packed, _given(call))


@_register(
    HALF, pack=_pack_reference, run=lambda call, packed: _run_with(call, call.state["original"].astype(np.float64))
)
def reads_weights_after_packing(call: Call) -> None:
    """A run reads the weights that were packed where they were, whatever is there now."""
    right(call)


def _overrun(call: Call, packed: Bytes) -> None:
    pack(call, packed)
    np.lib.stride_tricks.as_strided(packed, (packed.size + 64,), (1,))[-64:] = 0


@_register(FORWARD, pack=_overrun)
def packs_beyond_its_bytes(call: Call) -> None:
    """Packing writes more bytes than it asks for."""
    right(call)


def _spoil_weights(call: Call, packed: Bytes) -> None:
    pack(call, packed)
    call.tensors["w"][0, 0, 0, 0] = 0


@_register(DATA, pack=_spoil_weights)
def packing_writes_into_weights(call: Call) -> None:
    """Packing overwrites a weight."""
    right(call)


def _run_once(call: Call, packed: Bytes) -> None:
    run(call, packed)
    packed[:8] = 0


@_register(FORWARD, run=_run_once)
def run_spoils_packed_weights(call: Call) -> None:
    """A run overwrites packed weights, so that the next one is wrong."""
    right(call)


def _run_unpadded(call: Call, packed: Bytes) -> None:
    run(call, packed)
    call.out[:, :, 0] = 0


@_register(DATA, run=_run_unpadded)
def packed_run_drops_a_row(call: Call) -> None:
    """A run with packed weights leaves the first row out."""
    right(call)


def _run_unwritten(call: Call, packed: Bytes) -> None:
    kept = call.out[0, 1, 2, 3].copy()
    run(call, packed)
    call.out[0, 1, 2, 3] = kept


@_register(FORWARD, run=_run_unwritten)
def packed_run_leaves_an_element(call: Call) -> None:
    """A run with packed weights leaves one element unwritten."""
    right(call)


def _run_beyond_workspace(call: Call, packed: Bytes) -> None:
    assert call.scratch is not None
    run(call, packed)
    np.lib.stride_tricks.as_strided(call.scratch, (call.scratch.size + 8,), (1,))[-8:] = 0


@mutant(FORWARD, _packing(run=_run_beyond_workspace), workspace_bytes=512)
def packed_run_writes_after_workspace(call: Call) -> None:
    """A run with packed weights uses more workspace than it asks for."""
    right(call)


def _raise(call: Call, packed: Bytes) -> None:
    raise ArithmeticError("packing is not implemented for this shape")


@_register(FORWARD, pack=_raise)
def packing_fails(call: Call) -> None:
    """Packing raises, though the solver offers it."""
    right(call)


def _run_kept(call: Call, packed: Bytes) -> None:
    kept = call.state.setdefault("kept", {})
    address = int(packed.__array_interface__["data"][0])
    _run_with(call, kept.setdefault(address, _weights(call, packed).copy()))


@_register(FORWARD, run=_run_kept)
def keeps_packed_weights_by_address(call: Call) -> None:
    """Packed weights are kept by their address and not read again when others were packed there."""
    right(call)


def _run_spreading(call: Call, packed: Bytes) -> None:
    run(call, packed)
    call.out[...] += (0 * call.tensors["x"].sum()).astype(call.out.dtype)


@_register(FORWARD, run=_run_spreading)
def packed_run_spreads(call: Call) -> None:
    """An infinity in x makes all outputs NaN where weights are packed."""
    right(call)


def _run_later(call: Call, packed: Bytes) -> None:
    run(call, packed)
    call.state["packed runs"] = call.state.get("packed runs", 0) + 1
    if call.state["packed runs"] >= 4:
        last = call.out[-1, -1, -1]
        call.out[-1, -1, -1] = np.nextafter(last, last.dtype.type(np.inf))


@_register(DATA, run=_run_later, exact=False)
def packed_run_changes_later(call: Call) -> None:
    """The last bits of the fourth run with packed weights are others than the first one's."""
    right(call)
