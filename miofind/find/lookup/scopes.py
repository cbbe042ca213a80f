"""The scope of a request: what earlier finds must have considered for their answer to count."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from miofind.device.device import Device
from miofind.find.lookup.validity import solver_hash
from miofind.finddb import Scope, failed_code
from miofind.options import FindOptions
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

WIDE_BOUNDS = "any error bound"
"""Stands among a scope's solvers where `max_error` let algorithms with wider error bounds take part."""


@functools.lru_cache(maxsize=256)
def requested_scope(options: FindOptions, device: Device, registry: Registry, dynamic_only: bool) -> Scope:
    """The scope that a request wants covered: of a registry's solvers those that it would ask."""
    considered = {
        solver.id: solver.version
        for solver in registry.values()
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


def considered(request: Scope, scopes: Iterable[Scope], registry: Registry) -> frozenset[str]:
    """Ids of a request's solvers that earlier finds considered as it would, each find some of them.

    One that failed altogether counts while its sources are those that it failed with.
    """
    wanted = request.solvers
    return frozenset(
        name
        for scope in _alike(request, scopes)
        for name, version in scope.solvers.items()
        if name in wanted and (version == wanted[name] or version == _failed_code(registry.get(name)))
    )


def overwritten(request: Scope, scopes: Iterable[Scope]) -> frozenset[str]:
    """Ids of a request's solvers of which earlier finds tell as they were in another release, or by their failure."""
    wanted = request.solvers
    return frozenset(
        name
        for scope in _alike(request, scopes)
        for name, version in scope.solvers.items()
        if name in wanted and version != wanted[name]
    )


def _failed_code(solver: Solver | None) -> int | None:
    return None if solver is None else failed_code(solver.version, solver_hash(solver))


def asked(names: Iterable[str], request: Scope, scopes: Iterable[Scope]) -> bool:
    """Whether the finds asked these solvers, as a request would, or one of them all that there were.

    They count as not considered nevertheless where they came or changed since.
    """
    named: set[str] = set()
    for scope in _alike(request, scopes):
        if scope.asked is None:
            return True
        named |= scope.asked
    return named.issuperset(names)


def _alike(request: Scope, scopes: Iterable[Scope]) -> Iterator[Scope]:
    """Finds that left out no more of a solver's candidates than a request does."""
    bounds = {WIDE_BOUNDS: 1} if WIDE_BOUNDS in request.solvers else {}
    least = replace(request, solvers=bounds, filters=request.candidate_filters)
    for scope in scopes:
        if replace(scope, filters=scope.candidate_filters).covers(least):
            yield scope


def joined(scopes: Sequence[Scope]) -> list[Scope]:
    """Scopes with fewer words: finds of some solvers each become part of one of all solvers that differs in no more."""
    groups: dict[tuple[object, ...], list[Scope]] = {}
    for scope in sorted(scopes, key=lambda scope: (scope.created_at, scope.id)):
        kind = (
            repr(sorted(scope.candidate_filters.items())),
            scope.workspace_limit_bytes,
            scope.effort,
            scope.complete,
        )
        groups.setdefault((*kind, WIDE_BOUNDS in scope.solvers), []).append(scope)
    made = []
    for group in groups.values():
        whole = [scope for scope in group if scope.asked is None]
        if not whole or len(group) == 1:
            made += group
            continue
        every = {name: version for scope in group for name, version in scope.solvers.items()}
        made.append(replace(whole[-1], solvers=every, created_at=group[-1].created_at, id=""))
    return made
