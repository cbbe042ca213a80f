"""What a trial of a candidate finds: one run on guarded, poisoned buffers, compared with a float64 reference.

The contract of the two rigs, for CUDA devices and for the CPU place. Bounds and messages belong to `verify`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from miofind.problem import ProblemDescription
from miofind.values import Values

if TYPE_CHECKING:
    from miofind.invoker import Invoker

GUARD_BYTES = 4096
POISON = 0xFF  # every element of every dtype is a NaN that no arithmetic produces


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongElement:
    """One element that is off.

    Attributes:
        index: logical index in the output.
        got, wanted: what the candidate wrote, and the reference (rounded, in the exact gate).
        bound: largest |got - wanted| allowed.
    """

    index: tuple[int, ...]
    got: float
    wanted: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What one trial found.

    Attributes:
        checked, wrong: elements compared with the reference, and those beyond the bound.
        worst: the element furthest beyond it.
        unwritten: elements of the whole output that are NaN, which no correct run leaves.
        first_unwritten: logical index of the first of them in memory.
        damaged: what was overwritten that the run may not touch, such as "the guard band after y" or "input x".
        max_error: largest |error| / (|x| * |w|) of the checked elements.
        bound_ratio: largest share of the arithmetic's bound that an error takes beyond the output's rounding.
    """

    checked: int
    wrong: int
    worst: WrongElement | None
    unwritten: int
    first_unwritten: tuple[int, ...] | None
    damaged: tuple[str, ...]
    max_error: float
    bound_ratio: float


class Rig(ABC):
    """Buffers, inputs and references of one problem, made once and used for every candidate.

    x, w, y and the workspace lie between guard bands of 4096 bytes, at addresses that are multiples of 256.
    """

    def __init__(self, problem: ProblemDescription, seed: int) -> None:
        self.problem = problem
        self.seed = seed

    @abstractmethod
    def trial(self, invoker: Invoker, values: Values, factor: float | None) -> Findings:
        """Run a candidate once.

        Args:
            invoker: the candidate.
            values: what the inputs hold.
            factor: bound of |error| in units of sqrt(x^2 * w^2), before rounding; None where the output must equal
                the rounded reference.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    def tensor_seed(self, name: str, values: Values) -> int:
        """Seed of one input's values, 64 bits."""
        entropy = np.random.SeedSequence([self.seed, int(values), "xwy".index(name)])
        return int(entropy.generate_state(1, np.uint64)[0])

    def positions(self, values: Values) -> np.random.Generator:
        """What draws the elements to check with one set of inputs: others for each set and each seed."""
        return np.random.default_rng([self.seed, int(values)])

    def output_index(self, flat: int) -> tuple[int, ...]:
        """Logical index of the output element with that flat logical index."""
        return tuple(int(i) for i in np.unravel_index(flat, self.problem.output.shape))

    def index_in_memory(self, place: int) -> tuple[int, ...]:
        """Logical index of the output element with that place in memory."""
        output = self.problem.output
        index = [0] * len(output.shape)
        for dimension in sorted(range(len(index)), key=lambda d: (-output.strides[d], -output.shape[d])):
            stride = output.strides[dimension]
            index[dimension] = place // stride % output.shape[dimension]
        return tuple(index)
