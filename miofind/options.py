"""What a caller may ask of a find: limits, filters, mode and effort. Values only; they never enter a network_config."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import TypeVar

from miofind.errors import InvalidOptionError, brief, with_known_keywords
from miofind.solver.facts import SolverFacts
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver


class Order(StrEnum):
    """Order of the solutions returned."""

    TIME = "time"
    WORKSPACE = "workspace"


class FindMode(StrEnum):
    """How a request is answered.

    NORMAL always measures. FAST never does: it ranks the FindDB's solutions and predictions of what the FindDB lacks
    by time. HYBRID takes the FindDB, else measures: all that it answers was verified.
    DYNAMIC_HYBRID takes the FindDB, too, whosever solutions it has, else measures shape-generic solvers only.
    TRUST_VERIFY times the FindDB's answer once more, and measures anew where it no longer holds.

    Source: MIOpen, docs/how-to/find-and-immediate.rst, find modes.
    """

    NORMAL = "normal"
    FAST = "fast"
    HYBRID = "hybrid"
    DYNAMIC_HYBRID = "dynamic_hybrid"
    TRUST_VERIFY = "trust_verify"


class FindEnforce(StrEnum):
    """What is forced on the FindDB, whatever the mode.

    DB_UPDATE measures and records even on a hit. SEARCH searches configurations on a miss, SEARCH_DB_UPDATE always.
    DB_CLEAN removes the user's rows of the problem first.
    """

    NONE = "none"
    DB_UPDATE = "db_update"
    SEARCH = "search"
    SEARCH_DB_UPDATE = "search_db_update"
    DB_CLEAN = "db_clean"


class OnMiss(StrEnum):
    """What happens where the FindDB has no answer.

    ESTIMATE answers as the mode FAST does, where the FindDB's answer lacks solvers, too; with TRUST_VERIFY only where
    there is none.
    """

    FIND = "find"
    ESTIMATE = "estimate"
    ERROR = "error"


_E = TypeVar("_E", bound=StrEnum)

DEFAULT_TIME_BUDGET_S = 10.0
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FindOptions:
    """Limits, filters and effort of one find.

    Attributes:
        order: "time" (fastest first) or "workspace" (smallest first).
        workspace_limit_bytes: largest workspace allowed; None for no limit.
        max_error: largest |error| / (|x| * |w|) allowed, as verification measures it on normal inputs; None leaves out
            algorithms whose error bound is wider than direct summation's in the problem's math mode, and those whose
            errors may follow inputs that a result does not meet (FFT, and Winograd but for its tiles of 2): with them
            one pixel of 1e6 among ones costs its neighbours in float32 six digits.
        deterministic: only solutions that give equal bits on every run.
        strict_nonfinite: only solutions in which an infinity or NaN reaches those results alone that sum it.
        find_mode, find_enforce, on_miss: see the enums; None for find_mode takes MIOFIND_FIND_MODE, else HYBRID.
        tuning: search the solvers' configurations instead of measuring their defaults.
        likely: measure the few candidates alone that are predicted to be the fastest, without cuDNN's where the model
            of the device knows such problems, but for TF32 and channels first. On held-out ones of an H200 the best of
            them was 0.5 % off the best of all.
        time_budget_s: seconds of measuring after which what is found is taken; None for ten, or no limit with tuning.
        trials: configurations of a problem that a search measures at most, those of the same solvers that earlier ones
            measured included; None for no limit.
        patience: rounds without a gain of 1 % after which a search ends; None for the search's own.
        seed: chooses among equally promising configurations; equal seeds and times give equal searches.
        retry_failed: measure again what failed here before, too.
        only, exclude: solver ids, algorithms or libraries, case ignored. The id of a solver names its composed form,
            too; "<id>+Pointwise" names that alone. A find looks ids with a slash, those of other packages, up in its
            handle's registry.
        isolate: measure in a child process, so that a crashing kernel costs nothing here.

    Raises:
        InvalidOptionError: the message names the option and the value.
        UnknownSolverError: a name in `only` or `exclude` is no solver, algorithm or library.
    """

    order: Order = Order.TIME
    workspace_limit_bytes: int | None = None
    max_error: float | None = None
    deterministic: bool = False
    strict_nonfinite: bool = False
    find_mode: FindMode | None = None
    find_enforce: FindEnforce = FindEnforce.NONE
    tuning: bool = False
    likely: bool = False
    time_budget_s: float | None = None
    trials: int | None = None
    patience: int | None = None
    seed: int = 0
    retry_failed: bool = False
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    on_miss: OnMiss = OnMiss.FIND
    isolate: bool = False
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        for name, kind in (("order", Order), ("find_enforce", FindEnforce), ("on_miss", OnMiss)):
            object.__setattr__(self, name, member(kind, getattr(self, name), name))
        if self.find_mode is not None:
            object.__setattr__(self, "find_mode", member(FindMode, self.find_mode, "find_mode"))
        _check_number("workspace_limit_bytes", self.workspace_limit_bytes)
        object.__setattr__(self, "workspace_limit_bytes", _whole_bytes(self.workspace_limit_bytes))
        _check_number("max_error", self.max_error)
        _check_number("time_budget_s", self.time_budget_s)
        for name, least in (("trials", 1), ("patience", 1), ("seed", 0)):
            object.__setattr__(self, name, _count(name, getattr(self, name), least, may_be_none=name != "seed"))
        for name in ("only", "exclude"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for name in ("deterministic", "strict_nonfinite", "tuning", "likely", "retry_failed", "isolate"):
            _check_flag(name, getattr(self, name))
        if self.likely and self.searches:
            raise InvalidOptionError("likely measures few candidates and a search many: ask for one of the two")
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in _COMPARED)))

    def __hash__(self) -> int:
        return self._hash

    def allows(self, solver: Solver | SolverFacts) -> bool:
        """Whether `only` and `exclude` let a solver through."""
        names = solver.names
        return (not self.only or not names.isdisjoint(self.only)) and names.isdisjoint(self.exclude)

    def check_names(self, registry: Registry) -> None:
        """Do nothing where a registry has all that `only` and `exclude` name.

        Raises:
            UnknownSolverError: one name is no solver of it, and no algorithm or library.
        """
        for name in ("only", "exclude"):
            if given := getattr(self, name):
                registry.check_names(given, name)

    @property
    def searches(self) -> bool:
        """Whether configurations are searched, not only the defaults measured."""
        return self.tuning or self.find_enforce in (FindEnforce.SEARCH, FindEnforce.SEARCH_DB_UPDATE)

    @property
    def budget_s(self) -> float:
        """Seconds of measuring allowed."""
        if self.time_budget_s is not None:
            return self.time_budget_s
        return math.inf if self.searches else DEFAULT_TIME_BUDGET_S


FindOptions.__init__ = with_known_keywords(FindOptions.__init__)  # type: ignore[method-assign]
_COMPARED = tuple(name for name in FindOptions.__slots__ if name != "_hash")


def member(kind: type[_E], value: object, name: str) -> _E:
    """The member of an enum by value, case ignored.

    Raises:
        InvalidOptionError: no such member.
    """
    try:
        return kind(str(value).lower())
    except ValueError:
        known = ", ".join(m.value for m in kind)
        raise InvalidOptionError(f"{name}={brief(value)} is unknown: use one of {known}") from None


def _check_number(name: str, value: object) -> None:
    if value is None:
        return
    with contextlib.suppress(OverflowError):  # a whole number beyond all floats
        if not isinstance(value, bool) and isinstance(value, Real) and float(value) >= 0:
            return
    raise InvalidOptionError(f"{name}={brief(value)} must be a number of at least 0")


def _count(name: str, value: object, least: int, *, may_be_none: bool) -> int | None:
    """A whole number in its plain form: NumPy's are taken, True is none."""
    if value is None and may_be_none:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= MAX_COUNT:
        rest = " or None" if may_be_none else ""
        raise InvalidOptionError(f"{name}={brief(value)} must be a whole number from {least} to {MAX_COUNT}{rest}")
    return int(value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name}={brief(value)} must be True or False")


def _whole_bytes(value: float | None) -> int | None:
    """A limit that a FindDB can store: 1e9 is 10**9."""
    if value is not None and (value >= 2**63 or value != int(value)):
        raise InvalidOptionError(f"workspace_limit_bytes={brief(value)} must be a whole number of bytes below 2**63")
    return None if value is None else int(value)


def _names(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        raise InvalidOptionError(f"{name}={brief(value)} must be a name or a sequence of names")
    given = (value,) if isinstance(value, str) else tuple(value)
    if not given:
        return ()
    Registry.default().check_names((item for item in given if "/" not in str(item)), name)
    return tuple(sorted({item.lower() for item in given}))
