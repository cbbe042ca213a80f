"""Whether what a FindDB holds still speaks of this release, its libraries and this device."""

from __future__ import annotations

import functools
import hashlib
import logging

from miofind.compiler import host_hash, source_hash
from miofind.device.device import Device, Place
from miofind.device.environment import versions
from miofind.errors import CompileError
from miofind.finddb import Row, environment_id
from miofind.runtime.handle import Handle
from miofind.solver.solver import Solver
from miofind.solvers.pointwise import channel_sums, epilogue_pass
from miofind.solvers.pointwise.composed import Composed

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=64)
def current_environment(device: Device) -> str:
    """Id of the versions that a time depends on here."""
    return environment_id(versions(device))


def is_valid(row: Row, handle: Handle) -> bool:
    """Whether a handle's solver would still do what a row measured, as far as version, sources and libraries tell."""
    return is_current(handle.registry.get(row.solver_id), row.solver_version, row.source_hash, handle.device)


@functools.lru_cache(maxsize=1024)
def is_current(solver: Solver | None, version: int, sources: str, device: Device) -> bool:
    """Whether a solver is the one of that version and sources, and its library is here."""
    if solver is None or version != solver.version:
        return False
    if not has_sources(solver, sources):
        return False
    return all(device.library_version(key.library) is not None for key in solver.keys)


def has_sources(solver: Solver, sources: str) -> bool:
    """Whether a hash is that of a solver's sources for bare problems or for fused ones: none has rows of both."""
    return any(solver_hash(solver, fused=fused) == sources for fused in (False, True))


@functools.cache
def solver_hash(solver: Solver, *, fused: bool = False) -> str:
    """Hash of the sources of a solver's kernels, or of its own where it computes on the CPU place; "" for neither.

    It is "" too where they cannot be read, with which whatever is measured of the solver fails.

    Args:
        fused: of its kernels for problems with an epilogue.
    """
    if isinstance(solver, Composed):
        return _composed_hash(solver)
    try:
        if solver.sources:
            return source_hash(solver.sources, solver.source_package, fused=fused)
    except CompileError as error:
        logger.debug("%s has no hash of its sources: %s", solver.id, error)
        return ""
    return host_hash(type(solver).__module__) if any(key.place is Place.CPU for key in solver.keys) else ""


def _composed_hash(solver: Composed) -> str:
    """Hash of what a composed solver is made of: the other solver's sources for bare problems, and the passes'."""
    if any(key.place is Place.CPU for key in solver.keys):
        own = f"{host_hash(epilogue_pass.MODULE)} {host_hash(channel_sums.MODULE)}"
    else:
        own = source_hash((epilogue_pass.SOURCE, channel_sums.SOURCE), fused=True)
    return hashlib.sha256(f"{solver_hash(solver.inner)} {own}".encode()).hexdigest()
