"""A FindDB in one SQLite file, or in memory: how it is opened, locked, shared by threads and kept out of forks.

One connection reads and one writes, each under a lock, so that a look-up never waits for another thread's write. No
connection is open across a fork: SQLite forbids it (sqlite.org/howtocorrupt.html, 2.6).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import fields
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miofind.errors import DatabaseError, MiofindError
from miofind.finddb import file_version, late, location, logs, open_files, schema_versions
from miofind.finddb.database import BATCH, Database, T
from miofind.finddb.legible import UnreadableEntryError, legible
from miofind.finddb.open_files import FileKey, OpenFile, key_of
from miofind.finddb.packing import HistoryCodec
from miofind.finddb.sqlite_file import (
    WRITER_PRAGMAS,
    LastingConnection,
    begin_immediate,
    check_writable_place,
    checkpoint,
    execute,
    open_file,
    open_lasting,
    open_memory,
    set_log_aside,
    translated,
    use_write_ahead_log,
)
from miofind.finddb.values import RIVAL, ROW_FIELDS, ProblemKey, Row
from miofind.process.forks import awaited_by_forks

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger = logging.getLogger("miofind")

_MOST_OPENINGS = 10
_LOOKS = 20
_BETWEEN_LOOKS_S = 0.005

ANSWER_SQL = (
    "SELECT answer.payload FROM device JOIN problem ON problem.device_id = device.id "
    "JOIN answer ON answer.problem_id = problem.id "
    "WHERE device.identity = :device AND problem.network_config = :network_config"
)
"""`schema.ANSWER_QUERY` as SQLAlchemy writes it for SQLite, which is not imported for it."""

RIVALS_SQL = (
    f"SELECT problem.network_config, {', '.join(f'measurement.{name}' for name in ROW_FIELDS)} "
    "FROM measurement JOIN problem ON measurement.problem_id = problem.id JOIN device ON problem.device_id = device.id "
    "WHERE device.identity = :device AND problem.network_config >= :first AND problem.network_config < :end "
    "AND measurement.status = :status"
)
"""`entries.RIVALS_QUERY`, likewise."""

_FLAGS = tuple(place for place, item in enumerate(fields(Row)) if item.type == "bool")
_DEVICE_SQL = "SELECT id FROM device WHERE identity = ?"


class _Change(Enum):
    """What became of a file since it was opened."""

    MOVED = "its path names another file now, or none"
    OVERWRITTEN = "something else was written into it"


_EXPECTED = (MiofindError, UnreadableEntryError)
"""What may be raised between two statements: whatever else ends a use, Ctrl-C above all, may end it within one."""


class _Channel:
    """A connection of the driver, and one of SQLAlchemy over it, which is of no more use once it was interrupted.

    Attributes:
        connection: SQLAlchemy's, None before the first use and once it was given up.
        driver: the driver's, which is ended with this; None before and afterwards.
    """

    def __init__(self, *, is_writer: bool = False) -> None:
        self._is_writer = is_writer
        self.connection: Connection | None = None
        self.driver: LastingConnection | None = None

    def connected(self, driver: LastingConnection) -> Connection:
        """A connection of SQLAlchemy over the driver's: the one there is, or a new one."""
        if self.connection is None:
            driver.take_back()  # what was interrupted while it was given up
            self.connection = late.sqlite_engine.connect(lambda: driver, is_writer=self._is_writer)
        return self.connection

    def give_up(self) -> None:
        """End what is being read and written, and use SQLAlchemy's connection no more. Harmless when repeated."""
        connection, self.connection = self.connection, None
        if connection is not None:
            late.sqlite_engine.give_up(connection)
        if self.driver is not None:
            self.driver.take_back()

    def end_left_behind(self) -> None:
        """End what is being read, where Ctrl-C met the giving up of what it had interrupted."""
        if self.driver is not None and self.driver.in_transaction:
            self.driver.take_back()

    def end(self) -> None:
        """Close both. Harmless when repeated."""
        self.give_up()
        if self.driver is not None:
            self.driver.end()
            self.driver = None


