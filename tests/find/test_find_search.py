"""A find that searches: its jobs, what it records, where it goes on, and what it leaves out. Times are made up."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from helpers.runs.landscapes import PARAMETERS, Landscape

from miofind.compiler import CompileTimeoutError
from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import CompileError, NoSolutionError
from miofind.evaluate.evaluate import Job
from miofind.evaluate.executors import InProcess
from miofind.find import rounds
from miofind.find.lookup import records, validity
from miofind.find.lookup.scopes import Coverage
from miofind.find.measuring import measure
from miofind.find.pipeline import find
from miofind.find.rounds import FindRequest, Measuring
from miofind.find.search import FINALISTS, ROUND
from miofind.finddb import Row
from miofind.measure.effort import Effort
from miofind.measure.verdict import RaceVerdict
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.registry import Registry
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, HostStep, KernelStep

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 6), w=(4, 4, 3, 3))
OPTIONS = FindOptions(tuning=True, only=("vendor/Wide",), patience=2)
LANDSCAPE = Landscape(seed=1, solver_id="vendor/Wide", estimate_noise=0.4)


class Wide(Solver):
    """A solver with a large space and no code: its times are those of a landscape."""

    id = "vendor/Wide"
    algorithm = Algorithm.DIRECT
    keys = (KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(DataType), layouts=frozenset(Layout)),)
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = PARAMETERS

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (PROBLEM,)

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return LANDSCAPE.is_valid(config)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return LANDSCAPE.configs()[0], LANDSCAPE.configs()[1]

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return LANDSCAPE.estimate_ms(config)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(HostStep(module="nowhere", function="nothing"),))


class Measurer:
    """Stands for the executor: answers jobs with the landscape's times and keeps the jobs.

    Attributes:
        early: times that screening gives instead, by candidate id.
        failing: what becomes of candidates, by id.
        stop_at: number of the job that is interrupted after two outcomes.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.early: dict[str, float] = {}
        self.failing: dict[str, Status] = {}
        self.stop_at: int | None = None

    def run(self, job: Job) -> Iterator[Outcome | RaceVerdict]:
        self.jobs.append(job)
        interrupted = len(self.jobs) == self.stop_at
        for candidate in job.candidates[: 2 if interrupted else None]:
            yield self._outcome(candidate, job.effort)
        if interrupted:
            raise KeyboardInterrupt
        if job.effort is Effort.TUNE:
            ranked = sorted(job.candidates, key=lambda candidate: LANDSCAPE.time_ms(candidate.config))
            yield RaceVerdict(winner=ranked[0].id, ties=(ranked[0].id,), comparisons=(), rounds=45, protocol="made-up")

    def _outcome(self, candidate: Candidate, effort: Effort) -> Outcome:
        if candidate.id in self.failing:
            return Outcome(candidate=candidate, status=self.failing[candidate.id], message="broken for this test")
        outcome = LANDSCAPE.outcome(candidate)
        assert outcome.timing is not None
        if effort is Effort.SCREEN and candidate.id in self.early:
            return replace(outcome, timing=replace(outcome.timing, time_ms=self.early[candidate.id]))
        return outcome

    def of(self, effort: Effort) -> list[Job]:
        return [job for job in self.jobs if job.effort is effort]

    @property
    def screened(self) -> list[Candidate]:
        return [candidate for job in self.of(Effort.SCREEN) for candidate in job.candidates]


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> Measurer:
    made = Measurer()
    monkeypatch.setattr(InProcess, "run", lambda self, job: made.run(job))
    return made


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    registry = Registry([Wide(), Registry.default()["ConvCpuDirect"]])
    with Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as made:
        yield made


def known(options: FindOptions, handle: Handle) -> list[Solution] | None:
    """What a tuning would leave it at."""
    return records.look_up(PROBLEM, options, handle, coverage=Coverage.ALL)


def rows(handle: Handle) -> int:
    history = handle.database.user.history(handle.device.identity, PROBLEM.network_config)
    return len(history.rows) if history else 0


