"""ConvImplicitGemmWgmmaVolume: three-dimensional convolution as a matrix product on Hopper's tensor cores.

Kernel: kernels_src/implicit_gemm/wgmma_volume.cu, that of ConvImplicitGemmWgmma with a depth: the copy engine (TMA)
walks pixels of volumes in im2col mode as it does those of images.
"""

from __future__ import annotations

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import Applicability, KernelKey
from miofind.solvers.common.wgmma_product import NchwTensors
from miofind.solvers.implicit_gemm.transpose import SOURCE as _TRANSPOSE
from miofind.solvers.implicit_gemm.wgmma_im2col import SOURCES, Im2colWgmmaSolver


class ConvImplicitGemmWgmmaVolume(Im2colWgmmaSolver):
    """Convolution of volumes as a matrix product on wgmma and TMA: NDHWC, or NCDHW where ConvImplicitGemmWgmma serves
    NCHW; float32 accumulators.

    Y alone may not be channels first for backward weights. Copies meet pixels up to 15 beyond the tensor.

    Source: CUDA driver API, cuTensorMapEncodeIm2col, for tensors of five dimensions.
    """

    id = "ConvImplicitGemmWgmmaVolume"
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
            layouts=frozenset({Layout.NDHWC, Layout.NCDHW}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    sources = (SOURCES[3], _TRANSPOSE)

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "layout": Layout.NDHWC, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, weights = Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS
        y_first = {"x": Layout.NDHWC, "w": Layout.NDHWC, "y": Layout.NCDHW}
        return (
            conv(x=(2, 64, 5, 14, 14), w=(128, 64, 3, 3, 3), padding=1),
            conv(x=(3, 24, 6, 9, 7), w=(40, 24, 2, 3, 2), padding=((1, 0), (1, 2), (0, 1)), stride=(1, 2, 3)),
            conv(x=(2, 64, 7, 9, 9), w=(96, 64, 3, 1, 1), dtype=DataType.BFLOAT16, dilation=(2, 1, 1)),
            conv(x=(2, 128, 4, 6, 6), w=(96, 64, 1, 3, 3), groups=2, stride=2, padding=(0, 1, 1)),
            conv(x=(2, 36, 4, 9, 9), w=(20, 36, 3, 3, 3), padding=1, dtype=DataType.FLOAT32, math="tf32"),
            conv(data, x=(2, 72, 5, 8, 7), w=(64, 72, 3, 5, 2), padding=(1, 2, 0)),
            conv(data, x=(2, 72, 5, 8, 7), w=(64, 72, 3, 3, 3), padding=((1, 0), (0, 2), 1), stride=2),
            conv(
                data, x=(2, 72, 5, 8, 7), w=(64, 72, 1, 3, 2), padding=(0, 1, 1), stride=(1, 2, 2), dilation=(1, 1, 2)
            ),
            conv(data, x=(2, 20, 4, 9, 9), w=(36, 20, 3, 3, 3), padding=1, dtype=DataType.FLOAT32, math="tf32"),
            conv(weights, x=(2, 64, 5, 9, 8), w=(72, 64, 3, 3, 3), padding=1, dilation=(1, 2, 2)),
            conv(weights, x=(2, 24, 6, 9, 9), w=(40, 24, 2, 3, 3), stride=2),
            conv(x=(2, 72, 3, 8, 8), w=(64, 72, 1, 1, 1), layout=Layout.NCDHW),
            conv(x=(2, 24, 4, 9, 7), w=(40, 24, 3, 3, 3), layout=y_first),
            conv(x=(2, 64, 4, 9, 9), w=(128, 64, 3, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(x=(3, 24, 4, 9, 7), w=(40, 24, 3, 3, 3), layout=y_first, epilogue="channel_bias.residual.relu"),
            conv(x=(3, 64, 3, 8, 8), w=(128, 64, 3, 3, 3), padding=1, epilogue="channel_bias.silu"),
            conv(x=(3, 72, 3, 7, 7), w=(40, 72, 3, 3, 3), padding=1, epilogue="statistics"),
            conv(weights, x=(2, 64, 4, 9, 9), w=(72, 64, 3, 3, 3), padding=1, epilogue="bias_gradient"),
            conv(data, x=(2, 72, 4, 8, 8), w=(64, 72, 3, 3, 3), padding=1, epilogue="residual.drelu"),
            conv(data, x=(2, 72, 5, 8, 7), w=(64, 72, 3, 3, 3), padding=1, stride=2, epilogue="residual.drelu"),
            conv(data, x=(2, 72, 5, 8, 7), w=(64, 72, 1, 1, 1), stride=2, epilogue="residual.dsilu"),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if NchwTensors.of(problem) is NchwTensors.A:
            return Applicability("takes no y channels first beside an x that is channels last")
        return super().is_applicable(problem, device)


SOLVERS = (ConvImplicitGemmWgmmaVolume(),)
