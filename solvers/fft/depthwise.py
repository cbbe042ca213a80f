"""ConvFftDepthwise: depthwise convolution of long lines by Fourier transforms, each tile once through memory.

Kernels: kernels_src/fft/depthwise.cu. The steps are made by `miofind.solvers.fft.depthwise_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.solver import APPLICABLE, OF_IMAGES, Algorithm, Applicability, Reach, Solver, first_refusal
from miofind.solver.steps import Config, ConfigValue, ConvSolution, Packing, WorkspacePlan
from miofind.solvers.fft.choice import OWN_KEYS, error_growth, refuse_fft
from miofind.solvers.fft.depthwise_steps import POINTS, SOURCE, DepthwisePlan, as_tiles, is_valid, refuse_depthwise
from miofind.solvers.fft.edges import EDGES_SOURCE

_DEFAULTS = 6


class ConvFftDepthwise(Solver):
    """Overlap-save along one axis, from tensor to tensor.

    A thread block transforms two tiles of a channel of one image as one complex line, multiplies it by the filter's
    transform and transforms it back; images of several are cut into tiles of even number.

    Configuration: `tile`, the length of a transform, 0 for whole lines; `points` of lines that a block has at once.
    Transforms are float32 whatever the dtype; errors are those of ConvFft with tiles twice as long.

    Source: Oppenheim and Schafer, Discrete-Time Signal Processing, section 8.7.3.
    """

    id = "ConvFftDepthwise"
    algorithm = Algorithm.FFT
    directions = OF_IMAGES
    applies_epilogues = True
    keys = OWN_KEYS
    least_reach = Reach.TILE
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile": (0, 256, 512, 1024, 2048, 4096, 8192, 16384),
        "points": POINTS,
    }
    sources = (SOURCE, EDGES_SOURCE)

    def examples(self) -> tuple[ProblemDescription, ...]:
        conv, mixed = ProblemDescription.convolution, {"x": Layout.NHWC, "w": Layout.NCHW, "y": Layout.NCHW}
        return (
            conv(x=(3, 5, 1400), w=(5, 1, 256), padding=((255, 0),), groups=5),
            conv(x=(2, 12, 700), w=(12, 1, 64), padding=32, groups=12, layout=Layout.NWC, direction="backward_data"),
            conv(x=(1, 9, 5000), w=(9, 1, 200), stride=3, padding=100, groups=9, dtype=DataType.FLOAT16),
            conv(x=(1, 4, 3, 600), w=(4, 1, 1, 90), padding=(0, 45), groups=4, layout=mixed),
            conv(x=(2, 8, 600, 5), w=(8, 1, 70, 1), groups=8, dtype=DataType.BFLOAT16, direction="backward_data"),
            conv(x=(3, 5, 1400), w=(5, 1, 256), padding=((255, 0),), groups=5, epilogue="scale.bias.silu.residual"),
            conv(x=(2, 12, 700), w=(12, 1, 64), padding=32, groups=12, layout=Layout.NWC, epilogue="channel_bias.gelu"),
            conv(x=(1, 9, 5000), w=(9, 1, 200), stride=3, groups=9, dtype=DataType.FLOAT16, epilogue="residual.relu"),
            conv(x=(1, 4, 900), w=(4, 1, 90), groups=4, direction="backward_data", epilogue="residual.drelu"),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := first_refusal(refuse_fft(problem), refuse_depthwise(problem))).refused:
            return answer
        if next(self.configs(problem, device), None) is None:
            return Applicability(
                "transforms an even number of lines an image, of 256 to 16384 points, half of them kept"
            )
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return is_valid(problem, device, config["tile"], config["points"])

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(self.ranked(problem, device, self.configs(problem, device))[:_DEFAULTS])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return DepthwisePlan.of(problem, config["tile"], config["points"]).estimate_ms(device)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return error_growth(problem, as_tiles(config["tile"]))

    def is_exact(self, config: Config) -> bool:
        return False

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        plan = DepthwisePlan.of(problem, config["tile"], config["points"])
        return ConvSolution(steps=tuple(plan.steps()), workspace=WorkspacePlan(plan.regions()))

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        return DepthwisePlan.of(problem, config["tile"], config["points"]).packing()


SOLVERS = (ConvFftDepthwise(),)
