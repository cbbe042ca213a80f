"""How far what a chooser answers lies from the best that is known, on problems that it has not seen.

Regret: the time of a pick over that of the best known candidate, cuDNN's included, less 1. Means are geometric.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from miofind.find.immediate.training.groups import network
from miofind.find.immediate.training.samples import Lesson
from miofind.find.likely import likely_places

WITHIN = 1.1
"""Of the best: what counts as a good answer."""

TOPS = (1, 2, 4, 8)
"""How many of a chooser's first candidates are measured."""

Times = Mapping[str, Sequence[float]]
"""By problem, the predicted time of each candidate that an answer may be, in the order of `Lesson.predicted`."""


@dataclass(frozen=True, slots=True)
class Regret:
    """Regrets of one chooser over some problems, as fractions.

    Attributes:
        problems: how many.
        mean, p90, p95, p99, worst: geometric mean, percentiles and the largest.
        first: share of the problems whose best was picked.
        good: share of those whose pick is within 10 % of the best.
    """

    problems: int
    mean: float
    p90: float
    p95: float
    p99: float
    worst: float
    first: float
    good: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Regret:
        """Of the picks' times over the best ones."""
        ordered = sorted(ratios)

        def at(share: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] - 1, 5)

        return Regret(
            problems=len(ordered),
            mean=round(math.expm1(statistics.fmean(map(math.log, ordered))), 5),
            p90=at(0.9),
            p95=at(0.95),
            p99=at(0.99),
            worst=at(1.0),
            first=round(sum(ratio <= 1 for ratio in ordered) / len(ordered), 4),
            good=round(sum(ratio <= WITHIN for ratio in ordered) / len(ordered), 4),
        )


GROUPINGS: dict[str, Callable[[Lesson], str]] = {
    "class": lambda lesson: lesson.kind.shape,
    "numbers": lambda lesson: lesson.kind.numbers,
    "direction": lambda lesson: lesson.kind.direction,
    "layout": lambda lesson: lesson.kind.layout,
    "network": lambda lesson: network(lesson.problem),
    "epilogue": lambda lesson: "fused" if lesson.problem.epilogue else "bare",
}


def picked(lesson: Lesson, times: Sequence[float], top: int = 1) -> float:
    """The time of the fastest of the first candidates over the best known."""
    return min(lesson.predicted[place].time_ms for place in _in_order(times)[:top]) / lesson.best_ms


def _in_order(times: Sequence[float]) -> list[int]:
    """The places of times, the least first."""
    return sorted(range(len(times)), key=lambda place: (times[place], place))


def regrets(lessons: Sequence[Lesson], times: Times) -> dict[str, object]:
    """Regrets over all lessons, measuring more of the first, and by what `GROUPINGS` tells of them."""
    judged = [lesson for lesson in lessons if lesson.problem.network_config in times]
    by_group: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for lesson in judged:
        ratio = picked(lesson, times[lesson.problem.network_config])
        for name, grouping in GROUPINGS.items():
            by_group[name][grouping(lesson)].append(ratio)
    found: dict[str, object] = {
        f"top {top}": asdict(
            Regret.of([picked(lesson, times[lesson.problem.network_config], top) for lesson in judged])
        )
        for top in TOPS
    }
    found["likely"] = asdict(Regret.of([_likely(each, times[each.problem.network_config]) for each in judged]))
    for name, groups in by_group.items():
        found[name] = {group: asdict(Regret.of(ratios)) for group, ratios in sorted(groups.items())}
    return found


def _likely(lesson: Lesson, times: Sequence[float]) -> float:
    """The time that a find of the likeliest finds over the best known."""
    order = _in_order(times)
    places = likely_places([(lesson.predicted[place].solver_id, times[place]) for place in order])
    return min(lesson.predicted[order[place]].time_ms for place in places) / lesson.best_ms


def class_regrets(lessons: Sequence[Lesson], times: Times) -> dict[str, Regret]:
    """Regrets by class of problem."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for lesson in lessons:
        ratios[lesson.kind.shape].append(picked(lesson, times[lesson.problem.network_config]))
    return {name: Regret.of(of_class) for name, of_class in sorted(ratios.items())}
