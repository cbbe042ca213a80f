"""The fleet's connection to its PostgreSQL server: engines, and errors that tell an outage from a defect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError, SQLAlchemyError

from miofind.errors import DatabaseError
from miofind.fleet import schema

_SETTINGS = {
    "application_name": "miofind fleet",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
"""Of a connection, unless its URL says otherwise: who waits for a server that is gone renews no leases."""


# https://www.postgresql.org/docs/current/errcodes-appendix.html
_ADVICE = {
    "42P01": ": run `miofind fleet init` on it",
    "42703": ": run `miofind fleet init` on it",
    "42501": ": its role may not do that: ask for the rights that docs/fleet.md lists",
}


class UnreachableError(DatabaseError):
    """The server does not answer, or ended a connection: what was asked may be asked again."""


class FleetDatabase:
    """The tables of a fleet on a server. Threads may share it.

    Args:
        url: postgresql://user@host:5432/database; a password in it appears in no message.

    Raises:
        DatabaseError: it is no URL of PostgreSQL, or the driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self.where, self._engine = _opened(url)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction, committed where the block ends well.

        Raises:
            UnreachableError: the server is away, or others got in the way; nothing says whether it was committed.
            DatabaseError: the server refuses.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except (OperationalError, InterfaceError) as error:
            raise UnreachableError(f"{self.where} is out of reach: {_told(error)}") from error
        except SQLAlchemyError as error:
            advice = _ADVICE.get(getattr(getattr(error, "orig", None), "sqlstate", ""), "")
            raise DatabaseError(f"{self.where}: {_told(error)}{advice}") from error

    def create(self) -> None:
        """Create the tables that are not there.

        Raises:
            DatabaseError: as `transaction`.
        """
        with self.transaction() as connection:
            schema.create(connection)

    def close(self) -> None:
        """Close all connections. Harmless when repeated."""
        self._engine.dispose()


def _opened(url: str) -> tuple[str, Engine]:
    """The server's name for messages, and an engine; nothing is connected yet."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseError(
            "the URL of the fleet's database is malformed: its form is postgresql://user@host:5432/database"
        ) from None  # the driver's words may quote a password
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise DatabaseError(
            f"a fleet needs a PostgreSQL server, not {parsed.get_backend_name()}: give "
            "--database postgresql://user@host:5432/database"
        )
    host = parsed.host or parsed.query.get("host") or "localhost"
    where = f"{host}/{parsed.database or ''}"
    arguments = {name: value for name, value in _SETTINGS.items() if name not in parsed.query}
    try:
        return where, create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            connect_args=arguments,
            hide_parameters=True,
            pool_size=2,
            max_overflow=8,
            pool_pre_ping=True,
            use_native_hstore=False,
        )
    except ImportError as error:
        raise DatabaseError("a fleet speaks to PostgreSQL by psycopg: pip install 'miofind[fleet]'") from error


def _told(error: SQLAlchemyError) -> str:
    """The first line of what the server said."""
    original = getattr(error, "orig", None) or error
    return (str(original).strip().splitlines() or [type(original).__name__])[0][:300]
