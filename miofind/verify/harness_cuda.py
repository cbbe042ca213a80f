"""Trials on a CUDA device: everything is filled, poisoned, compared and checked there; one small report comes back."""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from miofind.core.epilogue import EPILOGUE_OPERANDS
from miofind.core.operand import WORKSPACE_ALIGNMENT, Operand
from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.device.device import Device
from miofind.device.memory import DeviceMemory, HostInt
from miofind.errors import raise_if_interrupted
from miofind.launch.device_kernels import (
    COMPARISON,
    DEVICE_THREADS,
    GUARD_BANDS,
    GUARDED_BUFFERS,
    Argument,
    DeviceKernels,
    GridStride,
    Scaling,
    check_kernel,
    filling,
    int64,
)
from miofind.launch.invoker import bases_of
from miofind.launch.pdl import supports_pdl
from miofind.reference.convolution import numpy_dtype, reference_step, round_once
from miofind.solver.steps import Pointer
from miofind.solver.structs import Struct
from miofind.verify.accuracy import error_bounds, least_exponent, overflow
from miofind.verify.channel_sums import CHANNEL_SUMS, SUMMED, WrongSum, channel_sums_terms
from miofind.verify.epilogue_bounds import EpilogueStandard
from miofind.verify.epilogue_cuda import BOUND_BYTES, RESULT_BYTES, EpilogueTrial, epilogue_kernel
from miofind.verify.harness import (
    GUARD_BYTES,
    MOST_LATE_BYTES,
    PACKED_WEIGHTS,
    PLACEMENT_BYTES,
    WORKSPACE,
    CheckHarness,
    CheckResult,
    PackedForm,
    Poison,
    Setting,
    WrongElement,
)
from miofind.verify.ranges import UNSCALED, Powers, axes
from miofind.verify.sampling import SampleBudget, sample_indices

if TYPE_CHECKING:
    from miofind.compiler import Compiler
    from miofind.launch.invoker import Invoker

logger = logging.getLogger(__name__)

# Report: 64-bit slots that the kernels of harness/verify.cu add to.
_SLOT_BYTES = 8
_WRITTEN = 0
_COMPARED = 2
_OUTPUT = 6
_ONE = 7
_INPUTS = 8
_LOW_BITS = 0xFFFFFFFF  # of a slot that holds a number of 32 bits
# Of an element: a float64 sum, and two float32 scales where results are not exact. What is kept at most: sums of small
# integers, of normal numbers, and of normal numbers with infinities.
_SUM_BYTES = 8
_SCALE_BYTES = 8
_DETAIL_BYTES = 24  # of a channel of a second output: three float64
_ELEMENT_BYTES = 3 * _SUM_BYTES + 2 * _SCALE_BYTES
_FUSED_ELEMENT_BYTES = _ELEMENT_BYTES + 3 * (RESULT_BYTES + BOUND_BYTES)
_MEMORY_SHARE = 4
# Infinities spoil whole tiles where they go astray: a sample sees that, where the whole output would take long.
_PLANTED_SHARE = 4
# How long two runs wait for the host to launch both.
_HELD_NS = 20_000_000
_OTHER = "the other"
# How long the kernel that makes late inputs lets the next one run beside it, and its blocks, which leave room for that.
_LATE_NS = 30_000
_LATE_BLOCKS = 32
_WHOLE = "the whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """Device memory between guard bands; `address` is that of the first byte between them."""

    base: int
    address: int
    bytes: int


class _Launch(NamedTuple):
    """A kernel, its arguments, and addresses by the names in them."""

    kernel: GridStride
    arguments: tuple[Argument, ...]
    addresses: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The elements that are checked with one set of inputs, and their references on the device.

    Attributes:
        count: how many.
        indices: their flat logical indices; None for the whole output.
        addresses: of "indices", 0 for the whole output, "sums" and "scales", 0 where sums are exact; as
            `reference_step` has them. With an epilogue also of "results" and "bounds", as `epilogue_kernel` has them.
    """

    count: int
    indices: NDArray[np.int64] | None
    addresses: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """What outputs are compared with.

    Attributes:
        sample: the elements; its "sums" and "scales" are those of the results.
        factor: of the second scale, in the bound; None where the output must equal the rounded sums.
        powers: of two that the sums are multiplied by.
    """

    sample: _Sample
    factor: float | None
    powers: Powers


