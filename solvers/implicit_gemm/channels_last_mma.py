"""ConvChannelsLastMma: strided gradients of channels-first float32 images by ConvImplicitGemmMma, channels last.

Kernels: kernels_src/implicit_gemm/transpose.cu, and those of the other solver.
"""

from __future__ import annotations

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import Applicability, KernelKey
from miofind.solvers.implicit_gemm.channels_last_shared import ChannelsLastSolver
from miofind.solvers.implicit_gemm.transpose import SOURCE


class ConvChannelsLastMma(ChannelsLastSolver):
    """Backward data of strided float32 convolution: operands to channels last, three products of TF32, and back.

    ConvImplicitGemmMma takes channels first as they lie, but strided gradients are slow so: 1.4 to 1.8 times the time.
    """

    id = "ConvChannelsLastMma"
    inner = "ConvImplicitGemmMma"
    directions = frozenset({Direction.BACKWARD_DATA})
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT32}),
            layouts=frozenset({Layout.NCW, Layout.NCHW}),
            min_sm=80,
        ),
    )
    sources = (SOURCE, "implicit_gemm/mma.cu")

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(**values: object) -> ProblemDescription:
            return ProblemDescription.convolution(direction=Direction.BACKWARD_DATA, **values)  # type: ignore[arg-type]

        return (
            conv(x=(2, 48, 14, 13), w=(40, 48, 3, 3), padding=1, stride=2),
            conv(x=(3, 32, 15, 9), w=(64, 32, 1, 1), stride=(2, 3)),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if max(problem.conv.stride) == 1:
            return Applicability(f"{self.inner} does as well with channels first, but for strides")
        if problem.math is not MathMode.IEEE:
            return Applicability("ConvChannelsLast has faster products of TF32")
        return super().is_applicable(problem, device)


SOLVERS = (ConvChannelsLastMma(),)
