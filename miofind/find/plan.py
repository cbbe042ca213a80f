"""Which candidates a request measures: configurations of solvers that apply, within its limits, in order."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real

from miofind.core.cached import cached_property
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library
from miofind.driver.line import driver_line
from miofind.errors import (
    InvalidConfigError,
    MiofindError,
    MissingEnvironmentError,
    NoPlaceError,
    NoSolutionError,
    described,
    raise_if_interrupted,
)
from miofind.find.combinations import AnswersOfCombination, is_possible
from miofind.find.composition import (
    Choices,
    bare_solutions,
    default_bare_request,
    fastest_bare,
    first_of_each,
    is_light,
    out_of_reach,
)
from miofind.find.lookup.known import earlier_configs, stored_configs
from miofind.find.lookup.scopes import counted_solvers
from miofind.find.search import EXHAUSTIVE, Space
from miofind.finddb import MAX_INT, MAX_JSON_CHARS
from miofind.options import FindOptions, Order
from miofind.runtime.handle import Handle
from miofind.runtime.refusals import applicability_of, forms
from miofind.runtime.solution import Solution
from miofind.solver.candidate import Candidate, Outcome
from miofind.solver.facts import SolverFacts
from miofind.solver.registry import Registry, composed, composed_id, is_composed
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, EstimatedConfig, Reach, Solver
from miofind.solver.steps import Config, ConvSolution, KernelStep

logger = logging.getLogger(__name__)

SEARCH_LIMIT = 64
"""Configurations of one solver that a search is expected to measure: the defaults and the best estimates."""
MAX_ESTIMATED = 50_000
"""Configurations of one solver whose time is estimated at most; of a larger product a fixed random part is."""
_LISTED = 256
_BARE_WINNERS = 2
_DEFAULTS_BESIDE = 2
"""Default configurations of a solver that are tried beside those that were its fastest without the epilogue, where
that is light and they take it: a residual or a costly activation is hidden by configurations of another kind."""
_BEFORE_CUDNN = 4
"""Candidates that are measured before cuDNN's plans, of which some take seconds to build: of a small fused problem two
took a budget of 3 s, and the answer was four times as slow as what was not measured."""
_FAR = 2.0
"""How many times the best estimate all of a solver's must be for it to be passed over: what devices' models correct
differs by less between solvers."""

_ASKED_LATE = frozenset({Algorithm.DIRECT.value, Algorithm.IM2COL_GEMM.value})
_FAR_BEHIND = "is estimated to be far behind the fastest"
_LONGEST_NAME = 300
_SPOILS = Applicability("lets a large value spoil results that do not meet it; set max_error (--max-error) to allow it")
_NOTHING_TO_ASK = "  no solver is registered, or the FindDB holds nothing to measure again"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One candidate and its estimate; its steps are asked for once, by who wants to know of them."""

    problem: ProblemDescription
    device: Device
    solver: Solver
    config: Config
    estimate_ms: float

    @cached_property
    def candidate(self) -> Candidate:
        """What names it outside this process."""
        return Candidate(network_config=self.problem.network_config, solver_id=self.solver.id, config=self.config)

    @cached_property
    def solution(self) -> ConvSolution:
        """Its steps."""
        return self.solver.solution(self.problem, self.device, self.config)

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that it needs; many solvers tell without making their steps."""
        return self.solver.workspace_bytes(self.problem, self.device, self.config)

    @property
    def deterministic(self) -> bool:
        """Whether equal inputs give equal bits."""
        return self.solution.deterministic

    def kernels(self, device: Device) -> tuple[KernelStep, ...]:
        """What it launches of our own kernels."""
        return self.solver.solution(self.problem, device, self.config).kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a request measures, and why not more.

    Attributes:
        candidates: in the order that they are measured in: by estimate, but a few of the others before cuDNN's; for a
            search what it is likely to begin with.
        last_resort: measured only where no candidate is usable.
        spaces: what a search may measure, one a solver; () for a request that searches nothing.
        is_part: whether candidates were left out that only seem less likely to be the fastest.
        is_cut: whether a limit of workspace left candidates out, or what others would have been made of.
        considered: version by id of every solver that was asked.
        is_filtered: whether the find mode, not only `only` and `exclude`, kept solvers out.
        left_out: solvers that any of these kept out.
        absent: the others whose place or library this machine lacks.
        failing: those whose own code raised over the problem, for no lack of this machine.
        refusals: reason by solver id, or by candidate id where a limit left one out; nothing of what was left out.
    """

    candidates: tuple[Planned, ...]
    last_resort: tuple[Planned, ...]
    considered: dict[str, int]
    is_filtered: bool
    refusals: dict[str, str]
    left_out: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    spaces: tuple[Space, ...] = ()
    is_part: bool = False
    is_cut: bool = False

    def without(self, reasons: Mapping[str, str]) -> Plan:
        """The same less candidates, given by id with the reason; does not keep a search from proposing them."""
        planned = (*self.candidates, *self.last_resort)
        left_out = {p.candidate.id: reasons[p.candidate.id] for p in planned if p.candidate.id in reasons}
        return replace(
            self,
            candidates=tuple(p for p in self.candidates if p.candidate.id not in left_out),
            last_resort=tuple(p for p in self.last_resort if p.candidate.id not in left_out),
            refusals=self.refusals | left_out,
        )

    def log(self) -> None:
        """Tell what is measured, in order, and why the rest is not."""
        if self.left_out:
            logger.debug("left out by only, exclude or the find mode: %s", ", ".join(self.left_out))
        if self.absent:
            logger.debug("without their place or library here: %s", ", ".join(sorted(self.absent)))
        for name in sorted(self.refusals.keys() - self.absent):
            logger.debug("not measured: %s: %s", name, self.refusals[name])
        for planned in (*self.candidates, *self.last_resort):
            resort = ", if nothing else is usable" if planned in self.last_resort else ""
            logger.debug("planned: %s, estimated at %.4g ms%s", planned.candidate.id, planned.estimate_ms, resort)


