"""SQLAlchemy over the driver's connection to a file, for all but look-ups: these do without its import, a tenth of a
second of each process."""

from __future__ import annotations

import functools
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from miofind.finddb.sqlite_file import begin_immediate
from miofind.process.forks import loading


class _NextConnection(threading.local):
    """Makes the driver's connection of the next one that this thread asks an engine for."""

    creator: Callable[[], sqlite3.Connection]


_asked = _NextConnection()


@functools.cache
def _engine(*, is_writer: bool) -> Engine:
    """What makes connections, for good: where an engine ends, SQLAlchemy's callbacks would swallow a Ctrl-C."""
    with loading():  # the first one imports what speaks SQLite
        engine = create_engine(
            "sqlite://", creator=lambda: _asked.creator(), poolclass=NullPool, pool_reset_on_return=None
        )
    if is_writer:
        event.listen(engine, "begin", _begin_immediate)
    return engine


def _begin_immediate(connection: Connection) -> None:
    begin_immediate(driver_of(connection))


def connect(creator: Callable[[], sqlite3.Connection], *, is_writer: bool = False) -> Connection:
    """A connection of SQLAlchemy over the driver's; a writer's transactions hold the write lock from the start."""
    _asked.creator = creator
    try:
        return _engine(is_writer=is_writer).connect()
    finally:
        del _asked.creator  # what SQLAlchemy has given up must not come back as the connection to another file


def driver_of(connection: Connection) -> sqlite3.Connection:
    """The driver's connection: on SQLAlchemy's each statement would begin a transaction first."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def give_up(connection: Connection) -> None:
    """Use a connection no more, whatever it is in the middle of."""
    with suppress(SQLAlchemyError, sqlite3.Error):  # of a transaction that something has broken off
        connection.invalidate()
        connection.close()
