"""From inert steps to something that runs: invokers, and the cache of them that a handle keeps.

An invoker binds the steps of one `ConvSolution` to compiled kernels, library plans or host functions. Running it
allocates nothing, synchronises nothing and may be captured in a CUDA graph; it may be run from many threads.
"""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.problem import ProblemDescription, TensorDescriptor
from miofind.device.device import Device, Place, cuda_device_count
from miofind.errors import LaunchError, MiofindError, described, raise_if_interrupted
from miofind.launch.bound_steps import (
    BasedAddress,
    BoundCudnn,
    BoundFft,
    BoundFusedMatmul,
    BoundKernel,
    BoundMatmul,
    BoundStep,
    library_plan,
)
from miofind.launch.flat import FlatStep, flat_convolution, flat_kernel, flat_product
from miofind.launch.pdl import supports_pdl
from miofind.solver.solver import Solver
from miofind.solver.steps import (
    RUN_PARAMETERS,
    Config,
    ConvSolution,
    CudnnStep,
    FftStep,
    HostStep,
    KernelStep,
    MatmulStep,
    Pointer,
    Step,
    dependent_launches,
)

if TYPE_CHECKING:
    from miofind.compiler import Compiler
    from miofind.libraries.cublaslt import MatmulCall

Bases = tuple[Any, ...]
"""What a run is given: the problem's operands in order, its epilogue's `EpilogueParameters`, then the workspace."""


def bases_of(
    problem: ProblemDescription,
    operands: Mapping[str, Any],
    workspace: Any,
    parameters: EpilogueParameters = DEFAULT_PARAMETERS,
) -> Bases:
    """The bases of a run that has these operands by name, and 0 in place of all others."""
    given = (operands.get(operand.name, 0) for operand in problem.operands)
    return (*given, parameters, workspace) if problem.epilogue else (*given, workspace)


class Invoker(ABC):
    """One solution, bound to a device and ready to run.

    Attributes:
        problem, device, solver_id, config: what it runs.
        workspace_bytes: bytes of workspace that `run` needs.
        deterministic: equal inputs give equal bits.
        alignment_bytes: alignment that the tensors' addresses need.
        solution: the steps.
    """

    def __init__(self, origin: InvokerOrigin, solution: ConvSolution) -> None:
        self.problem = origin.problem
        self.device = origin.device
        self.solver_id = origin.solver.id
        self.config = origin.config
        self.alignment_bytes = origin.solver.tensor_alignment(origin.problem)
        self.workspace_bytes = solution.workspace.bytes
        self.deterministic = solution.deterministic
        self.solution = solution

    @abstractmethod
    def run(self, bases: Bases, stream: int) -> None:
        """Run once.

        Args:
            bases: see `Bases`. On CUDA device addresses, 0 for no workspace; on the CPU place NumPy arrays of logical
                shape with the problem's memory order in their strides, and a uint8 array, or None for no workspace.
            stream: a stream's address; the run is asynchronous. 0 on the CPU place.

        Raises:
            LaunchError: a kernel or library call failed to start.
        """

    def flat(self, parameters: EpilogueParameters = DEFAULT_PARAMETERS) -> tuple[FlatStep, ...] | None:
        """What a run in this thread launches, as plain data; None where a step has no such form.

        Args:
            parameters: the epilogue's numbers.

        Raises:
            LaunchError: the driver or a library refuses a part of it, or a library takes such numbers at each run.
        """
        return None


@dataclass(frozen=True, slots=True)
class InvokerOrigin:
    """What an invoker is made from."""

    problem: ProblemDescription
    device: Device
    solver: Solver
    config: Config