def make_plan(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    dynamic_only: bool = False,
    winners: Mapping[str, Sequence[Config]] | None = None,
    asks: Callable[[SolverFacts], bool] = lambda facts: True,
    trusts_own: bool = False,
    in_haste: bool = False,
    best_ms: float = math.inf,
    is_known: bool = True,
) -> Plan:
    """The candidates of a request: configurations of the handle's solvers.

    Args:
        dynamic_only: leave out solvers that compile for each shape.
        winners: by solver, configurations that won at near problems: a search begins with those that are valid here.
        asks: which of the solvers that the options allow are asked; the others count as left out.
        trusts_own: take it for granted that a FindDB can keep our own solvers' candidates: their steps are asked for
            only where a limit is on those.
        in_haste: have no candidates of solvers whose estimates are all known to be far behind the best one, and no
            composed forms of solvers that fuse; do not ask those whether they serve the problem that the options leave
            no configuration of if they do, and do not count which forms of solvers serve a fused problem.
        best_ms: the best estimate of candidates beside the plan's.
        is_known: whether a FindDB may have an answer to the problem: else none is asked for configurations of it.

    Configurations that the FindDB's answer has of a solver's earlier code are candidates beside its defaults. Of a
    fused problem the configurations that are fastest without the epilogue are candidates, too, and the composed forms
    of the solvers that are; where the FindDB answers the bare problem, a find leaves solvers out that are far behind
    there, and default configurations behind the first.

    Raises:
        UnknownSolverError: the options name a solver that the handle's registry has not.
    """
    options.check_names(handle.registry)
    device = handle.device
    draft = _Draft(best_ms=best_ms)

    def taken(facts: SolverFacts) -> bool:
        return (facts.is_dynamic or not dynamic_only) and asks(facts)

    earlier = _earlier(problem, handle, is_known=is_known)
    bare = _bare(problem, options, handle, taken) if problem.epilogue else ()
    slow = out_of_reach(bare, options)
    few = {solution.solver_id for solution in bare if is_light(problem.epilogue) and not options.searches}
    in_haste = in_haste and options.order is Order.TIME and not options.searches
    of_combination = AnswersOfCombination.of(handle.registry, problem, device)
    for facts in _asked_in_turn(handle.registry, in_haste):
        if not taken(facts) or not options.allows(facts):
            draft.left_out.append(facts.id)
            continue
        is_possible, answer = of_combination[facts.id]
        if answer.refused and (in_haste or not problem.epilogue):  # of a fused problem another reason may come first
            draft.refuse(facts, answer.reason, is_possible=is_possible)
            continue
        if in_haste and _spoils(facts, options):
            draft.refuse(facts, _SPOILS.reason, is_possible=is_possible)
            continue
        solver = handle.registry[facts.id]
        most = _DEFAULTS_BESIDE if solver.id in few else None
        request = _Request(problem, device, solver, options, earlier.get(solver.id, ()), most, trusts_own)
        if solver.id in slow:
            draft.pass_over(request, slow[solver.id])
        else:
            draft.ask(request, (winners or {}).get(solver.id, ()), in_haste=in_haste)
    if problem.epilogue:
        fusing = draft.fitting if in_haste and not options.only else ()
        if bare:
            choices = fastest_bare(bare, options)
        else:
            estimated = _estimated_bare(problem, options, handle, taken, fusing, is_known=bool(earlier))
            choices = draft.choices_of(estimated, options)
        for solver_id, configs in choices.items():
            solver = composed(handle.registry[solver_id])
            request = _Request(problem, device, solver, options, configs, trusts_own=trusts_own)
            draft.ask_composed(request)
        counted = () if in_haste else counted_solvers(options, handle.registry, fused=True)
        asked = (handle.registry[each.id] for each in counted if taken(each))
        draft.count_forms(_Request(problem, device, each, options) for each in asked)
    return draft.plan(is_filtered=dynamic_only)


