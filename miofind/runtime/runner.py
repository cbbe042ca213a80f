"""How one solution is run: strict checks, outputs and workspace where none are given, one launch.

A runner builds its invoker on first use, and goes on with the next solution of the same find where its own fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from miofind.arrays import arrays, operands
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Place, check_fork
from miofind.errors import CompileError, InvalidArrayError, InvalidConfigError, LaunchError, MissingLibraryError
from miofind.launch.invoker import Invoker
from miofind.solver.steps import Config

if TYPE_CHECKING:
    from miofind.runtime.handle import Handle

logger = logging.getLogger(__name__)

_TENSORS = ("x", "w", "y")
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
                 "_overlaps", "_queue", "_solver_id", "_workspace_bytes", "following", "handle", "problem")  # fmt: skip

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
        self._check: operands.CheckOfAll = lambda *tensors: tensors
        self._overlaps: Callable[[Any, Any, Any], bool] = lambda *tensors: False
        self._check_workspace: Callable[[Any, Any, Any, Any], Any] = lambda workspace, *tensors: workspace
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
            alignment = invoker.alignment_bytes
            x, w, y = (self._check_of(name, alignment) for name in _TENSORS)
            self._check = operands.check_of_all((x, w, y), alignment)
            self._overlaps = operands.overlap_check(
                self._sizes_bytes(), _TENSORS.index(self._direction.output), self._index
            )
            self._workspace_bytes = invoker.workspace_bytes
            names = map(self._name_of, _TENSORS)
            tensors = dict(zip(names, self._sizes_bytes(), strict=True))
            self._check_workspace = operands.workspace_check(tensors, self._workspace_bytes, self._index)
            self._invoker = invoker
        return self._invoker

    def _made(self) -> Invoker:
        return self.handle.invoker(self.problem, self._solver_id, self._config, self._kernel_hash)

    def _sizes_bytes(self) -> tuple[int, int, int]:
        return (self.problem.x.bytes, self.problem.w.bytes, self.problem.y.bytes)

    def _check_of(self, tensor: str, alignment_bytes: int) -> operands.Check:
        is_written = tensor == self._direction.output
        return operands.strict_check(
            self._name_of(tensor), self.problem.tensor(tensor), self._index, alignment_bytes, is_written=is_written
        )

    def _name_of(self, tensor: str) -> str:
        """What a user of `run` calls the tensor "x", "w" or "y"."""
        return "out" if tensor == self._direction.output else array_name(self._direction, tensor)

    def run(self, x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any) -> Any:
        """See `miofind.run_solution`."""
        direction = self._direction
        if direction is _FORWARD:
            first, x_array, w_array, y_array, unused = x, x, w, out, dy
        elif direction is _BACKWARD_DATA:
            first, x_array, w_array, y_array, unused = dy, out, w, dy, x
        else:
            first, x_array, w_array, y_array, unused = dy, x, out, dy, w
        invoker = self._invoker
        if invoker is None or out is None or unused is not None or (workspace is None and self._workspace_bytes):
            return self._run_completed(x, w, dy, out, workspace, stream)
        x_address, w_address, y_address = self._check(x_array, w_array, y_array)
        if self._overlaps(x_address, w_address, y_address):
            raise InvalidArrayError("out shares memory with an input, which would be overwritten while it is read")
        scratch: Any = 0
        if self._workspace_bytes:
            scratch = self._check_workspace(workspace, x_address, w_address, y_address)
        queue = self._queue(first) if stream is None else operands.stream_address(stream)
        try:
            invoker.run(x_address, w_address, y_address, scratch, queue)
        except LaunchError as error:
            if self._index >= 0:
                check_fork()
            return self._fall_back(error).run(x, w, dy, out, workspace, stream)
        return out

    def _run_completed(self, x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any) -> Any:
        """Run after what a run needs was made: the invoker, the output, the workspace."""
        direction = self._direction
        given = {"x": x, "w": w, "y": dy}
        wanted = set(direction.inputs)
        if {name for name, array in given.items() if array is not None} != wanted:
            raise _wrong_operands(direction, x, w, dy)
        invoker = self.prepare()
        if self._active is not self:
            return self._active.run(x, w, dy, out, workspace, stream)
        first = given[direction.inputs[0]]
        arrays.view(first, array_name(direction, direction.inputs[0]))
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


def array_name(direction: Direction, tensor: str) -> str:
    """What a user calls the tensor "x", "w" or "y" in a direction: gradients have a d in front."""
    is_gradient = direction is not Direction.FORWARD and tensor in ("y", direction.output)
    return f"d{tensor}" if is_gradient else tensor


def _wrong_operands(direction: Direction, x: Any, w: Any, dy: Any) -> InvalidArrayError:
    needed = " and ".join(array_name(direction, name) for name in direction.inputs)
    given = ", ".join(name for name, value in (("x", x), ("w", w), ("dy", dy)) if value is not None)
    return InvalidArrayError(f"a {direction} solution takes {needed}; given: {given or 'none'}")
