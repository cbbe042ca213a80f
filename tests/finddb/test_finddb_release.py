"""A release answers as its sources do, of what may ship alone, and its content can be proved."""

from __future__ import annotations

import math
import os
import random
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.finddb import finddb_entries as made
from helpers.finddb.finddb_entries import (
    DEVICE,
    PROBLEM,
    VERSIONS,
    answers,
    at,
    contents,
    files_end_at,
    lacking,
    row,
    scope,
    verdict,
)
from helpers.processes.forks import in_a_fork
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miofind.errors import DatabaseError
from miofind.finddb import MEMORY, Comparison, Release, ReleaseRules, Store, Verdict, failed_code, write_release
from miofind.finddb.ranking import TIE

pytestmark = pytest.mark.sampled(2)

some_histories = st.lists(made.histories, max_size=3)


@pytest.fixture
def store():
    with Store(MEMORY) as opened:
        opened.record(DEVICE, PROBLEM, [row(created_at=at(1))], scope=scope(created_at=at(1)), environment=VERSIONS)
        opened.record("cpu|2||", PROBLEM, [row("ConvB", status="crashed", time_ms=None, created_at=at(2))])
        yield opened


def released(store: Store, folder: Path, **settings) -> Store:
    """A release of the store, opened."""
    write_release([store], folder / "release.db", ReleaseRules(**settings))
    return Store(folder / "release.db", read_only=True)


