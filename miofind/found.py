"""What a find returns: solutions that can be run, and how they are run.

`Solution` is the public value. `Runner` does the strict checks and the launch; it builds its invoker on first use and
goes on with the next solution of the same find where its own fails.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miofind import arrays
from miofind.device import Device, Library, Place
from miofind.errors import CompileError, InvalidArrayError, InvalidConfigError, LaunchError, MissingLibraryError
from miofind.invoker import Invoker
from miofind.problem import Direction, ProblemDescription
from miofind.solution import Config
from miofind.solver import Algorithm, solver_by_id

if TYPE_CHECKING:
    from miofind.handle import Handle

logger = logging.getLogger(__name__)


class Source(StrEnum):
    """Where a solution's time comes from."""

    MEASURED = "measured"
    FINDDB = "finddb"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One way to compute a problem on a device, with what is known of it.

    Attributes:
        problem, device: what it solves and where.
        solver_id, algorithm, library, config: who solves it and how.
        time_ms: median time of a run; an estimate where `source` is "predicted".
        workspace_bytes: bytes of workspace that a run needs.
        deterministic: equal inputs give equal bits.
        max_error: largest |error| / (|x| * |w|) seen in verification; None where it was not run here or before.
        source: "measured", "finddb" or "predicted".
    """

    problem: ProblemDescription
    device: Device
    solver_id: str
    algorithm: Algorithm
    library: Library
    config: Config
    time_ms: float
    workspace_bytes: int
    deterministic: bool
    max_error: float | None
    source: Source
    runner: Runner = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        """Solver and configuration as one string."""
        return f"{self.solver_id}:{self.config.json}"

    def prepare(self) -> Solution:
        """Make everything ready that a first run would: compile, load, plan. Needed before a first run under capture.

        Raises:
            CompileError, LaunchError, MissingLibraryError: it cannot be made ready and nothing can take its place.
        """
        self.runner.prepare()
        return self

    def save(self, path: str | Path) -> None:
        """Write the solution and its binaries to a JSON file that `Solution.load` reads.

        Raises:
            SolutionFileError: the file cannot be written.
        """
        from miofind.solution_file import save_solution

        save_solution(self, Path(path))

    @staticmethod
    def load(path: str | Path, handle: Handle | None = None) -> Solution:
        """A saved solution, ready to run with no look-up, find or compilation.

        Raises:
            SolutionFileError: the file is damaged, of another architecture or of other sources.
        """
        from miofind.solution_file import load_solution

        return load_solution(Path(path), handle)


class Runner:
    """Runs one solution: strict checks, outputs and workspace where none are given, one launch.

    Attributes:
        problem: what is run.
        handle: device and caches it runs with.
        following: runner of the next solution of the same find, taken where this one fails.
    """

    __slots__ = ("_active", "_config", "_index", "_invoker", "_kernel_hash", "_operands", "_slots",
                 "_solver_id", "following", "handle", "problem")  # fmt: skip

    def __init__(
        self, problem: ProblemDescription, solver_id: str, config: Config, handle: Handle, kernel_hash: str = ""
    ) -> None:
        self.problem = problem
        self.following: Runner | None = None
        self._solver_id = solver_id
        self._config = config
        self.handle = handle
        self._kernel_hash = kernel_hash
        self._invoker: Invoker | None = None
        self._active: Runner = self
        self._index = handle.device.index if handle.device.place is Place.CUDA else -1
        self._operands = _OPERANDS[problem.direction]
        self._slots: tuple[arrays.TensorSlot, ...] = ()

    @property
    def alignment_bytes(self) -> int:
        """Alignment that the tensors' addresses need."""
        return solver_by_id(self._solver_id).alignment_bytes

    def prepare(self) -> Invoker:
        """The invoker, built on first use; the next solution's where this one's cannot be built.

        Raises:
            CompileError, LaunchError, InvalidConfigError, MissingLibraryError: no solution that is left can be built.
        """
        if self._active is not self:
            return self._active.prepare()
        if self._invoker is None:
            try:
                self._invoker = self.handle.invoker(self.problem, self._solver_id, self._config, self._kernel_hash)
            except _FALL_BACK_ON as error:
                return self._fall_back(error).prepare()
            direction, alignment = self.problem.direction, self._invoker.alignment_bytes
            self._slots = tuple(
                arrays.TensorSlot(_array_name(direction, name), self.problem.tensor(name), self._index, alignment)
                for name in ("x", "w", "y")
            )
        return self._invoker

    def run(self, x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any) -> Any:
        """See `miofind.run_solution`."""
        invoker = self._invoker
        if invoker is None or self._active is not self:
            invoker = self.prepare()
            if self._active is not self:
                return self._active.run(x, w, dy, out, workspace, stream)
        given = (x, w, dy, out)
        operands = self._operands
        first = given[operands.first]
        if first is None or given[operands.second] is None or given[operands.unused] is not None:
            raise _wrong_operands(self.problem.direction, x, w, dy)
        if out is None or (workspace is None and invoker.workspace_bytes):
            out, workspace = self._allocate(first, out, workspace, stream)
            given = (x, w, dy, out)
        slot_x, slot_w, slot_y = self._slots
        x_address = slot_x.address(given[operands.x])
        w_address = slot_w.address(given[operands.w])
        y_address = slot_y.address(given[operands.y])
        scratch: Any = 0
        if invoker.workspace_bytes:
            scratch = arrays.workspace_address(workspace, invoker.workspace_bytes, self._index)
        queue = arrays.current_stream(first, self._index) if stream is None else arrays.stream_address(stream)
        try:
            invoker.run(x_address, w_address, y_address, scratch, queue)
        except LaunchError as error:
            return self._fall_back(error).run(x, w, dy, out, workspace, stream)
        return out

    def _allocate(self, first: Any, out: Any, workspace: Any, stream: Any) -> tuple[Any, Any]:
        """The output and the workspace, made where they are missing, on the stream that will use them."""
        arrays.view(first, _array_name(self.problem.direction, self.problem.direction.inputs[0]))
        invoker = self.prepare()
        with arrays.allocating_on(first, stream, self._index):
            if out is None:
                out = arrays.allocate(first, self.problem.output, self._index)
            if workspace is None and invoker.workspace_bytes:
                workspace = arrays.allocate_bytes(first, invoker.workspace_bytes, self._index)
        return out, workspace

    def _fall_back(self, error: Exception) -> Runner:
        """The next runner that needs no more workspace than this one; taken from now on, with one warning."""
        limit = None if self._invoker is None else self._invoker.workspace_bytes
        following = self.following
        while following is not None:
            try:
                invoker = following.prepare()
            except _FALL_BACK_ON:
                break
            if limit is None or invoker.workspace_bytes <= limit:
                name = f"{self._solver_id}:{self._config.json}"
                logger.warning("%s failed on %s, going on with the next solution: %s", name, self.problem, error)
                self._active = following
                return following
            following = following.following
        raise error


