"""A few small examples of every solver of GPUs, for tests that compute all of them on the host."""

from __future__ import annotations

from collections.abc import Iterator

from miofind.core.problem import ProblemDescription
from miofind.device.device import Place
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

_MOST_ELEMENTS = 1 << 20
_PROBLEMS = 6


def small_examples() -> Iterator[tuple[Solver, ProblemDescription]]:
    """Solvers with bare problems whose tensors have at most 2**20 elements."""
    for solver in Registry.default().values():
        if any(key.place is Place.CUDA for key in solver.keys):
            bare = [p for p in solver.examples() if not p.epilogue]
            small = [p for p in bare if max(t.size for t in (p.x, p.w, p.y)) <= _MOST_ELEMENTS]
            yield from ((solver, problem) for problem in small[:_PROBLEMS])
