"""miofind's best against PyTorch and against the floor, problem by problem, in one process on the same buffers.

Both sides are timed by one protocol, a few samples of each in turn. What the FindDB lacks is found before anything is
timed, so that no compiler works beside.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from miofind.api import find_solutions
from miofind.bench.ceilings import Ceilings, measure_ceilings
from miofind.bench.torch_rival import TorchRival
from miofind.compiler import CompilePool
from miofind.core.problem import ProblemDescription
from miofind.errors import MiofindError
from miofind.find.lookup import records
from miofind.find.lookup.scopes import Coverage
from miofind.find.pipeline import measure
from miofind.measure.backend import Runnable, TimedCandidate
from miofind.measure.timer import Timer
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.suites import PROBLEM_CLASSES, SuiteProblem, problem_class
from miofind.tune.precompiler import Precompiler
from miofind.tune.values import TuneOptions

BLOCKS = 12
SAMPLES_A_BLOCK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One problem's result.

    Attributes:
        solution: miofind's best, None where it found none.
        time_ms: its median.
        rival_ms: PyTorch's median, None without a comparison or where PyTorch failed.
        floor_ms: least time of direct arithmetic, None where it is not known.
        message: what failed.
    """

    entry: SuiteProblem
    solution: Solution | None = None
    time_ms: float | None = None
    rival_ms: float | None = None
    floor_ms: float | None = None
    message: str = ""

    @property
    def ratio(self) -> float | None:
        """PyTorch's time over miofind's: above 1, miofind is faster."""
        if self.rival_ms is None or self.time_ms is None:
            return None
        return self.rival_ms / self.time_ms

    @property
    def floor_fraction(self) -> float | None:
        """Floor over miofind's time: 1 is as fast as direct arithmetic can be."""
        return None if self.floor_ms is None or self.time_ms is None else self.floor_ms / self.time_ms

    @property
    def problem_class(self) -> str:
        """The class the report groups it by."""
        return problem_class(self.entry.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMeans:
    """Geometric means of a class of problems; `count` is how many have a ratio, or a time without a rival."""

    name: str
    count: int
    ratio: float | None
    least_ratio: float | None
    floor_fraction: float | None


def bench(
    entries: Sequence[SuiteProblem],
    handle: Handle,
    options: FindOptions,
    *,
    against_torch: bool,
    ceilings: Ceilings | None = None,
    pool: CompilePool | None = None,
    on_found: Callable[[], None] = lambda: None,
    on_row: Callable[[BenchRow], None] = lambda row: None,
) -> list[BenchRow]:
    """A row for each problem, in order; a problem that fails has a message and the benchmark goes on.

    Args:
        ceilings: of the handle's device; measured where they are left out.
        pool: compiles each problem's kernels while the one before is found; closed before anything is timed.
        on_found: called once a problem, when its solutions are known.
        on_row: called once a problem, when it is timed.
    """
    ceilings = measure_ceilings(handle.device) if ceilings is None else ceilings
    failures = _find(entries, handle, options, pool, on_found)
    if pool is not None:
        pool.close()  # what was compiled ahead in vain would go on beside what is timed
    rows = []
    for entry in entries:
        if entry.problem in failures:
            message = failures[entry.problem]
            row = BenchRow(entry=entry, floor_ms=ceilings.floor_ms(entry.problem), message=message)
        else:
            row = bench_row(entry, handle, options, ceilings, against_torch=against_torch)
        rows.append(row)
        on_row(row)
    return rows


def _find(
    entries: Sequence[SuiteProblem],
    handle: Handle,
    options: FindOptions,
    pool: CompilePool | None,
    on_found: Callable[[], None],
) -> dict[ProblemDescription, str]:
    """Measure what the FindDB's answers lack; the messages of problems that have no solution."""
    failures: dict[ProblemDescription, str] = {}
    made = None if pool is None else Precompiler(pool, TuneOptions(find=options))
    with contextlib.nullcontext() if made is None else contextlib.closing(made) as precompiler:
        following = iter(entries[1:])
        for number, entry in enumerate(entries):
            if precompiler is not None:
                ahead = itertools.islice(following, 1 if number else precompiler.depth)
                precompiler.prepare((each.problem for each in ahead), handle)
            try:
                if records.look_up(entry.problem, options, handle, coverage=Coverage.ALL) is None:
                    measure(entry.problem, options, handle, ahead=pool)
            except MiofindError as error:
                failures[entry.problem] = str(error)
            on_found()
    return failures


def bench_row(
    entry: SuiteProblem, handle: Handle, options: FindOptions, ceilings: Ceilings, *, against_torch: bool
) -> BenchRow:
    """One problem's result with the solution that a find answers; what failed is its message."""
    floor_ms = ceilings.floor_ms(entry.problem)
    try:
        solution = find_solutions(entry.problem, options=options, handle=handle)[0]
    except MiofindError as error:
        return BenchRow(entry=entry, floor_ms=floor_ms, message=str(error))
    message, rival_ms = "", None
    try:
        solution.runner.prepare()
        with Timer(entry.problem, handle.device, handle.compiler) as timer:
            rival = None
            if against_torch:
                try:
                    rival = TorchRival(entry.problem, handle.device.index)
                    rival_ms, time_ms = _interleaved(timer, rival, solution)
                except (MiofindError, MemoryError) as error:
                    message, rival = f"torch: {error}", None
            if rival is None:
                time_ms = _alone(timer, solution)
    except (MiofindError, MemoryError) as error:
        return BenchRow(entry=entry, solution=solution, floor_ms=floor_ms, message=str(error) or repr(error))
    return BenchRow(
        entry=entry, solution=solution, time_ms=time_ms, rival_ms=rival_ms, floor_ms=floor_ms, message=message
    )


def _interleaved(timer: Timer, rival: TorchRival, solution: Solution) -> tuple[float, float]:
    """Medians of the rival and of ours, a few samples of each in turn."""
    invoker = solution.runner.prepare()
    sides: list[tuple[Runnable, TimedCandidate]] = [(rival, timer.prepare(rival)), (invoker, timer.prepare(invoker))]
    samples: list[list[float]] = [[], []]
    for _ in range(BLOCKS):
        for side, (runs, timed) in enumerate(sides):
            samples[side] += timer.samples(timed, runs, SAMPLES_A_BLOCK)
    return statistics.median(samples[0]), statistics.median(samples[1])


def _alone(timer: Timer, solution: Solution) -> float:
    invoker = solution.runner.prepare()
    return statistics.median(timer.samples(timer.prepare(invoker), invoker, BLOCKS * SAMPLES_A_BLOCK))


def class_means(rows: Iterable[BenchRow]) -> list[ClassMeans]:
    """Geometric means by class, and over all."""
    rows = [row for row in rows if row.time_ms is not None]
    groups = {name: [row for row in rows if row.problem_class == name] for name in PROBLEM_CLASSES}
    groups["all"] = rows
    return [_means(name, group) for name, group in groups.items() if group]


def _means(name: str, rows: Sequence[BenchRow]) -> ClassMeans:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    fractions = [row.floor_fraction for row in rows if row.floor_fraction is not None]
    return ClassMeans(
        name=name,
        count=len(ratios) or len(rows),
        ratio=_geometric_mean(ratios),
        least_ratio=min(ratios, default=None),
        floor_fraction=_geometric_mean(fractions),
    )


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None