_FALL_BACK_ON = (CompileError, LaunchError, InvalidConfigError, MissingLibraryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    """Positions in (x, w, dy, out): the two inputs, the one that must be absent, and where each tensor is."""

    first: int
    second: int
    unused: int
    x: int
    w: int
    y: int


_OPERANDS = {
    Direction.FORWARD: _Operands(first=0, second=1, unused=2, x=0, w=1, y=3),
    Direction.BACKWARD_DATA: _Operands(first=2, second=1, unused=0, x=3, w=1, y=2),
    Direction.BACKWARD_WEIGHTS: _Operands(first=2, second=0, unused=1, x=0, w=3, y=2),
}


def _array_name(direction: Direction, tensor: str) -> str:
    """What a user calls the tensor "x", "w" or "y" in a direction: gradients have a d in front."""
    is_gradient = direction is not Direction.FORWARD and tensor in ("y", direction.output)
    return f"d{tensor}" if is_gradient else tensor


def _wrong_operands(direction: Direction, x: Any, w: Any, dy: Any) -> InvalidArrayError:
    needed = " and ".join(_array_name(direction, name) for name in direction.inputs)
    given = ", ".join(name for name, value in (("x", x), ("w", w), ("dy", dy)) if value is not None)
    return InvalidArrayError(f"a {direction} solution takes {needed}; given: {given or 'none'}")
