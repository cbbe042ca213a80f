"""What a find returns: solutions, each of which knows the others it was found with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library
from miofind.errors import DatabaseError
from miofind.finddb import ties_of_best
from miofind.runtime.runner import Runner, make_runner
from miofind.solver.solver import Algorithm
from miofind.solver.steps import Config, config_text

if TYPE_CHECKING:
    from miofind.runtime.handle import Handle
    from miofind.runtime.packed import PackedSolution


class Source(StrEnum):
    """Where a solution's time comes from."""

    MEASURED = "measured"
    FINDDB = "finddb"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One way to compute a problem on a device, with what is known of it.

    Attributes:
        problem, device: what it solves and where; its solver computes the problem flattened.
        solver_id, algorithm, library, config: who solves it and how.
        time_ms: median time of a run; where `source` is "predicted" what a model or the solver expects.
        workspace_bytes: bytes of workspace that a run needs.
        deterministic: equal inputs give equal bits.
        max_error: largest |error| / (|x| * |w|) seen in verification; None where it was not run here or before.
        source: "measured", "finddb" or "predicted".
        kernel_hash: hash of the kernels that were measured, "" where none were.
        samples: how many samples `time_ms` is the median of; 0 for an estimate.
        cut_off: it was far behind the best at its first run and timed no further, so that `time_ms` is rough.
        contended: another process computed on the GPU, or throttling did not end, while it was timed: it may be faster.
        confidence: of a predicted one, the share of problems left out of training of whose predictions one as far ahead
            of the others was within 10 % of the best; None where nobody knows, and of what was measured.
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
    kernel_hash: str = ""
    samples: int = 0
    cut_off: bool = False
    contended: bool = False
    confidence: float | None = None
    solution_list: SolutionList = field(compare=False)
    position: int = field(default=0, compare=False)

    @property
    def id(self) -> str:
        """Solver and configuration as one string."""
        return f"{self.solver_id}:{self.config.json}"

    @property
    def ties_with_best(self) -> bool:
        """Whether no measurement tells it from another solution of its find that is as fast as the fastest.

        The verdict of the problem's newest race decides, else times within 1 % are ties. Never true of an estimate, nor
        of a solution that nothing ties with. Reads the FindDB at the first question of a find.
        """
        return self.id in self.solution_list.ties

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What of a prediction is asked of its solver when somebody wants to know it first."""
            if name not in _OF_STEPS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            solver = self.solution_list.handle.registry[self.solver_id]
            steps = solver.kept_solution(self.problem.flattened, self.device, self.config)
            object.__setattr__(self, "workspace_bytes", steps.workspace.bytes)
            object.__setattr__(self, "deterministic", steps.deterministic)
            return getattr(self, name)

    def __repr__(self) -> str:
        name = f"{self.solver_id} {config_text(self.config)}".rstrip()
        return f"<Solution {name}: {self.time_ms:.4g} ms ({self.source}), {self.workspace_bytes} bytes of workspace>"

    def __str__(self) -> str:
        error = "unknown" if self.max_error is None else f"{self.max_error:.1e}"
        kind = "deterministic" if self.deterministic else "not deterministic"
        return (
            f"{self.id}: {self.time_ms:.4g} ms ({self.source}), {self.workspace_bytes} bytes of workspace, "
            f"error {error}, {kind}"
        )

    @property
    def runner(self) -> Runner:
        """What runs it, made on first use."""
        return self.solution_list.runner(self.position)

    def prepare(self) -> Solution:
        """Make everything ready that a first run would: compile, load, plan. Needed before a first run under capture.

        Raises:
            CompileError, LaunchError, MissingLibraryError: it cannot be made ready and nothing can take its place.
        """
        self.runner.prepare()
        return self

    def pack(self, w: Any, stream: Any = None, *, scale: Any = None, bias: Any = None) -> PackedSolution:
        """The solution for weights that stay the same: what depends on them alone is computed here, once.

        Args:
            w: (k, c/groups, *filter); it must stay as it is as long as the packed solution is used.
            stream: to compute on, as in `run_solution`; runs on other streams must wait for it.
            scale, bias: (k,), of the problem's epilogue, kept with the weights; left out, each run is given them.

        Raises:
            InvalidOptionError: the weights are the problem's result.
            InvalidArrayError: w, scale or bias is not what the problem wants.
            CompileError, LaunchError, MissingLibraryError: it cannot be made ready.
        """
        from miofind.runtime.packed import PackedSolution

        return PackedSolution(self, w, stream, {"scale": scale, "bias": bias})

    def save(self, path: str | Path) -> None:
        """Write the solution and its binaries to a JSON file that `Solution.load` reads: such a file is code.

        Raises:
            SolutionFileError: the file cannot be written, or the solution is of another release than its solver.
        """
        from miofind.runtime.solution_file import save_solution

        save_solution(self, Path(path))

    @staticmethod
    def load(path: str | Path, handle: Handle | None = None) -> Solution:
        """A saved solution, ready to run with no look-up, find or compilation.

        A file is code: its binaries run on the GPU with your rights, and its hashes find damage, not malice. Load what
        you would run as a program. The binaries stay with this solution: others of the process, what they save and the
        binary cache have their own.

        Raises:
            InvalidOptionError: the handle is none.
            SolutionFileError: the file is damaged, of another architecture or of other sources.
        """
        from miofind.runtime.solution_file import load_solution

        return load_solution(Path(path), handle)


_OF_STEPS = ("workspace_bytes", "deterministic")


def without_steps(**values: Any) -> Solution:
    """A solution of whose fields those that its steps tell are asked for when somebody reads them."""
    made = object.__new__(Solution)
    for name, value in (_DEFAULTS | values).items():
        _SETTERS[name](made, value)
    return made


_TOLD = tuple(item for item in fields(Solution) if item.name not in _OF_STEPS)
_SETTERS = {item.name: vars(Solution)[item.name].__set__ for item in _TOLD}
_DEFAULTS = {item.name: item.default for item in _TOLD if item.default is not MISSING}
"""Fields of a solution without steps: what sets them, which is all that takes time, and what those left out are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """What an answer was not measured with.

    Attributes:
        candidates: how many the find that measured it had; 0 for a search, and where a FindDB answered.
        unmeasured: those of the candidates that the time budget left out.
        ended_early: whether a budget ended all finds of the FindDB that the answer comes from.
        solvers: ids of those that may serve, and that came or changed since the FindDB's answer was measured.
        limited: ids of those of which the request's limits take none of the rows that answer.
        likely_alone: whether of some solvers only those candidates were measured that were predicted to be the fastest.
    """

    candidates: int = 0
    unmeasured: int = 0
    ended_early: bool = False
    solvers: tuple[str, ...] = ()
    limited: tuple[str, ...] = ()
    likely_alone: bool = False


