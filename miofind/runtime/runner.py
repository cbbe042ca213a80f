"""How one solution is run: strict checks, outputs and workspace where none are given, one launch.

A runner builds its invoker on first use, and goes on with the next solution of the same find where its own fails.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from miofind.arrays import arrays, operands
from miofind.core.arguments import EPILOGUE_OF_DIRECTION, A
from miofind.core.epilogue import DEFAULT_PARAMETERS, EPILOGUE_NUMBERS, EPILOGUE_OPERANDS, EpilogueParameters
from miofind.core.problem import DataType, Direction, Operand, ProblemDescription
from miofind.device.device import Place, check_fork
from miofind.errors import (
    CompileError,
    InvalidArrayError,
    InvalidConfigError,
    InvalidOptionError,
    LaunchError,
    MissingLibraryError,
    suggestion,
)
from miofind.launch.invoker import Invoker
from miofind.solver.steps import Config

if TYPE_CHECKING:
    from miofind.runtime.handle import Handle

logger = logging.getLogger(__name__)

_FALL_BACK_ON = (CompileError, LaunchError, InvalidConfigError, MissingLibraryError)

# A member of an enum costs a look-up in its class on every run.
_FORWARD = Direction.FORWARD
_BACKWARD_DATA = Direction.BACKWARD_DATA


EPILOGUE_NAMES = (*EPILOGUE_OPERANDS, *EPILOGUE_NUMBERS)
"""All of EpilogueArguments."""

_KNOWN = frozenset(EPILOGUE_NAMES)


class OutputStatistics(NamedTuple, Generic[A]):
    """What a forward run with statistics returns.

    Attributes:
        y: (n, k, *out_spatial).
        sum, sum_of_squares: (k,), of y as it is stored, over n and space; float32, float64 for float64.
    """

    y: A
    sum: A
    sum_of_squares: A


class ParameterGradients(NamedTuple, Generic[A]):
    """What a run of backward weights with a bias gradient returns.

    Attributes:
        dw: (k, c/groups, *filter).
        bias_gradient: (k,), the sum of dy over n and space.
    """

    dw: A
    bias_gradient: A


Outputs = OutputStatistics[Any] | ParameterGradients[Any]
"""What a run returns that has several outputs; `out` may be one, or a plain tuple of as many arrays."""


def outputs_type(problem: ProblemDescription) -> type[Outputs] | None:
    """What a run of a problem returns; None for one array."""
    if not problem.epilogue.outputs:
        return None
    return OutputStatistics if problem.epilogue.statistics else ParameterGradients


def refuse_unknown(given: Mapping[str, Any]) -> None:
    """Do nothing where all are names of EpilogueArguments.

    Raises:
        TypeError: one is not.
    """
    if not given.keys() <= _KNOWN:
        unknown = given.keys() - _KNOWN
        known = ("x", "w", "dy", *EPILOGUE_NAMES, "out", "workspace", "stream")
        near = suggestion(min(unknown), known) or "."
        raise TypeError(f"unknown arguments {sorted(unknown)}{near} Known are {', '.join(known)}")


def parameters_of(problem: ProblemDescription, given: Mapping[str, Any]) -> EpilogueParameters:
    """The numbers of a run of a problem, from those given by name; None is none given.

    Raises:
        InvalidOptionError: one that is none, that the epilogue has no use for, or beyond the type it is computed in.
    """
    made = problem.epilogue.parameters(given)
    if problem.accumulator is DataType.FLOAT32:
        for name in EPILOGUE_NUMBERS:
            value = getattr(made, name) or 0.0
            if _FLOAT32_MAX < abs(value) < math.inf:
                raise InvalidOptionError(f"{name}={value} is beyond float32, in which the epilogue is computed")
    return made


_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


class _Made(NamedTuple):
    """What a run writes."""

    out: Any
    workspace: Any


class Runner:
    """Runs one solution of a problem without an epilogue.

    Attributes:
        problem: what is run, as the arrays have it; solvers compute it flattened.
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
        return self.handle.registry.named(self._solver_id).tensor_alignment(self.problem.flattened)

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
        written, *others = (place for place, operand in enumerate(given) if not operand.is_input)
        memory = operands.OperandMemory(
            sizes_bytes=tuple(sizes.values()),
            written=written,
            alignment=alignment,
            also_written={place: given[place].name for place in others},
        )
        checks = [self._check_of(operand, alignment) for operand in given]
        self._check = operands.check_of_all(checks, memory, self._index)
        self._workspace_bytes = invoker.workspace_bytes
        self._check_workspace = operands.workspace_check(sizes, self._workspace_bytes, self._index)

    def _made(self) -> Invoker:
        return self.handle.invoker(self.problem.flattened, self._solver_id, self._config, self._kernel_hash)

    def _bytes_of(self, operand: Operand) -> int:
        return operand.tensor.bytes

    def _check_of(self, operand: Operand, alignment_bytes: int) -> operands.Check:
        if operand in self.problem.second_outputs:
            alignment_bytes = operand.tensor.dtype.itemsize  # kernels write them one number at a time
        return operands.strict_check(
            self._name_of(operand), operand.array, self._index, alignment_bytes, is_written=not operand.is_input
        )

    def _name_of(self, operand: Operand) -> str:
        """What a user of `run` calls an operand."""
        if not operand.is_input:
            return "out" if operand.name == self._direction.output else operand.name
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

    def run_fused(
        self, given: Mapping[str, Any], x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any
    ) -> Any:
        """The same with what `EpilogueArguments` names."""
        refuse_unknown(given)
        parameters_of(self.problem, {name: given.get(name) for name in EPILOGUE_NUMBERS})
        read = {name: given[name] for name in EPILOGUE_OPERANDS if given.get(name) is not None}
        if read:
            self._check_given({"x": x, "w": w, "dy": dy, **read})
        return self.run(x, w, dy, out, workspace, stream)

    def _run_completed(self, x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any) -> Any:
        """Run after what a run needs was made: the invoker, the output, the workspace."""
        first = self._check_given({"x": x, "w": w, "dy": dy})
        self.prepare()
        if self._active is not self:
            return self._active.run(x, w, dy, out, workspace, stream)
        made = self._allocated(first, out, workspace, stream)
        return self.run(x, w, dy, made.out, made.workspace, stream)

    def _check_given(self, arrays_by_name: Mapping[str, Any]) -> Any:
        """The first input, where just those are given that the problem reads.

        Raises:
            InvalidArrayError: one is missing, or the problem has no use for one.
        """
        given = {name: array for name, array in arrays_by_name.items() if array is not None}
        wanted = [self._name_of(operand) for operand in self.problem.inputs]
        if given.keys() != set(wanted):
            raise InvalidArrayError(self._told_of(wanted, given))
        first = given[wanted[0]]
        arrays.view(first, wanted[0])
        return first

    def _told_of(self, wanted: list[str], given: Mapping[str, Any]) -> str:
        """What a solution takes, what was given and, for a bare problem that is given more, what to do."""
        epilogue = self.problem.epilogue
        fused = f" with the epilogue {epilogue.text}" if epilogue else ""
        needed = f"{', '.join(wanted[:-1])} and {wanted[-1]}"
        told = f"a {self.problem.direction} solution{fused} takes {needed}; given: {', '.join(given) or 'none'}"
        known = EPILOGUE_OF_DIRECTION[self._direction]
        surplus = [name for name in EPILOGUE_OPERANDS if name in known and name in given and name not in wanted]
        if not surplus:
            return told
        surplus = ["a derivative" if name == "saved" else name for name in surplus]
        return f"{told}. Find solutions of a problem whose epilogue has {' and '.join(surplus)}"

    def _allocated(self, first: Any, out: Any, workspace: Any, stream: Any) -> _Made:
        """The output and the workspace, made where they are not given."""
        invoker = self.prepare()
        with operands.allocating_on(first, stream, self._index):
            out = self._completed(first, out, invoker.alignment_bytes)
            if workspace is None and invoker.workspace_bytes:
                workspace = arrays.allocate_bytes(first, invoker.workspace_bytes, self._index)
        return _Made(out, workspace)

    def _completed(self, first: Any, out: Any, alignment_bytes: int) -> Any:
        """The output, made where it is not given."""
        if out is not None:
            return out
        return arrays.allocate(first, self.problem.output, self._index, alignment_bytes)

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


