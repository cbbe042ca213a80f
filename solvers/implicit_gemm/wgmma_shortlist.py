"""Shortlist of tilings of kernels_src/implicit_gemm/wgmma.cu for the cost model: few of a large space."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from miofind.device.device import Device
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.implicit_gemm.wgmma_tiling import SWIZZLES_BYTES, WGMMA_M, WgmmaTiling

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


def _splits(tile: WgmmaTiling, device: Device) -> Iterator[WgmmaTiling]:
    """Without split-K, and with as many splits as fill the device where tiles do not."""
    yield tile
    if tile.swapped:
        return
    work_tiles, most = tile.work_tiles, tile.k_tiles // 2
    processors = max(1, device.sm_count)
    for cluster_k in CLUSTER_SPLITS:
        clustered = tile.spread(splits=1, cluster=(1, 1, cluster_k))
        if cluster_k <= most and clustered.work_tiles * cluster_k <= processors:
            yield clustered
    fitting = [count for count in SPLITS if count <= min(most, _FULL_DEVICES * processors // work_tiles)]
    for splits in [count for count in fitting if work_tiles * count >= _EMPTY_DEVICE * processors] or fitting[-1:]:
        yield tile.spread(splits=splits, cluster=(1, 1, 1))


def _filled(tile: WgmmaTiling, device: Device, shared_bytes: int) -> Iterator[WgmmaTiling]:
    """One and two blocks a multiprocessor, with as many stages as fit, but few for few k-tiles.

    Loads far ahead delay those of the next work tile.
    """
    k_tiles = ceil_div(tile.k_tiles, tile.splits * tile.cluster[2])
    enough = min((count for count in STAGES if count >= k_tiles + 2), default=STAGES[-1])
    is_whole = tile.splits == math.prod(tile.cluster) == 1
    is_small = tile.tile_m == WGMMA_M and tile.tile_m * tile.tile_n <= _SMALL_TILE
    gains = (
        is_whole and not tile.product.is_weights and (is_small or (k_tiles <= _FEW_K_TILES and tile.row_blocks == 2))
    )
    for blocks in (1, 2) if tile.work_tiles * math.prod(tile.cluster) > device.sm_count else (1,):
        fewest = tile.filled(stages=STAGES[0], blocks=blocks)
        if not fewest.is_valid(shared_bytes):  # nor is it with more
            continue
        staged = (fewest.filled(stages=count, blocks=blocks) for count in reversed(STAGES) if count <= enough)
        filled = next(each for each in staged if each.holds(shared_bytes))
        yield filled
        if gains and (multicasting := filled.spread(splits=1, cluster=(2, 1, 1))).is_valid(shared_bytes):
            yield multicasting


def shortlisted_tilings(product: WgmmaProduct, device: Device, shared_bytes: int) -> Iterator[WgmmaTiling]:
    """Valid tilings that are good for some problem, on a multiprocessor with that much shared memory for a block."""
    for length, (consumers, row_blocks), tile_n in itertools.product(_k_tiles(product), _WARPGROUPS, WIDTHS):
        for swapped in (False, True) if product.size_n <= WGMMA_M and consumers == 1 else (False,):
            tile = WgmmaTiling(
                product=product,
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
            if tile.may_be_valid:
                for split in _splits(tile, device):
                    yield from _filled(split, device, shared_bytes)


def varied(ranked: Sequence[WgmmaTiling], most: int) -> list[WgmmaTiling]:
    """The first, but few of the same tile while there are others; in the order given."""
    seen: Counter[tuple[int, int, bool]] = Counter()
    repeats = []
    for tiling in ranked:
        tile = (tiling.tile_m, tiling.tile_n, tiling.swapped)
        repeats.append(seen[tile] // _SAME_TILES)
        seen[tile] += 1
    chosen = sorted(range(len(ranked)), key=lambda i: (repeats[i] > 0, i))[:most]
    return [ranked[i] for i in sorted(chosen)]
