"""Times of other libraries: kept and carried as all that is measured, and no part of any answer."""

from __future__ import annotations

import io
import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from helpers.finddb.finddb_entries import (
    DEVICE,
    PROBLEM,
    VERSIONS,
    answers,
    at,
    contents,
    rival,
    row,
    scope,
    verdict,
    version_1,
)

from miofind.errors import DatabaseError
from miofind.finddb import MEMORY, LayeredStore, Prune, RefusedEntryError, Row, Store, mirror, write_release

END = f"{PROBLEM}~"


def measured(store: Store) -> Store:
    """A store with a race that ConvA won over ConvB, though that has the lower time."""
    rows = [row("ConvA", time_ms=1.0), row("ConvB", time_ms=0.995)]
    store.record(DEVICE, PROBLEM, rows, scope=scope("ConvA", "ConvB"), environment=VERSIONS, verdict=verdict())
    return store


def times(store: Store | LayeredStore, first: str = PROBLEM, end: str = END) -> list[float | None]:
    return [row.time_ms for _, row in store.rivals(DEVICE, first, end)]


def test_a_rival_is_in_no_answer_and_changes_none(any_store: Store) -> None:
    before = answers(measured(any_store))
    any_store.record(DEVICE, PROBLEM, [rival(time_ms=0.99)], environment=VERSIONS)
    assert answers(any_store) == before
    assert [row.solver_id for row in before[0].rows] == ["ConvA", "ConvB"]
    assert times(any_store) == [0.99]
    assert any_store.check() == ()
    assert any_store.stats().by_status == {"ok": 2, "rival": 1}
    best = any_store.best_of_all().values()
    assert [row.solver_id for row in best if row is not None] == ["ConvA"]


def test_a_rival_beside_a_solver_s_name_hides_no_solution(any_store: Store) -> None:
    """Whoever wrote it: a failure of that name would."""
    before = answers(measured(any_store))
    any_store.record(DEVICE, PROBLEM, [row("ConvA", time_ms=0.5, status="rival")])
    assert answers(any_store) == before


def test_rivals_go_wherever_measurements_go(any_store: Store, tmp_path: Path) -> None:
    measured(any_store).record(DEVICE, PROBLEM, [rival()], environment=VERSIONS)
    any_store.record(DEVICE, "another", [rival()], environment=VERSIONS)
    with Store(MEMORY) as merged, Store(MEMORY) as imported:
        exported = io.StringIO()
        any_store.export_jsonl(exported)
        merged.merge(any_store)
        imported.import_jsonl(io.StringIO(exported.getvalue()))
        for other in (merged, imported):
            assert contents(other) == contents(any_store)
            assert (times(other), other.check()) == ([0.1], ())
            assert other.merge(any_store) == 0


def test_a_mirror_has_rivals(finddb_url: str, tmp_path: Path) -> None:
    with Store(finddb_url) as server:
        measured(server)
        mirror(finddb_url, tmp_path / "mirror.db")
        server.record(DEVICE, PROBLEM, [rival()])
        mirror(finddb_url, tmp_path / "mirror.db")
    with Store(tmp_path / "mirror.db", read_only=True) as followed:
        assert times(followed) == [0.1]


def test_rivals_alone_are_no_answer(any_store: Store) -> None:
    assert any_store.record(DEVICE, PROBLEM, [rival()]) is None
    assert any_store.answer(DEVICE, PROBLEM) is None
    assert any_store.solved_problems() == ()
    assert any_store.check() == ()
    any_store.record(DEVICE, PROBLEM, [row(status="crashed")])
    assert any_store.answer(DEVICE, PROBLEM) is not None, "a failure is known of it"
    assert any_store.prune(Prune.FAILED) == 1
    assert any_store.answer(DEVICE, PROBLEM) is None
    assert any_store.check() == ()


def test_problems_are_asked_for_from_one_name_up_to_another(any_store: Store) -> None:
    for number, name in enumerate(("p", "p-e.bias", "p-e.relu", "p-tf32", "q"), 1):
        any_store.record(DEVICE, name, [row(), rival(time_ms=number)])
    any_store.record("another device", "p", [rival(time_ms=9.0)])
    found = any_store.rivals(DEVICE, "p", "p-e/")
    assert sorted((name, row.time_ms) for name, row in found) == [("p", 1.0), ("p-e.bias", 2.0), ("p-e.relu", 3.0)]
    assert any_store.rivals("unknown", "p", "p-e/") == []


def test_a_prune_keeps_the_newest_rival_of_each_configuration(any_store: Store) -> None:
    rows = [rival(time_ms=1.0 + second, created_at=at(second)) for second in range(3)]
    any_store.record(DEVICE, PROBLEM, [*rows, rival('{"release":2}', 9.0, created_at=at(0)), row(status="crashed")])
    assert any_store.prune(Prune.FAILED) == 1
    assert sorted(times(any_store), key=str) == [1.0, 2.0, 3.0, 9.0]
    assert any_store.prune(Prune.SUPERSEDED) == 2
    assert sorted(times(any_store), key=str) == [3.0, 9.0]