class _CudaInvoker(Invoker):
    def __init__(self, origin: InvokerOrigin, solution: ConvSolution, compiler: Compiler) -> None:
        super().__init__(origin, solution)
        self._kernels = {step: compiler.load(step, self.device) for step in solution.kernels}
        self._plans: dict[Step, Any] = {}
        self._calls: dict[MatmulStep, MatmulCall] = {}
        self._local = threading.local()
        self._guards_device = cuda_device_count() > 1
        self._supports_pdl = supports_pdl(self.device)
        self._bind()

    def _bind(self) -> tuple[BoundStep, ...]:
        """The steps bound for this thread; makes the device's context current in a thread that has none."""
        import cupy

        steps = self.solution.steps
        with cupy.cuda.Device(self.device.index):
            cupy.cuda.runtime.setDevice(self.device.index)  # binds the context, and may be called in a capture
            made = [self._bound(step, pdl) for step, pdl in zip(steps, dependent_launches(steps), strict=True)]
        bound = tuple(step.__call__ for step in made)  # Python 3.11 calls methods 45 ns faster than objects
        self._local.steps = bound
        return bound

    def flat(self, parameters: EpilogueParameters = DEFAULT_PARAMETERS) -> tuple[FlatStep, ...] | None:
        place, made = self._placer(), list[FlatStep]()
        for step, pdl in zip(self.solution.steps, dependent_launches(self.solution.steps), strict=True):
            if isinstance(step, KernelStep):
                function, pdl = self._kernels[step].function, pdl and self._supports_pdl
                made.append(flat_kernel(step, function, place, pdl=pdl, parameters=parameters))
            elif isinstance(step, MatmulStep):
                made.append(flat_product(step, self._matmul_call(step, parameters), place))
            elif isinstance(step, CudnnStep):
                made.append(flat_convolution(step, self._plan_of(step).call(parameters), self.problem, place))
            else:
                return None
        return tuple(made)

    def _matmul_call(self, step: MatmulStep, parameters: EpilogueParameters) -> MatmulCall:
        """What a product without Python calls, which lasts as long as this."""
        from miofind.libraries.cublaslt import matmul_call

        if step.epilogue is not None and parameters.numbers(step.epilogue.activation)[:2] != (1.0, 1.0):
            raise LaunchError("a product of cuBLASLt reads its factors from the host's memory")
        made = self._calls.get(step)
        if made is None:
            made = self._calls.setdefault(step, matmul_call(step, self._plan_of(step), self.device))
        return made

    def _placer(self) -> Callable[[Pointer], BasedAddress]:
        """Where in the bases a step's buffers are."""
        places = {operand.name: BasedAddress(i, 0) for i, operand in enumerate(self.problem.operands)}
        if self.problem.epilogue:
            places[RUN_PARAMETERS] = BasedAddress(len(places), 0)
        workspace = len(places)
        for region, offset in self.solution.workspace.offsets.items():
            places.setdefault(region, BasedAddress(workspace, offset))

        def place(pointer: Pointer) -> BasedAddress:
            buffer = places[pointer.buffer]
            return BasedAddress(buffer.base, buffer.offset + pointer.offset_bytes)

        return place

    def _bound(self, step: Step, pdl: bool) -> BoundStep:
        plan, place = self.solution.workspace, self._placer()
        if isinstance(step, KernelStep):
            return BoundKernel(step, self._kernels[step], place, pdl=pdl and self._supports_pdl)
        if isinstance(step, MatmulStep):
            return self._bound_product(step, place)
        if isinstance(step, FftStep):
            return BoundFft(step, self._plan_of(step), place)
        if isinstance(step, CudnnStep):
            return BoundCudnn(step, self._plan_of(step), plan, self.problem)
        raise LaunchError(f"{self.solver_id}: a {type(step).__name__} does not run on {self.device.place}")

    def _bound_product(self, step: MatmulStep, place: Callable[[Pointer], BasedAddress]) -> BoundStep:
        plan = self._plan_of(step)
        if step.epilogue is None:
            return BoundMatmul(step, plan, place)
        from miofind.libraries.cublaslt import FusedProduct

        return BoundFusedMatmul(step, FusedProduct(step, plan, self.device), place)

    def _plan_of(self, step: MatmulStep | FftStep | CudnnStep) -> Any:
        """The plan of a library's step, one for all threads."""
        plan = self._plans.get(step)
        if plan is None:
            plan = self._plans.setdefault(step, library_plan(step, self.problem, self.device))
        return plan

    def run(self, bases: Bases, stream: int) -> None:
        try:
            steps = self._local.steps
        except AttributeError:
            steps = self._bind()
        try:
            if self._guards_device:
                self._run_on_device(steps, bases, stream)
                return
            for step in steps:
                step(bases, stream)
        except MiofindError:
            raise
        except Exception as error:  # CuPy and library errors share no base class below Exception
            raise_if_interrupted(error)
            raise LaunchError(f"{self.solver_id} {self.config.json} failed on {self.problem}: {error}") from error

    def _run_on_device(self, steps: tuple[BoundStep, ...], bases: Bases, stream: int) -> None:
        """Run with this invoker's device current, where there are several."""
        import cupy

        with cupy.cuda.Device(self.device.index):
            for step in steps:
                step(bases, stream)


