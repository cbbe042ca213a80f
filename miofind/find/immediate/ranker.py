"""Times of candidates that nothing was measured of, as a device's model has them, and how sure they are.

Trees speak of problems like those they were trained with; of others, of solvers that changed since, and without a
model of the device, it is the table of medians, then the solvers' estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.find.immediate.features import Columns, Guess
from miofind.find.immediate.kinds import Kind, position
from miofind.find.immediate.model import Calibration, Model, Trees
from miofind.solver.facts import SolverFacts
from miofind.solver.registry import inner_id
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

MOST_RANKED = 10
"""Candidates of a problem that trees are asked of: those that the table has first."""

_STEP = 1e-6
_MOST_LOG2 = 60.0  # of a time in milliseconds, whatever a model says


class Estimated(NamedTuple):
    """A candidate and its solver's estimate."""

    solver: Solver
    config: Config
    estimate_ms: float


class Prediction(NamedTuple):
    """What is predicted of a candidate.

    Attributes:
        time_ms: how long it takes.
        confidence: how often such a prediction is within 10 % of the best; None where nobody has measured that.
    """

    time_ms: float
    confidence: float | None


class Ranker:
    """Predictions for a device.

    Args:
        model: of the device's kind, or one like it; None for plain estimates.
        is_of_kind: whether it is of the device's own kind: else nobody has measured how sure it is.
    """

    def __init__(self, model: Model | None, *, is_of_kind: bool = True) -> None:
        self.model = model
        self.is_of_kind = is_of_kind
        self._columns = Columns(model.trees.names) if model is not None and model.trees is not None else None

    def is_stale(self, solver: Solver) -> bool:
        """Whether the model knows a solver in another version than it has."""
        return self._version(solver) not in (None, solver.version)

    def knows(self, solver: Solver | SolverFacts) -> bool:
        """Whether the model was trained with a solver as it is."""
        return self._version(solver) == solver.version

    def _version(self, solver: Solver | SolverFacts) -> int | None:
        """That of a solver that the model was trained with; a composed form has the one of the solver it is made of."""
        return self.model.solvers.get(inner_id(solver.id)) if self.model is not None else None

    def reaches(self, problem: ProblemDescription) -> bool:
        """Whether a model of the device's kind was trained with problems like one; its epilogue plays no part."""
        trees = self.model.trees if self.model is not None and self.is_of_kind else None
        return trees is not None and trees.reaches(Kind.of(problem), position(problem))

    def winners_near(self, problem: ProblemDescription) -> frozenset[str] | None:
        """The solvers that were the fastest of near problems; None where nobody knows, as of another kind of device."""
        trees = self.model.trees if self.model is not None and self.is_of_kind else None
        return None if trees is None else trees.winners.near(Kind.of(problem), position(problem), trees.reach)

    def predictions(
        self, problem: ProblemDescription, device: Device, candidates: Sequence[Estimated]
    ) -> list[Prediction]:
        """What is predicted of candidates, in their order."""
        model = self.model
        if model is None or not candidates:
            return [Prediction(candidate.estimate_ms, None) for candidate in candidates]
        kind, trees = Kind.of(problem), model.trees
        table = model.table.factors(kind)
        solvers = {candidate.solver for candidate in candidates}
        factors = {solver.id: table.get(inner_id(solver.id), 1.0) for solver in solvers if self.knows(solver)}
        known = [place for place, candidate in enumerate(candidates) if candidate.solver.id in factors]
        guesses = [
            Guess(solver.id, config, estimate_ms, factors.get(solver.id, 1.0) * estimate_ms)
            for solver, config, estimate_ms in candidates
        ]
        if trees is None or not known or not trees.reaches(kind, position(problem)):
            calibration = model.table_calibration if len(known) == len(candidates) else model.estimate_calibration
            return self._calibrated([guess.table_ms for guess in guesses], calibration)
        times = [guess.table_ms for guess in guesses]
        for place, time_ms in self._learnt(trees, problem, device, guesses, known).items():
            times[place] = time_ms
        return self._calibrated(times, trees.calibration)

    def _learnt(
        self, trees: Trees, problem: ProblemDescription, device: Device, guesses: Sequence[Guess], known: list[int]
    ) -> dict[int, float]:
        """By place, the times of those candidates that trees are asked of, and of the rest behind them."""
        assert self._columns is not None
        ordered = sorted(known, key=lambda place: guesses[place].table_ms)
        asked = [guesses[place] for place in ordered[:MOST_RANKED]]
        rows = self._columns.matrix(problem, device, asked)
        times, ranks = trees.sums(rows)
        logs = np.array([math.log2(max(guess.table_ms, 1e-30)) for guess in asked]) + times
        logs = logs.clip(-_MOST_LOG2, _MOST_LOG2)
        order = (logs - trees.rank_weight * ranks).argsort(kind="stable")
        # Times are those of the one forest, in the order of both; what has equal ones keeps that order.
        times_ms = 2.0 ** np.sort(logs) * (1 + _STEP * np.arange(len(logs)))
        found = {ordered[place]: time_ms for place, time_ms in zip(order.tolist(), times_ms.tolist(), strict=True)}
        last, rest = float(times_ms[-1]), enumerate(ordered[MOST_RANKED:], 1)
        return found | {place: max(last * (1 + _STEP * behind), guesses[place].table_ms) for behind, place in rest}

    def _calibrated(self, times: Sequence[float], calibration: Calibration) -> list[Prediction]:
        """Predictions, each as sure as it is ahead of the best other one."""
        first, second = [*sorted(times)[:2], math.inf][:2]
        factor = 2.0**calibration.bias
        made = []
        for time_ms in times:
            other = second if time_ms == first else first
            gap = math.log2(max(time_ms, 1e-30) / max(other, 1e-30)) if math.isfinite(other) else -math.inf
            made.append(Prediction(time_ms * factor, calibration.share(gap) if self.is_of_kind else None))
        return made
