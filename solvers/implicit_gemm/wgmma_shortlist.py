"""Shortlist of tilings of kernels_src/implicit_gemm/wgmma.cu for the cost model: a table of few of a large space."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable

import numpy as np

from miofind.device.device import Device
from miofind.solver.columns import Each
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.wgmma_product import SWIZZLES_BYTES, NchwTensors, ProductKind, WgmmaProduct
from miofind.solvers.implicit_gemm.wgmma_tiling import WGMMA_M, WgmmaGrid, WgmmaTile, WgmmaTiling

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
_CLUSTER_M, _BLOCKS = np.array((1, 2))[:, None, None], np.array((1, 2))[:, None]
_SPREAD_SPLITS = np.array((1, *(1 for _ in CLUSTER_SPLITS), *SPLITS))[:, None]
_SPREAD_CLUSTER_K = np.array((1, *CLUSTER_SPLITS, *(1 for _ in SPLITS)))[:, None]
"""How a tile's sum may be spread: not at all, over a cluster, or over splits."""


def short_list(product: WgmmaProduct, device: Device, shared_bytes: int) -> WgmmaTiling:
    """Valid tilings that are good for some problem, on a multiprocessor with that much shared memory for a block.

    Tiles with their sums spread, with one and two blocks a multiprocessor, alone and in a cluster that multicasts.
    """
    tiles = _tiles(product.kind, _k_tiles(product), may_swap=product.size_n <= WGMMA_M)
    spread = _spread(WgmmaGrid(product=product, tile=tiles), device)
    k_tiles = ceil_div(spread.grid.k_tiles, spread.splits * spread.cluster_k)
    stages = _most_stages(spread, k_tiles, shared_bytes)
    may_multicast = not product.is_weights and not product.is_strided and product.nchw is NchwTensors.NONE
    each = spread.but(blocks=_BLOCKS, cluster_m=_CLUSTER_M if may_multicast else _CLUSTER_M[:1])
    is_taken = (stages > 0) & each.is_valid_if_it_holds
    is_taken[:, 1] &= each.work_tiles[0, 0] * spread.cluster_k > device.sm_count
    is_taken[1:] &= _gains_by_multicast(spread, k_tiles)
    places, blocks, clusters = np.nonzero(is_taken.T)
    return spread.but(
        grid=spread.grid.at(places),
        stages=_STAGES[stages[blocks, places] - 1],
        splits=spread.splits[places],
        blocks=blocks + 1,
        cluster_m=clusters + 1,
        cluster_k=spread.cluster_k[places],
    )


def _k_tiles(product: WgmmaProduct) -> tuple[int, ...]:
    """Values of tile_k: the widest, and narrower ones that leave less of the last k-tile empty."""
    if product.is_weights:
        return (SWIZZLES_BYTES[0] // product.element_bytes,)
    lengths: list[int] = []
    least = math.inf
    for swizzle in SWIZZLES_BYTES:
        length = swizzle // product.element_bytes
        padded_k = ceil_div(product.size_k, length) * length
        if padded_k < least and (product.keeps_to_groups or padded_k == product.size_k):
            lengths.append(length)
            least = padded_k
    return tuple(lengths)


@functools.lru_cache(maxsize=256)
def _tiles(kind: ProductKind, lengths: tuple[int, ...], *, may_swap: bool) -> WgmmaTile:
    """The valid tiles of a kind of product, with such values of tile_k."""
    rows = [
        (*warpgroups, tile_n, length, swapped)
        for length, warpgroups, tile_n in itertools.product(lengths, _WARPGROUPS, WIDTHS)
        for swapped in ((False, True) if may_swap and warpgroups == (1, 1) else (False,))
    ]
    consumers, row_blocks, n, k, swapped = np.array(rows, int).reshape(-1, 5).T
    tile = WgmmaTile(kind=kind, consumers=consumers, row_blocks=row_blocks, n=n, k=k, swapped=swapped != 0)
    return tile.complete().at(np.flatnonzero(tile.is_valid))


def _spread(grid: WgmmaGrid, device: Device) -> WgmmaTiling:
    """Valid tiles with their sums in one, and spread over clusters, and over as many splits as fill the device."""
    processors = max(1, device.sm_count)
    spread = WgmmaTiling(
        grid=grid,
        stages=STAGES[0],
        splits=_SPREAD_SPLITS,
        blocks=1,
        cluster_m=1,
        cluster_n=1,
        cluster_k=_SPREAD_CLUSTER_K,
    )
    most, work_tiles = grid.k_tiles // 2, spread.work_tiles
    alone, in_cluster = work_tiles[0], slice(1, 1 + len(CLUSTER_SPLITS))
    shares, splits = _SPREAD_CLUSTER_K[in_cluster], _SPREAD_SPLITS[in_cluster.stop :]
    is_taken = np.zeros(work_tiles.shape, bool)
    is_taken[in_cluster] = (shares <= most) & (work_tiles[in_cluster] * shares <= processors)
    fitting = splits <= np.minimum(most, _FULL_DEVICES * processors // alone)
    enough = fitting & (alone * splits >= _EMPTY_DEVICE * processors)
    last = fitting.copy()
    last[:-1] &= ~fitting[1:]
    is_taken[in_cluster.stop :] = np.where(enough.any(axis=0), enough, last)
    is_taken[:, grid.tile.swapped] = False
    is_taken[0] = True
    places, how = np.nonzero((is_taken & grid.is_valid).T)
    splits, cluster_k = _SPREAD_SPLITS[how, 0], _SPREAD_CLUSTER_K[how, 0]
    return spread.but(grid=grid.at(places), splits=splits, cluster_k=cluster_k)


def _most_stages(spread: WgmmaTiling, k_tiles: Each, shared_bytes: int) -> Each:
    """By blocks of a multiprocessor, places among STAGES, from 1, of the most that k-tiles take; 0 where none fit.

    As many as fit, but few for few k-tiles: loads far ahead delay those of the next work tile.
    """
    enough = np.searchsorted(_STAGES, k_tiles + 2) + 1
    fitting = spread.but(stages=_STAGES[:, None, None], blocks=_BLOCKS).holds(shared_bytes)
    return np.minimum(enough, np.add.reduce(fitting))


def _gains_by_multicast(spread: WgmmaTiling, k_tiles: Each) -> Each:
    """Whether a block of so many k-tiles may gain in a cluster of two that multicasts B."""
    tile = spread.tile
    is_small = (tile.m == WGMMA_M) & (tile.m * tile.n <= _SMALL_TILE)
    gains = is_small | ((k_tiles <= _FEW_K_TILES) & (tile.row_blocks == 2))
    is_whole = (spread.splits == 1) & (spread.cluster_k == 1)
    return gains & is_whole


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
