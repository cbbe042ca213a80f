"""The scope of a request: which solvers earlier finds must have measured for their stored answer to count."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.find.lookup.validity import solver_hash
from miofind.finddb import ANY_EFFORT, LIKELY, Scope, failed_code
from miofind.options import FindOptions
from miofind.solver.facts import SolverFacts
from miofind.solver.registry import Registry, composed_facts
from miofind.solver.solver import Solver


class Coverage(Enum):
    """What earlier finds must have measured for their stored answer to count.

    ALL: every solver that the request would ask, in finds that no budget ended. PARTIAL: the same but for solvers that
    were added or changed since, and for what a budget left out. DYNAMIC: as PARTIAL, of shape-generic solvers alone;
    what other solvers have is given, too.
    """

    ALL = auto()
    PARTIAL = auto()
    DYNAMIC = auto()

    @staticmethod
    def of_find(*, dynamic_only: bool) -> Coverage:
        """What a find's answers must cover."""
        return Coverage.DYNAMIC if dynamic_only else Coverage.PARTIAL


WIDE_BOUNDS = "any error bound"
"""A pseudo solver id in a scope: `max_error` was set, and so algorithms with wider error bounds took part."""


def requested_scope(
    problem: ProblemDescription, options: FindOptions, device: Device, registry: Registry, *, dynamic_only: bool = False
) -> Scope:
    """The scope that must be covered for a request: the registry's solvers that the request would measure."""
    return _scopes(_Kind.of(problem), options, device, registry, dynamic_only).requested


def accepted_scope(
    problem: ProblemDescription, options: FindOptions, device: Device, registry: Registry, *, dynamic_only: bool = False
) -> Scope:
    """The scope whose coverage makes an answer usable: where defaults are asked for, the likeliest of them will do."""
    return _scopes(_Kind.of(problem), options, device, registry, dynamic_only).accepted


class _Kind(NamedTuple):
    """What of a problem decides which solvers count."""

    is_fused: bool
    is_large: bool

    @staticmethod
    def of(problem: ProblemDescription) -> _Kind:
        return _Kind(bool(problem.epilogue), problem.is_large)


class _Scopes(NamedTuple):
    """What must be covered for a request, and what is enough for its answer to be usable."""

    requested: Scope
    accepted: Scope


@functools.lru_cache(maxsize=256)
def _scopes(kind: _Kind, options: FindOptions, device: Device, registry: Registry, dynamic_only: bool) -> _Scopes:
    considered = {
        facts.id: facts.version
        for facts in counted_solvers(options, registry, fused=kind.is_fused)
        if (facts.is_dynamic or not dynamic_only)
        and (kind.is_large or not facts.is_for_large)
        and any(key.place is device.place for key in facts.keys)
        and any(device.library_version(key.library) is not None for key in facts.keys)
    }
    requested = scope_of(options, considered, complete=False, filtered=dynamic_only)
    accepted = replace(requested, effort=ANY_EFFORT) if requested.effort == "defaults" else requested
    return _Scopes(requested, accepted)


def counted_solvers(options: FindOptions, registry: Registry, *, fused: bool) -> Iterator[SolverFacts]:
    """The solvers that a request's options allow, as scopes count them; none is imported for it.

    For a fused problem a solver stands for its composed form, too, and is not counted where that is excluded; where the
    options allow the composed form alone, that stands for itself.
    """
    for facts in registry.facts.values():
        if not fused:
            if options.allows(facts):
                yield facts
        elif options.allows(whole := composed_facts(facts)):
            yield facts if options.allows(facts) else whole


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
        if options.likely:
            filters["wide_bounds"] = True  # the likeliest with them are others
    return Scope(
        solvers=dict(considered),
        filters=filters,
        workspace_limit_bytes=options.workspace_limit_bytes,
        effort=_effort(options),
        complete=complete,
    )


def _effort(options: FindOptions) -> str:
    if options.searches:
        return "search"
    return LIKELY if options.likely else "defaults"


def considered(request: Scope, scopes: Iterable[Scope], registry: Registry) -> frozenset[str]:
    """Ids of the request's solvers that earlier finds, taken together, have considered in their present version.

    A solver of which every candidate failed is stored with a hash of its sources instead of its version. It counts as
    considered as long as its sources are the same.
    """
    wanted = request.solvers
    return frozenset(
        name
        for scope in _alike(request, scopes)
        for name, version in scope.solvers.items()
        if name in wanted and (version == wanted[name] or version in _failed_codes(registry.get(name)))
    )


def overwritten(request: Scope, scopes: Iterable[Scope]) -> frozenset[str]:
    """Ids of the request's solvers that earlier finds considered in another version, or stored as failed."""
    wanted = request.solvers
    return frozenset(
        name
        for scope in _alike(request, scopes)
        for name, version in scope.solvers.items()
        if name in wanted and version != wanted[name]
    )


def _failed_codes(solver: Solver | None) -> tuple[int, ...]:
    """What stands for a solver's version where all of it failed, for bare problems and for fused ones."""
    if solver is None:
        return ()
    return tuple(failed_code(solver.version, solver_hash(solver, fused=fused)) for fused in (False, True))


def asked(names: Iterable[str], request: Scope, scopes: Iterable[Scope]) -> bool:
    """Whether earlier finds, under limits no narrower than the request's, included all the named solvers.

    A find without `only` or `exclude` included every solver of its time. The named solvers are missing from the stored
    answer because they were added or changed since, not because a filter left them out: the answer is incomplete, but
    it may be used until they are measured.
    """
    named: set[str] = set()
    for scope in _alike(request, scopes):
        if scope.asked is None:
            return True
        named |= scope.asked
    return named.issuperset(names)


def _alike(request: Scope, scopes: Iterable[Scope]) -> Iterator[Scope]:
    """Scopes of finds whose limits and filters on candidates were no narrower than the request's."""
    bounds = {WIDE_BOUNDS: 1} if WIDE_BOUNDS in request.solvers else {}
    least = replace(request, solvers=bounds, filters=request.candidate_filters)
    for scope in scopes:
        if scope.effort == LIKELY and "solvers" in request.filters and scope.filters != request.filters:
            continue  # the likeliest of all are not those of some
        if replace(scope, filters=scope.candidate_filters).covers(least):
            yield scope


def joined(scopes: Sequence[Scope]) -> list[Scope]:
    """Fewer scopes that say the same: those of finds of some solvers are merged into one of a find of all solvers.

    Only scopes with equal limits, filters on candidates, effort and completeness are merged.
    """
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
