"""The search over one problem's configurations: what to measure next, given what was measured.

Driven by `propose` and `learn`; it knows no device, clock or database. A space of few configurations is covered. A
larger one is opened by its defaults, by what won at near problems and by the best estimates, then bred: children of
the best measured, by mutation and crossover, of which the estimate chooses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from miofind.solver.candidate import Candidate, Outcome
from miofind.solver.steps import Config, ConfigValue

EXHAUSTIVE = 64
"""A solver's space of at most so many configurations is measured whole."""
ROUND = 16
"""Candidates of a round after the first, which takes all that open a space."""
DEFAULT_PATIENCE = 4
FINALISTS = 12

_GAIN = 0.99
# A solver within this factor of the best is still in the running: its gains renew the patience.
_CLOSE = 1.5
_OPENING = 12
_ELITE = 8
# Every fourth candidate after the opening is the next by estimate, so that a misled population is not the only guide.
_LISTED_EVERY = 4
_DRAWS = 3
_ATTEMPTS = 96
_SHARPNESS = 4
_LEAST_WEIGHT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The configurations of one solver that a request allows.

    Attributes:
        seeds: measured first: the defaults, then what won at near problems.
        listed: further ones, the best estimates first; with `seeds` the whole space where there are few.
        is_whole: `seeds` and `listed` are all there is.
        parameters: ordered values of each parameter; {} where configurations come from a list alone.
        admits: whether a configuration is valid and within the caller's limits.
        estimate_ms: expected time of a valid configuration.
    """

    solver_id: str
    seeds: tuple[Config, ...]
    listed: tuple[Config, ...]
    is_whole: bool
    parameters: Mapping[str, Sequence[ConfigValue]]
    admits: Callable[[Config], bool]
    estimate_ms: Callable[[Config], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A configuration that ran, and its time."""

    time_ms: float
    config: Config


@dataclass(slots=True, kw_only=True)
class _Arm:
    """What was tried of one solver's space; named for the arm of a bandit.

    Attributes:
        order: the seeds and the listed, each once.
        tried: JSON texts of all that was proposed or known before.
        measured: what ran, fastest first.
        proposals, bred: counts; each child has a random sequence of its own, so that it depends on its parents alone.
    """

    space: Space
    seed: int
    order: tuple[Config, ...]
    tried: set[str] = field(default_factory=set)
    measured: list[_Measured] = field(default_factory=list)
    position: int = 0
    proposals: int = 0
    bred: int = 0
    is_exhausted: bool = False

    @property
    def best_ms(self) -> float:
        return self.measured[0].time_ms if self.measured else math.inf

    @property
    def seeds_left(self) -> int:
        return sum(config.json not in self.tried for config in self.space.seeds[self.position :])

    def copy(self) -> _Arm:
        """One that goes its own way."""
        return _Arm(
            space=self.space,
            seed=self.seed,
            order=self.order,
            tried=set(self.tried),
            measured=list(self.measured),
            position=self.position,
            proposals=self.proposals,
            bred=self.bred,
            is_exhausted=self.is_exhausted,
        )

    def has_run(self, config: Config) -> bool:
        return any(item.config == config for item in self.measured)

    def note(self, config: Config, time_ms: float | None) -> None:
        """Take in that a configuration was tried, and its time unless it failed; replaces what was known of it."""
        self.tried.add(config.json)
        self.measured = [item for item in self.measured if item.config != config]
        if time_ms is not None:
            self.measured.append(_Measured(time_ms=time_ms, config=config))
            self.measured.sort(key=lambda item: (item.time_ms, item.config.json))
            self.is_exhausted = False

    def propose(self) -> Config | None:
        """The next configuration, counted as tried from now on; None where there is none left."""
        is_opening = self.space.is_whole or self.position < len(self.space.seeds) + _OPENING
        sources = [self._child, self._next_listed]
        if is_opening or self.proposals % _LISTED_EVERY == 0:
            sources.reverse()
        config = sources[0]()
        if config is None:  # one without parameters is false
            config = sources[1]()
        if config is None:
            self.is_exhausted = True
            return None
        self.proposals += 1
        self.tried.add(config.json)
        return config

    def _next_listed(self) -> Config | None:
        while self.position < len(self.order):
            config = self.order[self.position]
            self.position += 1
            if config.json not in self.tried:
                return config
        return None

    def _child(self) -> Config | None:
        """The child with the best estimate of a few new ones; None where the best measured have no new children."""
        if self.space.is_whole or not self.measured or not self.space.parameters:
            return None
        chance = random.Random(f"{self.seed}:{self.space.solver_id}:{self.bred}")
        self.bred += 1
        elite = [item.config for item in self.measured[:_ELITE]]
        drawn: dict[str, Config] = {}
        for _ in range(_ATTEMPTS):
            child = self._drawn(chance, elite)
            if child.json in self.tried or child.json in drawn or not self.space.admits(child):
                continue
            drawn[child.json] = child
            if len(drawn) == _DRAWS:
                break
        return min(drawn.values(), key=self.space.estimate_ms) if drawn else None

    def _drawn(self, chance: random.Random, elite: list[Config]) -> Config:
        """A crossover of two of the best, or one of them with one or two parameters changed."""
        first, second = _parent(chance, elite), _parent(chance, elite)
        values = dict(first)
        if first != second and chance.random() < 0.3:
            for name in self.space.parameters:
                if chance.random() < 0.5:
                    values[name] = second[name]
            return Config(values)
        mutable = [name for name, choices in self.space.parameters.items() if len(choices) > 1]
        for name in chance.sample(mutable, min(len(mutable), chance.choice((1, 1, 2)))):
            values[name] = _other(chance, self.space.parameters[name], values[name])
        return Config(values)


