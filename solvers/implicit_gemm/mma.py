"""ConvImplicitGemmMma: a convolution in any direction as one matrix product on tensor cores, operands gathered.

Kernel: kernels_src/implicit_gemm/mma.cu. What the product's indices stand for: solvers/common/product.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, EstimatedConfig, KernelKey, Solver
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    EpilogueArgument,
    KernelStep,
    Pointer,
    WorkspacePlan,
)
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.limits import MAX_PADDING, refuse_tensors
from miofind.solvers.common.product import Index, Operand, Product, Strides, Window, linear_stride, products
from miofind.solvers.common.product_tiles import (
    BlockKind,
    ProductBlock,
    block_kinds,
    products_of_tf32,
    tf32_error_growth,
    threads_of,
    tiles_of,
)
from miofind.solvers.common.split_k import RESULT_ORDER, SplitK, result_order
from miofind.solvers.implicit_gemm.mma_cost import estimate_ms
from miofind.solvers.implicit_gemm.mma_limits import is_valid
from miofind.solvers.implicit_gemm.mma_shortlist import SPLITS, short_listed

_MAX_COORDINATE = 2**30
_MAX_LAUNCHES = 16
_DEFAULTS = 8
_DIGITS, _AXES = 4, 3  # at most, of an index and of an image

RADIX = StructType("Radix", count="int32", size=(DIVISOR, _DIGITS - 1))
"""An index: how many values, and the sizes of its digits but the last, the least first."""

OPERAND_LAYOUT = StructType(
    "OperandLayout",
    mn_strides=("uint32", _DIGITS),
    k_strides=("uint32", _DIGITS),
    offset="uint32",
    group_stride="uint32",
)
"""An `Operand`, offsets modulo 2**32."""

OUTPUT_LAYOUT = StructType(
    "OutputLayout",
    m_strides=("uint32", _DIGITS),
    n_strides=("uint32", _DIGITS),
    offset="uint32",
    group_stride="uint32",
    size="int32",
)
"""An `Output`, offsets modulo 2**32; `size` elements lie between the partials of neighbouring splits."""

WINDOW = StructType(
    "Window",
    first=("int32", _AXES),
    extent=("int32", _AXES),
    mn_strides=("int32", _AXES),
    k_strides=("int32", _AXES),
)
TILE_ORDER = StructType("TileOrder", groups=DIVISOR, tiles=DIVISOR, band=DIVISOR, last_band=DIVISOR)
PRODUCT = StructType(
    "Product",
    m=RADIX,
    n=RADIX,
    k=RADIX,
    a=OPERAND_LAYOUT,
    b=OPERAND_LAYOUT,
    out=OUTPUT_LAYOUT,
    window=WINDOW,
    order=TILE_ORDER,
    k_of_split="int32",
)
"""All numbers of a launch; `k_of_split` values of k are summed by a split."""

_STRUCTS = (RADIX, OPERAND_LAYOUT, OUTPUT_LAYOUT, WINDOW, TILE_ORDER, PRODUCT)


def _defines(
    problem: ProblemDescription, product: Product, config: Config, block: ProductBlock
) -> tuple[tuple[str, str | int], ...]:
    window = product.window
    axes = len(window.first) if window else 0
    names = ("tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages", "band")
    return (
        ("ELEMENT", problem.x.dtype.value),
        *((name.upper(), config[name]) for name in names),
        ("A_K_MAJOR", int(product.a_k_major)),
        ("B_K_MAJOR", int(product.b_k_major)),
        ("A_VECTOR", block.a.vector),
        ("B_VECTOR", block.b.vector),
        ("A_AT_ONCE", int(block.a.at_once)),
        ("B_AT_ONCE", int(block.b.at_once)),
        ("OUT_VECTOR", block.out_vector),
        *((f"{name}_DIGITS", count) for name, count in _digits_of(product).items()),
        ("A_AXES", axes if window and window.of_a else 0),
        ("B_AXES", axes if window and not window.of_a else 0),
        ("MN_AXIS", window.mn_axis if window else 0),
        ("K_AXIS", window.k_axis if window else 0),
        ("PRODUCTS", products_of_tf32(problem)),
        ("FINAL", int(config["splits"] == 1)),
        ("SHARED_BYTES", block.shared_bytes),
        ("REDUCTION_VECTOR", _reduction_vector(problem)),
        *(struct.define for struct in _STRUCTS),
        *_epilogue_defines(problem),
    )


def _epilogue_defines(problem: ProblemDescription) -> tuple[tuple[str, str | int], ...]:
    if not problem.epilogue:
        return ()
    is_last = problem.output.layout.channels_last
    return (RESULT_ORDER.define, ("CHANNELS_LAST", int(is_last)), *epilogue_defines(problem))


def _digits_of(product: Product) -> dict[str, int]:
    """Digits of an index where it serves a tensor, by both names."""
    uses = (
        ("A_M", product.m, product.a.mn_strides),
        ("A_K", product.k, product.a.k_strides),
        ("B_N", product.n, product.b.mn_strides),
        ("B_K", product.k, product.b.k_strides),
        ("OUT_M", product.m, product.out.m_strides),
        ("OUT_N", product.n, product.out.n_strides),
    )
    digits = {name: _digits(index, strides) for name, index, strides in uses}
    if window := product.window:  # coordinates are digits
        mn = "A_M" if window.of_a else "B_N"
        digits[mn] = len((product.m if window.of_a else product.n).sizes)
        digits["A_K" if window.of_a else "B_K"] = len(product.k.sizes)
    return digits


def _digits(index: Index, strides: Strides) -> int:
    """Digits that a use needs: one where it is linear."""
    return len(index.sizes) if linear_stride(index, strides) is None else 1


def _radix(index: Index) -> Struct:
    sizes = (max(1, size) for size in _padded(index.sizes, 1, _DIGITS)[:-1])
    return RADIX(count=index.count, size=tuple(map(divide_by, sizes)))


def _tile_order(product: Product, config: Config, groups: int) -> Struct:
    """How the kernel counts its blocks: by group, tile, band of tiles and rows of tiles in the last band."""
    rows, columns = ceil_div(product.m.count, config["tile_m"]), ceil_div(product.n.count, config["tile_n"])
    band = int(config["band"])
    return TILE_ORDER(
        groups=divide_by(groups),
        tiles=divide_by(rows * columns),
        band=divide_by(band * columns),
        last_band=divide_by(rows % band or band),
    )


def _padded(values: Sequence[int], filler: int, length: int) -> tuple[int, ...]:
    return (*values, *(filler for _ in range(length - len(values))))


def _modulo(offset: int) -> int:
    """An offset as the kernel adds it: modulo 2**32."""
    return offset % (1 << 32)


def _strides_of(index: Index, strides: Strides, digits: int | str) -> tuple[int, ...]:
    """A use's strides; where it counts as linear, the one between neighbours."""
    linear = linear_stride(index, strides)
    used = strides if digits != 1 or linear is None else (linear,)
    return _padded(tuple(map(_modulo, used)), 0, _DIGITS)


