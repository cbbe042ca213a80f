"""Convolutions by cuDNN: the plans it offers for a problem, and one recorded plan ready to launch.

A plan is recorded as engine and knobs, never as a position in a list, so that it means the same in another process and
another release.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, require_cupy
from miofind.errors import LaunchError
from miofind.libraries import cudnn_backend as backend
from miofind.libraries.cudnn_backend import Attribute, CudnnFunctions, CudnnHandle, Descriptor, Kind, Type
from miofind.libraries.cudnn_graph import (
    ConvGraph,
    Mode,
    config_engine,
    config_knobs,
    engine_config,
    engine_index,
)
from miofind.libraries.cudnn_notes import (
    Note,
    growth,
    is_deterministic,
    is_exact,
    known_fault,
    notes_text,
    refused_notes,
)
from miofind.solver.steps import CudnnStep

logger = logging.getLogger(__name__)

HEURISTIC = -1
_PACKS = 64
_MOST_NUMBERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One way in which cuDNN can compute a problem.

    Attributes:
        engine: global index of the engine.
        knobs: (knob type, choice) pairs, by knob type.
        notes: the engine's numerical notes.
        growth: how much wider the error bound is than direct summation's.
        workspace_bytes: bytes of workspace that it needs.
    """

    engine: int
    knobs: tuple[tuple[int, int], ...]
    notes: frozenset[Note]
    growth: float
    workspace_bytes: int

    @property
    def deterministic(self) -> bool:
        """Whether equal inputs give equal bits."""
        return is_deterministic(self.notes)

    @property
    def exact(self) -> bool:
        """Whether small integers give exact results."""
        return is_exact(self.notes)


def cudnn_version() -> int:
    """Version of the loaded library, 91900 for 9.19.0.

    Raises:
        MissingLibraryError: it cannot be loaded.
    """
    return backend.library().version


@functools.lru_cache(maxsize=256)
def engine_plans(problem: ProblemDescription, device: Device) -> tuple[EnginePlan, ...]:
    """The plans that cuDNN's heuristics offer for a problem, best first; no plan is built.

    Engines that are wrong for the problem, or less precise than it allows, are left out. Takes 5 to 100 ms.

    Raises:
        MissingLibraryError: cuDNN cannot be loaded.
        LaunchError: cuDNN refuses the problem.
    """
    require_cupy()
    import cupy

    with cupy.cuda.Device(device.index):
        offers = (plan for plan, _ in _offers(ConvGraph(problem, _handle(device))))
        return tuple(dict.fromkeys(plan for plan in offers if not _fault(plan.engine, plan.notes, problem)))


def _handle(device: Device) -> CudnnHandle:
    import cupy

    cupy.cuda.runtime.setDevice(device.index)  # makes the device's context current in a thread that has none
    return backend.thread_handle(device.index)


def _offers(graph: ConvGraph) -> Iterator[tuple[EnginePlan, Descriptor]]:
    """What the heuristics propose, with the engine configuration; proposals that do not hold are passed over."""
    notes: dict[int, frozenset[Note]] = {}
    for mode in Mode:
        for config in graph.suggestions(mode):
            try:
                offer = _offer(graph, config, notes)
            except LaunchError as error:
                if isinstance(error.__cause__, MemoryError):
                    raise
                logger.debug("a proposal of cuDNN's heuristics %s is unusable: %s", mode.name, error)
                continue
            yield offer, config


