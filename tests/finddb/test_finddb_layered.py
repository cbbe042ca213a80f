"""The user's FindDB over the shipped ones, and finds that go on where a database cannot be used."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, VERSIONS, lacking, row, scope, verdict
from helpers.processes.waiting import LIMIT_S

from miofind.errors import DatabaseError, SchemaVersionError
from miofind.finddb import (
    MEMORY,
    LayeredStore,
    RefusedEntryError,
    Store,
    location,
    open_layered,
    sqlite_database,
    sqlite_file,
    upgrade,
    write_release,
)

pytestmark = pytest.mark.sampled(2)


def make(path: Path, *rows, scoped=("ConvA",)) -> Path:
    """A database in the form of a shipped one."""
    with Store(MEMORY) as source:
        source.record(DEVICE, PROBLEM, rows, scope=scope(*scoped), environment=VERSIONS)
        write_release([source], path)
    return path


def solver_ids(answer) -> list[str]:
    return [row.solver_id for row in answer.rows]


def is_warned_once(caplog) -> bool:
    return [(record.name, record.levelno) for record in caplog.records] == [("miofind", logging.WARNING)]


@pytest.fixture
def shipped(tmp_path):
    with Store(make(tmp_path / "shipped.db", row("Shipped", time_ms=2.0)), read_only=True) as store:
        yield store


def test_the_shipped_answers_where_the_user_has_none(tmp_path, shipped, caplog):
    with LayeredStore(Store(tmp_path / "user.db"), [shipped]) as layered:
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]
        assert layered.answer(DEVICE, "other") is None
        assert layered.answer("cpu|2||", PROBLEM) is None
    assert not caplog.records


def test_reading_makes_no_file(tmp_path, shipped):
    with LayeredStore(Store(tmp_path / "new" / "user.db"), [shipped]) as layered:
        assert layered.answer(DEVICE, PROBLEM) is not None
        assert len(layered.histories(DEVICE, PROBLEM)) == 1
        assert layered.rechecks() == ()
        assert not layered.is_recorded
        assert not (tmp_path / "new").exists()
        layered.record(DEVICE, PROBLEM, [row("ConvB")])
        assert layered.is_recorded
        assert len(layered.histories(DEVICE, PROBLEM)) == 2


def test_the_first_of_the_shipped_answers(tmp_path, shipped):
    with Store(make(tmp_path / "second.db", row("Second")), read_only=True) as second:
        layered = LayeredStore(None, [shipped, second])
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]
        assert [solver_ids(answer) for answer in layered.answers(DEVICE, PROBLEM)] == [["Shipped"], ["Second"]]
        layered.close()


def test_recording_copies_up_what_was_shipped(tmp_path, shipped):
    with LayeredStore(Store(tmp_path / "user.db"), [shipped]) as layered:
        answer = layered.record(DEVICE, PROBLEM, [row("Mine", time_ms=1.0)], scope=scope("Mine"))
        assert solver_ids(answer) == ["Mine", "Shipped"]
        assert lacking(answer, "Mine", "ConvA") == []
        assert layered.answer(DEVICE, PROBLEM) == answer
        assert layered.user.environment(answer.rows[1].environment) == VERSIONS
        layered.record(DEVICE, PROBLEM, [row("Shipped", status="crashed", time_ms=None)])
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Mine"]
        assert layered.user.stats().rows == 3
    assert shipped.path.parent / "user.db" in shipped.path.parent.iterdir()


def test_cleaning_leaves_the_shipped(tmp_path, shipped):
    with LayeredStore(Store(tmp_path / "user.db"), [shipped]) as layered:
        layered.record(DEVICE, PROBLEM, [row("Mine")])
        assert layered.clean(DEVICE, PROBLEM) == 2
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]


def test_rechecks_are_the_users(tmp_path, shipped):
    with LayeredStore(Store(tmp_path / "user.db"), [shipped]) as layered:
        assert layered.queue_recheck(DEVICE, PROBLEM, "driver 13.1")
        assert [note.reason for note in layered.rechecks(DEVICE)] == ["driver 13.1"]
        layered.record(DEVICE, PROBLEM, [row("Mine")], notes=())
        assert layered.rechecks(DEVICE) == ()


def make_folder(path: Path) -> None:
    path.mkdir()


def make_text(path: Path) -> None:
    path.write_text("this is no database" * 1000)


def make_other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")


def make_damaged(path: Path) -> None:
    full(path)
    content = bytearray(path.read_bytes())
    content[100:] = b"\xa5" * (len(content) - 100)
    path.write_bytes(content)


def make_truncated(path: Path) -> None:
    full(path)
    path.write_bytes(path.read_bytes()[:6000])


def make_newer(path: Path) -> None:
    full(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = '4'")
        connection.commit()


def make_without_version(path: Path) -> None:
    full(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM meta")
        connection.commit()


def make_below_a_file(path: Path) -> None:
    path.parent.joinpath("file").write_text("")


def full(path: Path) -> None:
    with Store(path) as store:
        for number in range(50):
            store.record(DEVICE, f"{PROBLEM}-{number}", [row("Old")])


UNUSABLE = {
    "folder": (make_folder, "is a folder"),
    "text": (make_text, "not an SQLite database"),
    "other database": (make_other_database, "something else"),
    "damaged": (make_damaged, "damaged"),
    "truncated": (make_truncated, "damaged"),
    "newer": (make_newer, "schema version 4"),
    "no version": (make_without_version, "something else"),
}


@pytest.mark.parametrize(("spoil", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_file_is_done_without(tmp_path, shipped, caplog, spoil, said):
    path = tmp_path / "user.db"
    spoil(path)
    before = path.read_bytes() if path.is_file() else b""
    with LayeredStore(Store(path), [shipped]) as layered:
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]
        assert solver_ids(layered.record(DEVICE, PROBLEM, [row("New")])) == ["New", "Shipped"]
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["New", "Shipped"]
        assert layered.queue_recheck(DEVICE, PROBLEM, "why")
        assert len(layered.rechecks()) == 1
        assert layered.clean(DEVICE, PROBLEM) == 2
        assert layered.user.path is None
    assert is_warned_once(caplog)
    assert said in caplog.text
    assert "in memory" in caplog.text
    assert str(tmp_path) not in caplog.text
    assert (path.read_bytes() if path.is_file() else b"") == before


@pytest.mark.parametrize(("spoil", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_file_is_refused_in_strict_mode(tmp_path, shipped, caplog, spoil, said):
    path = tmp_path / "user.db"
    spoil(path)
    kind = SchemaVersionError if spoil is make_newer else DatabaseError
    with LayeredStore(Store(path), [shipped], strict=True) as layered:
        for call in (
            lambda: layered.answer(DEVICE, PROBLEM),
            lambda: layered.record(DEVICE, PROBLEM, [row()]),
            lambda: layered.rechecks(),
            lambda: layered.user.add(()),
            lambda: layered.user.open(),
        ):
            with pytest.raises(kind, match=said):
                call()
    assert not caplog.records


@pytest.mark.parametrize("spoil", [make_text, make_damaged, make_newer, None], ids=["text", "damaged", "newer", "gone"])
def test_an_unusable_shipped_file_is_done_without(tmp_path, shipped, caplog, spoil):
    path = tmp_path / "bad.db"
    if spoil is not None:
        spoil(path)
    with Store(path, read_only=True) as bad, LayeredStore(None, [bad, shipped]) as layered:
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]
        assert layered.layers[1:] == (shipped,)
    assert is_warned_once(caplog)
    assert "Going on without it" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    make_below_a_file(tmp_path / "user.db")
    with LayeredStore(Store(tmp_path / "file" / "user.db")) as layered:
        assert solver_ids(layered.record(DEVICE, PROBLEM, [row("New")])) == ["New"]
    assert is_warned_once(caplog)


def test_a_network_file_system(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(location, "network_file_system", lambda path: "nfs4")
    with LayeredStore(Store(tmp_path / "user.db")) as layered:
        assert layered.answer(DEVICE, PROBLEM) is None
        assert solver_ids(layered.record(DEVICE, PROBLEM, [row("New")])) == ["New"]
    assert is_warned_once(caplog)
    assert "network file system (nfs4)" in caplog.text
    assert "MIOFIND_DB" in caplog.text
    assert list(tmp_path.iterdir()) == []


def refuse_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_system_without_locks(tmp_path, shipped, caplog, monkeypatch, is_new):
    """SQLite takes the answer for a lock that another process holds, and waits for half a minute."""
    path = tmp_path / "user.db"
    if not is_new:
        full(path)
    monkeypatch.setattr(fcntl, "lockf", refuse_locks)
    with LayeredStore(Store(path), [shipped]) as layered:
        assert solver_ids(layered.record(DEVICE, PROBLEM, [row("New", time_ms=1.0)])) == ["New", "Shipped"]
    assert is_warned_once(caplog)
    assert "a file system without locks (No locks available)" in caplog.text
    assert "MIOFIND_DB" in caplog.text
    assert path.exists() is not is_new


@pytest.mark.parametrize(
    "use",
    [lambda path: Store(path).open(), lambda path: Store(path, read_only=True).open(), upgrade],
    ids=["write", "read", "upgrade"],
)
def test_a_file_system_without_locks_is_refused_in_commands(tmp_path, monkeypatch, use):
    full(tmp_path / "user.db")
    with closing(sqlite3.connect(tmp_path / "user.db")) as opened:
        opened.execute("SELECT * FROM meta").fetchone()
        monkeypatch.setattr(fcntl, "lockf", refuse_locks)
        with pytest.raises(DatabaseError, match=r"without locks .*name a file on a local disk"):
            use(tmp_path / "user.db")


def record_until_full(layered: LayeredStore) -> int:
    """Record problems until the disk is full; returns how many the file holds then."""
    for number in range(1000):
        try:
            measured = row("Old", message="x" * 500)
            layered.user.record(DEVICE, f"{PROBLEM}-{number}", [measured], verdict=verdict("Old:{}"))
        except DatabaseError:
            return number
    pytest.fail("the disk never was full")


def test_a_full_disk(tmp_path, shipped, caplog, monkeypatch):
    monkeypatch.setattr(
        sqlite_database, "WRITER_PRAGMAS", (*sqlite_database.WRITER_PRAGMAS, "PRAGMA max_page_count=40")
    )
    with LayeredStore(Store(tmp_path / "user.db"), [shipped]) as layered:
        held = record_until_full(layered)
        for number in range(held, held + 5):
            layered.record(DEVICE, f"{PROBLEM}-{number}", [row("New", message="x" * 500)])
        assert layered.user.path is None
        for number in range(held + 5):
            expected = ["Old"] if number < held else ["New"]
            assert solver_ids(layered.answer(DEVICE, f"{PROBLEM}-{number}")) == expected
        again = layered.record(DEVICE, f"{PROBLEM}-0", [row("New", time_ms=0.5)])
        assert solver_ids(again) == ["New", "Old"]
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]
    assert is_warned_once(caplog)
    assert "disk is full" in caplog.text
    with Store(tmp_path / "user.db") as store:
        assert len(store.problems()) == store.stats().verdicts == held > 0
        assert store.check() == ()


def test_a_full_disk_in_strict_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sqlite_database, "WRITER_PRAGMAS", (*sqlite_database.WRITER_PRAGMAS, "PRAGMA max_page_count=40")
    )
    with LayeredStore(Store(tmp_path / "user.db"), strict=True) as layered:
        held = record_until_full(layered)
        with pytest.raises(DatabaseError, match="disk is full"):
            layered.record(DEVICE, f"{PROBLEM}-{held}", [row("New", message="x" * 500)])
        assert solver_ids(layered.answer(DEVICE, f"{PROBLEM}-0")) == ["Old"]
        assert len(layered.user.problems()) == held


@pytest.mark.parametrize("strict", [False, True])
def test_a_file_that_turns_read_only(tmp_path, caplog, strict):
    with LayeredStore(Store(tmp_path / "user.db"), strict=strict) as layered:
        layered.record(DEVICE, PROBLEM, [row("Old")], verdict=verdict("Old:{}"))
        # What SQLite answers on a disk that was mounted anew to be read only.
        layered.user._database.execute_alone("PRAGMA query_only=ON")
        if strict:
            with pytest.raises(DatabaseError, match="it cannot be written"):
                layered.record(DEVICE, "other", [row("New")], verdict=verdict("New:{}"))
            assert len(layered.user.problems()) == 1
        else:
            for number in range(3):
                layered.record(DEVICE, f"{PROBLEM}-{number}", [row("New")], verdict=verdict("New:{}"))
                assert solver_ids(layered.answer(DEVICE, f"{PROBLEM}-{number}")) == ["New"]
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Old"]
    assert len(caplog.records) == (0 if strict else 1)
    with Store(tmp_path / "user.db") as store:
        assert store.history(DEVICE, PROBLEM).verdicts[0].winner == "Old:{}"
        assert len(store.problems()) == 1
        assert store.check() == ()


def test_recording_copies_up_verdicts_and_stores_new_ones(tmp_path):
    with Store(MEMORY) as source:
        source.record(DEVICE, PROBLEM, [row("Shipped")], environment=VERSIONS, verdict=verdict("Shipped:{}"))
        write_release([source], tmp_path / "shipped.db")
    shipped = Store(tmp_path / "shipped.db", read_only=True)
    with LayeredStore(Store(tmp_path / "user.db"), [shipped]) as layered:
        layered.record(DEVICE, PROBLEM, [row("Mine")], verdict=verdict("Mine:{}"))
        history = layered.user.history(DEVICE, PROBLEM)
    assert [item.winner for item in history.verdicts] == ["Shipped:{}", "Mine:{}"]


def test_a_release_in_the_users_place_is_read_and_not_written(tmp_path, caplog):
    path = make(tmp_path / "release.db", row("Shipped"))
    before = path.read_bytes()
    with LayeredStore(Store(path)) as layered:
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]
        assert not caplog.records
        assert solver_ids(layered.record(DEVICE, PROBLEM, [row("Mine", time_ms=0.5)])) == ["Mine", "Shipped"]
    assert is_warned_once(caplog)
    assert "`miofind db merge`" in caplog.text
    assert path.read_bytes() == before


def test_a_locked_file(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.05)
    with LayeredStore(Store(tmp_path / "user.db")) as layered:
        layered.record(DEVICE, PROBLEM, [row("Old")])
        with closing(sqlite3.connect(tmp_path / "user.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert solver_ids(layered.record(DEVICE, PROBLEM, [row("New", time_ms=0.5)])) == ["New", "Old"]
    assert is_warned_once(caplog)
    assert "another process held it" in caplog.text


def test_what_cannot_be_stored_is_refused_and_costs_no_database(tmp_path, caplog):
    with LayeredStore(Store(tmp_path / "user.db")) as layered:
        with pytest.raises(RefusedEntryError):
            layered.record(DEVICE, PROBLEM, [row(time_ms=-1.0)])
        with pytest.raises(RefusedEntryError):
            layered.queue_recheck(DEVICE, PROBLEM, "")
        assert layered.user.path is not None
    assert not caplog.records


def test_a_deleted_file_is_made_again(tmp_path, caplog):
    path = tmp_path / "user.db"
    with Store(path) as store:
        store.record(DEVICE, PROBLEM, [row("Old")])
        for name in list(tmp_path.iterdir()):
            name.unlink()
        store.record(DEVICE, PROBLEM, [row("New")])
        assert is_warned_once(caplog)
        assert "was removed or replaced" in caplog.text
        assert solver_ids(store.answer(DEVICE, PROBLEM)) == ["New"]
    with Store(path) as store:
        assert solver_ids(store.answer(DEVICE, PROBLEM)) == ["New"]


def test_a_closed_layering_does_not_go_on_in_memory(tmp_path):
    layered = LayeredStore(Store(tmp_path / "user.db"))
    layered.close()
    layered.close()
    with pytest.raises(DatabaseError, match="closed"):
        layered.record(DEVICE, PROBLEM, [row()])


def unprivileged(path: str, said) -> None:
    """Child: as a user without rights, finds go on in memory and strict mode refuses."""
    with LayeredStore(Store(MEMORY)) as warm_up:
        warm_up.record(DEVICE, PROBLEM, [row("New")])
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("miofind").addHandler(handler)
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    with LayeredStore(Store(path)) as layered:
        answer = layered.record(DEVICE, PROBLEM, [row("New", time_ms=0.5)])
        found = [solver_ids(answer), layered.user.path is None]
    try:
        with Store(path) as store:
            store.record(DEVICE, PROBLEM, [row("New")])
        found.append("no error")
    except DatabaseError as error:
        found.append(str(error))
    readable = Path(path).exists()
    if readable:
        with Store(path, read_only=True) as store:
            found.append(len(store.problems()))
    said.put((found, messages, readable))


@pytest.mark.parametrize("what", ["file", "folder", "new file"])
def test_a_place_without_write_permission(what):
    folder = Path(tempfile.mkdtemp(prefix="finddb", dir="/tmp"))
    path = folder / "user.db"
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    try:
        if what != "new file":
            full(path)
            path.chmod(0o444)
        folder.chmod(0o777 if what == "file" else 0o555)
        child = context.Process(target=unprivileged, args=(str(path), said))
        child.start()
        (ids, in_memory, refusal, *held), messages, readable = said.get(timeout=LIMIT_S)
        child.join()
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert ids == ["New"]
    assert in_memory
    assert "cannot be" in refusal
    assert "another file" in refusal
    assert len(messages) == 1
    assert held == ([50] if readable else [])
    assert readable == (what != "new file")


def test_open_layered_reads_the_environment(tmp_path, monkeypatch):
    make(tmp_path / "a.db", row("Shipped"))
    monkeypatch.setenv("MIOFIND_DB", str(tmp_path / "user.db"))
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(tmp_path / "a.db"))
    with open_layered() as layered:
        assert solver_ids(layered.answer(DEVICE, PROBLEM)) == ["Shipped"]
        assert layered.user.path == tmp_path / "user.db"
        assert not layered.strict
    with open_layered(MEMORY, strict=True) as layered:
        assert layered.user.path is None
        assert layered.strict


def test_open_layered_refuses_other_servers(monkeypatch, caplog):
    """In the environment they stop no find, as any other FindDB of the user's that cannot be used."""
    with pytest.raises(DatabaseError, match="Name a local SQLite file, or a PostgreSQL server"):
        open_layered("mysql://host/finddb")
    monkeypatch.setenv("MIOFIND_DB", "mysql://host/finddb")
    with pytest.raises(DatabaseError, match="Name a local SQLite file, or a PostgreSQL server"):
        open_layered(strict=True)
    with open_layered() as layered:
        assert layered.user.in_memory
    assert "MIOFIND_DB: a FindDB named by mysql://... cannot be used" in caplog.text
    assert "Going on in memory" in caplog.text


def test_a_new_file_that_may_not_be_made_says_why(monkeypatch, tmp_path):
    """It was "No such file or directory: correct the permissions"."""
    real = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_CREAT and str(path).endswith("new.db"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with Store(tmp_path / "new.db") as store, pytest.raises(DatabaseError, match="Permission denied: correct the perm"):
        store.add(())


def test_a_row_of_another_file_that_cannot_be_stored_costs_no_measurement(tmp_path, shipped, caplog, monkeypatch):
    def refuse(self, histories):
        raise RefusedEntryError("a row says too much")

    monkeypatch.setattr(Store, "add", refuse)
    with LayeredStore(Store(tmp_path / "user.db"), [shipped], strict=True) as layered:
        answer = layered.record(DEVICE, PROBLEM, [row("New", time_ms=0.1)])
    assert [found.solver_id for found in answer.rows] == ["New"]
    assert "is not copied: a row says too much" in caplog.text
