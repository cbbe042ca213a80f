"""ConvChannelsLastVolume: channels-first volumes by ConvImplicitGemmWgmmaVolume's kernels for channels-last ones.

Kernels: kernels_src/implicit_gemm/transpose.cu, and those of the other solver.
"""

from __future__ import annotations

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Library, Place
from miofind.solver.solver import KernelKey
from miofind.solvers.implicit_gemm.channels_last_shared import ChannelsLastSolver
from miofind.solvers.implicit_gemm.transpose import SOURCE


class ConvChannelsLastVolume(ChannelsLastSolver):
    """Channels-first convolution of volumes in three parts: to channels last, warpgroup products, and back."""

    id = "ConvChannelsLastVolume"
    inner = "ConvImplicitGemmWgmmaVolume"
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
            layouts=frozenset({Layout.NCDHW}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    sources = (SOURCE, "implicit_gemm/wgmma_volume.cu")

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, weights = Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS
        return (
            conv(x=(2, 64, 4, 9, 9), w=(128, 64, 3, 3, 3), padding=1),
            conv(x=(3, 24, 5, 9, 7), w=(40, 24, 1, 1, 1), stride=2, dtype=DataType.BFLOAT16),
            conv(data, x=(2, 72, 4, 8, 7), w=(64, 72, 3, 5, 3), padding=(1, 2, 1)),
            conv(weights, x=(2, 64, 5, 8, 9), w=(72, 64, 3, 3, 3), padding=1, dilation=2),
            conv(x=(2, 64, 4, 9, 9), w=(72, 64, 3, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(x=(3, 24, 4, 9, 7), w=(40, 24, 3, 3, 3), epilogue="channel_bias.silu"),
            conv(x=(2, 64, 4, 9, 9), w=(72, 64, 3, 3, 3), padding=1, stride=2, epilogue="bias.statistics"),
            conv(weights, x=(2, 64, 4, 9, 9), w=(72, 64, 3, 3, 3), padding=1, epilogue="bias_gradient"),
        )


SOLVERS = (ConvChannelsLastVolume(),)