def test_rounds_are_screened_and_the_best_are_raced_at_the_end(handle: Handle, measurer: Measurer) -> None:
    solutions = measure(PROBLEM, OPTIONS, handle)
    *screens, last = measurer.jobs
    assert len(screens) > 2
    assert {job.effort for job in screens} == {Effort.SCREEN}
    assert last.effort is Effort.TUNE
    assert len(measurer.screened) == len(set(measurer.screened))
    default = Wide().default_configs(PROBLEM, handle.device)[0]
    fastest = sorted(measurer.screened, key=lambda candidate: LANDSCAPE.time_ms(candidate.config))
    assert last.candidates[0].config == default
    assert last.candidates[1:] == tuple(fastest[:FINALISTS])
    assert solutions[0].time_ms <= 1.01 * LANDSCAPE.time_ms(fastest[0].config)
    assert solutions[0].time_ms < 1.05 * min(map(LANDSCAPE.time_ms, LANDSCAPE.configs()))


def test_a_round_knows_the_best_time_so_far_and_the_last_race_judges_by_itself(
    handle: Handle, measurer: Measurer
) -> None:
    """A time from elsewhere must not keep all from racing."""
    measure(PROBLEM, OPTIONS, handle)
    first, second = measurer.jobs[:2]
    assert first.best_ms == math.inf
    assert second.best_ms == min(LANDSCAPE.time_ms(candidate.config) for candidate in first.candidates)
    assert measurer.jobs[-1].best_ms == math.inf


def test_every_outcome_and_the_verdict_are_recorded(handle: Handle, measurer: Measurer) -> None:
    measure(PROBLEM, OPTIONS, handle)
    assert rows(handle) == sum(len(job.candidates) for job in measurer.jobs)
    history = handle.database.user.history(handle.device.identity, PROBLEM.network_config)
    assert history is not None
    fastest = min(measurer.screened, key=lambda candidate: LANDSCAPE.time_ms(candidate.config))
    assert [verdict.winner for verdict in history.verdicts] == [fastest.id]


def test_somebody_put_first_by_a_few_early_samples_is_raced_too(handle: Handle, measurer: Measurer) -> None:
    """Its early time stayed ahead of the winner's in the answer, though many samples say otherwise."""
    slow = Candidate(
        network_config=PROBLEM.network_config,
        solver_id="vendor/Wide",
        config=max(LANDSCAPE.configs(), key=LANDSCAPE.time_ms),
    )
    measurer.early = {c.id: 0.001 + 0.0001 * i for i, c in enumerate(first_batch(handle))}
    solutions = measure(PROBLEM, OPTIONS, handle)
    finals = measurer.of(Effort.TUNE)
    assert 2 <= len(finals) <= 3
    assert solutions[0].time_ms >= min(map(LANDSCAPE.time_ms, LANDSCAPE.configs()))
    assert slow.id not in {solution.id for solution in solutions[:1]}


def first_batch(handle: Handle) -> list[Candidate]:
    from miofind.find.plan import make_plan
    from miofind.find.search import Search

    plan = make_plan(PROBLEM, OPTIONS, handle)
    return list(Search(PROBLEM.network_config, plan.spaces).propose())


def test_a_search_that_ended_by_itself_is_not_repeated(handle: Handle, measurer: Measurer) -> None:
    measure(PROBLEM, OPTIONS, handle)
    assert known(OPTIONS, handle)
    assert known(replace(OPTIONS, trials=10_000), handle)
    assert known(replace(OPTIONS, tuning=False), handle)


def test_as_many_trials_are_known_and_more_go_on_where_it_stopped(handle: Handle, measurer: Measurer) -> None:
    limited = replace(OPTIONS, trials=40)
    measure(PROBLEM, limited, handle)
    first = {candidate for job in measurer.jobs for candidate in job.candidates}
    assert len(first) == 40
    assert known(limited, handle)
    assert known(replace(limited, trials=30), handle)
    for more in (replace(limited, trials=60), replace(limited, trials=None)):
        assert not known(more, handle)
    measurer.jobs.clear()
    measure(PROBLEM, replace(limited, trials=60), handle)
    later = {candidate for job in measurer.jobs for candidate in job.candidates}
    assert not first & {*measurer.screened}
    assert len(first | later) == 60
    assert known(replace(limited, trials=60), handle)


