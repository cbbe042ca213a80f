"""Finds of the likeliest candidates: which few they are, what is kept of it, and what later requests make of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.runs.immediate_models import H200

import miofind
from miofind.core.problem import ProblemDescription
from miofind.device.device import Library
from miofind.errors import InvalidOptionError
from miofind.find import likely, measuring
from miofind.find.immediate import answer
from miofind.find.immediate.answer import predicted
from miofind.find.immediate.devices import described
from miofind.find.immediate.shipped import ranker_of
from miofind.find.likely import FEW, FIRST, MOST, NEAR, REACH, likely_places, likely_plan
from miofind.find.lookup import records
from miofind.find.lookup.scopes import Coverage
from miofind.find.plan import make_plan
from miofind.finddb import MEMORY
from miofind.options import FindOptions
from miofind.runtime.solution import Source
from miofind.solver.registry import Registry
from miofind.solvers.cpu.direct import ConvCpuDirect
from miofind.solvers.cpu.im2col_gemm import ConvCpuIm2colGemm
from miofind.solvers.vendor.cudnn import ConvCudnn
from miofind.suites import SuiteProblem
from miofind.tune.planning import known_solutions, tuning_plans
from miofind.tune.service import TuneEnd, TuneOptions, tasks_of, tune
from miofind.tune.values import TuneStatus

LIKELY = FindOptions(likely=True)
PROBLEM = ProblemDescription.convolution(x=(2, 4, 9, 8), w=(6, 4, 3, 3), padding=1)
NETWORKS = (
    ProblemDescription.convolution(x=(31, 64, 52, 52), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC"),
    ProblemDescription.convolution(x=(31, 256, 26, 26), w=(512, 256, 1, 1), dtype="bfloat16", layout="NHWC"),
    ProblemDescription.convolution(x=(31, 96, 26, 26), w=(96, 1, 3, 3), padding=1, groups=96, dtype="float16"),
)
FUSED = ProblemDescription.convolution(
    x=(31, 64, 52, 52), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC", epilogue="bias.relu"
)


@pytest.fixture
def h200() -> Iterator[miofind.Handle]:
    """An H200 that is not there, with the model that ships."""
    with miofind.Handle(described(H200.identity), database=MEMORY) as handle:
        yield handle


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[miofind.Handle]:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with miofind.Handle("cpu", database=tmp_path / "found.db", strict=True) as handle:
        yield handle


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One candidate is measured of each problem, as if the others were far behind."""
    monkeypatch.setattr(likely, "FIRST", 1)
    monkeypatch.setattr(likely, "MOST", 1)


