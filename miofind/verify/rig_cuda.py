"""Trials on a CUDA device: everything is filled, poisoned, compared and checked there; one small report comes back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from miofind.device import Device
from miofind.device_kernels import Argument, DeviceKernels, GridStride, float64, int32, int64
from miofind.device_memory import DeviceMemory
from miofind.problem import ProblemDescription
from miofind.reference import numpy_dtype, reference_step, round_once
from miofind.solution import Pointer
from miofind.values import Values
from miofind.verify.accuracy import error_bounds, least_exponent
from miofind.verify.rig import GUARD_BYTES, POISON, Findings, Rig, WrongElement
from miofind.verify.sampling import SampleBudget, sample_indices

if TYPE_CHECKING:
    from miofind.compiler import Compiler
    from miofind.invoker import Invoker

# Report: 64-bit slots that the kernels of verify.cu add to.
_SLOT_BYTES = 8
_WRITTEN = 0
_COMPARED = 2
_BEFORE = 6
_AFTER = 8
_GUARDS = 10
_SLOTS = 18
_TENSORS = ("x", "w", "y")
_MOST_SHIFT = 512
_SUM_BYTES = 8
_SCALE_BYTES = 2 * 4
_MEMORY_SHARE = 4  # references take no more than a fourth of what the problem's tensors leave free


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """Device memory between guard bands; `address` is that of the first byte between them."""

    base: int
    address: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The elements that are checked with one set of inputs, and their references on the device.

    Attributes:
        count: how many.
        indices: their flat logical indices; None for the whole output.
        addresses: of "indices", 0 for the whole output, "sums" and "scales", 0 where results must be exact; as
            `reference_step` has them.
    """

    count: int
    indices: NDArray[np.int64] | None
    addresses: dict[str, int]


_NOTHING = _Buffer(base=0, address=0, bytes=-1)


