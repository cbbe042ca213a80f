"""ConvDirectNaive: one thread an output element, for every problem there is.

The answer of last resort: any rank, shape, group, layout and mix of dtypes, in all directions, with one compilation for
each dtype and layout. Kernels: kernels_src/direct/naive.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.geometry import geometry, geometry_defines
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer

_THREADS = 256
_MAX_BLOCKS = 2**24
# Measured on an H200, float32: 0.5 to 9 TFLOP/s of a nominal 67, 3 in the middle.
_EFFICIENCY = 0.045
_LAUNCH_MS = 0.004


class ConvDirectNaive(Solver):
    """Direct summation with one thread an output element; backward weights with one block a few elements."""

    id = "ConvDirectNaive"
    algorithm = Algorithm.DIRECT
    applies_epilogues = True
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset(DataType),
            layouts=frozenset(Layout),
            min_sm=75,
        ),
    )
    is_dynamic = True
    is_last_resort = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {"accumulate": ("float32", "float64")}
    sources = ("direct/naive.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        mixed = {"x": DataType.FLOAT16, "w": DataType.BFLOAT16, "y": DataType.FLOAT32}
        layouts = {"x": Layout.NHWC, "w": Layout.NCHW, "y": Layout.NHWC}
        return (
            *(
                ProblemDescription.convolution(
                    x=(2, 4, 9, 7), w=(6, 2, 3, 2), padding=1, stride=(2, 1), groups=2, direction=direction
                )
                for direction in Direction
            ),
            ProblemDescription.convolution(x=(1, 3, 20), w=(5, 3, 7), padding=((3, 2),), dtype=DataType.FLOAT64),
            ProblemDescription.convolution(x=(1, 2, 5, 6, 7), w=(2, 2, 3, 3, 3), dilation=2, dtype=DataType.BFLOAT16),
            ProblemDescription.convolution(x=(1, 8, 8, 8), w=(8, 8, 1, 1), dtype=mixed, layout=layouts),
            ProblemDescription.convolution(
                x=(2, 4, 9), w=(6, 2, 2), stride=3, groups=2, direction="backward_data", epilogue="residual.dgelu"
            ),
            ProblemDescription.convolution(x=(2, 4, 9), w=(6, 2, 3), groups=2, epilogue="scale.bias.channel_bias.gelu"),
            ProblemDescription.convolution(
                x=(2, 3, 5, 4), w=(7, 3, 3, 3), padding=1, dtype="float64", layout="NHWC", epilogue="bias.mish.residual"
            ),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return bool(config["accumulate"] == "float64" or problem.x.dtype is not DataType.FLOAT64)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        accumulate = "float64" if problem.x.dtype is DataType.FLOAT64 else "float32"
        return (Config.of(accumulate=accumulate),)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        dtype = DataType(config["accumulate"])
        arithmetic_s = problem.flops / (_EFFICIENCY * device.peak_flops_per_s(dtype, tensor_cores=False))
        return _LAUNCH_MS + 1e3 * max(arithmetic_s, problem.bytes / device.bandwidth_bytes_per_s)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        lanes = _lanes(problem, device) if problem.direction is Direction.BACKWARD_WEIGHTS else _THREADS
        blocks = -(-problem.output.size // lanes)
        buffers = (*problem.direction.inputs, problem.direction.output)
        step = KernelStep(
            source="direct/naive.cu",
            entry=f"direct_naive_{problem.direction.value}",
            grid=(min(blocks, _MAX_BLOCKS), 1, 1),
            block=(_THREADS, 1, 1),
            defines=(
                ("T_X", problem.x.dtype.value),
                ("T_W", problem.w.dtype.value),
                ("T_Y", problem.y.dtype.value),
                ("T_SUM", config["accumulate"]),
                *geometry_defines(problem),
                ("OUTPUT_CHANNELS_LAST", int(problem.output.layout.channels_last)),
                ("THREADS", _THREADS),
                ("LANES", lanes),
                *epilogue_defines(problem),
            ),
            args=(*(Pointer(buffer=name) for name in buffers), geometry(problem), *epilogue_arguments(problem)),
        )
        return ConvSolution(steps=(step,))


def _lanes(problem: ProblemDescription, device: Device) -> int:
    """Elements of dw that one block computes, a power of two up to 32.

    Channels last, neighbouring elements read neighbouring channels, so a warp of them is coalesced; channels first,
    the reduction itself is, and long reductions get a whole block. Few elements are spread over more blocks.
    """
    coalesced = problem.w.layout.channels_last and problem.x.layout.channels_last
    wanted = 32 if coalesced else min(32, 2 * _THREADS // problem.reduction_length)
    wanted = min(wanted, problem.w.size // (4 * device.sm_count))
    return 1 << max(0, wanted.bit_length() - 1)


SOLVERS = (ConvDirectNaive(),)
