"""Types of arrays that hold a number of each of many configurations, for what is computed of all of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]
Truths = NDArray[np.bool_]


def ceil_div_each(a: Integers | int, b: Integers | int) -> Integers:
    """a / b rounded up."""
    quotients: Integers = -np.floor_divide(-a, b)
    return quotients
