"""What goes into a FindDB comes out of it, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from helpers.finddb.finddb_entries import (
    DEVICE,
    PROBLEM,
    VERSIONS,
    answers,
    at,
    contents,
    files_end_at,
    rival,
    row,
    scope,
    verdict,
)
from helpers.processes.waiting import LIMIT_S
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, Select, event
from sqlalchemy.dialects import sqlite

from miofind.errors import DatabaseError
from miofind.finddb import (
    MEMORY,
    History,
    ProblemKey,
    Prune,
    RefusedEntryError,
    Store,
    entries,
    environment_id,
    schema,
    sqlite_database,
    stamps,
    write_release,
)
from miofind.finddb.validation import LAST_STAMP
from miofind.finddb.values import RIVAL, STATUSES, USABLE_STATUSES
from miofind.solver.candidate import Status

FULL = row(
    config='{"tile":128}',
    algorithm="direct",
    library="plain",
    source_hash="ab12",
    kernel_hash="cd34",
    time_ms=0.1 + 0.2,
    min_ms=0.1,
    p20_ms=0.2,
    p80_ms=0.4,
    samples=45,
    protocol="cuda-1",
    workspace_bytes=2**40,
    deterministic=False,
    max_error=1.5e-7,
)

HOSTILE = (
    "'; DROP TABLE measurement; --",
    '" OR 1=1 --',
    "%s ? :name {0} \\n",
    "Robert'); DELETE FROM problem WHERE ('1'='1",
    "名前|132|9.0|",
    "a\\b/c%00",
)


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "finddb.db") as opened:
        yield opened


def test_statuses_are_those_of_candidates():
    assert {*Status, RIVAL} == STATUSES
    assert {status for status in Status if status.usable} == USABLE_STATUSES


def test_unknown_problem_has_no_answer(any_store):
    assert any_store.answer(DEVICE, PROBLEM) is None
    assert any_store.history(DEVICE, PROBLEM) is None
    assert any_store.problems() == ()


def test_a_row_keeps_all_its_fields(any_store):
    returned = any_store.record(DEVICE, PROBLEM, [FULL], scope=scope(), environment=VERSIONS)
    answer = any_store.answer(DEVICE, PROBLEM)
    assert answer == returned
    (stored,) = answer.rows
    assert stored.environment == environment_id(VERSIONS)
    assert stored.created_at
    assert stored.id
    fields = ("time_ms", "min_ms", "p20_ms", "p80_ms", "samples", "workspace_bytes", "deterministic", "max_error")
    assert [getattr(stored, name) for name in fields] == [getattr(FULL, name) for name in fields]
    assert (stored.config, stored.kernel_hash, stored.protocol) == (FULL.config, FULL.kernel_hash, FULL.protocol)
    assert type(stored.deterministic) is bool


@pytest.mark.parametrize("number", [5e-324, 1 / 3, 1e16 + 2, 1.7976931348623157e308])
def test_numbers_of_all_sizes_come_back_as_they_were(any_store, number):
    given_one = row(time_ms=number, max_error=number, p20_ms=0.0, samples=2**63 - 1, workspace_bytes=2**63 - 1)
    any_store.record(DEVICE, PROBLEM, [given_one], scope=scope(workspace_limit_bytes=2**63 - 1))
    (kept,) = any_store.history(DEVICE, PROBLEM).rows
    assert (kept.time_ms, kept.max_error, kept.p20_ms) == (number, number, 0.0)
    assert kept.samples == kept.workspace_bytes == 2**63 - 1
    assert any_store.check() == ()


def test_rows_outlive_the_store(tmp_path):
    path = tmp_path / "finddb.db"
    with Store(path) as store:
        store.record(DEVICE, PROBLEM, [FULL], environment=VERSIONS)
        before = contents(store)
    with Store(path) as store:
        assert contents(store) == before
        assert store.environment(environment_id(VERSIONS)) == VERSIONS
        assert store.environment("unknown") is None


def test_devices_and_problems_are_apart(any_store):
    any_store.record(DEVICE, PROBLEM, [row("ConvA")])
    any_store.record("cpu|2||", PROBLEM, [row("ConvB")])
    any_store.record(DEVICE, "other", [row("ConvC")])
    assert [row.solver_id for row in any_store.answer(DEVICE, PROBLEM).rows] == ["ConvA"]
    assert any_store.problems("cpu|2||") == (ProblemKey(device="cpu|2||", network_config=PROBLEM),)
    assert len(any_store.problems()) == 3
    assert [(key.network_config, row.solver_id) for key, row in any_store.rows(DEVICE)] == [
        (PROBLEM, "ConvA"),
        ("other", "ConvC"),
    ]


def test_recording_nothing_stores_nothing(any_store):
    assert any_store.record(DEVICE, PROBLEM) is None
    assert any_store.problems() == ()


def test_failures_are_kept_and_give_an_answer_without_rows(any_store):
    any_store.record(DEVICE, PROBLEM, [row(status="crashed", time_ms=None, message="illegal address")], scope=scope())
    answer = any_store.answer(DEVICE, PROBLEM)
    assert len(answer.rows) == 0
    assert answer.covers(scope())
    assert any_store.history(DEVICE, PROBLEM).rows[0].message == "illegal address"


def test_a_later_row_ranks_as_later_though_the_clock_was_set_back(any_store):
    any_store.record(DEVICE, PROBLEM, [row(time_ms=1.0, created_at="2150-01-01T00:00:00.000000Z")])
    any_store.record(DEVICE, PROBLEM, [row(time_ms=5.0)])
    assert any_store.answer(DEVICE, PROBLEM).rows[0].time_ms == 5.0


@pytest.mark.parametrize("clock", ["2026-01-01T00:00:00.000000Z", LAST_STAMP, "2200-01-01T00:00:00.000000Z"])
def test_at_the_end_of_what_times_can_be_recording_goes_on(any_store, monkeypatch, clock):
    monkeypatch.setattr(entries, "datetime", _Clock(clock))
    monkeypatch.setattr(stamps, "datetime", _Clock(clock))
    last = {"created_at": LAST_STAMP}
    any_store.record(
        DEVICE, PROBLEM, [row("Old", **last)], scope=scope("Old", **last), verdict=verdict("Old:{}", **last)
    )
    for number in range(3):
        any_store.record(
            DEVICE, PROBLEM, [row(f"New{number}")], scope=scope("New"), verdict=verdict(f"New{number}:{{}}")
        )
    assert any_store.queue_recheck(DEVICE, PROBLEM, "why")
    assert {row.solver_id for row in any_store.answer(DEVICE, PROBLEM).rows} == {"Old", "New0", "New1", "New2"}
    assert any_store.check() == ()


class _Clock:
    """A `datetime` whose present is a given one."""

    def __init__(self, present: str) -> None:
        self._present = present

    def now(self, _: object) -> datetime:
        return datetime.fromisoformat(self._present)

    def fromisoformat(self, text: str) -> datetime:
        return datetime.fromisoformat(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text(any_store, text):
    config = '{"a":"\'; DROP TABLE answer; --"}'
    any_store.record(text, text, [row(text, config)], scope=scope(text))
    any_store.queue_recheck(text, text, text)
    assert any_store.answer(text, text).rows[0].config == config
    assert any_store.rechecks(text)[0].reason == text
    assert any_store.answer(DEVICE, PROBLEM) is None
    assert any_store.check() == ()


@settings(max_examples=30)
@given(text=st.text(max_size=40))
def test_any_text_is_stored_or_refused(text):
    with Store(MEMORY) as store:
        try:
            store.record(text, PROBLEM, [row(text, message=text)])
        except RefusedEntryError:
            assert not (text and text.isprintable())
            assert store.problems() == ()
        else:
            assert store.answer(text, PROBLEM).rows[0].solver_id == text
            assert store.check() == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": '{"b":1, "a":2}'}, "canonical"),
        ({"config": '{"a":NaN}'}, "JSON"),
        ({"config": "[1]"}, "JSON object"),
        ({"config": "[" * 10_000}, "JSON object"),
        ({"status": "fine"}, "compile_failed"),
        ({"time_ms": None}, "time_ms"),
        ({"time_ms": 0.0}, "time_ms"),
        ({"time_ms": float("nan")}, "finite"),
        ({"time_ms": True}, "number"),
        ({"max_error": float("inf")}, "finite"),
        ({"samples": -1}, "samples=-1"),
        ({"workspace_bytes": 2**63}, "2**63"),
        ({"workspace_bytes": 1.5}, "integer"),
        ({"solver_version": True}, "integer"),
        ({"deterministic": 1}, "true or false"),
        ({"solver_id": ""}, "solver_id"),
        ({"solver_id": "a\0b"}, "printable"),
        ({"solver_id": "\ud800"}, "printable"),
        ({"algorithm": "x" * 201}, "200"),
        ({"created_at": "yesterday"}, "2026-01-31"),
        ({"created_at": "2026-02-30T00:00:00.000000Z"}, "2026-01-31"),
        ({"environment": "0123"}, "unknown"),
        ({"id": "0123"}, "altered"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_rows(store, changes, said):
    store.record(DEVICE, PROBLEM, [row("ConvB")])
    before = contents(store)
    with pytest.raises(RefusedEntryError) as caught:
        store.record(DEVICE, PROBLEM, [row("ConvC"), row(**changes)], scope=scope())
    assert said in str(caught.value)
    assert contents(store) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"effort": "all"},
        {"complete": 1},
        {"workspace_limit_bytes": -1},
        {"filters": {"only": ("a",)}},
        {"filters": {"only": {1, 2}}},
        {"filters": {1: 2}},
        {"filters": {"x": "y" * 30_000}},
    ],
    ids=str,
)
def test_refused_scopes(store, changes):
    with pytest.raises(RefusedEntryError):
        store.record(DEVICE, PROBLEM, [row()], scope=scope(**changes))
    assert store.problems() == ()


@pytest.mark.parametrize(
    "versions",
    [{"hostname": "node7"}, {"gpu_uuid": "GPU-1"}, {"Driver": "1"}, {"driver": 13}, {"driver": "/usr/lib/x.so"}],
    ids=str,
)
def test_environments_name_no_machine(store, versions):
    with pytest.raises(RefusedEntryError):
        store.record(DEVICE, PROBLEM, [row()], environment=versions)


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("/home/ann/.cache/miofind/a.cu(12): error", "a.cu(12): error"),
        ("in '/home/ann/x y/a.cuh' and C:\\Users\\ann\\b.cu", "in 'x y/a.cuh' and b.cu"),
        ("~/secret/a.cu", "a.cu"),
        ("no room: 3/4 used, n/a", "no room: 3/4 used, n/a"),
        ("bad \ud800 \0 text", "bad ?  text"),
        ("x" * 5000, "x" * 2000),
    ],
)
def test_messages_lose_folders_and_length(store, message, kept):
    store.record(DEVICE, PROBLEM, [row(status="compile_failed", time_ms=None, message=message)])
    assert store.history(DEVICE, PROBLEM).rows[0].message == kept
    assert store.check() == ()


def test_rechecks_are_queued_once_and_replaced_by_what_a_record_notes(any_store):
    assert any_store.queue_recheck(DEVICE, PROBLEM, "driver 13.1")
    assert not any_store.queue_recheck(DEVICE, PROBLEM, "driver 13.1")
    assert any_store.queue_recheck(DEVICE, PROBLEM, "new solver ConvB")
    assert any_store.queue_recheck("cpu|2||", PROBLEM, "driver 13.1")
    assert [note.reason for note in any_store.rechecks(DEVICE)] == ["driver 13.1", "new solver ConvB"]
    any_store.record(DEVICE, PROBLEM, [row()])
    assert len(any_store.rechecks(DEVICE)) == 2
    any_store.record(DEVICE, PROBLEM, [row()], notes=["few were measured", "driver 13.1"])
    assert {note.reason for note in any_store.rechecks(DEVICE)} == {"few were measured", "driver 13.1"}
    any_store.record(DEVICE, PROBLEM, notes=())
    assert [note.device for note in any_store.rechecks()] == ["cpu|2||"]
    with pytest.raises(RefusedEntryError):
        any_store.record(DEVICE, PROBLEM, [row("Late")], notes=[""])
    assert any_store.history(DEVICE, PROBLEM).rows[-1].solver_id != "Late"


def test_a_problem_is_recorded_by_few_statements_and_committed_once(store):
    """They are what a tuning's next problem waits for: a find's rows, scope, verdict and note are one transaction."""
    store.record(DEVICE, "another", [row()], environment=VERSIONS)
    statements, commits = [], []
    listeners = {
        "before_cursor_execute": lambda connection, cursor, statement, *_: statements.append(statement),
        "commit": commits.append,
    }
    for name, listener in listeners.items():
        event.listen(Engine, name, listener)
    try:
        whole = {"scope": scope(), "environment": VERSIONS, "verdict": verdict(), "notes": ["few were measured"]}
        store.record(DEVICE, PROBLEM, [row("ConvA"), row("ConvB")], **whole)
    finally:
        for name, listener in listeners.items():
            event.remove(Engine, name, listener)
    assert len(commits) == 1
    assert len(statements) <= 16


def test_clean_forgets_one_problem(any_store):
    any_store.record(DEVICE, PROBLEM, [row("ConvA"), row("ConvB")], scope=scope())
    any_store.record(DEVICE, "other", [row()])
    assert any_store.clean(DEVICE, PROBLEM) == 2
    assert any_store.clean(DEVICE, PROBLEM) == 0
    assert any_store.answer(DEVICE, PROBLEM) is None
    assert any_store.answer(DEVICE, "other") is not None
    assert any_store.stats().scopes == 0
    assert any_store.check() == ()


def filled(store: Store) -> None:
    store.record(DEVICE, PROBLEM, [row(time_ms=3.0), row("ConvB", status="ok")], scope=scope(), environment=VERSIONS)
    store.record(DEVICE, PROBLEM, [row(time_ms=2.0)], scope=scope("ConvA", "ConvB"), environment={"driver": "12.9"})
    store.record(DEVICE, PROBLEM, [row("ConvB", status="crashed", time_ms=None), row("ConvC", status="timed_out")])
    store.record("cpu|2||", PROBLEM, [row("ConvD")])


@pytest.mark.parametrize("what", [Prune.SUPERSEDED, Prune.FAILED])
def test_prune_changes_no_answer(any_store, what):
    filled(any_store)
    before = [tuple(answer.rows) for answer in answers(any_store)]
    covered = [answer.covers(scope("ConvA", "ConvB")) for answer in answers(any_store)]
    assert any_store.prune(what) > 0
    assert any_store.prune(what) == 0
    assert [tuple(answer.rows) for answer in answers(any_store)] == before
    assert [answer.covers(scope("ConvA", "ConvB")) for answer in answers(any_store)] == covered
    assert any_store.check() == ()


def test_prune_failed_leaves_no_failure_and_brings_nothing_back(any_store):
    filled(any_store)
    any_store.prune("failed")
    assert {row.status for _, row in any_store.rows()} == {"ok"}
    assert {row.solver_id for _, row in any_store.rows(DEVICE)} == {"ConvA"}


def test_a_problem_of_failures_alone_goes_with_them(any_store):
    """Nothing is stored of it any more; a mirror of a server had no such problem, which the server listed."""
    any_store.record(DEVICE, PROBLEM, [row(status="crashed", time_ms=None), row("ConvB", status="timed_out")])
    any_store.record(DEVICE, "b", [row("ConvC")])
    assert any_store.prune(Prune.FAILED) == 2
    assert [key.network_config for key in any_store.problems()] == ["b"]
    assert any_store.answer(DEVICE, PROBLEM) is None
    assert any_store.check() == ()


def test_prune_other_devices(any_store):
    filled(any_store)
    assert any_store.prune(Prune.OTHER_DEVICES, device=DEVICE) == 1
    assert {key.device for key in any_store.problems()} == {DEVICE}
    with pytest.raises(RefusedEntryError):
        any_store.prune(Prune.OTHER_DEVICES)


def test_stats_count(any_store):
    filled(any_store)
    stats = any_store.stats()
    assert (stats.problems, stats.rows, stats.scopes, stats.environments) == (2, 6, 2, 2)
    assert stats.by_device == {DEVICE: 1, "cpu|2||": 1}
    assert stats.by_solver == {"ConvA": 2, "ConvB": 2, "ConvC": 1, "ConvD": 1}
    assert stats.by_status == {"crashed": 1, "ok": 4, "timed_out": 1}
    assert (stats.file_bytes > 0) != any_store.in_memory


def test_check_asks_the_caller_of_each_row(any_store):
    filled(any_store)
    asked = []

    def validate(key, row):
        asked.append(key)
        return f"unknown solver {row.solver_id}" if row.solver_id == "ConvD" else None

    (finding,) = any_store.check(validate)
    assert len(asked) == 6
    assert "cpu|2||" in finding
    assert "unknown solver ConvD" in finding


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE measurement SET time_ms = 0.001 WHERE solver_id = 'ConvD'", "altered or damaged"),
        ("UPDATE measurement SET config = '{' WHERE solver_id = 'ConvD'", "config"),
        ("UPDATE measurement SET samples = 'many' WHERE solver_id = 'ConvD'", "samples"),
        ("UPDATE answer SET payload = '[]'", "db upgrade"),
        ("UPDATE scope SET solvers = '[1]'", "cannot be read"),
        ("DELETE FROM environment", "is unknown"),
        ("DELETE FROM answer", "db upgrade"),
        ("ALTER TABLE measurement DROP COLUMN protocol", "measurement.protocol is missing"),
        ("DROP TABLE recheck", "recheck is missing"),
    ],
)
def test_check_finds(store, statement, said):
    filled(store)
    with store._database.write() as connection:
        connection.exec_driver_sql(statement)
    findings = store.check()
    assert any(said in finding for finding in findings), findings


def test_rebuild_mends_answers(any_store):
    filled(any_store)
    before = answers(any_store)
    with any_store._database.write() as connection:
        connection.exec_driver_sql("UPDATE answer SET payload = '[]'")
    assert any_store.rebuild() == 2
    assert answers(any_store) == before
    assert any_store.check() == ()


def test_an_unreadable_answer_says_so(store):
    store.record(DEVICE, PROBLEM, [row()])
    for payload in ("", "{", '[[1]]\n["x"]', "[]\n[1]"):
        with store._database.write() as connection:
            connection.exec_driver_sql("UPDATE answer SET payload = ?", (payload,))
        with pytest.raises(DatabaseError, match="check the database"):
            tuple(store.answer(DEVICE, PROBLEM).rows)


def test_an_altered_environment_is_refused(store):
    history = History(
        device=DEVICE, network_config=PROBLEM, rows=(row(created_at=at(1)),), environments={"x": VERSIONS}
    )
    with pytest.raises(RefusedEntryError, match="altered"):
        store.add([history])


def test_a_closed_store_says_so(tmp_path):
    store = Store(tmp_path / "finddb.db")
    store.close()
    store.close()
    with pytest.raises(DatabaseError, match="closed"):
        store.answer(DEVICE, PROBLEM)


def test_a_read_only_store_records_nothing(tmp_path):
    with Store(tmp_path / "finddb.db") as store:
        store.record(DEVICE, PROBLEM, [row()])
        with Store(tmp_path / "finddb.db", read_only=True) as reading:
            assert reading.answer(DEVICE, PROBLEM) == store.answer(DEVICE, PROBLEM)
    with Store(tmp_path / "finddb.db", read_only=True) as reading:
        assert reading.answer(DEVICE, PROBLEM) is not None
        assert reading.answer("cpu|2||", PROBLEM) is None
        with pytest.raises(DatabaseError, match="read only"):
            reading.record(DEVICE, PROBLEM, [row()])


def test_a_read_only_store_sees_what_others_write(tmp_path):
    with Store(tmp_path / "finddb.db") as store:
        store.record(DEVICE, PROBLEM, [row()])
    with Store(tmp_path / "finddb.db", read_only=True) as reading, Store(tmp_path / "finddb.db") as writing:
        assert reading.answer("cpu|2||", "new") is None
        writing.record("cpu|2||", "new", [row()])
        assert reading.answer("cpu|2||", "new") is not None


def test_what_a_full_disk_leaves_of_a_new_file_is_empty(tmp_path):
    """It was called a database of something else, and another file was asked for; the next write makes it a FindDB."""
    path = tmp_path / "finddb.db"
    with files_end_at(48 << 10), Store(path) as full, pytest.raises(DatabaseError, match=r"make room|check its room"):
        full.record(DEVICE, PROBLEM, [row()])
    with Store(path, read_only=True) as read, pytest.raises(DatabaseError, match="is an empty database: fill it"):
        read.stats()
    with Store(path) as store:
        assert store.record(DEVICE, PROBLEM, [row()]) is not None
        assert store.check() == ()


LONGEST = 2000 - len(DEVICE)


@pytest.mark.parametrize("name", ["x" * LONGEST, "\N{SNOWMAN}" * (LONGEST // 3)])
def test_the_longest_names_are_stored(any_store, name):
    any_store.record(DEVICE, name, [row()])
    assert any_store.queue_recheck(DEVICE, name, "y" * 200)
    assert any_store.answer(DEVICE, name) is not None


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * (LONGEST + 1), "\N{SNOWMAN}" * (LONGEST // 3 + 1)])
def test_names_that_a_server_could_not_keep_are_refused(any_store, name):
    with pytest.raises(RefusedEntryError):
        any_store.record(DEVICE, name, [row()])
    with pytest.raises(RefusedEntryError):
        any_store.queue_recheck(DEVICE, PROBLEM, name[:1] + "\N{SNOWMAN}" * 199)
    assert any_store.problems() == ()


def test_solved_problems_are_those_with_a_usable_row(tmp_path):
    with Store(MEMORY) as store:
        store.record(DEVICE, PROBLEM, [row("ConvA")])
        store.record(DEVICE, "failed", [row("ConvA", status="wrong_result", time_ms=None)])
        store.record(DEVICE, "scope alone", scope=scope("ConvA"))
        assert len(store.problems()) == 3
        assert store.solved_problems() == (ProblemKey(device=DEVICE, network_config=PROBLEM),)
        write_release([store], tmp_path / "shipped.db")
    with Store(tmp_path / "shipped.db", read_only=True) as shipped:
        assert shipped.solved_problems() == shipped.problems() != ()


@pytest.mark.parametrize(
    ("text", "query"),
    [(sqlite_database.ANSWER_SQL, schema.ANSWER_QUERY), (sqlite_database.RIVALS_SQL, entries.RIVALS_QUERY)],
    ids=["answer", "rivals"],
)
def test_files_are_asked_by_what_sqlalchemy_writes(text: str, query: Select[Any]) -> None:
    """The texts stand there for processes that do without SQLAlchemy's import."""
    assert text.split() == str(query.compile(dialect=sqlite.dialect(paramstyle="named"))).split()


