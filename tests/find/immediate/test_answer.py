"""What is answered without measuring: stored rows and predictions ranked together, and cuDNN where it is alone."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.problems.problem_strategies import problems
from helpers.runs.immediate_models import H200, NEAR
from hypothesis import example, given, settings

import miofind
from miofind import FindOptions
from miofind.core.problem import ProblemDescription
from miofind.device.device import Library
from miofind.errors import NoSolutionError
from miofind.evaluate.executors import InProcess
from miofind.find.immediate.answer import ranked
from miofind.find.immediate.devices import described
from miofind.find.plan import Planned, make_plan
from miofind.find.recording import row_of
from miofind.runtime.solution import Source
from miofind.solver.candidate import Outcome, Status
from miofind.solver.registry import Registry
from miofind.solver.steps import Config
from miofind.solvers.cpu.direct import ConvCpuDirect

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
FAST = FindOptions(find_mode="fast")
IMMEDIATE = (FAST, FindOptions(on_miss="estimate"), replace(FAST, only="plain"))
VERIFIED = (FindOptions(), FindOptions(find_mode="trust_verify", on_miss="estimate"))


def later(estimate_ms: float, **fields: object) -> Registry:
    """The solvers that there are, and one more with that estimate."""
    body = {"id": "vendor/Later", "estimate_ms": lambda *_: estimate_ms} | fields
    return Registry.default().with_solvers(type("Later", (ConvCpuDirect,), body)())


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FindDB that knows all of today's solvers of the CPU place."""
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    path = tmp_path / "finddb.db"
    with miofind.Handle("cpu", database=path, strict=True) as handle:
        miofind.find_solutions(PROBLEM, handle=handle)
    return path


