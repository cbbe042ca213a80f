"""Fits a model to lessons, and judges it on what it has not seen.

Each group of problems is predicted by a model of all other groups: what is written is a model of all lessons, with what
these showed of such models. Lessons of other kinds of GPU may teach, too: judged are those of the model's own alone.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from miofind.device.device import Device
from miofind.errors import ModelError
from miofind.find.immediate.features import Columns, Guess, feature_names, problem_features
from miofind.find.immediate.kinds import position
from miofind.find.immediate.model import Calibration, Model, Trees
from miofind.find.immediate.ranker import Estimated, Ranker
from miofind.find.immediate.table import LEAST_PROBLEMS, MOST_LOG2, Ratio, Table
from miofind.find.immediate.training.boosting import rank_forest, time_forest
from miofind.find.immediate.training.evaluation import WITHIN, Regret, Times, class_regrets, picked, regrets
from miofind.find.immediate.training.groups import Holdout, group
from miofind.find.immediate.training.samples import Lesson
from miofind.find.immediate.winners import LEAST, MOST_SOLVERS, Winners, Won, fastest
from miofind.solver.registry import Registry, inner_id

logger = logging.getLogger(__name__)

RANK_WEIGHT = 0.4
WORST_OF_ESTIMATES = 1.5
"""How much larger than the estimates' the regret of a class of problems may be."""