@functools.lru_cache(maxsize=16)
def _asked_in_turn(registry: Registry, likeliest_first: bool) -> tuple[SolverFacts, ...]:
    """The facts of all solvers; if asked for, those last that may be known to be far behind the others."""
    every = registry.facts.values()
    return tuple(sorted(every, key=lambda facts: not _ASKED_LATE.isdisjoint(facts.names)) if likeliest_first else every)


def nothing_found(problem: ProblemDescription, plan: Plan, outcomes: Sequence[Outcome] = ()) -> NoSolutionError:
    """The error that says why nothing of a plan is usable, by what became of its candidates."""
    reasons = [f"{name}: {reason}" for name, reason in plan.refusals.items()]
    reasons += [f"{o.candidate.id}: {o.status} {o.message}" for o in outcomes if not o.status.usable]
    if plan.left_out:
        which = f"{len(plan.left_out)} others" if reasons else f"all {len(plan.left_out)} solvers"
        reasons.append(f"{which}: left out by only, exclude or the find mode")
    listed = "\n".join(f"  {reason}" for reason in reasons) or _NOTHING_TO_ASK
    is_elsewhere = not outcomes and bool(plan.refusals) and plan.refusals.keys() <= plan.absent
    kind = NoPlaceError if is_elsewhere else NoSolutionError
    return kind(f"no solution of {problem} is usable ({driver_line(problem)}):\n{listed}")


def _earlier(problem: ProblemDescription, handle: Handle, *, is_known: bool) -> dict[str, tuple[Config, ...]]:
    """By solver, configurations that FindDBs have for the problem, measured with earlier code, or without epilogue."""
    earlier = earlier_configs(problem, handle) if is_known else {}
    if problem.epilogue:
        for solver_id, configs in stored_configs(problem.bare, handle).items():
            earlier[solver_id] = tuple(dict.fromkeys((*configs[:_BARE_WINNERS], *earlier.get(solver_id, ()))))
    return earlier


def _bare(
    problem: ProblemDescription, options: FindOptions, handle: Handle, asks: Callable[[SolverFacts], bool]
) -> tuple[Solution, ...]:
    """The FindDB's answer to the bare problem, for the solvers that are asked."""
    found = bare_solutions(problem, options, handle)
    return tuple(each for each in found if asks(handle.registry.facts[each.solver_id]))