class _Connections:
    """The open connections of one process to one file, or to memory, where one of the driver reads and writes.

    Attributes:
        writes: whether they may write to it or beside it.
        is_open: whether they are, wholly.
        reading, writing: how it is read and written.
        file: what they have open, None in memory.
        version: how it was when they were opened: there is no writer for an older one, nor for a release, which has a
            `packing`.
    """

    def __init__(self, path: Path | None, *, writes: bool) -> None:
        self.path = path
        self.writes = writes
        self.is_open = False
        self.reading = _Channel()
        self.writing = _Channel(is_writer=True)
        self.file: OpenFile | None = None
        self.version = schema_versions.SCHEMA_VERSION
        self.packing: HistoryCodec | None = None
        self.is_immutable = False
        self._name = str(path)  # of a Path, the question takes twice as long
        self._log = Path()
        self._log_descriptor: int | None = None
        self._written_at = (0, 0)
        self._state: int | None = None

    @property
    def reader(self) -> Connection | None:
        """What reads, None where that is yet to be made."""
        return self.reading.connection if self.is_open else None

    @property
    def reading_driver(self) -> LastingConnection:
        """The driver's connection that reads, of what is open."""
        assert self.reading.driver is not None
        return self.reading.driver

    @property
    def writer(self) -> Connection | None:
        """What writes, None where that is yet to be made, or cannot be."""
        return self.writing.connection if self.is_open else None

    def channel(self, role: str) -> _Channel:
        """What reads, or writes."""
        return self.writing if role == "writer" else self.reading

    @property
    def is_written(self) -> bool:
        """Whether what is open can be written."""
        return self.is_open and self.writing.driver is not None

    def give_up(self, role: str) -> None:
        """Give up the connection that something has interrupted: it may be anywhere.

        The next use has another over the same connection of the driver, so that the file, its log and its locks stay
        in the same hands, and so does what another thread is doing.
        """
        if role == "reader" or self.path is None:
            self.reading.give_up()
        if role == "writer" or self.path is None:
            self.writing.give_up()

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
        self.is_open = False
        self.reading.give_up()
        self.writing.give_up()
        with suppress(OSError, sqlite3.Error):  # what goes wrong here, goes wrong for the next use too
            self._part_from_log()
        self.reading.end()
        self.writing.end()
        with suppress(OSError, sqlite3.Error):
            self._remove_empty_log()
        file, self.file = self.file, None
        if file is not None:
            open_files.release(file)
        descriptor, self._log_descriptor = self._log_descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _part_from_log(self) -> None:
        """Leave nothing in a log beside a file that it is not of."""
        driver = self.writing.driver or self.reading.driver
        if self.file is None or self.path is None or driver is None or not self.writes:
            return
        change = self.change()
        if change is _Change.OVERWRITTEN:
            try:
                set_log_aside(self.path, self.file)
            finally:
                if not self._has_its_log or not logs.is_of(self._log, self.file):
                    self._empty_log()
        elif self._log_descriptor is not None and not self._is_in_place and checkpoint(driver):
            logs.remove(self._log, key_of(self._log_descriptor))

    def _remove_empty_log(self) -> None:
        """Have SQLite remove the empty log that reading had to make: a connection that only reads leaves it behind.

        It does so where no other connection, of whatever process, is open.
        """
        if self.writes or self.is_immutable or self.file is None or self.path is None:
            return
        if not self._is_in_place or os.stat(self._log).st_size > 0:
            return
        with closing(open_file(self.path, "rw")) as driver:
            driver.execute("PRAGMA schema_version").close()

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


class _Uses(threading.local):
    """How many blocks of this thread use the connections, one within another."""

    depth = 0