@pytest.mark.parametrize("options", IMMEDIATE, ids=["fast", "estimate", "fast-plain"])
def test_what_the_finddb_lacks_is_predicted_and_ranked_with_what_it_has(
    database: Path, options: FindOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    for estimate_ms, place in ((1e-6, 0), (1e6, -1)):
        with miofind.Handle("cpu", database=database, registry=later(estimate_ms)) as handle:
            found = miofind.find_solutions(PROBLEM, options=options, handle=handle)
        assert (found[place].solver_id, found[place].source) == ("vendor/Later", Source.PREDICTED)
        assert [each.source for each in found].count(Source.FINDDB) == len(found) - 1 > 0
        assert [found[0].solution_list.solutions.index(each) for each in found] == list(range(len(found)))


@pytest.mark.parametrize(("slower", "first"), [(1.005, "kernel"), (1.02, "call")])
def test_kernels_go_before_calls_of_libraries_that_are_predicted_as_good(slower: float, first: str) -> None:
    estimates = {"kernel": slower, "call": 1.0}
    solvers = {name: type(name, (ConvCpuDirect,), {"id": f"vendor/{name}"})() for name in estimates}
    type(solvers["call"]).library = Library.CUBLAS
    with miofind.Handle("cpu", database=":memory:") as handle:
        planned = [
            Planned(
                problem=PROBLEM,
                device=handle.device,
                solver=solver,
                config=Config(),
                estimate_ms=estimates[name],
            )
            for name, solver in solvers.items()
        ]
        assert ranked(planned, PROBLEM, handle)[0].planned.solver is solvers[first]


@pytest.mark.parametrize("options", VERIFIED, ids=["hybrid", "trust_verify"])
def test_modes_that_promise_verified_answers_predict_nothing_beside_a_hit(database: Path, options: FindOptions) -> None:
    with miofind.Handle("cpu", database=database, registry=later(1e-6)) as handle:
        found = miofind.find_solutions(PROBLEM, options=options, handle=handle)
    assert Source.PREDICTED not in {each.source for each in found}


def test_what_was_measured_beyond_a_limit_is_not_predicted_within_it(database: Path) -> None:
    """Its error was measured: an estimate of the same candidate would be taken for one that keeps the limit."""
    with miofind.Handle("cpu", database=database) as handle:
        known = {each.id: each for each in miofind.find_solutions(PROBLEM, handle=handle)}
        limit = min(each.max_error for each in known.values() if each.max_error is not None)
        fast = FindOptions(find_mode="fast", max_error=limit)
        found = miofind.find_solutions(PROBLEM, options=replace(fast, exclude=("fft", "winograd")), handle=handle)
    assert 0 < len(found) < len(known)
    assert not {each.id for each in found if each.source is Source.PREDICTED} & known.keys()


def test_rows_of_a_find_of_others_count_beside_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        (only,) = miofind.find_solutions(PROBLEM, options=FindOptions(only="ConvCpuDirect"), handle=handle)
        found = miofind.find_solutions(PROBLEM, options=FindOptions(find_mode="fast"), handle=handle)
    stored = [each for each in found if each.source is Source.FINDDB]
    assert [each.id for each in stored] == [only.id]
    assert len({each.solver_id for each in found}) > 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[miofind.Handle]:
    """A described GPU without any FindDB, on which cuDNN has a plan that seems to take no time."""
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    cudnn = type(Registry.default()["ConvCudnn"])
    config = Config({"accumulate": "float32", "engine": 1, "knobs": {}, "notes": ""})
    monkeypatch.setattr(cudnn, "default_configs", lambda *_: (config,))
    naive = Registry.default()["ConvDirectNaive"]
    monkeypatch.setattr(cudnn, "keeps_bound", lambda *_: True)
    monkeypatch.setattr(cudnn, "estimate_ms", lambda *_: 1e-9)
    monkeypatch.setattr(cudnn, "solution", lambda _, problem, device, config: naive.solution(problem, device, config))
    with miofind.Handle(H200, database=":memory:") as handle:
        yield handle


@pytest.mark.parametrize(
    ("only", "library"),
    [((), Library.PLAIN), (("cudnn",), Library.CUDNN), (("cudnn", "ConvDirectNaive"), Library.CUDNN)],
    ids=["all", "alone", "beside-the-last-resort"],
)
def test_cudnn_is_predicted_only_where_nothing_else_serves(
    gpu: miofind.Handle, only: tuple[str, ...], library: Library
) -> None:
    problem = ProblemDescription.convolution(x=(4, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16")
    found = miofind.find_solutions(problem, options=FindOptions(find_mode="fast", only=only), handle=gpu)
    assert {each.source for each in found} == {Source.PREDICTED}
    assert (found[0].library is Library.CUDNN) is (library is Library.CUDNN)
    assert only or Library.CUDNN not in {each.library for each in found}


def test_who_predicts_nothing_is_told_each_reason(gpu: miofind.Handle) -> None:
    problem = ProblemDescription.convolution(x=(4, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16")
    with pytest.raises(NoSolutionError, match="ConvDepthwiseMma: "):
        miofind.find_solutions(problem, options=FindOptions(find_mode="fast", only="ConvDepthwiseMma"), handle=gpu)


def test_steps_are_made_of_the_first_candidate_and_of_others_when_somebody_asks(
    gpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ProblemDescription.convolution(x=(4, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16")
    tiled = type(Registry.default()["ConvDirectTiled"])
    asked: list[str] = []
    real = tiled.solution
    monkeypatch.setattr(tiled, "solution", lambda self, *args: asked.append(args[2].json) or real(self, *args))
    options = FindOptions(find_mode="fast", only="ConvDirectTiled")
    found = miofind.find_solutions(problem, options=options, handle=gpu)
    assert asked == [found[0].config.json]
    last = found[-1]
    steps = real(Registry.default()["ConvDirectTiled"], problem, H200, last.config)
    assert (last.workspace_bytes, last.deterministic) == (steps.workspace.bytes, steps.deterministic)
    assert asked.count(last.config.json) == 1
    arrived = pickle.loads(pickle.dumps(found[1]))
    assert (arrived, arrived.workspace_bytes) == (found[1], found[1].workspace_bytes)
    assert [each.position for each in found] == list(range(len(found)))
    with pytest.raises(AttributeError):
        _ = found[2].not_there  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "limits", [{"workspace_limit_bytes": 0}, {"deterministic": True}, {"strict_nonfinite": True}], ids=str
)
def test_predictions_keep_limits(gpu: miofind.Handle, limits: dict[str, Any]) -> None:
    problem = ProblemDescription.convolution(
        x=(4, 256, 7, 7), w=(256, 256, 3, 3), padding=1, dtype="float16", direction="backward_weights"
    )
    free = miofind.find_solutions(problem, options=FAST, handle=gpu)
    found = miofind.find_solutions(problem, options=replace(FAST, **limits), handle=gpu)
    assert found
    if "workspace_limit_bytes" in limits:
        assert any(each.workspace_bytes for each in free)
        assert not any(each.workspace_bytes for each in found)
    if "deterministic" in limits:
        assert all(each.deterministic for each in found)
    if "strict_nonfinite" in limits:
        spreads = [Registry.default()[each.solver_id].spreads_nonfinite(problem, each.config) for each in found]
        assert not any(spreads)


@given(problem=problems())
@example(problem=NEAR)
@settings(max_examples=20)
def test_any_problem_has_an_order_of_candidates_that_serve_it(problem: ProblemDescription) -> None:
    """With the model that ships, whatever the problem."""
    with miofind.Handle(described(H200.identity), database=":memory:") as handle:
        found = miofind.find_solutions(problem, options=FAST, handle=handle)
        assert found
        for solution in found:
            handle.registry[solution.solver_id].check_config(problem.flattened, handle.device, solution.config)
            assert math.isfinite(solution.time_ms)
            assert solution.time_ms > 0
            assert solution.confidence is None or 0 <= solution.confidence <= 1
        times = [solution.time_ms for solution in found]
        assert times == sorted(times)


def test_solvers_far_behind_are_asked_where_they_are_alone_or_another_order_is_asked_for(gpu: miofind.Handle) -> None:
    problem = ProblemDescription.convolution(
        x=(32, 256, 28, 28), w=(256, 256, 3, 3), padding=1, dtype="float16", layout="NHWC"
    )

    def solvers(options: FindOptions) -> set[str]:
        return {each.solver_id for each in miofind.find_solutions(problem, options=options, handle=gpu)}

    assert "ConvDirectTiled" not in solvers(FAST)
    assert solvers(replace(FAST, only="ConvDirectTiled")) == {"ConvDirectTiled"}
    assert "ConvDirectTiled" in solvers(replace(FAST, order="workspace"))
    plan = make_plan(problem, FAST, gpu, trusts_own=True)
    broken = [each.candidate for each in plan.candidates if each.solver.id != "ConvDirectTiled"]
    rows = [row_of(Outcome(candidate=each, status=Status.CRASHED), gpu.registry) for each in broken]
    gpu.database.record(gpu.device.identity, problem.network_config, rows)
    gpu.forget_answers(problem.network_config)
    assert "ConvDirectTiled" in solvers(FAST), "those that it is far behind failed here"