class SolutionList:
    """The solutions of one find in order; each falls back to the ones behind it.

    Pickled, they leave their handle behind, and run with the default handle of their device where they arrive: a GPU is
    found there by its UUID. Copies share it.

    Attributes:
        solutions: in the order asked for.
        runners: by position, those made so far.
        gaps: what they were not measured with; nothing is known of it where they were pickled.
    """

    __slots__ = ("_handle", "_ties", "gaps", "runners", "solutions")

    def __init__(self, handle: Handle) -> None:
        self._handle: Handle | None = handle
        self._ties: frozenset[str] | None = None
        self.solutions: list[Solution] = []
        self.runners: dict[int, Runner] = {}
        self.gaps = Gaps()

    def __copy__(self) -> SolutionList:
        return self

    def __deepcopy__(self, memo: object) -> SolutionList:
        return self

    def __getstate__(self) -> list[Solution]:
        return self.solutions

    def __setstate__(self, solutions: list[Solution]) -> None:
        self._handle, self._ties, self.solutions, self.runners = None, None, solutions, {}
        self.gaps = Gaps()

    @property
    def handle(self) -> Handle:
        """Device and caches they run with."""
        if self._handle is None:
            from miofind.runtime.handle import default_handle

            self._handle = default_handle(self.solutions[0].device.here())
        return self._handle

    @property
    def ties(self) -> frozenset[str]:
        """Ids of the solutions that nothing tells from the fastest, it included; none where it is alone."""
        if self._ties is None:
            self._ties = self._ties_of_best()
        return self._ties

    def _ties_of_best(self) -> frozenset[str]:
        times = {each.id: each.time_ms for each in self.solutions if each.source is not Source.PREDICTED}
        if len(times) < 2:
            return frozenset()
        problem = self.solutions[0].problem.flattened
        try:
            histories = self.handle.database.histories(self.handle.device.identity, problem.network_config)
        except DatabaseError:  # a find goes on without a database, and so does what is told of it
            histories = ()
        rows = [row for history in histories for row in history.rows if times.get(row.candidate) == row.time_ms]
        newest = {row.candidate: row for row in sorted(rows, key=lambda row: row.age)}
        tied = ties_of_best(newest.values(), [verdict for history in histories for verdict in history.verdicts])
        return frozenset(row.candidate for row in tied) if len(tied) > 1 else frozenset()

    def runner(self, position: int) -> Runner:
        """The runner of one solution."""
        runner = self.runners.get(position)
        if runner is None:
            solution = self.solutions[position]
            runner = make_runner(
                solution.problem, solution.solver_id, solution.config, self.handle, solution.kernel_hash
            )
            behind = position + 1
            if behind < len(self.solutions):
                runner.following = lambda: self.runner(behind)
            runner = self.runners.setdefault(position, runner)
        return runner


