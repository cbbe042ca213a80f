"""Releases: the FindDBs that ship with the package, readable on read-only media and of provable content.

A release holds what answers need and no more, packed. It says of itself what it holds, by a hash of its sorted export,
and which release it came after. Equal sources make equal releases, whatever their order.
"""

from __future__ import annotations

import errno
import functools
import math
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from miofind.errors import DatabaseError, DatabaseTargetError
from miofind.finddb import entries, ranking
from miofind.finddb.exchange import release_of
from miofind.finddb.location import MEMORY, checked_path, shown
from miofind.finddb.open_files import is_database, is_of_database
from miofind.finddb.sqlite_engine import connect, driver_of
from miofind.finddb.sqlite_file import (
    LOGS,
    check_writable_place,
    execute,
    fold_logs,
    open_file,
    translated,
)
from miofind.finddb.store import Store
from miofind.finddb.validation import RefusedEntryError
from miofind.finddb.values import History, ProblemKey, Release, Row, Scope, Verdict, canonical_json

_OUTRUN = 1.05  # how much slower than a void row an answer may be that is left without it

Keep = Callable[[ProblemKey, Row], bool]
Kind = Callable[[ProblemKey, Row], Hashable]
Widen = Callable[[ProblemKey, Sequence[Scope]], Sequence[Scope]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRules:
    """What a release asks of those who know the solvers.

    Attributes:
        keep: which rows to consider, all if left out.
        void: which of the others were true once: measured with kernels that have changed since.
        widen: adds to scopes what needs no measurement to be known, such as solvers that refuse the problem, and joins
            those that say together what one could.
        kind: what tells a solver's rows apart that some requests take and others do not, beyond what rows say.
        keeps_losers: whether the slower rows of a problem are kept, too, of which a model learns.
    """

    keep: Keep | None = None
    void: Keep | None = None
    widen: Widen | None = None
    kind: Kind = lambda key, row: None
    keeps_losers: bool = False


_NO_RULES = ReleaseRules()


def write_release(sources: Sequence[Store], path: str | Path, rules: ReleaseRules = _NO_RULES) -> Release:
    """Write a FindDB that gives the answers of all the sources merged, into a new file that replaces `path`.

    A release that is there is replaced, and what is no database, but no FindDB that is written to. A link is followed.
    A log beside the replaced file ends with it, so that nobody takes it for one of the new file.

    It holds the best rows (`ranking.release_rows`) or all that are usable, what their finds considered, and each
    problem's newest verdict.
    Failures, replaced rows, rows measured under contention and all of a solver whose fastest was stay behind, and so
    does a problem whose fastest row is void. Rows and environments name no machine or person, since no store takes that
    in.

    Args:
        sources: files that are written to, or releases, of this schema version or older ones.

    Raises:
        DatabaseError: a source cannot be read, or nothing of them may ship.
        DatabaseTargetError: `path` is a database but no release, or the file cannot be written; it is as it was then.
    """
    path = _target(path)
    replaced = _replaced(path)
    with Store(MEMORY) as union, Store(MEMORY) as chosen:
        for source in sources:
            union.merge(source)
        chosen.add(found for history in union.histories() if (found := _shipped(history, rules)).rows)
        shipped = tuple(chosen.histories())
    if not shipped:
        raise DatabaseError(f"no row of the sources may ship: {shown(path)} stays as it is")
    release = release_of(shipped, parent=replaced or _first_release(sources))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with _written(path):
            _write(temporary, shipped, release)
            fold_logs(path)
            os.replace(temporary, path)
    finally:
        for suffix in ("", *LOGS):
            with suppress(OSError):  # what went wrong before says more
                temporary.with_name(temporary.name + suffix).unlink()
    return release


def _write(path: Path, histories: Sequence[History], release: Release) -> None:
    """A new file, without the log of one that is written to: it can be copied by itself and lie on read-only media."""
    notes = {"release": canonical_json(asdict(release))}
    check_writable_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(connect(lambda: open_file(path, "rwc"), is_writer=True)) as connection:
        with connection.begin():
            entries.write_packed(connection, histories, notes)
        execute(driver_of(connection), "VACUUM")


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Turns errors of the file that the block writes into DatabaseTargetError, not those of what is written."""
    try:
        with translated(shown(path)):
            yield
    except RefusedEntryError:
        raise
    except DatabaseError as error:
        raise DatabaseTargetError(*error.args) from error


def _target(path: str | Path) -> Path:
    """The file that a release replaces.

    Raises:
        DatabaseTargetError: it is in memory or a server's, a folder or a device.
    """
    file = checked_path(path)
    if file is None:
        raise DatabaseTargetError(f"a release is a file, {MEMORY} is none: name one")
    with _written(file):
        file = Path(os.path.realpath(file))
        if file.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if file.exists() and not file.is_file():
            raise DatabaseTargetError(f"{shown(file)} is no regular file, which a release could replace: name another")
        if is_of_database(file) and not is_database(file):
            raise DatabaseTargetError(f"{shown(file)} is the log of a database: name another")
    return file


def _replaced(path: Path) -> Release | None:
    """The release that a new one replaces; None where there is no database.

    Raises:
        DatabaseTargetError: what is there is a FindDB that is written to, or another database: its rows would be lost.
    """
    with _written(path):
        if not is_database(path):
            return None
    with Store(path, read_only=True) as store:
        release = store.release()
    if release is None:
        raise DatabaseTargetError(
            f"{shown(path)} is a FindDB and no release, so its rows would be lost: name another file for the release, "
            "or remove this one"
        )
    return release


def _first_release(sources: Sequence[Store]) -> Release | None:
    """The first release among sources, None where there is none."""
    releases = (source.release() for source in sources)
    return next((release for release in releases if release is not None), None)


def _shipped(history: History, rules: ReleaseRules) -> History:
    key = ProblemKey(device=history.device, network_config=history.network_config)
    chosen = [row for row in history.rows if rules.keep is None or rules.keep(key, row)]
    void = rules.void
    if void is not None and _is_outrun(chosen, [row for row in history.rows if void(key, row)]):
        return replace(history, rows=(), scopes=(), verdicts=(), environments={})
    rows = _undisturbed(chosen, history.verdicts)
    if rules.keeps_losers:
        rows = ranking.rank(ranking.usable_rows(rows), history.verdicts)
    else:
        kind = functools.partial(rules.kind, key)
        rows = ranking.release_rows(rows, history.verdicts, kind=kind)
        while (fewer := ranking.release_rows(rows, _verdicts(history, rows), kind=kind)) != rows:
            rows = fewer  # without what stays behind others lead: a release of the release keeps all of it
    scopes = _scopes(history, rows)
    if rules.widen is not None:
        scopes = rules.widen(key, scopes)
    widest = tuple(ranking.widest_scopes(scopes))  # joined before few are kept
    found = replace(history, rows=tuple(rows), scopes=widest, verdicts=_verdicts(history, rows))
    named = found.named_environments
    return replace(found, environments={name: v for name, v in sorted(history.environments.items()) if name in named})


def _is_outrun(kept: Sequence[Row], void: Sequence[Row]) -> bool:
    """Whether the fastest row is void, and its solver has no other: the problem is better measured anew."""
    known = {row.solver_id for row in ranking.usable_rows(kept)}
    lost = [row for row in ranking.usable_rows(void) if row.solver_id not in known]
    left, best = (
        min((row.time_ms or 0.0 for row in rows), default=math.inf) for rows in (ranking.usable_rows(kept), lost)
    )
    return _OUTRUN * best < left


def _undisturbed(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> list[Row]:
    """Rows that had the device to themselves, without those of solvers that may be faster than these tell."""
    of_solver: dict[str, list[Row]] = {}
    for row in ranking.usable_rows(rows):
        of_solver.setdefault(row.solver_id, []).append(row)
    disturbed = {name for name, own in of_solver.items() if ranking.rank(own, verdicts)[0].contended}
    return [row for row in rows if not row.usable or not (row.contended or row.solver_id in disturbed)]


def _scopes(history: History, shipped: Sequence[Row]) -> Sequence[Scope]:
    """The scopes, without solvers whose every row stays behind: whoever has the release measures them anew."""
    lost = {row.solver_id for row in ranking.usable_rows(history.rows)} - {row.solver_id for row in shipped}
    return ranking.without_solvers(ranking.with_failures(history.scopes, history.rows), lost)


def _verdicts(history: History, shipped: Sequence[Row]) -> tuple[Verdict, ...]:
    """The newest verdict, if its winner ships and none of its candidates was measured since, or under contention."""
    verdict = ranking.newest_verdict(history.verdicts)
    if verdict is None or verdict.winner not in {row.candidate for row in shipped}:
        return ()
    named = {*verdict.ties, *(comparison.candidate for comparison in verdict.comparisons)}
    newest = [row for row in ranking.newest_rows(history.rows) if row.candidate in named]
    void = any(row.contended or row.created_at > verdict.created_at for row in newest)
    return () if void else (verdict,)
