"""Writes the FindDBs that ship with the package: what answers need and no more, readable on read-only media."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from miofind.finddb import ranking
from miofind.finddb.database import make_portable
from miofind.finddb.location import MEMORY
from miofind.finddb.store import Store
from miofind.finddb.values import History, ProblemKey, Row, Stats


def write_shippable(
    sources: Sequence[Store], path: str | Path, *, keep: Callable[[ProblemKey, Row], bool] | None = None
) -> Stats:
    """Write a FindDB that gives the answers of all the sources merged, into a new file that replaces `path`.

    It holds the rows that answers are made of (the best three of each solver, and those that a limit on workspace,
    error or determinism would bring up) and the scopes; failures and replaced rows stay behind. Rows and environments
    name no machine or person, since no store takes that in.

    Args:
        keep: which rows to consider, all if left out.

    Returns:
        Counts of the new file.

    Raises:
        DatabaseError: a source cannot be read, or the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with Store(MEMORY) as union:
        for source in sources:
            union.merge(source)
        try:
            with Store(temporary) as target:
                target.open()
                for history in union.histories():
                    target.add([_shipped(history, keep)])
            make_portable(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    with Store(path, read_only=True) as written:
        return written.stats()


def _shipped(history: History, keep: Callable[[ProblemKey, Row], bool] | None) -> History:
    key = ProblemKey(device=history.device, network_config=history.network_config)
    rows = [row for row in history.rows if keep is None or keep(key, row)]
    best = tuple(ranking.best_rows(rows))
    named = {row.environment for row in best}
    return replace(
        history,
        rows=best,
        scopes=tuple(ranking.widest_scopes(history.scopes)) if best else (),
        environments={name: versions for name, versions in history.environments.items() if name in named},
    )
