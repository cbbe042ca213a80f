"""Inputs whose magnitudes differ widely, and how far results may be off: for tests of solvers that keep their bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import DataType, ProblemDescription
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.solver.solver import Reach
from miofind.verify.accuracy import direct_error, error_bounds

_LARGE = {DataType.FLOAT16: 1.375 * 2.0**10}  # sums of its products with what lies in [1, 2) are finite
_OTHERWISE_LARGE = 1.375 * 2.0**100
_EXPONENTS = {DataType.FLOAT16: 2}
_OTHERWISE_EXPONENTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """Inputs of a problem.

    Attributes:
        what: what is uneven about them.
        inputs: values by name, in logical order; those of the problem's dtypes.
    """

    problem: ProblemDescription
    what: str
    inputs: dict[str, NDArray[np.float64]]

    def check(self, result: NDArray[Any], reach: Reach) -> None:
        """Fail where a result is further off than direct summation's bound, of what it sums or, by its reach, meets.

        Args:
            reach: PRODUCTS or INPUTS; with INPUTS each tap counts as the norm of its filter's taps of that channel.
        """
        sums = reference_on_host(self.problem, **self.inputs)
        squared = {name: values * values for name, values in self.inputs.items()}
        if reach is Reach.INPUTS:
            taps = tuple(range(2, squared["w"].ndim))
            squared["w"] = np.broadcast_to(squared["w"].sum(axis=taps, keepdims=True), squared["w"].shape)
        squares = reference_on_host(self.problem, **squared)
        bounds = error_bounds(sums, squares, direct_error(self.problem), self.problem.output.dtype)
        errors = np.abs(result.astype(np.float64) - sums)
        wrong = np.argwhere(~(errors <= bounds.total))
        assert not wrong.size, (
            f"{self.what}: {len(wrong)} of {errors.size} results are wrong, such as {tuple(wrong[0])}: "
            f"{result[tuple(wrong[0])]!r}, wanted {sums[tuple(wrong[0])]!r} within {bounds.total[tuple(wrong[0])]:.3g}"
        )


def uneven_inputs(problem: ProblemDescription, seed: int) -> Iterator[Uneven]:
    """One large value in each input, at a border or anywhere, among others of [1, 2) or among zeros; powers of two."""
    random = np.random.default_rng(seed)
    for name in problem.direction.inputs:
        shape, dtype = problem.tensor(name).shape, problem.tensor(name).dtype
        anywhere = tuple(int(random.integers(0, size)) for size in shape)
        at_border = anywhere[:2] + tuple(int(random.choice([0, size - 1])) for size in shape[2:])
        for at in (anywhere, at_border):
            for others in (1.0, 0.0):
                inputs = _signed(problem, random)
                inputs[name] *= others
                inputs[name][at] = _LARGE.get(dtype, _OTHERWISE_LARGE)
                what = f"{name}{list(at)} is {inputs[name][at]:g} among {'zeros' if others == 0 else 'ones'}"
                yield Uneven(problem=problem, what=what, inputs=inputs)
    scaled = _signed(problem, random)
    for name, values in scaled.items():
        most = _EXPONENTS.get(problem.tensor(name).dtype, _OTHERWISE_EXPONENTS)
        values *= 2.0 ** random.integers(-most, most + 1, values.shape)
    yield Uneven(problem=problem, what="values of many magnitudes", inputs=scaled)


def spoils(result: NDArray[Any], problem: ProblemDescription, inputs: dict[str, NDArray[np.float64]]) -> bool:
    """Whether results that sum nothing but zeros are anything else."""
    met = reference_on_host(problem, **{name: (values != 0).astype(np.float64) for name, values in inputs.items()})
    return bool(result[met == 0].any())


def _signed(problem: ProblemDescription, random: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """Values of magnitudes from 1 to 2, of either sign, as the problem's dtypes have them."""
    inputs = {}
    for name in problem.direction.inputs:
        tensor = problem.tensor(name)
        values = random.uniform(1, 2, tensor.shape) * random.choice([-1.0, 1.0], tensor.shape)
        inputs[name] = values.astype(numpy_dtype(tensor.dtype)).astype(np.float64)
    return inputs
