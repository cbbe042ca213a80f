"""Whether what a FindDB holds still speaks of this release, its libraries and this device."""

from __future__ import annotations

import functools
import logging

from miofind.compiler import source_hash
from miofind.device import Device
from miofind.environment import versions
from miofind.errors import described
from miofind.finddb import Row, environment_id
from miofind.interrupts import raise_if_interrupted
from miofind.problem import ProblemDescription
from miofind.solver import Solver, solvers

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=64)
def current_environment(device: Device) -> str:
    """Id of the versions that a time depends on here."""
    return environment_id(versions(device))


def is_valid(row: Row, device: Device) -> bool:
    """Whether this release would still do what a row measured, as far as version, sources and libraries tell."""
    return is_current(row.solver_id, row.solver_version, row.source_hash, device)


@functools.lru_cache(maxsize=1024)
def is_current(solver_id: str, version: int, sources: str, device: Device) -> bool:
    solver = solvers().get(solver_id)
    if solver is None or version != solver.version or sources != solver_hash(solver):
        return False
    return all(device.library_version(key.library) is not None for key in solver.keys)


@functools.cache
def solver_hash(solver: Solver) -> str:
    """Hash of the sources that a solver's kernels reach."""
    return source_hash(solver.sources, solver.source_package) if solver.sources else ""


def may_serve(solver: Solver, problem: ProblemDescription, device: Device) -> bool:
    """Whether a solver would have to be measured to be ranked: it does not refuse the problem."""
    try:
        return bool(solver.applicability(problem, device))
    except BaseException as error:  # a solver's own code may raise anything
        raise_if_interrupted(error)
        logger.debug("%s cannot say whether it serves %s: %s", solver.id, problem, described(error))
        return True
