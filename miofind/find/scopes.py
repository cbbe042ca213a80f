"""The scope of a request: what an earlier find must have considered for its answer to count."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from miofind.device import Device
from miofind.finddb import Scope
from miofind.options import FindOptions
from miofind.solver import solvers

WIDE_BOUNDS = "any error bound"
"""Stands among a scope's solvers where `max_error` let algorithms with wider error bounds take part."""


@functools.lru_cache(maxsize=256)
def requested_scope(options: FindOptions, device: Device, dynamic_only: bool) -> Scope:
    """The scope that a request wants covered."""
    considered = {
        solver.id: solver.version
        for solver in solvers().values()
        if options.allows(solver)
        and (solver.is_dynamic or not dynamic_only)
        and any(key.place is device.place for key in solver.keys)
        and any(device.library_version(key.library) is not None for key in solver.keys)
    }
    return scope_of(options, considered, complete=False, filtered=dynamic_only)


def scope_of(options: FindOptions, considered: Mapping[str, int], *, complete: bool, filtered: bool) -> Scope:
    filters: dict[str, object] = {}
    if filtered or options.only or options.exclude:
        filters["solvers"] = sorted(considered)
    if options.deterministic:
        filters["deterministic"] = True
    if options.strict_nonfinite:
        filters["strict_nonfinite"] = True
    if options.max_error is not None:
        considered = {**considered, WIDE_BOUNDS: 1}
    return Scope(
        solvers=dict(considered),
        filters=filters,
        workspace_limit_bytes=options.workspace_limit_bytes,
        effort="search" if options.searches else "defaults",
        complete=complete,
    )
