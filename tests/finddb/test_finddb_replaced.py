"""A FindDB that is moved, replaced, overwritten or deleted while processes have it open, or after one was killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from helpers.finddb import finddb_children
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, VERSIONS, contents, row, scope
from helpers.processes.forks import in_a_fork
from helpers.processes.waiting import LIMIT_S

from miofind.errors import DatabaseError
from miofind.finddb import MEMORY, LayeredStore, Store, sqlite_database, upgrade, write_release

pytestmark = pytest.mark.sampled(3)

OLD, NEW = "old", "new"
MANY = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "finddb.db"


def filled(path: Path, name: str, count: int = MANY) -> Path:
    """A FindDB of problems whose names and solvers tell that they belong together, closed."""
    with Store(path) as store:
        for number in range(count):
            store.record(DEVICE, f"{name}-{number}", [row(name)], scope=scope(name), environment=VERSIONS)
    return path


def released(path: Path, name: str) -> Path:
    with Store(filled(path.with_name("source.db"), name), read_only=True) as source:
        write_release([source], path)
    return path


def names(store: Store) -> set[str]:
    """What its problems begin with; each has rows of its own solver alone, and the file is sound."""
    for key, found in store.rows():
        assert key.network_config.startswith(found.solver_id)
    assert store.check() == ()
    return {key.network_config.partition("-")[0] for key in store.problems()}


def record(store: Store, name: str, number: int = 0) -> None:
    answer = store.record(DEVICE, f"{name}-{number}", [row(name)], scope=scope(name))
    assert {found.solver_id for found in answer.rows} == {name}


class Nursery:
    """The process that forks the children of this module."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(LIMIT_S)
        command = [sys.executable, str(Path(finddb_children.__file__)), "nursery", str(theirs.fileno())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, env=environment, pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def ask(self, order: str, pipes: Sequence[int] = ()) -> int:
        socket.send_fds(self._orders, [order.encode()], pipes)
        return int(self._orders.recv(100))

    def end(self) -> None:
        self._orders.close()
        assert self._process.wait(LIMIT_S) == 0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    yield started
    started.end()


class Child:
    """A process of its own that has a FindDB open and does what it is told, one thing after the other."""

    def __init__(self, nursery: Nursery, path: Path) -> None:
        stdin, orders = os.pipe()
        answers, stdout = os.pipe()
        self._nursery = nursery
        self._pid = nursery.ask(f"start {path}", [stdin, stdout])
        self._status: int | None = None
        os.close(stdin)
        os.close(stdout)
        self._orders, self._answers = os.fdopen(orders, "w"), os.fdopen(answers)
        assert self._answers.readline() == "begun\n"

    def ask(self, *words: object) -> str:
        """What it says when it has done that."""
        self._orders.write(" ".join(map(str, words)) + "\n")
        self._orders.flush()
        return self._answers.readline().rstrip("\n")

    def kill(self) -> None:
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()

    def _wait(self) -> int:
        self._status = self._nursery.ask(f"wait {self._pid}")
        return self._status

    def end(self) -> None:
        """Have it close the FindDB and exit."""
        self._orders.close()
        assert self._wait() == 0

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._orders.close()
        self._answers.close()


@pytest.fixture
def child(nursery: Nursery, path: Path) -> Iterator[Child]:
    """One that has recorded problems, which are in the log."""
    with Child(nursery, path) as started:
        assert started.ask("record", OLD, MANY) == str(MANY)
        assert path.with_name("finddb.db-wal").stat().st_size > 0
        yield started


def moved_over(path: Path, tmp_path: Path) -> None:
    filled(tmp_path / "new.db", NEW).replace(path)


def moved_release_over(path: Path, tmp_path: Path) -> None:
    released(tmp_path / "new.db", NEW).replace(path)


def copied_over(path: Path, tmp_path: Path) -> None:
    shutil.copyfile(filled(tmp_path / "new.db", NEW), path)


def removed_and_copied(path: Path, tmp_path: Path) -> None:
    path.unlink()
    shutil.copyfile(filled(tmp_path / "new.db", NEW), path)


def linked(path: Path, tmp_path: Path) -> None:
    path.unlink()
    path.symlink_to(filled(tmp_path / "new.db", NEW))


WAYS = [moved_over, copied_over, removed_and_copied, linked]


@pytest.mark.parametrize("put", WAYS)
def test_a_process_goes_on_in_the_file_that_was_put_there(path, tmp_path, caplog, put):
    with Store(path) as store:
        for number in range(MANY):
            record(store, OLD, number)
        put(path, tmp_path)
        assert names(store) == {NEW}
        assert len(caplog.records) >= 1
        assert "finddb.db was " in caplog.text
        record(store, OLD, MANY)
        assert names(store) == {NEW, OLD}
        assert len(store.problems()) == MANY + 1
    with Store(path) as store:
        assert names(store) == {NEW, OLD}
        assert len(store.problems()) == MANY + 1


@pytest.mark.parametrize("put", [*WAYS, moved_release_over])
def test_the_log_of_a_killed_process_does_not_reach_the_file_that_was_put_there(path, tmp_path, child, caplog, put):
    child.kill()
    put(path, tmp_path)
    with Store(path) as store:
        assert names(store) == {NEW}
        assert len(store.problems()) == MANY
    if put is not linked:  # beside the file that the link leads to there is none
        assert "is of another file" in caplog.text
        assert path.with_name("finddb.db-wal.1.aside").exists()


@pytest.mark.parametrize("put", [*WAYS, moved_release_over])
def test_one_who_only_reads_does_not_take_the_log_of_another_file(path, tmp_path, child, put):
    child.kill()
    put(path, tmp_path)
    before = sorted(tmp_path.glob("finddb*"))
    with Store(path, read_only=True) as store, Store(MEMORY) as target:
        assert names(store) == {NEW}
        assert target.merge(store) == 2 * MANY
    assert sorted(tmp_path.glob("finddb*")) == before


@pytest.mark.parametrize("put", WAYS)
def test_a_later_process_and_the_one_that_had_the_old_file_open_share_the_new_one(path, tmp_path, child, put):
    put(path, tmp_path)
    with Store(path) as store:
        assert names(store) == {NEW}
        record(store, "mine", 0)
        assert child.ask("record", "theirs", 3) == "3"
        assert names(store) == {NEW, "mine", "theirs"}
        record(store, "mine", 1)
        assert child.ask("count") == str(MANY + 5)
        child.end()
    with Store(path) as store:
        assert names(store) == {NEW, "mine", "theirs"}
        assert len(store.problems()) == MANY + 5


@pytest.mark.parametrize("put", WAYS)
def test_a_process_that_ends_without_having_noticed_spoils_nothing(path, tmp_path, child, put):
    put(path, tmp_path)
    child.end()
    with Store(path) as store:
        assert names(store) == {NEW}
        record(store, "mine")
    with Store(path) as store:
        assert names(store) == {NEW, "mine"}


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "goes on"])
def test_what_was_recorded_is_in_the_file_that_was_moved_away(path, tmp_path, child, ends):
    path.rename(tmp_path / "kept.db")
    moved_over(path, tmp_path)
    child.end() if ends else child.ask("record", "theirs", 1)
    with Store(tmp_path / "kept.db") as kept:
        assert names(kept) == {OLD}
        assert len(kept.problems()) == MANY
    with Store(path) as store:
        assert names(store) == ({NEW} if ends else {NEW, "theirs"})


