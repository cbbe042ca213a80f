"""Answers of the FindDBs: which of them a request is answered from.

Holds the rules of a hit: an answer counts where the scopes of earlier finds cover the request. What of its rows becomes
solutions is said in stored.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from miofind.core.problem import ProblemDescription
from miofind.find.combinations import AnswersOfCombination
from miofind.find.lookup.failures import newest_rows, newest_statuses
from miofind.find.lookup.scopes import (
    WIDE_BOUNDS,
    Coverage,
    accepted_scope,
    asked,
    considered,
    overwritten,
    requested_scope,
)
from miofind.find.lookup.stored import Stored, admits, answers_no_more, of_answer, of_rows, selected, selected_of
from miofind.find.lookup.validity import is_valid
from miofind.finddb import LIKELY, Answer, Scope
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.runtime.refusals import Selection
from miofind.runtime.solution import Gaps, Solution
from miofind.solver.registry import inner_id


class _Hit(NamedTuple):
    """What one FindDB has for a request.

    Attributes:
        late: solvers that might serve, and that came or changed since it was measured.
        is_stale: whether other versions of libraries or driver measured some of it.
        ended_early: whether the request asks for the defaults and a budget ended all finds that answer it.
        limited: solvers of whose rows the request's limits take none.
        likely_alone: whether the request asks for the defaults and of some solver the likeliest alone were measured.
    """

    solutions: list[Solution]
    late: tuple[str, ...]
    is_stale: bool
    ended_early: bool
    limited: frozenset[str]
    likely_alone: bool


def look_up(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    measured: Iterable[str] = (),
    coverage: Coverage = Coverage.PARTIAL,
    queue: bool = True,
    in_full: bool = False,
    answers: Iterable[Answer] | None = None,
) -> list[Solution] | None:
    """Solutions that FindDBs have for a request, fastest first; None where no FindDB has any or has looked far enough.

    The first FindDB that lacks no solver answers, else the one that lacks the fewest; where another one came before it,
    with the rows of all.

    Args:
        measured: ids of solutions measured just now.
        coverage: what an answer must have measured to count.
        queue: note for a re-check what is stale or incomplete.
        in_full: finds of the likeliest alone do not count, unless they are what is asked for.
        answers: what the FindDBs have of the problem, where that was asked before.
    """
    partial = coverage is not Coverage.ALL
    dynamic_only = coverage is Coverage.DYNAMIC
    scope = accepted_scope if partial and not in_full else requested_scope
    request = scope(problem, options, handle.device, handle.registry, dynamic_only=dynamic_only)
    if not partial and _wants_all(problem, options, handle):
        request = replace(request, complete=True)
    asked = _Request(problem, options, handle, request, frozenset(measured), partial)
    device = handle.device.identity
    if answers is None:
        answers = handle.database.answers(device, problem.network_config)
    found, *others = _chosen(map(asked.held, answers))
    if found is None or (found.late and not partial):
        return None
    if others and (whole := asked.of_all_histories()).solutions:
        found = found._replace(solutions=whole.solutions, is_stale=whole.is_stale, limited=whole.limited)
    if queue and not asked.fresh:
        if found.late:
            handle.database.queue_recheck(device, problem.network_config, f"not measured yet: {', '.join(found.late)}")
        elif found.is_stale:
            handle.database.queue_recheck(device, problem.network_config, "measured with other versions")
    gaps = Gaps(
        solvers=found.late,
        ended_early=found.ended_early,
        limited=tuple(sorted(found.limited)),
        likely_alone=found.likely_alone,
    )
    found.solutions[0].solution_list.gaps = gaps
    return found.solutions


def all_rows(problem: ProblemDescription, options: FindOptions, handle: Handle) -> list[Solution]:
    """Solutions that FindDBs have within a request's limits, fastest first, whatever their finds considered."""
    request = accepted_scope(problem, options, handle.device, handle.registry)
    return _Request(problem, options, handle, request, frozenset(), True).of_all_histories().solutions


def is_answered(problem: ProblemDescription, options: FindOptions, handle: Handle) -> bool:
    """Whether `look_up` has solutions; asks of one row where the first will do, and notes nothing for a re-check."""
    request = accepted_scope(problem, options, handle.device, handle.registry)
    asked = _Request(problem, options, handle, request, frozenset(), True)
    return any(map(asked.holds_any, handle.database.answers(handle.device.identity, problem.network_config)))


def _chosen(held: Iterable[_Hit | None]) -> list[_Hit | None]:
    """The first that lacks nothing, else the first of those that lack the fewest solvers; then what was asked besides.

    What has the likeliest alone lacks something, too.
    """
    seen = []
    for each in held:
        if each is not None:
            seen.append(each)
            if not each.late and not each.likely_alone:
                break
    return [*sorted(seen, key=lambda each: (len(each.late), each.likely_alone))] or [None]