def _estimated_bare(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    asks: Callable[[SolverFacts], bool],
    fusing: Sequence[Planned],
    *,
    is_known: bool,
) -> Plan:
    """The bare problem's plan, of a fused problem whose bare one no FindDB answers for the request.

    Args:
        fusing: candidates whose solvers are not composed.
        is_known: whether a FindDB may have configurations of the bare problem.
    """
    fuse = {each.solver.id for each in fusing}
    return make_plan(
        problem.bare,
        default_bare_request(options),
        handle,
        asks=lambda facts: facts.id not in fuse and asks(facts),
        trusts_own=True,
        in_haste=True,
        best_ms=min((each.estimate_ms for each in fusing), default=math.inf),
        is_known=is_known,
    )


def stored_plan(problem: ProblemDescription, options: FindOptions, handle: Handle) -> Plan:
    """What the FindDBs' answers hold of a problem, whatever code measured it, as candidates of a request.

    Of a composed form the configuration that its solver is fastest with by now, without the epilogue, is a candidate,
    too: the bare problem may have been searched since. The plan's solvers count as asked for these configurations
    alone: `considered` is empty.

    Raises:
        UnknownSolverError: the options name a solver that the handle's registry has not.
    """
    options.check_names(handle.registry)
    draft = _Draft()
    for solver_id, configs in _stored(problem, handle).items():
        solver = handle.registry[solver_id]
        if options.allows(solver):
            draft.ask_again(_Request(problem, handle.device, solver, options, configs))
        else:
            draft.left_out.append(solver_id)
    return replace(draft.plan(is_filtered=False), considered={})


def _stored(problem: ProblemDescription, handle: Handle) -> dict[str, tuple[Config, ...]]:
    """By solver, the configurations that answers hold, and those that their composed forms would have by now."""
    stored = stored_configs(problem, handle)
    if problem.epilogue:
        for solver_id, (fastest, *_) in stored_configs(problem.bare, handle).items():
            if configs := stored.get(name := composed_id(solver_id)):
                stored[name] = tuple(dict.fromkeys((*configs, fastest)))
    return stored


