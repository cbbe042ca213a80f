"""Why today's solvers do not do what stored rows say: asked once of each problem, solver and row, kept by the handle.

A row may come from an older release, an import, a merge or a system file. Whatever it says, it answers only where its
solver, asked today, serves the problem with that configuration, workspace and determinism, and runs what was measured.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, NamedTuple

from miofind.compiler import kernel_hash
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import MiofindError, described, raise_if_interrupted
from miofind.solver.registry import composed, is_composed
from miofind.solver.solver import APPLICABLE, Applicability, Solver
from miofind.solver.steps import Config

if TYPE_CHECKING:
    from miofind.finddb import Answer
    from miofind.options import FindOptions
    from miofind.runtime.solution import Solution

logger = logging.getLogger(__name__)


class Measured(NamedTuple):
    """What a row says of the solution that was measured, and what its solver must do today for it to answer."""

    config: str
    workspace_bytes: int
    deterministic: bool
    kernel_hash: str


class Selection(NamedTuple):
    """What became of stored rows.

    Attributes:
        void: solvers with rows of other versions or sources than they have now, or that they no longer stand by.
        is_thin: whether the history may have faster rows that the request takes: of a solver of which an answer keeps
            the best alone, some of these are not selected.
        is_stale: whether other versions of libraries or driver measured some of the solutions.
        limited: solvers with rows that hold, none of which keeps the request's limits.
    """

    solutions: list[Solution]
    void: frozenset[str]
    is_thin: bool
    is_stale: bool
    limited: frozenset[str]


class Selected(NamedTuple):
    """What a request took of an answer."""

    answer: Answer
    options: FindOptions
    selection: Selection


class Refusals:
    """What today's solvers refuse of one problem on one device. Threads may share it: they may ask twice, no more.

    Attributes:
        device: where it is asked for.
        last: what the last request took of the problem's answer: an equal one takes the same of that.
    """

    __slots__ = ("_failing", "_of_rows", "_of_solvers", "_problem", "device", "last")

    def __init__(self, problem: ProblemDescription, device: Device) -> None:
        self.device = device
        self.last: Selected | None = None
        self._problem = problem
        self._of_solvers: dict[Solver, Applicability | None] = {}
        self._of_rows: dict[tuple[Solver, Measured], Applicability] = {}
        self._failing: set[Solver] = set()

    def may_serve(self, solver: Solver) -> bool:
        """Whether a solver would have to be measured to be ranked: it does not refuse the problem in every form."""
        answers = map(self._applicability, forms(solver, self._problem))
        return any(answer is None or bool(answer) for answer in answers)

    def fails(self, solver: Solver) -> bool:
        """Whether a solver's own code failed over a question: to measure it now is of no use."""
        return self._applicability(solver) is None or solver in self._failing

    def of_row(self, solver: Solver, row: Measured) -> Applicability:
        """Whether a row of a solver is an answer today."""
        key = (solver, row)
        answer = self._of_rows.get(key)
        if answer is None:
            answer = self._of_rows[key] = self._refuse_row(solver, row)
            if answer.refused:
                logger.debug("a stored row of %s %s does not answer: %s", solver.id, row.config, answer.reason)
        return answer

    def _applicability(self, solver: Solver) -> Applicability | None:
        """The solver's own answer; None where it fails over the question."""
        if solver not in self._of_solvers:
            self._of_solvers[solver] = applicability_of(solver, self._problem, self.device)
        return self._of_solvers[solver]

    def _refuse_row(self, solver: Solver, row: Measured) -> Applicability:
        applicability = self._applicability(solver)
        if applicability is None:
            return Applicability(f"{solver.id} cannot say whether it serves the problem")
        if not applicability:
            return Applicability(f"{solver.id} does not serve the problem: {applicability.reason}")
        try:
            return refuse_difference(solver, self._problem, self.device, row)
        except MiofindError as error:
            return Applicability(str(error))
        except BaseException as error:  # a solver's own code may raise anything, and rows of others are to answer
            raise_if_interrupted(error)
            self._failing.add(solver)
            return Applicability(f"{solver.id} fails over it: {described(error)}")


def forms(solver: Solver, problem: ProblemDescription) -> tuple[Solver, ...]:
    """What a problem may be measured with of a solver: for a fused problem its composed form besides itself."""
    return (solver, composed(solver)) if problem.epilogue and not is_composed(solver.id) else (solver,)


def applicability_of(solver: Solver, problem: ProblemDescription, device: Device) -> Applicability | None:
    """Whether a solver serves a problem, by itself; None where it fails over the question."""
    try:
        return solver.applicability(problem, device)
    except BaseException as error:  # a solver's own code may raise anything
        raise_if_interrupted(error)
        logger.debug("%s cannot say whether it serves %s: %s", solver.id, problem, described(error))
        return None


def refuse_difference(solver: Solver, problem: ProblemDescription, device: Device, row: Measured) -> Applicability:
    """Refuse a row that says something else than what a solver that serves its problem does today.

    Raises:
        InvalidConfigError: the solver refuses the configuration. What else its own code raises.
    """
    config = stored_config(row.config)
    solver.check_config(problem, device, config)
    solution = solver.solution(problem, device, config)
    if solution.workspace.bytes != row.workspace_bytes:
        return Applicability(
            f"it says {row.workspace_bytes} bytes of workspace, {solver.id} needs {solution.workspace.bytes}"
        )
    if solution.deterministic != row.deterministic:
        return Applicability(
            f"it says deterministic={row.deterministic}, of {solver.id} that is {solution.deterministic}"
        )
    if row.kernel_hash and kernel_hash(solution) != row.kernel_hash:
        return Applicability(f"it was measured with other kernels than {solver.id} has")
    return APPLICABLE


@functools.lru_cache(maxsize=1 << 16)
def stored_config(text: str) -> Config:
    """A configuration from a FindDB: few texts serve many problems.

    Raises:
        InvalidConfigError: the text is not a JSON object.
    """
    return Config.from_json(text)
