"""The answer is a function of the set of measurements."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from helpers.finddb import finddb_entries as made
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, VERSIONS, at, row, scope
from hypothesis import given, settings
from hypothesis import strategies as st

from miofind.finddb import MEMORY, Answer, Row, Scope, Store, environment_id, ties_of_best
from miofind.finddb.ranking import best_rows, rank, release_rows, usable_rows, widest_scopes, with_failures
from miofind.finddb.validation import checked_row


def answered(*rows: Row, scopes: tuple[Scope, ...] = ()) -> Answer:
    """The answer to rows recorded one after another."""
    with Store(MEMORY) as store:
        for item in rows:
            store.record(DEVICE, PROBLEM, [item])
        for considered in scopes:
            store.record(DEVICE, PROBLEM, scope=considered)
        answer = store.answer(DEVICE, PROBLEM)
        assert answer is not None
        return answer


def solver_ids(answer: Answer) -> list[str]:
    return [row.solver_id for row in answer.rows]


def test_rows_go_by_time():
    assert solver_ids(answered(row("C", time_ms=3.0), row("A", time_ms=1.0), row("B", time_ms=2.0))) == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"workspace_bytes": 0}, {"workspace_bytes": 1}),
        ({"max_error": 1e-7}, {"max_error": 2e-7}),
        ({"max_error": 1e-7}, {"max_error": None}),
        ({"created_at": at(1)}, {"created_at": at(2)}),
        ({"workspace_bytes": 0, "max_error": 1.0}, {"workspace_bytes": 1, "max_error": 0.0}),
    ],
    ids=["workspace", "error", "known error", "age", "workspace before error"],
)
def test_ties_within_one_percent(slower, faster):
    assert solver_ids(answered(row("A", time_ms=1.009, **slower), row("B", time_ms=1.0, **faster))) == ["A", "B"]
    assert solver_ids(answered(row("A", time_ms=1.011, **slower), row("B", time_ms=1.0, **faster))) == ["B", "A"]


def test_ties_do_not_chain():
    rows = [
        row("A", time_ms=1.0, workspace_bytes=3),
        row("B", time_ms=1.008, workspace_bytes=2),
        row("C", time_ms=1.016, workspace_bytes=1),
    ]
    assert solver_ids(answered(*rows)) == ["B", "A", "C"]


def test_the_newest_row_of_a_configuration_stands():
    assert [row.time_ms for row in answered(row(time_ms=1.0), row(time_ms=2.0)).rows] == [2.0]


def test_more_samples_stand_among_rows_of_one_instant():
    now = {"created_at": at(1)}
    assert [
        r.time_ms for r in answered(row(time_ms=1.0, samples=9, **now), row(time_ms=2.0, samples=3, **now)).rows
    ] == [1.0]


@pytest.mark.parametrize("status", ["crashed", "wrong_result", "compile_failed", "launch_failed", "timed_out"])
def test_a_later_failure_displaces_a_usable_row(status):
    assert solver_ids(answered(row("A"), row("B"), row("A", status=status, time_ms=None))) == ["B"]


def test_a_cut_off_row_supersedes_no_full_measurement():
    full = row(time_ms=3.0, samples=45)
    cut = row(time_ms=2.9, samples=1, status="cut_off")
    assert [row.time_ms for row in answered(full, cut).rows] == [3.0]
    assert [row.time_ms for row in answered(full, cut, replace(cut, time_ms=2.8)).rows] == [3.0]
    assert [row.time_ms for row in answered(cut, full).rows] == [3.0]
    assert [row.time_ms for row in answered(cut, replace(cut, time_ms=2.8)).rows] == [2.8]


def test_a_cut_off_row_supersedes_what_is_of_other_versions_or_contended_or_before_a_failure():
    full = row(time_ms=3.0, environment=environment_id(VERSIONS), created_at=at(1))
    cut = row(time_ms=2.9, status="cut_off", environment=environment_id(VERSIONS), created_at=at(9))
    elsewhere = replace(cut, environment=environment_id(VERSIONS | {"driver": "14.0"}), created_at=at(5))
    failed = row(status="wrong_result", time_ms=None, created_at=at(5))
    assert usable_rows([full, elsewhere]) == [elsewhere]
    assert usable_rows([full, elsewhere, cut]) == [full]
    assert usable_rows([replace(full, contended=True), cut]) == [cut]
    assert usable_rows([full, replace(cut, contended=True)]) == [full]
    assert usable_rows([full, failed, cut]) == [cut]


def test_ties_of_the_best_are_the_newest_verdicts_else_those_within_one_percent():
    rows = [row(name, time_ms=time_ms, created_at=at(1)) for name, time_ms in (("A", 1.02), ("B", 1.0), ("C", 1.009))]
    judged = made.verdict("A:{}", "B:{}", created_at=at(2))
    assert {tie.solver_id for tie in ties_of_best(rows)} == {"B", "C"}
    assert [tie.solver_id for tie in ties_of_best(rows, [judged])] == ["A", "B"]
    assert {tie.solver_id for tie in ties_of_best(rows, [replace(judged, created_at=at(0))])} == {"B", "C"}
    assert ties_of_best([], [judged]) == []


def test_a_failure_of_the_moment_displaces_nothing():
    assert solver_ids(answered(row("A"), row("A", status="out_of_memory", time_ms=None))) == ["A"]


@pytest.mark.parametrize("status", ["crashed", "wrong_result", "timed_out"])
def test_of_one_instant_a_failure_counts(status):
    now = {"created_at": "2026-01-01T00:00:00.000000Z"}
    screened, failed = row("A", samples=3, **now), row("A", status=status, time_ms=None, samples=0, **now)
    for order in ((screened, failed), (failed, screened)):
        assert solver_ids(answered(*order, row("B", time_ms=9.0))) == ["B"]


def test_rows_of_earlier_code_count_no_longer():
    old = [row("A", f'{{"tile":{i}}}', time_ms=0.1 + i / 10, source_hash="ab") for i in range(6)]
    new = row("A", '{"tile":9}', time_ms=1.2, source_hash="cd")
    assert [r.source_hash for r in answered(*old, new, row("B", time_ms=2.0)).rows if r.solver_id == "A"] == ["cd"]


def test_the_newest_verdict_decides_who_leads():
    def led(*rows: Row) -> list[str]:
        with Store(MEMORY) as store:
            answer = store.record(DEVICE, PROBLEM, rows, verdict=made.verdict("B:{}", "A:{}"))
            return solver_ids(answer)

    a, b, c = row("A", "{}", time_ms=1.0), row("B", "{}", time_ms=1.005), row("C", "{}", time_ms=1.2)
    assert led(a, b, c) == ["B", "A", "C"]
    assert led(a, b, c, row("D", time_ms=0.5))[0] == "D", "it did not take part"
    assert led(a, replace(b, contended=True)) == ["A", "B"]


def test_a_verdict_is_silent_on_rows_that_came_after_it():
    with Store(MEMORY) as store:
        rows = [row("A", "{}", time_ms=1.0), row("B", "{}", time_ms=1.005)]
        store.record(DEVICE, PROBLEM, rows, verdict=made.verdict("B:{}", "A:{}"))
        assert solver_ids(store.answer(DEVICE, PROBLEM)) == ["B", "A"]
        store.record(DEVICE, PROBLEM, [row("A", "{}", time_ms=0.9)])
        assert solver_ids(store.answer(DEVICE, PROBLEM)) == ["A", "B"]


def test_rows_that_were_cut_off_are_usable():
    assert solver_ids(answered(row("A", status="cut_off", time_ms=2.0), row("B"))) == ["B", "A"]


def test_an_answer_keeps_three_of_each_solver_and_four_in_all():
    fast = [row("Fast", f'{{"tile":{i}}}', time_ms=1.0 + i) for i in range(10)]
    slow = [row("Slow", f'{{"tile":{i}}}', time_ms=100.0 + i) for i in range(10)]
    ids = solver_ids(answered(*fast, *slow))
    assert ids.count("Fast") == 4
    assert ids.count("Slow") == 3


def test_an_answer_keeps_the_best_row_within_each_limit():
    rows = [row("A", f'{{"tile":{i}}}', time_ms=1.0 + i, workspace_bytes=1000, deterministic=False) for i in range(20)]
    rows += [row("A", '{"tile":98}', time_ms=50.0, workspace_bytes=10, deterministic=False)]
    rows += [row("A", '{"tile":99}', time_ms=60.0, workspace_bytes=2000)]
    found = answered(*rows).rows
    assert next(row.time_ms for row in found if row.workspace_bytes <= 10) == 50.0
    assert next(row.time_ms for row in found if row.deterministic) == 60.0


@pytest.mark.parametrize("kept", [best_rows, release_rows], ids=["answer", "release"])
@given(
    rows=st.lists(made.rows, max_size=40),
    limit=st.sampled_from([0, 256, 1 << 20]),
    strict=st.booleans(),
    error=st.sampled_from([0.0, 1e-6, 1e-5, math.inf]),
    solver_id=st.sampled_from(["", "ConvA", "ConvB"]),
)
def test_limits_find_in_the_kept_rows_what_they_find_in_all(kept, rows, limit, strict, error, solver_id):
    def first(candidates):
        passing = (
            r
            for r in candidates
            if r.workspace_bytes <= limit
            and r.deterministic >= strict
            and (error == math.inf or (r.max_error is not None and r.max_error <= error))
            and r.solver_id.startswith(solver_id)
        )
        return next(passing, None)

    assert first(kept(rows)) == first(rank(usable_rows(rows)))


@given(rows=st.lists(made.rows, max_size=20), seed=st.integers(0, 9))
def test_ranking_ignores_the_order_of_rows(rows, seed):
    rows = [checked_row(DEVICE, PROBLEM, row) for row in rows]
    shuffled = random.Random(seed).sample(rows, len(rows))
    assert best_rows(shuffled) == best_rows(rows)


@given(scopes=st.lists(made.scopes, max_size=8), request=made.scopes)
def test_dropped_scopes_cover_nothing_more(scopes, request):
    kept = widest_scopes(scopes)
    assert any(s.covers(request) for s in kept) == any(s.covers(request) for s in scopes)
    assert not any(a.covers(b) for a in kept for b in kept if a is not b)


def test_many_finds_of_some_solvers_do_not_push_out_a_find_of_all():
    filters = [{"solvers": ["A"], "n": i} for i in range(12)]
    some = [scope("A", effort="search", filters=each, created_at=at(2 + i)) for i, each in enumerate(filters)]
    answer = answered(row("A"), scopes=(scope("A", "B", created_at=at(1)), *some))
    assert answer.covers(scope("A", "B"))


def test_of_many_finds_of_some_solvers_those_asked_alike_are_joined():
    some = [scope(name, filters={"solvers": [name]}, created_at=at(1 + i)) for i, name in enumerate("ABCDE")]
    strict = [replace(each, filters={**each.filters, "deterministic": True}, effort="search") for each in some]
    kept = widest_scopes([*some, *strict])
    assert [sorted(each.solvers) for each in kept] == [[*"ABCDE"]] * 2
    assert [each.filters.get("deterministic", False) for each in kept].count(True) == 1
    assert widest_scopes(kept) == kept


def test_finds_of_all_solvers_are_never_joined():
    """Those of which a solver had failed lost their ids, and became one find of none."""
    wide = scope("A", "any error bound", created_at=at(1))
    whole = scope("A", "B", created_at=at(2))
    some = [scope(f"C{i}", filters={"solvers": [f"C{i}"], "n": i}, created_at=at(3 + i)) for i in range(9)]
    failed = row("F", status="crashed", time_ms=None)
    with_f = [replace(each, solvers={**each.solvers, "F": failed.solver_version}) for each in (wide, whole)]
    kept = widest_scopes(with_failures([*with_f, *some], [row("A"), failed]))
    assert [set(each.solvers) - {"F"} for each in kept[:2]] == [{"A", "B"}, {"A", "any error bound"}]
    assert not any("solvers" in each.filters for each in kept[:2])


def test_a_release_keeps_the_best_row_of_each_kind():
    rows = [row("A", config=f'{{"tile":{i}}}', time_ms=1.0 + i) for i in range(6)]
    kept = release_rows(rows, kind=lambda row: row.config == rows[4].config)
    assert [each.time_ms for each in kept] == [1.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("wider", "narrower"),
    [
        (scope("A", "B"), scope("A")),
        (scope("A"), scope("A", filters={"deterministic": True})),
        (scope("A"), scope("A", workspace_limit_bytes=5)),
        (scope("A", workspace_limit_bytes=5), scope("A", workspace_limit_bytes=4)),
        (scope("A", effort="search"), scope("A")),
        (scope("A"), scope("A", effort="likely")),
        (scope("A", complete=False), scope("A", effort="likely", complete=False)),
        (scope("A"), scope("A", complete=False)),
    ],
    ids=["solvers", "filters", "no limit", "limit", "effort", "likely", "both ended early", "complete"],
)
def test_scopes_cover(wider, narrower):
    assert wider.covers(narrower)
    assert wider.covers(wider)
    assert not narrower.covers(wider)
    assert answered(scopes=(narrower, wider)).scopes[0].solvers == wider.solvers
    assert len(answered(scopes=(wider, narrower)).scopes) == 1


@pytest.mark.parametrize("complete", [True, False])
def test_a_search_that_was_ended_early_covers_no_find_of_the_defaults(complete):
    cut_off = scope("A", effort="search", complete=False)
    assert not cut_off.covers(scope("A", complete=complete))
    assert not cut_off.covers(scope("A", effort="likely", complete=complete))
    assert cut_off.covers(cut_off)
    assert scope("A", effort="search").covers(cut_off)
    assert not scope("A").covers(cut_off)


def test_a_scope_of_another_version_or_filter_covers_nothing():
    assert not Scope(solvers={"A": 2}).covers(Scope(solvers={"A": 1}))
    assert not scope("A", filters={"only": ["fft"]}).covers(scope("A", filters={"only": ["gemm"]}))


def test_an_answer_covers_what_one_of_its_scopes_does():
    answer = answered(row("A"), scopes=(scope("A", "B"), scope("C", workspace_limit_bytes=1)))
    assert answer.covers(scope("B"))
    assert not answer.covers(scope("B", "C"))


@settings(max_examples=15)
@given(history=made.histories)
def test_a_stored_answer_is_the_one_its_rows_give(history):
    with Store(MEMORY) as store:
        store.add([history])
        assert store.check() == ()
        stored = store.history(history.device, history.network_config)
        if stored is not None:
            answer = store.answer(history.device, history.network_config)
            others = stored.scopes or stored.verdicts or not all(each.is_rival for each in stored.rows)
            if stored.rows and not others:
                assert answer is None, "times of other libraries alone are no answer"
                return
            assert list(answer.rows) == best_rows(stored.rows, stored.verdicts)
            assert list(answer.scopes) == widest_scopes(with_failures(stored.scopes, stored.rows))


def test_ranked_rows_are_a_sequence():
    rows = answered(row("A", time_ms=1.0), row("B", time_ms=2.0), row("C", time_ms=3.0)).rows
    assert [r.solver_id for r in rows[1:]] == ["B", "C"]
    assert rows[-1].solver_id == "C"
    assert rows[0] is rows[0]
    assert len(rows) == 3
    assert len({rows}) == 1
    with pytest.raises(IndexError):
        rows[3]
