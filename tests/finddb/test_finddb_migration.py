"""FindDBs of older releases are read as they are, and upgraded whole or not at all, with a backup."""

from __future__ import annotations

import io
import multiprocessing
import sqlite3
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
    files_end_at,
    older_answers,
    row,
    scope,
    unpacked,
    verdict,
    version_1,
)

from miofind.errors import DatabaseError, SchemaVersionError
from miofind.finddb import (
    MEMORY,
    SCHEMA_VERSION,
    LayeredStore,
    Store,
    entries,
    migration,
    schema_versions,
    sqlite_file,
    upgrade,
    write_release,
)

EXPORT = Path(__file__).parents[1] / "helpers" / "finddb" / "finddb_version1.jsonl"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return version_1(tmp_path / "finddb.db")


def with_log(path: Path) -> Path:
    """The file in the form of a user's, with a write-ahead log."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    return path


def layout(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every table's columns with their types and defaults, and whether it has row ids."""
    with closing(sqlite3.connect(path)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        lists = {name: wr for _, name, _, _, wr, _ in connection.execute("PRAGMA table_list")}
        return {name: [lists[name], *connection.execute(f"PRAGMA table_info({name})")] for name in names}


def imported() -> Store:
    """What the export of the same file holds."""
    store = Store(MEMORY)
    with EXPORT.open(encoding="utf-8") as file:
        store.import_jsonl(file)
    return store


@pytest.mark.parametrize("kind", ["shipped", "user's", "user's, to write"])
def test_an_older_file_is_read_as_it_is(old, kind):
    if kind != "shipped":
        with_log(old)
    before = old.read_bytes()
    with Store(old, read_only="write" not in kind) as store, imported() as same:
        assert store.schema_version == 1
        assert contents(store) == contents(same)
        assert len(store.answer(DEVICE, PROBLEM).rows) == 2
        assert store.check() == ()
        assert store.stats().verdicts == 0
        assert store.stats().rows == 5
        assert [note.reason for note in store.rechecks()] == ["measured with other versions"]
        assert store.release() is None
    assert old.read_bytes() == before


def test_an_older_file_is_not_written(old):
    before = old.read_bytes()
    with Store(old) as store:
        for write in (
            lambda: store.open(),
            lambda: store.record(DEVICE, PROBLEM, [row()]),
            lambda: store.prune("superseded"),
            lambda: store.queue_recheck(DEVICE, PROBLEM, "why"),
            lambda: store.rebuild(),
        ):
            with pytest.raises(SchemaVersionError, match=r"version 1, .* writes 2: run `miofind db upgrade` on it"):
                write()
        assert store.answer(DEVICE, PROBLEM) is not None
    assert old.read_bytes() == before


def test_a_find_goes_on_with_an_older_file_and_says_so_once(old, caplog):
    with LayeredStore(Store(old)) as layered:
        assert len(layered.answer(DEVICE, PROBLEM).rows) == 2
        assert not caplog.records
        answer = layered.record(DEVICE, PROBLEM, [row("New", time_ms=0.1)])
        assert [row.solver_id for row in answer.rows] == ["New", "ConvA"]
        layered.record(DEVICE, "other", [row("New")], verdict=verdict("New:{}"))
        assert layered.answer("cpu|2||", "1d-fwd-n1") is not None
    assert len(caplog.records) == 1
    assert "run `miofind db upgrade`" in caplog.text
    with Store(old, read_only=True) as store:
        assert store.stats().rows == 5


def test_an_upgrade_during_the_use_of_an_older_file_is_noticed_at_the_next_write(old):
    with Store(old) as store:
        assert store.answer(DEVICE, PROBLEM) is not None
        upgrade(old)
        assert store.answer(DEVICE, PROBLEM) is not None
        store.record(DEVICE, PROBLEM, [row("New", contended=True)], verdict=verdict("New:{}"))
        assert store.schema_version == SCHEMA_VERSION
        assert store.history(DEVICE, PROBLEM).verdicts[0].winner == "New:{}"
        assert store.check() == ()


@pytest.mark.parametrize("make", [lambda path: path, with_log], ids=["shipped", "user's"])
def test_an_upgraded_file_holds_what_it_held_and_a_new_ones_tables(old, tmp_path, make):
    with imported() as same:
        expected, answered = contents(same), answers(same)
    make(old)
    done = upgrade(old)
    assert (done.database, done.from_version, done.to_version) == (str(old), 1, SCHEMA_VERSION)
    assert done.answers == 1, "one held a row of older code"
    with Store(old, read_only=True) as store:
        assert store.schema_version == SCHEMA_VERSION
        assert contents(store) == expected
        assert answers(store) == answered
        assert store.check() == ()
        assert len(store.rechecks()) == 1
    with Store(tmp_path / "new.db") as new:
        new.open()
    assert layout(old) == layout(tmp_path / "new.db")


def test_an_upgrade_leaves_a_shipped_file_one_that_needs_no_log(old):
    upgrade(old)
    with closing(sqlite3.connect(old)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_the_backup_is_the_file_as_it_was(old):
    with_log(old)
    with closing(sqlite3.connect(old)) as writer:
        writer.execute("DELETE FROM recheck")
        writer.commit()  # into the log, which a copy of the file alone would miss
        backup = upgrade(old).backup
    assert backup is not None
    assert backup.name.startswith("finddb.db.v1-20")
    assert backup.suffix == ".bak"
    with Store(backup, read_only=True) as store, imported() as same:
        assert store.schema_version == 1
        assert contents(store) == contents(same)
        assert store.rechecks() == ()


def test_backups_are_never_overwritten(old, monkeypatch):
    class Clock(migration.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 31, 12, tzinfo=tz)

    monkeypatch.setattr(migration, "datetime", Clock)
    taken = old.with_name("finddb.db.v1-20260131T120000Z.bak")
    taken.write_text("an earlier one")
    assert upgrade(old).backup == old.with_name("finddb.db.v1-20260131T120000Z-2.bak")
    assert taken.read_text() == "an earlier one"


def test_a_second_upgrade_does_nothing(old):
    upgrade(old)
    names = sorted(old.parent.iterdir())
    before = old.read_bytes()
    assert upgrade(old).backup is None
    assert sorted(old.parent.iterdir()) == names
    assert old.read_bytes() == before


def test_an_upgrade_brings_answers_to_the_rules_of_this_release(tmp_path):
    """The scope of the find of all had been pushed out of the answer by those of nine solvers each."""
    path = with_log(older_answers(tmp_path / "finddb.db"))
    whole = scope("ConvA", "ConvB")
    with Store(path, read_only=True) as store:
        held = contents(store)
        assert not store.answer(DEVICE, PROBLEM).covers(whole)
        (finding,) = store.check()
        assert finding.endswith("run `miofind db upgrade`")
    before = path.read_bytes()
    done = upgrade(path)
    assert (done.from_version, done.to_version, done.answers) == (SCHEMA_VERSION, SCHEMA_VERSION, 1)
    assert done.backup is not None
    with Store(done.backup, read_only=True) as backup:
        assert contents(backup) == held
    with Store(path) as store:
        assert contents(store) == held
        assert store.answer(DEVICE, PROBLEM).covers(whole)
        assert store.check() == ()
        upgraded = answers(store)
        store.rebuild()
        assert answers(store) == upgraded
    assert path.read_bytes() != before
    assert upgrade(path).backup is None


def test_merging_an_older_file_and_its_upgrade_changes_nothing(old, tmp_path):
    copy = tmp_path / "copy.db"
    copy.write_bytes(old.read_bytes())
    upgrade(copy)
    with Store(old, read_only=True) as one, Store(copy) as two, Store(MEMORY) as both:
        assert two.merge(one) == 0
        assert both.merge(one) == 7
        assert both.merge(two) == 0
        assert contents(both) == contents(one)


def test_an_export_of_version_1_is_imported(old):
    with imported() as store, Store(old, read_only=True) as source:
        assert contents(store) == contents(source)
        exported = io.StringIO()
        store.export_jsonl(exported)
    first, *rest = exported.getvalue().splitlines()
    assert rest == EXPORT.read_text(encoding="utf-8").splitlines()[1:]
    assert '"schema_version":2' in first


def test_a_release_is_made_of_an_older_file(old, tmp_path):
    made = write_release([Store(old, read_only=True)], tmp_path / "release.db")
    assert made.rows == {DEVICE: 1, "cpu|2||": 1}
    with Store(tmp_path / "release.db", read_only=True) as store:
        assert store.check() == ()
        assert store.schema_version == schema_versions.PACKED_VERSION


def test_a_release_is_not_upgraded(old, tmp_path):
    path = tmp_path / "folder" / "release.db"
    write_release([Store(old, read_only=True)], path)
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"is a release, .* `miofind db merge`"):
        upgrade(path)
    assert [found.name for found in path.parent.iterdir()] == ["release.db"]
    assert path.read_bytes() == before


def test_a_release_of_version_2_is_read_and_written_as_it_is(old, tmp_path):
    made = write_release([Store(old, read_only=True)], tmp_path / "release.db")
    path = unpacked(tmp_path / "release.db", tmp_path / "unpacked.db")
    with Store(path, read_only=True) as store, Store(tmp_path / "release.db", read_only=True) as packed:
        assert store.schema_version == 2
        assert store.release() == made
        assert store.check() == ()
        assert contents(store) == contents(packed)
        assert write_release([store], tmp_path / "again.db") == made
    assert (tmp_path / "again.db").read_bytes() == (tmp_path / "release.db").read_bytes()
    with Store(path) as store:
        store.record(DEVICE, "other", [row()])
        assert any("it was altered" in finding for finding in store.check())


@pytest.mark.parametrize("spoil", ["missing", "folder", "text", "newer", "other"])
def test_what_cannot_be_upgraded_stays_as_it_is(old, spoil):
    if spoil in ("missing", "folder"):
        old.unlink()
    if spoil == "folder":
        old.mkdir()
    if spoil == "text":
        old.write_text("no database" * 1000)
    if spoil in ("newer", "other"):
        with closing(sqlite3.connect(old)) as connection:
            statement = {"newer": "UPDATE meta SET value = '4'", "other": "DROP TABLE meta"}[spoil]
            connection.execute(statement)
            connection.commit()
    before = old.read_bytes() if old.is_file() else b""
    with pytest.raises(SchemaVersionError if spoil == "newer" else DatabaseError):
        upgrade(old)
    assert [path.name for path in old.parent.iterdir()] == ([] if spoil == "missing" else ["finddb.db"])
    assert (old.read_bytes() if old.is_file() else b"") == before


def big(path: Path) -> Path:
    """An older file of some 400 kB."""
    with closing(sqlite3.connect(path)) as connection:
        values = ((f"note {number}", "x" * 1000) for number in range(400))
        connection.executemany("INSERT INTO recheck VALUES (?, ?, 'why', '2026-01-01T00:00:04.000000Z')", values)
        connection.commit()
    return path


def test_a_disk_that_fills_while_the_backup_is_made(old):
    before = big(old).read_bytes()
    with files_end_at(200_000), pytest.raises(DatabaseError, match=r"make room|check its room"):
        upgrade(old)
    assert [path.name for path in old.parent.iterdir()] == ["finddb.db"]
    assert old.read_bytes() == before
    with Store(old, read_only=True) as store:
        assert store.check() == ()


def test_a_failure_after_the_backup_leaves_the_file_and_no_backup(old, monkeypatch):
    before = old.read_bytes()
    first, *_ = schema_versions.UPGRADES[1]
    monkeypatch.setattr(schema_versions, "UPGRADES", {1: (first, "CREATE TABLE meta (again TEXT)")})
    with pytest.raises(DatabaseError, match="already exists"):
        upgrade(old)
    assert [path.name for path in old.parent.iterdir()] == ["finddb.db"]
    assert old.read_bytes() == before


def test_ctrl_c_after_the_backup_leaves_the_file_and_no_backup(old, monkeypatch):
    before = old.read_bytes()

    def interrupted(*_: object) -> None:
        assert len(list(old.parent.iterdir())) > 1
        raise KeyboardInterrupt

    monkeypatch.setattr(entries, "rebuild", interrupted)
    with pytest.raises(KeyboardInterrupt):
        upgrade(old)
    assert [path.name for path in old.parent.iterdir()] == ["finddb.db"]
    assert old.read_bytes() == before


def test_an_upgrade_is_refused_while_another_process_writes(old, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(old, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match="another process held it"):
            upgrade(old)
    assert [path.name for path in old.parent.iterdir()] == ["finddb.db"]


def upgrade_and_record(path: str, number: int) -> None:
    """Child: one of many that upgrade and then write."""
    upgrade(path)
    with Store(path) as store:
        store.record(DEVICE, f"child-{number}", [row()], scope=scope(), environment=VERSIONS)


def test_many_processes_upgrade_once(old):
    with_log(old)
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=upgrade_and_record, args=(str(old), number)) for number in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    assert len(list(old.parent.glob("*.bak"))) == 1
    with Store(old) as store:
        assert len(store.problems()) == 2 + 4
        assert store.check() == ()


def test_an_older_release_that_has_the_file_open_can_still_write(old):
    statement = (
        "INSERT INTO measurement (problem_id, id, solver_id, solver_version, config, status, algorithm, library, "
        "source_hash, kernel_hash, message, samples, protocol, workspace_bytes, deterministic, environment, "
        f"created_at) VALUES (1, 'x', 'ConvB', 1, '{{}}', 'crashed', '', '', '', '', '', 0, '', 0, 1, '', '{at(9)}')"
    )
    with closing(sqlite3.connect(with_log(old))) as older:
        assert older.execute("SELECT count(*) FROM measurement").fetchone() == (5,)
        upgrade(old)
        older.execute(statement)
        older.commit()
    with Store(old) as store:
        (late,) = [row for row in store.history(DEVICE, PROBLEM).rows if row.id == "x"]
    assert (late.contended, late.dropped_samples) == (False, 0)