def test_a_look_up_does_without_sqlalchemy(tmp_path: Path) -> None:
    """Its import takes a tenth of a second, which a program waits for before its first result."""
    own, release = tmp_path / "own.db", tmp_path / "release.db"
    with Store(own) as store:
        store.record(DEVICE, PROBLEM, [row()], scope=scope(), environment=VERSIONS)
        write_release([store], release)
        store.record(DEVICE, PROBLEM, [rival()], environment=VERSIONS)
    code = (
        "import sys; from miofind.finddb import LayeredStore, Store\n"
        f"layers = LayeredStore(Store({str(own)!r}), [Store({str(release)!r}, read_only=True)], strict=True)\n"
        f"print([len(each.rows) for each in layers.answers({DEVICE!r}, {PROBLEM!r})])\n"
        f"print([row.time_ms for _, row in layers.rivals({DEVICE!r}, '', '~')], 'sqlalchemy' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert told.stdout == "[1, 1]\n[0.1] False\n"


@pytest.mark.parametrize("kind", ["own", "release", "memory"])
def test_a_look_up_by_the_driver_runs_no_code_of_a_file(kind: str, tmp_path: Path) -> None:
    """Its connection is set up as those of all other uses are, though SQLAlchemy has none over it."""
    address: str | Path = MEMORY if kind == "memory" else tmp_path / f"{kind}.db"
    if kind != "memory":
        with Store(tmp_path / "own.db") as store:
            store.record(DEVICE, PROBLEM, [row()], scope=scope(), environment=VERSIONS)
            write_release([store], tmp_path / "release.db")
    with Store(address, read_only=kind == "release") as store:
        assert (store.answer(DEVICE, PROBLEM) is None) == (kind == "memory")
        reading = store._database._connections.reading
        assert (reading.connection is None) == (kind != "memory")
        names = ("trusted_schema", "cell_size_check", "foreign_keys", "busy_timeout")
        settings = [reading.driver.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert settings == [0, 1, 1, 30_000]


def test_what_is_read_amid_the_first_write_to_memory_leaves_the_write_alone() -> None:
    with Store(MEMORY) as store:
        with store._database.write() as connection:
            entries.hold(connection, DEVICE, PROBLEM)
            assert len(store.problems()) == 1
        assert len(store.problems()) == 1
