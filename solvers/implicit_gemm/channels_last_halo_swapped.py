"""ConvChannelsLastHaloSwapped: channels-first convolution by ConvImplicitGemmHaloSwappedPlanes, operands transposed.

Kernels: kernels_src/implicit_gemm/transpose.cu, and that of the other solver.
"""

from __future__ import annotations

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Library, Place
from miofind.solver.solver import OF_IMAGES, KernelKey
from miofind.solvers.implicit_gemm.channels_last_shared import ChannelsLastSolver
from miofind.solvers.implicit_gemm.transpose import SOURCE


class ConvChannelsLastHaloSwapped(ChannelsLastSolver):
    """Channels-first convolution in two parts: operands to channels last, and pixels that are loaded once for all taps,
    whose results are written channels first.
    """

    id = "ConvChannelsLastHaloSwapped"
    inner = "ConvImplicitGemmHaloSwappedPlanes"
    only_nchw_results = True
    directions = OF_IMAGES
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset({Layout.NCHW}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    sources = (SOURCE, "implicit_gemm/wgmma_halo_swapped_planes.cu")

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, brain = Direction.BACKWARD_DATA, DataType.BFLOAT16
        return (
            conv(x=(2, 64, 14, 56), w=(64, 64, 3, 3), padding=1),
            conv(x=(2, 40, 9, 16), w=(72, 40, 3, 5), padding=(1, 2), dilation=(2, 1), dtype=brain),
            conv(data, x=(2, 72, 10, 8), w=(136, 72, 2, 3), padding=((1, 0), (2, 1)), dilation=(2, 1)),
            conv(x=(2, 64, 12, 32), w=(64, 64, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(data, x=(2, 64, 12, 48), w=(64, 64, 3, 3), padding=1, epilogue="residual.drelu"),
            conv(x=(2, 32, 9, 80), w=(32, 32, 3, 3), padding=1, dtype=brain, epilogue="channel_bias.silu"),
        )


SOLVERS = (ConvChannelsLastHaloSwapped(),)
