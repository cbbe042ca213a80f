"""The next problem's kernels are handed to the compile pool, unless they are not needed; a failure costs nothing."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.finddb.finddb_entries import row

from miofind.core.epilogue import Epilogue
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import CompileError, NoSolutionError
from miofind.evaluate.evaluate import Job
from miofind.evaluate.executors import InProcess
from miofind.evaluate.harness_kernels import harness_steps
from miofind.find.measuring import begin_likeliest, measure
from miofind.find.plan import Planned, make_plan
from miofind.find.rounds import Measuring
from miofind.measure.effort import Effort
from miofind.options import FindOptions
from miofind.process.held_settings import HeldSetting
from miofind.runtime.handle import Handle
from miofind.solver.candidate import Candidate, Outcome
from miofind.solver.steps import KernelStep
from miofind.suites import SuiteProblem
from miofind.tune import precompiler as tune_precompiler
from miofind.tune.planning import tuning_plans
from miofind.tune.precompiler import _SWITCH_S, Precompiler, _quick_turns
from miofind.tune.queue import TaskQueue
from miofind.tune.service import tasks_of
from miofind.tune.values import Task, TuneFinished, TuneOptions, TuneResult, TuneStarted
from miofind.tune.worker import Worker, failed, tuned

PROBLEM = ProblemDescription.convolution(x=(1, 8, 16, 16), w=(16, 8, 3, 3), dtype="float16")
OPTIONS = TuneOptions(find=FindOptions(only=("ConvDirectTiled",)))


class Pool:
    """Keeps what it is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.given: list[tuple[list[KernelStep], str]] = []
        self.called = threading.Event()
        self._error = error
        self.broken = False
        self.compiling: list[KernelStep] = []

    def errors(self, steps: Iterable[KernelStep], arch: str) -> dict[KernelStep, CompileError]:
        return {step: CompileError("broken", source=step.source, options=(), log="") for step in steps if self.broken}

    def is_compiling(self, steps: Sequence[KernelStep], arch: str) -> bool:
        return any(step in self.compiling for step in steps)

    def submit(self, steps: Sequence[KernelStep], arch: str) -> None:
        self.called.set()
        if self._error is not None:
            raise self._error
        self.given.append((list(steps), arch))
        self.compiling += steps


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with Handle(Device.virtual("90a"), database=tmp_path / "finddb.db", strict=True) as made:
        yield made


def prepared(precompiler: Precompiler, handle: Handle) -> None:
    """Prepare the problem and wait until that is done."""
    precompiler.prepare([PROBLEM], handle)
    precompiler._helper.finish()


def test_the_pool_gets_what_a_find_begins_with(handle: Handle) -> None:
    pool = Pool()
    prepared(Precompiler(pool, OPTIONS), handle)  # type: ignore[arg-type]
    planned = make_plan(PROBLEM, OPTIONS.find, handle).candidates
    steps = [s for p in planned for s in p.solver.solution(PROBLEM, handle.device, p.candidate.config).kernels]
    assert steps
    assert pool.given == [([*harness_steps(PROBLEM, handle.device), *steps], "90a")]


def test_small_problems_are_prepared_further_ahead_than_those_of_a_search() -> None:
    searching = TuneOptions(find=FindOptions(tuning=True))
    assert Precompiler(Pool(), OPTIONS).depth > Precompiler(Pool(), searching).depth == 1  # type: ignore[arg-type]


def test_a_search_does_not_fill_the_pool(handle: Handle) -> None:
    pool = Pool()
    options = TuneOptions(find=FindOptions(only=("ConvDirectTiled",), tuning=True))
    prepared(Precompiler(pool, options), handle)  # type: ignore[arg-type]
    ((steps, _),) = pool.given
    of_candidates = len(steps) - len(harness_steps(PROBLEM, handle.device))
    assert of_candidates == tune_precompiler.MAX_DEFAULT_CONFIGS
    assert of_candidates < len(make_plan(PROBLEM, options.find, handle).candidates)