def _operand(operand: Operand, mn_strides: tuple[int, ...], k_strides: tuple[int, ...]) -> Struct:
    return OPERAND_LAYOUT(
        mn_strides=mn_strides,
        k_strides=k_strides,
        offset=_modulo(operand.offset),
        group_stride=_modulo(operand.group_stride),
    )


def _window(window: Window | None) -> Struct:
    """A window's coordinates; zeros, which no kernel reads, where there is none."""
    names = ("first", "extent", "mn_strides", "k_strides")
    return WINDOW(**{name: _padded(getattr(window, name) if window else (), 0, _AXES) for name in names})


def _product(problem: ProblemDescription, product: Product, config: Config) -> Struct:
    digits = _digits_of(product)
    m, n, k, a, b, out = product.m, product.n, product.k, product.a, product.b, product.out
    return PRODUCT(
        m=_radix(m),
        n=_radix(n),
        k=_radix(k),
        a=_operand(a, _strides_of(m, a.mn_strides, digits["A_M"]), _strides_of(k, a.k_strides, digits["A_K"])),
        b=_operand(b, _strides_of(n, b.mn_strides, digits["B_N"]), _strides_of(k, b.k_strides, digits["B_K"])),
        out=OUTPUT_LAYOUT(
            m_strides=_strides_of(m, out.m_strides, digits["OUT_M"]),
            n_strides=_strides_of(n, out.n_strides, digits["OUT_N"]),
            offset=_modulo(out.offset),
            group_stride=_modulo(out.group_stride),
            size=problem.output.size,
        ),
        window=_window(product.window),
        order=_tile_order(product, config, problem.groups),
        k_of_split=ceil_div(ceil_div(k.count, config["tile_k"]), config["splits"]) * config["tile_k"],
    )


