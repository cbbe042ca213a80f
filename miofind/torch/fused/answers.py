"""What runs the problems of fused convolutions: the FindDB's answers by `enable`'s settings, bound and launched."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import miofind
from miofind.compiler import CompilePool
from miofind.core.epilogue import EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.errors import LaunchError, NoSolutionError, described
from miofind.launch.invoker import Invoker
from miofind.runtime.solution import Solution
from miofind.torch.fused.packed_filters import packed_filters
from miofind.torch.override.calls import COMPUTED_OF, DIRECTION_OF, Unserved, is_depthwise
from miofind.torch.override.dispatcher import Override, current
from miofind.torch.override.flags import Flags
from miofind.torch.override.launches import ReadySolutions, first_line
from miofind.torch.override.memory import host_array, is_capturing, make_room, stream_reader
from miofind.torch.override.plans import Part, Planner, kernels_of, note_capture
from miofind.torch.override.settings import MissPolicy, Settings

logger = logging.getLogger(__name__)

_unset = Planner(Settings(takes_cpu=False))


def planner_of(override: Override | None) -> Planner:
    """What decides: the settings of the override in force, else `enable`'s defaults."""
    return _unset if override is None else Planner(override.settings)


class Answer:
    """What becomes of a problem: the invokers of its solutions, or PyTorch's own operations.

    Attributes:
        part: the problem, its fastest solution, and why PyTorch computes it where it does.
        takes_packed: whether "w" is packed filters.
    """

    __slots__ = ("_invokers", "_lock", "_names", "_read_stream", "_solutions", "part", "takes_packed")

    def __init__(
        self, part: Part, solutions: ReadySolutions | None, first: Invoker | None, *, takes_packed: bool = False
    ) -> None:
        self.part = part
        self.takes_packed = takes_packed
        self._solutions = solutions
        self._invokers: tuple[Invoker, ...] = () if first is None else (first,)
        self._names = () if part.problem is None else tuple(operand.name for operand in part.problem.operands)
        self._lock = threading.Lock()
        self._read_stream = stream_reader()
        part.launch = None if first is None else self.run

    @property
    def is_served(self) -> bool:
        """Whether a solution can run the problem."""
        return bool(self._invokers)

    @property
    def first(self) -> Invoker | None:
        """What runs the problem where all addresses suit it; None where PyTorch does."""
        return next(iter(self._invokers), None)

    def declines(self, device: Any) -> bool:
        """Whether no solution can run the problem now, which is noted while a graph is captured on the device."""
        if self.part.pending is not None:
            note_capture(device)
        return not self.is_served

    def run(self, tensors: Mapping[str, Any], parameters: EpilogueParameters) -> bool:
        """Run a solution; False, and nothing written, where PyTorch is to compute the problem.

        Args:
            tensors: of the problem's operands by name, packed as it has them, on one device.
            parameters: the epilogue's numbers.

        Raises:
            LaunchError: it failed.
        """
        first = self.first
        if first is None or self.part.skips():
            return False
        ordered = [tensors[name] for name in self._names]
        try:
            if ordered[0].is_cuda:
                has_run = self._run_on_device(ordered, parameters)
            else:
                has_run = self._run_on_host(first, ordered, parameters)
            if has_run:
                self.part.backoff = None
            return has_run
        except torch.OutOfMemoryError:  # of a workspace that PyTorch's own operations do without
            self.part.lacks_memory()
        return False

    def fail(self, error: LaunchError, calls: int) -> None:
        """Leave the problem to PyTorch from now on, after so many calls."""
        self.part.fail(error, calls)
        with self._lock:
            self._invokers, self._solutions = (), None

    def _run_on_device(self, tensors: list[Any], parameters: EpilogueParameters) -> bool:
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        invoker = self._fitting(together, tensors[0].device)
        if invoker is None:
            self.part.declined += 1
            return False
        scratch = 0
        if invoker.workspace_bytes:
            workspace = torch.empty(invoker.workspace_bytes, dtype=torch.uint8, device=tensors[0].device)
            scratch = workspace.data_ptr()
        numbers = (parameters,) if invoker.problem.epilogue else ()
        invoker.run((*addresses, *numbers, scratch), self._read_stream(tensors[0].get_device()))
        return True

    def _run_on_host(self, invoker: Invoker, tensors: list[Any], parameters: EpilogueParameters) -> bool:
        numbers = (parameters,) if invoker.problem.epilogue else ()
        workspace = torch.empty(invoker.workspace_bytes, dtype=torch.uint8).numpy() if invoker.workspace_bytes else None
        invoker.run((*map(host_array, tensors), *numbers, workspace), 0)
        return True

    def _fitting(self, addresses: int, device: Any) -> Invoker | None:
        """The invoker of the first solution whose alignment the addresses have, which are or-ed into one."""
        while True:
            known = self._invokers
            for invoker in known:
                if not addresses % invoker.alignment_bytes:
                    return invoker
            if not known or self._solutions is None or is_capturing(device):
                return None
            with self._lock:
                if known is self._invokers:  # else another thread made one ready, or all failed
                    self._make_ready()

    def _make_ready(self) -> None:
        """Make the next solution ready that needs a smaller alignment, if there is one; for who holds the lock."""
        if self._solutions is None:
            return
        try:
            _, invoker = self._solutions.next(below_bytes=self._invokers[-1].alignment_bytes)
        except Unserved:
            self._solutions = None
        else:
            self._invokers = (*self._invokers, invoker)