class FusedRunner(Runner):
    """Runs one solution of a problem with an epilogue."""

    __slots__ = ("_last_numbers", "_outputs_type", "_read_of", "_taken")

    def __init__(
        self, problem: ProblemDescription, solver_id: str, config: Config, handle: Handle, kernel_hash: str = ""
    ) -> None:
        super().__init__(problem, solver_id, config, handle, kernel_hash)
        names = problem.epilogue.operands
        self._read_of = _picker(names)
        self._taken = frozenset((*names, *EPILOGUE_NUMBERS))
        self._outputs_type = outputs_type(problem)
        none = (None,) * len(EPILOGUE_NUMBERS)
        self._last_numbers = _Numbers(none, tuple(map(type, none)), DEFAULT_PARAMETERS)

    def run(self, x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any) -> Any:
        return self.run_fused({}, x, w, dy, out, workspace, stream)

    def run_fused(
        self, given: Mapping[str, Any], x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any
    ) -> Any:
        """See `miofind.run_solution`."""
        try:
            read = self._read_of(given)
        except KeyError:  # what is missing is told there
            return self._run_fused_completed(given, x, w, dy, out, workspace, stream)
        outs = (out,) if self._outputs_type is None else operands.several_outputs(out, self._outputs_type._fields)
        direction = self._direction
        if direction is _FORWARD:
            first, in_order, unused = x, (x, w, outs[0], *read, *outs[1:]), dy
        elif direction is _BACKWARD_DATA:
            first, in_order, unused = dy, (outs[0], w, dy, *read, *outs[1:]), x
        else:
            first, in_order, unused = dy, (x, outs[0], dy, *read, *outs[1:]), w
        parameters, surplus = DEFAULT_PARAMETERS, unused is not None
        if len(given) != len(read):
            if not given.keys() <= self._taken:
                refuse_unknown(given)
                surplus = surplus or any(given.get(name) is not None for name in _KNOWN - self._taken)
            parameters = self._parameters(given)
        invoker = self._invoker
        is_complete = out is not None and (len(outs) == 1 or all(each is not None for each in outs))
        if invoker is None or not is_complete or surplus or (workspace is None and self._workspace_bytes):
            return self._run_fused_completed(given, x, w, dy, out, workspace, stream)
        addresses = self._check(in_order)
        scratch: Any = 0
        if self._workspace_bytes:
            scratch = self._check_workspace(workspace, addresses)
        queue = self._queue(first) if stream is None else operands.stream_address(stream)
        try:
            invoker.run((*addresses, parameters, scratch), queue)
        except LaunchError as error:
            if self._index >= 0:
                check_fork()
            return self._fall_back(error).run_fused(given, x, w, dy, out, workspace, stream)
        return out if self._outputs_type is None else self._outputs_type(*outs)

    def _completed(self, first: Any, out: Any, alignment_bytes: int) -> Any:
        if self._outputs_type is None:
            return super()._completed(first, out, alignment_bytes)
        given = zip(operands.several_outputs(out, self._outputs_type._fields), self.problem.outputs, strict=True)
        return self._outputs_type(
            *(
                arrays.allocate(first, operand.array, self._index, alignment_bytes) if array is None else array
                for array, operand in given
            )
        )

    def _parameters(self, given: Mapping[str, Any]) -> EpilogueParameters:
        """The numbers of a run; the very object of the last run where they are the same, which launches tell by that.

        Raises:
            InvalidOptionError: a number that is none or not the epilogue's.
        """
        numbers = tuple(map(given.get, EPILOGUE_NUMBERS))
        last = self._last_numbers
        kinds = tuple(map(type, numbers))
        if kinds == last.kinds and numbers == last.given:  # arrays, which compare otherwise, are never the last ones
            return last.parameters
        made = parameters_of(self.problem, dict(zip(EPILOGUE_NUMBERS, numbers, strict=True)))
        if made == last.parameters:
            made = last.parameters
        self._last_numbers = _Numbers(numbers, kinds, made)
        return made

    def _run_fused_completed(
        self, given: Mapping[str, Any], x: Any, w: Any, dy: Any, out: Any, workspace: Any, stream: Any
    ) -> Any:
        """Run after what a run needs was made: the invoker, the output, the workspace."""
        read = {name: given.get(name) for name in EPILOGUE_OPERANDS}
        first = self._check_given({"x": x, "w": w, "dy": dy, **read})
        self.prepare()
        if self._active is not self:
            return self._active.run_fused(given, x, w, dy, out, workspace, stream)
        made = self._allocated(first, out, workspace, stream)
        return self.run_fused(given, x, w, dy, made.out, made.workspace, stream)


class _Numbers(NamedTuple):
    """The numbers that a run was given, None for each that it was not, and what was made of them."""

    given: tuple[Any, ...]
    kinds: tuple[type, ...]
    parameters: EpilogueParameters


def _picker(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Picks some values of a mapping in order; a KeyError where one is missing."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    if not names:
        return lambda given: ()
    (name,) = names
    return lambda given: (given[name],)


def make_runner(
    problem: ProblemDescription, solver_id: str, config: Config, handle: Handle, kernel_hash: str
) -> Runner:
    """What runs one solution."""
    kind = FusedRunner if problem.epilogue else Runner
    return kind(problem, solver_id, config, handle, kernel_hash)