@pytest.mark.parametrize("problem", [*NETWORKS, FUSED], ids=str)
def test_the_first_predictions_are_measured_and_cudnn_is_not_asked(
    problem: ProblemDescription, h200: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranker_of(h200.device).reaches(problem.bare)
    asked: list[object] = []
    monkeypatch.setattr(ConvCudnn, "default_configs", lambda *given: asked.append(given) or ())
    plan = likely_plan(problem, LIKELY, h200, left_out={})
    monkeypatch.setattr(answer, "_worth_asking", lambda *given: None)  # it asks few
    expected = predicted(problem, FindOptions(), h200)
    assert FIRST <= len(plan.candidates) <= MOST
    places = likely_places([(solution.solver_id, solution.time_ms) for solution in expected])
    assert [p.candidate.id for p in plan.candidates] == [expected[place].id for place in places]
    assert plan.considered.keys() >= {ConvCudnn.id}
    assert plan.is_part
    assert not asked


def test_other_solvers_come_before_more_of_the_first_ones() -> None:
    near, far = 0.99 * NEAR, 0.99 * REACH
    same = [("A", 1.0)] * FIRST
    assert likely_places([]) == []
    assert likely_places(same[:2]) == [0, 1]
    assert likely_places([("A", 0.0)] * FIRST + [("B", 0.0), ("A", 1.0)]) == list(range(FIRST + 1)), (
        "estimates may be 0"
    )
    assert likely_places([*same, *[("A", near)] * MOST]) == list(range(MOST)), "else what is near"
    assert likely_places([*same, *[("A", 1.01 * NEAR)] * MOST]) == list(range(FIRST))
    others = [*same, *[("A", near)] * MOST, ("B", far), ("B", far), ("C", far), ("D", far)]
    assert likely_places(others) == [*range(FIRST), FIRST + MOST]
    assert likely_places([("A", 1.0), ("B", 1.0), ("B", far), ("C", far)]) == [0, 1, 3]
    assert likely_places([*same, ("B", 1.01 * REACH)]) == list(range(FIRST))
    assert likely_places([*same, ("A+Pointwise", far), ("B+Pointwise", far), ("B", far)]) == [*range(FIRST), FIRST + 1]


def test_what_failed_before_gives_its_place_to_the_next(h200: miofind.Handle) -> None:
    whole = [p.candidate.id for p in likely_plan(NETWORKS[0], LIKELY, h200, left_out={}).candidates]
    left = likely_plan(NETWORKS[0], LIKELY, h200, left_out={whole[0]: "failed here before"})
    assert left.refusals[whole[0]] == "failed here before"
    assert whole[0] not in {p.candidate.id for p in left.candidates}
    assert len(left.candidates) >= FIRST


def test_a_problem_that_no_model_knows_is_tried_with_cudnn_too(
    h200: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likely.ranker_of(h200.device), "model", None)
    plan = likely_plan(NETWORKS[0], LIKELY, h200, left_out={})
    by_cudnn = [p for p in plan.candidates if p.solver.library is Library.CUDNN]
    possible = [p for p in make_plan(NETWORKS[0], FindOptions(), h200).candidates if p.solver.library is Library.CUDNN]
    assert [p.candidate.id for p in by_cudnn] == [p.candidate.id for p in possible[:2]]
    assert FIRST <= len(plan.candidates) - len(by_cudnn) <= MOST


@pytest.mark.parametrize(("layout", "is_asked"), [("NCHW", True), ("NHWC", False)])
def test_tf32_channels_first_is_tried_with_cudnn_too(h200: miofind.Handle, layout: str, is_asked: bool) -> None:
    problem = ProblemDescription.convolution(
        x=(31, 64, 52, 52), w=(64, 64, 3, 3), padding=1, dtype="float32", math="tf32", layout=layout
    )
    assert ranker_of(h200.device).reaches(problem)
    plan = likely_plan(problem, LIKELY, h200, left_out={})
    by_cudnn = [p for p in plan.candidates if p.solver.library is Library.CUDNN]
    assert bool(by_cudnn) == is_asked
    assert FIRST <= len(plan.candidates) - len(by_cudnn) <= MOST


def test_a_fused_problem_is_planned_without_its_bare_one(h200: miofind.Handle) -> None:
    (plan,) = tuning_plans(FUSED, TuneOptions(find=LIKELY), h200)
    assert {p.problem for p in plan.candidates} == {FUSED}
    assert len(tuning_plans(FUSED, TuneOptions(find=FindOptions()), h200)) == 2


def test_of_light_problems_the_first_two_are_measured(cpu: miofind.Handle) -> None:
    heavy = ProblemDescription.convolution(x=(4, 8, 30, 30), w=(8, 8, 3, 3), padding=1)
    requests = [SuiteProblem(suite="t", layer="t", problem=each, count=1) for each in (PROBLEM, heavy)]
    options = TuneOptions(find=LIKELY)
    light, other = tasks_of(requests, [cpu], options, light_share=0.5)
    assert (light.options, other.options) == (replace(options, few=True), None)
    whole = tasks_of(requests, [cpu], TuneOptions(find=FindOptions()), light_share=0.5)
    assert [task.options for task in whole] == [None, None], "there are no few of all"
    (plan,) = tuning_plans(PROBLEM, replace(options, few=True), cpu)
    every = likely_plan(PROBLEM, LIKELY, cpu, left_out={}).candidates
    assert len(every) > FEW
    assert plan.candidates == every[:FEW]
    assert plan.is_part
    assert tune(requests, [cpu], options, light_share=0.5).end is TuneEnd.COMPLETE
    (history,) = cpu.database.histories(cpu.device.identity, PROBLEM.network_config)
    assert {row.candidate for row in history.rows} == {planned.candidate.id for planned in every[:FEW]}
    assert known_solutions(PROBLEM, options, cpu)
    assert not known_solutions(PROBLEM, TuneOptions(find=FindOptions()), cpu)


def test_a_plan_that_is_there_is_measured_unless_something_failed_since(
    cpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = likely_plan(PROBLEM, LIKELY, cpu, left_out={})
    one = replace(plan, candidates=plan.candidates[-1:], is_part=True)
    found = measuring.measure(PROBLEM, LIKELY, cpu, likeliest=one)
    assert {s.id for s in found} == {one.candidates[0].candidate.id}
    monkeypatch.setattr(measuring, "_left_out", lambda *_: {one.candidates[0].candidate.id: "failed here before"})
    found = measuring.measure(PROBLEM, LIKELY, cpu, likeliest=one)
    assert one.candidates[0].candidate.id not in {s.id for s in found if s.source is Source.MEASURED}


def test_few_are_measured_and_the_rest_by_a_later_tuning(one: None, cpu: miofind.Handle) -> None:
    every = {p.candidate.id for p in make_plan(PROBLEM, FindOptions(), cpu).candidates}
    found = miofind.find_solutions(PROBLEM, options=LIKELY, handle=cpu)
    assert {s.source for s in found} == {Source.MEASURED}
    first = {s.id for s in found}
    assert len(first) == 1
    assert first < every

    answer = miofind.find_solutions(PROBLEM, options=FindOptions(on_miss="error"), handle=cpu)
    assert {s.id for s in answer} == first
    assert answer[0].solution_list.gaps.likely_alone
    notes = cpu.database.rechecks(cpu.device.identity)
    assert [note.reason for note in notes] == ["the likeliest alone were measured"]
    again = miofind.find_solutions(PROBLEM, options=FindOptions(likely=True, on_miss="error"), handle=cpu)
    assert not again[0].solution_list.gaps.likely_alone, "no more was asked for"

    assert known_solutions(PROBLEM, TuneOptions(find=LIKELY), cpu)
    assert not known_solutions(PROBLEM, TuneOptions(find=FindOptions()), cpu)
    request = SuiteProblem(suite="t", layer="t", problem=PROBLEM, count=1)
    summary = tune([request], [cpu], TuneOptions(find=FindOptions()))
    assert summary.results[0].status is TuneStatus.TUNED
    answer = miofind.find_solutions(PROBLEM, options=FindOptions(on_miss="error"), handle=cpu)
    assert {s.id for s in answer} > first
    assert not answer[0].solution_list.gaps.likely_alone
    assert not cpu.database.rechecks(cpu.device.identity)
    again = FindOptions(likely=True, find_mode="normal")
    assert {s.id for s in miofind.find_solutions(PROBLEM, options=again, handle=cpu)} > first
    assert not cpu.database.rechecks(cpu.device.identity), "what was found in full stays so"
    assert known_solutions(PROBLEM, TuneOptions(find=LIKELY), cpu), "all are more than the likeliest"


def test_a_search_goes_beyond_the_likeliest(cpu: miofind.Handle) -> None:
    miofind.find_solutions(PROBLEM, options=LIKELY, handle=cpu)
    search = FindOptions(tuning=True, trials=4)
    assert records.look_up(PROBLEM, search, cpu, coverage=Coverage.ALL) is None
    assert records.look_up(PROBLEM, search, cpu) is None, "its rows are no search's"


def test_where_none_of_the_likeliest_works_all_are_measured(
    one: None, cpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measuring.likely_plan

    def none_works(*arguments: object, **keywords: object) -> object:
        plan = real(*arguments, **keywords)  # type: ignore[arg-type]
        return plan.without({p.candidate.id: "fails" for p in plan.candidates})

    monkeypatch.setattr(measuring, "likely_plan", none_works)
    found = miofind.find_solutions(PROBLEM, options=LIKELY, handle=cpu)
    assert {s.source for s in found} == {Source.MEASURED}
    assert not found[0].solution_list.gaps.likely_alone


def test_others_are_drawn_beside_the_likeliest(h200: miofind.Handle) -> None:
    every = {p.candidate.id for p in make_plan(NETWORKS[0], FindOptions(exclude=("cudnn",)), h200).candidates}
    plain = likely_plan(NETWORKS[0], LIKELY, h200, left_out={}).candidates
    draws = [
        likely_plan(NETWORKS[0], replace(LIKELY, seed=seed), h200, left_out={}, drawn=3).candidates
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    for drawn in draws:
        names = [planned.candidate.id for planned in drawn]
        assert drawn[: len(plain)] == plain
        assert len(set(names)) == len(names) == len(plain) + 3
        assert set(names) <= every
    whole = likely_plan(NETWORKS[0], LIKELY, h200, left_out={}, drawn=len(every))
    assert {planned.candidate.id for planned in whole.candidates} == every, "as many as there are"


def test_the_faster_are_drawn_more_often() -> None:
    times = {3: 1e-4, 5: 2e-4, 6: 1e-4}
    counts = Counter(place for seed in range(2000) for place in likely._drawn_places(times, 1, str(seed)))
    assert counts[3] == pytest.approx(2000 * 4 / 9, rel=0.1)
    assert counts[6] == pytest.approx(2000 * 4 / 9, rel=0.1)
    assert counts[5] == pytest.approx(2000 * 1 / 9, rel=0.25)
    extreme = likely._drawn_places({0: 0.0, 1: 1e-300, 2: 1e300}, 2, "seed")
    assert extreme == [0, 1]
    far = Counter(
        place for seed in range(600) for place in likely._drawn_places({1: 60.0, 2: 60.0, 3: 60.0}, 1, f"{seed}")
    )
    assert min(far.values()) >= 150, "those far behind draw alike, too"
    both = [likely._drawn_places(times, 2, str(seed)) for seed in range(50)]
    assert all(places in ([3, 5], [3, 6], [5, 6]) for places in both), "in their order"


def test_problems_draw_for_themselves(h200: miofind.Handle) -> None:
    seeds = []

    def noted(times: Mapping[int, float], count: int, seed: str) -> list[int]:
        seeds.append(seed)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likely, "_drawn_places", noted)
        for problem in NETWORKS:
            likely_plan(problem, LIKELY, h200, left_out={}, drawn=1)
    assert len(set(seeds)) == len(NETWORKS)


def test_what_failed_before_leaves_the_rest_of_a_draw(cpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = likely_plan(PROBLEM, LIKELY, cpu, left_out={}, drawn=1)
    failed = plan.candidates[0].candidate.id
    monkeypatch.setattr(measuring, "_left_out", lambda *_: {failed: "failed here before"})
    measuring.measure(PROBLEM, LIKELY, cpu, likeliest=plan)
    (history,) = cpu.database.histories(cpu.device.identity, PROBLEM.network_config)
    assert {row.candidate for row in history.rows} == {p.candidate.id for p in plan.candidates[1:]}


def test_a_tuning_measures_what_it_draws(one: None, cpu: miofind.Handle) -> None:
    request = SuiteProblem(suite="t", layer="t", problem=PROBLEM, count=1)
    summary = tune([request], [cpu], TuneOptions(find=LIKELY, drawn=1))
    assert summary.end is TuneEnd.COMPLETE
    assert scopes(cpu) == {"likely"}
    (history,) = cpu.database.histories(cpu.device.identity, PROBLEM.network_config)
    assert len(history.rows) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"drawn": 2}, "candidates are drawn beside the likeliest alone"),
        ({"drawn": 2, "find": LIKELY, "stored": True}, "stored measures no other configurations, and draws none"),
        ({"drawn": -1, "find": LIKELY}, "drawn=-1 must be a whole number of at least 0"),
        ({"drawn": 1.5, "find": LIKELY}, "drawn=1.5 must be a whole number"),
    ],
    ids=str,
)
def test_candidates_are_drawn_beside_the_likeliest_alone(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidOptionError, match=told):
        TuneOptions(**options)


