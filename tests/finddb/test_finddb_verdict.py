"""Verdicts of races, and rows measured under contention: kept, moved about, and never mistaken for more."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from helpers.finddb import finddb_entries as made
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, VERSIONS, at, contents, row, scope, verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from miofind.errors import DatabaseError
from miofind.finddb import MEMORY, Comparison, History, Prune, RefusedEntryError, Store, environment_id
from miofind.finddb.ranking import best_rows, failed_rows, superseded_rows
from miofind.finddb.validation import checked_row


@pytest.fixture
def store():
    with Store(MEMORY) as opened:
        yield opened


def times(store: Store) -> list[float]:
    return [row.time_ms for row in store.answer(DEVICE, PROBLEM).rows]


def test_a_verdict_keeps_all_its_fields(any_store):
    given_one = verdict("ConvA:{}", 'ConvB:{"tile":1}', low=1, high=1.5)
    any_store.record(DEVICE, PROBLEM, [row()], verdict=given_one, environment=VERSIONS)
    (kept,) = any_store.history(DEVICE, PROBLEM).verdicts
    assert kept.id
    assert kept.created_at == any_store.history(DEVICE, PROBLEM).rows[0].created_at
    assert kept.environment == environment_id(VERSIONS)
    assert replace(kept, id="", created_at="", environment="") == given_one
    assert type(kept.comparisons[0].low) is float
    assert any_store.stats().verdicts == 1
    assert any_store.check() == ()


def test_a_verdict_alone_is_no_answer_and_no_harm(any_store):
    any_store.record(DEVICE, PROBLEM, verdict=verdict())
    assert len(any_store.answer(DEVICE, PROBLEM).rows) == 0
    assert any_store.check() == ()
    assert any_store.clean(DEVICE, PROBLEM) == 0
    assert any_store.stats().verdicts == 0


def test_contention_and_dropped_samples_are_kept(any_store):
    any_store.record(DEVICE, PROBLEM, [row(contended=True, dropped_samples=3), row("ConvB", dropped_samples=1)])
    by_solver = {row.solver_id: row for row in any_store.answer(DEVICE, PROBLEM).rows}
    assert (by_solver["ConvA"].contended, by_solver["ConvA"].dropped_samples) == (True, 3)
    assert (by_solver["ConvB"].contended, by_solver["ConvB"].dropped_samples) == (False, 1)
    found = any_store.answer(DEVICE, PROBLEM).rows.columns("solver_id", "contended", "dropped_samples")
    assert sorted(found) == [("ConvA", True, 3), ("ConvB", False, 1)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"winner": ""}, "winner"),
        ({"winner": 5}, "winner=5"),
        ({"winner": "ConvA"}, "such as Solver:{}"),
        ({"winner": 'ConvA:{"b":1, "a":2}'}, "canonical"),
        ({"winner": "x" * 300 + ":{}"}, "200"),
        ({"ties": ()}, "the winner first"),
        ({"ties": ["ConvA:{}"]}, "the winner first"),
        ({"ties": ("ConvB:{}", "ConvA:{}")}, "the winner first"),
        ({"ties": ("ConvA:{}", "ConvA:{}")}, "each candidate once"),
        ({"ties": ("ConvA:{}", 7)}, "ties=7"),
        ({"comparisons": [1]}, "tuple of comparisons"),
        ({"comparisons": (1,)}, "comparisons=1"),
        ({"comparisons": (Comparison(candidate="ConvB", low=1.0, high=1.0),)}, "candidate"),
        ({"comparisons": (Comparison(candidate="ConvB:{}", low=2.0, high=1.0),)}, "0 < low <= high"),
        ({"comparisons": (Comparison(candidate="ConvB:{}", low=0.0, high=1.0),)}, "0 < low <= high"),
        ({"comparisons": (Comparison(candidate="ConvB:{}", low=None, high=1.0),)}, "0 < low <= high"),
        ({"comparisons": (Comparison(candidate="ConvB:{}", low=1.0, high=float("inf")),)}, "finite"),
        ({"comparisons": (Comparison(candidate="ConvB:{}", low=float("nan"), high=1.0),)}, "finite"),
        ({"comparisons": (Comparison(candidate="ConvB:{}", low="1", high=1.0),)}, "number"),
        ({"comparisons": (Comparison(candidate="ConvB:{}", low=1.0, high=1.0),) * 2}, "each candidate once"),
        ({"blocks": -1}, "blocks"),
        ({"blocks": True}, "blocks"),
        ({"protocol": "a\nb"}, "protocol"),
        ({"environment": "0123"}, "unknown"),
        ({"created_at": "today"}, "created_at"),
        ({"id": "0123"}, "altered"),
        ({"ties": ("ConvA:{}", *(f'ConvA:{{"{"x" * 900}":{n}}}' for n in range(30)))}, "at most 20000"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused_verdicts(store, changes, said):
    with pytest.raises(RefusedEntryError) as caught:
        store.record(DEVICE, PROBLEM, [row()], scope=scope(), verdict=replace(verdict(), **changes))
    assert said in str(caught.value)
    assert store.problems() == ()


@pytest.mark.parametrize("changes", [{"contended": 1}, {"contended": None}, {"dropped_samples": -1}])
def test_refused_rows(store, changes):
    with pytest.raises(RefusedEntryError):
        store.record(DEVICE, PROBLEM, [row(**changes)])


def test_the_newest_verdict_is_in_force_and_survives_pruning(any_store):
    any_store.record(DEVICE, PROBLEM, [row()], verdict=verdict("ConvA:{}"))
    any_store.record(DEVICE, PROBLEM, [row("ConvB")], verdict=verdict("ConvB:{}"), environment=VERSIONS)
    assert [item.winner for item in any_store.history(DEVICE, PROBLEM).verdicts] == ["ConvA:{}", "ConvB:{}"]
    assert any_store.prune(Prune.FAILED) == 0
    assert any_store.stats().verdicts == 2
    any_store.prune(Prune.SUPERSEDED)
    assert [item.winner for item in any_store.history(DEVICE, PROBLEM).verdicts] == ["ConvB:{}"]
    assert any_store.environment(environment_id(VERSIONS)) == VERSIONS
    assert any_store.check() == ()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE verdict SET blocks = 31", "altered"),
        ("UPDATE verdict SET winner = 'ConvB:{}'", "the winner first"),
        ("UPDATE verdict SET ties = '5'", "cannot be read"),
        ("UPDATE verdict SET ties = '[[' ", "cannot be read"),
        ("UPDATE verdict SET comparisons = '[{\"low\":1}]'", "cannot be read"),
        ("UPDATE verdict SET environment = 'x'", "environment 'x' is unknown"),
        ("DROP TABLE verdict", "table verdict is missing"),
        ("ALTER TABLE measurement DROP COLUMN contended", "measurement.contended is missing"),
    ],
)
def test_check_finds(store, statement, said):
    store.record(DEVICE, PROBLEM, [row()], verdict=verdict())
    with store._database.write() as connection:
        connection.exec_driver_sql(statement)
    (finding,) = store.check()
    assert said in finding


def test_a_line_of_an_export_is_checked(store):
    store.record(DEVICE, PROBLEM, [row(contended=True, created_at=at(1))], verdict=verdict(created_at=at(1)))
    file = io.StringIO()
    store.export_jsonl(file)
    lines = file.getvalue().splitlines()
    assert '"contended":true' in lines[1]
    for old, new, said in (
        ('"blocks":30', '"blocks":31', "altered"),
        ('"ties":["ConvA:{}"]', '"ties":"ConvA:{}"', "no list"),
        ('"ties":["ConvA:{}"]', '"ties":[5]', "the winner first"),
        ('"high":1.05', '"height":1.05', "no comparison"),
        ('"high":1.05', '"high":1.0', "low <= high"),
        ('"comparisons":[{', '"comparisons":[5,{', "no comparison"),
        ('"winner":"ConvA:{}"', '"winners":"ConvA:{}"', "unknown to this release"),
    ):
        assert old in lines[2]
        with Store(MEMORY) as other:
            with pytest.raises(DatabaseError, match=f"^line 3: .*{said}"):
                other.import_jsonl(io.StringIO("\n".join([*lines[:2], lines[2].replace(old, new)])))
            assert other.problems() == ()


def test_a_verdict_whose_environment_is_missing_is_named(store):
    store.record(DEVICE, PROBLEM, verdict=verdict(), environment=VERSIONS)
    file = io.StringIO()
    store.export_jsonl(file)
    first, _, *rest = file.getvalue().splitlines()
    with Store(MEMORY) as other, pytest.raises(DatabaseError, match=r"line 2: environment .* has no line before"):
        other.import_jsonl(io.StringIO("\n".join([first, *rest])))


def test_a_contended_row_does_not_displace_an_uncontended_one(store):
    store.record(DEVICE, PROBLEM, [row(time_ms=5.0)])
    store.record(DEVICE, PROBLEM, [row(time_ms=1.0, contended=True)])
    assert times(store) == [5.0]
    store.record(DEVICE, PROBLEM, [row(time_ms=4.0)])
    assert times(store) == [4.0]


def test_contended_rows_lose_ties_alone(store):
    store.record(DEVICE, PROBLEM, [row("ConvA", time_ms=1.0, contended=True), row("ConvB", time_ms=1.009)])
    assert times(store) == [1.009, 1.0]
    store.record(DEVICE, PROBLEM, [row("ConvB", time_ms=9.0)])
    assert times(store) == [1.0, 9.0], "what disturbs a row does not make it fast"


def test_a_contended_row_stands_where_nothing_else_says_the_same(store):
    store.record(DEVICE, PROBLEM, [row("ConvA", time_ms=1.0), row("ConvB", status="crashed", time_ms=None)])
    newer = row("ConvA", time_ms=2.0, contended=True, solver_version=2)
    store.record(DEVICE, PROBLEM, [newer, row("ConvB", time_ms=3.0, contended=True)])
    assert times(store) == [2.0, 3.0]


def test_a_failure_under_contention_is_a_failure(store):
    store.record(DEVICE, PROBLEM, [row()])
    store.record(DEVICE, PROBLEM, [row(status="wrong_result", time_ms=None, contended=True)])
    assert times(store) == []


@given(rows=st.lists(made.rows, max_size=20))
def test_pruning_changes_no_answer(rows):
    rows = list({checked_row(DEVICE, PROBLEM, row).id: checked_row(DEVICE, PROBLEM, row) for row in rows}.values())
    for unwanted in (superseded_rows(rows), failed_rows(rows)):
        gone = {row.id for row in unwanted}
        assert best_rows([row for row in rows if row.id not in gone]) == best_rows(rows)


@settings(max_examples=10)
@given(one=st.lists(made.verdicts, max_size=4), two=st.lists(made.verdicts, max_size=4))
def test_merging_verdicts_is_idempotent_and_commutative(one, two):
    def filled(verdicts):
        store = Store(MEMORY)
        environments = {environment_id(VERSIONS): VERSIONS}
        store.add([History(device=DEVICE, network_config=PROBLEM, verdicts=tuple(verdicts), environments=environments)])
        return store

    with filled(one) as a, filled(two) as b, Store(MEMORY) as ab, Store(MEMORY) as ba:
        added = ab.merge(a) + ab.merge(b)
        assert ba.merge(b) + ba.merge(a) == added == ab.stats().verdicts
        assert contents(ab) == contents(ba)
        assert ab.merge(ba) == ab.merge(a) == 0
        assert ab.check() == ()
