"""Tiles of a gathered matrix product: how a configuration's blocks copy, hold and store them.

kernels_src/implicit_gemm/mma_operands.cuh and mma.cu compute the same from their defines. Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.problem import DataType, MathMode, ProblemDescription
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.product import (
    Operand,
    Product,
    linear_stride,
    products,
    run_length,
    used_strides,
    vector_length,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How a block copies one operand's tile.

    Attributes:
        vector: elements of a row that a thread copies together.
        at_once: whether they move at once, else one by one through registers.
        row_vectors: threads that share a row.
        loads: vectors of a thread.
        registers: that a thread keeps for them.
        bytes: of the tile.
    """

    vector: int
    at_once: bool
    row_vectors: int
    loads: int
    registers: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What copies of an operand have in common, whatever the tiles.

    Attributes:
        is_a: whether it is A.
        k_major: whether its rows are along k.
        vector: elements of a row that a thread copies together.
        at_once: whether they move at once.
        axes: of its window, 0 without one.
        is_linear: whether its rows begin equally far apart.
        itemsize: of an element, in bytes.
    """

    is_a: bool
    k_major: bool
    vector: int
    at_once: bool
    axes: int
    is_linear: bool
    itemsize: int

    @staticmethod
    def of(product: Product, operand: Operand, itemsize: int) -> Side:
        is_a = operand is product.a
        mn, k_major = (product.m, product.a_k_major) if is_a else (product.n, product.b_k_major)
        vector = _vector(product, operand, itemsize)
        at_once = vector * itemsize >= 4
        return Side(
            is_a=is_a,
            k_major=k_major,
            vector=vector if at_once else _run(product, operand, itemsize),
            at_once=at_once,
            axes=len(product.window.first) if product.window and product.window.of_a == is_a else 0,
            is_linear=linear_stride(mn, operand.mn_strides) is not None,
            itemsize=itemsize,
        )


def copies_of(side: Side, config: Config) -> Copies:
    """How a configuration's blocks copy an operand."""
    is_a, k_major, vector, axes, itemsize = side.is_a, side.k_major, side.vector, side.axes, side.itemsize
    mn_tile, k_tile = config["tile_m"] if is_a else config["tile_n"], config["tile_k"]
    rows, columns = (mn_tile, k_tile) if k_major else (k_tile, mn_tile)
    row_vectors = columns // vector
    loads = ceil_div(rows * row_vectors, threads_of(config))
    kept = loads if k_major and (axes or not side.is_linear) else 1
    held = 0 if side.at_once else loads * vector * 5 // 4  # and addresses of those under way
    # Where no instruction transposes, a fragment's every 8 columns have an address of their own.
    warps = config["warps_m"] if is_a else config["warps_n"]
    addresses = 0 if k_major or itemsize == 2 else mn_tile // warps // 8
    return Copies(
        vector=vector,
        at_once=side.at_once,
        row_vectors=row_vectors,
        loads=loads,
        registers=kept * (1 + axes) + held + addresses,
        bytes=rows * columns * itemsize,
    )


