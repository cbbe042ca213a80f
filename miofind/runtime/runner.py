"""How one solution is run: strict checks, outputs and workspace where none are given, one launch.

A runner builds its invoker on first use, and goes on with the next solution of the same find where its own fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from miofind.arrays import arrays, operands
from miofind.core.problem import Direction, Operand, ProblemDescription
from miofind.device.device import Place, check_fork
from miofind.errors import CompileError, InvalidArrayError, InvalidConfigError, LaunchError, MissingLibraryError
from miofind.launch.invoker import Invoker
from miofind.solver.steps import Config

if TYPE_CHECKING:
    from miofind.runtime.handle import Handle

logger = logging.getLogger(__name__)

_FALL_BACK_ON = (CompileError, LaunchError, InvalidConfigError, MissingLibraryError)

# A member of an enum costs a look-up in its class on every run.
_FORWARD = Direction.FORWARD
_BACKWARD_DATA = Direction.BACKWARD_DATA


class Runner:
    """Runs one solution.

    Attributes:
        problem: what is run.
        handle: device and caches it runs with.
        following: gives the runner of the next solution of the same find; None for the last.
    """

    __slots__ = ("_active", "_check", "_check_workspace", "_config", "_direction", "_index", "_invoker", "_kernel_hash",
                 "_queue", "_solver_id", "_workspace_bytes", "following", "handle", "problem")  # fmt: skip

    def __init__(
        self, problem: ProblemDescription, solver_id: str, config: Config, handle: Handle, kernel_hash: str = ""
    ) -> None:
        self.problem = problem
        self.handle = handle
        self.following: Callable[[], Runner] | None = None
        self._solver_id = solver_id
        self._config = config
        self._kernel_hash = kernel_hash
        self._direction = problem.direction
        self._index = handle.device.index if handle.device.place is Place.CUDA else -1
        self._active: Runner = self
        self._invoker: Invoker | None = None
        self._workspace_bytes = 0
        self._check: operands.CheckOfAll = lambda arrays: arrays
        self._check_workspace: Callable[[Any, tuple[Any, ...]], Any] = lambda workspace, addresses: workspace
        self._queue = operands.stream_reader(self._index)

    @property
    def alignment_bytes(self) -> int:
        """Alignment that the tensors' addresses need."""
        return self.handle.registry.named(self._solver_id).tensor_alignment(self.problem)

    def prepare(self) -> Invoker:
        """The invoker, built on first use; the next solution's where this one's cannot be built.

        Raises:
            CompileError, LaunchError, InvalidConfigError, MissingLibraryError: no solution that is left can be built.
        """
        if self._active is not self:
            return self._active.prepare()
        if self._invoker is None:
            try:
                invoker = self._made()
            except _FALL_BACK_ON as error:
                return self._fall_back(error).prepare()
            self._make_checks(invoker)
            self._invoker = invoker
        return self._invoker

    def _make_checks(self, invoker: Invoker) -> None:
        given, alignment = self.problem.operands, invoker.alignment_bytes
        sizes = {self._name_of(operand): self._bytes_of(operand) for operand in given}
        written = next(place for place, operand in enumerate(given) if not operand.is_input)
        memory = operands.OperandMemory(sizes_bytes=tuple(sizes.values()), written=written, alignment=alignment)
        checks = [self._check_of(operand, alignment) for operand in given]
        self._check = operands.check_of_all(checks, memory, self._index)
        self._workspace_bytes = invoker.workspace_bytes
        self._check_workspace = operands.workspace_check(sizes, self._workspace_bytes, self._index)

    def _made(self) -> Invoker:
        return self.handle.invoker(self.problem, self._solver_id, self._config, self._kernel_hash)

    def _bytes_of(self, operand: Operand) -> int:
        return operand.tensor.bytes

    def _check_of(self, operand: Operand, alignment_bytes: int) -> operands.Check:
        return operands.strict_check(
            self._name_of(operand), operand.tensor, self._index, alignment_bytes, is_written=not operand.is_input
        )

    def _name_of(self, operand: Operand) -> str:
        """What a user of `run` calls an operand."""
        if not operand.is_input:
            return "out"
        return "dy" if operand.name == "y" and self._direction is not _FORWARD else operand.name

    def run(self, x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any) -> Any:
        """See `miofind.run_solution`."""
        direction = self._direction
        if direction is _FORWARD:
            first, in_order, unused = x, (x, w, out), dy
        elif direction is _BACKWARD_DATA:
            first, in_order, unused = dy, (out, w, dy), x
        else:
            first, in_order, unused = dy, (x, out, dy), w
        invoker = self._invoker
        if invoker is None or out is None or unused is not None or (workspace is None and self._workspace_bytes):
            return self._run_completed(x, w, dy, out, workspace, stream)
        addresses = self._check(in_order)
        scratch: Any = 0
        if self._workspace_bytes:
            scratch = self._check_workspace(workspace, addresses)
        queue = self._queue(first) if stream is None else operands.stream_address(stream)
        try:
            invoker.run(addresses + (scratch,), queue)  # noqa: RUF005, which is quicker
        except LaunchError as error:
            if self._index >= 0:
                check_fork()
            return self._fall_back(error).run(x, w, dy, out, workspace, stream)
        return out

    def _run_completed(self, x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any) -> Any:
        """Run after what a run needs was made: the invoker, the output, the workspace."""
        given = {name: array for name, array in (("x", x), ("w", w), ("dy", dy)) if array is not None}
        wanted = [self._name_of(operand) for operand in self.problem.inputs]
        if given.keys() != set(wanted):
            needed, listed = " and ".join(wanted), ", ".join(given) or "none"
            raise InvalidArrayError(f"a {self.problem.direction} solution takes {needed}; given: {listed}")
        invoker = self.prepare()
        if self._active is not self:
            return self._active.run(x, w, dy, out, workspace, stream)
        first = given[wanted[0]]
        arrays.view(first, wanted[0])
        with operands.allocating_on(first, stream, self._index):
            if out is None:
                out = arrays.allocate(first, self.problem.output, self._index, invoker.alignment_bytes)
            if workspace is None and invoker.workspace_bytes:
                workspace = arrays.allocate_bytes(first, invoker.workspace_bytes, self._index)
        return self.run(x, w, dy, out, workspace, stream)

    def _fall_back(self, error: Exception) -> Runner:
        """The next runner that needs no more workspace than this one; taken from now on, with one warning."""
        with self.handle.lock:
            if self._active is not self:  # another thread was here first
                return self._active
            limit = self._workspace_bytes if self._invoker is not None else None
            following = self.following
            while following is not None:
                runner = following()
                try:
                    invoker = runner.prepare()
                except _FALL_BACK_ON:
                    break
                if limit is None or invoker.workspace_bytes <= limit:
                    name = f"{self._solver_id}:{self._config.json}"
                    logger.warning("%s failed on %s, going on with the next solution: %s", name, self.problem, error)
                    self._active, self._invoker = runner, None
                    return runner
                following = runner.following
            raise error
