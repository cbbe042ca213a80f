"""How long measuring a problem takes: arithmetic on estimated times, before anything is measured.

A problem costs PROBLEM_S for buffers and reference, each candidate CANDIDATE_S for loading and checking plus some runs,
and the race what its schedule samples. Compiling is not counted: it runs ahead, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.measure.effort import Effort, Schedule

PROBLEM_S = 0.25
CANDIDATE_S = 0.02
# A candidate runs for two gates, twice for bits that repeat, to warm up and for its rough time.
_RUNS_BEFORE_SAMPLES = 6
# A sample lasts 0.1 ms or one run, and about as long again for the flush of the cache.
_SAMPLE_MS = 0.2
_USUAL_CANDIDATES = 16
# Of an unknown problem's candidates each is taken to be this much slower than the one before.
_USUAL_STEP = 1.15
# Times that kernels reach in practice, over what the nominal ceilings allow.
_USUAL_SLOWNESS = 2.0


def measuring_seconds(times_ms: Sequence[float], effort: Effort) -> float:
    """Seconds that measuring one problem takes.

    Args:
        times_ms: estimated time of a run of each candidate.
        effort: how long the race is.
    """
    if not times_ms:
        return 0.0
    schedule = effort.schedule
    best_ms = min(times_ms)
    tried_ms = sum(_RUNS_BEFORE_SAMPLES * time_ms for time_ms in times_ms)
    screened = [time_ms for time_ms in times_ms if time_ms <= schedule.cutoff * best_ms]
    tried_ms += sum(schedule.screen * _sample_ms(time_ms) for time_ms in screened)
    raced_ms = _race_ms([time_ms for time_ms in screened if time_ms <= schedule.keep * best_ms], schedule)
    return PROBLEM_S + CANDIDATE_S * len(times_ms) + (tried_ms + raced_ms) / 1e3


def rough_seconds(problem: ProblemDescription, device: Device, effort: Effort) -> float:
    """The same from the problem's size alone, for putting many problems in order."""
    floor_ms = _USUAL_SLOWNESS * _floor_ms(problem, device)
    return measuring_seconds([floor_ms * _USUAL_STEP**i for i in range(_USUAL_CANDIDATES)], effort)


def _floor_ms(problem: ProblemDescription, device: Device) -> float:
    """Least time by the device's nominal ceilings."""
    dtype = max((operand.tensor.dtype for operand in problem.operands), key=lambda dtype: dtype.itemsize)
    arithmetic_s = problem.flops / device.peak_flops_per_s(dtype, problem.math, tensor_cores=True)
    return 1e3 * max(arithmetic_s, problem.bytes / device.bandwidth_bytes_per_s)


def _race_ms(times_ms: list[float], schedule: Schedule) -> float:
    """Milliseconds of the halving rounds and of the final."""
    field_ = sorted(times_ms)
    total_ms, taken = 0.0, schedule.screen
    for count in schedule.rounds:
        if len(field_) <= schedule.finalists:
            break
        affordable = _affordable(field_, count, schedule)
        total_ms += max(0, affordable - taken) * sum(map(_sample_ms, field_))
        taken = max(taken, affordable)
        field_ = field_[: max(schedule.finalists, -(-len(field_) // 2))]
    finalists = field_[: schedule.finalists]
    return total_ms + _affordable(finalists, schedule.blocks, schedule) * sum(map(_sample_ms, finalists))


def _affordable(times_ms: list[float], count: int, schedule: Schedule) -> int:
    each_ms = sum(map(_sample_ms, times_ms))
    return max(schedule.screen, min(count, int(schedule.round_ms / each_ms)))


def _sample_ms(time_ms: float) -> float:
    return max(_SAMPLE_MS, 2 * time_ms)