_NOTHING = _Buffer(base=0, address=0, bytes=-1)


class CudaHarness(CheckHarness):
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
        self._supports_pdl = supports_pdl(device)
        self._budget = budget or SampleBudget.of(device)
        self._epilogue_operands = problem.epilogue.operands
        self._samples: dict[Setting, _Sample] = {}
        self._checksums: defaultdict[Setting, dict[str, int]] = defaultdict(dict)
        self._injected_places: dict[str, tuple[int, int]] = {}
        self._packed: dict[int, _Buffer] = {}
        self._rooms: dict[str, _Buffer] = {}
        self._tables: dict[tuple[int, ...], int] = {}
        self._bound: dict[Hashable, Callable[[], None]] = {}
        self._released: HostInt | None = None
        self._guards = _INPUTS + len(self.inputs)  # two slots a buffer
        launches = math.ceil((len(problem.operands) + 1) / GUARDED_BUFFERS)  # packed weights take the place of w
        self._sums = self._guards + 2 * GUARDED_BUFFERS * launches  # two slots a second output
        self._slots = self._sums + 2 * len(problem.epilogue.outputs)
        self._details: dict[str, int] = {}
        try:
            with self._memory:
                self._buffers = {operand.name: self._guarded(operand.tensor.bytes) for operand in problem.operands}
                self._buffers[WORKSPACE] = self._room(WORKSPACE, 0, WORKSPACE_ALIGNMENT)
                self._report = self._memory.allocate(self._slots * _SLOT_BYTES)
                budget = self._budget.within(self._memory.free_bytes // _MEMORY_SHARE)
                self._details = {
                    name: self._memory.allocate(_DETAIL_BYTES * problem.k) for name in problem.epilogue.outputs
                }
                size = _FUSED_ELEMENT_BYTES if problem.epilogue.changes_results else _ELEMENT_BYTES
                self._whole = {
                    nonfinite: budget.share(_PLANTED_SHARE if nonfinite else 1).covers(problem, size)
                    for nonfinite in (False, True)
                }
        except BaseException:
            self._memory.close()
            raise

    @property
    def has_late_inputs(self) -> bool:
        """See `CheckHarness.has_late_inputs`."""
        size = sum(self._buffers[name].bytes for name in self.inputs)
        return self._supports_pdl and size <= MOST_LATE_BYTES

    def check(self, invoker: Invoker, setting: Setting, factor: float | None) -> CheckResult:
        """See `CheckHarness.check`."""
        inputs = self.inputs
        with self._memory:
            self._begin(setting, invoker)
            sample = self._sample(setting)
            other = self._other_buffers(invoker) if self.runs_beside(invoker, setting) else {}
            if setting.beside is None or not other:
                run = functools.partial(self._run, invoker, self._addresses(), setting)
                if setting.is_late:
                    self._run_late(run)
                else:
                    run()
                return self._result(setting, factor, sample, inputs)
            with self._with(other):
                self._begin(setting.beside, invoker)
                self._sample(setting.beside)
            with self._held(), self._memory.beside() as stream:
                self._run(invoker, self._addresses(), setting)
                with self._with(other):
                    self._run(invoker, self._addresses(), setting.beside, stream)
            result = self._result(setting, factor, sample, inputs)
            if not result.is_right:
                return result
            with self._with(other):
                self._clear_report()
                return self._result(setting.beside, factor, sample, inputs)

    def _other_buffers(self, invoker: Invoker) -> dict[str, _Buffer]:
        """Tensors and a workspace for a second run, placed as those of the first; nothing where there is no room."""
        tensors = {operand.name: self._buffers[operand.name] for operand in self.problem.operands}
        sizes = {name: (buffer.bytes, buffer.address % PLACEMENT_BYTES) for name, buffer in tensors.items()}
        sizes[WORKSPACE] = (invoker.workspace_bytes, WORKSPACE_ALIGNMENT)
        return self._more_buffers(_OTHER, sizes)

    def _more_buffers(self, kind: str, sizes: Mapping[str, tuple[int, int]]) -> dict[str, _Buffer]:
        """Buffers by name, of so many bytes and so far behind a multiple; nothing where there is no room for all."""
        try:
            return {name: self._room(f"{kind} {name}", *size) for name, size in sizes.items()}
        except MemoryError:
            for name in sizes:
                self._give_back(f"{kind} {name}")
            return {}

    def _give_back(self, name: str) -> None:
        """Free the memory of a buffer whose size changes, where it has some."""
        held = self._rooms.pop(name, None)
        if held is not None:
            self._memory.stream.synchronize()
            self._memory.free(held.base)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """What is given to streams meanwhile begins afterwards, all at once."""
        if self._released is None:
            self._released = self._memory.host_int()
        released = self._released
        released.value = 0
        launch = _Launch(self._check("hold", 1), ("released", int64(_HELD_NS)), {"released": released.address})
        self._start("hold", lambda: launch)
        try:
            yield
        finally:
            released.value = 1

    def _run_late(self, run: Callable[[], None]) -> None:
        """A run in a CUDA graph, behind a kernel that lets it begin early and makes its inputs, NaN until that ends.

        In the stream where it cannot be captured; with the inputs as they are where there is no room for them twice.
        """
        inputs = [self._buffers[name] for name in self.inputs]
        sizes = {name: (self._buffers[name].bytes, 0) for name in self.inputs}
        kept = [*self._more_buffers(_WHOLE, sizes).values()]
        if not kept:
            run()
            return
        away, back = self._copying(inputs, kept, 0), self._copying(kept, inputs, _LATE_NS)
        self._start(*away)
        for buffer in inputs:
            self._memory.set_bytes(buffer.address, Poison.NAN, buffer.bytes)

        def run_behind() -> None:
            self._start(*back)
            run()

        try:
            graph = self._memory.graph_of(run_behind)
            graph.launch(self._memory.stream)
            self._memory.stream.synchronize()  # it ends before what it launches may be gone
        except Exception as error:  # whatever a library raises under capture
            raise_if_interrupted(error)
            logger.debug("a run cannot be captured: %s", error)
            run_behind()

    def _copying(
        self, sources: Sequence[_Buffer], targets: Sequence[_Buffer], late_ns: int
    ) -> tuple[Hashable, Callable[[], _Launch]]:
        """What names a kernel that copies buffers, and how it is launched."""
        pairs = zip(sources, targets, strict=True)
        table = tuple(number for one, other in pairs for number in (one.address, other.address, one.bytes))
        if table not in self._tables:
            self._tables[table] = self._memory.upload(np.array(table, np.int64))
        arguments: tuple[Argument, ...] = ("table", int64(len(sources)), int64(late_ns))
        kernel = self._check("late", _LATE_BLOCKS * DEVICE_THREADS)
        return ("late", table), lambda: _Launch(kernel, arguments, {"table": self._tables[table]})

    @contextmanager
    def _with(self, buffers: Mapping[str, _Buffer]) -> Iterator[None]:
        """Some buffers are others meanwhile."""
        mine, self._buffers = self._buffers, {**self._buffers, **buffers}
        try:
            yield
        finally:
            self._buffers = mine

    def pack(self, packed: PackedForm, setting: Setting, buffer: int) -> tuple[str, ...]:
        """See `CheckHarness.pack`."""
        with self._memory:
            into = self._packed[buffer] = self._room(f"{PACKED_WEIGHTS} {buffer}", packed.bytes)
            self._memory.set_bytes(into.address, setting.poison, into.bytes)
            self._begin(replace(setting, is_aligned=False), packed.pack)
            self._fill("w", setting)
            self._guard("poison", setting.poison, {PACKED_WEIGHTS: into})
            self._run(packed.pack, {"w": self._buffers["w"].address, "y": into.address}, setting)
            return self._packing_damage(setting, into)

    def _packing_damage(self, setting: Setting, into: _Buffer) -> tuple[str, ...]:
        buffers = {"w": self._buffers["w"], WORKSPACE: self._buffers[WORKSPACE], PACKED_WEIGHTS: into}
        self._checksum(self._buffers["w"], _INPUTS)
        self._guard("guards", setting.poison, buffers)
        return self._damaged(self._read_report(), buffers, setting, ("w",))

    def check_packed(self, packed: PackedForm, setting: Setting, factor: float | None, buffer: int) -> CheckResult:
        """See `CheckHarness.check_packed`."""
        with self._memory:
            self._begin(replace(setting, is_aligned=False), packed.run)
            sample = self._sample(setting)
            weights, w = self._packed[buffer], self._buffers["w"]
            self._memory.set_bytes(w.address, Poison.NAN, w.bytes)
            before = self._checksum_now(weights)
            self._guard("poison", setting.poison, {PACKED_WEIGHTS: weights})
            self._clear_report()
            self._run(packed.run, self._addresses() | {"w": weights.address}, setting)
            others = tuple(name for name in self.inputs if name != "w")
            result = self._result(setting, factor, sample, others, weights)
            changed = [] if self._checksum_now(weights) == before else [PACKED_WEIGHTS]
            return replace(result, damaged=(*result.damaged, *changed))

    def close(self) -> None:
        """Give all memory back."""
        self._bound.clear()
        self._memory.close()

    def _addresses(self) -> dict[str, int]:
        return {operand.name: self._buffers[operand.name].address for operand in self.problem.operands}

    def _guarded(self, size: int) -> _Buffer:
        """Memory at a multiple of PLACEMENT_BYTES, poisoned, guard bands included."""
        base = self._memory.allocate(size + 2 * GUARD_BYTES + PLACEMENT_BYTES)
        self._memory.set_bytes(base, Poison.NAN, size + 2 * GUARD_BYTES + PLACEMENT_BYTES)
        return _Buffer(base=base, address=base + GUARD_BYTES, bytes=size)

    def _begin(self, setting: Setting, invoker: Invoker) -> None:
        """Place the tensors, poison what is not an input, empty the report."""
        self._place(0 if setting.is_aligned else invoker.alignment_bytes)
        self._reserve(invoker.workspace_bytes)
        if not setting.keeps_workspace:
            workspace = self._buffers[WORKSPACE]
            self._memory.set_bytes(workspace.address, setting.poison, workspace.bytes)
        for name in self.outputs:
            output = self._buffers[name]
            self._memory.set_bytes(output.address, setting.poison, output.bytes)
        self._guard("poison", setting.poison, self._buffers)
        self._clear_report()

    def _read_report(self) -> list[int]:
        """What its slots hold, after everything queued before."""
        report: list[int] = self._memory.download(self._report, self._slots, np.uint64).tolist()
        return report

    def _clear_report(self) -> None:
        self._memory.set_bytes(self._report, 0, self._slots * _SLOT_BYTES)

    def _place(self, alignment: int) -> None:
        """Move the tensors to addresses that are multiples of what the candidate asks for, and of no more."""
        for name in (operand.name for operand in self.problem.operands):
            buffer = self._buffers[name]
            address = buffer.base + GUARD_BYTES + self.offset(name, alignment)
            if address != buffer.address:
                self._buffers[name] = _Buffer(base=buffer.base, address=address, bytes=buffer.bytes)
                self._memory.set_bytes(buffer.base, Poison.NAN, buffer.bytes + 2 * GUARD_BYTES + PLACEMENT_BYTES)

    def _reserve(self, workspace_bytes: int) -> None:
        """Make the workspace that large, poisoned where it was not; memory once taken is kept for the next."""
        if self._buffers[WORKSPACE].bytes != workspace_bytes:
            self._buffers[WORKSPACE] = _NOTHING  # whatever comes of asking for more
            self._buffers[WORKSPACE] = self._room(WORKSPACE, workspace_bytes, WORKSPACE_ALIGNMENT)

    def _room(self, name: str, size: int, offset: int = 0) -> _Buffer:
        """Memory for a buffer whose size changes from one candidate to the next, poisoned, guard bands included.

        It lies `offset` bytes, below PLACEMENT_BYTES, behind a multiple of PLACEMENT_BYTES.
        """
        held = self._rooms.get(name)
        if held is None or held.bytes < size:
            self._give_back(name)
            held = self._rooms[name] = self._guarded(size)
        self._memory.set_bytes(held.base, Poison.NAN, size + 2 * GUARD_BYTES + PLACEMENT_BYTES)
        return _Buffer(base=held.base, address=held.base + GUARD_BYTES + offset, bytes=size)

    def _fill(self, name: str, setting: Setting) -> None:
        """Fill an input; the first time, take the checksum of what it holds."""
        tensor, buffer, values = self.problem.tensor(name), self._buffers[name], self.values_of(name, setting)
        pair, axis = self.powers_of(name, setting)

        def launch() -> _Launch:
            scaling = Scaling(even=pair[0], odd=pair[1], stride=tensor.strides[axis.dimension], size=axis.size)
            kernel, arguments = filling(tensor, values, self.tensor_seed(name, values), scaling)
            return _Launch(kernel, arguments, {"out": buffer.address})

        self._start(("fill", buffer.address, values, pair), launch)
        if setting.nonfinite and name in self.injected:
            self._inject(name)
        checksums = self._checksums[setting.contents]
        if name not in checksums:
            checksums[name] = self._checksum_now(buffer)
            self._clear_report()

    def _inject(self, name: str) -> None:
        injected = self.injected[name]
        if name not in self._injected_places:
            self._injected_places[name] = (self._memory.upload(injected.places), self._memory.upload(injected.values))
        places, values = self._injected_places[name]
        addresses = {"out": self._buffers[name].address, "places": places, "values": values}
        count, dtype = injected.places.size, self.problem.tensor(name).dtype
        kernel = GridStride(source="harness/random_inputs.cu", entry="plant", items=count, dtype=dtype)
        arguments = ("out", "places", "values", int64(count))
        self._start(("plant", addresses["out"]), lambda: _Launch(kernel, arguments, addresses))

    def _run(self, invoker: Invoker, addresses: Mapping[str, int], setting: Setting, stream: int | None = None) -> None:
        workspace = self._buffers[WORKSPACE].address if invoker.workspace_bytes else 0
        stream = self._memory.stream_address if stream is None else stream
        invoker.run(bases_of(self.problem, addresses, workspace, self.parameters_of(setting)), stream)

    def _sample(self, setting: Setting) -> _Sample:
        """What is checked with a setting, and the references of its unscaled inputs; leaves scaled ones in place."""
        known = self._samples.get(setting.unscaled)
        if known is None:
            known = self._placed(setting.unscaled)
            for name in self.inputs:
                self._fill(name, setting.unscaled)
            addresses = {name: self._buffers[name].address for name in self.inputs}
            step = reference_step(self.problem.bare, None if known.indices is None else known.count)
            self._kernels.bind_step(step, addresses | known.addresses, self._memory.stream_address)()
            self._samples[setting.unscaled] = known  # not before: its sums are there
        for name in self.inputs:
            self._fill(name, setting)
        return known

    def _placed(self, setting: Setting) -> _Sample:
        """Memory for the references of the whole output where the budget allows, else of elements of its own."""
        indices, listed, count = None, 0, self.problem.output.size
        if not self._whole[setting.nonfinite]:
            indices = sample_indices(self.problem, self.positions(setting), self._budget)
            listed, count = self._memory.upload(indices), indices.size
        exact = setting.values is Values.TERNARY
        scales = 0 if exact else self._memory.allocate(_SCALE_BYTES * count)
        addresses = {"indices": listed, "sums": self._memory.allocate(_SUM_BYTES * count), "scales": scales}
        if self.problem.epilogue.changes_results:
            sizes = {"results": RESULT_BYTES * count, "bounds": BOUND_BYTES * count}
            addresses |= {name: self._memory.allocate(size) for name, size in sizes.items()}
        return _Sample(count=count, indices=indices, addresses=addresses)

    def _result(
        self,
        setting: Setting,
        factor: float | None,
        sample: _Sample,
        inputs: tuple[str, ...],
        weights: _Buffer | None = None,
    ) -> CheckResult:
        """What the report says of a run, after everything was checked; `weights` are the packed ones."""
        output = self.problem.output
        buffer = self._buffers[self.output]
        if not setting.nonfinite:
            arguments = ("out", int64(output.size), _slot(_WRITTEN))
            written = _Launch(self._check("written", output.size), arguments, {"out": buffer.address})
            self._start(("written", buffer.address), lambda: written)
        judgement = self._judgement(setting, factor, sample)
        self._compare(judgement)
        self._compare_sums()
        for name in self.outputs:  # added up: equal bits of all give equal sums
            self._checksum(self._buffers[name], _OUTPUT)
        for i, name in enumerate(inputs):
            self._checksum(self._buffers[name], _INPUTS + i)
        guarded = self._guarded_buffers(inputs, weights)
        self._guard("guards", setting.poison, guarded)
        report = self._read_report()
        unwritten, wrong = report[_WRITTEN], report[_COMPARED]
        first = output.size - report[_WRITTEN + 1]
        at = report[_COMPARED + 1] & _LOW_BITS
        return CheckResult(
            checked=sample.count,
            wrong=wrong,
            worst=self._worst(at, judgement, setting) if wrong else None,
            unwritten=unwritten,
            first_unwritten=self.index_in_memory(first) if unwritten else None,
            damaged=self._damaged(report, guarded, setting, inputs),
            max_error=_float(report[_COMPARED + 2]),
            bound_ratio=_float(report[_COMPARED + 3]),
            fingerprint=report[_OUTPUT],
            sums=tuple(self._wrong_sums(report)),
        )

    def _judgement(self, setting: Setting, factor: float | None, sample: _Sample) -> _Judgement:
        """What a run's output is compared with; with an epilogue its results, which are made now."""
        if not self.problem.epilogue.changes_results:
            return _Judgement(sample=sample, factor=factor, powers=setting.powers)
        standard = EpilogueStandard.of(self.problem, factor, rounds_twice=setting.rounds_twice)
        operands = {name: self._buffers[name].address for name in self._epilogue_operands}

        def launch() -> _Launch:
            addresses = dict.fromkeys(EPILOGUE_OPERANDS, 0) | operands | sample.addresses
            trial = EpilogueTrial(
                count=sample.count,
                powers=setting.powers,
                parameters=self.parameters_of(setting),
                standard=standard,
            )
            return _Launch(*epilogue_kernel(self.problem, trial), addresses)

        self._start(("epilogue", setting.contents, standard, sample.addresses["sums"], *operands.values()), launch)
        results = {"sums": sample.addresses["results"], "scales": sample.addresses["bounds"]}
        made = replace(sample, addresses=sample.addresses | results)
        return _Judgement(sample=made, factor=None if standard.bitwise else 1.0, powers=UNSCALED)

    def _compare(self, judgement: _Judgement) -> None:
        where, sample = self._buffers[self.output].address, judgement.sample

        def launch() -> _Launch:
            arguments = ("out", "indices", "sums", "scales", self._comparison(judgement), _slot(_COMPARED))
            return _Launch(self._check("compare", sample.count), arguments, {"out": where, **sample.addresses})

        self._start(("compare", where, judgement.powers, sample.addresses["sums"], judgement.factor), launch)

    def _compare_sums(self) -> None:
        """Hold the second outputs against sums of what the tensor that they sum holds."""
        for i, operand in enumerate(self.second_outputs):
            self._compare_sum(operand, _slot(self._sums + 2 * i))

    def _compare_sum(self, operand: Operand, slot: Pointer) -> None:
        tensor = self.problem.tensor(SUMMED)
        addresses = {
            "from": self._buffers[SUMMED].address,
            "results": self._buffers[operand.name].address,
            "details": self._details[operand.name],
        }

        def launch() -> _Launch:
            kernel = GridStride(
                source="harness/channel_sums.cu",
                entry="verify_channel_sums",
                items=DEVICE_THREADS * self.problem.k,
                dtype=tensor.dtype,
                defines=(("RESULT", operand.tensor.dtype.value), CHANNEL_SUMS.define),
            )
            return _Launch(kernel, (*addresses, channel_sums_terms(self.problem, operand), slot), addresses)

        self._start(("sums", *addresses.values()), launch)

    def _wrong_sums(self, report: Sequence[int]) -> Iterator[WrongSum]:
        """The second outputs that a report says are wrong."""
        for i, operand in enumerate(self.second_outputs):
            wrong, channel = report[self._sums + 2 * i], report[self._sums + 2 * i + 1] & _LOW_BITS
            if wrong:
                where = self._details[operand.name] + _DETAIL_BYTES * channel
                got, wanted, bound = self._memory.download(where, 3, np.float64).tolist()
                yield WrongSum(
                    name=operand.name,
                    wrong=wrong,
                    channels=self.problem.k,
                    channel=channel,
                    got=got,
                    wanted=wanted,
                    bound=bound,
                )

    def _comparison(self, judgement: _Judgement) -> Struct:
        output = self.problem.output
        (first_even, first_odd), (second_even, second_odd) = judgement.powers.pairs
        return COMPARISON(
            count=judgement.sample.count,
            first_even=2.0**first_even,
            first_odd=2.0**first_odd,
            second_even=2.0**second_even,
            second_odd=2.0**second_odd,
            second_size=axes(self.problem)[1].size,
            overflow=float(overflow(output.dtype)),
            factor=-1.0 if judgement.factor is None else float(judgement.factor),
            mantissa_bits=output.dtype.mantissa_bits,
            least_exponent=int(least_exponent(output.dtype)),
            channels=output.shape[1],
            plane=math.prod(output.shape[2:]),
            image_stride=output.strides[0],
            channel_stride=output.strides[1],
            place_stride=output.strides[-1],
        )

    def _checksum(self, buffer: _Buffer, slot: int) -> None:
        words = buffer.bytes // 2

        def launch() -> _Launch:
            arguments = ("out", int64(words), _slot(slot))
            return _Launch(self._check("checksum", words), arguments, {"out": buffer.address})

        self._start(("checksum", buffer.address, words, slot), launch)

    def _checksum_now(self, buffer: _Buffer) -> int:
        """The checksum of a buffer, at once."""
        slot = self._report + _SLOT_BYTES * _ONE
        self._memory.set_bytes(slot, 0, _SLOT_BYTES)
        self._checksum(buffer, _ONE)
        return int(self._memory.download(slot, 1, np.uint64)[0])

    def _guarded_buffers(self, names: tuple[str, ...], weights: _Buffer | None) -> dict[str, _Buffer]:
        """The buffers of a run by name."""
        buffers = {name: self._buffers[name] for name in (*names, *self.outputs, WORKSPACE)}
        return buffers | ({} if weights is None else {PACKED_WEIGHTS: weights})

    def _guard(self, action: str, poison: Poison, buffers: Mapping[str, _Buffer]) -> None:
        """Poison or check the guard bands of some buffers, four a launch; the first one fills up the last four."""
        every = [*buffers.values()]
        for first in range(0, len(every), GUARDED_BUFFERS):
            four = (every[first:] + every[:1] * GUARDED_BUFFERS)[:GUARDED_BUFFERS]
            slot = self._guards + 2 * first
            key = (action, poison, slot, *((buffer.address, buffer.bytes) for buffer in four))
            self._start(key, functools.partial(self._guarding, action, poison, slot, four))

    def _guarding(self, action: str, poison: Poison, slot: int, four: Sequence[_Buffer]) -> _Launch:
        addresses = {f"buffer {i}": buffer.address for i, buffer in enumerate(four)}
        bands = GUARD_BANDS(
            bytes=tuple(int(buffer.bytes) for buffer in four), band_bytes=GUARD_BYTES, poison=int(poison)
        )
        arguments: tuple[Argument, ...] = (*addresses, bands, *([_slot(slot)] if action == "guards" else []))
        return _Launch(self._check(action, 2 * GUARDED_BUFFERS * GUARD_BYTES), arguments, addresses)

    def _check(self, name: str, items: int) -> GridStride:
        return check_kernel(name, items, self.problem.output.dtype)

    def _start(self, key: Hashable, launch: Callable[[], _Launch]) -> None:
        """Start what a key names; it is bound once, which takes longer than a launch."""
        bound = self._bound.get(key)
        if bound is None:
            kernel, arguments, addresses = launch()
            named = {**addresses, "report": self._report}
            bound = self._bound[key] = self._kernels.bind(kernel, arguments, named, self._memory.stream_address)
        bound()

    def _damaged(
        self, report: Sequence[int], buffers: Mapping[str, _Buffer], setting: Setting, inputs: tuple[str, ...]
    ) -> tuple[str, ...]:
        damaged = []
        for i, name in enumerate(buffers):
            sides = [side for j, side in enumerate(("before", "after")) if report[self._guards + 2 * i + j]]
            damaged += [f"the guard band {side} {name}" for side in sides]
        checksums = self._checksums[setting.contents]
        damaged += [f"input {name}" for i, name in enumerate(inputs) if report[_INPUTS + i] != checksums[name]]
        return tuple(damaged)

    def _worst(self, position: int, judgement: _Judgement, setting: Setting) -> WrongElement:
        output, sample, factor = self.problem.output, judgement.sample, judgement.factor
        index = self.output_index(position if sample.indices is None else int(sample.indices[position]))
        place = sum(i * stride for i, stride in zip(index, output.strides, strict=True))
        address = self._buffers[self.output].address + place * output.dtype.itemsize
        got = float(self._memory.download(address, 1, numpy_dtype(output.dtype))[0])
        exponent = self.exponent_at(index, setting)
        scale = 2.0**exponent
        wanted = scale * self._memory.download(sample.addresses["sums"] + _SUM_BYTES * position, 1, np.float64)
        bound = 0.0
        if factor is None:
            wanted = round_once(wanted, output.dtype).astype(np.float64)
        elif np.isfinite(wanted).all():
            scales = self._memory.download(sample.addresses["scales"] + _SCALE_BYTES * position, 2, np.float32)
            squares = (scale * scales[1:].astype(np.float64)) ** 2
            bound = float(error_bounds(wanted, squares, factor, output.dtype).total[0])
        return WrongElement(index=index, got=got, wanted=float(wanted[0]), bound=bound, exponent=exponent)


def _slot(number: int) -> Pointer:
    return Pointer(buffer="report", offset_bytes=_SLOT_BYTES * number)


def _float(slot: int) -> float:
    """A float from the low bits in a slot."""
    return float(np.uint32(slot & _LOW_BITS).view(np.float32))