@dataclass(frozen=True, slots=True)
class _Request:
    """One solver and what is asked of it.

    Attributes:
        earlier: configurations that were measured with its earlier code, or without the epilogue, fastest first.
        most_defaults: how many of its default configurations are asked for beside them, unless the solver does not take
            the fastest; None for all.
        trusts_own: our own solvers are asked for steps only where a limit is on those.
    """

    problem: ProblemDescription
    device: Device
    solver: Solver
    options: FindOptions
    earlier: tuple[Config, ...] = ()
    most_defaults: int | None = None
    trusts_own: bool = False

    @property
    def is_trusted(self) -> bool:
        """Whether a FindDB can keep its candidates, whatever steps they have."""
        return self.trusts_own and self.solver.is_own

    def applicability(self) -> Applicability:
        """Whether the solver serves the problem."""
        if self.is_trusted:
            return own_applicability(self.solver, self.problem, self.device)
        return self.solver.applicability(self.problem, self.device)

    def bare_applicability(self) -> Applicability:
        """Whether the solver serves the problem without its epilogue; yes where it fails over the question."""
        answer = applicability_of(self.solver, self.problem.bare, self.device)
        return APPLICABLE if answer is None else answer

    def defaults(self) -> list[tuple[Config, float | None]]:
        """The solver's default configurations, then the earlier ones that it still takes; estimates where at hand."""
        taken = self.still_taken()
        most = self.most_defaults if [config for config, _ in taken[:1]] == list(self.earlier[:1]) else None
        found: list[tuple[Config, float | None]] = []
        if self.is_trusted:
            found += own_defaults(self.solver, self.problem, self.device)[:most]
        else:
            configs = tuple(self.solver.default_configs(self.problem, self.device))[:most]
            found += [(config, None) for config in configs]
        known = [config for config, _ in found]
        return found + [each for each in taken if each[0] not in known]

    def still_taken(self) -> list[tuple[Config, float | None]]:
        """The earlier configurations that the solver still takes, with their estimates."""
        admitted = filter(None, map(self._admitted, self.earlier))
        return [(planned.config, planned.estimate_ms) for planned in admitted]

    def planned(self, config: Config, estimate_ms: float | None = None) -> Planned:
        """A configuration with what decides about it; its estimate is asked for, if not at hand."""
        if not isinstance(config, Config):
            raise InvalidConfigError(f"{self.solver.id}: config {config!r} must be a Config")
        return Planned(
            problem=self.problem,
            device=self.device,
            solver=self.solver,
            config=config,
            estimate_ms=self.estimate_ms(config) if estimate_ms is None else estimate_ms,
        )

    def within_limits(self, configs: Iterable[tuple[Config, float | None]], draft: _Draft) -> Iterator[Planned]:
        """The configurations that keep the caller's limits; a draft is told of the others.

        Args:
            configs: with their estimates, where they are at hand.
        """
        is_trusted = self.is_trusted
        for config, estimate_ms in configs:
            planned = self.planned(config, estimate_ms)
            answer = APPLICABLE if is_trusted else refuse_unrecordable(planned)
            if answer.refused:
                _tell_once(self.solver.id, answer.reason)
            else:
                answer = refuse_beyond_limits(planned, self.problem, self.options)
                draft.is_cut |= is_beyond_workspace(planned, self.options)
            if answer.refused:
                draft.refusals[f"{planned.candidate.id:.{_LONGEST_NAME}}"] = answer.reason
            else:
                yield planned

    def admits(self, config: Config) -> bool:
        """Whether a configuration is valid and within the caller's limits, wherever it comes from."""
        return self._admitted(config) is not None

    def _admitted(self, config: Config) -> Planned | None:
        """What is planned of a configuration, if it is admitted."""
        try:
            self.solver.check_config(self.problem, self.device, config)
            planned = self.planned(config)
            if not self.is_trusted and refuse_unrecordable(planned).refused:
                return None
            return None if refuse_beyond_limits(planned, self.problem, self.options).refused else planned
        except BaseException as error:  # its own code may raise anything of a configuration that it does not know
            raise_if_interrupted(error)
            if not isinstance(error, MiofindError):
                logger.debug("%s fails over %s: %s", self.solver.id, config.json, described(error))
            return None

    def estimate_ms(self, config: Config) -> float:
        """The solver's estimate.

        Raises:
            InvalidConfigError: it is no time, which would put all candidates in a wrong order.
        """
        return _estimate_ms(self.solver, self.problem, self.device, config)

    def guess_ms(self, config: Config) -> float:
        """The solver's estimate, infinite where it has none: what it fails over goes last, and ends no search."""
        try:
            return self.estimate_ms(config)
        except BaseException as error:  # a solver's own code may raise anything
            raise_if_interrupted(error)
            return math.inf

    def listed_space(self, configs: Sequence[Config]) -> Space:
        """These of the solver's configurations for a search."""
        return Space(
            solver_id=self.solver.id,
            seeds=tuple(configs),
            listed=(),
            is_whole=True,
            parameters={},
            admits=functools.lru_cache(maxsize=4096)(self.admits),
            estimate_ms=self.guess_ms,
        )

    def space(self, winners: Iterable[Config], draft: _Draft) -> Space:
        """The solver's configurations for a search."""
        allowed = [planned.config for planned in self.within_limits(self.defaults(), draft)]
        every = _by_estimate(self.solver, self.problem, self.device)
        is_cut = _points(self.solver) > MAX_ESTIMATED or len(every) >= MAX_ESTIMATED
        listed = tuple(itertools.islice(filter(self.admits, every), _LISTED))
        near = [config for config in winners if (self.solver.parameters or config in every) and self.admits(config)]
        return Space(
            solver_id=self.solver.id,
            seeds=tuple(dict.fromkeys([*allowed, *near])),
            listed=listed,
            is_whole=len(listed) <= EXHAUSTIVE and not is_cut,
            parameters=self.solver.parameters,
            admits=functools.lru_cache(maxsize=4096)(self.admits),
            estimate_ms=self.guess_ms,
        )