def _vector(product: Product, operand: Operand, itemsize: int) -> int:
    """Elements that lie side by side, inside or outside the image together."""
    is_a = operand is product.a
    mn, k_major = (product.m, product.a_k_major) if is_a else (product.n, product.b_k_major)
    window = product.window if product.window and product.window.of_a == is_a else None
    if window and (window.k_axis if k_major else window.mn_axis) == 0:
        return 1
    along_mn, along_k = (mn, operand.mn_strides), (product.k, operand.k_strides)
    (along, strides), across = (along_k, along_mn) if k_major else (along_mn, along_k)
    others = (*used_strides(*across), operand.offset, operand.group_stride)
    return vector_length(16 // itemsize, along, strides, others)


def _run(product: Product, operand: Operand, itemsize: int) -> int:
    """Elements of a row that lie equally far apart, and meet the image's border at most along it."""
    is_a = operand is product.a
    mn, k_major = (product.m, product.a_k_major) if is_a else (product.n, product.b_k_major)
    window = product.window if product.window and product.window.of_a == is_a else None
    along, strides = (product.k, operand.k_strides) if k_major else (mn, operand.mn_strides)
    if window:  # coordinates are digits, of which the first runs
        return math.gcd(16 // itemsize, along.sizes[0])
    return run_length(16 // itemsize, along, strides)


def _out_vector(product: Product, itemsize: int, size: int) -> int:
    out = product.out
    others = (*used_strides(product.m, out.m_strides), out.offset, out.group_stride, size)
    return vector_length(16 // itemsize, product.n, out.n_strides, others)


def products_of_tf32(problem: ProblemDescription) -> int:
    """Tensor-core products for one of the problem's: three of tf32 make one of float32."""
    return 3 if problem.x.dtype is DataType.FLOAT32 and problem.math is MathMode.IEEE else 1


def tf32_error_growth(problem: ProblemDescription) -> float:
    """Over direct summation's bound: 1, but in 3xTF32 for sums of three products and fewer.

    In 3xTF32 a product is off by up to 16 units of 2**-24 of its size: 4 where each factor's second part is truncated,
    4 of the parts left out, 4 of truncated sums; direct summation's bound for one product is 8. Longer sums of a tile
    are truncated at every step, but tiles are short and added rounding to nearest.
    """
    if products_of_tf32(problem) == 1:
        return 1.0
    return max(1.0, 2.0 / math.sqrt(problem.reduction_length))


def threads_of(config: Config) -> int:
    return 32 * int(config["warps_m"] * config["warps_n"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What all tilings of a product have in common.

    Attributes:
        out_vector, float32_vector: elements stored at once of the problem's type, and of float32.
    """

    product: Product
    a: Side
    b: Side
    out_vector: int
    float32_vector: int

    @staticmethod
    def of(problem: ProblemDescription, product: Product) -> Sides:
        itemsize, size = problem.x.dtype.itemsize, problem.output.size
        return Sides(
            product=product,
            a=Side.of(product, product.a, itemsize),
            b=Side.of(product, product.b, itemsize),
            out_vector=_out_vector(product, itemsize, size),
            float32_vector=_out_vector(product, 4, size),
        )


@functools.lru_cache(maxsize=256)  # tilings of dozens of configurations ask
def sides_of(problem: ProblemDescription) -> tuple[Sides, ...]:
    """Those of all launches of a problem."""
    return tuple(Sides.of(problem, product) for product in products(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiling:
    """A configuration applied to one product.

    Attributes:
        a, b: how the operands are copied.
        out_vector: elements stored at once.
        gathers: whether results go through shared memory.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        tiles: of the output, all groups together.
        k_tiles: of the whole sum.
    """

    a: Copies
    b: Copies
    out_vector: int
    gathers: bool
    registers: int
    shared_bytes: int
    tiles: int
    k_tiles: int

    @staticmethod
    def of(problem: ProblemDescription, product: Product, config: Config) -> ProductTiling:
        return ProductTiling._of_sides(problem, Sides.of(problem, product), config)

    @staticmethod
    def _of_sides(problem: ProblemDescription, sides: Sides, config: Config) -> ProductTiling:
        product, itemsize = sides.product, problem.x.dtype.itemsize
        a, b = copies_of(sides.a, config), copies_of(sides.b, config)
        gathers = itemsize == 2 and config["splits"] == 1
        warp_m, warp_n = config["tile_m"] // config["warps_m"], config["tile_n"] // config["warps_n"]
        gathered_bytes = 2 * config["tile_m"] * (config["tile_n"] + 8) if gathers else 0
        accumulators, fragments = warp_m * warp_n // 32, (warp_m + warp_n) // 4
        if products_of_tf32(problem) > 1:
            accumulators, fragments = 2 * accumulators, 2 * fragments
        return ProductTiling(
            a=a,
            b=b,
            out_vector=sides.out_vector if gathers else sides.float32_vector,
            gathers=gathers,
            registers=round_up(accumulators + fragments + a.registers + b.registers + 40, 8),
            shared_bytes=max(config["stages"] * (a.bytes + b.bytes), gathered_bytes),
            tiles=ceil_div(product.m.count, config["tile_m"])
            * ceil_div(product.n.count, config["tile_n"])
            * problem.groups,
            k_tiles=ceil_div(product.k.count, config["tile_k"]),
        )


def alike(itemsize: int, config: Config) -> Config:
    """One configuration for all that are tiled alike: they differ in the number of splits, or only in that of several.

    A ranking asks for each of hundreds of configurations: what is known of this one is worth keeping.
    """
    return _with_splits(config, 1 if config["splits"] == 1 or itemsize > 2 else 2)


@functools.lru_cache(maxsize=1 << 14)  # of all problems together
def _with_splits(config: Config, splits: int) -> Config:
    return Config({**config, "splits": splits})


@functools.lru_cache(maxsize=1 << 12)
def tilings(problem: ProblemDescription, config: Config) -> tuple[ProductTiling, ...]:
    """Those of all launches, of a configuration that `alike` gave."""
    return tuple(ProductTiling._of_sides(problem, sides, config) for sides in sides_of(problem))
