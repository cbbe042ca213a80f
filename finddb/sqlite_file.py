"""How SQLite is spoken to: settings of a connection, ways to open a file, and errors that say what to do.

Files may come from anywhere, so connections run no code that a file holds and read no value beyond a bound. Nothing
here knows a table.
"""

from __future__ import annotations

import logging
import random
import sqlite3
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from miofind.errors import DamagedDatabaseError, DatabaseError, file_advice
from miofind.finddb import location, logs, open_files
from miofind.finddb.legible import UnreadableEntryError
from miofind.finddb.open_files import OpenFile

logger = logging.getLogger("miofind")

BUSY_TIMEOUT_S = 30.0
_LONGEST_PAUSE_S = 0.004
_BUSY_PRAGMA = f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}"

_PRAGMAS = (
    "PRAGMA foreign_keys=ON",
    "PRAGMA trusted_schema=OFF",
    "PRAGMA cell_size_check=ON",
    _BUSY_PRAGMA,
)
WRITER_PRAGMAS = ("PRAGMA synchronous=NORMAL", "PRAGMA journal_size_limit=67108864")

LOGS = ("-wal", "-journal")
"""What SQLite adds to a file's name for what belongs into it: a log of what is new, a journal of what was there."""

MAX_VALUE_BYTES = 1 << 24
"""Of one column's value: the answer to a problem is far smaller, and a file from elsewhere could hold a gigabyte."""

_ADVICE = {
    sqlite3.SQLITE_BUSY: f"another process held it for {BUSY_TIMEOUT_S:.0f} s: end that process, or name another file",
    sqlite3.SQLITE_READONLY: "it cannot be written: correct its permissions, name another file, or only read it by "
    "naming it in MIOFIND_SYSTEM_DB",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: correct the permissions of the file and its folder, or name "
    "another file",
    sqlite3.SQLITE_FULL: "the disk is full: make room, or name a file on another disk",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write: check its room and health, or name another file",
    sqlite3.SQLITE_CORRUPT: "it is damaged: move it away, then import an export of it or let it be filled anew",
    sqlite3.SQLITE_TOOBIG: f"it holds a text of more than {MAX_VALUE_BYTES >> 20} MiB, which no FindDB does: do not "
    "trust it, name another file",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database: name another file, or move this one away; of an export, "
    "`miofind db import --db NEW_FILE` makes a FindDB",
}
_ADVICE[sqlite3.SQLITE_LOCKED] = _ADVICE[sqlite3.SQLITE_BUSY]
_ADVICE[sqlite3.SQLITE_PERM] = _ADVICE[sqlite3.SQLITE_CANTOPEN]

# Of the driver's message where a text is none, which has no code of SQLite's and quotes what is stored.
_NO_TEXT = "Could not decode to UTF-8"


class _ReleasingConnection(sqlite3.Connection):
    """A connection that lets go of its locks when it is closed: else it would not while a traceback keeps a cursor."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._cursors: list[weakref.ref[sqlite3.Cursor]] = []

    def cursor(self, *arguments: Any) -> Any:
        """A cursor; `execute` asks for one, too."""
        made = super().cursor(*arguments)
        # No WeakSet: a Ctrl-C in the callback by which that forgets would be swallowed.
        self._cursors = [*(known for known in self._cursors if known() is not None), weakref.ref(made)]
        return made

    def take_back(self) -> None:
        """End what is being read and written. Harmless when repeated."""
        with suppress(sqlite3.Error):
            for known in self._cursors:
                cursor = known()
                if cursor is not None:
                    cursor.close()
            if self.in_transaction:
                self.rollback()

    def close(self) -> None:
        """Take back what was begun, and close."""
        self.take_back()
        super().close()


class LastingConnection(_ReleasingConnection):
    """A connection that lasts until `end`: SQLAlchemy closes one that something has interrupted.

    A database in memory would be lost then, and SQLite would write the log of a file into whatever that is by now:
    whoever ends one looks first.
    """

    def close(self) -> None:
        """Take back what was begun."""
        self.take_back()

    def end(self) -> None:
        """Close it. Harmless when repeated."""
        super().close()


_Opened = TypeVar("_Opened", bound=_ReleasingConnection)


def check_writable_place(path: Path) -> None:
    """Refuses a path at which no database can be written safely.

    Raises:
        DatabaseError: it is a folder, or lies on a network file system.
    """
    where = location.shown(path)
    if path.is_dir():
        raise DatabaseError(f"{where} is a folder: name a file in it")
    kind = location.network_file_system(path)
    if kind:
        raise DatabaseError(
            f"{where} is on a network file system ({kind}), where SQLite's log is unsafe: "
            "set MIOFIND_DB to a file on a local disk"
        )


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turns what goes wrong in the block into a DatabaseError about the file `where`."""
    try:
        yield
    except UnreadableEntryError as error:
        raise DamagedDatabaseError(
            f"{where} holds an entry that cannot be read ({error}): check the database"
        ) from error
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise _database_error(where, error) from error
    except Exception as error:
        # What is not imported, or is just being imported by another thread, has raised nothing.
        kind = getattr(sys.modules.get("sqlalchemy.exc"), "SQLAlchemyError", None)
        if kind is None or not isinstance(error, kind):
            raise
        cause = getattr(error, "orig", None) or error
        if isinstance(cause, (MemoryError, RecursionError)):  # they speak of the process, not of the file
            raise cause from None
        raise _database_error(where, cause) from error


