"""ConvImplicitGemmMma: a convolution in any direction as one matrix product on tensor cores, operands gathered.

Kernel: kernels_src/implicit_gemm/mma.cu. What the product's indices stand for: solvers/common/product.py.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
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
from miofind.solvers.common.limits import MAX_ELEMENTS, MAX_PADDING, refuse_tensors
from miofind.solvers.common.product import Index, Operand, Product, Strides, Window, largest, linear_stride, products
from miofind.solvers.common.product_tiles import (
    ProductTiling,
    alike,
    products_of_tf32,
    tf32_error_growth,
    threads_of,
    tilings,
)
from miofind.solvers.common.split_k import RESULT_ORDER, SplitK, result_order
from miofind.solvers.implicit_gemm.mma_cost import estimate_ms, work_of

_MAX_COORDINATE = 2**30
_MAX_LAUNCHES = 16
_MAX_WORKSPACE_BYTES = 1 << 30
_MAX_REGISTERS = 255
_MAX_LOADS = 16  # of a thread, in vectors
_SHARED_BYTES = 99 << 10
_K_BYTES = (64, 128)  # of a tile's row along k
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
    problem: ProblemDescription, product: Product, config: Config, tiling: ProductTiling
) -> tuple[tuple[str, str | int], ...]:
    window = product.window
    axes = len(window.first) if window else 0
    names = ("tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages", "band")
    return (
        ("ELEMENT", problem.x.dtype.value),
        *((name.upper(), config[name]) for name in names),
        ("A_K_MAJOR", int(product.a_k_major)),
        ("B_K_MAJOR", int(product.b_k_major)),
        ("A_VECTOR", tiling.a.vector),
        ("B_VECTOR", tiling.b.vector),
        ("A_AT_ONCE", int(tiling.a.at_once)),
        ("B_AT_ONCE", int(tiling.b.at_once)),
        ("OUT_VECTOR", tiling.out_vector),
        *((f"{name}_DIGITS", count) for name, count in _digits_of(product).items()),
        ("A_AXES", axes if window and window.of_a else 0),
        ("B_AXES", axes if window and not window.of_a else 0),
        ("MN_AXIS", window.mn_axis if window else 0),
        ("K_AXIS", window.k_axis if window else 0),
        ("PRODUCTS", products_of_tf32(problem)),
        ("FINAL", int(config["splits"] == 1)),
        ("SHARED_BYTES", tiling.shared_bytes),
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


def _product(problem: ProblemDescription, product: Product, config: Config, tiling: ProductTiling) -> Struct:
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
        k_of_split=ceil_div(tiling.k_tiles, config["splits"]) * config["tile_k"],
    )


def _launch(problem: ProblemDescription, product: Product, config: Config) -> KernelStep:
    tiling = ProductTiling.of(problem, product, config)
    return KernelStep(
        source="implicit_gemm/mma.cu",
        entry="implicit_gemm_mma",
        grid=(tiling.tiles * config["splits"], 1, 1),
        block=(threads_of(config), 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, product, config, tiling),
        args=(
            Pointer(buffer=product.a.buffer),
            Pointer(buffer=product.b.buffer),
            Pointer(buffer=_split_k(problem, config).target),
            _product(problem, product, config, tiling),
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


_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# What default_configs ranks by estimate; the last two are valid for every applicable problem of 2 and 4-byte elements.
_SHORT_LIST = Config.product(
    {
        ("tile_m", "tile_n", "warps_m", "warps_n"): (
            (128, 128, 2, 2),
            (128, 256, 2, 4),
            (256, 128, 4, 2),
            (128, 64, 2, 2),
            (64, 128, 2, 2),
            (256, 64, 4, 1),
            (64, 256, 1, 4),
            (64, 64, 2, 2),
            (128, 32, 4, 1),
            (32, 128, 1, 4),
            (64, 32, 2, 2),
            (32, 64, 2, 2),
            (256, 32, 4, 1),
            (32, 256, 1, 4),
            (128, 16, 4, 1),
            (16, 128, 1, 4),
            (64, 16, 4, 1),
            (16, 64, 1, 4),
            (32, 32, 2, 2),
            (16, 16, 1, 1),
        ),
        ("tile_k", "stages"): ((16, 4), (32, 4), (64, 3)),
        "splits": _SPLITS,
        "band": (8,),
    }
)
_LAST_RESORTS = tuple(
    Config.of(tile_m=16, tile_n=16, tile_k=tile_k, warps_m=1, warps_n=1, stages=2, splits=1, band=1)
    for tile_k in (16, 32)
)


@functools.cache
def _short_list(itemsize: int) -> tuple[Config, ...]:
    """Those that tile sums of such elements."""
    return tuple(config for config in _SHORT_LIST if config["tile_k"] * itemsize in _K_BYTES)


class _TiledAlike(NamedTuple):
    """Configurations of the short list that `alike` gives one for.

    Attributes:
        common: that one.
        members: their places in the short list, and their splits.
    """

    common: Config
    members: tuple[tuple[int, int], ...]


@functools.cache
def _tiled_alike(itemsize: int) -> tuple[_TiledAlike, ...]:
    """The short list for such elements by what is tiled alike."""
    found: dict[Config, list[tuple[int, int]]] = {}
    for place, config in enumerate(_short_list(itemsize)):
        found.setdefault(alike(itemsize, config), []).append((place, int(config["splits"])))
    return tuple(_TiledAlike(common, tuple(members)) for common, members in found.items())


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
        "splits": _SPLITS,
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

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE if problem.direction is Direction.BACKWARD_DATA else super().fuses_training(problem)

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_tensors(problem)).refused:
            return answer
        if problem.groups > 1 and problem.groups == problem.c == problem.k:
            return Applicability("depthwise filters have no product for tensor cores")
        if max(*problem.spatial, *problem.conv.stride, *problem.conv.dilation) > _MAX_COORDINATE - 2 * MAX_PADDING:
            return Applicability("counts coordinates in 32 bits: a size, stride or dilation is too large")
        if problem.direction is Direction.BACKWARD_DATA and math.prod(problem.conv.stride) > _MAX_LAUNCHES:
            return Applicability(f"stride {problem.conv.stride} takes more than {_MAX_LAUNCHES} launches")
        if not any(self.is_valid_config(problem, device, config) for config in _LAST_RESORTS):
            return Applicability("has more tiles than a grid")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        splits = config["splits"]
        if splits > 1 and splits > ceil_div(largest(problem).k, config["tile_k"]):
            return False
        blocks = _most_blocks(problem, device, alike(problem.x.dtype.itemsize, config))
        if blocks is None or blocks * splits > MAX_ELEMENTS:
            return False
        return splits == 1 or _workspace_holds(problem, splits)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return tf32_error_growth(problem)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return products_of_tf32(problem) == 3

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        ranked = short_listed(problem, device)
        resorts = [config for config in _LAST_RESORTS if self.is_valid_config(problem, device, config)]
        return tuple(_varied(ranked)[:8]) or tuple(resorts[:1])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return estimate_ms(problem, device, config)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        steps = tuple(_launch(problem, product, config) for product in products(problem))
        if config["splits"] == 1:
            return ConvSolution(steps=steps)
        split_k = _split_k(problem, config)
        reduction = split_k.vector_reduction(steps[0], vector=_reduction_vector(problem))
        reduction = split_k.fused_reduction(reduction, problem)
        return ConvSolution(steps=(*steps, reduction), workspace=WorkspacePlan((split_k.partials,)))


def _workspace_holds(problem: ProblemDescription, splits: int) -> bool:
    """Whether the partials of so many splits are few enough."""
    return SplitK.of(problem, splits).bytes <= _MAX_WORKSPACE_BYTES


def short_listed(problem: ProblemDescription, device: Device) -> list[Config]:
    """What `Solver.ranked` gives of the short list, sooner: what is tiled alike is looked at once."""
    itemsize = problem.x.dtype.itemsize
    configs = _short_list(itemsize)
    return [configs[place] for _, place in sorted(_estimated(problem, device, _tiled_alike(itemsize)))]


def _estimated(
    problem: ProblemDescription, device: Device, short_list: Sequence[_TiledAlike]
) -> Iterator[tuple[float, int]]:
    """Milliseconds and the place in the short list of its valid configurations."""
    most_k = largest(problem).k
    keeps_limit = {1: True}  # by splits: whether the workspace holds their partials
    for common, members in short_list:
        k_tiles = ceil_div(most_k, common["tile_k"])
        split = [(place, splits) for place, splits in members if splits == 1 or splits <= k_tiles]
        blocks = _most_blocks(problem, device, common) if split else None
        if blocks is None:
            continue
        work = work_of(problem, device, common)
        for place, splits in split:
            if splits not in keeps_limit:
                keeps_limit[splits] = _workspace_holds(problem, splits)
            if keeps_limit[splits] and blocks * splits <= MAX_ELEMENTS:
                yield work.ms(splits, device), place


def _varied(ranked: Sequence[Config]) -> list[Config]:
    """The first two of each shape of tile: estimates are too coarse to tell more of them apart."""
    seen: Counter[tuple[int, int]] = Counter()
    kept = []
    for config in ranked:
        shape = config["tile_m"], config["tile_n"]
        if seen[shape] < 2:
            kept.append(config)
        seen[shape] += 1
    return kept


@functools.lru_cache(maxsize=1 << 12)  # a ranking asks for each of hundreds of configurations
def _most_blocks(problem: ProblemDescription, device: Device, config: Config) -> int | None:
    """Blocks of the largest launch, for one split; None where blocks cannot run, or smaller ones would do.

    Args:
        config: that `alike` gave.
    """
    if config["tile_k"] * problem.x.dtype.itemsize not in _K_BYTES:
        return None
    warp_m, warp_n = config["tile_m"] // config["warps_m"], config["tile_n"] // config["warps_n"]
    if warp_m < 16 or warp_n < 16 or warp_m * warp_n > 64 * 64:
        return None
    most = largest(problem)
    if config["tile_m"] >= 2 * max(16, most.m) or config["tile_n"] >= 2 * max(16, most.n):
        return None
    launches = tilings(problem, config)
    return max(one.tiles for one in launches) if all(_fits(one, config, device) for one in launches) else None


def _fits(tiling: ProductTiling, config: Config, device: Device) -> bool:
    """Whether a launch is within what a block and a thread have."""
    threads = threads_of(config)
    sides = (tiling.a, tiling.b)
    if any(side.row_vectors > threads or side.loads > _MAX_LOADS for side in sides):
        return False
    if tiling.gathers and config["tile_n"] // tiling.out_vector > threads:
        return False
    if tiling.registers > _MAX_REGISTERS or tiling.registers * threads > 65536:
        return False
    return tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)


SOLVERS = (ConvImplicitGemmMma(),)
