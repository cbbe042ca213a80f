"""The solvers that finds know: all of miofind and of other packages by default, others where a handle is given them.

Discovery takes every module's `SOLVERS` in `miofind.solvers` and the entry point group `miofind.solvers`. It leaves an
index of miofind's own (`facts.py`), so that later processes import the modules alone whose solvers are asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
import logging
import pickle
import pkgutil
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from miofind.device.device import Library
from miofind.errors import InvalidOptionError, UnknownSolverError, described, raise_if_interrupted, suggestion
from miofind.process.forks import loading
from miofind.process.garbage import without_garbage_collection
from miofind.process.late_names import imported
from miofind.solver.facts import SolverFacts, fingerprint, read_index, write_index
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Reach, Solver

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "miofind.solvers"
MAX_ID_CHARS = 120
"""Of a solver's id: short enough for every place that names one, databases among them."""

COMPOSED_SUFFIX = "+Pointwise"
"""What the id of a solver's composed form ends with: the solver on the bare problem, then a pass for the epilogue."""

_WANTED = "a Solver, its class, a sequence of these, or a module that names them in SOLVERS"


def composed_id(solver_id: str) -> str:
    """The id of a solver's composed form."""
    return f"{solver_id}{COMPOSED_SUFFIX}"


def composed(solver: Solver) -> Solver:
    """A solver's composed form, which serves the fused problems whose bare ones the solver serves."""
    module = importlib.import_module("miofind.solvers.pointwise.composed")
    made: Solver = module.Composed(solver)
    return made


def composed_facts(facts: SolverFacts) -> SolverFacts:
    """Those of a solver's composed form."""
    return replace(facts, id=composed_id(facts.id), names=facts.composed_names)


def inner_id(solver_id: str) -> str:
    """The id of the solver that a form of this id is made of: the id itself, but for composed forms."""
    return solver_id.removesuffix(COMPOSED_SUFFIX)


def is_composed(solver_id: str) -> bool:
    """Whether an id names a composed form."""
    return solver_id.endswith(COMPOSED_SUFFIX)


