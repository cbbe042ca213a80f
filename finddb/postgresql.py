"""How PostgreSQL is spoken to: connections, and errors that say what to do. Nothing here knows a table.

A URL may hold a password: no message quotes one, and none quotes what the driver says of a URL.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from miofind.errors import DamagedDatabaseError, DatabaseError, MissingDriverError, install_extra
from miofind.finddb.legible import UnreadableEntryError

if TYPE_CHECKING:
    import psycopg

LOCK_TIMEOUT_S = 30

_IDLE_CONNECTIONS = 1
_OLDEST = 130000  # PostgreSQL 13
_MOST_CONNECTIONS = 64
_LONGEST_TOLD = 300

_SETTINGS = {
    "application_name": "miofind",
    "client_encoding": "UTF8",
    "connect_timeout": "5",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Of a connection, unless its URL or the environment says otherwise: a server that is gone is found out soon."""

_OF_ENVIRONMENT = {"connect_timeout": "PGCONNECT_TIMEOUT", "application_name": "PGAPPNAME"}

GET_IN_THE_WAY = frozenset({"40001", "40P01", "23503"})
"""States of a transaction that others got in the way of, which can be tried again: two waited for each other, or one
removed what the other was about to name."""

# https://www.postgresql.org/docs/current/errcodes-appendix.html; two characters stand for a whole class.
_ADVICE = {
    "42501": "its role may not do that: ask for the rights that docs/fleet.md lists, or only read it",
    "25006": "it can only be read: name the server that is written to, or only read this one",
    "55P03": f"another process held it for {LOCK_TIMEOUT_S} s: end that process, or wait",
    "57014": "it cancelled the statement, which took longer than its statement_timeout: raise that, or try again",
    "42P01": "a table is missing: run `miofind db upgrade` on it",
    "42703": "a column is missing: run `miofind db upgrade` on it",
    "42P07": "it has tables of something else, whose names a FindDB needs: name another database, or a schema of its "
    "own by ?options=-csearch_path%3Dmiofind",
    "53100": "its disk is full: make room on it",
    "53300": "it has no connection left: end other programs that use it, or raise its max_connections",
    "40": "other processes got in the way again and again: try again",
    "57P": "it is shutting down, or starting: try again when it runs",
    "08": "the connection was lost: try again when the server can be reached",
}


class Connector:
    """Makes connections to the server that a URL names.

    Args:
        where: the server's name in messages.

    Raises:
        MissingDriverError: the driver is not installed.
        DatabaseError: the URL is malformed.
    """

    def __init__(self, url: str, where: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingDriverError(
                f"{where} needs psycopg, which speaks to PostgreSQL and is not installed: {install_extra('server')}"
            ) from error
        self._driver = psycopg
        self._where = where
        settings = {name: value for name, value in _SETTINGS.items() if _OF_ENVIRONMENT.get(name, "") not in os.environ}
        try:
            self._parameters: dict[str, Any] = {**settings, **psycopg.conninfo.conninfo_to_dict(url)}
        except psycopg.Error:
            unknown = sorted({name for name, _ in parse_qsl(url.partition("?")[2])} - self._known)
            told = f"it has no setting {', '.join(unknown)}" if unknown else "it is malformed"
            raise DatabaseError(
                f"the URL of {where} cannot be used, {told}: its form is postgresql://user@host:5432/database, and its "
                "settings are those of libpq"
            ) from None  # what the driver says may quote a password

    def _check(self, found: psycopg.ConnectionInfo) -> None:
        """Do nothing where the server is one that a FindDB can be on; it said so when it was connected to."""
        if found.server_version < _OLDEST:
            raise DatabaseError(
                f"{self._where} is on PostgreSQL {found.server_version // 10000}, a FindDB needs 13 or newer: upgrade "
                "the server, or name another"
            )
        encoding = found.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise DatabaseError(
                f"{self._where} holds texts in {encoding}, a FindDB needs UTF8: make a database by `createdb -E UTF8 "
                "-T template0 NAME`, and name that"
            )

    @property
    def _known(self) -> set[str]:
        return {item.keyword.decode() for item in self._driver.pq.Conninfo.get_defaults()}

    def __call__(self) -> psycopg.Connection[Any]:
        """A new connection.

        Raises:
            DatabaseError: the server is too old, or the database holds no UTF-8.
        """
        connection = self._driver.connect(**self._parameters)
        try:
            self._check(connection.info)
            connection.autocommit = True  # no transaction begins
            connection.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_S}s'")
            connection.autocommit = False
        except BaseException:
            connection.close()
            raise
        return connection


def engine_of(connector: Connector) -> Engine:
    """What keeps few connections open between uses, and makes as many as are used at a time."""
    engine = create_engine(
        "postgresql+psycopg://",
        creator=connector,
        poolclass=QueuePool,
        pool_size=_IDLE_CONNECTIONS,
        max_overflow=_MOST_CONNECTIONS - _IDLE_CONNECTIONS,
        pool_use_lifo=True,
        use_native_hstore=False,
        hide_parameters=True,
        isolation_level="READ COMMITTED",
    )
    event.listen(engine, "checkout", _part_from_closed)
    return engine


def _part_from_closed(driver: psycopg.Connection[Any], entry: ConnectionPoolEntry, proxy: object) -> None:
    """Refuse a connection on which the server said something while nobody used it: mostly that it ends.

    That costs a microsecond, where asking the server would cost a look-up's time again.

    Raises:
        DisconnectionError: the pool makes another.
    """
    if driver.closed:
        raise DisconnectionError
    poller = select.poll()
    poller.register(driver.fileno(), select.POLLIN)
    if poller.poll(0):
        raise DisconnectionError


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turns what goes wrong in the block into a DatabaseError about the server `where`."""
    try:
        yield
    except UnreadableEntryError as error:
        raise DamagedDatabaseError(
            f"{where} holds an entry that cannot be read ({error}): check the database"
        ) from error
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        if isinstance(cause, (MemoryError, RecursionError)):  # they speak of the process, not of the server
            raise cause from None
        raise _database_error(where, cause) from error
    except OSError as error:
        raise DatabaseError(f"{where} cannot be used: {error.strerror or type(error).__name__}") from error
    except Exception as error:
        if not _is_of_driver(error):
            raise
        raise _database_error(where, error) from error


def _is_of_driver(error: Exception) -> bool:
    """Whether the driver raised it, which is imported where it is used."""
    driver = sys.modules.get("psycopg")
    return driver is not None and isinstance(error, driver.Error)


def state_of(error: BaseException) -> str:
    """The SQLSTATE of an error of SQLAlchemy or of the driver, "" where it has none: the server said nothing."""
    return getattr(getattr(error, "orig", None) or error, "sqlstate", None) or ""


def _database_error(where: str, error: BaseException) -> DatabaseError:
    state = state_of(error)
    diagnosis = getattr(error, "diag", None)
    told = " ".join(str(getattr(diagnosis, "message_primary", None) or error).split())[:_LONGEST_TOLD]
    for length in (5, 3, 2):
        if advice := _ADVICE.get(state[:length]):
            return DatabaseError(f"{where} cannot be used: {advice} ({told})")
    if not state:
        told = told.rstrip(".?! ")  # libpq ends with "... accepting TCP/IP connections?"
        return DatabaseError(
            f"{where} cannot be reached: {told}. Correct the URL, or see that the server runs and lets you in"
        )
    return DatabaseError(f"{where} cannot be used: {told} (SQLSTATE {state}): run `miofind db check` on it")