def test_what_a_killed_process_had_recorded_can_be_read_with_the_file_that_it_is_of(path, tmp_path, child):
    child.kill()
    path.rename(tmp_path / "kept.db")
    with Store(filled(path, NEW)) as store:
        assert names(store) == {NEW}
    path.with_name("finddb.db-wal.1.aside").rename(tmp_path / "kept.db-wal")
    with Store(tmp_path / "kept.db") as kept:
        assert names(kept) == {OLD}
        assert len(kept.problems()) == MANY


def test_a_folder_that_was_copied_with_a_log_keeps_all_that_is_in_it(path, tmp_path, child, caplog):
    child.kill()
    shutil.copytree(tmp_path, copy := tmp_path.with_name(f"{tmp_path.name}-copy"))
    for place in (copy / path.name, path):
        with Store(place) as store:
            assert names(store) == {OLD}
            assert len(store.problems()) == MANY
    assert not caplog.records


@pytest.mark.parametrize("since", [0, 1, 3 * MANY], ids=["at once", "soon", "later"])
def test_a_backup_that_is_brought_back_is_that_backup(path, tmp_path, child, since):
    """It knows the file's own past: numbers that only told files apart would take the log for its own."""
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(tmp_path / "backup.db")) as target:
        source.backup(target)
    child.ask("record", "later", since)
    child.kill()
    shutil.copyfile(tmp_path / "backup.db", path)
    with Store(path) as store:
        found = names(store)
        assert len(store.problems()) in (MANY, MANY + since)
        assert OLD in found


def test_a_deleted_file_is_made_anew_beside_one_who_still_has_it_open(path, child):
    path.unlink()
    with Store(path) as store:
        assert store.problems() == ()
        record(store, "mine")
        assert child.ask("record", "theirs", 2) == "2"
        assert names(store) == {"mine", "theirs"}


def test_many_processes_find_the_new_file_alike(path, tmp_path, nursery):
    """Each takes the old log out of the way; none may take the new one."""
    children = [Child(nursery, path) for _ in range(3)]
    try:
        for number, each in enumerate(children):
            assert each.ask("record", f"{OLD}{number}", 5) == "5"
        moved_over(path, tmp_path)
        for _ in range(3):
            for each in children:
                each.ask("tell", "record", NEW, 7)
            assert [each.ask("wait") for each in children] == ["7"] * len(children)
        for each in children:
            each.end()
    finally:
        for each in children:
            each.__exit__()
    with Store(path) as store:
        assert names(store) == {NEW}
        assert len(store.problems()) == MANY
        assert store.stats().rows == MANY + 3 * 3 * 7
    assert not path.with_name("finddb.db-wal").exists()


