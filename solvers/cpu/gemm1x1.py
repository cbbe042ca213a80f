"""ConvCpuGemm1x1: an unpadded 1x1 convolution of the CPU place as one matrix product, any stride.

The input is the matrix already: nothing is unfolded. float16 and bfloat16 are computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.solver.steps import Config, ConvSolution, HostStep

# Of the BLAS ceiling, on a two-core Xeon with OpenBLAS.
_EFFICIENCY = 0.6

_Array = NDArray[Any]


def multiply(problem: ProblemDescription, config: Config, buffers: Mapping[str, _Array]) -> None:
    """Write the output of the problem; arrays have logical shapes, whatever their memory order."""
    wide = np.float64 if problem.x.dtype is DataType.FLOAT64 else np.float32
    first, second = (buffers[name].astype(wide, copy=False) for name in problem.direction.inputs)
    out = buffers[problem.direction.output]
    if problem.direction is Direction.FORWARD:
        _store(out, _channel_product(_filter(problem, second), _picked(problem, first)))
    elif problem.direction is Direction.BACKWARD_DATA:
        if any(stride > 1 for stride in problem.conv.stride):
            out[...] = 0
        _store(_picked(problem, out), _channel_product(np.swapaxes(_filter(problem, second), 1, 2), first))
    else:
        _store(out, _weights(problem, first, _picked(problem, second)))


def _picked(problem: ProblemDescription, x: _Array) -> _Array:
    """A view of the inputs that the filter meets, of the spatial shape of y."""
    pairs = zip(problem.out_spatial, problem.conv.stride, strict=True)
    spans = tuple(slice(0, (out - 1) * stride + 1, stride) for out, stride in pairs)
    return x[(slice(None), slice(None), *spans)]


def _store(out: _Array, result: _Array) -> None:
    out[...] = result.reshape(out.shape)


def _filter(problem: ProblemDescription, w: _Array) -> _Array:
    """w as (groups, k/groups, c/groups)."""
    return w.reshape(problem.groups, problem.k // problem.groups, -1)


def _channel_product(matrix: _Array, source: _Array) -> _Array:
    """matrix (groups, rows, columns) times the channels of source (n, groups * columns, *spatial)."""
    groups, rows, columns = matrix.shape
    n, spatial = source.shape[0], source.shape[2:]
    if groups == 1 and source.strides[1] == source.itemsize and columns > 1:
        pixels = np.moveaxis(source, 1, -1).reshape(-1, columns)
        return np.moveaxis((pixels @ matrix[0].T).reshape(n, *spatial, rows), -1, 1)
    product: _Array = matrix @ source.reshape(n, groups, columns, -1)
    return product.reshape(n, groups * rows, *spatial)


def _weights(problem: ProblemDescription, dy: _Array, x: _Array) -> _Array:
    """dy times x transposed, summed over images and pixels: (groups, k/groups, c/groups)."""
    groups = problem.groups
    # (groups, channels, n * pixels): one product sums over the batch too.
    dy_rows, x_rows = (
        np.moveaxis(t.reshape(problem.n, groups, t.shape[1] // groups, -1), 0, 2).reshape(
            groups, t.shape[1] // groups, -1
        )
        for t in (dy, x)
    )
    product: _Array = dy_rows @ np.swapaxes(x_rows, 1, 2)
    return product


class ConvCpuGemm1x1(Solver):
    """A 1x1 convolution as a BLAS product of the filter with the channels of each pixel."""

    id = "ConvCpuGemm1x1"
    algorithm = Algorithm.GEMM
    keys = (KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(DataType), layouts=frozenset(Layout)),)
    is_dynamic = True

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (
            *(
                ProblemDescription.convolution(x=(2, 8, 7, 5), w=(4, 4, 1, 1), stride=2, groups=2, direction=direction)
                for direction in Direction
            ),
            ProblemDescription.convolution(x=(2, 8, 6, 5), w=(4, 8, 1, 1), layout=Layout.NHWC),
            ProblemDescription.convolution(x=(1, 3, 20), w=(5, 3, 1), dtype=DataType.FLOAT16),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if not problem.is_1x1:
            return Applicability(f"serves unpadded filters of one tap, not {problem.filter} with padding or more taps")
        return APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return (Config(),)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        ceiling = device.peak_flops_per_s(problem.x.dtype, tensor_cores=False)
        return 0.03 + 1e3 * (problem.flops / (_EFFICIENCY * ceiling) + 2 * problem.bytes / device.bandwidth_bytes_per_s)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(HostStep(module="miofind.solvers.cpu.gemm1x1", function="multiply"),))


SOLVERS = (ConvCpuGemm1x1(),)
