"""Checks one row of a FindDB against this release: its problem, solver, configuration, workspace and kernels.

Rows of another solver version or other sources are void, not wrong: they are counted and left alone.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from miofind.core.problem import ProblemDescription
from miofind.device.device import IDENTITY, Device
from miofind.errors import InvalidConfigError, InvalidProblemError, MiofindError, described, raise_if_interrupted
from miofind.find.lookup.scopes import WIDE_BOUNDS, joined
from miofind.find.lookup.validity import has_sources
from miofind.finddb import ProblemKey, Row, Scope
from miofind.runtime.refusals import Measured, applicability_of, forms, refuse_difference
from miofind.solver.registry import Registry
from miofind.solver.solver import Applicability, Solver
from miofind.solver.steps import Config


class RowCheck:
    """A check of rows against a registry's solvers, for `Store.check`.

    Attributes:
        checked: rows compared with the code.
        void: rows that other versions or sources of a solver wrote.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.checked = 0
        self.void = 0

    def __call__(self, key: ProblemKey, row: Row) -> str | None:
        """What is wrong with a row, None if nothing is."""
        problem, device = _problem(key.network_config), device_of(key.device)
        if isinstance(problem, str):
            return problem
        if row.is_rival:
            return None
        solver = self._registry.get(row.solver_id)
        if solver is None:
            return f"solver {row.solver_id!r} is not registered"
        if not _is_current(row, solver):
            self.void += 1
            return None
        self.checked += 1
        return _finding(solver, problem, device, row)


class Shipping:
    """Chooses the rows that a release takes by what a registry's solvers say of them, for `write_release`.

    Args:
        doubted: ids of rows that are not believed.

    Attributes:
        contended: rows left out since something else ran on the device meanwhile.
        doubted: rows left out since the device that measured them was found to be off.
        void: rows left out since other versions or sources of a solver wrote them.
        findings: what was wrong with the other rows left out, one line each.
    """

    def __init__(self, registry: Registry, doubted: Collection[str] = ()) -> None:
        self._registry = registry
        self._doubted = frozenset(doubted)
        self.contended = 0
        self.doubted = 0
        self.void = 0
        self.findings: list[str] = []
        self._check = RowCheck(registry)
        self._wide: defaultdict[ProblemKey, set[str]] = defaultdict(set)
        self._lost_wide: defaultdict[ProblemKey, set[str]] = defaultdict(set)

    def __call__(self, key: ProblemKey, row: Row) -> bool:
        """Whether a row may ship: of a solver, current, sound, and not measured under contention."""
        ships = self._may_ship(key, row)
        if ships and self._is_wide(key, row):
            self._wide[key].add(row.solver_id)
        return ships

    def _may_ship(self, key: ProblemKey, row: Row) -> bool:
        finding = self._check(key, row)
        if finding is not None:
            self.findings.append(f"{key.network_config}: {row.candidate}: {finding}")
            return False
        if row.is_rival:
            return False
        if not _is_current(row, self._registry.get(row.solver_id)):
            self.void += 1
            return False
        if row.contended and row.usable:
            self.contended += 1
            return False
        if row.id in self._doubted:
            self.doubted += 1
            return False
        return True

    def is_lost(self, key: ProblemKey, row: Row) -> bool:
        """Whether a row tells of a solver that still serves the problem, as an earlier release had it.

        Those that only requests with `max_error` take hold no problem back: its scopes say nothing of such requests.
        """
        problem, device = _problem(key.network_config), device_of(key.device)
        solver = self._registry.get(row.solver_id)
        if solver is None or device is None or isinstance(problem, str) or _is_current(row, solver):
            return False
        if not _may_serve(solver, problem, device):
            return False
        if self._is_wide(key, row):
            self._lost_wide[key].add(row.solver_id)
            return False
        return True

    def _is_wide(self, key: ProblemKey, row: Row) -> bool:
        kind = self.kind_of(key, row)
        return kind is not None and kind[0]

    def with_refusals(self, key: ProblemKey, scopes: Sequence[Scope]) -> list[Scope]:
        """Scopes joined where they may be, with the solvers, too, that came later and refuse the problem."""
        problem, device = _problem(key.network_config), device_of(key.device)
        if self._lost_wide[key] - self._wide[key]:
            scopes = [_of_default_bounds(scope) for scope in scopes]
        whole = joined(scopes)
        if isinstance(problem, str) or device is None:
            return whole
        refusing = {
            solver.id: solver.version
            for solver in self._registry.values()
            if any(key.place is device.place and device.library_version(key.library) is not None for key in solver.keys)
            and not _may_serve(solver, problem, device)  # without its library it refuses everything, here alone
        }
        return [
            scope
            if scope.filters or scope.solvers.keys() >= refusing.keys()
            else replace(scope, solvers={**refusing, **scope.solvers}, id="")
            for scope in whole
        ]

    def kind_of(self, key: ProblemKey, row: Row) -> tuple[bool, bool] | None:
        """Whether a row's errors may exceed the default bound and whether it spreads infinities; None if unknown.

        Requests without `max_error` and with `strict_nonfinite` leave such rows out.
        """
        problem, solver = _problem(key.network_config), self._registry.get(row.solver_id)
        if isinstance(problem, str) or solver is None:
            return None
        try:
            config = Config.from_json(row.config)
            return not solver.keeps_bound(problem, config), bool(solver.spreads_nonfinite(problem, config))
        except BaseException as error:  # a solver's own code may raise anything: its rows are all alike then
            raise_if_interrupted(error)
            return None