def _database_error(where: str, error: BaseException) -> DatabaseError:
    if isinstance(error, OSError):
        reason = f"{error.strerror or type(error).__name__}: {file_advice(error)}"
        return DatabaseError(f"{where} cannot be used: {reason}")
    if isinstance(error, UnicodeDecodeError) or _NO_TEXT in str(error):  # the first, of SQLite's own message
        return DamagedDatabaseError(f"{where} is damaged: restore it from a copy, or name another file")
    code = getattr(error, "sqlite_errorcode", None)
    advice = _ADVICE.get(code & 0xFF) if isinstance(code, int) else None
    told = " ".join(str(error).split())[:200]  # SQLite's messages may hold what is stored
    is_damage = isinstance(code, int) and code & 0xFF == sqlite3.SQLITE_CORRUPT
    kind = DamagedDatabaseError if is_damage else DatabaseError
    return kind(f"{where} cannot be used: {advice or f'{told}: run `miofind db check` on it'}")


def open_file(path: Path, mode: str) -> sqlite3.Connection:
    """A connection of the driver.

    Args:
        mode: rwc makes the file, rw writes, ro reads; with &immutable=1 no lock is taken and no log looked for.
    """
    return _open(path, mode, _ReleasingConnection)


def open_lasting(path: Path, mode: str) -> LastingConnection:
    """As `open_file`, a connection that lasts until it is ended."""
    return _open(path, mode, LastingConnection)


def open_memory() -> LastingConnection:
    """A connection to a new database in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, factory=LastingConnection)
    return _set_up(connection)


def _open(path: Path, mode: str, kind: type[_Opened]) -> _Opened:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S, factory=kind
    )
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    return _set_up(connection)


def _set_up(connection: _Opened) -> _Opened:
    try:
        execute(connection, *_PRAGMAS)
    except BaseException:
        _ReleasingConnection.close(connection)  # which ends a lasting one, too
        raise
    return connection


def execute(connection: sqlite3.Connection, *statements: str) -> None:
    """Execute statements that give nothing."""
    for statement in statements:
        connection.execute(statement).close()


def begin_immediate(connection: sqlite3.Connection) -> None:
    """Begin a transaction with the write lock held.

    BEGIN alone takes the lock at the first write, where SQLite does not wait if another process wrote since. SQLite's
    own waiting sleeps the longer the longer it waits, up to 100 ms: who came last gets the lock, and of 16 writers some
    wait for seconds. Here all that wait try alike.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    pause_s = 0.0005
    connection.execute("PRAGMA busy_timeout=0").close()
    try:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE").close()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    finally:
        connection.execute(_BUSY_PRAGMA).close()


def use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log, which SQLite refuses without waiting while another process opens the file too."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return execute(connection, "PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def fold_logs(path: Path) -> None:
    """Bring a file to the state that its log or journal tells of, and remove those: they would spoil what replaces it.

    Raises:
        DatabaseError: another process uses the file, or it is no database.
    """
    where = location.shown(path)
    with translated(where):
        if path.exists():
            with open_files.acquired(path, to_write=True) as file:
                set_log_aside(path, file)
        beside = [log for log in (path.with_name(path.name + suffix) for suffix in LOGS) if log.exists()]
        if not path.exists():
            for log in beside:
                log.unlink()
        elif any(log.stat().st_size for log in beside):
            with closing(open_file(path, "rw")) as connection:
                for statement in ("PRAGMA schema_version", "PRAGMA journal_mode=DELETE"):
                    connection.execute(statement).close()


def set_log_aside(path: Path, file: OpenFile) -> None:
    """Take a log of another file out of a database's way, and say so."""
    aside = logs.set_foreign_aside(path, file)
    if aside is not None:
        logger.warning(
            "%s: the log beside it is of another file, which was there before, and is kept as %s: what a process had "
            "not yet written into that file can be read where it is named as that file's log",
            location.shown(path),
            aside.name,
        )


def checkpoint(connection: sqlite3.Connection) -> bool:
    """Write what is in the log into the database file that is open; returns whether that is all."""
    busy, in_log, written = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return not busy and in_log == written
