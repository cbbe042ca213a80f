"""Canaries: four fixed problems that every GPU of a kind measures again and again, in about equal times.

They stand for what kernels are bound by: the tensor cores (3x3), these and memory (1x1), arithmetic without them
(depthwise), and memory alone. Each is measured by one solver without vendor libraries, the same on all GPUs of a stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from miofind.core.problem import ProblemDescription
from miofind.device.device import Library
from miofind.errors import MiofindError
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.solver import Solver
from miofind.suites import SuiteProblem
from miofind.tune.values import Task, TuneOptions, TuneResult

EVERY_S = 900.0
EVERY_PROBLEMS = 200
SUSPECT_EVERY_S = 60.0

LEAST_GPUS = 3
"""Of a kind, for their median to say which of them is wrong."""
TOLERANCE = 0.03

Times = Mapping[str, float]
"""Milliseconds by network_config."""

PROBLEMS = (
    ProblemDescription.convolution(x=(32, 256, 28, 28), w=(256, 256, 1, 1), dtype="float16", layout="NHWC"),
    ProblemDescription.convolution(x=(32, 128, 28, 28), w=(128, 128, 3, 3), padding=1, dtype="float16", layout="NHWC"),
    ProblemDescription.convolution(
        x=(32, 128, 28, 28), w=(128, 1, 3, 3), padding=1, groups=128, dtype="float16", layout="NHWC"
    ),
    ProblemDescription.convolution(x=(32, 64, 112, 112), w=(64, 64, 1, 1), dtype="float16", layout="NHWC"),
)


def canary_tasks(handle: Handle, first_ticket: int = -1) -> tuple[Task, ...]:
    """The canaries of a handle's device, as tasks whose tickets count down; those that no solver serves are no part."""
    tasks: list[Task] = []
    for problem in PROBLEMS:
        solver = _solver(problem, handle)
        if solver is None:
            continue
        find = FindOptions(only=(solver.id,), isolate=True)
        request = SuiteProblem(problem=problem, suite="canary", layer="canary", count=1)
        task = Task(request=request, kind=handle.device.identity, estimate_s=1.0, ticket=first_ticket - len(tasks))
        tasks.append(replace(task, options=TuneOptions(find=find, force=True)))
    return tuple(tasks)


def time_of(result: TuneResult) -> float | None:
    """What a canary took, in milliseconds; None where it failed or was disturbed."""
    if not result.solutions or result.solutions[0].contended:
        return None
    return result.solutions[0].time_ms


def factor(own: Times, fleet: Sequence[Times]) -> float | None:
    """Median over the canaries of a GPU's time over the median of all GPUs of its kind, itself among them.

    None where too few GPUs have measured them.
    """
    ratios = []
    for name, time_ms in own.items():
        known = [times[name] for times in fleet if name in times]
        if len(known) >= LEAST_GPUS:
            ratios.append(time_ms / median(known))
    return median(ratios) if ratios else None


def _solver(problem: ProblemDescription, handle: Handle) -> Solver | None:
    """The one with the least estimate of those that serve it with kernels of their own."""
    found: list[tuple[float, str, Solver]] = []
    for solver in handle.registry.values():
        try:
            if solver.library is not Library.PLAIN or not solver.applicability(problem, handle.device):
                continue
            config = next(iter(solver.default_configs(problem, handle.device)))
            found.append((solver.estimate_ms(problem, handle.device, config), solver.id, solver))
        except (MiofindError, StopIteration):
            continue
    return min(found, key=lambda each: each[:2])[2] if found else None