class CudaRig(Rig):
    """Trials of one problem on one CUDA device, on a stream of its own."""

    def __init__(
        self,
        problem: ProblemDescription,
        device: Device,
        compiler: Compiler,
        seed: int,
        budget: SampleBudget | None,
    ) -> None:
        super().__init__(problem, seed)
        self._kernels = DeviceKernels(device, compiler)
        self._memory = DeviceMemory(device.index)
        self._budget = budget or SampleBudget.of(device)
        self._samples: dict[Values, _Sample] = {}
        try:
            self._buffers = {name: self._guarded(problem.tensor(name).bytes) for name in _TENSORS}
            self._buffers["the workspace"] = self._guarded(0)
            self._report = self._memory.allocate(_SLOTS * _SLOT_BYTES)
            budget = self._budget.within(self._memory.free_bytes // _MEMORY_SHARE)
            self._whole = budget.covers(problem, sum(_SUM_BYTES + _scale_bytes(values) for values in Values))
        except BaseException:
            self._memory.close()
            raise

    def trial(self, invoker: Invoker, values: Values, factor: float | None) -> Findings:
        """See `Rig.trial`."""
        with self._memory:
            self._place(invoker.alignment_bytes)
            self._prepare(values, invoker.workspace_bytes)
            if values not in self._samples:
                self._samples[values] = self._sample(values)
            x, w, y = (self._buffers[name].address for name in _TENSORS)
            workspace = self._buffers["the workspace"].address if invoker.workspace_bytes else 0
            invoker.run(x, w, y, workspace, self._memory.stream_address)
            self._check(values, factor)
            report = self._memory.download(self._report, _SLOTS, np.uint64)
            return self._findings(report, values, factor)

    def close(self) -> None:
        """Give all memory back."""
        self._memory.close()

    def _guarded(self, size: int) -> _Buffer:
        base = self._memory.allocate(size + 2 * GUARD_BYTES + _MOST_SHIFT)
        return _Buffer(base=base, address=base + GUARD_BYTES, bytes=size)

    def _place(self, alignment: int) -> None:
        """Move the tensors to addresses that are multiples of what the candidate asks for, and of no more."""
        for name in _TENSORS:
            buffer = self._buffers[name]
            address = buffer.base + GUARD_BYTES + alignment % _MOST_SHIFT
            self._buffers[name] = replace(buffer, address=address)

    def _prepare(self, values: Values, workspace_bytes: int) -> None:
        """Fresh inputs, everything else poisoned, an empty report with the inputs' checksums."""
        stream = self._memory.stream_address
        if self._buffers["the workspace"].bytes != workspace_bytes:
            self._memory.free(self._buffers["the workspace"].base)
            self._buffers["the workspace"] = _NOTHING
            self._buffers["the workspace"] = self._guarded(workspace_bytes)
        for buffer in self._buffers.values():
            self._memory.set_bytes(buffer.address - GUARD_BYTES, POISON, buffer.bytes + 2 * GUARD_BYTES)
        for name in self.problem.direction.inputs:
            seed = self.tensor_seed(name, values)
            self._kernels.fill(self.problem.tensor(name), self._buffers[name].address, values, seed, stream)
        self._memory.set_bytes(self._report, 0, _SLOTS * _SLOT_BYTES)
        self._checksums(_BEFORE)

    def _sample(self, values: Values) -> _Sample:
        """Which elements are checked with the inputs that are in place, and their references."""
        sample = self._placed(values)
        addresses = {name: self._buffers[name].address for name in self.problem.direction.inputs}
        step = reference_step(self.problem, None if sample.indices is None else sample.count)
        self._kernels.bind_step(step, addresses | sample.addresses, self._memory.stream_address)()
        return sample

    def _placed(self, values: Values) -> _Sample:
        """Memory for the references of the whole output where the budget allows, else of elements of its own."""
        indices, listed, count = None, 0, self.problem.output.size
        if not self._whole:
            indices = sample_indices(self.problem, self.positions(values), self._budget)
            listed, count = self._memory.upload(indices), indices.size
        scales = self._memory.allocate(_scale_bytes(values) * count) if _scale_bytes(values) else 0
        addresses = {"indices": listed, "sums": self._memory.allocate(_SUM_BYTES * count), "scales": scales}
        return _Sample(count=count, indices=indices, addresses=addresses)

    def _check(self, values: Values, factor: float | None) -> None:
        output = self.problem.output
        addresses = {"out": self._buffers[self.problem.direction.output].address, "report": self._report}
        self._launch("verify_written", output.size, ("out", int64(output.size), _slot(_WRITTEN)), addresses)
        lifted, sample = self.problem.lifted(3).output, self._samples[values]
        arguments: tuple[Argument, ...] = (
            "out",
            "indices",
            "sums",
            "scales",
            int64(sample.count),
            float64(-1.0 if factor is None else factor),
            int32(output.dtype.mantissa_bits),
            int32(least_exponent(output.dtype)),
            *map(int64, lifted.shape),
            *map(int64, lifted.strides),
            _slot(_COMPARED),
        )
        self._launch("verify_compare", sample.count, arguments, addresses | sample.addresses)
        self._checksums(_AFTER)
        for i, buffer in enumerate(self._buffers.values()):
            for side, start in enumerate((buffer.address - GUARD_BYTES, buffer.address + buffer.bytes)):
                addresses = {"guard": start, "report": self._report}
                arguments = ("guard", int64(GUARD_BYTES), _slot(_GUARDS + 2 * i + side))
                self._launch("verify_guard", GUARD_BYTES, arguments, addresses)

    def _checksums(self, slot: int) -> None:
        for i, name in enumerate(self.problem.direction.inputs):
            buffer = self._buffers[name]
            addresses = {"words": buffer.address, "report": self._report}
            self._launch(
                "verify_checksum", buffer.bytes // 2, ("words", int64(buffer.bytes // 2), _slot(slot + i)), addresses
            )

    def _launch(self, entry: str, items: int, arguments: tuple[Argument, ...], addresses: dict[str, int]) -> None:
        kernel = GridStride(source="verify.cu", entry=entry, items=items, dtype=self.problem.output.dtype)
        self._kernels.bind(kernel, arguments, addresses, self._memory.stream_address)()

    def _findings(self, report: NDArray[np.uint64], values: Values, factor: float | None) -> Findings:
        unwritten, wrong = int(report[_WRITTEN]), int(report[_COMPARED])
        first = self.problem.output.size - int(report[_WRITTEN + 1])
        worst = self._worst(int(report[_COMPARED + 1]) & 0xFFFFFFFF, values, factor) if wrong else None
        return Findings(
            checked=self._samples[values].count,
            wrong=wrong,
            worst=worst,
            unwritten=unwritten,
            first_unwritten=self.index_in_memory(first) if unwritten else None,
            damaged=self._damaged(report),
            max_error=_float(report[_COMPARED + 2]),
            bound_ratio=_float(report[_COMPARED + 3]),
        )

    def _damaged(self, report: NDArray[np.uint64]) -> tuple[str, ...]:
        damaged = []
        for i, name in enumerate(self._buffers):
            for side, place in enumerate(("before", "after")):
                if report[_GUARDS + 2 * i + side]:
                    damaged.append(f"the guard band {place} {name}")
        for i, name in enumerate(self.problem.direction.inputs):
            if report[_BEFORE + i] != report[_AFTER + i]:
                damaged.append(f"input {name}")
        return tuple(damaged)

    def _worst(self, position: int, values: Values, factor: float | None) -> WrongElement:
        output, sample = self.problem.output, self._samples[values]
        index = self.output_index(position if sample.indices is None else int(sample.indices[position]))
        place = sum(i * stride for i, stride in zip(index, output.strides, strict=True))
        address = self._buffers[self.problem.direction.output].address + place * output.dtype.itemsize
        wanted, bound = self._memory.download(sample.addresses["sums"] + _SUM_BYTES * position, 1, np.float64), 0.0
        if factor is None:
            wanted = round_once(wanted, output.dtype).astype(np.float64)
        else:
            scales = self._memory.download(sample.addresses["scales"] + _SCALE_BYTES * position, 2, np.float32)
            squares = scales[1:].astype(np.float64) ** 2
            bound = float(error_bounds(wanted, squares, factor, output.dtype).total[0])
        got = float(self._memory.download(address, 1, numpy_dtype(output.dtype))[0])
        return WrongElement(index=index, got=got, wanted=float(wanted[0]), bound=bound)


def _scale_bytes(values: Values) -> int:
    """Bytes of the scales of an element; where sums are exact there is no bound for them to make."""
    return 0 if values is Values.TERNARY else _SCALE_BYTES


def _slot(number: int) -> Pointer:
    return Pointer(buffer="report", offset_bytes=_SLOT_BYTES * number)


def _float(slot: np.uint64) -> float:
    """A float from the bits in a slot."""
    return float(np.uint32(slot).view(np.float32))
