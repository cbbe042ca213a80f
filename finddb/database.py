"""Connections to one SQLite file: how it is opened, locked, shared by threads and kept out of forked children.

One connection reads and one writes, each under a lock, so that a look-up never waits for another thread's write. No
connection is open across a fork: SQLite forbids it (sqlite.org/howtocorrupt.html, 2.6). It knows no rows.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from miofind.errors import DatabaseError, MiofindError
from miofind.finddb import location, schema

BUSY_TIMEOUT_S = 30.0

PRAGMAS = ("PRAGMA foreign_keys=ON", "PRAGMA trusted_schema=OFF", f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
WRITER_PRAGMAS = ("PRAGMA synchronous=NORMAL", "PRAGMA journal_size_limit=67108864")

_ADVICE = {
    sqlite3.SQLITE_BUSY: f"another process held it for {BUSY_TIMEOUT_S:.0f} s: end that process, or name another file",
    sqlite3.SQLITE_READONLY: "it cannot be written: correct its permissions, name another file, or only read it by "
    "naming it in MIOFIND_SYSTEM_DB",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: correct the permissions of the file and its folder, or name "
    "another file",
    sqlite3.SQLITE_FULL: "the disk is full: make room, or name a file on another disk",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write: check its room and health, or name another file",
    sqlite3.SQLITE_CORRUPT: "it is damaged: move it away, then import an export of it or let it be filled anew",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database: name another file, or move this one away",
}
_ADVICE[sqlite3.SQLITE_LOCKED] = _ADVICE[sqlite3.SQLITE_BUSY]
_ADVICE[sqlite3.SQLITE_PERM] = _ADVICE[sqlite3.SQLITE_CANTOPEN]

FileKey = tuple[int, int]


class UnreadableEntryError(Exception):
    """An entry of the database that makes no sense; it leaves `read` and `write` as a DatabaseError."""


@contextmanager
def legible() -> Iterator[None]:
    """Marks a block that makes sense of what is stored."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, MiofindError):
            raise
        raise UnreadableEntryError(str(error)) from error


class _Connections:
    """The open connections of one process; `file` tells whether the path still names the file they have open."""

    def __init__(self) -> None:
        self.reader: Connection | None = None
        self.writer: Connection | None = None
        self.file: FileKey | None = None

    def close(self) -> None:
        """Close both; harmless when repeated."""
        for connection in (self.reader, self.writer):
            if connection is not None:
                connection.close()
        self.reader = self.writer = self.file = None


class Database:
    """One SQLite database, opened on first use. Threads may share it; a forked child opens its own connections.

    Args:
        path: the file, None for memory.
        read_only: open an existing file, never write to it or beside it.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        self.where = location.shown(path)
        self.is_immutable = False
        self._connections = _Connections()
        self._closed = False
        self._open_lock = threading.RLock()
        self._write_lock = threading.RLock()
        shares_one_connection = path is None or read_only
        self._read_lock = self._write_lock if shares_one_connection else threading.RLock()
        self._finalizer = weakref.finalize(self, _Connections.close, self._connections)
        _databases.add(self)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection to read from, for this thread until the block ends.

        Raises:
            DatabaseError: the database cannot be opened or read; SchemaVersionError: it is of a newer schema.
        """
        with self._read_lock, _translated(self.where):
            yield self._connections.reader or self._opened("reader")

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection in a transaction that holds the write lock and is committed when the block ends.

        Raises:
            DatabaseError: the database cannot be opened or written; nothing of the block is stored then.
        """
        if self.read_only:
            raise DatabaseError(f"{self.where} was opened to be read only")
        with self._write_lock, _translated(self.where):
            if self._is_replaced():
                self.disconnect()
            connection = self._connections.writer or self._opened("writer")
            with connection.begin():
                yield connection

    def execute_alone(self, *statements: str) -> None:
        """Execute statements that no transaction may enclose, such as VACUUM.

        Raises:
            DatabaseError: one of them failed.
        """
        with self._write_lock, _translated(self.where):
            connection = self._connections.writer or self._opened("writer")
            _execute(connection, *statements)

    def disconnect(self) -> None:
        """Close the connections; the next use opens them again. In memory nothing happens, or all would be lost."""
        if self.path is not None:
            with self._write_lock, self._read_lock:
                self._connections.close()

    def close(self) -> None:
        """Close for good. Harmless when repeated."""
        with self._write_lock, self._read_lock:
            self._closed = True
            self._connections.close()

    def hold(self, stack: ExitStack) -> None:
        """Keep other threads out and the file closed until `stack` is left; what a fork needs."""
        stack.enter_context(self._write_lock)
        stack.enter_context(self._read_lock)
        stack.enter_context(self._open_lock)
        self.disconnect()

    def _opened(self, role: str) -> Connection:
        with self._open_lock:
            if self._closed:
                raise DatabaseError(f"{self.where} is closed")
            if self._connections.reader is None:
                try:
                    self._open()
                except BaseException:
                    self._connections.close()
                    raise
            connection = self._connections.writer if role == "writer" else self._connections.reader
        assert connection is not None
        return connection

    def _open(self) -> None:
        if self.path is None:
            self._open_memory()
        elif self.read_only:
            self._open_to_read(self.path)
        else:
            self._open_to_write(self.path)

    def _open_memory(self) -> None:
        shared = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connections.writer = _connect(lambda: shared, is_writer=True)
        self._connections.reader = _connect(lambda: shared)
        with self._connections.writer.begin():
            schema.create(self._connections.writer)

    def _open_to_read(self, path: Path) -> None:
        if not path.is_file():
            raise DatabaseError(f"{self.where} does not exist or is not a file: correct the path")
        self.is_immutable = _is_portable(path)
        try:
            self._connections.reader = _connect_to_read(path, immutable=self.is_immutable)
        except sqlite3.OperationalError:
            # A database with a write-ahead log cannot be opened where no log can be made. If there is none, the file
            # is all there is, and nothing on this machine writes to it.
            if self.is_immutable or path.with_name(path.name + "-wal").exists():
                raise
            self.is_immutable = True
            self._connections.reader = _connect_to_read(path, immutable=True)
        schema.check_version(self._connections.reader, self.where)

    def _open_to_write(self, path: Path) -> None:
        if path.is_dir():
            raise DatabaseError(f"{self.where} is a folder: name a file in it")
        kind = location.network_file_system(path)
        if kind:
            raise DatabaseError(
                f"{self.where} is on a network file system ({kind}), where SQLite's log is unsafe: "
                "set MIOFIND_DB to a file on a local disk"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        uri = f"{path.absolute().as_uri()}?mode=rwc"
        self._connections.writer = writer = _connect(lambda: _sqlite(uri), is_writer=True)
        _execute(writer, *WRITER_PRAGMAS)
        if schema.is_empty(writer):
            writer.rollback()
            _use_write_ahead_log(writer)
            with writer.begin():
                schema.create(writer)
        else:
            schema.check_version(writer, self.where)
            writer.rollback()
            _use_write_ahead_log(writer)
        self._connections.reader = _connect(lambda: _sqlite(uri))
        _execute(self._connections.reader, "PRAGMA query_only=ON")
        self._connections.file = _file_key(path)

    def _is_replaced(self) -> bool:
        """Whether the file was deleted or replaced since it was opened: rows written to it would be lost."""
        file = self._connections.file
        return self.path is not None and file is not None and _file_key(self.path) != file


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Turns what goes wrong in the block into a DatabaseError about the file `where`."""
    try:
        yield
    except UnreadableEntryError as error:
        raise DatabaseError(f"{where} holds an entry that cannot be read ({error}): check the database") from error
    except SQLAlchemyError as error:
        raise _database_error(where, getattr(error, "orig", None) or error) from error
    except (sqlite3.Error, OSError) as error:
        raise _database_error(where, error) from error