class _HostInvoker(Invoker):
    def __init__(self, origin: InvokerOrigin, solution: ConvSolution) -> None:
        super().__init__(origin, solution)
        steps = [step for step in solution.steps if isinstance(step, HostStep)]
        if len(steps) != len(solution.steps):
            raise LaunchError(f"{self.solver_id}: only host steps run on the CPU place")
        bare = self.problem.bare
        self._calls = [
            (getattr(importlib.import_module(step.module), step.function), self.problem if step.fused else bare)
            for step in steps
        ]
        names = tuple(operand.name for operand in origin.problem.operands)
        self._operands = (*names, RUN_PARAMETERS) if origin.problem.epilogue else names
        images = (operand for operand in origin.problem.operands if origin.problem.spatial_dims == 2)
        self._images = tuple((operand.name, operand.tensor) for operand in images)
        offsets = solution.workspace.offsets
        self._regions = tuple(
            (region.name, slice(offsets[region.name], offsets[region.name] + region.bytes))
            for region in solution.workspace.regions
        )

    def run(self, bases: Bases, stream: int) -> None:
        buffers = dict(zip(self._operands, bases))  # noqa: B905, the workspace comes last
        for name, where in self._regions:
            buffers[name] = bases[-1][where]
        for name, tensor in self._images:
            if getattr(buffers[name], "ndim", 0) == _VOLUME_NDIM:
                buffers[name] = _as_images(buffers[name], tensor)
        try:
            with np.errstate(all="ignore"):  # whatever the caller has NumPy do: IEEE's results are the right ones
                for function, problem in self._calls:
                    function(problem, self.config, buffers)
        except MiofindError:
            raise
        except BaseException as error:  # a solver's own code may raise anything
            raise_if_interrupted(error)
            told = f"{self.solver_id} {self.config.json} failed on {self.problem}: {described(error)}"
            raise LaunchError(told) from error


_VOLUME_NDIM = 5


def _as_images(volumes: NDArray[Any], tensor: TensorDescriptor) -> NDArray[Any]:
    """A packed array of volumes as the problem has it that they are flattened to: the same memory."""
    strides = tuple(stride * volumes.itemsize for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(volumes, tensor.shape, strides)


def make_invoker(
    problem: ProblemDescription,
    device: Device,
    solver: Solver,
    config: Config,
    compiler: Compiler,
    part: ConvSolution | None = None,
) -> Invoker:
    """The invoker of one solver and configuration.

    Args:
        part: of the solver's solution, to be run alone; the whole if left out.

    Raises:
        InvalidConfigError: the configuration is outside the solver's schema.
        CompileError, MissingLibraryError, LaunchError: a step cannot be made ready.
    """
    solver.check_config(problem, device, config)
    try:
        solution = solver.solution(problem, device, config) if part is None else part
    except Exception:
        raise
    except BaseException as error:  # a solver's own code may raise anything, and must not end a program that runs it
        raise_if_interrupted(error)
        raise LaunchError(f"{solver.id} {config.json} gives no solution of {problem}: {described(error)}") from error
    origin = InvokerOrigin(problem, device, solver, config)
    if device.place is Place.CPU:
        return _HostInvoker(origin, solution)
    return _CudaInvoker(origin, solution, compiler)


_staying: list[Invoker] = []


def stay(invoker: Invoker) -> Invoker:
    """An invoker whose kernels and plans stay loaded for the life of the process.

    Whoever runs it may capture that in a CUDA graph, which holds addresses of code on the device and no reference to
    it: replayed after a library has unloaded its kernels with its plan, it ends the process or writes anywhere (cuDNN
    9.19, on an H200). Candidates under measurement are captured by the timing backend alone and do not
    stay.
    """
    if invoker.device.place is Place.CUDA:
        _staying.append(invoker)
    return invoker


@dataclass(slots=True)
class _Slot:
    """Invokers of one problem and solver by configuration; `current` is the configuration the find chose."""

    by_config: dict[Config, Invoker]
    current: Config


MAX_SLOTS = 10_000


class InvokerCache:
    """Invokers of a handle, a slot for each (network_config, solver_id). Candidates under measurement never enter."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, str], _Slot] = {}
        self._lock = threading.Lock()

    def get(self, network_config: str, solver_id: str, config: Config | None = None) -> Invoker | None:
        """The invoker of a configuration, or the current one; None where there is none."""
        slot = self._slots.get((network_config, solver_id))
        if slot is None:
            return None
        return slot.by_config.get(slot.current if config is None else config)

    def put(self, invoker: Invoker) -> Invoker:
        """Keep an invoker and make it current; returns the one kept, which is the first where two threads race.

        The slots least recently made are dropped beyond MAX_SLOTS; what their invokers loaded stays.
        """
        key = (invoker.problem.network_config, invoker.solver_id)
        with self._lock:
            slot = self._slots.setdefault(key, _Slot({}, invoker.config))
            slot.current = invoker.config
            kept = slot.by_config.get(invoker.config)
            if kept is None:
                kept = slot.by_config[invoker.config] = stay(invoker)
            while len(self._slots) > MAX_SLOTS:
                self._slots.pop(next(iter(self._slots)))
            return kept

    def clear(self) -> None:
        """Forget all invokers."""
        with self._lock:
            self._slots.clear()

    def __len__(self) -> int:
        return sum(len(slot.by_config) for slot in self._slots.values())
