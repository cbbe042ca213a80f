"""Plans: what runs a call of PyTorch's convolution operators, decided once for all calls that look alike.

A plan holds a launch for each result that miofind computes: a function of two tensors that allocates the result in
PyTorch's memory and runs the bound solution on PyTorch's current stream. For all else it says why PyTorch's own kernel
runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from miofind.api.solutions import find_solutions
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import (
    CompileError,
    LaunchError,
    MiofindError,
    MissingLibraryError,
    NoSolutionError,
    described,
    raise_if_interrupted,
)
from miofind.find.immediate.answer import predicted
from miofind.find.pipeline import looked_up
from miofind.options import FindOptions, OnMiss
from miofind.process.garbage import with_rare_garbage_collection
from miofind.runtime.background import PendingKernels
from miofind.runtime.handle import Handle, default_handle
from miofind.runtime.solution import Solution
from miofind.solver.steps import KernelStep
from miofind.torch.direct import DirectCalls, DirectLaunch, loaded
from miofind.torch.override import comparisons, formats
from miofind.torch.override.calls import COMPUTED, DIRECTION_OF, ConvolutionCall, Unserved, is_depthwise
from miofind.torch.override.comparisons import Comparison
from miofind.torch.override.flags import Flags
from miofind.torch.override.launches import Arguments, Launch, Launches, ReadySolutions, first_line
from miofind.torch.override.memory import Backoff, is_capturing, make_room
from miofind.torch.override.settings import CPU_IS_PYTORCHS, MissPolicy, Settings

logger = logging.getLogger(__name__)


class Behind(Unserved):
    """PyTorch's own kernel is faster than the FindDB's answer."""


@dataclass(slots=True)
class Part:
    """What becomes of one result of a call.

    Attributes:
        computed: "y", "dx" or "dw".
        problem: what it asks, None where miofind has no such problem.
        solution: what runs it, or did until it failed.
        launch: runs it; None where PyTorch does.
        reason: why PyTorch does, "" where it does not.
        is_missing: whether no FindDB had an answer to the problem.
        is_behind: whether PyTorch's own kernel is faster than the answer.
        is_final: whether a later call would be answered alike.
        is_of_capture: whether it would not because a CUDA graph was being captured in this one.
        pending: its kernels, where they are being compiled and PyTorch's, or those of a stand-in, run meanwhile.
        direct: gives the launch without Python; None where there is none.
        with_bias: whether the launch adds the bias, or gives its gradient, too.
        declined: calls in which PyTorch computed it although it has a launch, as no solution takes tensors at such
            addresses.
        without_memory: the same where there was no memory for a workspace, or none was asked for after that.
        backoff: in which calls a workspace is asked for; None while there is memory.
        calls_before_failure: those of the plan before its solution failed, 0 where it did not.
    """

    computed: str
    problem: ProblemDescription | None = None
    solution: Solution | None = None
    launch: Launch | None = None
    direct: Callable[[], DirectLaunch | None] | None = None
    reason: str = ""
    is_missing: bool = False
    is_behind: bool = False
    is_final: bool = True
    is_of_capture: bool = False
    pending: PendingKernels | None = None
    with_bias: bool = False
    declined: int = 0
    without_memory: int = 0
    backoff: Backoff | None = None
    calls_before_failure: int = 0

    def leave_to_capture(self) -> None:
        """Have PyTorch run it in the CUDA graph that is being captured, and a later call be answered anew."""
        _warn_of_capture()
        self.is_final, self.is_of_capture = False, True

    def fail(self, error: Exception, calls: int) -> None:
        """Leave it to PyTorch from now on, after so many calls."""
        if self.launch is None:  # that of another thread failed meanwhile, and counted this call among those before
            self.calls_before_failure -= 1
            return
        self.launch, self.direct, self.reason = None, None, f"it failed: {error}"
        self.calls_before_failure = calls
        logger.warning("%s failed in PyTorch, whose own kernel runs from now on: %s", self.problem, error)

    def skips(self) -> bool:
        """Whether no workspace is asked for in this call, as there was no memory for it before."""
        backoff = self.backoff
        if backoff is None or not backoff.skips():
            return False
        self.without_memory += 1
        return True

    def lacks_memory(self) -> None:
        """There was none for the workspace of this call."""
        backoff = self.backoff or Backoff()
        backoff.failed()
        self.backoff = backoff
        self.without_memory += 1

    @property
    def is_kept(self) -> bool:
        """Whether later calls are answered alike, until its kernels are there."""
        return self.is_final or self.pending is not None


class Plan(DirectCalls):
    """What runs calls that look alike.

    Attributes:
        parts: what becomes of each result.
        launch, launch_dx, launch_dw: those of y, dx and dw; None where PyTorch computes them, or nobody.
        bias_shape: of a view of the bias that is added to y.
        bias_dimensions: of the gradient of y, over which the gradient of the bias sums.
        adds_bias, gives_bias_gradient: whether y's launch takes the bias, and whether dw's gives its gradient, too.
        grad_layout: that the gradient of y is packed in first; None where it is.
        pending: the kernels that are being compiled for it.
    """

    __slots__ = (
        "_has_lacked_memory",
        "adds_bias",
        "bias_dimensions",
        "bias_shape",
        "gives_bias_gradient",
        "grad_layout",
        "launch",
        "launch_dw",
        "launch_dx",
        "parts",
        "pending",
    )

    def __init__(self, parts: tuple[Part, ...], rank: int, grad_layout: Any = None) -> None:
        self.parts = parts
        self._has_lacked_memory = False  # calls need not look their parts up before
        self._take_launches()
        super().__init__(needs_python=not self.is_final)
        self.bias_shape = (1, -1) + (1,) * (rank - 2)
        self.bias_dimensions = (0, *range(2, rank))
        self.grad_layout = grad_layout
        self.pending = tuple(part.pending for part in parts if part.pending is not None)

    def direct_launches(self) -> Sequence[tuple[int, DirectLaunch]] | None:
        """The launches of the parts that PyTorch's own kernel does not compute; None where one needs Python."""
        made = []
        for part in self.parts:
            if part.launch is None:
                continue
            launch = None if part.direct is None else part.direct()
            if launch is None:
                return None
            made.append((int(part.computed == "dw"), launch))
        return made

    def _take_launches(self) -> None:
        launches = {part.computed: part.launch for part in self.parts}
        self.launch, self.launch_dx, self.launch_dw = (launches.get(name) for name in COMPUTED)
        with_bias = {part.computed for part in self.parts if part.with_bias}
        self.adds_bias, self.gives_bias_gradient = "y" in with_bias, "dw" in with_bias

    def _part(self, computed: str) -> Part:
        return next(part for part in self.parts if part.computed == computed)

    def _fail(self, computed: str, error: LaunchError) -> None:
        """Leave a result to PyTorch from now on."""
        self._part(computed).fail(error, self.calls - 1)
        self._take_launches()

    def run(self, computed: str, launch: Launch, *tensors: Any) -> Any:
        """What a launch gives; None where it gives nothing or fails, and PyTorch is to compute the result."""
        if self._has_lacked_memory and self._part(computed).skips():
            return None
        try:
            made = launch(*tensors)
        except LaunchError as error:
            self._fail(computed, error)
            return None
        except torch.OutOfMemoryError:  # of a workspace, it may be, that PyTorch's own kernel does without
            self._has_lacked_memory = True
            self._part(computed).lacks_memory()
            return None
        if made is None:
            self._part(computed).declined += 1
        elif self._has_lacked_memory:
            self._part(computed).backoff = None
        return made

    @property
    def is_final(self) -> bool:
        """Whether later calls may be answered by it."""
        return all(part.is_final for part in self.parts)

    @property
    def is_kept(self) -> bool:
        """Whether later calls are answered by it until its kernels are there, or for good."""
        return all(part.is_kept for part in self.parts)

    @property
    def is_of_capture(self) -> bool:
        """Whether later calls are not, because a CUDA graph was being captured."""
        return any(part.is_of_capture for part in self.parts)


