"""Connections to one SQLite file: how it is opened, locked, shared by threads and kept out of forked children.

One connection reads and one writes, each under a lock, so that a look-up never waits for another thread's write. No
connection is open across a fork: SQLite forbids it (sqlite.org/howtocorrupt.html, 2.6). It knows no rows.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from miofind.errors import DatabaseError, MiofindError
from miofind.finddb import location, schema
from miofind.finddb.packing import Packing
from miofind.finddb.sqlite_file import (
    WRITER_PRAGMAS,
    MemoryConnection,
    UnreadableEntryError,
    check_writable_place,
    connect,
    connect_to_read,
    execute,
    is_portable,
    legible,
    open_file,
    translated,
    use_write_ahead_log,
)

logger = logging.getLogger("miofind")

FileKey = tuple[int, int]


_EXPECTED = (MiofindError, UnreadableEntryError)
"""What may be raised between two statements: whatever else ends a use, Ctrl-C above all, may end it within one."""


class _Connections:
    """The open connections of one process.

    `file` tells whether the path still names the file they have open, `version` how it was when they were opened: there
    is no writer for an older one, nor for a release, which has a `packing`. `memory` holds a database that is no file,
    whatever becomes of the connections to it.
    """

    def __init__(self) -> None:
        self.reader: Connection | None = None
        self.writer: Connection | None = None
        self.file: FileKey | None = None
        self.version = schema.SCHEMA_VERSION
        self.packing: Packing | None = None
        self.memory: MemoryConnection | None = None

    def close_reader(self) -> None:
        """Close it, whatever it was doing; harmless when repeated."""
        reader, self.reader = self.reader, None
        _close(reader)

    def close_writer(self) -> None:
        """Close it, whatever it was doing, and take back what it had begun; harmless when repeated."""
        writer, self.writer = self.writer, None
        _close(writer)

    def close(self) -> None:
        """Close both and end a database in memory; harmless when repeated."""
        self.close_reader()
        self.close_writer()
        self.file = None
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.end()


def _close(connection: Connection | None) -> None:
    if connection is not None:
        with suppress(SQLAlchemyError, sqlite3.Error):  # of a transaction that something has broken off
            connection.invalidate()
            connection.close()


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
        with self._read_lock, translated(self.where):
            try:
                yield self._connections.reader or self._opened("reader")
            except _EXPECTED:
                raise
            except BaseException:
                self._give_up("reader")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """As `read`; all that the block reads is of one instant, whatever others write meanwhile.

        Raises:
            DatabaseError, SchemaVersionError: as for `read`.
        """
        with self.read() as connection:
            if self.path is None:  # one connection reads and writes
                yield connection
                return
            try:
                execute(connection, "BEGIN")
                yield connection
                execute(connection, "COMMIT")
            except BaseException:
                self._give_up("reader")
                raise

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
        with self._writing():
            if self._is_replaced():
                logger.warning("%s was removed or replaced: what it held is not in the file there now", self.where)
                self.disconnect()
            elif self._connections.writer is None:
                self.disconnect()
            connection = self._connections.writer or self._opened("writer")
            with connection.begin():
                yield connection

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What is done with the writer, by this thread alone."""
        with self._write_lock, translated(self.where):
            try:
                yield
            except _EXPECTED:
                raise
            except BaseException:
                self._give_up("writer")
                raise

    def _give_up(self, role: str) -> None:
        """Close the connection that was interrupted: SQLAlchemy uses it no more, and may have left it anywhere.

        The next use opens another. In memory one connection reads and writes, and goes on.
        """
        if role == "reader" or self.path is None:
            self._connections.close_reader()
        if role == "writer" or self.path is None:
            self._connections.close_writer()

    def prepare_to_write(self) -> None:
        """Open what `write` needs, to learn whether it can be.

        Raises:
            DatabaseError, SchemaVersionError: it cannot.
        """
        with self._writing():
            if self._connections.writer is None:
                self._opened("writer")

    @property
    def version(self) -> int:
        """The schema version of the file when it was opened."""
        with self.read():
            return self._connections.version

    @property
    def packing(self) -> Packing | None:
        """How the answers of a release are packed, None in any other file; to be asked where the file is open."""
        return self._connections.packing

    def execute_alone(self, *statements: str) -> None:
        """Execute statements that no transaction may enclose, such as VACUUM.

        Raises:
            DatabaseError: one of them failed.
        """
        with self._writing():
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
                is_written = self._connections.writer is not None  # another thread may be writing, and goes on
                try:
                    self._open()
                except BaseException:
                    self._connections.close_reader()
                    if not is_written:
                        self._connections.close_writer()
                    raise
            connection = self._connections.writer if role == "writer" else self._connections.reader
        if connection is None:
            raise schema.unwritable(self.where, self._connections.version)
        return connection

    def _open(self) -> None:
        if self.path is None:
            self._open_memory()
        elif self.read_only:
            self._open_to_read(self.path)
        else:
            self._open_to_write(self.path)

    def _open_memory(self) -> None:
        held = self._connections
        if held.memory is None:
            held.memory = MemoryConnection(":memory:", isolation_level=None, check_same_thread=False)
        memory = held.memory
        held.writer = connect(lambda: memory, is_writer=True)
        held.reader = connect(lambda: memory)
        with held.writer.begin():
            schema.create(held.writer)

    def _open_to_read(self, path: Path) -> None:
        if not path.is_file():
            raise DatabaseError(f"{self.where} does not exist or is not a file: correct the path")
        self.is_immutable = is_portable(path)
        try:
            self._connections.reader = connect_to_read(path, immutable=self.is_immutable)
        except sqlite3.OperationalError:
            # A database with a write-ahead log cannot be opened where no log can be made. If there is none, the file
            # is all there is, and nothing on this machine writes to it.
            if self.is_immutable or path.with_name(path.name + "-wal").exists():
                raise
            self.is_immutable = True
            self._connections.reader = connect_to_read(path, immutable=True)
        self._read_as(schema.checked_version(self._connections.reader, self.where), self._connections.reader)

    def _open_to_write(self, path: Path) -> None:
        if self._connections.writer is None:  # there is one where the reader alone was interrupted
            self._open_writer(path)
        self._connections.reader = connect(lambda: open_file(path, "rwc"))
        self._read_as(self._connections.version, self._connections.reader)
        execute(self._connections.reader, "PRAGMA query_only=ON")

    def _open_writer(self, path: Path) -> None:
        """Open what writes, and make the file ready; an older one has no writer."""
        check_writable_place(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connections.writer = writer = connect(lambda: open_file(path, "rwc"), is_writer=True)
        execute(writer, *WRITER_PRAGMAS)
        if schema.is_empty(writer):
            writer.rollback()
            use_write_ahead_log(writer)
            with writer.begin():
                schema.create(writer)
        version = schema.checked_version(writer, self.where)
        writer.rollback()
        if version == schema.SCHEMA_VERSION:
            use_write_ahead_log(writer)
        else:
            self._connections.close_writer()
        self._connections.version = version
        self._connections.file = _file_key(path)

    def _read_as(self, version: int, reader: Connection) -> None:
        self._connections.version = version
        self._connections.packing = None
        if version == schema.PACKED_VERSION:
            with legible():
                self._connections.packing = Packing(schema.note(reader, "dictionary"))
        if version < schema.SCHEMA_VERSION:
            execute(reader, "PRAGMA temp_store=MEMORY", *schema.OLDER_AS_THIS[version])

    def _is_replaced(self) -> bool:
        """Whether the file was deleted or replaced since it was opened: rows written to it would be lost."""
        file = self._connections.file
        return self.path is not None and file is not None and _file_key(self.path) != file


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
