"""A solution whose weights stay the same, as in inference: what depends on them alone is computed once and kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from miofind.arrays import arrays, operands
from miofind.core.arguments import EpilogueArguments
from miofind.core.problem import Direction, Operand
from miofind.device.device import Place, check_fork
from miofind.errors import InvalidArrayError, InvalidOptionError
from miofind.launch.invoker import Invoker, bases_of, make_invoker, stay
from miofind.runtime.handle import check_kernels, check_serves
from miofind.runtime.runner import FusedRunner, Runner
from miofind.solver.steps import ConvSolution, Packing

if TYPE_CHECKING:
    from miofind.runtime.solution import Solution


class PackedSolution:
    """A solution and weights, packed as its kernels take them; a solution that has no use for that keeps them as given.

    The scale and bias of its problem's epilogue stay as they were given.

    Attributes:
        solution: what was packed.
        packed_bytes: bytes of the packed weights; 0 where they are kept as given.
        workspace_bytes: bytes of workspace that a run needs.
    """

    __slots__ = ("_constants", "_runner", "_w", "packed_bytes", "solution", "workspace_bytes")

    def __init__(self, solution: Solution, w: Any, stream: Any, constants: Mapping[str, Any]) -> None:
        """See `Solution.pack`."""
        problem, handle = solution.problem.flattened, solution.solution_list.handle
        if problem.direction is Direction.BACKWARD_WEIGHTS:
            raise InvalidOptionError("weights are the result of backward weights: there is nothing to pack")
        queue = None if stream is None else operands.stream_address(stream)
        solver = handle.registry.named(solution.solver_id)
        check_serves(solver, problem, handle.device)
        solver.check_config(problem, handle.device, solution.config)
        packing = solver.packing(problem, handle.device, solution.config)
        self.solution = solution
        self._runner: Runner
        if packing is not None:
            if handle.device.place is Place.CUDA:
                check_fork()
            whole = solver.solution(problem, handle.device, solution.config)
            check_kernels(whole, solution.kernel_hash, solution.id)
            kind = _PackedFusedRunner if problem.epilogue else _PackedRunner
            self._runner = runner = kind(solution, packing)
            self._w = runner.pack(w, queue)
            self.packed_bytes = packing.bytes
        else:
            self._runner = solution.runner
            self._w = self._kept("w", w)
            self.packed_bytes = 0
        self._constants = {name: self._kept(name, array) for name, array in constants.items() if array is not None}
        self.workspace_bytes = self._runner.prepare().workspace_bytes

    def _kept(self, name: str, array: Any) -> Any:
        """An array that later runs are given, checked now."""
        problem, index = self.solution.problem, self.solution.solution_list.handle.device.index
        operand = next((operand for operand in problem.operands if operand.name == name), None)
        if operand is None:
            raise InvalidArrayError(f"{name} is not packed: {problem} has none")
        operands.strict_check(name, operand.array, index, self._runner.alignment_bytes)(array)
        return array.detach() if arrays.framework_of(array) is arrays.Framework.TORCH else array

    def __repr__(self) -> str:
        return f"<PackedSolution of {self.solution!r}, {self.packed_bytes} bytes packed>"

    def __copy__(self) -> PackedSolution:
        return self

    def __deepcopy__(self, memo: object) -> PackedSolution:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("packed weights are not pickled: pickle solution and weights, and pack where they arrive")

    def run(
        self,
        x: Any = None,
        *,
        dy: Any = None,
        out: Any = None,
        workspace: Any = None,
        stream: Any = None,
        **epilogue: Unpack[EpilogueArguments],
    ) -> Any:
        """The problem's output: y forward, dx for backward data; as `run_solution` does it, with the weights packed.

        Args:
            x: (n, c, *spatial), for forward.
            dy: (n, k, *out_spatial), for backward data.
            out: the output, allocated like the input if left out; it shares no memory with the input.
            workspace: at least `workspace_bytes` bytes that are no other array's, on a GPU at a multiple of 256;
                allocated if left out, not looked at where they are 0.
            stream: a CuPy or PyTorch stream or its address; the current stream of the input's library if left out.
            epilogue: as in `run_solution`, without the scale and bias that are packed.

        Raises:
            InvalidArrayError: what was given and what the problem wants.
            WorkspaceError: the workspace is too small, not aligned, or shares memory with another array.
            LaunchError: the launch failed; another solution of the same find does not take over packed weights.
        """
        image, unused = (x, dy) if self.solution.problem.direction is Direction.FORWARD else (dy, x)
        if image is None or unused is not None:
            direction, given = self.solution.problem.direction, {"x": x, "dy": dy}
            wanted = "x" if direction is Direction.FORWARD else "dy"
            names = ", ".join(name for name, array in given.items() if array is not None) or "nothing"
            raise InvalidArrayError(f"a packed {direction} solution takes {wanted}; given: {names}")
        if not epilogue and not self._constants:
            return self._runner.run(x, self._w, dy, out, workspace, stream)
        twice = [name for name in self._constants if epilogue.get(name) is not None]
        if twice:
            raise InvalidArrayError(f"{' and '.join(twice)} of this solution are packed: leave them out")
        return self._runner.run_fused({**epilogue, **self._constants}, x, self._w, dy, out, workspace, stream)


class _PackedWeights(Runner):
    """Runs the part of a solution that is left when its weights are packed."""

    __slots__ = ()
    _packing: Packing

    def pack(self, w: Any, queue: int | None) -> Any:
        """The packed weights: bytes from the allocator of w's library."""
        invoker = self._invoker_of(self._packing.pack)
        weights = next(operand for operand in self.problem.operands if operand.name == "w")
        address = super()._check_of(weights, invoker.alignment_bytes)(w)
        with operands.allocating_on(w, queue, self._index):
            packed = arrays.allocate_bytes(w, self._packing.bytes, self._index)
            scratch = self._scratch(w, invoker)
        given = {"w": address, "y": self._packed_address(packed)}
        invoker.run(bases_of(self.problem, given, scratch), self._queue(w) if queue is None else queue)
        return packed

    def _scratch(self, w: Any, invoker: Invoker) -> Any:
        if not invoker.workspace_bytes:
            return 0
        workspace = arrays.allocate_bytes(w, invoker.workspace_bytes, self._index)
        return operands.workspace_address(workspace, invoker.workspace_bytes, self._index)

    def _packed_address(self, packed: Any) -> Any:
        return operands.workspace_address(packed, self._packing.bytes, self._index)

    def _invoker_of(self, part: ConvSolution) -> Invoker:
        handle = self.handle
        solver = handle.registry.named(self._solver_id)
        return make_invoker(self.problem.flattened, handle.device, solver, self._config, handle.compiler, part)

    def _made(self) -> Invoker:
        return stay(self._invoker_of(self._packing.run))

    def _bytes_of(self, operand: Operand) -> int:
        return self._packing.bytes if operand.name == "w" else super()._bytes_of(operand)

    def _check_of(self, operand: Operand, alignment_bytes: int) -> operands.Check:
        return self._packed_address if operand.name == "w" else super()._check_of(operand, alignment_bytes)


class _PackedRunner(_PackedWeights):
    """Without an epilogue."""

    __slots__ = ("_packing",)

    def __init__(self, solution: Solution, packing: Packing) -> None:
        super().__init__(solution.problem, solution.solver_id, solution.config, solution.solution_list.handle)
        self._packing = packing


class _PackedFusedRunner(_PackedWeights, FusedRunner):
    """With an epilogue."""

    __slots__ = ("_packing",)

    def __init__(self, solution: Solution, packing: Packing) -> None:
        super().__init__(solution.problem, solution.solver_id, solution.config, solution.solution_list.handle)
        self._packing = packing
