"""Which solvers are worth asking of a problem: those that were the fastest of near problems of its kind.

To ask a solver for its candidates takes a third of a millisecond, and some seventeen serve a problem of which two may
be the fastest. Of 12,000 problems of an H200 whose networks were held out three quarters had near ones, of which 3.4
solvers were asked on average: of the 4,414 of networks all of whose candidates are known, what a model took for the
fastest of theirs was 2.15 % off the best, of all solvers' 2.12 % (geometric means); as many neighbours as 32 or 160 say
the same. Boosted trees over a problem's features, one forest a solver, left out the fastest more often: a kind
is what separates solvers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from miofind.find.immediate.kinds import Kind

NEIGHBOURS = 48
"""Problems of the same kind, the nearest, whose winners are asked."""

LEAST = 16
"""Problems of a kind, fewer of which say nothing of another one."""

WITHIN = 1.05
"""How many times the fastest solver's time another one may take to count as a winner."""

MOST_SOLVERS = 64


class Won(NamedTuple):
    """The problems of one kind.

    Attributes:
        axes: their positions (`kinds.position`), one a column.
        bits: of each the winners, bit i for the solver i of `Winners`.
    """

    axes: NDArray[np.float32]
    bits: NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Winners:
    """The fastest solvers of the problems that a model was trained with.

    Attributes:
        solvers: in the order of bits.
        kinds: the problems, by `Kind.levels[0]`.
    """

    solvers: tuple[str, ...] = ()
    kinds: Mapping[tuple[str, ...], Won] = field(default_factory=dict)

    def near(self, kind: Kind, position: Sequence[float], reach: float) -> frozenset[str] | None:
        """The solvers that were the fastest of the nearest problems of a kind.

        Args:
            reach: how far from the nearest one a problem may lie.

        Returns:
            None where nothing is known of so near a problem.
        """
        won = self.kinds.get(kind.levels[0])
        if won is None or len(won.bits) < LEAST:
            return None
        apart = np.abs(won.axes - np.array(position, np.float32)[:, None])
        if np.maximum.reduce(apart).min() > reach:
            return None
        nearest = np.add.reduce(apart * apart).argsort(kind="stable")[:NEIGHBOURS]
        bits = int(np.bitwise_or.reduce(won.bits[nearest]))
        return frozenset(name for place, name in enumerate(self.solvers) if bits >> place & 1)


def fastest(times: Iterable[tuple[str, float]]) -> frozenset[str]:
    """The solvers of a problem that count as its winners.

    Args:
        times: of candidates, each with its solver.
    """
    best: dict[str, float] = {}
    for solver_id, time_ms in times:
        best[solver_id] = min(time_ms, best.get(solver_id, time_ms))
    return frozenset(name for name, time_ms in best.items() if time_ms <= WITHIN * min(best.values()))
