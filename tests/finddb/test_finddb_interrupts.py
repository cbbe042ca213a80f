"""Ctrl-C within a use of the FindDB: it reaches the caller, and the FindDB is as good as before."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, row, version_1
from sqlalchemy.exc import StatementError

from miofind.finddb import LayeredStore, Store, open_files
from miofind.finddb.sqlite_engine import connect
from miofind.finddb.sqlite_file import LastingConnection, open_file

pytestmark = pytest.mark.sampled(2)

OTHER = f"{PROBLEM}-other"


class CtrlC:
    """Raises KeyboardInterrupt once, behind the call of SQLite of a number: Python, too, looks for signals there."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.has_come = False

    def __enter__(self) -> CtrlC:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, called: Any) -> None:
        by = getattr(called, "__self__", None)
        if event != "c_return" or not isinstance(by, sqlite3.Connection | sqlite3.Cursor):
            return
        self._left -= 1
        if self._left == 0:
            self.has_come = True
            raise KeyboardInterrupt


USES: dict[str, Callable[[LayeredStore], object]] = {
    "answer": lambda layered: layered.answer(DEVICE, PROBLEM),
    "histories": lambda layered: layered.histories(DEVICE, PROBLEM),
    "record": lambda layered: layered.record(DEVICE, PROBLEM, [row("ConvB")]),
    "queue_recheck": lambda layered: layered.queue_recheck(DEVICE, PROBLEM, "for this test"),
    "clean": lambda layered: layered.clean(DEVICE, OTHER),
    "check": lambda layered: layered.user.check(),
}


def interrupted(use: Callable[[LayeredStore], object], layered: Callable[[], LayeredStore]) -> Iterator[LayeredStore]:
    """FindDBs that were interrupted in a use: behind its first call of SQLite, its second, and so on to its last."""
    number = 0
    while True:
        number += 1
        with layered() as each:
            ctrl_c = CtrlC(number)
            try:
                with ctrl_c:
                    use(each)
            except KeyboardInterrupt:
                pass
            else:
                assert not ctrl_c.has_come, "Ctrl-C was lost"
                assert number > 1, "nothing was interrupted"
                return
            yield each


def assert_records(layered: LayeredStore, user: Store) -> None:
    assert layered.record(DEVICE, OTHER, [row("ConvC")]) is not None
    assert layered.answer(DEVICE, OTHER) is not None
    assert layered.user is user, "it has gone on in memory"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("use", "is_open"), [*((name, True) for name in USES), ("answer", False)], ids=str)
