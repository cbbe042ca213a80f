"""How close the defaults, the best estimates and the search come to the best of a solver's measured space.

Run: python benchmarks/search_quality.py PATH [ARCH] replays searches over the rows of a FindDB, without a GPU. Rows of
(nearly) whole spaces come from `miofind tune --search --patience 1000 --only ConvDirectTiled ...`; ARCH (90a) is the
architecture that estimates are made for. A regret of 1.03 is 3 % slower than the best measured.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import script

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.find.search import Search, Space
from miofind.finddb import Row, Store
from miofind.solver.candidate import Candidate, Outcome, Status, Timing
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

BUDGETS = (4, 16, 64, 128)
SEEDS = range(5)
LEAST_ROWS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured configurations of one solver and problem; replaying treats them as the whole space."""

    problem: ProblemDescription
    solver: Solver
    device: Device
    times_ms: dict[Config, float]

    @property
    def best_ms(self) -> float:
        """The least time."""
        return min(self.times_ms.values())

    def estimate_ms(self, config: Config) -> float:
        """The solver's estimate."""
        return self.solver.estimate_ms(self.problem, self.device, config)

    def by_estimate(self) -> list[Config]:
        """The configurations, best estimate first."""
        return sorted(self.times_ms, key=lambda config: (self.estimate_ms(config), config.json))

    def defaults(self) -> list[Config]:
        """The default configurations that were measured."""
        every = self.solver.default_configs(self.problem, self.device)
        return [config for config in every if config in self.times_ms]

    def regret(self, configs: Sequence[Config]) -> float:
        """How many times slower than the best the fastest of these is."""
        return min((self.times_ms[config] for config in configs), default=math.inf) / self.best_ms

    def searched(self, trials: int, seed: int) -> float:
        """The regret of a search of so many trials."""
        space = Space(
            solver_id=self.solver.id,
            seeds=tuple(self.defaults()),
            listed=tuple(self.by_estimate()),
            is_whole=False,
            parameters=self.solver.parameters,
            admits=self.times_ms.__contains__,
            estimate_ms=self.estimate_ms,
        )
        search = Search(self.problem.network_config, [space], trials=trials, patience=10**6, seed=seed)
        while batch := search.propose():
            search.learn(map(self._outcome, batch))
        return search.best_ms / self.best_ms

    def _outcome(self, candidate: Candidate) -> Outcome:
        time_ms = self.times_ms[candidate.config]
        timing = Timing(time_ms=time_ms, min_ms=time_ms, p20_ms=time_ms, p80_ms=time_ms, samples=1, protocol="replay")
        return Outcome(candidate=candidate, status=Status.OK, timing=timing)


def measured_spaces(path: Path, device: Device) -> Iterator[Measured]:
    """The spaces of a FindDB with enough rows of the solvers' present versions."""
    with Store(path, read_only=True) as store:
        for history in store.histories():
            problem = ProblemDescription.from_network_config(history.network_config)
            for solver in Registry.default().values():
                times_ms = {Config.from_json(row.config): _time(row) for row in history.rows if _is_of(row, solver)}
                if len(times_ms) >= LEAST_ROWS:
                    yield Measured(problem=problem, solver=solver, device=device, times_ms=times_ms)


def _is_of(row: Row, solver: Solver) -> bool:
    return row.usable and (row.solver_id, row.solver_version) == (solver.id, solver.version)


def _time(row: Row) -> float:
    assert row.time_ms is not None
    return row.time_ms


def table(spaces: Sequence[Measured]) -> Iterator[str]:
    """Lines of the geometric mean and the worst regret over the spaces, a line a budget."""
    yield f"{len(spaces)} spaces, {statistics.mean(len(s.times_ms) for s in spaces):.0f} configurations each"
    yield f"{'trials':>8} {'defaults':>16} {'first estimates':>16} {'search':>16}"
    for trials in BUDGETS:
        columns = (
            [space.regret(space.defaults()[:trials]) for space in spaces],
            [space.regret(space.by_estimate()[:trials]) for space in spaces],
            [space.searched(trials, seed) for space in spaces for seed in SEEDS],
        )
        yield f"{trials:>8} " + " ".join(f"{f'{_mean(c):.3f} ({max(c):.2f})':>16}" for c in columns)


def _mean(regrets: Sequence[float]) -> float:
    finite = [regret for regret in regrets if math.isfinite(regret)]
    return math.exp(statistics.mean(map(math.log, finite))) if finite else math.inf


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("path", type=Path, metavar="PATH", help="a FindDB")
    parser.add_argument("arch", type=script.arch, nargs="?", default="90a", metavar="ARCH")
    arguments = parser.parse_args()
    spaces = list(measured_spaces(arguments.path, arguments.arch))
    if not spaces:
        sys.exit(f"{arguments.path} has no problem with {LEAST_ROWS} configurations of one solver measured")
    print("\n".join(table(spaces)))


if __name__ == "__main__":
    script.run(main)
