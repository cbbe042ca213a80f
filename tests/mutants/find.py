"""A default find over one mutant and a right solver, into a FindDB of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import miofind
from miofind.compiler import Compiler
from miofind.device.device import Device
from miofind.solver.candidate import Status
from miofind.solver.registry import COMPOSED_SUFFIX, Registry
from miofind.solver.solver import Solver
from mutants.base import MutantSolver


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a find made of a mutant.

    Attributes:
        statuses: of its rows in the FindDB.
        messages: theirs.
        answered: ids of the two solvers among the solutions, fastest first; with a pass behind them they are others.
    """

    statuses: tuple[Status, ...]
    messages: tuple[str, ...]
    answered: tuple[str, ...]


def find(
    tried: MutantSolver, right: Solver, device: Device, database: Path, compiler: Compiler | None = None
) -> Recorded:
    """What a find with the default options makes of a mutant beside a right solver."""
    mutant = tried.mutant
    known = Registry((tried, right))
    with miofind.Handle(device, database=database, strict=True, compiler=compiler, registry=known) as handle:
        found = miofind.find_solutions(mutant.problem, options=mutant.options, handle=handle)
        history = handle.database.user.history(device.identity, mutant.problem.network_config)
    assert history is not None
    rows = [row for row in history.rows if row.solver_id == tried.id]
    return Recorded(
        statuses=tuple(Status(row.status) for row in rows),
        messages=tuple(row.message for row in rows),
        answered=tuple(each.solver_id for each in found if not each.solver_id.endswith(COMPOSED_SUFFIX)),
    )
