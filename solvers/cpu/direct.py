"""ConvCpuDirect: the float64 reference as a solver of the CPU place.

Sums in float64 and rounds once to the dtype of the output: the most accurate answer, and the slowest. Serves every
problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.reference.convolution import reference_on_host, round_once
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.solver.steps import Config, ConvSolution, HostStep

# Of the float64 BLAS ceiling: one small product a filter tap, and copies of each window. Two-core Xeon.
_EFFICIENCY = 0.3


def convolve(problem: ProblemDescription, config: Config, buffers: Mapping[str, NDArray[Any]]) -> None:
    """Write the output of the problem; arrays have logical shapes, whatever their memory order."""
    inputs = {name: buffers[name] for name in problem.direction.inputs}
    buffers[problem.direction.output][...] = round_once(reference_on_host(problem, **inputs), problem.output.dtype)


class ConvCpuDirect(Solver):
    """Direct summation in float64 on the host, one tap of the filter at a time."""

    id = "ConvCpuDirect"
    algorithm = Algorithm.DIRECT
    keys = (KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(DataType), layouts=frozenset(Layout)),)
    is_dynamic = True

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (
            *(
                ProblemDescription.convolution(
                    x=(2, 4, 7, 6), w=(6, 2, 3, 2), padding=((1, 0), (0, 2)), stride=2, groups=2, direction=direction
                )
                for direction in Direction
            ),
            ProblemDescription.convolution(x=(1, 3, 20), w=(5, 3, 7), dilation=2, dtype=DataType.FLOAT64),
            ProblemDescription.convolution(x=(1, 2, 4, 5, 6), w=(2, 2, 3, 3, 3), padding=1, dtype=DataType.BFLOAT16),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return (Config(),)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        ceiling = device.peak_flops_per_s(DataType.FLOAT64, tensor_cores=False)
        return 0.05 + 1e3 * (problem.flops / (_EFFICIENCY * ceiling) + 8 * problem.bytes / device.bandwidth_bytes_per_s)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(HostStep(module="miofind.solvers.cpu.direct", function="convolve"),))


SOLVERS = (ConvCpuDirect(),)