@dataclass(slots=True)
class _Draft:
    """A plan that is being made; see `Plan`."""

    best_ms: float = math.inf
    planned: list[Planned] = field(default_factory=list)
    spaces: list[Space] = field(default_factory=list)
    considered: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    is_cut: bool = False

    def choices_of(self, bare: Plan, options: FindOptions) -> Choices:
        """What is composed of a bare problem's plan: what estimates have first there."""
        self.is_cut |= bare.is_cut
        planned = _least_first(bare.candidates or bare.last_resort)
        return first_of_each(((each.solver.id, each.config) for each in planned), options)

    def ask(self, request: _Request, winners: Iterable[Config], *, in_haste: bool) -> None:
        """Take in what one solver has for a problem."""
        if in_haste and request.solver.is_last_resort and self.fitting:
            return
        with self._blaming(request):
            applies = self._applies(request)
            if applies and in_haste and self._is_behind(request):
                self.refusals[request.solver.id] = _FAR_BEHIND
            elif applies and request.options.searches and not request.solver.is_last_resort:
                space = request.space(winners, self)
                first = itertools.islice(dict.fromkeys((*space.seeds, *space.listed)), SEARCH_LIMIT)
                self.planned += map(request.planned, first)
                self.spaces.append(space)
            elif applies:
                self.planned += request.within_limits(request.defaults(), self)

    @property
    def fitting(self) -> list[Planned]:
        """The candidates that are not of the last resort."""
        return [each for each in self.planned if not each.solver.is_last_resort]

    def _is_behind(self, request: _Request) -> bool:
        """Whether all of a solver's estimates are far behind the best that is planned."""
        best_ms = min([self.best_ms, *(each.estimate_ms for each in self.fitting)])
        return request.solver.least_ms(request.problem, request.device) > _FAR * best_ms

    def pass_over(self, request: _Request, reason: str) -> None:
        """Count a solver as asked that is not worth a measurement of the problem."""
        with self._blaming(request):
            if self._applies(request):
                self.refusals[request.solver.id] = reason

    def ask_composed(self, request: _Request) -> None:
        """Take in some configurations of a composed solver, all that there are of it."""
        with self._blaming(request):
            if not self._applies(request):
                return
            planned = list(request.within_limits(request.still_taken(), self))
            self.planned += planned
            if planned and request.options.searches and not request.solver.is_last_resort:
                self.spaces.append(request.listed_space([each.config for each in planned]))

    def count_forms(self, requests: Iterable[_Request]) -> None:
        """Have `considered` name those solvers that were asked in all forms, and `refusals` say why none of one serves.

        Args:
            requests: of solvers that stand for their composed forms, too, and of composed ones that stand for
                themselves.
        """
        asked, self.considered = self.considered, {}
        for request in requests:
            solver = request.solver
            if is_composed(solver.id):
                self._applies(request)
                continue
            if solver.id in asked:
                self.considered[solver.id] = solver.version
            if solver.id in self.refusals and not (answer := request.bare_applicability()):
                self.refusals[solver.id] = answer.reason

    def ask_again(self, request: _Request) -> None:
        """Take in a solver's earlier configurations, and nothing besides."""
        with self._blaming(request):
            if self._applies(request):
                self.planned += request.within_limits(request.still_taken(), self)

    def refuse(self, facts: SolverFacts, reason: str, *, is_possible: bool) -> None:
        """Take in why a solver serves no problem like this one."""
        self._count(facts, is_possible=is_possible)
        self.refusals[facts.id] = reason

    def _count(self, solver: Solver | SolverFacts, *, is_possible: bool) -> None:
        """Count a solver as asked, if the device has what it needs."""
        if is_possible:
            self.considered[solver.id] = solver.version
        else:
            self.absent.add(solver.id)

    def _applies(self, request: _Request) -> bool:
        """Whether a solver serves the problem within the options; notes why not."""
        solver = request.solver
        self._count(solver, is_possible=is_possible(solver, request.device))
        answer = request.applicability()
        if answer and _spoils(solver, request.options):
            answer = _SPOILS
        if not answer:
            self.refusals[solver.id] = answer.reason
        return bool(answer)

    @contextlib.contextmanager
    def _blaming(self, request: _Request) -> Iterator[None]:
        """Take what a solver raises for its refusal: it must not end the find for the others."""
        solver = request.solver
        try:
            yield
        except BaseException as error:  # a solver's own code may raise anything
            raise_if_interrupted(error)
            self.refusals[solver.id] = f"{type(error).__name__}: {described(error, str)}"
            self.considered.pop(solver.id, None)
            if not isinstance(error, MissingEnvironmentError):
                self.failing.add(solver.id)
            if not isinstance(error, MiofindError):  # a library that cannot list its plans raises one of these
                told = described(error)
                logger.warning("solver %s cannot plan for %s and is left out: %s", solver.id, request.problem, told)

    def plan(self, *, is_filtered: bool) -> Plan:
        """What was taken in."""
        planned = _least_first(self.planned)
        return Plan(
            candidates=tuple(_in_turn([p for p in planned if not p.solver.is_last_resort])),
            last_resort=tuple(p for p in planned if p.solver.is_last_resort),
            considered=self.considered,
            is_filtered=is_filtered,
            refusals=self.refusals,
            left_out=tuple(self.left_out),
            absent=frozenset(self.absent),
            failing=frozenset(self.failing),
            spaces=tuple(self.spaces),
            is_cut=self.is_cut,
        )