def _offer(graph: ConvGraph, config: Descriptor, notes: dict[int, frozenset[Note]]) -> EnginePlan:
    engine = config_engine(config)
    index = engine_index(engine)
    if index not in notes:
        notes[index] = graph.notes(engine)
    (workspace_bytes,) = config.values(Attribute.CONFIG_WORKSPACE_SIZE, Type.INT64)
    return EnginePlan(
        engine=index,
        knobs=config_knobs(config),
        notes=notes[index],
        growth=growth(notes[index], graph.problem),
        workspace_bytes=workspace_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvCall:
    """What cuDNN executes a plan by beside operands, workspace and stream, for callers in C.

    It is for the thread that asked for it, as long as no lease of the plan ends. What it names lasts as long as the
    plan that it is of.

    Attributes:
        functions: addresses of the library's.
        handle, plan: addresses of the library's.
        ids: of the operands in order, by which the plan knows them.
        leases_ended: address of the count of the plan's leases that ended, 8 bytes.
        leases_ended_before: how many these were.
    """

    functions: CudnnFunctions
    handle: int
    plan: int
    ids: tuple[int, ...]
    leases_ended: int
    leases_ended_before: int


class ConvPlan:
    """One recorded plan of a problem on a device; may be launched from any thread.

    cuDNN's handles belong to one thread at a time and its plans are not safe in several at once, so each thread builds
    its own from the record on its first launch, or takes over that of a thread which has ended. None ends before the
    ConvPlan does: kernels that a plan has compiled are unloaded with it, and a CUDA graph may hold them.

    Attributes:
        workspace_bytes: bytes of workspace that a launch may use.
    """

    __slots__ = ("_device", "_idle", "_local", "_parameters", "_problem", "_step", "workspace_bytes")

    def __init__(
        self,
        problem: ProblemDescription,
        step: CudnnStep,
        device: Device,
        parameters: EpilogueParameters = DEFAULT_PARAMETERS,
    ) -> None:
        self._problem = problem
        self._parameters = parameters
        self._step = step
        self._device = device
        self._idle: list[_BoundPlan] = []
        self._local = threading.local()
        self.workspace_bytes = step.workspace_bytes

    def prepare(self) -> _BoundPlan:
        """The plan of this thread, built where it has none yet; `launch` does it where it was not done.

        Raises:
            LaunchError: cuDNN has no such plan for the problem, or the plan breaks the limits of the record.
        """
        import cupy

        if hasattr(self._local, "bound"):
            return cast(_BoundPlan, self._local.bound)
        with cupy.cuda.Device(self._device.index):
            handle = _handle(self._device)
            try:
                bound = self._idle.pop()
            except IndexError:
                graph = ConvGraph(self._problem, handle, self._parameters)
                bound = _BoundPlan(_build(graph, self._step), graph.ids, graph.factors)
            bound.handle = handle
        self._local.lease = _Lease(bound, self._idle)
        self._local.bound = bound
        return bound

    def launch(
        self, addresses: tuple[int, ...], stream: int, parameters: EpilogueParameters = DEFAULT_PARAMETERS
    ) -> None:
        """Computes the problem on a stream of its device, which is current; asynchronous, allocates nothing.

        Args:
            addresses: on the device, of the problem's operands in order, aligned to 16 bytes; the last one of
                `workspace_bytes` bytes of workspace, or 0.
            stream: its address.
            parameters: with the factors of this launch; the plan's own are otherwise alike.

        Raises:
            LaunchError: the launch failed.
        """
        try:
            bound = self._local.bound
        except AttributeError:
            bound = self.prepare()
        bound.launch(addresses, stream, parameters)

    def call(self, parameters: EpilogueParameters = DEFAULT_PARAMETERS) -> ConvCall:
        """What a launch in this thread executes, with the plan's own numbers, as those given are.

        Raises:
            LaunchError: it takes numbers of each launch, or as of `prepare`.
        """
        return self.prepare().call()


class FusedConvPlan:
    """One recorded plan of a problem with an epilogue: a `ConvPlan` for each kind of numbers that it is launched with.

    cuDNN makes an activation's numbers part of a plan: the first launch with new ones builds it, which takes up to a
    second. Factors are operations of their own, which are given to each launch. A factor of 1 is none, so there is a
    plan with it and one without; engines differ in which they take: where the record's does not, the first of the
    heuristics within its limits computes.
    """

    __slots__ = ("_activation", "_device", "_lock", "_plans", "_problem", "_step", "workspace_bytes")

    def __init__(self, problem: ProblemDescription, step: CudnnStep, device: Device) -> None:
        self._problem = problem
        self._step = step
        self._device = device
        self._activation = problem.epilogue.activation
        self._plans: dict[tuple[bool | float, ...], ConvPlan] = {}
        self._lock = threading.Lock()
        self.workspace_bytes = step.workspace_bytes

    def prepare(self) -> None:
        """Build the plan of the default numbers for this thread.

        Raises:
            LaunchError: as of `ConvPlan.prepare`.
        """
        self._plan(DEFAULT_PARAMETERS).prepare()

    def launch(self, bases: tuple[Any, ...], stream: int) -> None:
        """Compute the problem, as `ConvPlan.launch`; the `EpilogueParameters` are last but one of the bases.

        Raises:
            LaunchError: the launch failed, or it has been launched with too many other numbers of an activation.
        """
        *operands, parameters, workspace = bases
        self._plan(parameters).launch((*operands, workspace), stream, parameters)

    def call(self, parameters: EpilogueParameters = DEFAULT_PARAMETERS) -> ConvCall:
        """What a launch with some numbers in this thread executes.

        Raises:
            LaunchError: it has factors, or as of `launch`.
        """
        return self._plan(parameters).call()

    def _plan(self, parameters: EpilogueParameters) -> ConvPlan:
        alpha, beta, *of_activation = parameters.numbers(self._activation)
        kind = (alpha == 1, beta == 1, *of_activation)
        plan = self._plans.get(kind)
        if plan is None:
            with self._lock:
                plan = self._plans.get(kind)  # another thread may have built it meanwhile
                if plan is not None:
                    return plan
                if len(self._plans) == _MOST_NUMBERS:
                    raise LaunchError(
                        f"cuDNN makes an activation's numbers part of a plan, and {_MOST_NUMBERS} sets of them are in "
                        "use: numbers that change with each run are for solvers of miofind's own"
                    )
                plan = self._plans[kind] = self._made(parameters)
        return plan

    def _made(self, parameters: EpilogueParameters) -> ConvPlan:
        plan = ConvPlan(self._problem, self._step, self._device, parameters)
        try:
            plan.prepare()
        except LaunchError as error:
            if parameters == DEFAULT_PARAMETERS or isinstance(error.__cause__, MemoryError):
                raise
            logger.debug("cuDNN's recorded engine does not take %s: %s", parameters, error)
            allowed = {note.name.lower() for note in {Note.TENSOR_CORE} - refused_notes(self._problem)}
            notes = tuple({*self._step.notes, *allowed})
            step = replace(self._step, engine=HEURISTIC, knobs=(), notes=notes)
            plan = ConvPlan(self._problem, step, self._device, parameters)
            plan.prepare()
        return plan


class _Lease:
    """A thread's hold on a plan, which is idle again when the thread ends."""

    __slots__ = ("_bound", "_idle")

    def __init__(self, bound: _BoundPlan, idle: list[_BoundPlan]) -> None:
        self._bound = bound
        self._idle = idle

    def __del__(self) -> None:
        self._bound.leases_ended.value += 1
        self._idle.append(self._bound)


class _BoundPlan:
    """A plan in one thread; keeps the variant packs of the addresses it was given last.

    Args:
        plan: of the library.
        ids: of the operands in order, by which the plan's graph knows them.
        factors: by what it knows them by, names of the parameters' factors that it reads from host memory.

    Attributes:
        handle: the thread's.
        leases_ended: how many threads that had it ended.
    """

    __slots__ = ("_execute", "_factors", "_ids", "_packs", "_plan", "handle", "leases_ended")

    handle: CudnnHandle

    def __init__(self, plan: Descriptor, ids: Mapping[str, int], factors: Mapping[int, str]) -> None:
        self._plan = plan
        self._ids = (*ids.values(), *factors)
        self._factors = tuple(factors.values())
        self._execute = backend.library().execute
        self._packs: dict[tuple[float, ...], _Pack] = {}
        self.leases_ended = ctypes.c_int64()

    def launch(self, addresses: tuple[int, ...], stream: int, parameters: EpilogueParameters) -> None:
        factors: tuple[float, ...] = ()
        if self._factors:
            factors = tuple(getattr(parameters, name) for name in self._factors)
        pack = self._packs.get(addresses + factors)
        if pack is None:
            pack = self._packs[addresses + factors] = self._pack(addresses, factors)
        handle = self.handle
        if stream != handle.stream:
            handle.use(stream)
        status = self._execute(handle.pointer, self._plan.pointer, pack.descriptor.pointer)
        if status:
            backend.check(status, "executing a plan")

    def call(self) -> ConvCall:
        """What a launch executes.

        Raises:
            LaunchError: the plan reads factors of each launch from the host's memory.
        """
        if self._factors:
            raise LaunchError(f"cuDNN's plan reads {' and '.join(self._factors)} at each launch")
        return ConvCall(
            functions=backend.library().functions,
            handle=self.handle.pointer,
            plan=self._plan.pointer,
            ids=self._ids,
            leases_ended=ctypes.addressof(self.leases_ended),
            leases_ended_before=self.leases_ended.value,
        )

    def _pack(self, addresses: tuple[int, ...], numbers: tuple[float, ...]) -> _Pack:
        if len(self._packs) == _PACKS:
            del self._packs[next(iter(self._packs))]
        descriptor = Descriptor(Kind.VARIANT_PACK)
        *operands, workspace = addresses
        factors = (ctypes.c_float * len(numbers))(*numbers)
        start = ctypes.addressof(factors)
        of_factors = (start + 4 * place for place in range(len(factors)))
        descriptor.set(Attribute.PACK_UNIQUE_IDS, Type.INT64, *self._ids)
        descriptor.set(Attribute.PACK_DATA_POINTERS, Type.VOID_PTR, *operands, *of_factors)
        descriptor.set(Attribute.PACK_WORKSPACE, Type.VOID_PTR, workspace).finalize()
        return _Pack(descriptor=descriptor, factors=factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pack:
    """Addresses as cuDNN takes them; those of factors are of host memory that must last as long."""

    descriptor: Descriptor
    factors: ctypes.Array[ctypes.c_float]


def conv_plan(problem: ProblemDescription, step: CudnnStep, device: Device) -> ConvPlan | FusedConvPlan:
    """The plan that a step records, built for this thread; of a problem with an epilogue, with its default numbers.

    Raises:
        MissingLibraryError: cuDNN cannot be loaded.
        LaunchError: cuDNN has no such plan for the problem, or it wants more workspace than the step declares or has
            numerical notes that the step does not; its cause is a MemoryError where memory ran out.
    """
    require_cupy()
    plan = (FusedConvPlan if problem.epilogue else ConvPlan)(problem, step, device)
    plan.prepare()
    return plan


def _build(graph: ConvGraph, step: CudnnStep) -> Descriptor:
    """The execution plan of a step, within the limits that the step and the problem set."""
    if step.engine == HEURISTIC:
        return _first(graph, step)
    engine = graph.engine(step.engine)
    notes = graph.notes(engine)
    fault = _fault(step.engine, notes, graph.problem) or _undeclared(notes, step)
    if fault:
        raise LaunchError(f"cuDNN engine {step.engine} for {graph.problem} {fault}")
    plan = graph.plan(engine_config(engine, step.knobs))
    (workspace_bytes,) = plan.values(Attribute.PLAN_WORKSPACE_SIZE, Type.INT64)
    if workspace_bytes > step.workspace_bytes:
        raise LaunchError(
            f"cuDNN engine {step.engine} for {graph.problem} wants {workspace_bytes} bytes of workspace, its record "
            f"declares {step.workspace_bytes}: find again with this release of cuDNN ({cudnn_version()})"
        )
    return plan


def _first(graph: ConvGraph, step: CudnnStep) -> Descriptor:
    """The first plan of the heuristics within the limits."""
    for offer, config in _offers(graph):
        fault = _fault(offer.engine, offer.notes, graph.problem) or _undeclared(offer.notes, step)
        if fault or offer.workspace_bytes > step.workspace_bytes:
            continue
        try:
            plan = graph.plan(config)
        except LaunchError as error:
            if isinstance(error.__cause__, MemoryError):
                raise
            continue
        if plan.values(Attribute.PLAN_WORKSPACE_SIZE, Type.INT64)[0] <= step.workspace_bytes:
            return plan
    raise LaunchError(
        f"cuDNN {cudnn_version()} has no plan for {graph.problem} with {step.workspace_bytes} bytes of workspace"
    )


def _fault(engine: int, notes: frozenset[Note], problem: ProblemDescription) -> str:
    """Why an engine must not compute a problem, "" if it may."""
    if known := known_fault(problem, engine):
        return known
    refused = notes & refused_notes(problem)
    return f"is less precise than the problem allows: {notes_text(refused)}" if refused else ""


def _undeclared(notes: frozenset[Note], step: CudnnStep) -> str:
    """What a step does not say of its engine, "" if it says all."""
    declared = {note for note in Note if note.name.lower() in step.notes}
    hidden = notes - declared - {Note.STRICT_NAN_PROPAGATION}
    return f"has numerical notes that its record does not declare: {notes_text(hidden)}" if hidden else ""
