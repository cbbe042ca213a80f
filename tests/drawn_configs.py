"""Random valid configurations of a solver: large spaces take seconds to list."""

from __future__ import annotations

import random

from miofind.device import Device
from miofind.problem import ProblemDescription
from miofind.solution import Config
from miofind.solver import Solver


def drawn(solver: Solver, problem: ProblemDescription, device: Device, count: int) -> list[Config]:
    """Up to `count` configurations, the same in every run: steps of a walk from the default ones."""
    generator = random.Random(problem.network_config)
    defaults = solver.default_configs(problem, device)
    found: dict[Config, None] = {}
    for _ in range(100 * count):
        values = dict(generator.choice([*defaults, *found]))
        for name in generator.sample(sorted(values), generator.randint(1, 3)):
            values[name] = generator.choice(solver.parameters[name])
        config = Config(values)
        if solver.is_valid_config(problem, device, config):
            found[config] = None
        if len(found) == count:
            break
    return list(found)