def _parent(chance: random.Random, elite: list[Config]) -> Config:
    """One of the best: the better of two drawn."""
    return elite[min(chance.randrange(len(elite)), chance.randrange(len(elite)))]


def _other(chance: random.Random, choices: Sequence[ConfigValue], value: ConfigValue) -> ConfigValue:
    """Another value: as often a neighbour in the parameter's order as any."""
    at = list(choices).index(value)
    near = [i for i in (at - 1, at + 1) if 0 <= i < len(choices)]
    if chance.random() < 0.5:
        return choices[chance.choice(near)]
    return choices[(at + chance.randrange(1, len(choices))) % len(choices)]


class Search:
    """Proposes candidates of one problem round by round. Equal spaces, seed and outcomes give equal proposals.

    After the seeds, a round is dealt one candidate at a time to the solver with the highest w / (1 + trials), where
    w = (best time / the solver's best time) ** 4: a solver that is 1.2 times slower gets half the trials, one that is
    twice slower a sixteenth. This is softmax selection with preferences -4 ln(time), apportioned by highest averages
    rather than drawn.

    A search ends when every space is covered or has no new children, or after `patience` rounds in which no solver
    near the best gained 1 %; spaces that are to be covered whole are covered even then.

    Args:
        spaces: one a solver.
        trials: candidates at most, those known before included; None for no limit.
        patience: rounds.
        known: times of what was measured before, None for what failed; proposed no more.

    Source: softmax selection: Sutton and Barto, Reinforcement Learning, 2nd edition, section 2.8; highest averages:
    D'Hondt. Children chosen by estimate among the bred: Zheng et al., Ansor (OSDI 2020), section 5.1.
    """

    def __init__(
        self,
        network_config: str,
        spaces: Iterable[Space],
        *,
        trials: int | None = None,
        patience: int | None = None,
        seed: int = 0,
        known: Mapping[Candidate, float | None] | None = None,
    ) -> None:
        self._network_config = network_config
        self._trials = math.inf if trials is None else trials
        self._patience = DEFAULT_PATIENCE if patience is None else patience
        self._arms = [
            _Arm(space=space, seed=seed, order=tuple(dict.fromkeys((*space.seeds, *space.listed)))) for space in spaces
        ]
        self._by_solver = {arm.space.solver_id: arm for arm in self._arms}
        self._rounds_without_gain = 0
        self._is_complete = False
        for candidate, time_ms in (known or {}).items():
            arm = self._by_solver.get(candidate.solver_id)
            if arm is not None:
                arm.note(candidate.config, time_ms if arm.space.admits(candidate.config) else None)
        self._reference_ms = {arm.space.solver_id: arm.best_ms for arm in self._arms}

    @property
    def best_ms(self) -> float:
        """The least time so far, infinite before the first."""
        return min((arm.best_ms for arm in self._arms), default=math.inf)

    @property
    def trials(self) -> int:
        """Candidates proposed or known before."""
        return sum(len(arm.tried) for arm in self._arms)

    @property
    def is_complete(self) -> bool:
        """Whether the search came to its own end: no proposal is left that it would make without a limit of trials."""
        return self._is_complete

    def propose(self) -> tuple[Candidate, ...]:
        """The candidates of the next round, likely best first; () when the search is over."""
        batch = self._dealt(self._arms)
        if not batch:
            self._is_complete = self.trials < self._trials or not self._dealt(self._copies(), limited=False)
        return batch

    def likely_next(self) -> tuple[Candidate, ...]:
        """What `propose` would give if nothing were learned of what runs now: worth compiling ahead."""
        return self._dealt(self._copies())

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Take in what became of a round's candidates, in any order."""
        self.settle(outcomes)
        gained = False
        for arm in self._arms:
            if arm.best_ms <= _GAIN * self._reference_ms[arm.space.solver_id] and arm.measured:
                self._reference_ms[arm.space.solver_id] = arm.best_ms
                gained = gained or arm.best_ms <= _CLOSE * self.best_ms
        self._rounds_without_gain = 0 if gained else self._rounds_without_gain + 1

    def settle(self, outcomes: Iterable[Outcome]) -> None:
        """Take in the times of a last race. They replace those of the rounds, and are neither gains nor a round."""
        for outcome in sorted(outcomes, key=lambda outcome: outcome.candidate.id):
            timing = outcome.timing if outcome.status.usable else None
            arm = self._by_solver.get(outcome.candidate.solver_id)
            if arm is not None:
                arm.note(outcome.candidate.config, timing.time_ms if timing else None)

    @property
    def fastest(self) -> Candidate | None:
        """The fastest of all so far, None where nothing ran."""
        arm = min(self._arms, key=lambda arm: arm.best_ms, default=None)
        return self._candidate(arm.space.solver_id, arm.measured[0].config) if arm and arm.measured else None

    def finalists(self) -> tuple[Candidate, ...]:
        """What a last race should decide between: the fastest solver's first default, then the fastest of all."""
        limit = _CLOSE * self.best_ms
        found = [(item, arm.space.solver_id) for arm in self._arms for item in arm.measured if item.time_ms <= limit]
        found.sort(key=lambda pair: (pair[0].time_ms, pair[1], pair[0].config.json))
        close = [self._candidate(solver_id, item.config) for item, solver_id in found]
        if not close:
            return ()
        fastest = self._by_solver[close[0].solver_id]
        first = [
            self._candidate(close[0].solver_id, config) for config in fastest.space.seeds[:1] if fastest.has_run(config)
        ]
        return tuple(dict.fromkeys([*first, *close[:FINALISTS]]))

    def _candidate(self, solver_id: str, config: Config) -> Candidate:
        return Candidate(network_config=self._network_config, solver_id=solver_id, config=config)

    def _copies(self) -> list[_Arm]:
        return [arm.copy() for arm in self._arms]

    def _dealt(self, arms: Sequence[_Arm], *, limited: bool = True) -> tuple[Candidate, ...]:
        """A round of candidates, taken from the arms."""
        left = self._trials - sum(len(arm.tried) for arm in arms) if limited else math.inf
        size = min(left, max(ROUND, sum(arm.seeds_left for arm in arms)))
        patient = self._rounds_without_gain < self._patience
        dealt: list[tuple[float, Candidate]] = []
        running = [arm for arm in arms if not arm.is_exhausted and (patient or arm.space.is_whole or arm.seeds_left)]
        while len(dealt) < size and running:
            arm = max(running, key=lambda arm: (arm.seeds_left > 0, self._score(arm)))
            config = arm.propose()
            if config is None:
                running.remove(arm)
            else:
                estimate_ms = arm.space.estimate_ms(config)
                dealt.append((estimate_ms, self._candidate(arm.space.solver_id, config)))
        return tuple(candidate for _, candidate in sorted(dealt, key=lambda item: (item[0], item[1].id)))

    def _score(self, arm: _Arm) -> float:
        """What the next candidate goes by: the promise of a solver over the candidates it had."""
        weight = 1.0
        if arm.tried and self.best_ms < math.inf:
            weight = max(_LEAST_WEIGHT, (self.best_ms / arm.best_ms) ** _SHARPNESS)
        return weight / (1 + len(arm.tried))