def alone(solution: Solution) -> Solution:
    """A solution found by itself, such as a loaded one."""
    solution.solution_list.solutions = [solution]
    return solution


def reordered(solutions: Iterable[Solution], handle: Handle) -> list[Solution]:
    """The same solutions, each falling back to the ones behind it in this order."""
    made = SolutionList(handle)
    made.solutions = [copied(solution, made, i) for i, solution in enumerate(solutions)]
    return made.solutions


def posed(solutions: Sequence[Solution], problem: ProblemDescription) -> list[Solution]:
    """The same solutions for a volume's problem that is flattened to theirs: they take arrays of its shapes."""
    found = solutions[0].solution_list
    made = SolutionList(found.handle)
    made.gaps = found.gaps
    made.solutions = [_posed(solution, problem, made) for solution in solutions]
    return made.solutions


def _posed(solution: Solution, problem: ProblemDescription, found: SolutionList) -> Solution:
    if solution.source is not Source.PREDICTED:
        return replace(solution, problem=problem, solution_list=found)
    told = {item.name: getattr(solution, item.name) for item in _TOLD}
    return without_steps(**told | {"problem": problem, "solution_list": found})


def copied(solution: Solution, found: SolutionList, position: int) -> Solution:
    """A solution in another list: what `dataclasses.replace` does, in a quarter of its time."""
    made = object.__new__(Solution)
    _set_fields(made, solution, found, position)
    return made


def _fields_setter() -> Callable[[Solution, Solution, SolutionList, int], object]:
    """What sets a solution's fields to those of another, but for its list and position.

    Written out, since a loop over the fields takes three times as long, which is most of a look-up.
    """
    values = {item.name: f"other.{item.name}" for item in fields(Solution)}
    values |= {"solution_list": "solution_list", "position": "position"}
    calls = ", ".join(f"set_{name}(made, {value})" for name, value in values.items())
    setters = {f"set_{name}": Solution.__dict__[name].__set__ for name in values}
    setter: Callable[[Solution, Solution, SolutionList, int], object]
    setter = eval(f"lambda made, other, solution_list, position: ({calls})", setters)
    return setter


_set_fields = _fields_setter()