@pytest.mark.parametrize("searching", [{"tuning": True}, {"find_enforce": "search"}], ids=str)
def test_few_and_many_at_once_are_refused(searching: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError, match="likely measures few candidates and a search many"):
        FindOptions(likely=True, **searching)  # type: ignore[arg-type]


def scopes(handle: miofind.Handle, problem: ProblemDescription = PROBLEM) -> set[str]:
    histories = handle.database.histories(handle.device.identity, problem.network_config)
    return {scope.effort for history in histories for scope in history.scopes}


def test_the_likeliest_of_all_answer_no_request_of_some(one: None, cpu: miofind.Handle) -> None:
    best, *_ = miofind.find_solutions(PROBLEM, options=LIKELY, handle=cpu)
    narrower = (
        FindOptions(likely=True, exclude=(best.solver_id,)),
        FindOptions(likely=True, workspace_limit_bytes=1 << 30),
        FindOptions(exclude=(best.solver_id,)),
        FindOptions(deterministic=True),
    )
    for options in narrower:
        assert known_solutions(PROBLEM, TuneOptions(find=options), cpu) is None
    assert records.look_up(PROBLEM, narrower[0], cpu) is None
    assert records.look_up(PROBLEM, narrower[2], cpu) is None
    assert records.look_up(PROBLEM, FindOptions(workspace_limit_bytes=1 << 30), cpu), "torch's limit is no filter"


