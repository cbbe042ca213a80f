"""Shortlist of tilings of kernels_src/implicit_gemm/wgmma.cu for the cost model: few of a large space, as arrays.

An array has a place a tiling. What `wgmma_tiling.py` says of one tiling is said here of all at once, to the bit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from miofind.device.device import Device
from miofind.solver.columns import Integers, Numbers, Truths, ceil_div_each
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.wgmma_product import NchwTensors, WgmmaProduct
from miofind.solvers.implicit_gemm.wgmma_cost import copied, multiply_cycles
from miofind.solvers.implicit_gemm.wgmma_tiling import (
    ALIGNMENT_BYTES,
    MAX_INT,
    MAX_PARTIALS_BYTES,
    STATIC_BYTES,
    SWIZZLES_BYTES,
    WGMMA_M,
    WgmmaTiling,
    config_of,
    has_tile_k,
    output_buffers,
    phase_cluster_k,
)

_WARPGROUPS = ((2, 2), (3, 1), (2, 1), (1, 1))
"""Consumers, and blocks of 64 rows of each."""

WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
STAGES = (3, 4, 5, 6, 8, 10)
SPLITS = (2, 4, 8, 16, 32, 64, 128)
CLUSTER_SPLITS = (2, 4, 8)

_FULL_DEVICES = 4
_EMPTY_DEVICE = 0.25
"""Work tiles a multiprocessor: split-K makes no more and no fewer."""

_FEW_K_TILES = 4
_SMALL_TILE = WGMMA_M * 96
"""Tiles of 256 rows with so few k-tiles, and such small ones, gained 3 to 16 % by multicasting B in clusters of two."""

_SAME_TILES = 2

_STAGES = np.array(STAGES)
_SPREAD_SPLITS = np.array((1, *(1 for _ in CLUSTER_SPLITS), *SPLITS))
_SPREAD_CLUSTER_K = np.array((1, *CLUSTER_SPLITS, *(1 for _ in SPLITS)))
"""How a tile's sum may be spread: not at all, over a cluster, or over splits."""

_BLOCKS = np.array((1, 2))
_ALONG_M = np.array((1, 2))


