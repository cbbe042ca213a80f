"""Database files read beside SQLite: nobody's lock is lost, and a file is what was opened to be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, row, scope

import miofind
from miofind.cli import main
from miofind.errors import DatabaseError, SolutionFileError
from miofind.finddb import Store, is_database, open_files, upgrade, write_release
from miofind.finddb.open_files import FileKey, acquire, acquired, release

SWITCH = """
import sqlite3, sys
try:
    print(sqlite3.connect(sys.argv[1], timeout=0).execute("PRAGMA journal_mode=DELETE").fetchone()[0])
except sqlite3.OperationalError as error:
    print(error)
"""


@pytest.fixture
def held_before() -> set[FileKey]:
    """Files that tests before have open still."""
    return set(open_files._held)


def said_of_a_switch(path: Path) -> str:
    """What SQLite tells another process that would remove the log, which needs every lock."""
    return subprocess.run([sys.executable, "-c", SWITCH, path], capture_output=True, text=True, check=True).stdout


def read_it(path: Path) -> None:
    with Store(path, read_only=True) as store:
        assert store.problems()


def release_it(path: Path) -> None:
    with Store(path, read_only=True) as store:
        write_release([store], path.with_name("release.db"))


@pytest.mark.parametrize("use", [is_database, read_it, release_it, upgrade], ids=lambda use: use.__name__)
def test_no_other_use_of_a_file_costs_its_writer_the_locks(tmp_path: Path, use: Callable[[Path], object]) -> None:
    """The last to close a file removes its log: one whose locks are lost goes on writing into a log without a name."""
    path = tmp_path / "finddb.db"
    with Store(path) as store:
        store.record(DEVICE, PROBLEM, [row()], scope=scope())
        use(path)
        assert said_of_a_switch(path) == "database is locked\n"
        store.record(DEVICE, "another", [row()], scope=scope())
    with Store(path, read_only=True) as store:
        assert len(store.problems()) == 2


def test_a_file_that_nobody_uses_is_closed(tmp_path: Path, held_before: set[FileKey]) -> None:
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else set()
    with Store(tmp_path / "finddb.db") as store, Store(tmp_path / "finddb.db", read_only=True) as other:
        store.record(DEVICE, PROBLEM, [row()])
        assert other.problems()
        assert is_database(tmp_path / "finddb.db")
    assert open_files._held.keys() <= held_before
    if before:
        assert set(os.listdir("/proc/self/fd")) <= before


def test_who_writes_reads_what_was_opened_to_be_written(tmp_path: Path, held_before: set[FileKey]) -> None:
    """A file system in layers makes a copy of a file then, and shows the original to who had it open before."""
    path = tmp_path / "finddb.db"
    path.write_bytes(b"x")
    reading, writing = acquire(path), acquire(path, to_write=True)
    assert os.pwrite(writing.descriptor, b"y", 0) == 1
    assert reading.descriptor != writing.descriptor
    with acquired(path) as third:
        assert third.descriptor == writing.descriptor
    release(writing)
    assert reading.header == b"y"
    release(reading)
    assert open_files._held.keys() <= held_before


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, held_before: set[FileKey]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for to_write in (False, True):
        with pytest.raises(OSError, match="no regular file"):
            acquire(tmp_path / "pipe", to_write=to_write)
    assert open_files._held.keys() <= held_before


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_nothing_that_is_written_takes_the_place_of_a_database_or_its_log(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "finddb.db"
    with Store(path) as store, miofind.Handle("cpu", database=tmp_path / "other.db") as handle:
        store.record(DEVICE, PROBLEM, [row()], environment={})
        target = tmp_path / f"finddb.db{suffix}"
        target.touch()
        problem = miofind.ProblemDescription.convolution(x=(1, 2, 4, 4), w=(2, 2, 1, 1))
        found = miofind.find_solutions(problem, handle=handle)
        before = target.read_bytes()
        with pytest.raises(SolutionFileError, match="is a database or its log"):
            found[0].save(target)
        ended = CliRunner().invoke(main, ["db", "export", "--db", str(tmp_path / "other.db"), str(target)])
        assert ended.exit_code != 0
        if suffix:
            with pytest.raises(DatabaseError, match="is the log of a database"):
                write_release([handle.database.user], target)
        assert target.read_bytes() == before


def test_a_file_of_several_names_is_not_written_to(tmp_path: Path) -> None:
    path, other = tmp_path / "finddb.db", tmp_path / "other.db"
    with Store(path) as store:
        store.record(DEVICE, PROBLEM, [row()], environment={})
    os.link(path, other)
    for name in (path, other):
        with pytest.raises(DatabaseError, match="has several names"), Store(name) as store:
            store.record(DEVICE, PROBLEM, [row()], environment={})
        with Store(name, read_only=True) as store:
            assert len(list(store.rows())) == 1