def test_a_shipped_file_that_was_replaced_is_read_anew(path, tmp_path):
    with Store(released(path, OLD), read_only=True) as shipped, LayeredStore(None, [shipped]) as layered:
        assert layered.answer(DEVICE, f"{OLD}-0")
        assert layered.answer("another device", f"{OLD}-0") is None
        with Store(MEMORY) as source:
            source.record("another device", PROBLEM, [row(NEW)], scope=scope(NEW))
            write_release([source], path)
        assert layered.answer(DEVICE, f"{OLD}-0") is None
        assert layered.answer("another device", PROBLEM)
        shutil.copyfile(released(tmp_path / "third.db", "third"), path)
        assert layered.answer(DEVICE, "third-0")
        assert layered.answer("another device", PROBLEM) is None


def test_a_history_is_never_put_together_from_two_files(path, tmp_path, monkeypatch):
    monkeypatch.setattr("miofind.finddb.sqlite_database.BATCH", 10)
    with Store(filled(path, OLD)) as store:
        histories = store.histories()
        assert next(histories).rows[0].solver_id == OLD
        moved_over(path, tmp_path)
        with pytest.raises(DatabaseError, match="was replaced while it was read"):
            list(histories)


def test_a_history_is_never_that_of_a_problem_which_took_anothers_number(path, monkeypatch):
    monkeypatch.setattr("miofind.finddb.sqlite_database.BATCH", 10)
    with Store(filled(path, OLD)) as store, Store(path) as other:
        histories = store.histories()
        read = [next(histories) for _ in range(10)]
        last = other.problems()[-1].network_config
        assert last not in {history.network_config for history in read}
        for key in other.problems():
            other.clean(key.device, key.network_config)
        for number in range(MANY):
            record(other, NEW, number)
        assert list(histories) == []


def test_a_fork_while_a_file_is_read_changes_no_file(path, monkeypatch):
    monkeypatch.setattr("miofind.finddb.sqlite_database.BATCH", 10)
    with Store(filled(path, OLD)) as store:
        histories = store.histories()
        next(histories)
        sqlite_database._before_fork()
        sqlite_database._after_fork()
        assert len(list(histories)) == MANY - 1


@pytest.mark.parametrize("use", ["upgrade", "release"])
def test_no_other_use_takes_the_log_of_another_file(path, tmp_path, child, use):
    child.kill()
    if use == "upgrade":
        moved_over(path, tmp_path)
        upgrade(path)
    else:
        moved_release_over(path, tmp_path)
        with Store(filled(tmp_path / "more.db", NEW)) as source:
            write_release([source], path)
    with Store(path, read_only=True) as store:
        assert names(store) == {NEW}


def test_a_log_that_no_process_of_this_release_wrote_is_kept(path, child, caplog):
    """An older release, or SQLite's own shell, draws no numbers."""
    child.end()

    def be_killed() -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version=0")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("INSERT INTO meta VALUES ('note', 'kept')")
            connection.commit()
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_fork(be_killed) == -signal.SIGKILL
    with Store(path) as store:
        assert names(store) == {OLD}
        with store._database.read() as connection:
            found = connection.exec_driver_sql("SELECT value FROM meta WHERE key = 'note'").scalar()
        assert found == "kept"
    assert not caplog.records
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() != (0,)


def test_a_disk_without_room_for_a_copy_of_the_log_spoils_nothing(path, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Store(path) as store:
        for number in range(MANY):
            record(store, OLD, number)
        copied_over(path, tmp_path)
        monkeypatch.setattr("miofind.finddb.logs.shutil.copyfile", fail)
    monkeypatch.undo()
    with Store(path) as store:
        assert names(store) == {NEW}
        assert len(store.problems()) == MANY


def test_a_log_is_not_opened_without_room_to_keep_it(path, tmp_path, child, monkeypatch):
    child.kill()
    moved_over(path, tmp_path)
    log = path.with_name("finddb.db-wal").read_bytes()

    def fail(_: Path, target: Path) -> None:
        target.write_bytes(log[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("miofind.finddb.logs.shutil.copyfile", fail)
    with Store(path) as store, pytest.raises(DatabaseError, match="No space left"):
        store.problems()
    assert path.with_name("finddb.db-wal").read_bytes() == log
    assert not list(tmp_path.glob("*.aside"))


def test_contents_survive_what_is_set_aside(path, tmp_path, child):
    """The new file is byte for byte what was put there, as far as SQLite reads it."""
    child.kill()
    with Store(filled(tmp_path / "new.db", NEW)) as new:
        expected = contents(new)
    shutil.copyfile(tmp_path / "new.db", path)
    with Store(path) as store:
        assert contents(store) == expected