class SqliteFile(Database):
    """One SQLite database, opened on first use. Threads may share it; a forked child opens its own connections.

    Args:
        path: the file, None for memory.
        read_only: open an existing file, never write to it or beside it.
        mirrors: write to a mirror of a server, too, which nobody else does.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False, mirrors: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        self._mirrors = mirrors
        self.where = location.shown(path)
        self.location = self.address = location.MEMORY if path is None else str(path)
        self._connections = _Connections(path, writes=not read_only)
        self._files = 0
        self._devices: dict[tuple[int, str], bool] = {}
        self._last_key: FileKey | None = None
        self._uses = _Uses()
        self._closed = False
        self._open_lock = threading.RLock()
        self._write_lock = threading.RLock()
        shares_one_connection = path is None or read_only
        self._read_lock = self._write_lock if shares_one_connection else threading.RLock()
        self._finalizer = weakref.finalize(self, _Connections.close, self._connections)
        with _fork_lock:  # not while another thread forks: that would leave its locks to a child
            _databases.add(self)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection to read from, for this thread until the block ends.

        Raises:
            DatabaseError: the database cannot be opened or read; SchemaVersionError: it is of a newer schema.
        """
        with translated(self.where), self._used("reader"):
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
            driver = late.sqlite_engine.driver_of(connection)
            try:
                execute(driver, "BEGIN")
                yield connection
                execute(driver, "COMMIT")
            except BaseException:
                self._connections.give_up("reader")
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
        with translated(self.where), self._used("writer"):
            if not self._connections.is_written:
                self.disconnect()
            connection = self._connections.writer or self._opened("writer")
            with connection.begin():
                driver = late.sqlite_engine.driver_of(connection)
                written = driver.total_changes
                yield connection
                if self.path is not None and driver.total_changes != written:
                    logs.draw(driver)

    def transact(self, work: Callable[[Connection], T], *, alone: bool = False) -> T:
        """What `work` returns, in a transaction: whoever writes to a file does so alone.

        Raises:
            DatabaseError, SchemaVersionError: as for `write`.
        """
        with self.write() as connection:
            return work(connection)

    def one_instant(self) -> AbstractContextManager[None]:
        """Nothing: a file that is read for long would keep its log from being emptied."""
        return nullcontext()

    def in_batches(
        self, device: str | None, read: Callable[[Connection, Mapping[int, ProblemKey]], list[T]]
    ) -> Iterator[list[T]]:
        """What `read` gives for some problems after the other, by their keys; each batch is of one instant.

        Raises:
            DatabaseError, SchemaVersionError: as for `snapshot`.
        """
        with self.read() as connection:
            files = self._files
            remaining = iter(late.entries.problems(connection, device).values())
        while batch := list(islice(remaining, BATCH)):
            with self.snapshot(of=files) as connection:
                # Numbers are of one instant: what took the place of a problem that went meanwhile may have its number.
                found = read(connection, late.entries.find_problems(connection, batch))
            yield found

    @contextmanager
    def opened(self) -> Iterator[None]:
        """It is open until the block ends.

        Raises:
            DatabaseError, SchemaVersionError: as for `read`.
        """
        with translated(self.where), self._used("reader"):
            if not self._connections.is_open:
                self._opened_driver("reader")
            elif self._uses.depth == 1 and self.path is not None:
                self._connections.reading.end_left_behind()
            yield

    def payload(self, device: str, network_config: str) -> Any:
        """What is stored as the answer to a problem, None where nothing is; to be asked where the file is open."""
        driver = self._connections.reading_driver
        if self.is_immutable and not self._knows(driver, device):
            return None
        found = driver.execute(ANSWER_SQL, {"device": device, "network_config": network_config}).fetchone()
        return None if found is None else found[0]

    def rivals(self, device: str, first: str, end: str) -> Iterator[Sequence[Any]]:
        """The name of the problem and the values of each row of a rival, of problems from `first` to before `end`."""
        driver = self._connections.reading_driver
        named = {"device": device, "first": first, "end": end, "status": RIVAL}
        for name, *values in driver.execute(RIVALS_SQL, named).fetchall():
            for place in _FLAGS:  # SQLite has 0 and 1
                values[place] = bool(values[place]) if values[place] in (0, 1) else values[place]
            yield name, *values

    def note(self, key: str) -> str | None:
        """What the file says of itself, such as "release", None where it says nothing; where it is open."""
        return file_version.note(self._connections.reading_driver, key)

    def _knows(self, driver: sqlite3.Connection, device: str) -> bool:
        """Whether a file that does not change is of a device: most shipped files are of others."""
        place = (self._files, device)
        if place not in self._devices:
            self._devices[place] = driver.execute(_DEVICE_SQL, (device,)).fetchone() is not None
        return self._devices[place]

    def clock(self, connection: Connection, present: str) -> str:
        """The present, which is this machine's: a file is on it."""
        return present

    def revision(self, connection: Connection) -> str:
        """The number that the last transaction drew, or of a file without one, such as a release, its time and size."""
        if self.path is None:
            return ""
        drawn = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if drawn:
            return str(drawn)
        found = self.path.stat()
        return f"{found.st_mtime_ns}:{found.st_size}"

    def shrink(self) -> None:
        """Give room back to the disk that removed rows took."""
        self.execute_alone("VACUUM")

    def size_bytes(self, connection: Connection) -> int:
        """Of the file and the log beside it, 0 in memory."""
        names = [] if self.path is None else [self.path, self.path.with_name(self.path.name + "-wal")]
        return sum(name.stat().st_size for name in names if name.exists())

    def findings(self, connection: Connection) -> list[str]:
        """What is wrong with its pages and its tables, given its schema version."""
        lines = [str(line) for (line,) in connection.exec_driver_sql("PRAGMA integrity_check(20)") if line != "ok"]
        version = self._connections.version
        findings = [f"damaged: {line}" for line in lines] or late.schema.column_findings(connection, version)
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        return findings + [f"a row of table {line[0]} belongs to no row of table {line[2]}" for line in broken[:20]]

    def prepare_to_write(self) -> None:
        """Open what `write` needs, to learn whether it can be.

        Raises:
            DatabaseError, SchemaVersionError: it cannot.
        """
        with translated(self.where), self._used("writer"):
            self._opened_driver("writer")

    @property
    def exists(self) -> bool:
        """Whether there is anything to read: a file, or memory."""
        return self.path is None or self._connections.is_open or self.path.exists()

    @property
    def version(self) -> int:
        """The schema version of the file when it was opened."""
        with self.opened():
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
    def packing(self) -> HistoryCodec | None:
        """How the answers of a release are packed, None in any other file; to be asked where the file is open."""
        return self._connections.packing

    def execute_alone(self, *statements: str) -> None:
        """Execute statements that no transaction may enclose, such as VACUUM.

        Raises:
            DatabaseError: one of them failed.
        """
        with translated(self.where), self._used("writer"):
            execute(self._opened_driver("writer"), *statements)

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
        driver = self._opened_driver(role)
        with self._open_lock:
            return self._connections.channel(role).connected(driver)

    def _opened_driver(self, role: str) -> LastingConnection:
        connections = self._connections
        with self._open_lock:
            if self._closed:
                raise DatabaseError(f"{self.where} is closed")
            if not connections.is_open:
                connections.close()  # what is left of an opening or a closing that was broken off
                try:
                    self._open()
                except BaseException:
                    connections.close()
                    raise
            driver = connections.channel(role).driver
        if driver is not None:
            return driver
        raise schema_versions.unwritable(self.where, connections.version)

    def _open(self) -> None:
        if self.path is None:
            self._open_memory()
        else:
            self._open_path(self.path)
        self._connections.is_open = True

    def _open_path(self, path: Path) -> None:
        for _ in range(_MOST_OPENINGS):
            (self._open_to_read if self.read_only else self._open_to_write)(path)
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
        memory = open_memory()
        self._connections.writing.driver = memory
        self._connections.reading.driver = memory
        self._connections.reading.connected(memory)  # not within a transaction of what writes, which it would take back
        writer = self._connections.writing.connected(memory)
        with writer.begin():
            late.schema.create(writer)

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
            reader = self._proved_to_read(path)
        except sqlite3.OperationalError:
            # A database with a write-ahead log cannot be opened where no log can be made. If there is none, the file
            # is all there is, and nothing on this machine writes to it.
            if connections.is_immutable or logs.log_of(path).exists():
                raise
            connections.reading.end()
            connections.is_immutable = True
            reader = self._proved_to_read(path)
        connections.know_log()
        self._read_as(file_version.checked_version(reader, self.where), reader)

    def _proved_to_read(self, path: Path) -> LastingConnection:
        """What reads; an immutable file without locks, and also on read-only media."""
        mode = "ro&immutable=1" if self._connections.is_immutable else "ro"
        reader = open_lasting(path, mode)
        self._connections.reading.driver = reader
        execute(reader, "PRAGMA schema_version")
        return reader

    def _open_to_write(self, path: Path) -> None:
        check_writable_place(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        connections = self._connections
        connections.is_immutable = False
        is_new = not path.exists()
        connections.hold(file := open_files.acquire(path, to_write=True))
        try:
            file.check_locks(self.where)
            file.check_names(self.where)
        except DatabaseError:
            if is_new:
                path.unlink(missing_ok=True)
            raise
        set_log_aside(path, file)
        version = self._open_writer(path, file)
        reader = open_lasting(path, "rwc")
        connections.reading.driver = reader
        self._read_as(version, reader)
        execute(reader, "PRAGMA query_only=ON")
        connections.know_log()

    def _open_writer(self, path: Path, file: OpenFile) -> int:
        """Open what writes, and make the file ready; returns its version: an older one or a mirror has no writer."""
        driver = open_lasting(path, "rwc")
        self._connections.writing.driver = driver
        execute(driver, *WRITER_PRAGMAS)
        if file_version.is_empty(driver):
            use_write_ahead_log(driver)
            writer = self._connections.writing.connected(driver)
            with writer.begin():
                if file_version.is_empty(driver):  # unless another process has filled it meanwhile
                    late.schema.create(writer)
                logs.draw(driver)
        version = file_version.checked_version(driver, self.where)
        is_mirror = file_version.note(driver, file_version.MIRROR) is not None
        if version == schema_versions.SCHEMA_VERSION and (self._mirrors or not is_mirror):
            use_write_ahead_log(driver)
            if logs.drawn_last(file.header) == 0:
                _mark(driver)
        else:
            self._connections.writing.end()
        return version

    def _read_as(self, version: int, reader: LastingConnection) -> None:
        self._connections.version = version
        self._connections.packing = None
        if version == schema_versions.PACKED_VERSION:
            with legible():
                self._connections.packing = HistoryCodec(file_version.note(reader, "dictionary"))
        if version < schema_versions.SCHEMA_VERSION:
            execute(reader, "PRAGMA temp_store=MEMORY", *schema_versions.OLDER_AS_THIS[version])

    @contextmanager
    def _used(self, role: str) -> Iterator[None]:
        """Holds a role's lock, and the connections open for the thread's outer block, whatever becomes of the file.

        Whoever closes the connections holds both locks. What anything unforeseen interrupts is given up.
        """
        lock = self._write_lock if role == "writer" else self._read_lock
        while True:
            with lock, awaited_by_forks:
                if self._uses.depth > 0 or not self._is_changed:
                    self._uses.depth += 1
                    try:
                        yield
                    except _EXPECTED:
                        raise
                    except BaseException:
                        self._connections.give_up(role)
                        raise
                    finally:
                        self._uses.depth -= 1  # an inner use that Ctrl-C met at its end may end after the outer one
                    return
            self._part_from_changed()

    @property
    def _is_changed(self) -> bool:
        return self._connections.is_open and self._connections.change() is not None

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


def _mark(driver: LastingConnection) -> None:
    """Have the file itself, and not its log alone, say which state it is in: a log of another goes on from others."""
    try:
        with suppress(sqlite3.Error):  # a file that cannot be written can be read
            begin_immediate(driver)
            logs.draw(driver)
            execute(driver, "COMMIT")
            checkpoint(driver)
    finally:
        driver.take_back()


_databases: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
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