def _launch(problem: ProblemDescription, product: Product, kind: BlockKind, config: Config) -> KernelStep:
    block = ProductBlock.of(kind, config)
    return KernelStep(
        source="implicit_gemm/mma.cu",
        entry="implicit_gemm_mma",
        grid=(tiles_of(problem, product, config) * config["splits"], 1, 1),
        block=(threads_of(config), 1, 1),
        shared_bytes=block.shared_bytes,
        defines=_defines(problem, product, config, block),
        args=(
            Pointer(buffer=product.a.buffer),
            Pointer(buffer=product.b.buffer),
            Pointer(buffer=_split_k(problem, config).target),
            _product(problem, product, config),
            *_epilogue(problem),
        ),
    )


def _epilogue(problem: ProblemDescription) -> tuple[Struct | EpilogueArgument, ...]:
    """Where results lie, and the epilogue; nothing for a bare problem."""
    return (result_order(problem), *epilogue_arguments(problem)) if problem.epilogue else ()


def _reduction_vector(problem: ProblemDescription) -> int:
    return math.gcd(4, problem.output.size)


def _split_k(problem: ProblemDescription, config: Config) -> SplitK:
    return SplitK.of(problem, config["splits"])


def _workspace(problem: ProblemDescription, config: Config) -> WorkspacePlan:
    """The partials, where the sums are split."""
    return WorkspacePlan(() if config["splits"] == 1 else (_split_k(problem, config).partials,))


_LAST_RESORTS = {
    itemsize: Config.of(tile_m=16, tile_n=16, tile_k=tile_k, warps_m=1, warps_n=1, stages=2, splits=1, band=1)
    for itemsize, tile_k in ((2, 32), (4, 16))
}
"""By the size of elements, what is valid for every applicable problem."""