def fastest(store: Store) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Least time of each solver for a device and problem, of rows that had the device to themselves, and of others."""
    found: dict[tuple[str, str, str], tuple[float, float]] = {}
    for answer in answers(store):
        for ranked in answer.rows:
            key = (answer.device, answer.network_config, ranked.solver_id)
            alone, beside = found.get(key, (math.inf, math.inf))
            found[key] = (
                (alone, min(beside, ranked.time_ms)) if ranked.contended else (min(alone, ranked.time_ms), beside)
            )
    return found


@settings(max_examples=10)
@given(histories=some_histories)
def test_a_release_gives_the_answers_of_its_undisturbed_solvers(tmp_path_factory, histories):
    folder = tmp_path_factory.mktemp("release")
    with Store(MEMORY) as store:
        store.add(histories)
        times = fastest(store)
        must = {key for key, (alone, beside) in times.items() if alone < math.inf and alone <= beside * TIE}
        assume(must)
        write_release([store, store], folder / "release.db")
    with Store(folder / "release.db", read_only=True) as shipped:
        assert shipped.check() == ()
        for key, row in shipped.rows():
            assert row.status in ("ok", "cut_off")
            assert not row.contended, key
        found = {(a.device, a.network_config, row.solver_id) for a in answers(shipped) for row in a.rows}
    assert must <= found <= {key for key, (alone, _) in times.items() if alone < math.inf}
    assert [path.name for path in folder.iterdir()] == ["release.db"]


@settings(max_examples=10)
@given(one=some_histories, two=some_histories)
def test_equal_sources_make_equal_releases(tmp_path_factory, one, two):
    folder = tmp_path_factory.mktemp("release")
    with Store(MEMORY) as a, Store(MEMORY) as b:
        a.add(one)
        b.add(two)
        with Store(MEMORY) as both:
            both.merge(a)
            both.merge(b)
            assume(any(alone <= beside * TIE for alone, beside in fastest(both).values() if alone < math.inf))
        first = write_release([a, b], folder / "first.db")
        second = write_release([b, a, b], folder / "second.db")
    assert first == second
    assert (folder / "first.db").read_bytes() == (folder / "second.db").read_bytes()


def test_a_release_of_a_release_is_that_release(store, tmp_path):
    with released(store, tmp_path) as first:
        again = write_release([first], tmp_path / "again.db")
        assert again == first.release()
    assert (tmp_path / "again.db").read_bytes() == (tmp_path / "release.db").read_bytes()


def test_a_release_of_ties_keeps_all_of_itself(tmp_path):
    """Ties are groups that the fastest opens: where it stays behind, the next opens another, and more are in it."""
    times = {1.0: 16, 1.02: 16, 1.027: 8, 1.029: 8, 1.035: 0}
    rows = [
        row("ConvA", config=f'{{"tile":{i}}}', time_ms=time_ms, workspace_bytes=size, created_at=at(1))
        for i, (time_ms, size) in enumerate(times.items())
    ]
    with Store(MEMORY) as store:
        store.record(DEVICE, PROBLEM, rows, environment=VERSIONS)
        made = write_release([store], tmp_path / "release.db")
    assert sum(made.rows.values()) == 2
    with Store(tmp_path / "release.db", read_only=True) as first:
        assert write_release([first], tmp_path / "again.db").rows == made.rows


def test_a_release_is_one_file_that_needs_no_log(store, tmp_path):
    path = tmp_path / "release.db"
    path.write_text("what was there before")
    write_release([store], path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)
    first = path.read_bytes()
    write_release([store], path)
    assert path.read_bytes() == first
    with Store(path, read_only=True) as shipped:
        shipped.open()
        assert shipped._database.is_immutable


def test_a_release_says_what_it_holds_and_what_came_before(store, tmp_path):
    path = tmp_path / "release.db"
    first = write_release([store], path)
    assert (first.problems, first.rows, first.parent) == ({DEVICE: 1}, {DEVICE: 1}, "")
    store.record(DEVICE, "other", [row(), row("ConvB")])
    second = write_release([store], path)
    assert (second.problems, second.rows) == ({DEVICE: 2}, {DEVICE: 3})
    assert second.parent == first.content_hash
    with Store(path, read_only=True) as shipped:
        assert shipped.release() == second
        third = write_release([store, shipped], tmp_path / "elsewhere.db")
    assert third == second


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM problem", "has the hash"),
        ("UPDATE device SET identity = 'another'", "their checksum differs"),
        ("UPDATE problem SET network_config = 'another'", "their checksum differs"),
        ("DELETE FROM answer", "belongs to no row of table answer"),
        ("UPDATE meta SET value = replace(value, '\":1}', '\":2}') WHERE key = 'release'", "other counts"),
        ("DELETE FROM meta WHERE key = 'release'", "names none"),
        ("UPDATE meta SET value = '{}' WHERE key = 'release'", "cannot be read"),
        ("UPDATE meta SET value = '[[[' WHERE key = 'release'", "cannot be read"),
        ("""UPDATE meta SET value = '{"content_hash":7}' WHERE key = 'release'""", "no SHA-256"),
    ],
)
def test_check_finds_an_altered_release(store, tmp_path, statement, said):
    released(store, tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "release.db")) as connection:
        connection.execute(statement)
        connection.commit()
    with Store(tmp_path / "release.db", read_only=True) as shipped:
        (finding,) = shipped.check()
    assert said in finding


def test_a_release_is_not_written_to_but_merged(store, tmp_path):
    released(store, tmp_path).close()
    before = (tmp_path / "release.db").read_bytes()
    with Store(tmp_path / "release.db") as shipped, Store(MEMORY) as own:
        assert shipped.check() == ()
        for write in (
            lambda: shipped.open(),
            lambda: shipped.record(DEVICE, "other", [row()]),
            lambda: shipped.add(contents(store)),
            lambda: shipped.clean(DEVICE, PROBLEM),
            lambda: shipped.prune("superseded"),
            lambda: shipped.rebuild(),
            lambda: shipped.queue_recheck(DEVICE, PROBLEM, "why"),
        ):
            with pytest.raises(DatabaseError, match=r"is a release, .* FindDB of your own with `miofind db merge`"):
                write()
        assert own.merge(shipped) == 2
        assert contents(own) == contents(shipped)
        assert own.record(DEVICE, PROBLEM, [row("ConvB")]) is not None
    assert (tmp_path / "release.db").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["release.db"]


def test_a_release_holds_the_rows_that_were_chosen(store, tmp_path):
    store.record(DEVICE, PROBLEM, [row("ConvB", '{"a":1}'), row("ConvC", status="crashed", time_ms=None)])
    with released(store, tmp_path, keep=lambda key, row: row.solver_id != "ConvA") as shipped:
        assert [row.solver_id for _, row in shipped.rows()] == ["ConvB"]
        assert shipped.stats().environments == 0


def test_a_release_has_the_row_that_wins_within_a_limit(tmp_path):
    """Its scope covers requests with limits, which were answered by whatever rows had come along."""
    sizes = [1000, 900, 800, 100, 100, 0]
    rows = [
        row(config=f'{{"tile":{i}}}', time_ms=1.0 + i, workspace_bytes=size, max_error=10.0**-i)
        for i, size in enumerate(sizes)
    ]
    with Store(MEMORY) as store:
        store.record(DEVICE, PROBLEM, rows, scope=scope("ConvA"))
        with released(store, tmp_path) as shipped:
            answer = shipped.answer(DEVICE, PROBLEM)
    assert answer.covers(scope("ConvA", workspace_limit_bytes=100))
    assert next(row.time_ms for row in answer.rows if row.workspace_bytes <= 100) == 4.0
    assert next(row.time_ms for row in answer.rows if row.max_error <= 1e-4) == 5.0


@pytest.mark.parametrize("newer_ms", [None, 2.0], ids=["still fails", "runs again"])
def test_a_release_tells_with_which_sources_a_solver_failed(tmp_path, newer_ms):
    """What ships of it is that it was considered: that would hold whatever became of its kernels."""
    failed = row("ConvB", status="wrong_result", time_ms=None, source_hash="ab")
    with Store(MEMORY) as store:
        store.record(DEVICE, PROBLEM, [row("ConvA"), failed], scope=scope("ConvA", "ConvB"))
        if newer_ms is not None:
            store.record(DEVICE, PROBLEM, [row("ConvB", time_ms=newer_ms, source_hash="cd")])
        told = {"ConvA": 1, "ConvB": failed_code(1, "ab") if newer_ms is None else 1}
        assert [item.solvers for item in store.answer(DEVICE, PROBLEM).scopes] == [told]
        with released(store, tmp_path) as shipped, Store(MEMORY) as own:
            assert [item.solvers for item in shipped.answer(DEVICE, PROBLEM).scopes] == [told]
            assert shipped.check() == store.check() == ()
            own.merge(shipped)
            assert [item.solvers for item in own.answer(DEVICE, PROBLEM).scopes] == [told]
    assert failed_code(1, "ab") != failed_code(2, "ab")


@pytest.mark.parametrize("size", [0, 8])
def test_what_no_limit_asks_for_stays_behind(tmp_path, size):
    rows = [row(config=f'{{"tile":{i}}}', time_ms=1.0 + i, workspace_bytes=size) for i in range(9)]
    with Store(MEMORY) as store:
        store.record(DEVICE, PROBLEM, rows)
        assert sum(write_release([store], tmp_path / "release.db").rows.values()) == 2


def test_a_release_to_learn_from_keeps_slower_rows(tmp_path):
    rows = [row(config=f'{{"tile":{i}}}', time_ms=1.0 + i) for i in range(9)]
    others = [row("ConvB", time_ms=5.0, contended=True), row("ConvC", status="crashed", time_ms=None)]
    with Store(MEMORY) as store:
        store.record(DEVICE, PROBLEM, rows + others, scope=scope("ConvA"))
        with released(store, tmp_path, keeps_losers=True) as shipped:
            assert [found.time_ms for _, found in shipped.rows()] == [found.time_ms for found in rows]
            assert shipped.check() == ()
            again = write_release([shipped], tmp_path / "again.db", ReleaseRules(keeps_losers=True))
            assert again.content_hash == shipped.release().content_hash
            assert sum(write_release([shipped], tmp_path / "to_ship.db").rows.values()) == 2


@pytest.mark.parametrize(("time_ms", "problems"), [(0.9, 1), (0.99, 2), (2.0, 2)])
def test_a_problem_whose_fastest_row_is_void_is_left_to_be_measured(store, tmp_path, time_ms, problems):
    store.record(DEVICE, "other", [row("ConvA", time_ms=1.0), row("ConvB", time_ms=time_ms)])
    choice = {"keep": lambda key, row: row.solver_id != "ConvB", "void": lambda key, row: row.solver_id == "ConvB"}
    with released(store, tmp_path, **choice) as shipped:
        assert shipped.stats().problems == problems
        assert (shipped.answer(DEVICE, "other") is None) == (problems == 1)
        assert shipped.check() == ()


def test_what_only_contention_saw_stays_behind_and_is_not_covered(store, tmp_path):
    considered = scope("ConvA", "ConvB", "ConvC")
    store.record(DEVICE, PROBLEM, [row("ConvB", contended=True), row("ConvC", status="crashed")], scope=considered)
    with released(store, tmp_path) as shipped:
        answer = shipped.answer(DEVICE, PROBLEM)
        assert [row.solver_id for row in answer.rows] == ["ConvA"]
        assert lacking(answer, "ConvA", "ConvB", "ConvC") == ["ConvB"]
        assert shipped.check() == ()


def test_a_solver_that_was_disturbed_at_its_fastest_ships_no_slower_row(store, tmp_path):
    """Its rest would make it look slow to everyone who has the release."""
    fast, slow = row("ConvB", '{"tile":1}', time_ms=0.1, contended=True), row("ConvB", '{"tile":2}', time_ms=5.0)
    store.record(DEVICE, PROBLEM, [fast, slow], scope=scope("ConvA", "ConvB"))
    with released(store, tmp_path) as shipped:
        answer = shipped.answer(DEVICE, PROBLEM)
        assert [row.solver_id for row in answer.rows] == ["ConvA"]
        assert lacking(answer, "ConvA", "ConvB") == ["ConvB"]


@pytest.mark.parametrize("other_ms", [1.0, 1.02, 9.0])
def test_who_ships_does_not_depend_on_other_solvers_times(store, tmp_path, other_ms):
    beside, alone = row(time_ms=1.0095, contended=True), row("ConvA", '{"tile":2}', time_ms=1.0105)
    store.record(DEVICE, PROBLEM.replace("n32", "n16"), [row("ConvB", time_ms=other_ms), beside, alone])
    with released(store, tmp_path) as shipped:
        found = {row.solver_id: row.time_ms for row in shipped.answer(DEVICE, PROBLEM.replace("n32", "n16")).rows}
        assert found == {"ConvA": 1.0105, "ConvB": other_ms}


def test_an_older_row_ships_where_the_newer_was_contended(store, tmp_path):
    store.record(DEVICE, PROBLEM, [row(time_ms=9.0, contended=True)])
    with released(store, tmp_path) as shipped:
        assert [row.time_ms for _, row in shipped.rows()] == [1.0]


def shipped_verdicts(store: Store, folder: Path) -> list[str]:
    with released(store, folder) as shipped:
        assert shipped.check() == ()
        return [item.winner for item in shipped.history(DEVICE, PROBLEM).verdicts]


def test_the_newest_verdict_ships(store, tmp_path):
    store.record(DEVICE, PROBLEM, [row("ConvB")], verdict=verdict("ConvB:{}"))
    store.record(DEVICE, PROBLEM, verdict=verdict("ConvA:{}", "ConvB:{}"), environment=VERSIONS)
    assert shipped_verdicts(store, tmp_path) == ["ConvA:{}"]


def test_a_verdict_whose_winner_stays_behind_does_not_ship(store, tmp_path):
    store.record(DEVICE, PROBLEM, verdict=verdict("ConvZ:{}"))
    assert shipped_verdicts(store, tmp_path) == []


def test_a_verdict_that_a_newer_row_made_void_does_not_come_back(store, tmp_path):
    """It would order those that ship by a race that one of them has been measured since."""
    times = {"A": 1.0, "B": 2.0, "AA": 2.2, "AAA": 3.0}
    fast, slow, other, raced = (
        row(f"Conv{name[0]}", config=f'{{"tile":{len(name)}}}', time_ms=time_ms, created_at=at(1))
        for name, time_ms in times.items()
    )
    newer = replace(raced, time_ms=2.5, created_at=at(9))
    judged = Verdict(
        winner=slow.candidate,
        ties=(slow.candidate, fast.candidate, raced.candidate),
        comparisons=(),
        blocks=45,
        protocol="cuda-1",
        created_at=at(2),
    )
    problem = PROBLEM.replace("-n", "-n9")
    store.record(DEVICE, problem, [fast, slow, other, raced, newer], environment=VERSIONS, verdict=judged)
    expected = store.answer(DEVICE, problem).rows[0].candidate
    with released(store, tmp_path) as shipped:
        assert shipped.answer(DEVICE, problem).rows[0].candidate == expected == fast.candidate
        assert shipped.history(DEVICE, problem).verdicts == ()


def test_a_verdict_of_a_contended_race_does_not_ship(store, tmp_path):
    store.record(DEVICE, PROBLEM, [row("ConvB", contended=True)], verdict=verdict("ConvA:{}"))
    assert shipped_verdicts(store, tmp_path) == []


def test_a_release_of_nothing_is_refused(store, tmp_path):
    path = tmp_path / "release.db"
    write_release([store], path)
    before = path.read_bytes()
    with Store(MEMORY) as empty, pytest.raises(DatabaseError, match="stays as it is"):
        write_release([empty], path)
    with pytest.raises(DatabaseError, match="no row of the sources may ship"):
        write_release([store], path, ReleaseRules(keep=lambda key, row: False))
    assert path.read_bytes() == before


def test_a_failed_release_leaves_the_old_file(store, tmp_path):
    path = tmp_path / "release.db"
    write_release([store], path)
    before = path.read_bytes()
    missing = Store(tmp_path / "missing.db", read_only=True)
    with missing, pytest.raises(DatabaseError, match="does not exist"):
        write_release([missing], path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["release.db"]


def test_a_disk_that_fills_while_a_release_is_written(store, tmp_path):
    path = tmp_path / "release.db"
    write_release([store], path)
    before = path.read_bytes()
    for number in range(200):
        noise = random.Random(number).randbytes(1000).hex()
        store.record(DEVICE, f"{PROBLEM}-{number}", [row(message=noise)])
    with (
        files_end_at(100_000),
        pytest.raises(DatabaseError, match=r"release\.db cannot be .*(make room|check its room)"),
    ):
        write_release([store], path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["release.db"]


def test_a_release_that_cannot_be_put_in_place(store, tmp_path):
    (tmp_path / "release.db").mkdir()
    with pytest.raises(DatabaseError, match="no regular file"):
        write_release([store], tmp_path / "release.db")
    assert [found.name for found in tmp_path.iterdir()] == ["release.db"]


def test_a_release_keeps_intervals(store, tmp_path):
    compared = (Comparison(candidate="ConvB:{}", low=1.02, high=1.07),)
    ruling = Verdict(winner="ConvA:{}", ties=("ConvA:{}",), comparisons=compared, blocks=30, protocol="cuda-1")
    store.record(DEVICE, PROBLEM, verdict=ruling)
    with released(store, tmp_path) as shipped:
        (kept,) = shipped.history(DEVICE, PROBLEM).verdicts
        assert kept.comparisons == compared
        assert contents(shipped)[0].verdicts == (kept,)


@pytest.mark.parametrize("text", ["", "abc", "x" * 64, 7, None])
def test_a_release_names_hashes(text):
    with pytest.raises(ValueError, match="no SHA-256"):
        Release(content_hash=text)
    with pytest.raises(ValueError, match="no SHA-256"):
        Release(content_hash="0" * 64, parent=text or "y")


def test_a_log_beside_the_replaced_file_does_not_reach_the_release(tmp_path, store):
    released(store, tmp_path).close()
    path = made.unpacked(tmp_path / "release.db", tmp_path / "older.db").replace(tmp_path / "release.db")

    def be_killed() -> None:
        killed = Store(path)
        for number in range(50):
            killed.record("another", f"{PROBLEM}{number}", [row()])
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_fork(be_killed) == -signal.SIGKILL
    assert path.with_name("release.db-wal").stat().st_size
    with Store(path) as in_use:
        in_use.record("another", PROBLEM, [row()])
        with pytest.raises(DatabaseError, match="another process held it"):
            write_release([store], path)
        assert len(in_use.problems()) == 52
    with released(store, tmp_path) as shipped:
        assert shipped.check() == ()
        assert {key.device for key in shipped.problems()} == {DEVICE}


def test_a_finddb_that_is_no_release_is_not_replaced(tmp_path, store):
    with Store(tmp_path / "own.db") as own:
        own.merge(store)
        for sources in ([store], [own]):
            with pytest.raises(DatabaseError, match=r"own\.db is a FindDB and no release.* name another file"):
                write_release(sources, tmp_path / "own.db")
        assert contents(own) == contents(store)


def test_another_database_is_not_replaced(tmp_path, store):
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE contacts (name)")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="a database of something else"):
        write_release([store], path)
    assert path.read_bytes() == before


def test_a_log_of_a_file_that_is_gone_does_not_reach_the_release(tmp_path, store):
    for suffix in ("-wal", "-journal"):
        (tmp_path / f"release.db{suffix}").write_bytes(b"x" * 5000)
    with released(store, tmp_path) as shipped:
        assert shipped.check() == ()
    assert [path.name for path in tmp_path.iterdir()] == ["release.db"]


def test_a_release_follows_links(tmp_path, store):
    (tmp_path / "folder").mkdir()
    (tmp_path / "release.db").symlink_to(tmp_path / "folder" / "real.db")
    for _ in range(2):
        with released(store, tmp_path) as shipped:
            assert shipped.check() == ()
    assert (tmp_path / "release.db").is_symlink()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (":memory:", "is a file"),
        ("http://host/x.db", "named by http"),
        ("postgresql://host/x.db", "where a file is wanted"),
        ("pipe", "no regular file"),
        ("", "no regular file"),
        ("file/x.db", "file/x.db"),
        ("x" * 250, "File name too long"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_is_no_file_is_not_replaced(tmp_path, store, monkeypatch, name, told):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("file").touch()
    with pytest.raises(DatabaseError, match=told):
        write_release([store], name)
    assert Path("pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]
