"""A batch in parts that a bounded workspace holds."""

from __future__ import annotations

from collections.abc import Iterator


def chunks(count: int, most: int) -> Iterator[slice]:
    """Slices of `most` each that cover 0 ... count - 1, the last as long as what is left."""
    return (slice(first, min(first + most, count)) for first in range(0, count, most))