def _of_default_bounds(scope: Scope) -> Scope:
    """What a scope says of requests without `max_error`."""
    solvers = {name: version for name, version in scope.solvers.items() if name != WIDE_BOUNDS}
    return scope if solvers == scope.solvers else replace(scope, solvers=solvers, id="")


def _is_current(row: Row, solver: Solver | None) -> bool:
    """Whether a row was measured with a solver as it is now."""
    return solver is not None and row.solver_version == solver.version and has_sources(solver, row.source_hash)


def _may_serve(solver: Solver, problem: ProblemDescription, device: Device) -> bool:
    """Whether a solver would have to be measured to be ranked: it does not refuse the problem in every form."""
    answers = (applicability_of(form, problem, device) for form in forms(solver, problem))
    return any(answer is None or bool(answer) for answer in answers)


@functools.lru_cache(maxsize=256)  # the rows of a problem follow each other, several of a solver
def _applicability(solver: Solver, problem: ProblemDescription, device: Device) -> Applicability:
    return solver.applicability(problem, device)


def _finding(solver: Solver, problem: ProblemDescription, device: Device | None, row: Row) -> str | None:
    if (row.algorithm, row.library) != (solver.algorithm.value, solver.library.value):
        return f"it says {row.algorithm}, {row.library}; {solver.id} is {solver.algorithm}, {solver.library}"
    if device is None or not row.usable or device.library_version(solver.library) is None:
        return None
    measured = Measured(row.config, row.workspace_bytes, row.deterministic, row.kernel_hash)
    try:
        applicability = _applicability(solver, problem, device)
        if not applicability:
            return f"{solver.id} does not serve the problem: {applicability.reason}"
        return refuse_difference(solver, problem, device, measured).reason or None
    except InvalidConfigError as error:
        return str(error)
    except MiofindError:  # a library's plans cannot be asked for here
        return None
    except BaseException as error:  # a solver's own code may raise anything, and the other rows are to be checked
        raise_if_interrupted(error)
        return f"{solver.id} fails over it: {described(error)}"


@functools.lru_cache(maxsize=1024)
def _problem(network_config: str) -> ProblemDescription | str:
    try:
        return ProblemDescription.from_network_config(network_config)
    except InvalidProblemError as error:
        return str(error)


@functools.cache
def device_of(identity: str) -> Device | None:
    """A device with that identity: the one here, else what its name and compute capability tell; None if unreadable."""
    for device in (Device.cpu(), Device.default()):
        if device.identity == identity:
            return device
    told = IDENTITY.fullmatch(identity)
    if told is None:
        return None
    sm, sm_count = int(told["major"] + told["minor"]), int(told["sm_count"])
    if sm == 0:
        return replace(Device.cpu(), name=told["name"], sm_count=sm_count)
    try:
        return replace(Device.virtual(str(sm)), name=told["name"], sm_count=sm_count, mig_profile=told["mig_profile"])
    except MiofindError:
        return None
