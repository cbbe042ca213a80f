"""What a tuning would do, before it measures anything: problems, candidates, compiles, time, and what is known already.

The time is that of `tune.cost` over the solvers' estimates, corrected by how far the FindDB's times lie from the
estimates for the problems it knows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from miofind.compiler import processors
from miofind.device.device import Device, Place
from miofind.errors import CompileError, described, raise_if_interrupted
from miofind.find.lookup import records
from miofind.measure.effort import Effort
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.solver.steps import KernelStep
from miofind.suites import SuiteProblem
from miofind.tune.cost import measuring_seconds
from miofind.tune.planning import known_solutions, tuning_plans
from miofind.tune.values import TuneOptions

logger = logging.getLogger(__name__)

COMPILE_S = 0.14
"""Of a processor for a kernel: 0.10 to 0.16 in six sets of 50 to 738 kernels, AMD EPYC, NVRTC 13."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a tuning would do on one kind of device.

    Attributes:
        device: one of the kind.
        devices: how many of the kind share the work.
        problems: asked for.
        known: those that the FindDB answers, so that they are not measured.
        unsolvable: those that no solver serves.
        solvers: those that would be measured.
        configurations: candidates over all problems, less those that failed here before and are not tried again.
        compiles: distinct kernel binaries that the candidates need.
        compiled: those of them that the binary cache has.
        calibration: factor on the solvers' estimates, from `calibrated_by` problems whose times are known; 1 for none.
        measuring_seconds: over all devices of the kind together.
        compiling_seconds: of compiling what the binary cache lacks, beside the measuring, on all processors but one.
    """

    device: Device
    devices: int
    problems: int
    known: int
    unsolvable: int
    solvers: tuple[str, ...]
    configurations: int
    compiles: int
    compiled: int
    calibration: float
    calibrated_by: int
    measuring_seconds: float
    compiling_seconds: float


@dataclass(slots=True)
class _PlanTally:
    """What is planned so far: estimated times by problem, solvers, steps by binary, known times over estimates."""

    times_ms: dict[str, list[float]] = field(default_factory=dict)
    solvers: set[str] = field(default_factory=set)
    steps: dict[object, KernelStep] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)
    known: int = 0
    unsolvable: int = 0


def forecast(requests: Sequence[SuiteProblem], handles: Sequence[Handle], options: TuneOptions) -> Forecast:
    """What a tuning of the problems would do on devices of one kind. Measures nothing and needs no GPU.

    Args:
        requests: those of the kind, as `tasks_of` gives them.
        handles: of the kind; virtual devices will do.
    """
    handle, tally = handles[0], _PlanTally()
    for request in requests:
        _count(request, handle, options, tally)
    device = handle.device
    factor = math.exp(math.fsum(map(math.log, tally.ratios)) / len(tally.ratios)) if tally.ratios else 1.0
    effort = Effort.TUNE if options.find.searches else Effort.FIND
    compiled = _compiled(tally.steps.values(), handle)
    return Forecast(
        device=device,
        devices=len(handles),
        problems=len(requests),
        known=tally.known,
        unsolvable=tally.unsolvable,
        solvers=tuple(sorted(tally.solvers)),
        configurations=sum(map(len, tally.times_ms.values())),
        compiles=len(tally.steps),
        compiled=compiled,
        calibration=factor,
        calibrated_by=len(tally.ratios),
        measuring_seconds=sum(
            measuring_seconds([factor * t for t in times], effort) for times in tally.times_ms.values()
        ),
        compiling_seconds=COMPILE_S * (len(tally.steps) - compiled) / max(1, processors() - 1),
    )


def _count(request: SuiteProblem, handle: Handle, options: TuneOptions, tally: _PlanTally) -> None:
    """Add one problem to the tally."""
    problem, device = request.problem.flattened, handle.device
    answer = records.look_up(problem, options.find, handle, queue=False)
    if answer is not None:
        tally.ratios += _ratio(answer[0], handle)
    if known_solutions(problem, options, handle, queue=False):
        tally.known += 1
        return
    trials = options.find.trials if options.find.searches else None
    for plan in tuning_plans(problem, options, handle):
        planned = (plan.candidates or plan.last_resort)[:trials]
        if planned:
            tally.times_ms[planned[0].problem.network_config] = [candidate.estimate_ms for candidate in planned]
        for candidate in planned:
            tally.solvers.add(candidate.solver.id)
            for step in candidate.kernels(device) if device.place is Place.CUDA else ():
                tally.steps.setdefault(step.binary, step)
    tally.unsolvable += problem.network_config not in tally.times_ms


def _ratio(best: Solution, handle: Handle) -> list[float]:
    """The known time of a solution over its solver's estimate; empty where either makes no sense."""
    try:
        solver = handle.registry.named(best.solver_id)
        ratio = best.time_ms / solver.estimate_ms(best.problem, handle.device, best.config)
        return [ratio] if 0 < ratio < math.inf else []
    except BaseException as error:  # a solver's own code may raise anything, and give what is no time
        raise_if_interrupted(error)
        logger.debug("%s gives no estimate of %s: %s", best.solver_id, best.problem, described(error))
        return []


def _compiled(steps: Iterable[KernelStep], handle: Handle) -> int:
    """How many of the steps' binaries are in the cache."""
    count = 0
    for step in steps:
        try:
            count += handle.compiler.cache.get(handle.compiler.key(step, handle.device.arch)) is not None
        except CompileError:  # its source is missing: measuring says so
            continue
    return count