class _Thread(threading.local):
    """What a thread is in: the fallback of a fused call."""

    computes_part = False


_thread = _Thread()
_OF_A_FUSED_CALL = "it is part of a fused call whose kernels are being compiled"


@contextlib.contextmanager
def parts_of_a_fused_call() -> Iterator[None]:
    """Leaves this thread's convolutions that have no plan to PyTorch: their kernels are of no use in a moment."""
    before, _thread.computes_part = _thread.computes_part, True
    try:
        yield
    finally:
        _thread.computes_part = before


_LONGEST_STAND_IN_MS = 50.0
"""A call that takes longer than that is PyTorch's."""


class Planner:
    """Makes plans by what a user asked of the override and by PyTorch's switches."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def planned(self, arguments: Arguments, wanted: Sequence[str], state: tuple[Any, ...]) -> Plan:
        """The plan of a call.

        Args:
            wanted: results that are asked for, of "y", "dx", "dw" and, for the gradient of the bias, "db".
            state: of PyTorch's switches.

        Raises:
            NoSolutionError: the policy is to raise it where the FindDB has no answer.
        """
        x, grad = arguments.x, arguments.grad
        rank = x.dim()
        if _thread.computes_part:
            own = (computed for computed in wanted if computed in COMPUTED)
            return Plan(tuple(Part(computed, reason=_OF_A_FUSED_CALL, is_final=False) for computed in own), rank)
        try:
            flags = Flags.of(state, on_gpu=x.device.type == "cuda")
            _refuse_tensors(arguments)
            call = ConvolutionCall.of(x, arguments.w, arguments.bias, *arguments.geometry)
            _refuse_shapes(call, arguments)
        except Exception as error:
            reason = _reason(error, "a convolution")
            return Plan(tuple(Part(computed, reason=reason) for computed in wanted if computed in COMPUTED), rank)
        has_bias = "db" in wanted if grad is not None else arguments.bias is not None
        parts = tuple(
            self._part(call, computed, arguments, flags, has_bias=has_bias)
            for computed in wanted
            if computed in COMPUTED
        )
        grad_layout = None
        if grad is not None and not formats.is_dense(grad, call.backend_format):
            grad_layout = call.backend_format
        return Plan(parts, rank, grad_layout)

    def _part(
        self, call: ConvolutionCall, computed: str, arguments: Arguments, flags: Flags, *, has_bias: bool
    ) -> Part:
        try:
            self.settings.refuse(
                flags, dtype=call.x.dtype, direction=DIRECTION_OF[computed], is_depthwise=is_depthwise(call)
            )
        except Unserved as reason:
            return Part(computed, reason=str(reason))
        if not (has_bias and call.takes_bias(computed)):
            return self._tried(Part(computed), call, arguments, flags)
        part = self._tried(Part(computed, with_bias=True), call, arguments, flags)
        if part.launch is not None or part.pending is not None or self.settings.on_miss is MissPolicy.RECORD:
            return part
        try:
            bare = self._tried(Part(computed), call, arguments, flags)
        except NoSolutionError:
            if part.is_behind:  # nobody lacks the bare one
                return part
            raise
        bare.is_final = bare.is_final and part.is_final
        bare.is_of_capture = bare.is_of_capture or part.is_of_capture
        is_unloaded = part.is_of_capture and not part.is_missing
        if bare.is_missing and (part.is_behind or is_unloaded):  # nobody lacks the bare one
            part.is_final, part.is_of_capture = bare.is_final, bare.is_of_capture
            return part
        return bare

    def _tried(self, part: Part, call: ConvolutionCall, arguments: Arguments, flags: Flags) -> Part:
        """A part with its launch, or with the reason that it has none."""
        try:
            part.problem = call.problem(part.computed, flags.math, with_bias=part.with_bias)
            solutions = self.solutions(part, arguments.x.device, flags)
            self._bind(part, call, solutions, arguments, flags)
        except Exception as error:
            if isinstance(error, NoSolutionError) and self.settings.on_miss is MissPolicy.ERROR:
                raise
            part.reason, part.is_behind = _reason(error, part.problem or call), isinstance(error, Behind)
        return part

    def handle_of(self, device: Any) -> Handle:
        """The handle for a PyTorch device.

        Raises:
            Unserved: there is none.
        """
        if device.type == "cpu" and not self.settings.takes_cpu:
            raise Unserved(CPU_IS_PYTORCHS)
        given = self.settings.handle
        index = device.index or 0
        if given is not None:
            wanted = (Place.CUDA, index) if device.type == "cuda" else (Place.CPU, given.device.index)
            if (given.device.place, given.device.index) != wanted:
                raise Unserved(f"the handle given is for {given.device.name}, not for {device}")
            return given
        try:
            return default_handle(Device.cuda(index) if device.type == "cuda" else Device.cpu())
        except MiofindError as error:
            raise Unserved(f"miofind cannot use {device}: {error}") from error

    def solutions(self, part: Part, device: Any, flags: Flags) -> list[Solution]:
        """Solutions that may run a problem, fastest first.

        Raises:
            Unserved: PyTorch's own kernel is to run it.
            NoSolutionError: a find found none, or the policy is to raise it where the FindDB has none.
        """
        problem, settings = part.problem, self.settings
        assert problem is not None
        if settings.on_miss is MissPolicy.RECORD:
            part.is_missing = True
            raise Unserved("problems are only recorded")
        handle = self.handle_of(device)
        options = settings.options(deterministic=flags.deterministic)
        with with_rare_garbage_collection():
            found = looked_up(problem, options, handle, queue=handle.database.is_recorded)
        if found is None:
            part.is_missing = True
            found = self._missed(part, options, handle, device, measures=settings.measures(flags))
            part.is_missing = False
        return own_first(self._gaining(found, comparisons.compared(found[0], handle, flags, options)))

    def _missed(
        self, part: Part, options: FindOptions, handle: Handle, device: Any, *, measures: bool
    ) -> list[Solution]:
        problem = part.problem
        assert problem is not None
        if part.with_bias and not measures:
            raise Unserved("no FindDB has an answer to it with its bias")
        if self.settings.on_miss is MissPolicy.ERROR:
            return find_solutions(problem, options=replace(options, on_miss=OnMiss.ERROR), handle=handle)
        if self.settings.on_miss is MissPolicy.ESTIMATE:
            estimate = replace(options, on_miss=OnMiss.ESTIMATE)
            with with_rare_garbage_collection():
                return find_solutions(problem, options=estimate, handle=handle)
        if not measures:
            raise Unserved("no FindDB has an answer to it")
        if is_capturing(device):
            part.leave_to_capture()
            raise Unserved("no FindDB has an answer to it, and nothing is measured while a CUDA graph is captured")
        make_room(problem, device)
        return find_solutions(problem, options=options, handle=handle)

    def _gaining(self, found: list[Solution], comparison: Comparison | None) -> list[Solution]:
        """Those that are faster than PyTorch by the factor asked for.

        Where nobody has timed the two side by side these are those that are faster than cuDNN, and all where no time
        of cuDNN is known.

        Raises:
            Behind: none is.
        """
        least_gain = self.settings.min_gain
        if comparison is not None:
            if not (gaining := [s for s in found if comparison.gain(s) >= least_gain]):
                asked = "" if least_gain == 1 else f"; min_gain is {least_gain:g}"
                raise Behind(f"{comparison.told(found[0])}{asked}")
            return gaining
        known = [s.time_ms for s in found if s.library is Library.CUDNN and s.samples]
        if not known:
            return found
        gaining = [s for s in found if s.time_ms * least_gain <= min(known)]
        if not gaining:
            gain = min(known) / found[0].time_ms
            raise Behind(f"{found[0].solver_id} is {gain:.2f} times as fast as cuDNN, less than {least_gain:.2f}")
        return gaining

    def ready(self, part: Part, solutions: list[Solution], device: Any, flags: Flags) -> ReadySolutions:
        """Solutions to be made ready for a part.

        Raises:
            Unserved: that cannot be, or not now: a CUDA graph is being captured, or the first that can be compiled is
                being compiled, and PyTorch's own kernel is to run meanwhile, not a stand-in.
        """
        refuse_capture(part, device)
        handle = self.handle_of(device)
        return ReadySolutions(self._compiled(part, solutions, handle, flags), handle)

    def _compiled(self, part: Part, solutions: list[Solution], handle: Handle, flags: Flags) -> list[Solution]:
        """The solutions from the first on that can be compiled, where that is done or has to be waited for.

        Raises:
            Unserved: it is being compiled, or none can be compiled.
        """
        if self.settings.waits(flags):
            return solutions
        told = []
        for at, solution in enumerate(solutions):
            try:
                part.pending = handle.background.begin(kernels_of(solution, handle))
            except (CompileError, MissingLibraryError) as error:
                told.append(f"{solution.solver_id}: {first_line(error)}")
                continue
            if part.pending is None:
                return solutions[at:]
            part.is_final = False
            if stand_ins := self._stand_ins(solution.problem, handle, flags):
                return stand_ins
            raise Unserved(f"the kernels of {solution.solver_id} are being compiled")
        raise Unserved("; ".join(told))

    def _stand_ins(self, problem: ProblemDescription, handle: Handle, flags: Flags) -> list[Solution]:
        """What runs a problem while its kernels are compiled; nothing where PyTorch's own kernel does.

        That is where PyTorch would take longer to be ready. It runs depthwise convolutions by cuDNN, which compiles for
        each shape: EfficientNet-B0 waited 6 s for its first result, and 22 s for its first training step. The last
        resort is compiled once for all shapes.
        """
        options = self.settings.options(deterministic=flags.deterministic)
        if not is_depthwise(problem) or options.only or options.exclude:
            return []
        generic = tuple(name for name, solver in handle.registry.items() if solver.is_last_resort)
        try:
            found = predicted(problem.flattened, replace(options, only=generic), handle)
        except NoSolutionError:
            return []
        return found if found[0].time_ms < _LONGEST_STAND_IN_MS else []

    def _bind(
        self, part: Part, call: ConvolutionCall, solutions: list[Solution], arguments: Arguments, flags: Flags
    ) -> None:
        """Give a part its launch.

        Raises:
            Unserved: no solution can be made ready, or not now.
        """
        ready = self.ready(part, solutions, arguments.x.device, flags)
        made = Launches(part.computed, call, arguments, ready, with_bias=part.with_bias).first()
        part.solution, part.launch, part.direct = made.solution, made.launch, made.direct


def kernels_of(solution: Solution, handle: Handle) -> tuple[KernelStep, ...]:
    """What a solution launches of our own kernels; () where that is not known before it is launched."""
    solver = handle.registry.named(solution.solver_id)
    if solver.library is Library.CUDNN:  # which may take long to say what it launches
        return ()
    try:
        return solver.kept_solution(solution.problem.flattened, solution.device, solution.config).kernels
    except BaseException as error:  # a solver's own code may raise anything; who launches it says so
        raise_if_interrupted(error)
        logger.debug("%s has no kernels: %s", solution.id, described(error))
        return ()


@functools.cache
def _warn_of_capture() -> None:
    logger.warning(
        "a CUDA graph is captured of convolutions that are not measured yet, or whose kernels are not compiled and "
        "loaded: it keeps the kernels that run until then. Run once, call miofind.torch.wait_until_compiled() and run "
        "once more before a capture"
    )


def note_capture(device: Any) -> None:
    """Say so, once, where a CUDA graph is captured of a call whose kernels are still being compiled."""
    if is_capturing(device):
        _warn_of_capture()


def refuse_capture(part: Part, device: Any) -> None:
    """Do nothing unless a CUDA graph is being captured, during which no kernel is loaded.

    Raises:
        Unserved: one is; PyTorch's own kernel is to run the part in it.
    """
    if is_capturing(device):
        part.leave_to_capture()
        raise Unserved("its kernels were not loaded before a CUDA graph was captured")


def own_first(found: list[Solution]) -> list[Solution]:
    """Solutions of which an own kernel that ties with a library's best goes first: the host launches it faster."""
    if loaded() is None or found[0].library is Library.PLAIN:
        return found
    tied = next((s for s in found if s.library is Library.PLAIN and s.ties_with_best), None)
    return found if tied is None else [tied, *(s for s in found if s is not tied)]