def test_trials_count_candidates_of_allowed_solvers_alone(handle: Handle, measurer: Measurer) -> None:
    """What was tried of others counted as a search's own trials, and nothing more was measured."""
    measure(PROBLEM, replace(OPTIONS, trials=2), handle)
    of_another = Row(
        solver_id="ConvCpuDirect",
        solver_version=1,
        config="{}",
        status="ok",
        source_hash=validity.solver_hash(Registry.default()["ConvCpuDirect"]),
        time_ms=1.0,
    )
    handle.database.record(handle.device.identity, PROBLEM.network_config, [of_another])
    assert validity.is_valid(of_another, handle)
    assert known(replace(OPTIONS, trials=2), handle)
    assert not known(replace(OPTIONS, trials=3), handle)


def test_a_search_answers_for_the_defaults_once_it_has_come_to_all_of_them(handle: Handle, measurer: Measurer) -> None:
    """One trial answered whoever asked for the defaults, of which there are two."""
    defaults = replace(OPTIONS, tuning=False)
    measure(PROBLEM, replace(OPTIONS, trials=1), handle)
    assert records.look_up(PROBLEM, defaults, handle) is None
    assert known(replace(OPTIONS, trials=1), handle)
    measure(PROBLEM, replace(OPTIONS, trials=2), handle)
    assert known(defaults, handle)
    assert not known(OPTIONS, handle)


def test_a_default_that_failed_before_counts_as_tried(handle: Handle, measurer: Measurer) -> None:
    measurer.failing = {
        f"vendor/Wide:{config.json}": Status.WRONG_RESULT
        for config in Wide().default_configs(PROBLEM, handle.device)[:1]
    }
    for trials in (1, 2):
        with contextlib.suppress(NoSolutionError):
            measure(PROBLEM, replace(OPTIONS, trials=trials), handle)
    assert len({candidate for job in measurer.jobs for candidate in job.candidates}) == 2
    assert known(replace(OPTIONS, tuning=False), handle)


