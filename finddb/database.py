"""Connections to one SQLite file: how it is opened, locked, shared by threads and kept out of forked children.

One connection reads and one writes, each under a lock, so that a look-up never waits for another thread's write. No
connection is open across a fork: SQLite forbids it (sqlite.org/howtocorrupt.html, 2.6). It knows no rows.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from miofind.errors import DatabaseError
from miofind.finddb import location, logs, open_files, schema
from miofind.finddb.open_files import FileKey, OpenFile, key_of
from miofind.finddb.packing import Packing
from miofind.finddb.sqlite_file import (
    WRITER_PRAGMAS,
    changes,
    check_writable_place,
    checkpoint,
    connect,
    connect_to_read,
    draw,
    execute,
    legible,
    open_file,
    set_log_aside,
    translated,
    use_write_ahead_log,
)

logger = logging.getLogger("miofind")

_MOST_OPENINGS = 10
_LOOKS = 20
_BETWEEN_LOOKS_S = 0.005


class _Change(Enum):
    """What became of a file since it was opened."""

    MOVED = "its path names another file now, or none"
    OVERWRITTEN = "something else was written into it"


class _Connections:
    """The open connections of one process to one file.

    Attributes:
        writes: whether they may write to it or beside it.
        file: what they have open, None in memory.
        version: how it was when they were opened: there is no writer for an older one, nor for a release, which has a
            `packing`.
    """

    def __init__(self, path: Path | None, *, writes: bool) -> None:
        self.path = path
        self.writes = writes
        self.reader: Connection | None = None
        self.writer: Connection | None = None
        self.file: OpenFile | None = None
        self.version = schema.SCHEMA_VERSION
        self.packing: Packing | None = None
        self.is_immutable = False
        self._name = str(path)  # of a Path, the question takes twice as long
        self._log = Path()
        self._log_descriptor: int | None = None
        self._written_at = (0, 0)
        self._state: int | None = None

    def hold(self, file: OpenFile) -> None:
        """Take a file over, to release it when the connections are closed."""
        self.file = file
        self._written_at = open_files.written_at(os.fstat(file.descriptor))

    def know_log(self) -> None:
        """Note which log the connections write, now that they have opened one, and which state it goes on from."""
        assert self.path is not None
        assert self.file is not None
        self._state = logs.drawn_last(self.file.header)
        self._log = logs.log_of(self.path)
        self._log_descriptor = logs.opened(self._log) if self.writes else None

    def change(self) -> _Change | None:
        """What became of the file since it was opened, None where all that was written to it goes on from there.

        Only transactions that are in the log are written into the file, whoever does it.
        """
        if self.file is None or self.path is None:
            return None
        try:
            status = os.stat(self._name)
        except OSError:
            return _Change.MOVED
        if (status.st_dev, status.st_ino) != self.file.key:
            return _Change.MOVED
        written_at = open_files.written_at(status)
        if written_at == self._written_at:
            return None
        if self.is_immutable or not self._is_written_from_log():
            return _Change.OVERWRITTEN
        self._written_at = written_at
        return None

    def _is_written_from_log(self) -> bool:
        """Whether what is in the file now came from its log."""
        assert self.path is not None
        assert self.file is not None
        if self._log_descriptor is not None and not self._has_its_log:
            return False
        for _ in range(_LOOKS):
            state = logs.drawn_last(self.file.header)
            if logs.is_of(logs.log_of(self.path), self.file, since=self._state):
                self._state = None if self._state is None else state
                return True
            time.sleep(_BETWEEN_LOOKS_S)  # a log is empty for a moment where it begins anew
        return False

    def close(self) -> None:
        """Close both; harmless when repeated.

        What is in the log is written into the file that it is of, and into no other: SQLite itself would leave it
        beside a file that was put in the place of this one, or write it into what this one was overwritten with.
        """
        with suppress(OSError, sqlite3.Error, SQLAlchemyError):  # what goes wrong here, goes wrong for the next use too
            self._part_from_log()
        for connection in (self.reader, self.writer):
            if connection is not None:
                connection.close()
        if self.file is not None:
            open_files.release(self.file)
        if self._log_descriptor is not None:
            os.close(self._log_descriptor)
        self.reader = self.writer = self.file = self._log_descriptor = None

    def _part_from_log(self) -> None:
        """Leave nothing in a log beside a file that it is not of."""
        connection = self.writer or self.reader
        if self.file is None or self.path is None or connection is None or not self.writes:
            return
        change = self.change()
        if change is _Change.OVERWRITTEN:
            try:
                set_log_aside(self.path, self.file)
            finally:
                if not self._has_its_log or not logs.is_of(self._log, self.file):
                    self._empty_log()
        elif self._log_descriptor is not None and not self._is_in_place and checkpoint(connection):
            logs.remove(self._log, key_of(self._log_descriptor))

    def _empty_log(self) -> None:
        """Leave SQLite nothing to write into the file when it closes it."""
        if self._log_descriptor is not None:
            os.ftruncate(self._log_descriptor, 0)

    @property
    def _has_its_log(self) -> bool:
        """Whether the log that others find is the one that the connections write."""
        return self._log_descriptor is not None and open_files.file_key(self._log) == key_of(self._log_descriptor)

    @property
    def _is_in_place(self) -> bool:
        """Whether the file is where it was opened, though a link to it may be gone."""
        assert self.file is not None
        return open_files.file_key(Path(str(self._log).removesuffix("-wal"))) == self.file.key


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
        self._connections = _Connections(path, writes=not read_only)
        self._files = 0
        self._last_key: FileKey | None = None
        self._users = threading.local()
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
        with translated(self.where), self._used(self._read_lock):
            yield self._connections.reader or self._opened("reader")

    @contextmanager
    def snapshot(self, *, of: int | None = None) -> Iterator[Connection]:
        """As `read`; all that the block reads is of one instant, whatever others write meanwhile.

        Args:
            of: what `files` was where it goes on from.

        Raises:
            DatabaseError, SchemaVersionError: as for `read`, and where another file was opened since.
        """
        with self.read() as connection:
            if of is not None and of != self._files:
                raise DatabaseError(f"{self.where} was replaced while it was read: read it again")
            if self.path is None:  # one connection reads and writes
                yield connection
                return
            connection.exec_driver_sql("BEGIN")
            try:
                yield connection
            finally:
                connection.exec_driver_sql("COMMIT")

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection in a transaction that holds the write lock and is committed when the block ends.

        Raises:
            DatabaseError: the database is a release, or cannot be opened or written; nothing of the block is stored
                then.
            SchemaVersionError: it is of another schema, an older one too.
        """
        if self.read_only:
            raise DatabaseError(f"{self.where} was opened to be read only")
        with translated(self.where), self._used(self._write_lock):
            if self._connections.writer is None:
                self.disconnect()
            connection = self._connections.writer or self._opened("writer")
            with connection.begin():
                written = changes(connection)
                yield connection
                if self.path is not None and changes(connection) != written:
                    draw(connection)

    def prepare_to_write(self) -> None:
        """Open what `write` needs, to learn whether it can be.

        Raises:
            DatabaseError, SchemaVersionError: it cannot.
        """
        with self._write_lock, translated(self.where):
            if self._connections.writer is None:
                self._opened("writer")

    @property
    def version(self) -> int:
        """The schema version of the file when it was opened."""
        with self.read():
            return self._connections.version

    @property
    def is_immutable(self) -> bool:
        """Whether nobody writes to the file that is open; to be asked where it is."""
        return self._connections.is_immutable

    @property
    def files(self) -> int:
        """How many files were found at the path so far: numbers that were read in one say nothing of the next."""
        return self._files

    @property
    def packing(self) -> Packing | None:
        """How the answers of a release are packed, None in any other file; to be asked where the file is open."""
        return self._connections.packing

    def execute_alone(self, *statements: str) -> None:
        """Execute statements that no transaction may enclose, such as VACUUM.

        Raises:
            DatabaseError: one of them failed.
        """
        with self._write_lock, translated(self.where):
            connection = self._connections.writer or self._opened("writer")
            execute(connection, *statements)

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
        if connection is None:
            raise schema.unwritable(self.where, self._connections.version)
        return connection

    def _open(self) -> None:
        if self.path is None:
            self._open_memory()
            return
        for _ in range(_MOST_OPENINGS):
            (self._open_to_read if self.read_only else self._open_to_write)(self.path)
            if self._connections.change() is _Change.MOVED:  # while it was opened
                self._connections.close()
                continue
            assert self._connections.file is not None
            if self._connections.file.key != self._last_key:
                self._files += 1
            self._last_key = self._connections.file.key
            return
        raise DatabaseError(f"{self.where} is replaced again and again: name a file that stays")

    def _open_memory(self) -> None:
        shared = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connections.writer = connect(lambda: shared, is_writer=True)
        self._connections.reader = connect(lambda: shared)
        with self._connections.writer.begin():
            schema.create(self._connections.writer)

    def _open_to_read(self, path: Path) -> None:
        if not path.is_file():
            raise DatabaseError(f"{self.where} does not exist or is not a file: correct the path")
        connections = self._connections
        connections.hold(file := open_files.acquire(path))
        # A file whose log is of another one is all there is: what wrote that log has another file open.
        connections.is_immutable = file.is_portable or not logs.is_of(logs.log_of(path), file)
        if not connections.is_immutable:
            file.check_locks(self.where)
        try:
            connections.reader = connect_to_read(path, immutable=connections.is_immutable)
        except sqlite3.OperationalError:
            # A database with a write-ahead log cannot be opened where no log can be made. If there is none, the file
            # is all there is, and nothing on this machine writes to it.
            if connections.is_immutable or logs.log_of(path).exists():
                raise
            connections.is_immutable = True
            connections.reader = connect_to_read(path, immutable=True)
        connections.know_log()
        self._read_as(schema.checked_version(connections.reader, self.where), connections.reader)

    def _open_to_write(self, path: Path) -> None:
        check_writable_place(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        connections = self._connections
        connections.is_immutable = False
        is_new = not path.exists()
        connections.hold(file := open_files.acquire(path, to_write=True))
        try:
            file.check_locks(self.where)
        except DatabaseError:
            if is_new:
                path.unlink(missing_ok=True)
            raise
        set_log_aside(path, file)
        connections.writer = writer = connect(lambda: open_file(path, "rwc"), is_writer=True)
        execute(writer, *WRITER_PRAGMAS)
        if schema.is_empty(writer):
            writer.rollback()
            use_write_ahead_log(writer)
            with writer.begin():
                schema.create(writer)
                draw(writer)
        version = schema.checked_version(writer, self.where)
        writer.rollback()
        if version == schema.SCHEMA_VERSION:
            use_write_ahead_log(writer)
            _mark(writer, file)
        else:
            writer.close()
            connections.writer = None
        connections.reader = connect(lambda: open_file(path, "rwc"))
        self._read_as(version, connections.reader)
        execute(connections.reader, "PRAGMA query_only=ON")
        connections.know_log()

    def _read_as(self, version: int, reader: Connection) -> None:
        self._connections.version = version
        self._connections.packing = None
        if version == schema.PACKED_VERSION:
            with legible():
                self._connections.packing = Packing(schema.note(reader, "dictionary"))
        if version < schema.SCHEMA_VERSION:
            execute(reader, "PRAGMA temp_store=MEMORY", *schema.OLDER_AS_THIS[version])

    @contextmanager
    def _used(self, lock: threading.RLock) -> Iterator[None]:
        """Holds a lock, and the connections open for the thread's outer block, whatever becomes of the file meanwhile.

        Whoever closes the connections holds both locks.
        """
        with lock:
            depth = getattr(self._users, "depth", 0)
            while depth == 0 and self._connections.change() is not None:
                lock.release()
                try:
                    self._part_from_changed()
                finally:
                    lock.acquire()
            self._users.depth = depth + 1
            try:
                yield
            finally:
                self._users.depth = depth

    def _part_from_changed(self) -> None:
        """Close a file that is no longer the one at the path, or holds something else: rows written to it were lost."""
        with self._write_lock, self._read_lock:
            change = self._connections.change()
            if change is None:
                return
            if self.read_only:
                logger.info("%s is read anew: %s", self.where, change.value)
            elif change is _Change.MOVED:
                logger.warning(
                    "%s was removed or replaced: what it held is not in the file there now, but in the old one if that "
                    "was kept",
                    self.where,
                )
            else:
                logger.warning(
                    "%s was overwritten while it was open: what it held is not in it now. Move a file into place "
                    "instead: that does not spoil the old one for those who still use it",
                    self.where,
                )
            self._connections.close()
            self._last_key = None


def _mark(writer: Connection, file: OpenFile) -> None:
    """Have the file itself, and not its log alone, say which state it is in: a log of another goes on from others."""
    if logs.drawn_last(file.header) != 0:
        return
    with suppress(SQLAlchemyError, sqlite3.Error):  # a file that cannot be written can be read
        with writer.begin():
            draw(writer)
        checkpoint(writer)


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