def _database_error(where: str, error: BaseException) -> DatabaseError:
    if isinstance(error, OSError):
        reason = f"{error.strerror or type(error).__name__}: correct the permissions, or name another file"
        return DatabaseError(f"{where} cannot be used: {reason}")
    code = getattr(error, "sqlite_errorcode", None)
    advice = _ADVICE.get(code & 0xFF) if isinstance(code, int) else None
    told = " ".join(str(error).split())[:200]  # SQLite's messages may hold what is stored
    return DatabaseError(f"{where} cannot be used: {advice or f'{told}: run `miofind db check` on it'}")


def _sqlite(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)


def _connect(creator: Callable[[], sqlite3.Connection], *, is_writer: bool = False) -> Connection:
    engine = create_engine("sqlite://", creator=creator, poolclass=NullPool, pool_reset_on_return=None)
    if is_writer:
        event.listen(engine, "begin", _begin_immediate)
    connection = engine.connect()
    try:
        _execute(connection, *PRAGMAS)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_to_read(path: Path, *, immutable: bool) -> Connection:
    """A connection that is proved to read; `immutable` spares locks and opens files on read-only media."""
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"
    connection = _connect(lambda: _sqlite(uri))
    try:
        _execute(connection, "PRAGMA schema_version")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_portable(path: Path) -> bool:
    """Whether the file is of the kind that `make_portable` makes: no process writes to it with a log."""
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\x01\x01"  # sqlite.org/fileformat.html, 1.3: 2 stands for a write-ahead log


def _begin_immediate(connection: Connection) -> None:
    # BEGIN alone takes the write lock at the first write, where SQLite does not wait if another process wrote since.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _execute(connection: Connection, *statements: str) -> None:
    """Execute on the driver's connection: SQLAlchemy would begin a transaction first."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    for statement in statements:
        driver.execute(statement).close()


def _use_write_ahead_log(connection: Connection) -> None:
    """Switch to the write-ahead log, which SQLite refuses without waiting while another process opens the file too."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _execute(connection, "PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def make_portable(path: Path) -> None:
    """Turn a closed database into one file that can be copied by itself and read on read-only media.

    Raises:
        DatabaseError: it cannot be opened or written.
    """
    with _translated(location.shown(path)), closing(_sqlite(f"{path.absolute().as_uri()}?mode=rw")) as connection:
        for statement in ("PRAGMA journal_mode=DELETE", "VACUUM"):
            connection.execute(statement).close()


def _file_key(path: Path) -> FileKey | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_fork_lock = threading.RLock()
_fork_holds: list[ExitStack] = []


def _before_fork() -> None:
    stack = ExitStack()
    stack.enter_context(_fork_lock)
    for database in list(_databases):
        database.hold(stack)
    _fork_holds.append(stack)


def _after_fork() -> None:
    _fork_holds.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
