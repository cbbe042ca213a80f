"""ConvImplicitGemmHaloSwappedPlanes: ConvImplicitGemmHaloSwapped with results channels first.

Kernel: kernels_src/implicit_gemm/wgmma_halo_swapped_planes.cu.
"""

from __future__ import annotations

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import APPLICABLE, Applicability, KernelKey
from miofind.solver.steps import Config
from miofind.solvers.common.wgmma_product import NchwTensors
from miofind.solvers.implicit_gemm.wgmma_halo_swapped import ConvImplicitGemmHaloSwapped
from miofind.solvers.implicit_gemm.wgmma_halo_swapped_tiling import COLUMNS_ALIGNMENT, SwappedHaloProduct


class ConvImplicitGemmHaloSwappedPlanes(ConvImplicitGemmHaloSwapped):
    """ConvImplicitGemmHaloSwapped for an output alone that is channels first, in two dimensions.

    Its rows of pixels are multiples of 8. So are those of a tile, with and without the halo: pixels that are too many
    are multiplied, and stored nowhere.
    """

    id = "ConvImplicitGemmHaloSwappedPlanes"
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset({Layout.NHWC, Layout.NCHW}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    nchw = frozenset({NchwTensors.OUTPUT})
    sources = ("implicit_gemm/wgmma_halo_swapped_planes.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            layout = dict.fromkeys("xwy", Layout.NHWC) | {direction.output: Layout.NCHW}
            given = {"dtype": DataType.FLOAT16, "layout": layout, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, brain = Direction.BACKWARD_DATA, DataType.BFLOAT16
        return (
            conv(x=(2, 64, 14, 56), w=(64, 64, 3, 3), padding=1),
            conv(x=(3, 128, 13, 40), w=(136, 128, 3, 3), padding=1, dtype=brain),
            conv(x=(2, 16, 10, 22), w=(24, 16, 3, 3), padding=((1, 2), (2, 2))),
            conv(x=(2, 40, 9, 16), w=(72, 40, 3, 5), padding=(1, 2), dilation=(2, 1), dtype=brain),
            conv(x=(1, 200, 8, 72), w=(168, 200, 1, 3), padding=(0, 1)),
            conv(data, x=(2, 64, 12, 64), w=(64, 64, 3, 3), padding=1, dtype=brain),
            conv(data, x=(2, 72, 10, 8), w=(136, 72, 2, 3), padding=((1, 0), (2, 1)), dilation=(2, 1)),
            conv(x=(2, 64, 12, 32), w=(64, 64, 3, 3), padding=1, epilogue="bias.residual.relu"),
            conv(
                x=(2, 96, 9, 24), w=(80, 96, 3, 3), padding=1, dtype=brain, epilogue="float32.scale.bias.silu.residual"
            ),
            conv(x=(2, 32, 9, 80), w=(32, 32, 3, 3), padding=1, epilogue="channel_bias.residual.leaky_relu"),
            conv(data, x=(2, 64, 12, 48), w=(64, 64, 3, 3), padding=1, epilogue="residual.drelu"),
            conv(data, x=(2, 128, 7, 16), w=(64, 128, 3, 3), padding=1, epilogue="dsilu"),
        )

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        is_least = config["tile_w"] in SwappedHaloProduct.of(problem).column_limits
        return is_least and super().is_valid_config(problem, device, config)

    def refuse(self, problem: ProblemDescription) -> Applicability:
        if (answer := super().refuse(problem)).refused:
            return answer
        columns = problem.output.shape[-1]
        if columns % COLUMNS_ALIGNMENT:
            return Applicability(f"copies 16 bytes: {columns} pixels of a row are no multiple of {COLUMNS_ALIGNMENT}")
        return APPLICABLE


SOLVERS = (ConvImplicitGemmHaloSwappedPlanes(),)
