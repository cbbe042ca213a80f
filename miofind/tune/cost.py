"""How long measuring a problem takes: arithmetic on estimated times, before anything is measured.

A problem costs PROBLEM_S for buffers and reference, each candidate CANDIDATE_S for loading and checking plus some runs,
and the race what its schedule samples (`Schedule.expected_ms`). Compiling is not counted: it runs ahead, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.measure.effort import Effort
from miofind.suites import SuiteProblem

PROBLEM_S = 0.25
CANDIDATE_S = 0.02
# A candidate runs for two gates, twice for bits that repeat, to warm up and for its rough time.
_RUNS_BEFORE_SAMPLES = 6
_USUAL_CANDIDATES = 16
# Of an unknown problem's candidates each is taken to be this much slower than the one before.
_USUAL_STEP = 1.15
# Times that kernels reach in practice, over what the nominal ceilings allow.
_USUAL_SLOWNESS = 2.0
_LAUNCH_MS = 3e-3  # what a kernel takes that has nothing to do


def measuring_seconds(times_ms: Sequence[float], effort: Effort) -> float:
    """Seconds that measuring one problem takes.

    Args:
        times_ms: estimated time of a run of each candidate, in the order in which they are tried.
        effort: how long the race is.
    """
    if not times_ms:
        return 0.0
    runs_ms = _RUNS_BEFORE_SAMPLES * sum(times_ms)
    return PROBLEM_S + CANDIDATE_S * len(times_ms) + (runs_ms + effort.schedule.expected_ms(times_ms)) / 1e3


def rough_seconds(problem: ProblemDescription, device: Device, effort: Effort) -> float:
    """The same from the problem's size alone, for putting many problems in order."""
    floor_ms = _USUAL_SLOWNESS * _floor_ms(problem, device)
    return measuring_seconds([floor_ms * _USUAL_STEP**i for i in range(_USUAL_CANDIDATES)], effort)


def lightest(requests: Sequence[SuiteProblem], device: Device, share: float) -> frozenset[ProblemDescription]:
    """The problems of a network that take least by their sizes and counts, together at most a share of its time."""
    times = {each.problem: each.count * (_floor_ms(each.problem, device) + _LAUNCH_MS) for each in requests}
    left_ms, found = share * sum(times.values()), []
    for problem in sorted(times, key=lambda each: (times[each], each.network_config)):
        left_ms -= times[problem]
        if left_ms < 0:
            break
        found.append(problem)
    return frozenset(found)


def _floor_ms(problem: ProblemDescription, device: Device) -> float:
    """Least time by the device's nominal ceilings."""
    dtype = max((operand.tensor.dtype for operand in problem.operands), key=lambda dtype: dtype.itemsize)
    arithmetic_s = problem.flops / device.peak_flops_per_s(dtype, problem.math, tensor_cores=True)
    return 1e3 * max(arithmetic_s, problem.bytes / device.bandwidth_bytes_per_s)
