"""A default find over one mutant and a right solver, into a FindDB of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import miofind
from miofind import options
from miofind.compiler import Compiler
from miofind.device.device import Device
from miofind.find import plan, row_check
from miofind.find.lookup import records, scopes, stored, validity
from miofind.solver import solver
from miofind.solver.candidate import Status
from miofind.solver.solver import Solver
from mutants.base import MutantSolver

_IMPORTERS = (solver, plan, records, scopes, stored, validity, options, row_check)
"""Modules that look solvers up by a name of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a find made of a mutant.

    Attributes:
        statuses: of its rows in the FindDB.
        messages: theirs.
        answered: ids of the solvers among the solutions, fastest first.
    """

    statuses: tuple[Status, ...]
    messages: tuple[str, ...]
    answered: tuple[str, ...]


@contextmanager
def registered(known: Sequence[Solver]) -> Iterator[None]:
    """These solvers are all there are."""
    registry = {each.id: each for each in known}
    with pytest.MonkeyPatch.context() as patch:
        for module in _IMPORTERS:
            patch.setattr(module, "solvers", lambda: registry)
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """Drop what is remembered of solvers by id."""
    scopes.requested_scope.cache_clear()
    validity.is_current.cache_clear()


def find(
    tried: MutantSolver, right: Solver, device: Device, database: Path, compiler: Compiler | None = None
) -> Recorded:
    """What a find with the default options makes of a mutant beside a right solver."""
    mutant = tried.mutant
    with (
        registered((tried, right)),
        miofind.Handle(device, database=database, strict=True, compiler=compiler) as handle,
    ):
        found = miofind.find_solutions(mutant.problem, options=mutant.options, handle=handle)
        history = handle.database.user.history(device.identity, mutant.problem.network_config)
    assert history is not None
    rows = [row for row in history.rows if row.solver_id == tried.id]
    return Recorded(
        statuses=tuple(Status(row.status) for row in rows),
        messages=tuple(row.message for row in rows),
        answered=tuple(solution.solver_id for solution in found),
    )