def _spoils(solver: Solver | SolverFacts, options: FindOptions) -> bool:
    """Whether no configuration of a solver keeps errors to what a result meets, as requests without `max_error` ask."""
    return options.max_error is None and solver.least_reach > Reach.INPUTS


def _least_first(planned: Iterable[Planned]) -> list[Planned]:
    return sorted(planned, key=lambda each: each.estimate_ms)


def _in_turn(planned: Sequence[Planned]) -> list[Planned]:
    """Candidates, by estimate, in the order that they are measured in: a few of the others come before cuDNN's."""
    others = [each for each in planned if each.solver.library is not Library.CUDNN]
    if len(others) == len(planned):
        return others
    first = others[:_BEFORE_CUDNN]
    return first + [each for each in planned if each not in first]


@functools.lru_cache(maxsize=1 << 12)
def own_applicability(solver: Solver, problem: ProblemDescription, device: Device) -> Applicability:
    """Whether one of our own solvers serves a problem, which is the same each time."""
    return solver.applicability(problem, device)


# A tuning of the likeliest plans each problem twice, a fused one with its bare form, and to list takes milliseconds.
@functools.lru_cache(maxsize=1 << 12)
def own_defaults(solver: Solver, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
    """Default configurations of one of our own solvers with their estimates, which are the same each time."""
    return solver.estimated_defaults(problem, device)


def _estimate_ms(solver: Solver, problem: ProblemDescription, device: Device, config: Config) -> float:
    value: object = solver.estimate_ms(problem, device, config)
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise InvalidConfigError(f"{solver.id}: estimate_ms={value!r} must be a finite number of at least 0")
    return float(value)


# A tuning plans each problem twice, first to compile ahead, and thousands of estimates take a third of a second.
@functools.lru_cache(maxsize=32)
def _by_estimate(solver: Solver, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
    """What `estimated_configs` gives, each once, likely best first."""
    every = dict.fromkeys(estimated_configs(problem, device, solver))
    return tuple(sorted(every, key=lambda config: (_estimate_ms(solver, problem, device, config), config.json)))


def refuse_unrecordable(planned: Planned) -> Applicability:
    """Why a FindDB could not keep what became of a candidate, "" where it could."""
    found: tuple[object, ...] = (planned.workspace_bytes, planned.deterministic)
    chars, (workspace, deterministic) = len(planned.config.json), found
    if chars > MAX_JSON_CHARS:
        return Applicability(
            f"its configuration takes {chars} characters of JSON, of which a FindDB keeps {MAX_JSON_CHARS} at most"
        )
    if type(workspace) is not int or not 0 <= workspace <= MAX_INT:
        kind = type(workspace).__name__
        return Applicability(
            f"its workspace of {_shown(workspace)} bytes (of type {kind}) must be an int from 0 to 2**63 - 1"
        )
    if type(deterministic) is not bool:
        return Applicability(f"deterministic={deterministic!r:.80} must be True or False")
    return APPLICABLE


def _shown(number: object) -> str:
    """A number for a message: Python writes none of more than 4300 digits."""
    if isinstance(number, int) and number.bit_length() > 256:
        return f"2**{number.bit_length() - 1} and more"
    return f"{number!r:.80}"


@functools.lru_cache(maxsize=1 << 10)
def _tell_once(solver_id: str, reason: str) -> None:
    logger.warning("a candidate of solver %s is left out: %s", solver_id, reason)


def is_beyond_workspace(planned: Planned, options: FindOptions) -> bool:
    """Whether a candidate needs more workspace than the caller allows."""
    limit = options.workspace_limit_bytes
    return limit is not None and planned.workspace_bytes > limit


def refuse_beyond_limits(planned: Planned, problem: ProblemDescription, options: FindOptions) -> Applicability:
    """Which of the caller's limits a candidate breaks, "" if none."""
    if is_beyond_workspace(planned, options):
        limit = options.workspace_limit_bytes
        return Applicability(f"needs {planned.workspace_bytes} bytes of workspace, the limit is {limit}")
    if options.deterministic and not planned.deterministic:
        return Applicability("is not deterministic")
    if options.strict_nonfinite and planned.solver.spreads_nonfinite(problem, planned.config):
        return Applicability("may spread an infinity or NaN to results that do not sum it")
    if options.max_error is None:
        return _refuse_wide_bound(planned.solver, problem, planned.config)
    return APPLICABLE


def _refuse_wide_bound(solver: Solver, problem: ProblemDescription, config: Config) -> Applicability:
    """Why a configuration's errors may exceed direct summation's bound; APPLICABLE if they keep it."""
    if solver.keeps_bound(problem, config):
        return APPLICABLE
    if solver.error_growth(problem, config) > 1:
        return Applicability("has a wider error bound than direct summation; set max_error (--max-error) to allow it")
    return _SPOILS


def wider_bounds(problem: ProblemDescription, options: FindOptions, handle: Handle) -> dict[str, int]:
    """By id of the solvers that apply, how many default configurations only a `max_error` lets in."""
    found: dict[str, int] = {}
    device = handle.device
    for solver in handle.registry.values() if options.max_error is None else ():
        try:
            form = next((form for form in forms(solver, problem) if form.applicability(problem, device)), None)
            if form is not None and options.allows(form):
                kept = [form.keeps_bound(problem, c) for c in form.default_configs(problem, device)]
                found[solver.id] = kept.count(False)
        except BaseException as error:  # make_plan has told of it
            raise_if_interrupted(error)
    return {name: count for name, count in found.items() if count}


def search_space(problem: ProblemDescription, device: Device, solver: Solver) -> Iterable[Config]:
    """The defaults and the configurations with the best estimates, SEARCH_LIMIT in all."""
    defaults = list(solver.default_configs(problem, device))
    best = _by_estimate(solver, problem, device)[:SEARCH_LIMIT]
    return list(dict.fromkeys([*defaults, *best]))[: max(SEARCH_LIMIT, len(defaults))]


def estimated_configs(problem: ProblemDescription, device: Device, solver: Solver) -> Iterator[Config]:
    """A solver's valid configurations; of a product of more than MAX_ESTIMATED points the valid ones of a random part.

    The part is the same each time. A list that a solver gives otherwise is cut there.
    """
    if _points(solver) <= MAX_ESTIMATED:
        return itertools.islice(solver.configs(problem, device), MAX_ESTIMATED)
    return solver.drawn_configs(problem, device, MAX_ESTIMATED)


def _points(solver: Solver) -> int:
    """Size of the product of a solver's parameters, valid or not; 0 where configurations come from a list alone."""
    return math.prod(map(len, solver.parameters.values())) if solver.parameters else 0
