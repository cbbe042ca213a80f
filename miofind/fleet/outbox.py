"""Which problems of a host's FindDB its server may lack: noted before they are measured, until they are merged.

The rows themselves are in the FindDB, where an agent that is killed leaves them; the next one finds here which. The
note is a file beside the FindDB's, and says as well that an agent uses it: two would wait for each other's locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import UUID

from miofind.errors import DatabaseError
from miofind.finddb import ProblemKey
from miofind.fleet.values import Hold

_TABLES = """
CREATE TABLE IF NOT EXISTS pending (
    device TEXT, network_config TEXT, job TEXT, PRIMARY KEY (device, network_config, job)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS agent (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
ORPHANED = Hold(-1, 0)
"""Stands for what agents held that are gone."""


class Outbox:
    """The note beside one FindDB. One process at a time has it; its threads share it.

    Args:
        finddb: the FindDB's file.

    Raises:
        DatabaseError: another agent uses it, or the file cannot be written.
    """

    def __init__(self, finddb: Path) -> None:
        self._path = Path(f"{finddb}.fleet")
        self._lock = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)  # before the FindDB itself is written
            self._file = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._check_alone()
            self._connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            self._connection.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise self._refused(error) from error

    def succeed(self, agent: UUID) -> list[UUID]:
        """Note the agent that has it now; returns those before it, which are dead. All that they noted is orphaned.

        They stay noted until the server was told of them: the agent may be killed before that.
        """
        with self._transaction() as connection:
            found = connection.execute("SELECT id FROM agent").fetchall()
            connection.execute("INSERT INTO agent VALUES (?)", (str(agent),))
            connection.execute("UPDATE OR REPLACE pending SET job = ?", (_text(ORPHANED),))
        return [UUID(row[0]) for row in found]

    def buried(self, agent: UUID) -> None:
        """Note that the server was told of a dead agent."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM agent WHERE id = ?", (str(agent),))

    def expect(self, notes: Iterable[tuple[ProblemKey, Hold]]) -> None:
        """Note problems that are about to be measured, and the claim of each: a job may come again."""
        rows = list(map(_row, notes))
        with self._transaction() as connection:
            connection.executemany("INSERT OR IGNORE INTO pending VALUES (?, ?, ?)", rows)

    def forget(self, notes: Iterable[tuple[ProblemKey, Hold]]) -> None:
        """Drop notes: the server has what they speak of, or nothing was measured."""
        rows = list(map(_row, notes))
        with self._transaction() as connection:
            connection.executemany("DELETE FROM pending WHERE device = ? AND network_config = ? AND job = ?", rows)

    def orphans(self) -> list[ProblemKey]:
        """The problems that agents which are gone may have measured, and nobody has merged."""
        with self._transaction() as connection:
            statement = "SELECT device, network_config FROM pending WHERE job = ?"
            return [
                ProblemKey(device=row[0], network_config=row[1])
                for row in connection.execute(statement, (_text(ORPHANED),))
            ]

    def __len__(self) -> int:
        with self._transaction() as connection:
            return int(connection.execute("SELECT count(*) FROM pending").fetchone()[0])

    def close(self) -> None:
        """Let another agent have it."""
        with self._lock:
            self._connection.close()
        os.close(self._file)

    def _check_alone(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise DatabaseError(
                "another agent of the fleet uses this FindDB: one agent has all GPUs of a host (--gpus all), or give "
                "each a FindDB of its own by --db FILE"
            ) from None

    def _refused(self, error: Exception) -> DatabaseError:
        told = f"{self._path.name}, the fleet's note beside the FindDB, at {self._path.parent}: {error}"
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            told += ". Merge the FindDB into the server's by `miofind db merge`, then remove the note"
        return DatabaseError(told)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
        except sqlite3.Error as error:
            raise self._refused(error) from error


def _row(note: tuple[ProblemKey, Hold]) -> tuple[str, str, str]:
    key, hold = note
    return key.device, key.network_config, _text(hold)


def _text(hold: Hold) -> str:
    """A claim as the note's file has it, also in one of an earlier release, whose column is of whole numbers."""
    return f"{hold.job}/{hold.fence}"
