"""Made-up spaces and times for tests of the search: rugged, with invalid points and an estimate of chosen quality."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from miofind.find.search import Space
from miofind.solver.candidate import Candidate, Outcome, Status, Timing
from miofind.solver.steps import Config, ConfigValue

NETWORK_CONFIG = "conv2d-forward-n1-c4-i6x6-k4-f3x3-float32-NCHW"
PARAMETERS: Mapping[str, tuple[ConfigValue, ...]] = {
    "tile_h": (1, 2, 4, 8, 16),
    "tile_w": (8, 16, 32, 64, 128),
    "tile_k": (8, 16, 32, 64),
    "thread_k": (1, 2, 4, 8),
    "channels": (1, 4, 8, 16),
    "stages": (1, 2, 3),
}


@functools.cache
def noise(*parts: object) -> float:
    """A number of the standard normal distribution that depends on the parts alone."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    u, v = (int.from_bytes(digest[i : i + 7], "big") / 2**56 for i in (0, 7))
    return math.sqrt(-2 * math.log(u + 1e-18)) * math.cos(2 * math.pi * v)


@dataclass(frozen=True)
class Landscape:
    """One solver's times: a product of penalties around a best point, of pairs of parameters, and of ruggedness.

    `estimate_noise` is the standard deviation of ln(estimate / time); infinite for an estimate that says nothing.
    """

    seed: int
    solver_id: str = "Synthetic"
    parameters: Mapping[str, tuple[ConfigValue, ...]] = field(default_factory=lambda: PARAMETERS)
    scale_ms: float = 1.0
    estimate_noise: float = math.inf

    @functools.cached_property
    def _times_ms(self) -> dict[str, float]:
        """Times that were asked for, by the text of their configuration: many searches go over one landscape."""
        return {}

    @functools.cached_property
    def _configs(self) -> tuple[Config, ...]:
        points = itertools.product(*self.parameters.values())
        every = (Config(dict(zip(self.parameters, values, strict=True))) for values in points)
        return tuple(config for config in every if self.is_valid(config))

    def at(self, config: Config) -> dict[str, float]:
        """The configuration's place in each parameter, 0 to 1."""
        return {name: values.index(config[name]) / max(1, len(values) - 1) for name, values in self.parameters.items()}

    def time_ms(self, config: Config) -> float:
        if config.json not in self._times_ms:
            self._times_ms[config.json] = self._made_up_ms(config)
        return self._times_ms[config.json]

    def _made_up_ms(self, config: Config) -> float:
        place = self.at(config)
        log = 0.0
        for name, value in place.items():
            best = 0.5 + 0.3 * max(-1.6, min(1.6, noise(self.seed, name)))
            log += 0.8 * abs(noise(self.seed, name, "weight")) * abs(value - best)
        for first, second in itertools.combinations(place, 2):
            log += 0.15 * noise(self.seed, first, second) * (place[first] - 0.5) * (place[second] - 0.5)
        return self.scale_ms * math.exp(log + 0.03 * noise(self.seed, config.json))

    def estimate_ms(self, config: Config) -> float:
        if math.isinf(self.estimate_noise):
            return self.scale_ms
        return self.time_ms(config) * math.exp(self.estimate_noise * noise(self.seed, "estimate", config.json))

    def is_valid(self, config: Config) -> bool:
        """Tiles of a bounded number of threads."""
        if set(config) != set(self.parameters):
            return False
        if "tile_h" not in config:
            return True
        threads = config["tile_h"] * config["tile_w"] * config["tile_k"] // (8 * config["thread_k"])
        return bool(32 <= threads <= 1024)

    def configs(self) -> list[Config]:
        return list(self._configs)

    def space(self, *, whole: bool = False, listed: int = 256, seeds: tuple[Config, ...] = ()) -> Space:
        every = sorted(self.configs(), key=lambda config: (self.estimate_ms(config), config.json))
        return Space(
            solver_id=self.solver_id,
            seeds=seeds or (every[len(every) // 2],),
            listed=tuple(every) if whole else tuple(every[:listed]),
            is_whole=whole,
            parameters=self.parameters,
            admits=self.is_valid,
            estimate_ms=self.estimate_ms,
        )

    def outcome(self, candidate: Candidate) -> Outcome:
        time_ms = self.time_ms(candidate.config)
        timing = Timing(time_ms=time_ms, min_ms=time_ms, p20_ms=time_ms, p80_ms=time_ms, samples=3, protocol="made-up")
        return Outcome(candidate=candidate, status=Status.OK, timing=timing)
