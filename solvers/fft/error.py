"""Errors of products of Fourier transforms, and which results are summed directly for them."""

from __future__ import annotations

import functools
import math

from miofind.core.problem import Direction, ProblemDescription
from miofind.solvers.common.overlap import least_products
from miofind.solvers.fft.edges import edge_items

# Largest errors simulated with NumPy's float32 transforms, 150 problems, of 2 to 2048 points along an axis: 2.2 a
# doubling of points; and 3.1 times the root of the terms of sums (miofind/verify/accuracy.py).
_TRANSFORM_ERROR = 8.0
_SUM_ERROR = 8.0
# Of direct summation, times the root of the terms (miofind/verify/accuracy.py).
DIRECT_ERROR = 8.0
# Errors are those of a whole tile, and the bound is that of an element's own sum: in shorter sums of normal data some
# elements are so much smaller than their tile that they break it.
LEAST_PRODUCTS = 16
_MOST_DIRECT = 0.02  # products that are summed directly at most, of all operations
_FREE_DIRECT = 1 << 24


def product_error(points: int, terms: int) -> float:
    """Largest error in float32 roundoffs, over sqrt(x^2 * w^2) of an element that sums as many products as any.

    Args:
        points: of a transform.
        terms: products of transforms that are summed at a frequency.
    """
    return _TRANSFORM_ERROR * math.log2(max(2, points)) + _SUM_ERROR * math.sqrt(terms)


@functools.lru_cache(maxsize=256)
def summed_directly(lifted: ProblemDescription, error: float) -> int:
    """Products below which a result is summed directly, so that the others keep direct summation's bound if they can.

    Where that is much to sum, or the longest sums are not much longer, only those are that have no bound at all.

    Args:
        lifted: of two spatial dimensions.
        error: as `product_error` gives it.
    """
    least, longest = least_products(lifted), lifted.reduction_length
    if lifted.direction is Direction.BACKWARD_WEIGHTS:
        return 0
    for limit in (math.ceil((error / DIRECT_ERROR) ** 2), LEAST_PRODUCTS):
        if limit > LEAST_PRODUCTS and 2 * limit > longest:
            continue
        if least >= limit:
            return 0
        items = edge_items(lifted, limit)
        if items < 2**30 and items * limit <= max(_MOST_DIRECT * lifted.flops, _FREE_DIRECT):
            return limit
    return 0
