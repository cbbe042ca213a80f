"""ConvFft: products of Fourier transforms by cuFFT, of whole images or of tiles that overlap (overlap-save).

Kernels: kernels_src/fft*.cu. The steps and their workspace are made by `miofind.solvers.fft.steps`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Reach, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, Packing, WorkspacePlan
from miofind.solvers.fft.choice import CHUNKS_MIB, OWN_KEYS, error_growth, is_valid, refuse_fft, tile_serves
from miofind.solvers.fft.cost import estimate_ms
from miofind.solvers.fft.edges import EDGES_SOURCE
from miofind.solvers.fft.own_blocks import LINES_SOURCE, TILES_SOURCE, OwnBlock
from miofind.solvers.fft.product import PRODUCTS
from miofind.solvers.fft.steps import PRODUCT_SOURCE, SOURCE, FftPlan

_DEFAULTS = 8
_OWN_TILES = (0, 16, 24, 32, 48, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PLANES = (8, 4, 16)  # defaults have the first that fits
_SHARED_BYTES = 80 << 10  # of a block, so that two of them share a multiprocessor
_LINES_SHARED_BYTES = 140 << 10  # of a block with the longest line
_OTHER_BYTES = 2 << 10  # that a block has besides


class ConvFft(Solver):
    """Products of Fourier transforms of filters and of images, or of tiles that overlap by the filter (overlap-save).

    Configuration: `tile`, the length of a transform along each axis that is longer, 0 for whole images; `chunk_mib`
    bounds the transforms of images and results that are held at once (one tile's at least); `product`, rows x columns
    of a frequency that a thread block sums. Strides are outputs left out, or zeros between those of y. Transforms,
    products and sums are float32 whatever the dtype. Errors follow the tile, not the sum of one output: results near
    corners that are sums of few products are summed directly, and where the longest sums do not allow as much, the
    bound is wider than direct summation's (`FftPlan.error`). A large value spoils its whole tile: finds take it with
    `max_error` alone.

    Source: Mathieu, Henaff and LeCun, Fast Training of Convolutional Networks through FFTs, ICLR 2014; Vasilache et
    al., Fast Convolutional Nets with fbfft, ICLR 2015.
    """

    id = "ConvFft"
    algorithm = Algorithm.FFT
    applies_epilogues = True
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
    least_reach = Reach.TILE
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile": (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        "chunk_mib": CHUNKS_MIB,
        "product": tuple(PRODUCTS),
    }
    sources: ClassVar[tuple[str, ...]] = (SOURCE, PRODUCT_SOURCE, EDGES_SOURCE)

    def examples(self) -> tuple[ProblemDescription, ...]:
        conv = ProblemDescription.convolution
        x, w, pads = (3, 10, 26, 25), (40, 5, 11, 13), ((1, 0), (0, 2))
        return (
            *(conv(x=x, w=w, padding=pads, stride=2, groups=2, direction=direction) for direction in Direction),
            conv(x=(2, 6, 40, 38), w=(20, 6, 11, 11), padding=5, layout=Layout.NHWC, dtype=DataType.FLOAT16),
            conv(x=(2, 8, 30, 31), w=(8, 1, 13, 13), padding=6, groups=8, dtype=DataType.BFLOAT16),
            conv(x=(1, 3, 1400), w=(5, 3, 256)),
            conv(x=(2, 4, 700), w=(8, 1, 64), padding=32, groups=4, layout=Layout.NWC, direction="backward_data"),
            conv(x=(2, 9, 60, 12), w=(12, 9, 25, 1), padding=(12, 0), layout={"x": "NHWC", "w": "NCHW", "y": "NCHW"}),
            conv(x=x, w=w, padding=pads, stride=2, groups=2, epilogue="scale.bias.channel_bias.residual.silu"),
            conv(x=(2, 6, 40, 38), w=(20, 6, 11, 11), padding=5, layout=Layout.NHWC, epilogue="bias.relu.residual"),
            conv(x=(1, 3, 1400), w=(5, 3, 256), dtype=DataType.FLOAT16, epilogue="bias.gelu"),
            conv(x=x, w=w, padding=pads, stride=2, groups=2, direction="backward_data", epilogue="residual.drelu"),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_fft(problem)).refused:
            return answer
        if next(self.configs(problem, device), None) is None:
            return Applicability("needs longer transforms, or more of them at once, than it serves")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return is_valid(problem, config)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        """The likely fastest, of different tiles first, and the one of the smallest workspace."""
        ranked = self.ranked(problem, device, self._told_apart(problem, device))
        by_tile = {config["tile"]: config for config in reversed(ranked)}
        firsts = sorted(by_tile.values(), key=ranked.index)[: _DEFAULTS // 2]
        least = min(ranked, key=lambda config: self.workspace_bytes(problem, device, config))
        return tuple(list(dict.fromkeys([*firsts, least, *ranked]))[:_DEFAULTS])

    def _told_apart(self, problem: ProblemDescription, device: Device) -> Iterable[Config]:
        """Configurations that estimates tell apart, some of them valid."""
        return _product(self)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return estimate_ms(FftPlan.of(problem, config), device)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return error_growth(problem, config)

    def is_exact(self, config: Config) -> bool:
        return False

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        return WorkspacePlan(FftPlan.of(problem, config).regions()).bytes

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        plan = FftPlan.of(problem, config)
        return ConvSolution(steps=tuple(plan.steps()), workspace=WorkspacePlan(plan.regions()))

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        return FftPlan.of(problem, config).packing()


class ConvFftTiles(ConvFft):
    """Overlap-save by Fourier transforms of own kernels: a thread block has whole tiles in shared memory.

    Elements are read, and results written, by the kernels that transform, which saves four to six passes over the
    planes, and a quarter to three fifths of the time on an H200. Tiles have up to 64 rows of 128, or one row of up to
    32768; larger ones, as for filters of more than 32 taps each way, are left to ConvFft. Configuration: `planes` that
    a block transforms, or of whose 512 numbers its lines are, besides those of ConvFft.
    """

    id = "ConvFftTiles"
    keys = OWN_KEYS
    is_dynamic = False
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile": _OWN_TILES,
        "chunk_mib": CHUNKS_MIB,
        "product": tuple(PRODUCTS),
        "planes": _PLANES,
    }
    sources: ClassVar[tuple[str, ...]] = (TILES_SOURCE, LINES_SOURCE, PRODUCT_SOURCE, EDGES_SOURCE)

    def examples(self) -> tuple[ProblemDescription, ...]:
        return super().examples()

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return is_valid(problem, config) and _fits(FftPlan.of(problem, config).own_block, device)

    def _told_apart(self, problem: ProblemDescription, device: Device) -> Iterable[Config]:
        """Those of as many planes as fit, by tile."""
        planes = {tile: self._planes(problem, device, tile) for tile in _OWN_TILES}
        return (config for config in _product(self) if planes[config["tile"]] == config["planes"])

    def _planes(self, problem: ProblemDescription, device: Device, tile: int) -> int:
        """The first number of planes that fits, 0 where the tile does not serve."""
        if not tile_serves(problem, tile, is_own=True):
            return 0
        any_other = {"tile": tile, "chunk_mib": CHUNKS_MIB[0], "product": next(iter(PRODUCTS))}
        blocks = (FftPlan.of(problem, {**any_other, "planes": planes}).own_block for planes in _PLANES)
        return next((one.planes for one in blocks if _fits(one, device) and not one.repeats_fewer_planes), 0)


def _fits(block: OwnBlock, device: Device) -> bool:
    """Whether a multiprocessor has shared memory for it, and for two where there are planes."""
    most = _LINES_SHARED_BYTES if block.has_lines else _SHARED_BYTES
    return block.shared_bytes <= min(most, device.shared_bytes - _OTHER_BYTES)


@functools.cache  # writing configurations as JSON takes longest
def _product(solver: ConvFft) -> tuple[Config, ...]:
    """The product of a solver's parameters."""
    values = solver.parameters
    return tuple(Config(dict(zip(values, one, strict=True))) for one in itertools.product(*values.values()))


SOLVERS = (ConvFft(), ConvFftTiles())
