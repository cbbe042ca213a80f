"""ConvImplicitGemmWgmma: convolution as a matrix product on Hopper's tensor cores, in all directions.

Kernel: kernels_src/implicit_gemm/wgmma.cu. TMA loads NHWC pixels in im2col mode, so that no
columns are laid out in memory.
"""

from __future__ import annotations

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Library, Place
from miofind.solver.solver import KernelKey
from miofind.solvers.implicit_gemm.transpose import SOURCE as _TRANSPOSE
from miofind.solvers.implicit_gemm.wgmma_im2col import SOURCES, Im2colWgmmaSolver


class ConvImplicitGemmWgmma(Im2colWgmmaSolver):
    """Convolution as a matrix product on wgmma and TMA: NHWC, or NCHW where a filter has one tap; float32
    accumulators.

    Serves float16 and bfloat16, and float32 as TF32 but for backward weights. Channels and filters of a group take
    multiples of 16 bytes, and in several groups mostly of a k-tile's; backward data has stride 1 or 2. NCHW is
    served where outputs meet one pixel each, in order, and images take multiples of 16 bytes; the result alone may be
    NCHW where backward data has stride 1, and y alone for backward weights where its images take multiples of 128
    bytes. Split-K partials are added in order, by a reduction kernel or within a cluster, so equal inputs give
    equal bits. Statistics of 16-bit results are summed up where these are staged, or by the reduction kernel.

    Source: NVIDIA CUTLASS, include/cutlass/conv, for im2col copies of each direction; PTX ISA, wgmma.
    """

    id = "ConvImplicitGemmWgmma"
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
            layouts=frozenset({Layout.NWC, Layout.NHWC, Layout.NCW, Layout.NCHW}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    sources = (SOURCES[2], _TRANSPOSE)

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "layout": Layout.NHWC, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, weights = Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS
        y_first = {"x": Layout.NHWC, "w": Layout.NHWC, "y": Layout.NCHW}
        return (
            conv(x=(2, 64, 14, 14), w=(128, 64, 3, 3), padding=1),
            conv(x=(3, 24, 15, 9), w=(40, 24, 3, 2), padding=((1, 2), (0, 1)), stride=2),
            conv(x=(2, 128, 9, 9), w=(96, 64, 1, 1), groups=2, dtype=DataType.BFLOAT16),
            conv(x=(2, 36, 14, 14), w=(20, 36, 3, 3), padding=1, dtype=DataType.FLOAT32, math="tf32"),
            conv(data, x=(2, 20, 9, 9), w=(36, 20, 3, 3), padding=1, dtype=DataType.FLOAT32, math="tf32"),
            conv(data, x=(2, 72, 12, 11), w=(64, 72, 5, 3), padding=(2, 1)),
            conv(data, x=(2, 72, 13, 14), w=(64, 72, 3, 3), padding=((1, 0), (0, 2)), stride=2),
            conv(weights, x=(2, 64, 14, 14), w=(72, 64, 3, 3), padding=1, dilation=2),
            conv(x=(2, 72, 12, 14), w=(64, 72, 1, 1), layout=Layout.NCHW),
            conv(x=(2, 24, 9, 7), w=(40, 24, 3, 3), layout=y_first),
            conv(x=(2, 64, 14, 14), w=(128, 64, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(
                x=(3, 72, 9, 9), w=(40, 72, 1, 1), dtype=DataType.BFLOAT16, epilogue="float32.scale.bias.silu.residual"
            ),
            conv(x=(2, 72, 12, 14), w=(64, 72, 1, 1), layout=Layout.NCHW, epilogue="channel_bias.residual.leaky_relu"),
            conv(x=(3, 72, 9, 9), w=(40, 72, 3, 3), padding=1, epilogue="statistics"),
            conv(x=(2, 72, 12, 14), w=(64, 72, 1, 1), layout=Layout.NCHW, epilogue="bias.relu.statistics"),
            conv(weights, x=(2, 24, 18, 10), w=(40, 24, 3, 3), layout=y_first),
            conv(weights, x=(2, 64, 14, 14), w=(72, 64, 3, 3), padding=1, epilogue="bias_gradient"),
            conv(weights, x=(2, 72, 12, 14), w=(64, 72, 1, 1), layout=Layout.NCHW, epilogue="float32.bias_gradient"),
            conv(data, x=(2, 72, 12, 11), w=(64, 72, 3, 3), padding=1, epilogue="residual.drelu"),
            conv(data, x=(2, 72, 13, 14), w=(64, 72, 1, 1), stride=2, epilogue="residual.dsilu"),
            conv(data, x=(2, 72, 12, 14), w=(64, 72, 1, 1), layout=Layout.NCHW, epilogue="drelu"),
        )


SOLVERS = (ConvImplicitGemmWgmma(),)
