"""From inert steps to something that runs: invokers, and the cache of them that a handle keeps.

An invoker binds the steps of one `ConvSolution` to compiled kernels, library plans or host functions. Running it
allocates nothing, synchronises nothing and may be captured in a CUDA graph; it may be run from many threads.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import operator
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from miofind import tensor_maps
from miofind.device import Device, Place, cuda_device_count
from miofind.early_launch import early_launcher, launches_early, may_begin_early
from miofind.errors import LaunchError, MiofindError
from miofind.problem import ProblemDescription
from miofind.solution import (
    Config,
    ConvSolution,
    CudnnStep,
    FftStep,
    HostStep,
    KernelStep,
    MatmulStep,
    Pointer,
    Scalar,
    Step,
    TensorMap,
    WorkspacePlan,
)
from miofind.solver import Solver

if TYPE_CHECKING:
    from miofind.compiler import Compiler, Kernel

_TENSORS = ("x", "w", "y")
_CTYPES: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


class BoundStep(Protocol):
    """One step ready to run on the bases (x, w, y, workspace) and a stream."""

    def __call__(self, bases: tuple[int, int, int, int], stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a pointer argument comes from: an index into the bases and a byte offset."""

    base: int
    offset: int


class _BoundMap:
    """A tensor map in memory that a launch reads, of the tensor where it was last.

    Attributes:
        address: of the map.
    """

    __slots__ = ("_at", "_map", "_memory", "_where", "address")

    def __init__(self, tensor_map: TensorMap, where: _Place) -> None:
        self._map = tensor_map
        self._where = where
        self._memory = ctypes.create_string_buffer(tensor_maps.BYTES + tensor_maps.ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // tensor_maps.ALIGNMENT) * tensor_maps.ALIGNMENT
        self._at = 0

    def follow(self, bases: Sequence[int]) -> None:
        """Encode the map anew where the tensor is elsewhere now.

        Raises:
            LaunchError: the driver refuses it.
        """
        at = bases[self._where.base] + self._where.offset
        if at != self._at:
            ctypes.memmove(self.address, tensor_maps.encoded(self._map, at), tensor_maps.BYTES)
            self._at = at


class _BoundKernel:
    """A kernel and its packed arguments; not shared between threads, since a launch writes the addresses into them."""

    __slots__ = ("_addresses", "_keep", "_launch", "_maps", "_offsets", "_pack", "_pick")

    def __init__(
        self, step: KernelStep, kernel: Kernel, place: Callable[[Pointer], _Place], *, early: bool = False
    ) -> None:
        pointers = [arg for arg in step.args if isinstance(arg, Pointer)]
        self._addresses = (ctypes.c_uint64 * max(2, len(pointers)))()
        parameters = (ctypes.c_void_p * max(1, len(step.args)))()
        scalars: list[Any] = []
        self._maps: list[_BoundMap] = []
        for i, arg in enumerate(step.args):
            if isinstance(arg, Scalar):
                scalars.append(_CTYPES[arg.ctype](arg.value))
                parameters[i] = ctypes.addressof(scalars[-1])
            elif isinstance(arg, TensorMap):
                self._maps.append(_BoundMap(arg, place(arg.pointer)))
                parameters[i] = self._maps[-1].address
            else:
                before = sum(isinstance(earlier, Pointer) for earlier in step.args[:i])
                parameters[i] = ctypes.addressof(self._addresses) + 8 * before
        places = [place(pointer) for pointer in pointers]
        places += [_Place(0, 0)] * (2 - len(places))  # so that `_pick` always gives a tuple
        offsets = tuple(where.offset for where in places)
        self._offsets = offsets if any(offsets) else None
        self._pick = operator.itemgetter(*(where.base for where in places))
        self._pack = struct.Struct(f"={len(places)}Q").pack_into
        self._launch = early_launcher(step, kernel) if early else _plain_launcher(step, kernel)
        self._keep = (kernel, scalars, parameters, ctypes.addressof(parameters))

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        addresses = self._pick(bases)
        if self._offsets is not None:
            addresses = map(operator.add, addresses, self._offsets)
        self._pack(self._addresses, 0, *addresses)
        for bound in self._maps:
            bound.follow(bases)
        self._launch(stream, self._keep[3], 0)


def _plain_launcher(step: KernelStep, kernel: Kernel) -> Callable[[int, int, int], None]:
    """A launch that begins when all before it in the stream has ended: stream, parameters' address and 0."""
    from cupy.cuda import driver

    return functools.partial(driver.launchKernel, kernel.function, *step.grid, *step.block, step.shared_bytes)


def make_step_launcher(step: KernelStep, kernel: Kernel) -> Callable[[Mapping[str, int], int], None]:
    """A launcher of one kernel outside any solution, called with addresses by buffer name and a stream.

    Not to be shared between threads.
    """
    pointers = [arg.pointer if isinstance(arg, TensorMap) else arg for arg in step.args if not isinstance(arg, Scalar)]
    names = tuple(dict.fromkeys(pointer.buffer for pointer in pointers))
    bound = _BoundKernel(step, kernel, lambda pointer: _Place(names.index(pointer.buffer), pointer.offset_bytes))

    def launch(addresses: Mapping[str, int], stream: int) -> None:
        bound([addresses[name] for name in names] or [0], stream)

    return launch


class _BoundMatmul:
    """A cuBLASLt product on the bases."""

    __slots__ = ("_launch", "_places")

    def __init__(self, step: MatmulStep, device: Device, place: Callable[[Pointer], _Place]) -> None:
        from miofind.libraries.cublaslt import matmul_plan

        pointers = [step.a, step.b, step.c]
        if step.workspace is not None:
            pointers.append(Pointer(buffer=step.workspace))
        places = [place(pointer) for pointer in pointers]
        self._places = tuple((where.base, where.offset) for where in places)
        self._launch = matmul_plan(step, device).launch

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        addresses = [bases[base] + offset for base, offset in self._places]
        workspace = addresses[3] if len(addresses) == 4 else 0
        self._launch(addresses[0], addresses[1], addresses[2], workspace, stream)


class _BoundCudnn:
    """A cuDNN convolution on the bases."""

    __slots__ = ("_launch", "_offset")

    def __init__(self, step: CudnnStep, problem: ProblemDescription, device: Device, plan: WorkspacePlan) -> None:
        from miofind.libraries.cudnn import conv_plan

        self._offset = 0 if step.workspace is None else plan.offsets[step.workspace]
        self._launch = conv_plan(problem, step, device).launch

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        self._launch(bases[0], bases[1], bases[2], bases[3] + self._offset, stream)


class _BoundFft:
    """A batch of cuFFT's transforms on the bases."""

    __slots__ = ("_data", "_launch", "_workspace")

    def __init__(self, step: FftStep, device: Device, place: Callable[[Pointer], _Place]) -> None:
        from miofind.libraries.cufft import fft_plan

        self._data = place(step.data)
        self._workspace = None if step.workspace is None else place(Pointer(buffer=step.workspace))
        self._launch = fft_plan(step, device).launch

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        given = self._workspace
        workspace = 0 if given is None else bases[given.base] + given.offset
        self._launch(bases[self._data.base] + self._data.offset, workspace, stream)


class Invoker(ABC):
    """One solution, bound to a device and ready to run.

    Attributes:
        problem, device, solver_id, config: what it runs.
        workspace_bytes: bytes of workspace that `run` needs.
        deterministic: equal inputs give equal bits.
        alignment_bytes: alignment that the tensors' addresses need.
        kernel_hash: hash of the sources, defines and options of its kernels.
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
    def run(self, x: Any, w: Any, y: Any, workspace: Any, stream: int) -> None:
        """Run once.

        On CUDA x, w, y and workspace are device addresses (0 for no workspace) and `stream` is a stream's address; the
        run is asynchronous. On the CPU place they are NumPy arrays of logical shape with the problem's memory order
        in their strides, and a uint8 array or None.

        Raises:
            LaunchError: a kernel or library call failed to start.
        """


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
        self._local = threading.local()
        self._guards_device = cuda_device_count() > 1
        self._launches_early = launches_early(self.device)
        self._bind()

    def _bind(self) -> tuple[BoundStep, ...]:
        """The steps bound for this thread; makes the device's context current in a thread that has none."""
        import cupy

        steps = self.solution.steps
        with cupy.cuda.Device(self.device.index):
            cupy.cuda.runtime.setDevice(self.device.index)  # binds the context, and may be called in a capture
            bound = tuple(self._bound(step, early) for step, early in zip(steps, may_begin_early(steps), strict=True))
        self._local.steps = bound
        return bound

    def _bound(self, step: Step, early: bool) -> BoundStep:
        plan = self.solution.workspace
        offsets = plan.offsets

        def place(pointer: Pointer) -> _Place:
            if pointer.buffer in _TENSORS:
                return _Place(_TENSORS.index(pointer.buffer), pointer.offset_bytes)
            return _Place(3, offsets[pointer.buffer] + pointer.offset_bytes)

        if isinstance(step, KernelStep):
            return _BoundKernel(step, self._kernels[step], place, early=early and self._launches_early)
        if isinstance(step, MatmulStep):
            return _BoundMatmul(step, self.device, place)
        if isinstance(step, FftStep):
            return _BoundFft(step, self.device, place)
        if isinstance(step, CudnnStep):
            return _BoundCudnn(step, self.problem, self.device, plan)
        raise LaunchError(f"{self.solver_id}: a {type(step).__name__} does not run on {self.device.place}")

    def run(self, x: int, w: int, y: int, workspace: int, stream: int) -> None:
        try:
            steps = self._local.steps
        except AttributeError:
            steps = self._bind()
        try:
            if self._guards_device:
                self._run_on_device(steps, (x, w, y, workspace), stream)
                return
            bases = (x, w, y, workspace)
            for step in steps:
                step(bases, stream)
        except MiofindError:
            raise
        except Exception as error:  # CuPy and library errors share no base class below Exception
            raise LaunchError(f"{self.solver_id} {self.config.json} failed on {self.problem}: {error}") from error

    def _run_on_device(self, steps: tuple[BoundStep, ...], bases: tuple[int, int, int, int], stream: int) -> None:
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
        self._functions = [getattr(importlib.import_module(step.module), step.function) for step in steps]

    def run(self, x: Any, w: Any, y: Any, workspace: Any, stream: int) -> None:
        plan = self.solution.workspace
        offsets = plan.offsets
        buffers = {"x": x, "w": w, "y": y}
        for region in plan.regions:
            buffers[region.name] = workspace[offsets[region.name] : offsets[region.name] + region.bytes]
        try:
            for function in self._functions:
                function(self.problem, self.config, buffers)
        except MiofindError:
            raise
        except Exception as error:  # a solver's own code may raise anything
            raise LaunchError(f"{self.solver_id} {self.config.json} failed on {self.problem}: {error!r}") from error


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
    solution = solver.solution(problem, device, config) if part is None else part
    origin = InvokerOrigin(problem, device, solver, config)
    if device.place is Place.CPU:
        return _HostInvoker(origin, solution)
    return _CudaInvoker(origin, solution, compiler)


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

        The slots least recently made are dropped beyond MAX_SLOTS; who holds their invokers keeps them.
        """
        key = (invoker.problem.network_config, invoker.solver_id)
        with self._lock:
            slot = self._slots.setdefault(key, _Slot({}, invoker.config))
            slot.current = invoker.config
            kept = slot.by_config.setdefault(invoker.config, invoker)
            while len(self._slots) > MAX_SLOTS:
                self._slots.pop(next(iter(self._slots)))
            return kept

    def clear(self) -> None:
        """Forget all invokers."""
        with self._lock:
            self._slots.clear()

    def __len__(self) -> int:
        return sum(len(slot.by_config) for slot in self._slots.values())