def test_a_search_that_ran_out_of_time_counts_where_time_is_limited(
    handle: Handle, measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    limited = replace(OPTIONS, time_budget_s=12.0, patience=1000)
    measure(PROBLEM, limited, handle)
    assert 1 <= len(measurer.of(Effort.SCREEN)) <= 5
    assert len(measurer.of(Effort.TUNE)) == 1
    assert len(measurer.jobs[-1].candidates) <= FINALISTS + 1
    assert known(limited, handle)
    assert not known(replace(limited, time_budget_s=None), handle)


def test_an_interrupted_search_goes_on_with_what_it_has(handle: Handle, measurer: Measurer) -> None:
    measurer.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        measure(PROBLEM, OPTIONS, handle)
    before = {candidate.id for candidate in measurer.screened[: -len(measurer.jobs[-1].candidates)]}
    before |= {candidate.id for candidate in measurer.jobs[-1].candidates[:2]}
    assert rows(handle) == len(before)
    assert not known(OPTIONS, handle)
    measurer.jobs.clear()
    measurer.stop_at = None
    measure(PROBLEM, OPTIONS, handle)
    assert not before & {candidate.id for candidate in measurer.screened}
    assert known(OPTIONS, handle)


@pytest.mark.parametrize("options", [{"find_mode": "normal"}, {"find_enforce": "search_db_update"}])
def test_who_wants_it_measured_anew_gets_a_search_from_the_beginning(
    handle: Handle, measurer: Measurer, options: dict[str, Any]
) -> None:
    measure(PROBLEM, OPTIONS, handle)
    once = {*measurer.screened}
    measurer.jobs.clear()
    find(PROBLEM, replace(OPTIONS, **options), handle)
    assert len(once & {*measurer.screened}) >= ROUND


def test_what_failed_before_is_left_out_unless_it_is_to_be_retried(handle: Handle, measurer: Measurer) -> None:
    batch = first_batch(handle)
    crashed, transient = batch[0].id, batch[1].id
    measurer.failing = {crashed: Status.WRONG_RESULT, transient: Status.OUT_OF_MEMORY}
    measure(PROBLEM, OPTIONS, handle)
    for options, tried in ((OPTIONS, {transient}), (replace(OPTIONS, retry_failed=True), {crashed, transient})):
        measurer.jobs.clear()
        measure(PROBLEM, options, handle, afresh=True)
        assert {c.id for job in measurer.jobs for c in job.candidates} & {crashed, transient} == tried


def test_where_all_failed_before_the_error_says_so(handle: Handle, measurer: Measurer) -> None:
    defaults = replace(OPTIONS, tuning=False)
    measurer.failing = {
        f"vendor/Wide:{config.json}": Status.TIMED_OUT for config in Wide().default_configs(PROBLEM, None)
    }  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(NoSolutionError) as caught:
            measure(PROBLEM, defaults, handle)
    assert len(measurer.jobs) == 1
    told = "failed here before (timed_out: broken for this test): retry_failed (--retry-failed) measures it again"
    assert str(caught.value).count(told) == 2


def test_what_won_at_a_near_problem_is_tried_first(handle: Handle, measurer: Measurer) -> None:
    best = measure(PROBLEM, OPTIONS, handle)[0]
    near = ProblemDescription.convolution(x=(2, 4, 6, 6), w=(4, 4, 3, 3))
    measurer.jobs.clear()
    measure(near, OPTIONS, handle)
    assert best.config in {candidate.config for candidate in measurer.jobs[0].candidates}
    assert len(measurer.jobs[0].candidates) == ROUND


def test_solutions_to_be_checked_again_are_in_the_last_race(handle: Handle, measurer: Measurer) -> None:
    slow = max(LANDSCAPE.configs(), key=LANDSCAPE.time_ms)
    solution = replace(measure(PROBLEM, OPTIONS, handle)[0], config=slow)
    measurer.jobs.clear()
    measure(PROBLEM, OPTIONS, handle, also=[solution])
    assert slow in {candidate.config for job in measurer.of(Effort.TUNE) for candidate in job.candidates}


def test_the_best_known_is_the_incumbent(handle: Handle, measurer: Measurer) -> None:
    best = measure(PROBLEM, OPTIONS, handle)[0]
    assert measurer.jobs[0].incumbent == ""
    measurer.jobs.clear()
    measure(PROBLEM, OPTIONS, handle, afresh=True)
    assert {job.incumbent for job in measurer.jobs} == {best.id}


class FakePool:
    """Stands for a CompilePool: refuses the kernels of one candidate."""

    def __init__(self, broken: KernelStep, kind: type[CompileError]) -> None:
        self.broken = broken
        self.kind = kind
        self.submitted: list[KernelStep] = []

    def submit(self, steps: list[KernelStep], arch: str) -> int:
        self.submitted += steps
        return len(steps)

    def errors(self, steps: Iterator[KernelStep], arch: str) -> dict[KernelStep, CompileError]:
        error = self.kind("stuck", source="direct/tiled.cu", options=(), log="")
        return {step: error for step in steps if step == self.broken}


@pytest.mark.parametrize(
    ("kind", "status"), [(CompileError, Status.COMPILE_FAILED), (CompileTimeoutError, Status.TIMED_OUT)]
)
def test_what_cannot_be_compiled_ahead_is_not_measured(kind: type[CompileError], status: Status) -> None:
    device = Device.virtual("90a")
    solver = Registry.default()["ConvDirectTiled"]
    configs = solver.default_configs(PROBLEM, device)
    candidates = [
        Candidate(network_config=PROBLEM.network_config, solver_id=solver.id, config=config) for config in configs
    ]
    pool = FakePool(solver.solution(PROBLEM, device, configs[0]).kernels[0], kind)
    jobs: list[Job] = []
    executor = SimpleNamespace(run=lambda job: jobs.append(job) or iter(()))
    handle = SimpleNamespace(device=device, registry=Registry.default(), executor=lambda isolate: executor)
    taken: list[Outcome] = []
    request = FindRequest(problem=PROBLEM, options=OPTIONS, handle=handle, ahead=pool)  # type: ignore[arg-type]
    measuring = Measuring(request, SimpleNamespace(add=taken.append))  # type: ignore[arg-type]
    outcomes = measuring.run(candidates, Effort.SCREEN)
    assert outcomes == taken
    assert [(o.candidate, o.status) for o in outcomes] == [(candidates[0], status)]
    assert jobs[0].candidates == tuple(candidates[1:])
    measuring.compile_ahead(candidates[1:])
    assert len(pool.submitted) == len(candidates) - 1