class Registry(Mapping[str, Solver]):
    """Solvers by id, in a stable order. Immutable, and equal to itself alone, so that answers may be kept by it.

    It gives the composed form of each by that id, too, and lists none of these.

    Pickled, the default one is the default one of the process it arrives in; another takes its solvers along.

    Args:
        solvers: each of an id of its own: instances, their classes, sequences of these, or modules that name them in
            SOLVERS.

    Raises:
        InvalidOptionError: something is no solver, or none that a find can name and keep results of, or two have one
            id.
    """

    _default: ClassVar[Registry | None] = None

    def __init__(self, solvers: Iterable[object] = ()) -> None:
        self._solvers: dict[str, Solver] = {}
        for solver in itertools.chain.from_iterable(map(_given, solvers)):
            if not isinstance(solver, Solver):
                raise InvalidOptionError(f"{solver!r:.100} is no solver of a registry, wanted is {_WANTED}")
            if (answer := _refuse_unfit(solver)).refused:
                raise InvalidOptionError(f"{type(solver).__name__} cannot be in a registry: {answer.reason}")
            if solver.id in self._solvers:
                raise InvalidOptionError(f"a registry holds one solver of an id: {solver.id!r} is given twice")
            self._solvers[solver.id] = solver
        self._indexed: Mapping[str, SolverFacts] = {}

    @staticmethod
    def default() -> Registry:
        """All solvers of miofind and of the other packages that are installed; discovered once a process."""
        if Registry._default is None:
            with loading(), without_garbage_collection():
                if Registry._default is None:
                    Registry._default = _default_registry()
        return Registry._default

    @functools.cached_property
    def facts(self) -> Mapping[str, SolverFacts]:
        """What requests ask of each solver by its id, in the registry's order; imports no solver for it that an index
        has."""
        return {name: self._indexed.get(name) or _facts_of(self._solvers[name]) for name in self}

    def __getitem__(self, solver_id: str) -> Solver:
        solver = self._solvers.get(solver_id)
        if solver is None and solver_id in self._indexed:
            solver = self._import(self._indexed[solver_id])
        if solver is not None:
            return solver
        inner = inner_id(str(solver_id))
        if inner == solver_id or is_composed(inner):
            raise KeyError(solver_id)
        return composed(self[inner])

    def __contains__(self, solver_id: object) -> bool:
        if not isinstance(solver_id, str):
            return False
        names = (solver_id, inner_id(solver_id))
        return any(name in self._indexed or name in self._solvers for name in names)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._indexed, (name for name in list(self._solvers) if name not in self._indexed))

    def __len__(self) -> int:
        return len(self._indexed.keys() | self._solvers.keys())

    def _import(self, facts: SolverFacts) -> Solver:
        """A solver of the index, from its module."""
        for solver in _named(imported(facts.module)):
            self._solvers.setdefault(solver.id, solver)
        return self._solvers[facts.id]

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<Registry of {len(self)} solvers>"

    def named(self, solver_id: str) -> Solver:
        """The solver with that id, case ignored.

        Raises:
            UnknownSolverError: there is none; the message lists those there are.
        """
        if solver_id in self:
            return self[solver_id]
        wanted = solver_id.lower()
        bare = wanted.removesuffix(COMPOSED_SUFFIX.lower())
        for name in self:
            if name.lower() == bare:
                return self[name] if bare == wanted else composed(self[name])
        raise UnknownSolverError(f"solver {solver_id!r} is not registered: known are {', '.join(self)}")

    def with_solvers(self, *solvers: object) -> Registry:
        """These solvers and those of this registry; of two with one id the new one.

        Raises:
            InvalidOptionError: something is no solver, or two of the new ones have one id.
        """
        new = Registry(solvers)
        return Registry((*(solver for name, solver in self.items() if name not in new), *new.values()))

    def check_names(self, names: Iterable[object], option: str = "") -> None:
        """Do nothing where all are ids of solvers, algorithms or libraries, case ignored.

        Args:
            option: what they were given for; the message begins with it.

        Raises:
            UnknownSolverError: one is not; the message says what may have been meant.
        """
        known = [*self, *Algorithm, *Library]
        lowered = {name.lower() for name in known} | {composed_id(name).lower() for name in self}
        wrong = next((name for name in names if str(name).lower() not in lowered), None)
        if wrong is None:
            return
        meant = suggestion(wrong, known) or f": known are {', '.join(known)}"
        raise UnknownSolverError(f"{option}{'=' * bool(option)}{wrong!r} is no solver, algorithm or library{meant}")

    def check_travels(self) -> None:
        """Do nothing where another process can have the same solvers.

        Raises:
            InvalidOptionError: one can be imported here alone.
        """
        default = Registry.default()
        if self is default:
            return  # which imports none of them
        for solver in self.values():
            if default.get(solver.id) is solver:
                continue
            reason = "" if type(solver).__module__ != "__main__" else "its class is of the program's own file"
            try:
                pickle.dumps(solver)
            except Exception as error:  # whatever a solver's own code raises
                reason = described(error)
            if reason:
                raise InvalidOptionError(
                    f"solver {solver.id!r} of the handle's registry cannot go to another process ({reason}): define "
                    "its class at the top of a module that can be imported, or measure in this process (isolate=False)"
                )

    def __reduce__(self) -> tuple[object, ...]:
        if self is Registry._default:
            return Registry.default, ()
        default = Registry.default()
        return _arrived, (tuple(name if default.get(name) is solver else solver for name, solver in self.items()),)


def _arrived(solvers: tuple[str | Solver, ...]) -> Registry:
    """A registry that was pickled: ids of solvers of the default one, and others."""
    default = Registry.default()
    return Registry(default[solver] if isinstance(solver, str) else solver for solver in solvers)


def _default_registry() -> Registry:
    """All solvers: miofind's own by their index where there is one, else by discovery, which leaves one."""
    sources = fingerprint()
    indexed = read_index(sources)
    own = [] if indexed else list(_own())
    registry = Registry(_each_once(itertools.chain(own, _from_entry_points())))
    registry._indexed = indexed
    if not indexed and _is_sound(own):
        write_index(sources, [registry.facts[solver.id] for solver in own])
    return registry


def _is_sound(own: Sequence[Solver]) -> bool:
    """Whether an index may stand for what was discovered: nothing was warned of, and modules name their own classes."""
    if len({solver.id for solver in own}) < len(own):
        return False
    modules = {sys.modules[type(solver).__module__] for solver in own}
    named = [solver for module in modules for solver in _named(module)]
    package = [module for name, module in list(sys.modules.items()) if name.startswith("miofind.solvers.")]
    return set(own) == set(named) and not any(map(_unnamed, package))


def _facts_of(solver: Solver) -> SolverFacts:
    return SolverFacts.of(solver, composed(solver))


def _each_once(solvers: Iterable[Solver]) -> Iterator[Solver]:
    """Solvers but for those whose id another one before them has."""
    found: dict[str, Solver] = {}
    for solver in solvers:
        if solver.id in found:
            first, second = type(found[solver.id]).__module__, type(solver).__module__
            logger.warning("solver %s of %s is left out: %s has one of that id", solver.id, second, first)
            continue
        found[solver.id] = solver
        yield solver


def _own() -> Iterator[Solver]:
    """The solvers of all families: modules name theirs in SOLVERS."""
    package = importlib.import_module("miofind.solvers")
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        _warn_of_what_is_no_solver(module)
        _warn_of_unnamed(module)
        yield from _named(module)


