"""Where an infinity in an input may show in the result, for tests of solvers that do not spread it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import Direction, ProblemDescription
from miofind.reference.convolution import reference_on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Infinity:
    """Inputs of a problem, all positive, with one infinity.

    Attributes:
        name: the tensor that holds it.
        inputs: values by name, in logical order.
        met: results that sum it.
        allowed: these, and those that sum it times padding.
    """

    name: str
    inputs: dict[str, NDArray[np.float64]]
    met: NDArray[np.bool_]
    allowed: NDArray[np.bool_]

    def check(self, result: NDArray[Any]) -> None:
        """Fail where the infinity got lost, became NaN or reached another result."""
        assert np.isposinf(result[self.met]).all(), f"an infinity of {self.name} is lost, or is NaN"
        assert np.isfinite(result[~self.allowed]).all(), f"an infinity of {self.name} reaches other results"


def infinities(problem: ProblemDescription, seed: int) -> Iterator[Infinity]:
    """An infinity in each input: in its last element, at a border of its image, then anywhere."""
    generator = np.random.default_rng(seed)
    for name in problem.direction.inputs:
        shape = problem.tensor(name).shape
        anywhere, at_border = (tuple(int(generator.integers(0, size)) for size in shape) for _ in range(2))
        at_border = at_border[:2] + tuple(int(generator.choice([0, size - 1])) for size in shape[2:])
        for at in (tuple(size - 1 for size in shape), at_border, anywhere):
            yield _infinity(problem, name, at, generator)


def _infinity(problem: ProblemDescription, name: str, at: tuple[int, ...], generator: np.random.Generator) -> Infinity:
    inputs = {
        each: generator.integers(1, 3, problem.tensor(each).shape).astype(np.float64)
        for each in problem.direction.inputs
    }
    inputs[name][at] = np.inf
    only = {each: np.ones(values.shape) for each, values in inputs.items()}
    only[name] = np.zeros(inputs[name].shape)
    only[name][at] = 1
    met = reference_on_host(problem, **only) > 0
    allowed = met.copy()
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        if name == "y":
            allowed[at[1]] = True
    elif name == "w":
        k, channel = at[:2]
        group = k // (problem.k // problem.groups)
        is_forward = problem.direction is Direction.FORWARD
        allowed[:, k if is_forward else group * (problem.c // problem.groups) + channel] = True
    return Infinity(name=name, inputs=inputs, met=met, allowed=allowed)
