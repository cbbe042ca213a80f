"""A FindDB on a PostgreSQL server, which many hosts write to.

Whoever adds to a problem holds its row, so that an answer is derived of all there is. What is read of a whole database
is of one instant. Connections are of one process: a forked child makes its own.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, String, func, inspect, select, text
from sqlalchemy.dialects.postgresql.psycopg import dialect as create_dialect
from sqlalchemy.exc import DBAPIError

from miofind.errors import DatabaseError
from miofind.finddb import entries, location, migrations, schema, schema_versions
from miofind.finddb.database import BATCH, Database, T
from miofind.finddb.packing import HistoryCodec
from miofind.finddb.postgresql import GET_IN_THE_WAY, Connector, engine_of, state_of, translated
from miofind.finddb.validation import LAST_STAMP
from miofind.finddb.values import RIVAL, ProblemKey

_MOST_TRIES = 20
_LONGEST_PAUSE_S = 0.5

_ANSWER_SQL = str(schema.ANSWER_QUERY.compile(dialect=create_dialect()))  # type: ignore[no-untyped-call]
_CLOCK = select(func.to_char(func.timezone("UTC", func.clock_timestamp()), 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
_CHANGES = select(func.count(), func.sum(schema.change.c.transaction))
_TABLES = [*schema.metadata.sorted_tables, *schema.server_metadata.sorted_tables]
_RIGHTS = text("SELECT has_table_privilege('measurement', 'INSERT') AND NOT pg_is_in_recovery()")
_SIZE = text(
    "SELECT coalesce(sum(pg_total_relation_size(to_regclass(name))), 0) FROM unnest(CAST(:names AS text[])) AS name"
)


class _Pinned(threading.local):
    """The connection that a thread reads everything from, while it reads of one instant."""

    connection: Connection | None = None


class _Engines:
    """The connections of one process: to write, to read as others write, and to read of one instant."""

    def __init__(self, connector: Connector) -> None:
        self.writing: Engine = engine_of(connector)
        self.reading = self.writing.execution_options(isolation_level="AUTOCOMMIT")
        self.steady = self.writing.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def leave_parent(self) -> None:
        """Use no connection of the process that this one was forked from, and close none: they are still its own."""
        self.writing.dispose(close=False)

    def close(self) -> None:
        """Close those that nobody uses; the others are closed when they are let go."""
        self.writing.dispose()


class Server(Database):
    """The FindDB in one database of a server, opened on first use.

    Args:
        url: postgresql://user@host:5432/database, with libpq's settings behind a question mark.
        read_only: never write; the tables must be there.

    Raises:
        DatabaseError: the URL cannot be told from a password.
    """

    path: Path | None = None
    packing: HistoryCodec | None = None
    is_immutable = False
    files = 0
    version = schema_versions.SCHEMA_VERSION

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self.where = self.location = location.shown_url(url)
        self.address = url
        self.read_only = read_only
        self._engines: _Engines | None = None
        self._is_made = False
        self._closed = False
        self._lock = threading.RLock()
        self._pinned = _Pinned()
        _servers.add(self)

    @property
    def exists(self) -> bool:
        """Whether there are tables.

        Raises:
            DatabaseError: the server cannot be reached.
        """
        if self._is_made:
            return True
        with translated(self.where), self._opened().reading.connect() as connection:
            return migrations.revision(connection) is not None

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection to read from, for this thread until the block ends; what others have stored is seen at once.

        Raises:
            DatabaseError: the server cannot be reached or read; SchemaVersionError: its tables are of another release.
        """
        with translated(self.where):
            if self._pinned.connection is not None:
                yield self._pinned.connection
                return
            with self._ready().reading.connect() as connection:
                yield connection

    @contextmanager
    def one_instant(self) -> Iterator[None]:
        """All that this thread reads in the block is of one instant, whatever others write meanwhile.

        Raises:
            DatabaseError, SchemaVersionError: as for `read`.
        """
        if self._pinned.connection is not None:
            yield
            return
        transaction = ExitStack()
        with translated(self.where):
            connection = transaction.enter_context(self._ready().steady.connect())
            transaction.enter_context(connection.begin())
        self._pinned.connection = connection
        try:
            yield  # what goes wrong here is not the server's, or was told by who read it
        finally:
            self._pinned.connection = None
            with translated(self.where):
                transaction.close()

    def in_batches(
        self, device: str | None, read: Callable[[Connection, Mapping[int, ProblemKey]], list[T]]
    ) -> Iterator[list[T]]:
        """What `read` gives for some problems after the other, by their keys; all of it is of one instant.

        Raises:
            DatabaseError, SchemaVersionError: as for `read`.
        """
        pinned = self._pinned.connection
        if pinned is not None:
            with translated(self.where):
                yield from _batches(pinned, device, read)
            return
        # Not pinned: the thread goes on to other things between batches, and may give this up in any of them.
        with translated(self.where), self._ready().steady.connect() as connection, connection.begin():
            yield from _batches(connection, device, read)

    def opened(self) -> AbstractContextManager[None]:
        """No connection: what a server is does not change, and each payload is read by itself."""
        return translated(self.where)

    def payload(self, device: str, network_config: str) -> Any:
        """What is stored as the answer to a problem, None where nothing is.

        On the driver's own connection: Core's execution costs as much again.
        """
        with self.read() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            found = driver.execute(_ANSWER_SQL, {"device": device, "network_config": network_config}).fetchone()
            return None if found is None else found[0]

    def rivals(self, device: str, first: str, end: str) -> Sequence[Sequence[Any]]:
        """The name of the problem and the values of each row of a rival, of problems from `first` to before `end`."""
        named = {"device": device, "first": first, "end": end, "status": RIVAL}
        with self.read() as connection:
            return connection.execute(entries.RIVALS_QUERY, named).all()

    def note(self, key: str) -> str | None:
        """What its tables say of themselves, None where they say nothing."""
        with self.read() as connection:
            return connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == key)).scalar()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection in a transaction that is committed when the block ends; nothing is stored where it fails.

        Raises:
            DatabaseError: the server cannot be reached or written, or it was opened to be read only.
            SchemaVersionError: its tables are of another release.
        """
        with translated(self.where), self._writing() as connection:
            yield connection

    def transact(self, work: Callable[[Connection], T], *, alone: bool = False) -> T:
        """What `work` returns, in a transaction: it is called again where others got in its way.

        Raises:
            DatabaseError, SchemaVersionError: as for `write`.
        """
        with translated(self.where):
            for pause_s in _pauses_s():
                try:
                    with self._writing() as connection:
                        if alone:  # whoever adds has a lock on a row of it, or is about to ask for one
                            connection.execute(text("LOCK TABLE problem IN EXCLUSIVE MODE"))
                        return work(connection)
                except DBAPIError as error:
                    if state_of(error) not in GET_IN_THE_WAY:
                        raise
                    last = error
                time.sleep(pause_s)
            raise last

    def clock(self, connection: Connection, present: str) -> str:
        """The present by the server's clock: those of hosts differ, and what is newest is in force."""
        return min(str(connection.execute(_CLOCK).scalar_one()), LAST_STAMP)

    def revision(self, connection: Connection) -> str:
        """The changes so far, all of them: of two transactions the one with the lower number may end last."""
        count, numbers = connection.execute(_CHANGES).one()
        return f"{count}:{numbers}"

    def prepare_to_write(self) -> None:
        """Open what `write` needs, to learn whether it can be.

        Raises:
            DatabaseError: the role may not write, or the server is one that follows another.
        """
        if self.read_only:
            raise DatabaseError(f"{self.where} was opened to be read only")
        with translated(self.where), self._ready().reading.connect() as connection:
            if not connection.execute(_RIGHTS).scalar_one():
                raise DatabaseError(
                    f"{self.where} can only be read by its role, or as a copy of another server: ask for the rights "
                    "that docs/fleet.md lists, or name another"
                )

    def bring_up(self) -> str | None:
        """Make or change the tables to be those of this release; returns the revision there was before.

        Raises:
            DatabaseError: the role may not; SchemaVersionError: a newer release made them.
        """
        with translated(self.where), self._opened().writing.begin() as connection:
            return migrations.bring_up(connection, self.where)

    def shrink(self) -> None:
        """Nothing: the server gives room back by itself."""

    def size_bytes(self, connection: Connection) -> int:
        """Of the tables and their indexes."""
        return int(connection.execute(_SIZE, {"names": [table.name for table in _TABLES]}).scalar_one())

    def findings(self, connection: Connection) -> list[str]:
        """What is wrong with its tables: columns that are missing, or order texts otherwise than byte by byte."""
        inspector = inspect(connection)
        findings = []
        for table in _TABLES:
            found = {item["name"]: item["type"] for item in inspector.get_columns(table.name)}
            missing = [item.name for item in table.columns if item.name not in found]
            findings += [f"column {table.name}.{name} is missing" for name in missing]
            texts = {name: kind.collation for name, kind in found.items() if isinstance(kind, String)}
            findings += [
                f"column {table.name}.{name} has texts in the order of {collation or 'the database'}, not of C"
                for name, collation in texts.items()
                if collation != "C"
            ]
        return findings

    def close(self) -> None:
        """Close for good. Harmless when repeated."""
        with self._lock:
            self._closed = True
            if self._engines is not None:
                self._engines.close()

    def leave_parent(self) -> None:
        """Part from the process that this one was forked from; what its threads held is let go."""
        self._lock = threading.RLock()
        self._pinned = _Pinned()
        if self._engines is not None:
            self._engines.leave_parent()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self.read_only:
            raise DatabaseError(f"{self.where} was opened to be read only")
        with self._ready().writing.begin() as connection:
            yield connection

    def _ready(self) -> _Engines:
        """The connections to a server whose tables are known to be there."""
        engines = self._opened()
        if not self._is_made:
            with self._lock:
                if not self._is_made:
                    self._check_tables(engines)
                    self._is_made = True
        return engines

    def _check_tables(self, engines: _Engines) -> None:
        with engines.reading.connect() as connection:
            found = migrations.revision(connection)
        if found is None and not self.read_only:
            self.bring_up()
            return
        migrations.require(found, self.where)

    def _opened(self) -> _Engines:
        with self._lock:
            if self._closed:
                raise DatabaseError(f"{self.where} is closed")
            if self._engines is None:
                self._engines = _Engines(Connector(self.address, self.where))
                weakref.finalize(self, self._engines.close)
            return self._engines


def _batches(
    connection: Connection, device: str | None, read: Callable[[Connection, Mapping[int, ProblemKey]], list[T]]
) -> Iterator[list[T]]:
    remaining = iter(entries.problems(connection, device).items())
    while batch := dict(islice(remaining, BATCH)):
        yield read(connection, batch)


def _pauses_s() -> Iterator[float]:
    """How long to wait after each try, the longer the more have failed."""
    longest_s = 0.002
    for _ in range(_MOST_TRIES):
        yield random.uniform(0, longest_s)
        longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _leave_parent() -> None:
    for server in list(_servers):
        server.leave_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parent)