def _refuse_tensors(arguments: Arguments) -> None:
    """Do nothing where all tensors are plain memory of one device and one element type.

    The dispatcher sends most others elsewhere before they come here.

    Raises:
        Unserved: one is not.
    """
    bias = arguments.bias if isinstance(arguments.bias, torch.Tensor) else None
    given = {"input": arguments.x, "weight": arguments.w, "gradient": arguments.grad, "bias": bias}
    for name, tensor in given.items():
        if tensor is None:
            continue
        if tensor.device != arguments.x.device:
            raise Unserved(f"its {name} is on {tensor.device}, its input on {arguments.x.device}")
        if tensor.dtype is not arguments.x.dtype:
            raise Unserved(f"its {name} has the element type {tensor.dtype}, its input {arguments.x.dtype}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise Unserved(f"its {name} is not dense (strided)")
        if tensor.is_neg() or tensor.is_conj():
            raise Unserved(f"its {name} is a negated or conjugated view")
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise Unserved(f"its {name} is inside a transform of torch.func")


def _refuse_shapes(call: ConvolutionCall, arguments: Arguments) -> None:
    """Do nothing where the bias and the gradient have the shapes that PyTorch takes.

    Raises:
        Unserved: one has not, and PyTorch tells the user so.
    """
    channels = call.output_shape[1]
    if isinstance(arguments.bias, torch.Tensor) and tuple(arguments.bias.shape) != (channels,):
        raise Unserved(f"its bias has the shape {tuple(arguments.bias.shape)}")
    if arguments.grad is not None and tuple(arguments.grad.shape) != call.output_shape:
        raise Unserved(f"the gradient has the shape {tuple(arguments.grad.shape)}, the output {call.output_shape}")


def _reason(error: Exception, what: object) -> str:
    """Why PyTorch's own kernel runs a call: it can, whatever goes wrong here."""
    if isinstance(error, Unserved):
        return str(error)
    if isinstance(error, NoSolutionError):
        return f"no solution is usable: {first_line(error)}"
    logger.warning("PyTorch's own kernel runs %s: %s", what, error, exc_info=True)
    return f"{type(error).__name__}: {first_line(error)}"