class _Request(NamedTuple):
    """A request as answers are held against it.

    Attributes:
        fresh: ids of solutions measured just now; where there are any, what they were recorded in is the answer.
    """

    problem: ProblemDescription
    options: FindOptions
    handle: Handle
    request: Scope
    fresh: frozenset[str]
    partial: bool

    def held(self, answer: Answer) -> _Hit | None:
        """What an answer has for the request, None where that is nothing, or too little was considered for it."""
        is_covered = bool(self.fresh) or answer.covers(self.request)
        hidden = frozenset() if is_covered else self._hidden(answer)
        late = () if is_covered else self._not_considered(answer, hidden)
        if late is None:
            return None
        found = self._taken_of(answer)
        hidden |= found.void
        if found.is_thin or (hidden and self._lacking(hidden, found)):
            found = self.of_all_histories()
        if hidden and not self.fresh and (void := self._lacking(hidden, found)):
            late = tuple(sorted({*late, *(void - self._settled() - self._failing(void))}))
        if not found.solutions:
            return None
        ended_early = is_covered and self._asks_for_defaults and self._ended_early(answer)
        return _Hit(found.solutions, late, found.is_stale, ended_early, found.limited, self._likely_alone(answer))

    @property
    def _asks_for_defaults(self) -> bool:
        return not (self.fresh or self.options.searches or self.options.likely)

    def _likely_alone(self, answer: Answer) -> bool:
        """Whether the request asks for the defaults and of some solver finds measured the likeliest alone."""
        if not self._asks_for_defaults or all(scope.effort != LIKELY for scope in answer.scopes):
            return False
        wanted = replace(self.request, effort="defaults")
        return not considered(wanted, answer.scopes, self.handle.registry) >= self.request.solvers.keys()

    def _ended_early(self, answer: Answer) -> bool:
        """Whether the request asks for the defaults and a budget ended all finds of them that an answer has."""
        wanted = replace(self.request, effort="defaults")
        covering = [scope for scope in answer.scopes if scope.covers(wanted)]
        return bool(covering) and not any(scope.complete for scope in covering)

    def holds_any(self, answer: Answer) -> bool:
        """Whether an answer has anything for the request."""
        is_known = answer.covers(self.request) or self._not_considered(answer, frozenset()) is not None
        if is_known and any(self._taken((row,)).solutions for row in of_answer(answer)):
            return True
        return self.held(answer) is not None

    def _hidden(self, answer: Answer) -> frozenset[str]:
        """Solvers that were measured as they are now, of which an answer tells only how they failed in another release.

        Of a solver an answer holds what was measured last, in whichever release that was.
        """
        others = overwritten(self.request, answer.scopes) - self._considered(answer)
        return others & self._settled() if self._serving(others) else frozenset()

    def _lacking(self, names: Iterable[str], found: Selection) -> set[str]:
        """Those of the solvers that the request asks, that serve the problem and that have no solution."""
        wanted = {self._counted(name) for name in names} & self.request.solvers.keys()
        return {*self._serving(wanted - {self._counted(solution.solver_id) for solution in found.solutions})}

    def _counted(self, name: str) -> str:
        """The name under which a solver is asked for: a composed form's own, or that of the solver it is made of."""
        return name if name in self.request.solvers else inner_id(name)

    def _settled(self) -> set[str]:
        """Solvers that were measured as they are now: something of them is usable, or all that was measured failed."""
        usable, failed, refused = set(), set(), set()
        for row in newest_rows(self.problem, self.handle, ignored=frozenset()).values():
            name = self._counted(row.solver_id)
            if not row.usable:
                failed.add(name)
            elif answers_no_more(row, self.problem, self.handle):
                refused.add(name)
            else:
                usable.add(name)
        return usable | (failed - refused)

    def _failing(self, names: Iterable[str]) -> set[str]:
        """Those of the solvers whose own code fails over the problem or over a row."""
        refusals = self.handle.refusals(self.problem)
        return {name for name in names if refusals.fails(self.handle.registry[name])}

    def of_all_histories(self) -> Selection:
        """Solutions of the best rows of all FindDBs that the request takes."""
        rows = self.handle.database.best_rows(
            self.handle.device.identity,
            self.problem.network_config,
            holds=lambda row: is_valid(row, self.handle),
            admits=lambda row: admits(row, self.problem, self.options, self.handle),
        )
        return self._taken(of_rows(rows))

    def _taken_of(self, answer: Answer) -> Selection:
        if self.fresh:
            return self._taken(of_answer(answer))
        return selected_of(answer, self.problem, self.options, self.handle)

    def _taken(self, rows: Iterable[Stored]) -> Selection:
        return selected(rows, self.problem, self.options, self.handle, self.fresh)

    def _not_considered(self, answer: Answer, hidden: frozenset[str]) -> tuple[str, ...] | None:
        """The solvers that might serve and that an answer's finds together have not considered; None if it is none.

        What refuses the problem need not have been considered. What came since a find that asked all solvers, or
        changed since one that asked it, may be missing from a partial answer; what a filter left out may not.
        """
        known = self._considered(answer) | hidden
        missing = self.request.solvers.keys() - known
        if not known or WIDE_BOUNDS in missing:
            return None
        late = self._serving(missing)
        return late if not late or (self.partial and asked(late, self.request, answer.scopes)) else None

    def _considered(self, answer: Answer) -> frozenset[str]:
        return considered(self.request, answer.scopes, self.handle.registry)

    def _serving(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the solvers that do not refuse the problem."""
        refused, registry = self.handle.refusals(self.problem), self.handle.registry
        known = AnswersOfCombination.of(registry, self.problem, self.handle.device)
        likely = (name for name in sorted(names) if known[inner_id(name)].answer)  # the others are not imported for it
        return tuple(name for name in likely if refused.may_serve(registry[name]))


def _wants_all(problem: ProblemDescription, options: FindOptions, handle: Handle) -> bool:
    """Whether only a find that came to its own end counts, not one that a budget ended.

    For a search with `trials`: unless as many candidates of the solvers that the options allow were tried, by whatever
    finds and whatever became of them, so that more trials search on and as many do not. Otherwise: unless the time
    budget is finite.
    """
    if options.searches and options.trials is not None:
        tried = newest_statuses(problem, handle, ignored=frozenset())
        return sum(options.allows(handle.registry[name.partition(":")[0]]) for name in tried) < options.trials
    return math.isinf(options.budget_s)
