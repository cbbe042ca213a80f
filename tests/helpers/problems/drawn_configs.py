"""Random valid configurations of a solver: large spaces take seconds to list. Which kinds wgmma's solver has."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping

from miofind.core.problem import Direction, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, ConfigValue
from miofind.solvers.common.wgmma_product import NchwTensors, WgmmaProduct

WGMMA_TILINGS: dict[str, dict[str, ConfigValue]] = {
    "alone": {"splits": 1, "cluster": "1x1x1", "swapped": 0},
    "swapped": {"rows": 1, "splits": 1, "cluster": "1x1x1", "swapped": 1},
    "split": {"cluster": "1x1x1", "swapped": 0, "splits": 2},
    **{
        f"cluster {cluster}": {"splits": 1, "cluster": cluster, "swapped": 0}
        for cluster in ("2x1x1", "1x2x1", "1x1x2", "1x1x4", "1x1x8")
    },
    **{f"split cluster {cluster}": {"splits": 4, "cluster": cluster, "swapped": 0} for cluster in ("2x1x1", "1x2x1")},
}
"""What configurations of ConvImplicitGemmWgmma have in common that take the same way through its kernel."""


def lacking_tilings(problem: ProblemDescription) -> set[str]:
    """Names in WGMMA_TILINGS that no configuration of a problem has, however many tiles and steps it has."""
    is_weights = problem.direction is Direction.BACKWARD_WEIGHTS
    is_strided = problem.direction is Direction.BACKWARD_DATA and max(problem.conv.stride) > 1
    lacking = {"swapped"} if is_weights or problem.math is MathMode.TF32 else set()
    if is_strided or WgmmaProduct.of(problem).nchw is not NchwTensors.NONE:
        lacking |= {name for name in WGMMA_TILINGS if name == "swapped" or name.endswith(("2x1x1", "1x2x1"))}
    if is_weights and problem.groups > 1 and problem.k // problem.groups % 64:
        lacking |= {"alone", "cluster 2x1x1", "cluster 1x2x1"}  # boxes would be stored into the next group
    return lacking


@functools.lru_cache(maxsize=16)
def _defaults(solver: Solver, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
    """Where walks begin: solvers rank hundreds of configurations for it, and a problem is asked for many walks."""
    return solver.default_configs(problem, device)


def drawn(
    solver: Solver,
    problem: ProblemDescription,
    device: Device,
    count: int,
    held: Mapping[str, ConfigValue] | None = None,
) -> list[Config]:
    """Up to `count` configurations, the same in every run: steps of a walk from the default ones.

    Args:
        held: values that all of them have.
    """
    generator = random.Random(problem.network_config)
    defaults = _defaults(solver, problem, device)
    found: dict[Config, None] = {}
    for _ in range(100 * count):
        values = dict(generator.choice([*defaults, *found]))
        for name in generator.sample(sorted(values), generator.randint(1, 3)):
            values[name] = generator.choice(solver.parameters[name])
        config = Config(values | dict(held or {}))
        if solver.is_valid_config(problem, device, config):
            found[config] = None
        if len(found) == count:
            break
    return list(found)


def spread(
    solver: Solver, problem: ProblemDescription, device: Device, count: int, *, defaults: int | None = None
) -> list[Config]:
    """The first default configurations, all where `defaults` does not limit them, and `count` others of all there are,
    the same in every run."""
    every = list(solver.configs(problem, device))
    chosen = random.Random(len(every)).sample(every, min(count, len(every)))
    return list(dict.fromkeys([*solver.default_configs(problem, device)[:defaults], *chosen]))


def drawn_wgmma(
    solver: Solver, problem: ProblemDescription, device: Device, count: int, each: int
) -> dict[Config, None]:
    """`count` configurations of ConvImplicitGemmWgmma, and up to `each` of every kind of tiling."""
    found = dict.fromkeys(drawn(solver, problem, device, count))
    for held in WGMMA_TILINGS.values():
        found |= dict.fromkeys(drawn(solver, problem, device, each, held))
    return found
