"""One FindDB: records measurements, answers look-ups, and hands whole histories in and out.

Every method either does what it says or raises; what to do without a database is decided in `layered`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from miofind.errors import DatabaseError
from miofind.finddb import answers, exchange, late, location, ranking, stamps
from miofind.finddb.answers import Answer
from miofind.finddb.database import BATCH, Database
from miofind.finddb.legible import checked_text, legible
from miofind.finddb.packing import HistoryCodec
from miofind.finddb.sqlite_database import SqliteFile
from miofind.finddb.validation import checked_environment, checked_history, checked_key, checked_reason
from miofind.finddb.values import (
    Entry,
    History,
    ProblemKey,
    Prune,
    Recheck,
    Release,
    Row,
    Scope,
    Stats,
    Verdict,
    from_json,
)
from miofind.process.forks import loading

if TYPE_CHECKING:
    from sqlalchemy import Connection

_MOST_ANSWERS = 1 << 12
"""Answers of stores that a process keeps decoded, of some 10 KB each."""


class Store:
    """A FindDB in one SQLite file, in memory or on a server. Threads and processes may share it.

    It is opened on first use.

    Args:
        address: the file, made with its folder when first used; ":memory:" for one that ends with the process; or a
            PostgreSQL server's URL, postgresql://user@host:5432/database, whose tables are made when first written to.
        read_only: only read; the file or the tables must exist, a file can be on read-only media.

    Raises:
        DatabaseError: the address cannot be one. Every method raises it where the database cannot be used as asked, and
            SchemaVersionError where a newer release wrote it; nothing of the call is stored then.
    """

    def __init__(self, address: str | Path, *, read_only: bool = False) -> None:
        self._database = _database(address, read_only=read_only)

    @property
    def path(self) -> Path | None:
        """The file, None in memory and on a server."""
        return self._database.path

    @property
    def where(self) -> str:
        """Its name in a form fit for logs."""
        return self._database.where

    @property
    def location(self) -> str:
        """What a user is told it is: a whole path, ":memory:", or a server's URL without who asks."""
        return self._database.location

    @property
    def address(self) -> str:
        """What opens it again. A server's may hold a password: it goes into no message, log or report."""
        return self._database.address

    @property
    def in_memory(self) -> bool:
        """Whether it ends with the process, and no other can open it."""
        return self._database.address == location.MEMORY

    @property
    def exists(self) -> bool:
        """Whether there is anything to read: a file, memory or tables, which are made by the first write.

        Raises:
            DatabaseError: a server cannot be reached.
        """
        return self._database.exists

    @property
    def read_only(self) -> bool:
        """Whether it refuses to record."""
        return self._database.read_only

    @property
    def schema_version(self) -> int:
        """The schema version of a file; an older one is read as it is, and written once it was upgraded.

        A release has one of its own, and is only read. A server has that of this release, or cannot be used.
        """
        return self._database.version

    def open(self) -> Store:
        """Open now what would be opened on first use, to learn whether it can be read, and written if it may be."""
        if not self.read_only:
            self._database.prepare_to_write()
        with self._database.read():
            return self

    @contextmanager
    def one_instant(self) -> Iterator[Store]:
        """This store; what the block reads from a server is of one instant, whatever others write meanwhile.

        Of a file each problem is, and no more: a file that is read for long would keep its log from being emptied.
        """
        with self._database.one_instant():
            yield self

    def best_of_all(self) -> dict[ProblemKey, Row | None]:
        """The first row of the answer to every problem, in the order of their keys; None where it has none."""

        def read(connection: Connection, batch: Mapping[int, ProblemKey]) -> list[tuple[ProblemKey, Row | None]]:
            payloads, packing = late.entries.payloads(connection, batch), self._database.packing
            found = []
            for number, key in batch.items():
                stored = payloads.get(number)
                answer = None if stored is None else _decode(key.device, key.network_config, stored, packing)
                found.append((key, answer.rows[0] if answer is not None and len(answer.rows) else None))
            return found

        return dict(pair for batch in self._database.in_batches(None, read) for pair in batch)

    def answer(self, device: str, network_config: str) -> Answer | None:
        """What is known of a problem on a device, None if nothing is."""
        with self._database.opened():
            payload = self._database.payload(device, network_config)
            return None if payload is None else _decoded(device, network_config, payload, self._database.packing)

    def rivals(self, device: str, first: str, end: str) -> list[tuple[str, Row]]:
        """The times of other libraries, each with the name of its problem; a release has none.

        Args:
            first, end: names of problems from the one up to the other, which is not among them.
        """
        with self._database.opened():
            if self._database.packing is not None:
                return []
            found = self._database.rivals(device, first, end)
            with legible():
                return [(checked_text(name), answers.rival_of(values)) for name, *values in found]

    def revision(self) -> str:
        """What is another wherever something else may be stored than before; "" in memory."""
        with self._database.read() as connection:
            return self._database.revision(connection)

    def record(
        self,
        device: str,
        network_config: str,
        rows: Iterable[Row] = (),
        *,
        scope: Scope | None = None,
        environment: Mapping[str, str] | None = None,
        verdict: Verdict | None = None,
        notes: Collection[str] | None = None,
    ) -> Answer | None:
        """Store measurements, the scope of their find and the verdict of their race, in one transaction.

        They are safe from a killed process once this returns.

        Args:
            rows: one a configuration; those without environment or time get `environment` and the present, as the
                verdict does.
            environment: versions the rows were measured with, such as {"driver": "580.65"}.
            notes: reasons to measure the problem again, in place of those that are noted; None leaves these.

        Returns:
            The answer as it is now, None where nothing is known still.
        """
        checked_key(device, network_config)
        versions = {} if environment is None else {checked_environment(environment): dict(environment)}
        environment_id = next(iter(versions), "")
        given = History(
            device=device,
            network_config=network_config,
            rows=tuple(replace(row, environment=row.environment or environment_id) for row in rows),
            scopes=() if scope is None else (scope,),
            verdicts=() if verdict is None else (replace(verdict, environment=verdict.environment or environment_id),),
            environments=versions,
        )
        history = checked_history(stamps.stamped(given, now := stamps.now()))
        for reason in notes or ():
            checked_reason(reason)

        def store(connection: Connection) -> Any:
            is_held = bool(history.rows or history.scopes or history.verdicts)
            numbered = late.entries.hold if is_held else late.entries.find_problem
            number = numbered(connection, device, network_config)
            stamp = late.entries.next_stamp(connection, number, self._database.clock(connection, now))
            # The clock was set back, or is another's, or others recorded while this waited for them.
            found = history if stamp == now else checked_history(stamps.stamped(given, stamp))
            if is_held and number is not None:
                late.entries.add_to(connection, number, found)
            if notes is not None:
                late.entries.forget_rechecks(connection, device, network_config)
                late.entries.note_rechecks(connection, device, network_config, notes, stamp)
            return None if number is None else late.entries.payload(connection, number)

        payload = self._database.transact(store)
        return None if payload is None else _decoded(device, network_config, payload)

    def add(self, histories: Iterable[History]) -> int:
        """Store histories in one transaction, each entry once however often it comes; returns how many were new."""
        return self._add_checked([checked_history(history) for history in histories])

    def merge(self, other: Store) -> int:
        """Store all that another FindDB holds; returns how many rows, scopes and verdicts were new.

        The union does not depend on the order of merges, and merging twice changes nothing. A merge that was
        interrupted can be repeated.

        Raises:
            DatabaseError: the other is a release whose content is not what it says of itself, or cannot be read.
        """
        other.refuse_altered()
        added = 0
        histories = other.histories()
        while batch := list(itertools.islice(histories, BATCH)):
            added += self.add(batch)
        return added

    def history(self, device: str, network_config: str) -> History | None:
        """All that is stored of a problem, failures too; None if nothing is."""
        with self._database.read() as connection:
            number = late.entries.find_problem(connection, device, network_config)
            if number is None:
                return None
            key = ProblemKey(device=device, network_config=network_config)
            return late.entries.history(connection, number, key, self._database.packing)

    def histories_of(self, keys: Iterable[ProblemKey]) -> list[History]:
        """What is stored of some problems, of those that anything is; by a few statements for all."""
        with self._database.one_instant(), self._database.read() as connection:
            found = late.entries.find_problems(connection, keys)
            return late.entries.histories(connection, found, self._database.packing)

    def histories(self, device: str | None = None) -> Iterator[History]:
        """The histories of all problems, in the order of their keys."""

        def read(connection: Connection, batch: Mapping[int, ProblemKey]) -> list[History]:
            return late.entries.histories(connection, batch, self._database.packing)

        for found in self._database.in_batches(device, read):
            yield from found

    def rows(self, device: str | None = None) -> Iterator[tuple[ProblemKey, Row]]:
        """All rows with the problem each belongs to, failures too."""
        for history in self.histories(device):
            key = ProblemKey(device=history.device, network_config=history.network_config)
            for row in history.rows:
                yield key, row

    def problems(self, device: str | None = None) -> tuple[ProblemKey, ...]:
        """All problems that something is stored of."""
        with self._database.read() as connection:
            return tuple(late.entries.problems(connection, device).values())

    def solved_problems(self) -> tuple[ProblemKey, ...]:
        """The problems that the store has solutions of, by one statement: no answer is decoded."""
        with self._database.read() as connection:
            return tuple(late.entries.solved_problems(connection, is_packed=self._database.packing is not None))

    def clean(self, device: str, network_config: str) -> int:
        """Forget a problem; returns how many rows went. Another database that is merged in can bring it back."""

        def remove(connection: Connection) -> int:
            number = late.entries.find_problem(connection, device, network_config)
            return 0 if number is None else late.entries.remove_problem(connection, number)

        return self._database.transact(remove, alone=True)

    def prune(self, what: Prune | str, *, device: str = "") -> int:
        """Remove rows that no answer needs, and give their room back to the disk; returns how many went.

        Args:
            what: SUPERSEDED: rows that newer ones of their configuration replaced, and verdicts but the newest.
                FAILED: failures and the rows they displaced. OTHER_DEVICES: every problem of another device than
                `device`.
        """
        what = Prune(what)
        if what is Prune.OTHER_DEVICES:
            checked_key(device, "-")

        def remove(connection: Connection) -> int:
            removed = sum(
                _prune_problem(connection, number, what, keep=key.device == device)
                for number, key in late.entries.problems(connection).items()
            )
            late.entries.remove_orphans(connection)
            return removed

        removed = self._database.transact(remove, alone=True)
        if removed:
            self._database.shrink()
        return removed

    def rebuild(self) -> int:
        """Derive every answer anew from the rows; returns how many there are."""

        def derive(connection: Connection) -> int:
            numbers = late.entries.problems(connection)
            for number in numbers:
                late.entries.rebuild(connection, number)
            return len(numbers)

        return self._database.transact(derive, alone=True)

    def queue_recheck(self, device: str, network_config: str, reason: str) -> bool:
        """Note that a problem wants measuring again; returns whether that is news. Cheap when it is not."""
        checked_key(device, network_config)
        checked_reason(reason)
        with self._database.read() as connection:
            if late.entries.is_recheck_noted(connection, device, network_config, reason):
                return False

        def note(connection: Connection) -> int:
            present = self._database.clock(connection, stamps.now())
            number = late.entries.find_problem(connection, device, network_config)
            stamp = late.entries.next_stamp(connection, number, present)
            return late.entries.note_rechecks(connection, device, network_config, [reason], stamp)

        return self._database.transact(note) == 1

    def rechecks(self, device: str | None = None) -> tuple[Recheck, ...]:
        """The problems that want measuring again, the oldest note first."""
        with self._database.read() as connection:
            return late.entries.rechecks(connection, device)

    def environment(self, environment_id: str) -> Mapping[str, str] | None:
        """The versions that an environment's id stands for, None if it is unknown."""
        with self._database.read() as connection:
            return late.entries.environment(connection, environment_id)

    def stats(self) -> Stats:
        """Counts of what is stored."""
        with self._database.read() as connection:
            return late.soundness.stats(connection, self._database.size_bytes(connection), self._database.packing)

    def check(self, validate: Callable[[ProblemKey, Row], str | None] | None = None) -> tuple[str, ...]:
        """Findings against the file, its schema and its contents, one line each; empty if it is sound.

        Args:
            validate: a check of one row from outside; returns what is wrong with it, or None.
        """
        try:
            findings = self._own_findings()
        except DatabaseError as error:
            return (str(error),)
        if validate is not None and not findings:
            found = ((key, row, validate(key, row)) for key, row in self.rows())
            findings += [late.soundness.row_finding(key, row, finding) for key, row, finding in found if finding]
        return tuple(findings)

    def export_jsonl(self, file: TextIO) -> int:
        """Write all environments, rows, scopes and verdicts as JSON lines in a stable order; returns how many lines."""
        return exchange.write(file, self.histories())

    def import_jsonl(self, file: TextIO) -> int:
        """Store what `export_jsonl` wrote, all of it or nothing; returns how many rows, scopes and verdicts were new.

        Raises:
            DatabaseError: a line is no entry of a FindDB; the message gives its number.
        """
        return self._add_checked(exchange.read(file))

    def release(self) -> Release | None:
        """What the file says of itself as a release, None if it is none."""
        with self._database.opened():
            text = self._database.note("release")
            with legible():
                return None if text is None else Release(**from_json(text))

    def refuse_altered(self) -> None:
        """Do nothing, unless this is a packed release that holds something else than it says.

        Raises:
            DatabaseError: it is one.
        """
        release = self.release()
        if release is None or self._database.packing is None:
            return
        findings = late.soundness.release_findings(release, tuple(self.histories()))
        if findings:
            raise DatabaseError(f"{self.where}: {findings[0]}")

    def close(self) -> None:
        """Close the file for good. Harmless when repeated."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.where!r}{', read_only=True' if self.read_only else ''})"

    def _own_findings(self) -> list[str]:
        with self._database.read() as connection:
            findings = self._database.findings(connection)
            if findings:
                return findings

        def check(connection: Connection, batch: Mapping[int, ProblemKey]) -> list[list[str]]:
            version, packing = self._database.version, self._database.packing
            return [
                late.soundness.problem_findings(connection, version, number, key, packing)
                for number, key in batch.items()
            ]

        findings = [finding for batch in self._database.in_batches(None, check) for of in batch for finding in of]
        release = self.release()
        if release is None and self._database.packing is not None:
            findings.append("it is packed as a release is, and names none: it was altered")
        if release is not None and not findings:
            findings += late.soundness.release_findings(release, tuple(self.histories()))
        return findings

    def _add_checked(self, histories: Iterable[History]) -> int:
        added = list(histories)
        if not added:
            self._database.prepare_to_write()
        return self._database.transact(lambda connection: late.entries.add(connection, added))


def _database(address: str | Path, *, read_only: bool) -> Database:
    url = location.server_url(address)
    if url is None:
        return SqliteFile(location.checked_path(address), read_only=read_only)
    with loading():
        from miofind.finddb.server import Server
    return Server(url, read_only=read_only)


def _decode(device: str, network_config: str, payload: Any, packing: HistoryCodec | None = None) -> Answer:
    with legible():
        text = payload if packing is None else packing.answer_text(device, network_config, payload)
        return answers.decode(device, network_config, text)


# Of the text, so that what others write meanwhile is seen.
_decoded = functools.lru_cache(maxsize=_MOST_ANSWERS)(_decode)


def _prune_problem(connection: Connection, number: int, what: Prune, *, keep: bool) -> int:
    if what is Prune.OTHER_DEVICES:
        return 0 if keep else late.entries.remove_problem(connection, number)
    rows = late.entries.rows_of(connection, number)
    with legible():
        if what is Prune.FAILED:
            return late.entries.remove(connection, number, ranking.failed_rows(rows))
        scopes, verdicts = late.entries.scopes_of(connection, number), late.entries.verdicts_of(connection, number)
        wanted: list[Entry | None] = [*ranking.uncovered_scopes(scopes), ranking.newest_verdict(verdicts)]
        found: list[Entry] = [*scopes, *verdicts]
        unwanted = [entry for entry in found if entry not in wanted]
        return late.entries.remove(connection, number, [*ranking.superseded_rows(rows), *unwanted])