def test_a_plan_that_leaves_nothing_out_is_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are no more solvers than are measured at least."""
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    registry = Registry([ConvCpuDirect, ConvCpuIm2colGemm])
    with miofind.Handle("cpu", database=MEMORY, strict=True, registry=registry) as cpu:
        miofind.find_solutions(PROBLEM, options=LIKELY, handle=cpu)
        assert scopes(cpu) == {"defaults"}
        assert not cpu.database.rechecks(cpu.device.identity)
        assert known_solutions(PROBLEM, TuneOptions(find=FindOptions()), cpu)


def test_a_fused_problem_s_full_find_measures_the_bare_one_in_full(one: None, cpu: miofind.Handle) -> None:
    fused = ProblemDescription.convolution(x=(2, 4, 9, 8), w=(6, 4, 3, 3), padding=1, epilogue="bias.relu")
    miofind.find_solutions(fused.bare, options=LIKELY, handle=cpu)
    assert scopes(cpu, fused.bare) == {"likely"}
    assert len(tuning_plans(fused, TuneOptions(find=FindOptions()), cpu)) == 2
    miofind.find_solutions(fused, handle=cpu)
    assert "defaults" in scopes(cpu, fused.bare)


def test_a_shipped_full_answer_stands_before_the_user_s_likeliest(
    one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with miofind.Handle("cpu", database=tmp_path / "shipped.db") as handle:
        full = {s.id for s in miofind.find_solutions(PROBLEM, handle=handle)}
    with miofind.Handle("cpu", database=tmp_path / "user.db") as handle:
        miofind.find_solutions(PROBLEM, options=LIKELY, handle=handle)
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(tmp_path / "shipped.db"))
    with miofind.Handle("cpu", database=tmp_path / "user.db") as handle:
        found = miofind.find_solutions(PROBLEM, options=FindOptions(on_miss="error"), handle=handle)
    assert {s.id for s in found} == full
    assert not found[0].solution_list.gaps.likely_alone


def test_a_full_find_that_a_budget_ended_is_told_of_beside_the_likeliest(one: None, cpu: miofind.Handle) -> None:
    miofind.find_solutions(PROBLEM, options=LIKELY, handle=cpu)
    cut = FindOptions(find_mode="normal", time_budget_s=1e-6)
    miofind.find_solutions(PROBLEM, options=cut, handle=cpu)
    gaps = miofind.find_solutions(PROBLEM, handle=cpu)[0].solution_list.gaps
    assert (gaps.ended_early, gaps.likely_alone) == (True, False)


def test_notes_of_a_limited_find_are_none_that_stay(one: None, cpu: miofind.Handle) -> None:
    miofind.find_solutions(PROBLEM, options=FindOptions(likely=True, workspace_limit_bytes=1 << 28), handle=cpu)
    assert not cpu.database.rechecks(cpu.device.identity)
    cpu.database.queue_recheck(cpu.device.identity, PROBLEM.network_config, "measured with other versions")
    again = FindOptions(likely=True, find_mode="normal")
    miofind.find_solutions(PROBLEM, options=again, handle=cpu)
    assert [note.reason for note in cpu.database.rechecks(cpu.device.identity)] == ["the likeliest alone were measured"]
