"""miofind's best against rivals and against the floor, problem by problem, in one process on the same buffers.

All sides are timed by one protocol, a few samples of each in turn. What the FindDB lacks is found before anything is
timed, so that no compiler works beside.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from miofind.api.solutions import find_solutions
from miofind.bench.ceilings import Ceilings, measure_ceilings
from miofind.bench.rivals import Rival, find_rival, runnable
from miofind.compiler import CompilePool
from miofind.core.problem import ProblemDescription
from miofind.errors import MiofindError, NoSolutionError
from miofind.find.lookup import records
from miofind.find.lookup.scopes import Coverage
from miofind.find.measuring import measure
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
        one_pass_ms: the median of cuDNN's best bare convolution with one element-wise pass behind it.
        cudnn_ms: the median of cuDNN's best, fused where the problem is.
        floor_ms: least time of direct arithmetic, None where it is not known.
        message: what failed.
    """

    entry: SuiteProblem
    solution: Solution | None = None
    time_ms: float | None = None
    rival_ms: float | None = None
    one_pass_ms: float | None = None
    cudnn_ms: float | None = None
    floor_ms: float | None = None
    message: str = ""

    @property
    def rivals_ms(self) -> Mapping[Rival, float | None]:
        """The median of each rival."""
        return {Rival.TORCH: self.rival_ms, Rival.ONE_PASS: self.one_pass_ms, Rival.CUDNN: self.cudnn_ms}

    def ratio_of(self, rival: Rival) -> float | None:
        """A rival's time over miofind's: above 1, miofind is faster."""
        rival_ms = self.rivals_ms[rival]
        return None if rival_ms is None or self.time_ms is None else rival_ms / self.time_ms

    @property
    def ratio(self) -> float | None:
        """PyTorch's time over miofind's: above 1, miofind is faster."""
        return self.ratio_of(Rival.TORCH)

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
    against: Sequence[Rival] = (),
    rival_options: FindOptions | None = None,
    ceilings: Ceilings | None = None,
    pool: CompilePool | None = None,
    on_found: Callable[[], None] = lambda: None,
    on_row: Callable[[BenchRow], None] = lambda row: None,
) -> list[BenchRow]:
    """A row for each problem, in order; a problem that fails has a message and the benchmark goes on.

    Args:
        against: rivals that are timed in turn with it; what fails of them is a part of the message.
        rival_options: what cuDNN's sides are found with, whatever these filter; `options` if left out.
        ceilings: of the handle's device; measured where they are left out.
        pool: compiles each problem's kernels while the one before is found; closed before anything is timed.
        on_found: called once a problem, when its solutions are known.
        on_row: called once a problem, when it is timed.
    """
    ceilings = measure_ceilings(handle.device) if ceilings is None else ceilings
    found_with = rival_options or options
    failures = _find(entries, handle, options, pool, lambda entry: _found(entry, against, found_with, handle, on_found))
    if pool is not None:
        pool.close()  # what was compiled ahead in vain would go on beside what is timed
    rows = []
    for entry in entries:
        if entry.problem in failures:
            message = failures[entry.problem]
            row = BenchRow(entry=entry, floor_ms=ceilings.floor_ms(entry.problem), message=message)
        else:
            row = bench_row(entry, handle, options, ceilings, against=against)
        rows.append(row)
        on_row(row)
    return rows


def _find(
    entries: Sequence[SuiteProblem],
    handle: Handle,
    options: FindOptions,
    pool: CompilePool | None,
    on_found: Callable[[SuiteProblem], None],
) -> dict[ProblemDescription, str]:
    """Measure what the FindDB's answers lack; the messages of problems that have no solution."""
    failures: dict[ProblemDescription, str] = {}
    made = None if pool is None else Precompiler(pool, TuneOptions(find=options))
    with contextlib.nullcontext() if made is None else contextlib.closing(made) as precompiler:
        following = iter(entries[1:])
        for number, entry in enumerate(entries):
            if precompiler is not None:
                ahead = itertools.islice(following, 1 if number else precompiler.depth)
                precompiler.prepare((each.problem.flattened for each in ahead), handle)
            try:
                problem = entry.problem.flattened
                if records.look_up(problem, options, handle, coverage=Coverage.ALL) is None:
                    measure(problem, options, handle, ahead=pool)
            except MiofindError as error:
                failures[entry.problem] = str(error)
            on_found(entry)
    return failures


def _found(
    entry: SuiteProblem, against: Sequence[Rival], options: FindOptions, handle: Handle, on_found: Callable[[], None]
) -> None:
    """Measure what the rivals of a problem that was found are chosen by; what fails is told when they are timed."""
    for rival in against:
        with contextlib.suppress(MiofindError):
            find_rival(rival, entry.problem, options, handle)
    on_found()


