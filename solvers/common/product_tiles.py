"""Tiles of a gathered matrix product: how the blocks of a configuration, or of each of a table, copy and hold them.

kernels_src/implicit_gemm/mma_operands.cuh and mma.cu compute the same from their defines. Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.problem import DataType, MathMode, ProblemDescription
from miofind.solver.columns import chosen, is_table, larger
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
    return _products_of(problem.x.dtype, problem.math)


def _products_of(dtype: DataType, math_mode: MathMode) -> int:
    return 3 if dtype is DataType.FLOAT32 and math_mode is MathMode.IEEE else 1


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
    threads: int = 32 * config["warps_m"] * config["warps_n"]
    return threads


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """All that blocks depend on besides their configuration; few for all problems.

    Attributes:
        dtype, math: of the problem.
        out_vector, float32_vector: elements stored at once of the problem's type, and of float32.
    """

    dtype: DataType
    math: MathMode
    a: Side
    b: Side
    out_vector: int
    float32_vector: int

    @staticmethod
    def of(problem: ProblemDescription, product: Product) -> BlockKind:
        """That of one of a problem's products."""
        itemsize, size = problem.x.dtype.itemsize, problem.output.size
        return BlockKind(
            dtype=problem.x.dtype,
            math=problem.math,
            a=Side.of(product, product.a, itemsize),
            b=Side.of(product, product.b, itemsize),
            out_vector=_out_vector(product, itemsize, size),
            float32_vector=_out_vector(product, 4, size),
        )

    @property
    def products(self) -> int:
        """Products on tensor cores for one of the problem's."""
        return _products_of(self.dtype, self.math)


@functools.lru_cache(maxsize=256)  # dozens of configurations ask
def block_kinds(problem: ProblemDescription) -> tuple[BlockKind, ...]:
    """Those of all launches of a problem."""
    return tuple(BlockKind.of(problem, product) for product in products(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductBlock:
    """A configuration applied to a kind of block: what one copies, holds and stores; of a table of them, arrays.

    Attributes:
        a, b: how the operands are copied.
        gathers: whether results go through shared memory.
        out_vector: elements stored at once.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
    """

    a: Copies
    b: Copies
    gathers: bool
    out_vector: int
    registers: int
    shared_bytes: int

    @staticmethod
    def of(kind: BlockKind, config: Config) -> ProductBlock:
        a, b = copies_of(kind.a, config), copies_of(kind.b, config)
        gathers = (kind.dtype.itemsize == 2) & (config["splits"] == 1)
        warp_m, warp_n = config["tile_m"] // config["warps_m"], config["tile_n"] // config["warps_n"]
        gathered_bytes = chosen(gathers, 2 * config["tile_m"] * (config["tile_n"] + 8), 0)
        parts = 2 if kind.products > 1 else 1
        held = parts * (warp_m * warp_n // 32) + parts * ((warp_m + warp_n) // 4)
        return ProductBlock(
            a=a,
            b=b,
            gathers=gathers,
            out_vector=chosen(gathers, kind.out_vector, kind.float32_vector),
            registers=round_up(held + a.registers + b.registers + 40, 8),
            shared_bytes=larger(config["stages"] * (a.bytes + b.bytes), gathered_bytes),
        )


def alike(kind: BlockKind, config: Config) -> Config:
    """One configuration for all whose blocks are alike: they differ in numbers of splits, or in those above 1 alone.

    A table stands for itself.
    """
    if is_table(config["splits"]):
        return config
    return _with_splits(config, 1 if config["splits"] == 1 or kind.dtype.itemsize > 2 else 2)


@functools.lru_cache(maxsize=1 << 14)  # of all problems together
def _with_splits(config: Config, splits: int) -> Config:
    return Config({**config, "splits": splits})


def tiles_of(problem: ProblemDescription, product: Product, config: Config) -> int:
    """Tiles of a product's output, all groups together."""
    along_m, along_n = ceil_div(product.m.count, config["tile_m"]), ceil_div(product.n.count, config["tile_n"])
    return along_m * along_n * problem.groups
