"""Compiles the next problems' kernels while the present one is measured. Needs no GPU; a failure is harmless."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from miofind.compiler import CompilePool
from miofind.core.problem import ProblemDescription
from miofind.device.device import Place
from miofind.errors import described
from miofind.evaluate.harness_kernels import harness_steps
from miofind.find.plan import Plan
from miofind.finddb import History
from miofind.process.held_settings import HeldSetting, Holder
from miofind.process.threads import Helper
from miofind.runtime.handle import Handle
from miofind.solver.solver import MAX_DEFAULT_CONFIGS
from miofind.solver.steps import KernelStep
from miofind.tune.planning import known_solutions, tuning_plans
from miofind.tune.values import TuneOptions

logger = logging.getLogger(__name__)


_SWITCH_S = 4.99e-4
"""Python's default of 5 ms is what each query of a FindDB beside a planning thread would wait for the interpreter."""

_quick_turns = HeldSetting(
    sys.getswitchinterval, sys.setswitchinterval, held=_SWITCH_S, gives_way=lambda usual: usual > _SWITCH_S
)


DEPTH = 8
"""Problems to prepare ahead: small ones are measured in less time than NVRTC takes for one of their kernels, and the
kernels of one problem do not keep a pool of processes busy."""


LIKELY_DEPTH = 64
"""The same where a few candidates of each are measured: all problems of a network, whose measuring is short, too."""

_LOOK_S = 0.01


class Precompiler:
    """Plans problems in a thread of its own and hands their kernels to a pool of compiling processes.

    Args:
        pool: fills the binary cache, for any number of devices; not closed here.
        defers: keep what is prepared, for `take`, `is_preparing` and `take_plan`; off where nobody asks them.

    Attributes:
        defers: whether `is_preparing` is asked before a problem is measured.
        depth: problems that are worth preparing ahead; one of a search, whose configurations take long to plan and to
            measure.
    """

    def __init__(self, pool: CompilePool, options: TuneOptions, *, defers: bool = False) -> None:
        self.pool = pool
        self.depth = 1 if options.find.searches else LIKELY_DEPTH if options.find.likely else DEPTH
        self._options = options
        self.defers = defers
        self._preparing: dict[ProblemDescription, tuple[KernelStep, ...] | None] = {}
        self._plans: dict[ProblemDescription, _Kept] = {}
        self._arch = ""
        self._helper = Helper("miofind-precompiler")
        self._turns = Holder()
        _quick_turns.begin(self._turns)

    def prepare(
        self, problems: Iterable[ProblemDescription], handle: Handle, options: TuneOptions | None = None
    ) -> None:
        """Begin to compile what measuring the problems will launch first, unless they are known.

        Args:
            options: how they will be measured; None for the tuning's own.
        """
        if handle.device.place is Place.CUDA:
            self._arch = handle.device.arch
            for problem in problems:
                if self.defers:
                    self._preparing[problem] = None
                work = functools.partial(self._prepare, problem, handle, options or self._options)
                if not self._helper.submit(work):
                    self._preparing.pop(problem, None)

    def is_preparing(self, problem: ProblemDescription) -> bool:
        """Whether what was begun for a problem is not done yet: to measure it now would be to wait."""
        steps = self._preparing.get(problem, ())
        if steps is None or self.pool.is_compiling(steps, self._arch):
            return True
        self._preparing.pop(problem, None)
        return False

    def take_plan(self, problem: ProblemDescription, options: TuneOptions) -> Plan | None:
        """The few candidates of a problem, where it was prepared and the likeliest are measured; it is done with."""
        self._preparing.pop(problem, None)
        plan = self.plan(problem, options)
        self._plans.pop(problem, None)
        return plan

    def plan(self, problem: ProblemDescription, options: TuneOptions) -> Plan | None:
        """The same, but it stays prepared."""
        kept = self._plans.get(problem)
        is_of_now = kept is not None and kept.options == options and kept.bare == _known_of_bare(problem, kept.handle)
        return kept.plan if kept is not None and is_of_now else None

    def take(self, problems: Sequence[ProblemDescription]) -> ProblemDescription:
        """The first of the problems that need not be waited for; while there is none it waits."""
        while True:
            for problem in problems[: self.depth]:
                if not self.is_preparing(problem):
                    return problem
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Plan nothing more."""
        self._helper.give_up()
        self._preparing.clear()
        self._plans.clear()
        _quick_turns.end(self._turns)

    def _prepare(self, problem: ProblemDescription, handle: Handle, options: TuneOptions) -> None:
        steps: tuple[KernelStep, ...] = ()
        try:
            if not known_solutions(problem, options, handle, queue=False):
                bare = _known_of_bare(problem, handle)
                first, *others = tuning_plans(problem, options, handle)
                made = (*harness_steps(problem, handle.device), *_steps(first, handle))
                self.pool.submit(made, handle.device.arch)
                steps = made
                if options.find.likely and not others and problem in self._preparing:
                    self._plans[problem] = _Kept(options=options, handle=handle, plan=first, bare=bare)
        except BaseException as error:  # measuring the problem meets the same error, and says so
            logger.debug("nothing is compiled ahead for %s: %s", problem, described(error))
        if problem in self._preparing:  # else it was measured meanwhile
            self._preparing[problem] = steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A plan that was made ahead.

    Attributes:
        bare: what it read of the bare problem, which may be measured before the fused one.
    """

    options: TuneOptions
    handle: Handle
    plan: Plan
    bare: tuple[History, ...]


def _known_of_bare(problem: ProblemDescription, handle: Handle) -> tuple[History, ...]:
    """What the FindDBs have of a fused problem's bare one."""
    if not problem.epilogue:
        return ()
    return handle.database.histories(handle.device.identity, problem.bare.network_config)


def _steps(plan: Plan, handle: Handle) -> Iterator[KernelStep]:
    """Kernels of as many candidates of each solver as a find begins with."""
    counts: Counter[str] = Counter()
    for planned in plan.candidates:
        counts[planned.solver.id] += 1
        if counts[planned.solver.id] <= MAX_DEFAULT_CONFIGS:
            yield from planned.kernels(handle.device)