_NOISE = 0.01  # regrets below are those of times that were measured on different days
_LEAST_OF_CLASS = 20
_REACH_QUANTILE = 0.99  # of two networks' shapes trees are better than the table as far apart as they lie
_EDGES = (-0.4, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
_LEAST_WEIGHT = 1 / 8
_COST_OF_WINNERS = 0.002


@dataclass(frozen=True)
class Judged:
    """What held-out problems show, as `Times` of each chooser.

    Attributes:
        lessons: the problems that were judged: each solver that serves them has a known time.
        table, model: None where the model is a table.
        asked: the model's, of the solvers alone that are worth asking; what others have is infinite.
    """

    lessons: tuple[Lesson, ...]
    estimates: Times
    table: Times
    model: Times | None
    asked: Times | None = None

    @cached_property
    def choosers(self) -> dict[str, Times]:
        """Each chooser's predictions by its name, the simplest first."""
        found = {"estimates": self.estimates, "table": self.table}
        return found if self.model is None else found | {"trees": self.model}

    @cached_property
    def report(self) -> dict[str, object]:
        """The regrets of each chooser."""
        best: Times = {each.problem.network_config: [s.time_ms for s in each.predicted] for each in self.lessons}
        asked = {} if self.asked is None else {"trees, of winners near": self.asked}
        choosers = {"known best": best} | self.choosers | asked
        return {name: regrets(self.lessons, times) for name, times in choosers.items()}

    @property
    def has_winners(self) -> bool:
        """Whether who won at no near problem may go unasked: what is answered without them is about as good."""
        return self.asked is not None and self._mean(self.asked) <= self.mean("trees") + _COST_OF_WINNERS

    def mean(self, chooser: str) -> float:
        """The mean regret of a chooser."""
        return self._mean(self.choosers[chooser])

    def _mean(self, times: Times) -> float:
        return Regret.of([picked(each, times[each.problem.network_config]) for each in self.lessons]).mean

    def calibration(self, chooser: str) -> Calibration:
        """How far a chooser's predictions were off, and how sure they are."""
        return _calibration(self.lessons, self.choosers[chooser])

    def refuse(self) -> str:
        """Why the model is not worth shipping, "" where it is."""
        *simpler, chosen = self.choosers
        better = min(simpler, key=self.mean)
        if self.mean(chosen) > self.mean(better):
            return (
                f"on held-out problems predictions by {chosen} are {self.mean(chosen):.2%} off the best, "
                f"by {better} {self.mean(better):.2%}"
            )
        plain = class_regrets(self.lessons, self.estimates)
        for name, found in class_regrets(self.lessons, self.choosers[chosen]).items():
            most = max(_NOISE, WORST_OF_ESTIMATES * plain[name].mean)
            if found.problems >= _LEAST_OF_CLASS and found.mean > most:
                return (
                    f"on held-out problems of class {name} predictions by {chosen} are {found.mean:.2%} off the best, "
                    f"by estimates {plain[name].mean:.2%}: at most {most:.2%} are allowed"
                )
        return ""


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained.

    Attributes:
        device: what the model is of; lessons of others have features and estimates for their own.
        registry: the solvers.
        has_trees: whether it learns more than a table.
    """

    device: Device
    registry: Registry
    has_trees: bool = True

    def held_out(self, lessons: Sequence[Lesson], holdout: Holdout) -> Judged:
        """What models of all other groups predict of each group's problems, of those that the device measured.

        Raises:
            ModelError: there are fewer than two groups, or nothing to judge by.
        """
        own = self._own(lessons)
        groups, judged_groups = _grouped(lessons, holdout), _grouped(own, holdout)
        if len(judged_groups) < 2:
            count = len(judged_groups)
            raise ModelError(f"{len(own)} problems are of {count} {holdout}s: two are needed to hold one out")
        reach = self._reach(list(groups.values()))
        table: dict[str, list[float]] = {}
        learnt: dict[str, list[float]] = {}
        asked: dict[str, list[float]] = {}
        for name, held in sorted(judged_groups.items()):
            logger.info("holding out %s: %d problems", name, len(held))
            others = [lesson for other in sorted(groups.keys() - {name}) for lesson in groups[other]]
            model = self._fit(others, reach)
            table |= self._times(Ranker(replace(model, trees=None)), held)
            if self.has_trees:
                of_all = self._times(ranker := Ranker(model), held)
                learnt |= of_all
                asked |= {lesson.problem.network_config: self._asked(ranker, lesson, of_all) for lesson in held}
        judged = tuple(lesson for lesson in own if lesson.is_complete and lesson.predicted)
        if not judged:
            raise ModelError(f"of none of {len(own)} problems all solvers are known: tune more of them first")
        estimates = self._times(Ranker(None), judged)
        return Judged(judged, estimates, table, *((learnt, asked) if self.has_trees else (None,)))

    def model(self, lessons: Sequence[Lesson], judged: Judged, holdout: Holdout) -> Model:
        """A model of all lessons, as sure as held-out ones were right.

        Args:
            judged: what `held_out` gave for the same lessons.
        """
        model = self.fit(lessons, holdout)
        trees = model.trees
        if trees is not None and judged.model is not None:
            trees = replace(trees, calibration=judged.calibration("trees"))
            trees = trees if judged.has_winners else replace(trees, winners=Winners())
        return replace(
            model,
            table_calibration=judged.calibration("table"),
            estimate_calibration=judged.calibration("estimates"),
            trees=trees,
            trained_on=_hash(lessons),
            report={f"{name} regret": judged.mean(name) for name in judged.choosers}
            | {"problems": float(len(lessons)), "candidates": float(sum(len(each.samples) for each in lessons))},
        )

    def _own(self, lessons: Iterable[Lesson]) -> list[Lesson]:
        """What the device itself measured of what finds ask for."""
        return [each for each in lessons if each.device.identity == self.device.identity and each.is_asked_for]

    def fit(self, lessons: Sequence[Lesson], holdout: Holdout) -> Model:
        """A model of all lessons, of which nobody knows how sure it is."""
        return self._fit(lessons, self._reach(list(_grouped(lessons, holdout).values())))

    def _fit(self, lessons: Sequence[Lesson], reach: float) -> Model:
        taught = {inner_id(sample.solver_id) for each in lessons for sample in each.predicted}
        solvers = {name: self.registry[name].version for name in sorted(taught)}
        model = Model(
            device=self.device.identity,
            solvers=solvers,
            table=Table.of(_ratios(lessons)),
            table_calibration=Calibration(),
            estimate_calibration=Calibration(),
        )
        return replace(model, trees=self._trees(lessons, model.table, reach)) if self.has_trees else model

    def _trees(self, lessons: Sequence[Lesson], table: Table, reach: float) -> Trees:
        learnt = sorted((each for each in lessons if each.predicted), key=_key)
        guesses = [_guesses(each, table) for each in learnt]
        shared = problem_features(learnt[0].problem, self.device)
        names = feature_names(shared, [guess for each in guesses for guess in each])
        columns = Columns(names)
        rows = np.vstack(
            [columns.matrix(each.problem, each.device, g) for each, g in zip(learnt, guesses, strict=True)]
        )
        logs = [
            math.log2(sample.time_ms / guess.table_ms)
            for each, of_one in zip(learnt, guesses, strict=True)
            for sample, guess in zip(each.predicted, of_one, strict=True)
        ]
        shares = [share for each in learnt for share in _shares(each)]
        weights = [max(share, _LEAST_WEIGHT) ** 1.5 for share in shares]
        return Trees(
            names=names,
            time=time_forest(rows, logs, weights),
            rank=rank_forest(rows, [share**2 for share in shares], [len(each.predicted) for each in learnt]),
            rank_weight=RANK_WEIGHT,
            calibration=Calibration(),
            positions=_positions(learnt),
            kinds=_kinds(learnt),
            reach=reach,
            winners=_winners(learnt),
        )

    def _reach(self, groups: Sequence[Sequence[Lesson]]) -> float:
        """How far most held-out problems lie from the nearest one of another group."""
        positions = [_positions(held) for held in groups]
        every = np.concatenate(positions)
        group_of = np.repeat(np.arange(len(groups)), [len(of_group) for of_group in positions])
        apart: list[float] = []
        for each, held in zip(every, group_of, strict=True):
            others = every[group_of != held]
            apart.append(float(np.abs(others - each).max(axis=1).min()))
        return round(float(np.quantile(apart, _REACH_QUANTILE)), 4)

    def _times(self, ranker: Ranker, lessons: Iterable[Lesson]) -> dict[str, list[float]]:
        """What a ranker predicts of each lesson's candidates."""
        found = {}
        for lesson in lessons:
            candidates = [
                Estimated(self.registry[sample.solver_id], sample.config, sample.estimate_ms)
                for sample in lesson.predicted
            ]
            predicted = ranker.predictions(lesson.problem, self.device, candidates)
            found[lesson.problem.network_config] = [each.time_ms for each in predicted]
        return found

    def _asked(self, ranker: Ranker, lesson: Lesson, times: Times) -> list[float]:
        """The times of those of a lesson's candidates whose solvers are asked, infinite for others; of all if none."""
        of_all = times[lesson.problem.network_config]
        near = ranker.winners_near(lesson.problem)
        solvers = [self.registry[sample.solver_id] for sample in lesson.predicted]
        is_asked = [near is not None and (inner_id(each.id) in near or not ranker.knows(each)) for each in solvers]
        if not any(is_asked):
            return list(of_all)
        return [time_ms if asked else math.inf for time_ms, asked in zip(of_all, is_asked, strict=True)]


def _key(lesson: Lesson) -> tuple[str, str]:
    """What tells a lesson from all others."""
    return lesson.problem.network_config, lesson.device.identity


def _grouped(lessons: Iterable[Lesson], holdout: Holdout) -> dict[str, list[Lesson]]:
    groups: defaultdict[str, list[Lesson]] = defaultdict(list)
    for lesson in lessons:
        groups[group(lesson.problem, holdout)].append(lesson)
    return groups


def _ratios(lessons: Iterable[Lesson]) -> Iterable[Ratio]:
    for lesson in lessons:
        for sample in lesson.predicted:
            log2 = math.log2(sample.time_ms / sample.estimate_ms)
            yield Ratio(inner_id(sample.solver_id), lesson.kind, lesson.problem.network_config, log2)


def _guesses(lesson: Lesson, table: Table) -> list[Guess]:
    factors = table.factors(lesson.kind)
    return [
        Guess(s.solver_id, s.config, s.estimate_ms, s.estimate_ms * factors.get(inner_id(s.solver_id), 1.0))
        for s in lesson.predicted
    ]


def _shares(lesson: Lesson) -> list[float]:
    """How fast each candidate is, 1 the fastest of those that may be predicted."""
    best_ms = min(sample.time_ms for sample in lesson.predicted)
    return [best_ms / sample.time_ms for sample in lesson.predicted]


def _kinds(lessons: Iterable[Lesson]) -> frozenset[tuple[str, ...]]:
    """The kinds that enough problems are of: a find of the likeliest asks cuDNN beside about all others."""
    counts = Counter(lesson.kind.levels[0] for lesson in lessons)
    return frozenset(kind for kind, count in counts.items() if count >= LEAST_PROBLEMS)


def _positions(lessons: Iterable[Lesson]) -> NDArray[np.float32]:
    """Where the shapes of lessons lie, each once."""
    found = np.array(sorted({position(lesson.problem) for lesson in lessons}), np.float32)
    return np.round(found, 3)


def _winners(lessons: Iterable[Lesson]) -> Winners:
    """The fastest solvers of lessons; what several have of one position is taken together."""
    won: defaultdict[tuple[str, ...], defaultdict[tuple[float, ...], set[str]]] = defaultdict(lambda: defaultdict(set))
    for lesson in lessons:
        times = [(inner_id(sample.solver_id), sample.time_ms) for sample in lesson.predicted]
        won[lesson.kind.levels[0]][position(lesson.problem)] |= fastest(times)
    solvers = sorted({name for of_kind in won.values() for names in of_kind.values() for name in names})
    if len(solvers) > MOST_SOLVERS:
        logger.warning("%d solvers won, of which a model keeps %d: all will be asked", len(solvers), MOST_SOLVERS)
        return Winners()
    found = {}
    for kind, of_kind in won.items():
        if len(places := sorted(of_kind)) < LEAST:
            continue
        axes = np.round(np.array(places, np.float32).T, 3)
        bits = [sum(1 << solvers.index(name) for name in of_kind[place]) for place in places]
        found[kind] = Won(axes, np.array(bits, np.uint64))
    return Winners(tuple(solvers), found)


def _calibration(lessons: Sequence[Lesson], times: Times) -> Calibration:
    """How far predictions were off, and how often they were good, by their distance from the best other one."""
    biases = []
    hits: list[list[bool]] = [[] for _ in range(len(_EDGES) + 1)]
    for lesson in lessons:
        predicted = times[lesson.problem.network_config]
        first = min(range(len(predicted)), key=lambda place: (predicted[place], place))
        biases.append(math.log2(lesson.predicted[first].time_ms / predicted[first]))
        for place, sample in enumerate(lesson.predicted):
            others = [time_ms for at, time_ms in enumerate(predicted) if at != place]
            gap = math.log2(predicted[place] / min(others)) if others else -math.inf
            hits[sum(edge < gap for edge in _EDGES)].append(sample.time_ms <= WITHIN * lesson.best_ms)
    shares, most = [], 1.0
    for found in hits:  # a greater distance is never a better sign
        most = min(most, (sum(found) + 1) / (len(found) + 2))
        shares.append(round(most, 3))
    bias = max(-MOST_LOG2, min(MOST_LOG2, statistics.fmean(biases)))
    return Calibration(round(bias, 4), _EDGES, tuple(shares))


def _hash(lessons: Iterable[Lesson]) -> str:
    digest = hashlib.sha256()
    for lesson in sorted(lessons, key=_key):
        for sample in lesson.samples:
            fields = (*_key(lesson), sample.solver_id, sample.config.json, sample.time_ms)
            digest.update(f"{fields!r}\n".encode())
    return digest.hexdigest()
