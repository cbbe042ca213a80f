"""A solution whose weights stay the same, as in inference: what depends on them alone is computed once and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miofind import arrays, operands
from miofind.errors import InvalidOptionError
from miofind.invoker import Invoker, make_invoker
from miofind.problem import Direction
from miofind.runner import Runner
from miofind.solution import Packing
from miofind.solver import solver_by_id

if TYPE_CHECKING:
    from miofind.found import Solution


class PackedSolution:
    """A solution and weights, packed as its kernels take them; a solution that has no use for that keeps them as given.

    Attributes:
        solution: what was packed.
        packed_bytes: bytes of the packed weights; 0 where they are kept as given.
        workspace_bytes: bytes of workspace that a run needs.
    """

    __slots__ = ("_runner", "_w", "packed_bytes", "solution", "workspace_bytes")

    def __init__(self, solution: Solution, w: Any, stream: Any = None) -> None:
        """See `Solution.pack`."""
        problem, handle = solution.problem, solution.found.handle
        if problem.direction is Direction.BACKWARD_WEIGHTS:
            raise InvalidOptionError("weights are the result of backward weights: there is nothing to pack")
        solver = solver_by_id(solution.solver_id)
        solver.check_config(problem, handle.device, solution.config)
        packing = solver.packing(problem, handle.device, solution.config)
        self.solution = solution
        self._runner: Runner = solution.runner
        self._w = w
        self.packed_bytes = 0
        if packing is not None:
            runner = _PackedRunner(solution, packing)
            self._w = runner.pack(w, stream)
            self._runner = runner
            self.packed_bytes = packing.bytes
        else:
            index = handle.device.index
            operands.strict_check("w", problem.w, index, solution.runner.alignment_bytes)(w)
        self.workspace_bytes = self._runner.prepare().workspace_bytes

    def __repr__(self) -> str:
        return f"<PackedSolution of {self.solution!r}, {self.packed_bytes} bytes packed>"

    def run(self, x: Any = None, *, dy: Any = None, out: Any = None, workspace: Any = None, stream: Any = None) -> Any:
        """The problem's output: y forward, dx for backward data; as `run_solution` does it, with the weights packed.

        Args:
            x: (n, c, *spatial), for forward.
            dy: (n, k, *out_spatial), for backward data.
            out: the output, allocated like the input if left out; it shares no memory with the input.
            workspace: at least `workspace_bytes` bytes, allocated if left out.
            stream: a CuPy or PyTorch stream or its address; the current stream of the input's library if left out.

        Raises:
            InvalidArrayError: what was given and what the problem wants.
            WorkspaceError: the workspace is too small.
            LaunchError: the launch failed.
        """
        return self._runner.run(x, self._w, dy, out, workspace, stream)


class _PackedRunner(Runner):
    """Runs the part of a solution that is left when its weights are packed."""

    __slots__ = ("_packing",)

    def __init__(self, solution: Solution, packing: Packing) -> None:
        super().__init__(solution.problem, solution.solver_id, solution.config, solution.found.handle)
        self._packing = packing

    def pack(self, w: Any, stream: Any) -> Any:
        """The packed weights: bytes from the allocator of w's library."""
        invoker = self._invoker_of(self._packing.pack)
        address = super()._check_of("w", invoker.alignment_bytes)(w)
        with operands.allocating_on(w, stream, self._index):
            packed = arrays.allocate_bytes(w, self._packing.bytes, self._index)
            scratch = self._scratch(w, invoker)
        queue = self._queue(w) if stream is None else operands.stream_address(stream)
        invoker.run(0, address, self._packed_address(packed), scratch, queue)
        return packed

    def _scratch(self, w: Any, invoker: Invoker) -> Any:
        if not invoker.workspace_bytes:
            return 0
        workspace = arrays.allocate_bytes(w, invoker.workspace_bytes, self._index)
        return operands.workspace_address(workspace, invoker.workspace_bytes, self._index)

    def _packed_address(self, packed: Any) -> Any:
        return operands.workspace_address(packed, self._packing.bytes, self._index)

    def _invoker_of(self, part: Any) -> Invoker:
        handle = self.handle
        solver = solver_by_id(self._solver_id)
        return make_invoker(self.problem, handle.device, solver, self._config, handle.compiler, part)

    def _made(self) -> Invoker:
        return self._invoker_of(self._packing.run)

    def _sizes_bytes(self) -> tuple[int, int, int]:
        return (self.problem.x.bytes, self._packing.bytes, self.problem.y.bytes)

    def _check_of(self, tensor: str, alignment_bytes: int) -> operands.Check:
        return self._packed_address if tensor == "w" else super()._check_of(tensor, alignment_bytes)