def test_a_release_has_no_rivals(tmp_path: Path) -> None:
    with Store(MEMORY) as source:
        measured(source)
        write_release([source], tmp_path / "without.db")
        source.record(DEVICE, PROBLEM, [rival()])
        source.record(DEVICE, "another", [rival()])
        write_release([source], tmp_path / "with.db")
    with Store(tmp_path / "without.db", read_only=True) as one, Store(tmp_path / "with.db", read_only=True) as other:
        assert contents(one) == contents(other)
        assert times(other) == []


@pytest.mark.parametrize("time_ms", [None, 0.0])
def test_a_rival_without_a_time_is_refused(time_ms: float | None) -> None:
    with Store(MEMORY) as store, pytest.raises(RefusedEntryError, match="more than 0 in a row of status rival"):
        store.record(DEVICE, PROBLEM, [rival(time_ms=time_ms)])


def test_writers_at_once_lose_none(any_store: Store, address: str) -> None:
    def write(store: Store, first: int) -> None:
        for number in range(first, first + 8):
            store.record(DEVICE, PROBLEM, [rival(time_ms=number)])

    with Store(address) as another:
        stores = (any_store, any_store if any_store.in_memory else another)
        writers = [threading.Thread(target=write, args=each) for each in zip(stores, (1, 9), strict=True)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    assert sorted(map(str, times(any_store))) == sorted(str(float(number)) for number in range(1, 17))
    assert any_store.check() == ()


def test_a_rival_s_time_leaves_what_ships_where_it_is(tmp_path: Path) -> None:
    with Store(MEMORY) as source:
        write_release([measured(source)], tmp_path / "shipped.db")
    user, shipped = Store(tmp_path / "user.db"), Store(tmp_path / "shipped.db", read_only=True)
    with LayeredStore(user, [shipped]) as layered:
        before = list(layered.answers(DEVICE, PROBLEM))
        layered.record_rival(DEVICE, PROBLEM, rival(), environment=VERSIONS)
        assert list(layered.answers(DEVICE, PROBLEM)) == before
        assert times(layered) == [0.1]
        assert [row.solver_id for row in user.history(DEVICE, PROBLEM).rows] == ["Rival"]  # type: ignore[union-attr]
        layered.record(DEVICE, PROBLEM, [row("ConvC", time_ms=2.0)])
        found = layered.answer(DEVICE, PROBLEM)
        assert found is not None
        assert [row.solver_id for row in found.rows] == ["ConvA", "ConvB", "ConvC"]
        assert times(layered) == [0.1]


def test_rivals_of_databases_below_count(tmp_path: Path) -> None:
    with Store(tmp_path / "tuned.db") as store:
        measured(store).record(DEVICE, PROBLEM, [rival()])
    below = [Store(tmp_path / "tuned.db", read_only=True)]
    with LayeredStore(Store(tmp_path / "user.db"), below) as layered:
        assert times(layered) == [0.1]
        layered.record_rival(DEVICE, PROBLEM, rival(time_ms=0.2))
        assert sorted(times(layered), key=str) == [0.1, 0.2]


@pytest.mark.parametrize("spoilt", ["time_ms = 'x'", "time_ms = 0", "time_ms = NULL", "created_at = 5"])
def test_what_cannot_be_read_of_rivals_costs_no_answer(
    tmp_path: Path, spoilt: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "finddb.db"
    with Store(path) as store:
        measured(store).record(DEVICE, PROBLEM, [rival()])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE measurement SET {spoilt} WHERE status = 'rival'")
        connection.commit()
    with Store(path) as store, pytest.raises(DatabaseError, match="an entry that cannot be read"):
        store.rivals(DEVICE, PROBLEM, END)
    with LayeredStore(Store(path)) as layered, caplog.at_level(logging.WARNING, "miofind"):
        assert times(layered) == times(layered) == []
        assert layered.answer(DEVICE, PROBLEM) is not None
        assert layered.user.path == path
    (told,) = caplog.messages
    assert "an entry that cannot be read" in told
    assert told.endswith("check the database. Going on without its times of other libraries.")
    with LayeredStore(Store(path), strict=True) as layered, pytest.raises(DatabaseError, match="cannot be read"):
        times(layered)


def test_older_files_have_none(tmp_path: Path) -> None:
    with Store(version_1(tmp_path / "old.db"), read_only=True) as store:
        assert store.rivals(store.problems()[0].device, "", "~") == []


def test_a_row_says_whether_it_is_a_rival() -> None:
    def of(status: str) -> Row:
        return row(status=status)

    assert (of("rival").is_rival, of("rival").usable) == (True, False)
    assert not of("ok").is_rival
    assert not of("crashed").is_rival
