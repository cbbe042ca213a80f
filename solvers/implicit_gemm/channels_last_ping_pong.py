"""ConvChannelsLastPingPong: convolution of channels-first tensors by ConvImplicitGemmPingPong's kernel.

Kernels: kernels_src/implicit_gemm/transpose.cu, and that of the other solver.
"""

from __future__ import annotations

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import OF_IMAGES, Applicability, KernelKey
from miofind.solvers.implicit_gemm.channels_last_shared import ChannelsLastSolver
from miofind.solvers.implicit_gemm.transpose import SOURCE


class ConvChannelsLastPingPong(ChannelsLastSolver):
    """Channels-first convolution in three parts: operands to channels last, warpgroups that take turns, and back; in
    two, as results are written channels first, where images have multiples of 64 pixels.
    """

    id = "ConvChannelsLastPingPong"
    inner = "ConvImplicitGemmPingPong"
    directions = OF_IMAGES
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset({Layout.NCW, Layout.NCHW}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    sources = (SOURCE, "implicit_gemm/wgmma_ping_pong.cu")

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, brain = Direction.BACKWARD_DATA, DataType.BFLOAT16
        return (
            conv(x=(2, 64, 16, 16), w=(128, 64, 3, 3), padding=1),
            conv(x=(3, 24, 15, 9), w=(40, 24, 1, 1), stride=2, dtype=brain),
            conv(data, x=(2, 72, 8, 24), w=(64, 72, 5, 3), padding=(2, 1)),
            conv(data, x=(2, 40, 14, 18), w=(72, 40, 3, 3), padding=1, stride=2, dtype=brain),
            conv(x=(2, 64, 14, 13), w=(72, 64, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(x=(2, 64, 16, 32), w=(72, 64, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(x=(2, 24, 16, 16), w=(40, 24, 2, 2), stride=2, epilogue="channel_bias.silu"),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if self.inner_solver.applicability(problem, device):
            return Applicability(f"{self.inner} takes its channels first")
        return super().is_applicable(problem, device)


SOLVERS = (ConvChannelsLastPingPong(),)