def answer(
    problem: ProblemDescription,
    device: Any,
    flags: Flags,
    planner: Planner,
    computed: str | None = None,
    packing: str = "",
) -> Answer:
    """What runs a problem on a PyTorch device; measured now where the settings ask for that.

    Args:
        computed: what it is of the call, "y", "dx" or "dw": of a transposed one not what its direction says.
        packing: name of the `PackedFilters` that packed its filters; a solution that packs them so is given these.

    Raises:
        NoSolutionError: the policy is to raise it where the FindDB has no answer.
    """
    part = _part_of(problem, computed)
    try:
        _refuse(part, planner.settings, flags)
        found = planner.solutions(part, device, flags)
        solutions = planner.ready(part, found, device, flags)
        part.solution, invoker = solutions.next()
        packed = packed_filters(part.solution, device, flags, planner) if packing else None
        if packed is not None and packed.name == packing:
            return Answer(part, None, packed.run, takes_packed=True)
    except Unserved as reason:
        part.reason = str(reason)
    except NoSolutionError as error:
        if planner.settings.on_miss is MissPolicy.ERROR:
            raise
        part.reason = f"no solution is usable: {first_line(error)}"
    except Exception as error:  # whatever goes wrong, PyTorch's own operations can compute it
        logger.warning("PyTorch's own operations run %s: %s", problem, error, exc_info=True)
        part.reason = f"{type(error).__name__}: {first_line(error)}"
    else:
        return Answer(part, solutions, invoker)
    return Answer(part, None, None)


def find_missing(problems: Sequence[ProblemDescription], device: Any, flags: Flags, planner: Planner) -> None:
    """Find those of many problems that no FindDB answers, the likeliest candidates of each, all compiled in parallel.

    Args:
        problems: of a PyTorch device, whose misses the settings have measured.
    """
    wanted = []
    for problem in dict.fromkeys(problems):
        with contextlib.suppress(Unserved):
            _refuse(_part_of(problem), planner.settings, flags)
            wanted.append(problem)
    if not wanted or is_capturing(device):
        return
    try:
        handle = planner.handle_of(device)
        make_room(max(wanted, key=lambda each: each.bytes), device)
        miofind.find_many(
            wanted,
            options=replace(planner.settings.options(deterministic=flags.deterministic), likely=True),
            handle=handle,
        )
    except Unserved as reason:
        logger.debug("nothing is found ahead: %s", reason)
    except Exception as error:  # each problem is asked for by itself yet
        logger.warning("what a graph lacks is not found at once: %s", described(error))


def fastest(problem: ProblemDescription, device: Any, flags: Flags, planner: Planner) -> Solution | None:
    """The first of a problem's answers on a PyTorch device, if it can be made ready; None where PyTorch runs it."""
    try:
        part = _part_of(problem)
        _refuse(part, planner.settings, flags)
        return planner.solutions(part, device, flags)[0]
    except Exception as error:  # who asks for the answer is told
        logger.debug("nothing of %s is compiled ahead: %s", problem, described(error))
        return None


def compile_ahead(solutions: Sequence[Solution], device: Any, planner: Planner) -> None:
    """Compile what solutions launch, all at once, in processes of their own; who launches them says what is wrong."""
    try:
        handle = planner.handle_of(device)
        steps = [step for solution in solutions for step in kernels_of(solution, handle)]
        with CompilePool(handle.compiler.cache) as pool:
            pool.errors(steps, handle.device.arch)
    except Exception as error:
        logger.debug("nothing is compiled ahead: %s", described(error))


def _part_of(problem: ProblemDescription, computed: str | None = None) -> Part:
    return Part(computed or COMPUTED_OF[problem.direction], problem=problem)


def _refuse(part: Part, settings: Settings, flags: Flags) -> None:
    """Do nothing where PyTorch's switches and the settings leave a problem to miofind.

    Raises:
        Unserved: PyTorch's own operations are to compute it.
    """
    problem = part.problem
    assert problem is not None
    settings.refuse(
        flags,
        dtype=problem.x.dtype,
        direction=DIRECTION_OF[part.computed],
        is_depthwise=is_depthwise(problem),
    )


def override_of(tensor: Any) -> Override | None:
    """The override that is in force on a tensor's device."""
    return current("cuda" if tensor.is_cuda else "cpu")
