"""What a convolution may have, such as strides and groups, and problems with it where a solver's examples have none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miofind.core.network_config import parse_network_config
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidProblemError
from miofind.solver.solver import Solver

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """One thing that a convolution may have.

    Attributes:
        is_in: whether a problem has it.
        added: the arguments of `ProblemDescription.convolution` with it.
    """

    is_in: Callable[[ProblemDescription], bool]
    added: Callable[[Arguments], Arguments]


def _dims(arguments: Arguments) -> int:
    return len(arguments["x"]) - 2


def _with_groups(arguments: Arguments) -> Arguments:
    (n, c, *spatial), (k, *rest) = arguments["x"], arguments["w"]
    groups = arguments.get("groups", 1)
    return arguments | {"x": (n, 2 * c, *spatial), "w": (2 * k, *rest), "groups": 2 * groups}


def _with_odd_sizes(arguments: Arguments) -> Arguments:
    n, c, *spatial = arguments["x"]
    return arguments | {"x": (n, c, *(size + 1 - size % 2 for size in spatial))}


FEATURES: Mapping[str, Feature] = {
    "stride": Feature(
        is_in=lambda problem: max(problem.conv.stride) > 1,
        added=lambda arguments: arguments | {"stride": (2,) * _dims(arguments)},
    ),
    "dilation": Feature(
        is_in=lambda problem: any(
            d > 1 and taps > 1 for d, taps in zip(problem.conv.dilation, problem.filter, strict=True)
        ),
        added=lambda arguments: arguments | {"dilation": (2,) * _dims(arguments)},
    ),
    "padding": Feature(
        is_in=lambda problem: max(problem.conv.pad_before) > 0,
        added=lambda arguments: arguments | {"padding": ((1, 1),) * _dims(arguments)},
    ),
    "uneven padding": Feature(
        is_in=lambda problem: problem.conv.pad_before != problem.conv.pad_after,
        added=lambda arguments: arguments | {"padding": ((1, 0),) * _dims(arguments)},
    ),
    "groups": Feature(is_in=lambda problem: problem.groups > 1, added=_with_groups),
    "batch": Feature(
        is_in=lambda problem: problem.n > 1,
        added=lambda arguments: arguments | {"x": (3, *arguments["x"][1:])},
    ),
    "odd sizes": Feature(is_in=lambda problem: all(size % 2 for size in problem.spatial), added=_with_odd_sizes),
}


def derived_problems(solver: Solver, device: Device) -> Iterator[tuple[str, ProblemDescription]]:
    """For each direction and feature that a solver's examples lack, the smallest example with it that it accepts.

    Yields:
        The feature's name and the problem; nothing for what the solver refuses with all of its examples.
    """
    examples = [problem for problem in solver.examples() if solver.applicability(problem, device)]
    smallest_first = sorted(examples, key=lambda problem: problem.flops)
    directions = dict.fromkeys(problem.direction for problem in examples)
    for direction, (name, feature) in itertools.product(directions, FEATURES.items()):
        own = [problem for problem in smallest_first if problem.direction is direction]
        if any(map(feature.is_in, own)):
            continue
        for example in own:
            made = _with_feature(feature, example)
            if made is not None and solver.applicability(made, device):
                yield name, made
                break


def _with_feature(feature: Feature, problem: ProblemDescription) -> ProblemDescription | None:
    """The problem with the feature, None where there is no such convolution."""
    try:
        made = ProblemDescription.convolution(**feature.added(parse_network_config(problem.network_config)))
    except InvalidProblemError:
        return None
    return made if feature.is_in(made) else None
