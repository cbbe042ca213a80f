"""Whether a solver's launches in NumPy compute what the reference does, each in its memory order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from helpers.in_numpy.epilogue import Array, operands_in_memory, results_of

from miofind.core.problem import Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, KernelStep

Run = Callable[[KernelStep, dict[str, Array]], None]
"""Carries out a launch on tensors by name, flat, in their memory order; the output is all NaN before."""


def check_launches(
    solver: Solver, problem: ProblemDescription, device: Device, configs: Iterable[Config], run: Run
) -> None:
    """On small integers; a solution is one launch."""
    generator = np.random.default_rng(len(problem.network_config))

    def drawn(shape: Sequence[int]) -> Array:
        return generator.integers(-3, 4, shape).astype(np.float64)

    inputs = {name: drawn(problem.tensor(name).shape) for name in problem.direction.inputs}
    operands = {each.name: drawn(each.shape) for each in problem.operands if each.name in problem.epilogue.operands}
    wanted = _in_memory(problem.output.layout, results_of(problem, inputs | operands))
    memory = {name: _in_memory(problem.tensor(name).layout, tensor).ravel() for name, tensor in inputs.items()}
    memory |= operands_in_memory(problem, operands)
    for config in configs:
        found = np.full(wanted.size, np.nan)
        (step,) = solver.solution(problem, device, config).kernels
        run(step, memory | {problem.direction.output: found})
        np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-9, atol=1e-9, err_msg=config.json)


def _in_memory(layout: Layout, tensor: Array) -> Array:
    """A tensor's elements in their memory order."""
    return np.ascontiguousarray(np.moveaxis(tensor, 1, -1 if layout.channels_last else 1))