def _named(module: types.ModuleType) -> Iterator[Solver]:
    """The solvers that a module names in SOLVERS, a sequence of them or one alone."""
    return (each for each in _given(module) if isinstance(each, Solver))


def _warn_of_what_is_no_solver(module: types.ModuleType) -> None:
    """Tell of what a module's SOLVERS names besides solvers."""
    for each in _given(module):
        if not isinstance(each, Solver):
            reason = _refuse_unfit(each).reason
            logger.warning("%s names %.80r in SOLVERS, which is left out: %s", _path(module), each, reason)


def _warn_of_unnamed(module: types.ModuleType) -> None:
    """Tell of classes with an id that a module defines, and that its SOLVERS does not name."""
    for name in _unnamed(module):
        missing = "its SOLVERS does not name it" if getattr(module, "SOLVERS", ()) else "no SOLVERS"
        logger.warning("%s defines the solver %s but %s: add SOLVERS = (%s(),)", _path(module), name, missing, name)


def _path(module: types.ModuleType) -> str:
    """The file of one of miofind's modules, as a repository has it."""
    return f"{module.__name__.removeprefix('miofind.').replace('.', '/')}.py"


def _unnamed(module: types.ModuleType) -> list[str]:
    """Classes with an id that a module defines, and that its SOLVERS does not name."""
    named = {type(solver) for solver in _named(module)}
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Solver)
        and value.__module__ == module.__name__
        and "id" in vars(value)
        and value not in named
    ]


def _from_entry_points() -> Iterator[Solver]:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            given = list(_given(entry.load()))
        except BaseException as error:  # another package's code: report it and go on without it
            raise_if_interrupted(error)
            logger.warning("solver entry point %s could not be loaded: %s", entry.name, described(error, str))
            continue
        if not given:
            logger.warning("solver entry point %s is left out: it gives no solver, wanted is %s", entry.name, _WANTED)
        for solver in given:
            if (answer := _refuse_unfit(solver) and _refuse_plain_id(solver)).refused:
                logger.warning("solver entry point %s is left out: %s", entry.name, answer.reason)
            elif isinstance(solver, Solver):
                yield solver


def _given(what: object) -> Iterator[object]:
    """What an entry point gives, one by one: instances of solvers, unless something else was given."""
    if isinstance(what, types.ModuleType):
        what = getattr(what, "SOLVERS", ())
    if isinstance(what, tuple | list | set | frozenset):
        for each in what:
            yield from _given(each)
    else:
        yield what() if isinstance(what, type) and issubclass(what, Solver) else what


def _refuse_unfit(solver: object) -> Applicability:
    """Refuse what is no solver that a find can name and keep results of."""
    if not isinstance(solver, Solver):
        what = f"the class {solver.__name__}" if isinstance(solver, type) else f"of type {type(solver).__name__}"
        return Applicability(f"it is {what}, wanted is {_WANTED}")
    try:
        return _refuse_fields(solver)
    except BaseException as error:  # another package's code: a class attribute may be missing, or a property fail
        raise_if_interrupted(error)
        return Applicability(f"its class attributes cannot be read: {described(error)}")


def _refuse_plain_id(solver: Any) -> Applicability:
    """Refuse a solver of another package whose id might become one of miofind's own."""
    return APPLICABLE if "/" in solver.id else Applicability("its id must be a text like 'vendor/Name'")


def _refuse_fields(solver: Solver) -> Applicability:
    fields: tuple[object, ...] = (solver.id, solver.version, solver.algorithm, solver.least_reach)
    name, version, algorithm, reach = fields
    if not isinstance(name, str) or not name:
        return Applicability("its id must be a text like 'vendor/Name'")
    if not name.isprintable() or ":" in name or len(name) > MAX_ID_CHARS:
        return Applicability(
            f"its id {name!r:.80} must be of at most {MAX_ID_CHARS} printable characters, none of them a colon"
        )
    if is_composed(name):
        return Applicability(f"its id {name!r} must not end with {COMPOSED_SUFFIX}, as those of composed forms do")
    if type(version) is not int or not 0 <= version < 2**31:
        return Applicability(f"the version of {name} must be an int from 0 to 2**31 - 1")
    hash(solver)  # finds keep what they ask of a solver by it
    if not isinstance(algorithm, Algorithm):
        return Applicability(f"the algorithm of {name} must be one of {', '.join(Algorithm)}")
    if not solver.keys or not all(isinstance(key, KernelKey) for key in solver.keys):
        return Applicability(f"the keys of {name} must be KernelKeys, one or more")
    if not isinstance(reach, Reach):
        return Applicability(f"the least_reach of {name} must be a Reach")
    return APPLICABLE