def bench_row(
    entry: SuiteProblem, handle: Handle, options: FindOptions, ceilings: Ceilings, *, against: Sequence[Rival] = ()
) -> BenchRow:
    """One problem's result with the solution that a find answers; what failed is its message."""
    floor_ms = ceilings.floor_ms(entry.problem)
    try:
        solution = find_solutions(entry.problem, options=options, handle=handle)[0]
    except MiofindError as error:
        return BenchRow(entry=entry, floor_ms=floor_ms, message=str(error))
    messages: list[str] = []
    times: dict[str, float] = {}
    try:
        invoker = solution.runner.prepare()
        with Timer(entry.problem, handle.device, handle.compiler) as timer:
            ours = _Side(name=_OURS, runs=invoker, timed=timer.prepare(invoker))
            sides = [*_rivals(timer, handle, options, against, messages), ours]
            times = _interleaved(timer, sides, messages)
    except (MiofindError, MemoryError) as error:
        return BenchRow(entry=entry, solution=solution, floor_ms=floor_ms, message=str(error) or repr(error))
    return BenchRow(
        entry=entry,
        solution=solution,
        time_ms=times[_OURS],
        rival_ms=times.get(Rival.TORCH),
        one_pass_ms=times.get(Rival.ONE_PASS),
        cudnn_ms=times.get(Rival.CUDNN),
        floor_ms=floor_ms,
        message="; ".join(messages),
    )


_OURS = "miofind"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of those that are timed in turn."""

    name: str
    runs: Runnable
    timed: TimedCandidate


def _rivals(
    timer: Timer, handle: Handle, options: FindOptions, against: Sequence[Rival], messages: list[str]
) -> list[_Side]:
    """The rivals that run; a message for each other, but where cuDNN has no fused engine."""
    sides = []
    for rival in against:
        try:
            runs = runnable(rival, timer.problem, options, handle)
            sides.append(_Side(name=rival, runs=runs, timed=timer.prepare(runs)))
        except NoSolutionError as error:
            messages += [] if rival is Rival.CUDNN else [f"{rival}: {error}"]
        except (MiofindError, MemoryError) as error:
            messages.append(f"{rival}: {error or repr(error)}")
    return sides


def _interleaved(timer: Timer, sides: Sequence[_Side], messages: list[str]) -> dict[str, float]:
    """The median of each side, a few samples of each in turn; a rival that fails has a message, and none."""
    samples: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(BLOCKS):
        for side in sides:
            if side.name not in samples:
                continue
            try:
                samples[side.name] += timer.samples(side.timed, side.runs, SAMPLES_A_BLOCK)
            except (MiofindError, MemoryError) as error:
                if side.name == _OURS:
                    raise
                messages.append(f"{side.name}: {error or repr(error)}")
                del samples[side.name]
    return {name: statistics.median(times) for name, times in samples.items()}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTimes:
    """A suite's layers together, each as often as a forward pass has it.

    Attributes:
        layers: calls of a forward pass.
        sums_ms: the sum of each side's times, by "miofind" and rival; None where a layer lacks one.
        ratios: geometric mean of each rival's time over miofind's over the distinct problems that have both.
    """

    name: str
    layers: int
    sums_ms: Mapping[str, float | None]
    ratios: Mapping[str, float | None]

    def sum_ratio(self, rival: str) -> float | None:
        """A rival's sum over miofind's."""
        ours, theirs = self.sums_ms[_OURS], self.sums_ms[rival]
        return None if ours is None or theirs is None else theirs / ours


def network_times(rows: Sequence[BenchRow], against: Sequence[Rival]) -> list[NetworkTimes]:
    """The times of each suite, in the order of the rows."""
    found = []
    for name in dict.fromkeys(row.entry.suite for row in rows):
        own = [row for row in rows if row.entry.suite == name]
        sums = {str(rival): _sum_ms(own, [row.rivals_ms[rival] for row in own]) for rival in against}
        ratios = {str(rival): [row.ratio_of(rival) for row in own] for rival in against}
        found.append(
            NetworkTimes(
                name=name,
                layers=sum(row.entry.count for row in own),
                sums_ms={_OURS: _sum_ms(own, [row.time_ms for row in own])} | sums,
                ratios={rival: _geometric_mean([r for r in some if r is not None]) for rival, some in ratios.items()},
            )
        )
    return found


def _sum_ms(rows: Sequence[BenchRow], times_ms: Sequence[float | None]) -> float | None:
    """The sum of times, one a row, each as often as its row; None where one is."""
    known = [time_ms * row.entry.count for time_ms, row in zip(times_ms, rows, strict=True) if time_ms is not None]
    return math.fsum(known) if len(known) == len(rows) else None