class ConvImplicitGemmMma(Solver):
    """Implicit GEMM by mma.sync, cp.async and ldmatrix with float32 accumulators, and split-K with a reduction.

    float32 is split into two tf32, of which three products are added (3xTF32); where tf32 is allowed, it is cut to it.
    Padding is multiplied as zeros: an infinity or NaN of the filter spreads to outputs at the border. In 3xTF32 an
    infinity becomes NaN, as do values within 2**-11 of the largest float32.

    Configuration: a block of `warps_m` x `warps_n` warps computes `tile_m` x `tile_n` elements, from `tile_k` products
    of each at a time, with `stages` buffers; k is split among `splits` blocks; blocks go through tiles in bands of
    `band` tiles along m. How many elements are copied at once follows from the channels.
    """

    id = "ConvImplicitGemmMma"
    algorithm = Algorithm.IMPLICIT_GEMM
    applies_epilogues = True
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset(Layout),
            min_sm=80,
        ),
    )
    alignment_bytes = 16
    is_dynamic = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_m": (16, 32, 64, 128, 256),
        "tile_n": (16, 32, 64, 128, 256),
        "tile_k": (16, 32, 64),
        "warps_m": (1, 2, 4),
        "warps_n": (1, 2, 4),
        "stages": (2, 3, 4, 5),
        "splits": SPLITS,
        "band": (1, 8),
    }
    sources = ("implicit_gemm/mma.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        conv = ProblemDescription.convolution
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        last, data, weights = Layout.NHWC, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS
        pads = ((1, 0), (2, 1))
        return (
            conv(x=(4, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype=half, layout=last),
            conv(x=(2, 3, 41, 43), w=(16, 3, 7, 7), padding=3, stride=2, dtype=half, layout=last),
            conv(x=(2, 19, 17, 15), w=(37, 19, 3, 3), padding=pads, stride=2, dtype=half, layout=last, direction=data),
            conv(x=(2, 32, 14, 13), w=(64, 4, 3, 3), padding=1, groups=8, dtype=half, layout=last, direction=weights),
            conv(x=(8, 64, 14, 14), w=(128, 64, 1, 1), dtype=brain, layout=last, direction=weights),
            conv(x=(2, 24, 15, 16), w=(40, 24, 1, 1), stride=2, dtype=brain, direction=data),
            conv(x=(3, 12, 100), w=(20, 12, 9), padding=12, dilation=3, dtype=half),
            conv(x=(2, 32, 5, 8, 8), w=(48, 32, 3, 3, 3), padding=1, dtype=half, layout=Layout.NDHWC),
            conv(x=(2, 18, 15, 14), w=(20, 18, 3, 3), padding=1, direction=data),
            conv(x=(2, 32, 20, 20), w=(48, 32, 3, 3), padding=1, layout=last, direction=weights, math=MathMode.TF32),
            conv(x=(2, 24, 15, 16), w=(40, 24, 1, 1), stride=2, dtype=half, direction=data, epilogue="residual.dclamp"),
            conv(x=(2, 18, 15, 14), w=(20, 18, 3, 3), dtype=half, layout=last, direction=data, epilogue="dgelu_tanh"),
            conv(x=(2, 20, 9, 11), w=(36, 10, 3, 3), groups=2, dtype=half, epilogue="channel_bias.residual.relu"),
            conv(x=(2, 32, 14, 13), w=(40, 32, 3, 3), padding=1, layout=last, epilogue="scale.bias.silu.residual"),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_tensors(problem)).refused:
            return answer
        if problem.groups > 1 and problem.groups == problem.c == problem.k:
            return Applicability("depthwise filters have no product for tensor cores")
        if max(*problem.spatial, *problem.conv.stride, *problem.conv.dilation) > _MAX_COORDINATE - 2 * MAX_PADDING:
            return Applicability("counts coordinates in 32 bits: a size, stride or dilation is too large")
        if problem.direction is Direction.BACKWARD_DATA and math.prod(problem.conv.stride) > _MAX_LAUNCHES:
            return Applicability(f"stride {problem.conv.stride} takes more than {_MAX_LAUNCHES} launches")
        if not is_valid(problem, device, _LAST_RESORTS[problem.x.dtype.itemsize]):
            return Applicability("has more tiles than a grid")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return is_valid(problem, device, config)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return tf32_error_growth(problem)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return products_of_tf32(problem) == 3

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        if listed := _varied(short_listed(problem, device), _DEFAULTS):
            return listed
        resort = _LAST_RESORTS[problem.x.dtype.itemsize]
        return (EstimatedConfig(resort, self.estimate_ms(problem, device, resort)),)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return estimate_ms(problem, device, config)

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        return _workspace(problem, config).bytes

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        launches = zip(products(problem), block_kinds(problem), strict=True)
        steps = tuple(_launch(problem, product, kind, config) for product, kind in launches)
        if config["splits"] == 1:
            return ConvSolution(steps=steps)
        split_k = _split_k(problem, config)
        reduction = split_k.vector_reduction(steps[0], vector=_reduction_vector(problem))
        reduction = split_k.fused_reduction(reduction, problem)
        return ConvSolution(steps=(*steps, reduction), workspace=_workspace(problem, config))


def _varied(ranked: Iterable[EstimatedConfig], most: int) -> tuple[EstimatedConfig, ...]:
    """The first two of each shape of tile: estimates are too coarse to tell more of them apart."""
    seen: Counter[tuple[int, int]] = Counter()
    kept: list[EstimatedConfig] = []
    for each in ranked:
        shape = each.config["tile_m"], each.config["tile_n"]
        if seen[shape] < 2:
            kept.append(each)
        seen[shape] += 1
        if len(kept) == most:
            break
    return tuple(kept)


SOLVERS = (ConvImplicitGemmMma(),)
