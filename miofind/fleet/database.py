"""The fleet's tables on its PostgreSQL server: transactions, and errors that tell an outage from a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from miofind.errors import DatabaseError
from miofind.finddb import migrations
from miofind.finddb.location import server_url, shown_url
from miofind.finddb.postgresql import Connector, engine_of, state_of, translated

FLEET = "0002_fleet"
"""The first revision that has all tables of a fleet as this release reads and writes them."""

# https://www.postgresql.org/docs/current/errcodes-appendix.html: connections, transactions that others got in the way
# of, a lack of room, locks, cancelled statements and servers that end or begin, and what the disk refuses.
_PASSING = ("08", "40", "53", "55", "57", "58")


class UnreachableError(DatabaseError):
    """The server does not answer, ends, or is too full: what was asked may be asked again."""


class FleetDatabase:
    """The tables of a fleet on a server. Threads may share it.

    Args:
        url: postgresql://user@host:5432/database; a password in it appears in no message.

    Raises:
        DatabaseError: it is no URL of PostgreSQL, or the driver is not installed.
    """

    def __init__(self, url: str) -> None:
        if server_url(url) is None:
            raise DatabaseError("a fleet needs a PostgreSQL server: give --database postgresql://user@host:5432/name")
        self.where = shown_url(url)
        self._engine = engine_of(Connector(url, self.where))
        self._by_itself = self._engine.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction, committed where the block ends well.

        Raises:
            UnreachableError: the server is away, or others got in the way; nothing says whether it was committed.
            DatabaseError: the server refuses.
        """
        with self._told(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def statement(self) -> Iterator[Connection]:
        """A connection on which each statement is a transaction of its own, which saves two round trips.

        Raises:
            DatabaseError: as `transaction`.
        """
        with self._told(), self._by_itself.connect() as connection:
            yield connection

    def create(self) -> None:
        """Make the tables of the FindDB and of the fleet, or bring those of an older release up to this one's.

        Raises:
            DatabaseError: as `transaction`; SchemaVersionError: a newer release made them.
        """
        with self.transaction() as connection:
            migrations.bring_up(connection, self.where)

    def require(self) -> None:
        """Do nothing where the tables are those of this release.

        Raises:
            DatabaseError: as `create`, and where they are missing or older.
        """
        with self.transaction() as connection:
            found = migrations.revision(connection)
        if found is None:
            raise DatabaseError(f"{self.where} is an empty database: run `miofind fleet init` on it")
        migrations.require(found, self.where, FLEET)

    def close(self) -> None:
        """Close all connections. Harmless when repeated."""
        self._engine.dispose()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            with translated(self.where):
                yield
        except DatabaseError as error:
            if _is_passing(error.__cause__):
                raise UnreachableError(*error.args) from error.__cause__
            raise


def _is_passing(cause: BaseException | None) -> bool:
    """Whether an error speaks of the moment: without a state the server said nothing at all."""
    if isinstance(cause, SQLAlchemyError) and not isinstance(cause, DBAPIError):
        return False
    return cause is not None and state_of(cause)[:2] in ("", *_PASSING)