def _k_tiles(product: WgmmaProduct) -> list[int]:
    """Values of tile_k: the widest, and narrower ones that leave less of the last k-tile empty."""
    if product.is_weights:
        return [SWIZZLES_BYTES[0] // product.element_bytes]
    lengths: list[int] = []
    least = math.inf
    for swizzle in SWIZZLES_BYTES:
        length = swizzle // product.element_bytes
        padded_k = ceil_div(product.size_k, length) * length
        if padded_k < least and (product.keeps_to_groups or padded_k == product.size_k):
            lengths.append(length)
            least = padded_k
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """All that it depends on which tiles there are, and what a k-tile of each costs.

    Attributes:
        lengths: values of tile_k.
        may_swap: whether A and B may be swapped.
        least_n: the narrowest block of backward weights that holds N, 0 where none does.
        product: any of the kind.
    """

    lengths: tuple[int, ...]
    element_bytes: int
    nchw: NchwTensors
    is_weights: bool
    is_strided: bool
    has_k_major_filters: bool
    may_swap: bool
    least_n: int
    product: WgmmaProduct = field(compare=False, repr=False)

    @staticmethod
    def of(product: WgmmaProduct) -> _Kind:
        widths = [swizzle // product.element_bytes for swizzle in SWIZZLES_BYTES]
        fitting = [width for width in widths if width >= product.size_n] if product.is_weights else []
        return _Kind(
            lengths=tuple(length for length in _k_tiles(product) if has_tile_k(product, length)),
            element_bytes=product.element_bytes,
            nchw=product.nchw,
            is_weights=product.is_weights,
            is_strided=product.is_strided,
            has_k_major_filters=product.has_k_major_filters,
            may_swap=product.size_n <= WGMMA_M,
            least_n=min(fitting, default=0),
            product=product,
        )


class Tiles(NamedTuple):
    """The tiles of a kind of product, by tile.

    Attributes:
        holds_two: whether registers hold two blocks a multiprocessor.
        spills: whether a thread spills where its block is in no cluster.
        stage_bytes, buffer_bytes: of a stage of the pipeline, and of an output buffer of each consumer.
        multiply: cycles of a k-tile.
        copies: TMA loads of a k-tile of the busier producer warp.
        rows, rows_of_two: of a k-tile that a block loads, and one of a cluster of two.
    """

    consumers: Integers
    row_blocks: Integers
    tile_m: Integers
    tile_n: Integers
    tile_k: Integers
    swapped: Truths
    block_n: Integers
    holds_two: Truths
    spills: Truths
    stage_bytes: Integers
    buffer_bytes: Integers
    multiply: Numbers
    copies: Integers
    rows: Numbers
    rows_of_two: Numbers

    def at(self, places: Integers | Truths) -> Tiles:
        """Those at some places."""
        return Tiles._make(column[places] for column in self)


_TILE_TYPES = (*(int,) * 5, bool, int, bool, bool, int, int, float, int, float, float)


@functools.lru_cache(maxsize=256)
def _tiles(kind: _Kind) -> Tiles:
    """Tiles that are valid where sizes fill them, but for what grids and memory hold."""
    of_any = replace(kind, lengths=())
    parts = (_NO_TILES, *(_tiles_of_length(of_any, length) for length in kind.lengths))
    return Tiles._make(map(np.concatenate, zip(*parts, strict=True)))


_NO_TILES = Tiles(*(np.array((), kind) for kind in _TILE_TYPES))


@functools.lru_cache(maxsize=256)
def _tiles_of_length(kind: _Kind, length: int) -> Tiles:
    """Those whose k-tiles have a length, which few kinds differ in alone."""
    found = []
    for (consumers, row_blocks), tile_n in itertools.product(_WARPGROUPS, WIDTHS):
        for swapped in (False, True) if kind.may_swap and consumers == 1 else (False,):
            tile = WgmmaTiling(
                product=kind.product,
                consumers=consumers,
                row_blocks=row_blocks,
                tile_m=WGMMA_M * consumers * row_blocks,
                tile_n=tile_n,
                tile_k=length,
                stages=STAGES[0],
                splits=1,
                blocks=1,
                cluster=(1, 1, 1),
                swapped=swapped,
            )
            if tile.has_registers() and tile.is_swappable() and tile.has_tile_n():
                found.append(_of_tile(tile))
    return Tiles(*map(np.array, zip(*found, strict=True), _TILE_TYPES)) if found else _NO_TILES


def _of_tile(tile: WgmmaTiling) -> tuple[float, ...]:
    """What the columns of `Tiles` have of one, in their order."""
    rows, copies = copied(tile)
    rows_of_two, _ = copied(replace(tile, cluster=(2, 1, 1)))
    return (
        *(tile.consumers, tile.row_blocks, tile.tile_m, tile.tile_n, tile.tile_k, tile.swapped, tile.block_n),
        *(replace(tile, blocks=2).has_registers(), tile.spills(), tile.stage_bytes, tile.buffer_bytes),
        *(multiply_cycles(tile), copies, rows, rows_of_two),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Filled:
    """The tiles of a product that are not mostly empty.

    Attributes:
        size_m, padded_n: M and N of one group, N in whole blocks and all taps together.
        phase_k_tiles: of a tile of each phase, the one with most first.
    """

    product: WgmmaProduct
    tiles: Tiles
    size_m: Integers
    padded_n: Integers
    phase_k_tiles: tuple[Integers, ...]

    @staticmethod
    def of(product: WgmmaProduct) -> _Filled:
        tiles = _tiles(_Kind.of(product))
        size_m = np.where(tiles.swapped, product.size_n, product.size_m)
        size_n = np.where(tiles.swapped, product.size_m, product.size_n)
        if product.has_nchw_n:
            size_n = product.problem.n * ceil_div_each(product.image, tiles.block_n) * tiles.block_n
        taps = math.prod(product.taps) if product.is_weights else 1
        padded_n = ceil_div_each(size_n, tiles.block_n) * tiles.block_n * taps
        is_filled = (tiles.tile_n < 2 * np.maximum(32, padded_n)) & (tiles.tile_m < 2 * np.maximum(WGMMA_M, size_m))
        tiles = tiles.at(is_filled)
        if product.has_nchw_k:
            k_tiles = [product.problem.n * ceil_div_each(product.image, tiles.tile_k)]
        else:
            of_tap = ceil_div_each(product.size_k, tiles.tile_k)
            k_tiles = [of_tap * taps for taps in product.phase_taps]
        return _Filled(
            product=product,
            tiles=tiles,
            size_m=size_m[is_filled],
            padded_n=padded_n[is_filled],
            phase_k_tiles=tuple(k_tiles),
        )

    @property
    def tiles_of_group(self) -> Integers:
        """Of one group, without clusters that multicast."""
        along_m = ceil_div_each(self.size_m, self.tiles.tile_m)
        return along_m * ceil_div_each(self.padded_n, self.tiles.tile_n)

    def spread(self, device: Device) -> tuple[Integers, ...]:
        """Places of tiles, and of how their sums are spread: not, and with as many splits as fill the device."""
        processors = max(1, device.sm_count)
        tiles = self.tiles_of_group[:, None]
        work_tiles: Integers = np.add.reduce(phase_work_tiles(self.product, tiles, _SPREAD_SPLITS, _SPREAD_CLUSTER_K))
        most, alone = (self.phase_k_tiles[0] // 2)[:, None], work_tiles[:, :1]
        in_cluster = slice(1, 1 + len(CLUSTER_SPLITS))
        shares, splits = _SPREAD_CLUSTER_K[in_cluster], _SPREAD_SPLITS[in_cluster.stop :]
        is_taken = np.zeros(work_tiles.shape, bool)
        is_taken[:, in_cluster] = (shares <= most) & (work_tiles[:, in_cluster] * shares <= processors)
        fitting = splits <= np.minimum(most, _FULL_DEVICES * processors // alone)
        enough = fitting & (alone * splits >= _EMPTY_DEVICE * processors)
        last = fitting.copy()
        last[:, :-1] &= ~fitting[:, 1:]
        is_taken[:, in_cluster.stop :] = np.where(enough.any(axis=1)[:, None], enough, last)
        is_taken[self.tiles.swapped] = False
        is_taken[:, 0] = True
        return np.nonzero(is_taken)


def phase_work_tiles(
    product: WgmmaProduct, tiles: Integers, splits: Integers, cluster_k: Integers
) -> tuple[Integers, ...]:
    """Work tiles of each phase, which clusters compute one after another."""
    all_tiles = tiles * product.problem.groups * splits
    if not product.is_strided:
        return (all_tiles,)
    return tuple(ceil_div_each(all_tiles, cluster_k // shares) for shares in shares_of_phases(product, cluster_k))


def shares_of_phases(product: WgmmaProduct, cluster_k: Integers) -> tuple[Integers, ...]:
    """Blocks of clusters that split K of a tile of each phase."""
    if not product.is_strided:
        return (cluster_k,)
    table = np.zeros((max(CLUSTER_SPLITS) + 1, len(product.phase_taps)), int)
    for count in (1, *CLUSTER_SPLITS):
        table[count] = phase_cluster_k(product, count)
    return tuple(table[cluster_k].T)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shortlist:
    """Valid tilings that are good for some problem.

    Attributes:
        stages, splits, blocks: as of a `WgmmaTiling`.
        along_m, cluster_k: of clusters that multicast along M, and that split K.
        phase_k_tiles, phase_work_tiles: of each phase, the one with most first.
    """

    product: WgmmaProduct
    tiles: Tiles
    stages: Integers
    splits: Integers
    blocks: Integers
    along_m: Integers
    cluster_k: Integers
    phase_k_tiles: tuple[Integers, ...]
    phase_work_tiles: tuple[Integers, ...]

    def __len__(self) -> int:
        return len(self.stages)

    def config(self, place: int) -> Config:
        """The configuration of one of them."""
        tiles = self.tiles
        columns = (tiles.consumers, tiles.row_blocks, tiles.tile_n, tiles.tile_k, self.stages, self.splits, self.blocks)
        consumers, rows, tile_n, tile_k, *others = (int(column[place]) for column in (*columns, tiles.swapped))
        cluster = (int(self.along_m[place]), 1, int(self.cluster_k[place]))
        return config_of(consumers, rows, tile_n, tile_k * self.product.element_bytes, *others, cluster=cluster)

    @staticmethod
    def of(product: WgmmaProduct, device: Device, shared_bytes: int) -> Shortlist:
        """Those for a multiprocessor with that much shared memory for a block."""
        filled = _Filled.of(product)
        spread = _Spread.of(filled, device)
        stages, is_valid = spread.filled(device, shared_bytes)
        places, blocks, multicasts = np.nonzero(is_valid)
        along_m, at = _ALONG_M[multicasts], spread.at[places]
        tiles, cluster_k, splits = filled.tiles.at(at), spread.cluster_k[places], spread.splits[places]
        along = ceil_div_each(filled.size_m[at], tiles.tile_m * along_m)
        tiles_of_group = along * ceil_div_each(filled.padded_n[at], tiles.tile_n)
        return Shortlist(
            product=product,
            tiles=tiles,
            stages=stages[places, blocks],
            splits=splits,
            blocks=_BLOCKS[blocks],
            along_m=along_m,
            cluster_k=cluster_k,
            phase_k_tiles=tuple(k_tiles[at] for k_tiles in filled.phase_k_tiles),
            phase_work_tiles=phase_work_tiles(product, tiles_of_group, splits, cluster_k),
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Spread:
    """Tiles whose sums are spread over splits, or over clusters.

    Attributes:
        at: places of the tiles among those that are filled.
        k_tiles: of a tile, of the phase that has most.
        work_tiles: of all phases.
    """

    filled_tiles: _Filled
    at: Integers
    tiles: Tiles
    splits: Integers
    cluster_k: Integers
    k_tiles: Integers
    work_tiles: Integers

    @staticmethod
    def of(filled: _Filled, device: Device) -> _Spread:
        at, how = filled.spread(device)
        splits, cluster_k = _SPREAD_SPLITS[how], _SPREAD_CLUSTER_K[how]
        phases = phase_work_tiles(filled.product, filled.tiles_of_group[at], splits, cluster_k)
        return _Spread(
            filled_tiles=filled,
            at=at,
            tiles=filled.tiles.at(at),
            splits=splits,
            cluster_k=cluster_k,
            k_tiles=filled.phase_k_tiles[0][at],
            work_tiles=np.add.reduce(phases),
        )

    def filled(self, device: Device, shared_bytes: int) -> tuple[Integers, Truths]:
        """Stages with one and two blocks a multiprocessor, and which are valid, alone and in a cluster that multicasts.

        As many stages as fit, but few for few k-tiles: loads far ahead delay those of the next work tile.
        """
        tiles, k_tiles = self.tiles, ceil_div_each(self.k_tiles, self.splits * self.cluster_k)
        enough = _STAGES[np.minimum(np.searchsorted(_STAGES, k_tiles + 2), len(STAGES) - 1)]
        fitting = np.minimum(enough[:, None], self._most_stages(shared_bytes))
        places = np.searchsorted(_STAGES, fitting, side="right") - 1
        is_valid = (places >= 0) & self._is_valid()[:, None]
        is_valid[:, 1] &= tiles.holds_two & (self.work_tiles * self.cluster_k > device.sm_count)
        is_small = (tiles.tile_m == WGMMA_M) & (tiles.tile_m * tiles.tile_n <= _SMALL_TILE)
        gains = is_small | ((k_tiles <= _FEW_K_TILES) & (tiles.row_blocks == 2))
        multicasts = is_valid & (gains & self._may_multicast())[:, None]
        return _STAGES[places], np.stack((is_valid, multicasts), axis=-1)

    def _most_stages(self, shared_bytes: int) -> Integers:
        """Stages that shared memory holds with one and with two blocks a multiprocessor."""
        tiles = self.tiles
        budget = (shared_bytes + ALIGNMENT_BYTES) // _BLOCKS - 2 * ALIGNMENT_BYTES - STATIC_BYTES
        outputs = np.where(self.cluster_k > 1, 0, output_buffers(self.filled_tiles.product) * tiles.buffer_bytes)
        partials = np.where(self.cluster_k > 1, 4 * tiles.tile_m * (tiles.tile_n + 8), 0)
        most = (budget - outputs[:, None]) // tiles.stage_bytes[:, None]
        return np.where(partials[:, None] <= budget, most, 0)

    def _is_valid(self) -> Truths:
        """Whether the kernel serves a tiling that registers and shared memory hold."""
        product, tiles = self.filled_tiles.product, self.tiles
        problem, is_split, in_cluster = product.problem, self.splits > 1, self.cluster_k > 1
        is_valid = in_cluster | ~tiles.spills
        if problem.groups > 1 and (product.is_weights or product.has_nchw_n):
            is_valid &= is_split | in_cluster | (self.filled_tiles.size_m[self.at] % WGMMA_M == 0)
        if problem.epilogue.statistics:
            is_valid &= ~in_cluster if product.nchw is NchwTensors.NONE else ~in_cluster & ~is_split
        if is_split.any():
            size, least = problem.output.size, self.filled_tiles.phase_k_tiles[-1][self.at]
            holds = (least >= self.splits) & (4 * self.splits * size <= MAX_PARTIALS_BYTES)
            is_valid &= ~is_split | (holds if size % 4 == 0 else False)
        counts = np.maximum(self.work_tiles * self.cluster_k, self.k_tiles * self.splits * self.cluster_k)
        is_valid &= (counts <= MAX_INT) & self._has_columns()
        return is_valid

    def _has_columns(self) -> Truths:
        """Whether columns are counted in 32 bits, those beyond the last, too."""
        padded_n, tile_n = self.filled_tiles.padded_n[self.at], self.tiles.tile_n
        has_columns: Truths = ceil_div_each(padded_n, tile_n) * tile_n <= MAX_INT + 1
        return has_columns

    def _may_multicast(self) -> Truths:
        """Whether a cluster of two shares B, in whole repetitions of a swizzle, if nothing is split or swapped."""
        product, tiles = self.filled_tiles.product, self.tiles
        if product.is_weights or product.is_strided or product.nchw is not NchwTensors.NONE:
            return np.zeros(len(self.at), bool)
        size_m, padded_n = self.filled_tiles.size_m[self.at], self.filled_tiles.padded_n[self.at]
        length = (tiles.tile_n if product.has_k_major_filters else tiles.tile_k) // 2
        is_alone = (self.splits == 1) & (self.cluster_k == 1) & ~tiles.swapped
        along = ceil_div_each(size_m, 2 * tiles.tile_m) * ceil_div_each(padded_n, tiles.tile_n)
        is_counted = 2 * along * product.problem.groups <= MAX_INT
        may: Truths = is_alone & (size_m > tiles.tile_m) & (length % 8 == 0) & is_counted
        return may


def varied(tiles: Iterable[Hashable], most: int) -> list[int]:
    """Places of the first, but few of the same tile while there are others; in the order given."""
    seen: Counter[Hashable] = Counter()
    firsts: list[int] = []
    repeated: list[int] = []
    for place, tile in enumerate(tiles):
        (firsts if seen[tile] < _SAME_TILES else repeated).append(place)
        seen[tile] += 1
        if len(firsts) == most:
            return firsts
    return sorted([*firsts, *repeated[: most - len(firsts)]])