def test_ctrl_c_in_a_use_leaves_the_file_in_use(
    tmp_path: Path, use: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLAlchemy gives up a connection that it interrupts: the process took the database for lost and forgot on."""
    path = tmp_path / "finddb.db"
    with Store(path) as store:
        store.record(DEVICE, PROBLEM, [row("ConvA")])
    number = itertools.count()

    def layered() -> LayeredStore:
        copy = tmp_path / f"{next(number)}.db"
        copy.write_bytes(path.read_bytes())
        made = LayeredStore(Store(copy))
        if is_open:
            made.user.open()
        return made

    for each in interrupted(USES[use], layered):
        user = each.user
        assert user.path is not None
        connection = open_file(user.path, "rw")
        connection.execute("PRAGMA busy_timeout=0")
        connection.executescript("BEGIN IMMEDIATE; ROLLBACK")  # nobody holds the lock
        connection.close()
        assert_records(each, user)
        assert each.answer(DEVICE, PROBLEM) is not None
    assert not caplog.records


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_ctrl_c_in_a_use_of_memory_loses_nothing(use: Callable[[LayeredStore], object]) -> None:
    def layered() -> LayeredStore:
        made = LayeredStore(None)
        made.record(DEVICE, PROBLEM, [row("ConvA")])
        return made

    for each in interrupted(use, layered):
        assert each.answer(DEVICE, PROBLEM) is not None
        assert_records(each, each.user)


def test_ctrl_c_in_a_look_up_leaves_a_release_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older one is read through views that a connection has for itself."""
    path = version_1(tmp_path / "shipped.db")
    with Store(path, read_only=True) as store:
        key = store.problems()[0]

    for each in interrupted(
        lambda layered: layered.answer(key.device, key.network_config),
        lambda: LayeredStore(None, [Store(path, read_only=True)]),
    ):
        assert each.answer(key.device, key.network_config) is not None
        assert len(each.layers) == 2
    assert not caplog.records


def test_ctrl_c_while_another_thread_writes_leaves_its_transaction_alone(tmp_path: Path) -> None:
    with Store(tmp_path / "finddb.db") as store:
        store.record(DEVICE, PROBLEM, [row("ConvA")])
        database = store._database
        with database.write() as writer:
            with pytest.raises(KeyboardInterrupt), database.read():
                raise KeyboardInterrupt
            with database.read():
                assert database._connections.writer is writer
            assert writer.in_transaction()


def test_what_was_given_up_is_not_opened_again_as_another_file(tmp_path: Path) -> None:
    one, other = (connect(lambda name=name: open_file(tmp_path / name, "rwc")) for name in ("one.db", "other.db"))
    with closing(one), closing(other):
        one.invalidate()
        with pytest.raises(StatementError, match="creator"):
            one.exec_driver_sql("SELECT 1")


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_what_speaks_of_the_process_is_not_blamed_on_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """SQLAlchemy wraps what is raised while it makes a statement ready, and the database was given up over it."""

    def fails(*_: object, **__: object) -> None:
        raise error("for this test")

    with LayeredStore(Store(tmp_path / "finddb.db")) as layered:
        layered.record(DEVICE, PROBLEM, [row("ConvA")])
        user = layered.user
        with monkeypatch.context() as patch:
            dialect = type(user._database._opened("reader").dialect)
            patch.setattr(dialect.execution_ctx_cls, "_init_compiled", fails)
            with pytest.raises(error):
                layered.histories(DEVICE, PROBLEM)
        assert layered.histories(DEVICE, PROBLEM)
        assert_records(layered, user)


@pytest.mark.parametrize("put", [os.replace, shutil.copyfile])
@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_a_file_that_was_replaced_after_ctrl_c_is_not_spoiled(
    tmp_path: Path, put: Callable[[Path, Path], object], ends: bool
) -> None:
    """SQLite would write the log of the connection that it closed last into whatever the file is by then."""
    path, new = tmp_path / "finddb.db", tmp_path / "new.db"
    with Store(new) as store:
        store.record(DEVICE, PROBLEM, [row("ConvNew")])
    with Store(path) as store:
        for number in range(40):
            store.record(DEVICE, f"{OTHER}-{number}", [row("ConvOld")])
        if put is os.replace:
            path.with_name("old.db").hardlink_to(path)
        for use in (store._database.read, store._database.write):
            with pytest.raises(KeyboardInterrupt), use():
                raise KeyboardInterrupt
        put(new, path)
        if not ends:
            assert [key.network_config for key in store.problems()] == [PROBLEM]
            store.record(DEVICE, PROBLEM, [row("ConvNewer")])
    with Store(path) as store:
        assert store.check() == ()
        assert [key.network_config for key in store.problems()] == [PROBLEM]
    if put is os.replace:
        with Store(path.with_name("old.db")) as store:
            assert store.check() == ()
            assert len(store.problems()) == 40
    assert not open_files._held


def test_a_use_that_ends_late_hides_no_replacement(tmp_path: Path) -> None:
    """What Ctrl-C meets as it is left is left when its traceback goes, which may be after the block around it."""
    path, new = tmp_path / "finddb.db", tmp_path / "new.db"
    with Store(new) as store:
        store.record(DEVICE, OTHER, [row("ConvNew")])
    with Store(path) as store:
        store.record(DEVICE, PROBLEM, [row("ConvOld")])
        outer, inner = store._database.read(), store._database.read()
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        new.replace(path)
        assert [key.network_config for key in store.problems()] == [OTHER]


def test_look_ups_are_of_the_present_after_ctrl_c_in_the_giving_up_of_an_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, interrupted = tmp_path / "finddb.db", []

    def never_taken_back(driver: LastingConnection) -> None:
        interrupted.append(driver)
        raise KeyboardInterrupt

    def interrupt(patch: pytest.MonkeyPatch) -> None:
        with store._database.snapshot() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM answer").all()
            patch.setattr(LastingConnection, "take_back", never_taken_back)
            raise KeyboardInterrupt

    with Store(path) as writing, Store(path) as store:
        writing.record(DEVICE, PROBLEM, [row("ConvOld")])
        assert store.problems()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt(patch)
        assert interrupted[0].in_transaction, "or the test shows nothing"
        writing.record(DEVICE, PROBLEM, [row("ConvNew")])
        answer = store.answer(DEVICE, PROBLEM)
        assert answer is not None
        assert {each.solver_id for each in answer.rows} == {"ConvOld", "ConvNew"}
