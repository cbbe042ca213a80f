"""ConvFft: products of Fourier transforms by cuFFT, of whole images or of tiles that overlap (overlap-save).

Kernels: kernels_src/fft.cu and fft_product.cu. The steps and their workspace are made by `miofind.libraries.fft`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.device import Device, Library, Place
from miofind.geometry import index_bits
from miofind.libraries.fft import PRODUCT_SOURCE, SOURCE, FftPlan
from miofind.libraries.fft_product import PRODUCTS
from miofind.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.solution import Config, ConfigValue, ConvSolution, WorkspacePlan
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.tiling.fourier import least_products, whole_length
from miofind.tiling.overlap import has_empty_sums

_DEFAULTS = 8
_DIRECT_ERROR = 8.0  # of direct summation in float32, in roundoffs times the root of the terms (verify/accuracy.py)
_TF32_ERROR = 16.0 * 2**13  # of inputs rounded to TF32, in roundoffs of float32
# Errors are those of a whole tile, and the bound is that of an element's own sum: in shorter sums of normal data some
# elements are so much smaller than their tile that they break it.
_LEAST_PRODUCTS = 16
_LEAST_TILE = 2  # times the taps along an axis that is cut
_CHUNKS_MIB = (16, 64, 256, 1024, 4096)  # the first stays in an L2 cache
_MOST_WORKSPACE = 64 << 30


class ConvFft(Solver):
    """Products of Fourier transforms of filters and of images, or of tiles that overlap by the filter (overlap-save).

    Configuration: `tile`, the length of a transform along each axis that is longer, 0 for whole images; `chunk_mib`
    bounds the transforms of images and results that are held at once (one tile's at least); `product`, rows x columns
    of a frequency that a thread block sums. Strides are outputs left out, or zeros between those of y. Transforms,
    products and sums are float32 whatever the dtype. Errors follow the tile, not the sum of one output: where long sums
    do not allow as much, the bound is wider than direct summation's (`FftPlan.error`).

    Source: Mathieu, Henaff and LeCun, Fast Training of Convolutional Networks through FFTs, ICLR 2014; Vasilache et
    al., Fast Convolutional Nets with fbfft, ICLR 2015.
    """

    id = "ConvFft"
    algorithm = Algorithm.FFT
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.CUFFT,
            dtypes=frozenset({DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset(Layout),
            min_sm=80,
        ),
    )
    is_dynamic = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile": (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        "chunk_mib": _CHUNKS_MIB,
        "product": tuple(PRODUCTS),
    }
    sources = (SOURCE, PRODUCT_SOURCE)

    def examples(self) -> tuple[ProblemDescription, ...]:
        conv = ProblemDescription.convolution
        x, w, pads = (3, 10, 26, 25), (40, 5, 9, 7), ((1, 0), (0, 2))
        return (
            *(conv(x=x, w=w, padding=pads, stride=2, groups=2, direction=direction) for direction in Direction),
            conv(x=(2, 6, 40, 38), w=(20, 6, 11, 11), padding=5, layout=Layout.NHWC, dtype=DataType.FLOAT16),
            conv(x=(2, 8, 30, 31), w=(8, 1, 13, 13), padding=6, groups=8, dtype=DataType.BFLOAT16),
            conv(x=(1, 3, 1400), w=(5, 3, 256)),
            conv(x=(2, 4, 700), w=(8, 1, 64), padding=32, groups=4, layout=Layout.NWC, direction="backward_data"),
            conv(x=(2, 9, 50, 12), w=(12, 9, 21, 1), padding=(10, 0), layout={"x": "NHWC", "w": "NCHW", "y": "NCHW"}),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if max(problem.conv.dilation) > 1:
            return Applicability("transforms filters without gaps: dilation 1")
        if problem.spatial_dims > 2:
            return Applicability("serves one or two spatial dimensions")
        if max(problem.filter) == 1:
            return Applicability("saves nothing with filters of one tap")
        if problem.output.size == 0 or problem.flops == 0:
            return Applicability("has no empty products")
        if index_bits(problem) != 32:
            return Applicability("needs tensors that 32-bit offsets reach")
        if has_empty_sums(problem):
            return Applicability("rounds sums of nothing but padding as it does their neighbours, not to 0")
        if (least := least_products(problem)) < _LEAST_PRODUCTS:
            return Applicability(f"keeps its error bound in sums of {_LEAST_PRODUCTS} products or more, not {least}")
        if next(self.configs(problem, device), None) is None:
            return Applicability(f"needs more than {_MOST_WORKSPACE >> 30} GiB or 32-bit offsets for its transforms")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        """Whether tiles are shorter than an axis and half of each at least is kept, and all is within bounds."""
        tile = config["tile"]
        axes = [axis for axis in range(problem.spatial_dims) if problem.filter[axis] > 1]
        cut = [axis for axis in axes if tile < whole_length(problem, axis)]
        if tile and (not cut or any(tile < _LEAST_TILE * problem.filter[axis] for axis in cut)):
            return False
        plan = FftPlan.of(problem, config)
        if not plan.product.serves(*plan.sizes(plan.at_once)[:2]) or self._repeats_a_smaller_chunk(problem, config):
            return False
        return self.workspace_bytes(problem, device, config) <= _MOST_WORKSPACE and not plan.refusal()

    def _repeats_a_smaller_chunk(self, problem: ProblemDescription, config: Config) -> bool:
        smaller = [size for size in _CHUNKS_MIB if size < config["chunk_mib"]]
        if not smaller:
            return False
        other = FftPlan.of(problem, {**config, "chunk_mib": max(smaller)})
        return other.at_once == FftPlan.of(problem, config).at_once

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        """The likely fastest, of different tiles first, and the one of the smallest workspace."""
        ranked = sorted(self.configs(problem, device), key=lambda config: self.estimate_ms(problem, device, config))
        by_tile = {config["tile"]: config for config in reversed(ranked)}
        firsts = sorted(by_tile.values(), key=ranked.index)[: _DEFAULTS // 2]
        least = min(ranked, key=lambda config: self.workspace_bytes(problem, device, config))
        return tuple(list(dict.fromkeys([*firsts, least, *ranked]))[:_DEFAULTS])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return FftPlan.of(problem, config).estimate_ms(device)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        """That of an element whose own products are the fewest, over direct summation's of the longest sum."""
        length = problem.reduction_length
        edge = math.sqrt(length / least_products(problem))
        direct = _DIRECT_ERROR * math.sqrt(length) + (_TF32_ERROR if problem.math is MathMode.TF32 else 0.0)
        return max(1.0, edge * FftPlan.of(problem, config).error() / direct)

    def is_exact(self, config: Config) -> bool:
        return False

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        return WorkspacePlan(FftPlan.of(problem, config).regions()).bytes

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        plan = FftPlan.of(problem, config)
        return ConvSolution(steps=tuple(plan.steps()), workspace=WorkspacePlan(plan.regions()))


SOLVERS = (ConvFft(),)
