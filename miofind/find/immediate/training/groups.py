"""Which problems are held out together: those of one network, or of one geometry."""

from __future__ import annotations

import functools
from enum import StrEnum

from miofind.core.problem import ProblemDescription
from miofind.suites import load_suite, suite_names

OTHER = "other"
"""Problems of no network that a suite names."""

_PURPOSES = ("_fused", "_training", "_train", "_server", "_infer")
_COLLECTIONS = ("wild", "wild_3d")
_BENCHMARK = "deepbench"


class Holdout(StrEnum):
    """What leaves training together, so that a model is judged by what it has not seen."""

    NETWORK = "network"
    GEOMETRY = "geometry"


def geometry(problem: ProblemDescription) -> str:
    """The name of a problem's shape, flattened; batch, direction, element type and layout play no part."""
    problem = problem.flattened
    conv = problem.conv
    shape = (problem.x.shape[1:], problem.w.shape, conv.pad_before, conv.pad_after, conv.stride, conv.dilation)
    return repr((*shape, problem.groups))


def network(problem: ProblemDescription) -> str:
    """The network whose suite has a problem's shape, the first by name of several; OTHER for none."""
    return _networks().get(geometry(problem), OTHER)


def group(problem: ProblemDescription, holdout: Holdout) -> str:
    """What a problem leaves training with."""
    return network(problem) if holdout is Holdout.NETWORK else geometry(problem)


@functools.cache
def _networks() -> dict[str, str]:
    rows = (row for name in suite_names() if name not in _COLLECTIONS for row in load_suite(name).rows)
    named = sorted({(_named(row.suite), geometry(row.problem)) for row in rows}, key=_by_name)
    found: dict[str, str] = {}
    for name, shape in named:
        found.setdefault(shape, name)
    return found


def _by_name(named: tuple[str, str]) -> tuple[bool, tuple[str, str]]:
    """Networks first, then DeepBench, which has shapes of several."""
    return named[0].startswith(_BENCHMARK), named


def _named(suite: str) -> str:
    for purpose in _PURPOSES:
        suite = suite.removesuffix(purpose)
    return suite