def test_what_is_known_is_not_compiled(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    monkeypatch.setattr("miofind.find.lookup.records.look_up", lambda *_, **__: ["something"])
    prepared(Precompiler(pool, OPTIONS), handle)  # type: ignore[arg-type]
    assert pool.given == []


def test_the_cpu_place_compiles_nothing(tmp_path: Path) -> None:
    pool = Pool()
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        prepared(Precompiler(pool, OPTIONS), handle)  # type: ignore[arg-type]
    assert not pool.called.is_set()


def test_a_failure_is_nobodys_concern(handle: Handle) -> None:
    pool = Pool(CompileError("no such source", source="x.cu", options=(), log=""))
    prepared(Precompiler(pool, OPTIONS), handle)  # type: ignore[arg-type]
    assert pool.called.is_set()


def test_a_problem_is_ready_once_its_kernels_are_compiled(handle: Handle) -> None:
    pool, other = Pool(), ProblemDescription.convolution(x=(2, 8, 16, 16), w=(16, 8, 3, 3), dtype="float16")
    precompiler = Precompiler(pool, OPTIONS, defers=True)  # type: ignore[arg-type]
    assert not precompiler.is_preparing(PROBLEM), "nothing was begun"
    prepared(precompiler, handle)
    assert precompiler.is_preparing(PROBLEM)
    assert precompiler.take([PROBLEM, other]) == other
    pool.compiling.clear()
    assert precompiler.take([PROBLEM, other]) == PROBLEM
    prepared(precompiler, handle)
    precompiler.close()
    assert not precompiler.is_preparing(PROBLEM)


def test_the_plan_of_the_likeliest_is_told_once(handle: Handle) -> None:
    likely = TuneOptions(find=FindOptions(likely=True, only=("ConvDirectTiled",)))
    for options, asked, is_planned in ((likely, likely, True), (likely, OPTIONS, False), (OPTIONS, OPTIONS, False)):
        precompiler = Precompiler(Pool(), options, defers=True)  # type: ignore[arg-type]
        prepared(precompiler, handle)
        plan = precompiler.take_plan(PROBLEM, asked)
        assert (plan is not None) == is_planned
        if plan is not None:
            again = tuning_plans(PROBLEM, likely, handle)[0]
            assert [each.candidate for each in plan.candidates] == [each.candidate for each in again.candidates]
        assert precompiler.take_plan(PROBLEM, asked) is None
        assert not precompiler._plans
        assert not precompiler._preparing


def test_nothing_is_kept_of_what_was_measured_before_it_was_prepared(handle: Handle) -> None:
    likely = TuneOptions(find=FindOptions(likely=True, only=("ConvDirectTiled",)))
    precompiler = Precompiler(Pool(), likely, defers=True)  # type: ignore[arg-type]
    precompiler._prepare(PROBLEM, handle, likely)
    assert not precompiler._plans
    assert not precompiler._preparing


def test_what_could_not_be_begun_is_not_waited_for(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    error = CompileError("no such source", source="x.cu", options=(), log="")
    failing = Precompiler(Pool(error), OPTIONS, defers=True)  # type: ignore[arg-type]
    prepared(failing, handle)
    assert not failing.is_preparing(PROBLEM)
    threadless = Precompiler(Pool(), OPTIONS, defers=True)  # type: ignore[arg-type]
    monkeypatch.setattr(threadless._helper, "submit", lambda _: False)
    threadless.prepare([PROBLEM], handle)
    assert not threadless.is_preparing(PROBLEM)


def test_nothing_is_kept_where_nobody_asks(handle: Handle) -> None:
    """A fleet's worker prepares for weeks and asks for nothing."""
    pool = Pool()
    precompiler = Precompiler(pool, TuneOptions(find=FindOptions(likely=True, only=("ConvDirectTiled",))))  # type: ignore[arg-type]
    prepared(precompiler, handle)
    assert pool.given
    assert not precompiler._plans
    assert not precompiler._preparing


@pytest.mark.parametrize("measured", [False, True])
def test_a_fused_problems_plan_holds_until_the_bare_one_is_measured(measured: bool, handle: Handle) -> None:
    likely = TuneOptions(find=FindOptions(likely=True, only=("ConvDirectTiled",)))
    fused = dataclasses.replace(PROBLEM, epilogue=Epilogue(bias=True))
    precompiler = Precompiler(Pool(), likely, defers=True)  # type: ignore[arg-type]
    precompiler.prepare([fused], handle)
    precompiler._helper.finish()
    assert precompiler._preparing[fused]
    if measured:
        handle.database.record(handle.device.identity, PROBLEM.network_config, [row()])
    assert (precompiler.take_plan(fused, likely) is None) == measured


@pytest.mark.parametrize("defers", [True, False])
def test_the_first_problem_is_prepared_too_where_its_kernels_are_waited_for(
    defers: bool, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thread that measures it plans it, against the one that plans the others."""
    other = ProblemDescription.convolution(x=(2, 8, 16, 16), w=(16, 8, 3, 3), dtype="float16")
    requests = [SuiteProblem(problem=each, suite="", layer="", count=1) for each in (PROBLEM, other)]
    told: list[object] = []

    class Told(Precompiler):
        def prepare(self, problems: Iterable[ProblemDescription], *_: object) -> None:
            told.extend(problems)

    monkeypatch.setattr("miofind.tune.worker.tuned", lambda task, *_, **__: failed(task, ""))
    precompiler = Told(Pool(), OPTIONS, defers=defers)  # type: ignore[arg-type]
    queue = TaskQueue(tasks_of(requests, [handle], OPTIONS), seconds=math.inf)
    Worker(0, handle, OPTIONS, queue, precompiler=precompiler, tell=lambda event: told.append(type(event))).run()
    measured = [TuneStarted, TuneFinished] * 2
    assert told == ([other, PROBLEM, *measured] if defers else [TuneStarted, PROBLEM, *measured[1:]])


class Begun:
    """An executor that keeps what is begun."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

        self.abandoned = 0

    def begin(self, job: Job) -> None:
        self.jobs.append(job)

    def abandon(self) -> None:
        self.abandoned += 1


LIKELY = TuneOptions(find=FindOptions(likely=True, only=("ConvDirectTiled",), isolate=True, time_budget_s=7.0))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that are begun, with whatever executor."""
    executor = Begun()
    monkeypatch.setattr(Handle, "executor", lambda *_, **__: executor)
    return executor.jobs


def test_the_device_begins_with_what_measuring_will_ask(
    handle: Handle, begun: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it waits while results are recorded, 15 ms a problem."""
    asked: list[Job] = []

    def run(self: Measuring, candidates: Iterable[Candidate], effort: Effort, **_: object) -> list[Outcome]:
        asked.append(Job(network_config=PROBLEM.network_config, candidates=tuple(candidates), effort=effort))
        return []

    monkeypatch.setattr(Measuring, "run", run)
    (plan,) = tuning_plans(PROBLEM, LIKELY, handle)
    pool = Pool()
    begin_likeliest(PROBLEM, LIKELY.find, handle, plan, pool)  # type: ignore[arg-type]
    monkeypatch.setattr(Begun, "prepare", lambda self: None, raising=False)
    monkeypatch.setattr("miofind.find.measuring._refuse_capture", lambda _: None)
    with pytest.raises(NoSolutionError):
        measure(PROBLEM, LIKELY.find, handle, likeliest=plan)
    assert len(begun) == 1
    assert replace(begun[0], budget_s=math.inf) == asked[0]
    assert begun[0].budget_s == 7.0


@pytest.mark.parametrize("why", ["known", "in this process", "cannot be compiled", "a solver fails", "sure"])
def test_nothing_is_begun_that_is_not_sure(
    why: str, handle: Handle, begun: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    (plan,) = tuning_plans(PROBLEM, LIKELY, handle)
    find, pool = LIKELY.find, Pool()
    if why == "known":
        handle.database.record(handle.device.identity, PROBLEM.network_config, [row()])
    elif why == "in this process":
        find = replace(find, isolate=False)
    elif why == "cannot be compiled":
        pool.broken = True
    elif why == "a solver fails":
        monkeypatch.setattr(Planned, "kernels", lambda *_: 1 / 0)
    begin_likeliest(PROBLEM, find, handle, plan, pool)  # type: ignore[arg-type]
    assert len(begun) == (why == "sure")


@pytest.mark.parametrize("change", [{}, {"recheck": True}, {"stored": True}, {"force": True}])
def test_the_next_problem_is_begun_when_the_device_is_at_rest(
    change: dict[str, bool], handle: Handle, begun: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ProblemDescription.convolution(x=(2, 8, 16, 16), w=(16, 8, 3, 3), dtype="float16")
    requests = [SuiteProblem(problem=each, suite="", layer="", count=1) for each in (PROBLEM, other)]
    options, pool = replace(LIKELY, **change), Pool()
    precompiler = Precompiler(pool, options, defers=True)  # type: ignore[arg-type]
    precompiler.prepare([PROBLEM, other], handle)
    precompiler._helper.finish()
    pool.compiling.clear()
    seen: list[tuple[str, ...]] = []

    def tuned(task: Task, *_: object, at_rest: Callable[[], None]) -> TuneResult:
        at_rest()
        seen.append(tuple(each.network_config for each in begun))
        return failed(task, "")

    monkeypatch.setattr("miofind.tune.worker.tuned", tuned)
    queue = TaskQueue(tasks_of(requests, [handle], LIKELY), seconds=math.inf)
    Worker(0, handle, options, queue, precompiler=precompiler, tell=lambda _: None).run()
    assert len(seen) == 2
    assert set(seen) == ({()} if change.keys() & {"recheck", "stored"} else {(PROBLEM.network_config,)})


def test_what_was_begun_and_is_not_taken_ends_with_the_worker(
    handle: Handle, begun: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or the end of the time, may come between the two: nobody would end it."""
    executor: Any = handle.executor(isolate=True)
    other = ProblemDescription.convolution(x=(2, 8, 16, 16), w=(16, 8, 3, 3), dtype="float16")
    requests = [SuiteProblem(problem=each, suite="", layer="", count=1) for each in (PROBLEM, other)]
    pool = Pool()
    precompiler = Precompiler(pool, LIKELY, defers=True)  # type: ignore[arg-type]
    precompiler.prepare([PROBLEM, other], handle)
    precompiler._helper.finish()
    pool.compiling.clear()

    def interrupted(*_: object, at_rest: Callable[[], None]) -> TuneResult:
        at_rest()
        raise KeyboardInterrupt

    def run() -> None:
        queue = TaskQueue(tasks_of(requests, [handle], LIKELY), seconds=math.inf)
        Worker(0, handle, LIKELY, queue, precompiler=precompiler, tell=lambda _: None).run()

    with monkeypatch.context() as patch:
        patch.setattr("miofind.tune.worker.tuned", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert (len(begun), executor.abandoned) == (1, 1)
    monkeypatch.setattr("miofind.tune.worker.tuned", lambda task, *_, **__: failed(task, ""))
    run()
    assert executor.abandoned == 1, "nothing was begun"


@pytest.mark.parametrize("usable", [True, False])
def test_the_device_is_at_rest_before_anything_is_recorded(
    usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is when the next problem is begun, by a tuning that hands this on."""
    problem, rows = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(3, 4, 1, 1)), list[int]()
    options = FindOptions(only=("ConvCpuDirect",))
    if not usable:
        monkeypatch.setattr(InProcess, "run", lambda *_: iter(()))
    with Handle("cpu", database=tmp_path / "finddb.db") as cpu:

        def at_rest() -> None:
            histories = cpu.database.histories(cpu.device.identity, problem.network_config)
            rows.append(sum(len(history.rows) for history in histories))

        (task,) = tasks_of(
            [SuiteProblem(problem=problem, suite="", layer="", count=1)], [cpu], TuneOptions(find=options)
        )
        result = tuned(task, cpu, TuneOptions(find=options), at_rest=at_rest)
        assert bool(result.solutions) == usable
        assert rows == [0]
        if usable:
            at_rest()
            assert rows[1] > 0


def test_what_the_queue_promised_goes_first(handle: Handle) -> None:
    """Though a heavier problem is ready by then, or the promised one is prepared anew."""
    heavy = ProblemDescription.convolution(x=(9, 8, 99, 99), w=(16, 8, 3, 3), dtype="float16")
    requests = [SuiteProblem(problem=each, suite="", layer="", count=1) for each in (PROBLEM, heavy)]
    preparing = {heavy}
    queue = TaskQueue(tasks_of(requests, [handle], OPTIONS), seconds=math.inf)
    queue.defer(lambda task: task.request.problem in preparing, 8)
    kind = handle.device.identity
    promised = queue.promise(kind)
    assert promised is not None
    assert promised.request.problem == PROBLEM
    preparing.clear()
    preparing.add(PROBLEM)
    assert queue.take(kind) is promised
    preparing.add(heavy)
    assert queue.promise(kind) is None, "it is still prepared"
    preparing.clear()
    last = queue.take(kind)
    assert last is not None
    assert last.request.problem == heavy
    assert queue.promise(kind) is None, "there is none left"


@pytest.mark.parametrize("why", ["closed", "out of time"])
def test_a_queue_that_gives_nothing_promises_nothing(why: str, handle: Handle) -> None:
    requests = [SuiteProblem(problem=PROBLEM, suite="", layer="", count=1)]
    queue = TaskQueue(tasks_of(requests, [handle], OPTIONS), seconds=0 if why == "out of time" else math.inf)
    if why == "closed":
        queue.close()
    assert queue.promise(handle.device.identity) is None


@pytest.fixture
def no_quick_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has had no precompiler."""
    turns = HeldSetting(sys.getswitchinterval, sys.setswitchinterval, held=_SWITCH_S, gives_way=_quick_turns._gives_way)
    monkeypatch.setattr(tune_precompiler, "_quick_turns", turns)
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-3)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_quick_turns")
def test_threads_take_quick_turns_until_the_last_of_several_is_closed() -> None:
    """Two tunings in threads: the second to begin is not the last to end."""
    first, second = (Precompiler(Pool(), OPTIONS) for _ in range(2))  # type: ignore[arg-type]
    first.close()
    assert sys.getswitchinterval() == _SWITCH_S
    second.close()
    assert sys.getswitchinterval() == 5e-3


@pytest.mark.usefixtures("no_quick_turns")
def test_quicker_turns_that_a_program_has_chosen_stay() -> None:
    sys.setswitchinterval(1e-4)
    precompiler = Precompiler(Pool(), OPTIONS)  # type: ignore[arg-type]
    assert sys.getswitchinterval() == pytest.approx(1e-4)
    precompiler.close()
    assert sys.getswitchinterval() == pytest.approx(1e-4)
