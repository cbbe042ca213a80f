"""A block's shared memory in NumPy, as TMA's copies and wgmma's descriptors have it: elements at swizzled addresses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from helpers.in_numpy.wgmma import Array, copied_pixels, overlap, viewed, walked_pixels
from numpy.typing import NDArray

from miofind.solver.steps import Box, Im2col, TensorMap

Addresses = NDArray[np.int64]

ELEMENT = 2
"""Bytes of an element."""
PATTERN = 1024
"""Bytes at which swizzles repeat."""


def round_up(a: int, b: int) -> int:
    return -(-a // b) * b


def swizzled(addresses: Addresses, span: int) -> Addresses:
    """Where elements of a pattern of so many bytes (0: none) are: 16-byte words by the bits of their 128-byte line."""
    return addresses if span == 0 else addresses ^ ((addresses >> 7 & (span // 16 - 1)) << 4)


class SharedMemory:
    """The dynamic shared memory of a block, from the first address on at which swizzles begin.

    What nobody wrote is NaN, so that a result that meets it is.

    Args:
        memory: tensors by name, flat, channels last; the output is all NaN.
    """

    base = PATTERN

    def __init__(self, size_bytes: int, memory: dict[str, Array]) -> None:
        self.memory = memory
        self.elements = np.full((self.base + size_bytes) // ELEMENT, np.nan)

    def forget(self, start: int = 0, size_bytes: int | None = None) -> None:
        """From now on nobody has written these bytes, or any."""
        end = None if size_bytes is None else (start + size_bytes) // ELEMENT
        self.elements[start // ELEMENT : end] = np.nan

    def met(self, addresses: Addresses, span: int) -> Array:
        """What is at the addresses of a matrix that is swizzled over so many bytes."""
        assert addresses.max() < ELEMENT * len(self.elements), "beyond shared memory"
        found: Array = self.elements[swizzled(addresses, span) // ELEMENT]
        return found

    def rows_of_filters(self, start: int, terms: Addresses, row_bytes: int, *, are_columns: bool) -> Array:
        """64 filters by terms, as the descriptor of a K-major matrix, or of an MN-major one (columns), has them."""
        rows = np.arange(64)[:, None]
        across, along = (terms, rows) if are_columns else (rows, terms)
        return self.met(start + across * row_bytes + ELEMENT * along, row_bytes)

    def load_box(self, tensor_map: TensorMap, to: int, corner: tuple[int, ...]) -> None:
        """Copies a box, zeros beyond the tensor."""
        assert isinstance(tensor_map.copy, Box)
        assert max(tensor_map.copy.sizes) <= 256
        tensor = viewed(tensor_map, self.memory[tensor_map.pointer.buffer])
        box = np.zeros(tensor_map.copy.sizes[::-1])
        there, here = overlap(tensor.shape, box.shape, corner[::-1])
        box[here] = tensor[there]
        self._write(tensor_map, to, box)

    def load_pixels(
        self, tensor_map: TensorMap, to: int, corner: tuple[int, int, int, int], tap: tuple[int, int]
    ) -> None:
        """Copies pixels in im2col mode from a (channel, w, h, n) on, moved by a tap (w, h), zeros beyond the tensor."""
        assert all(0 <= offset <= 255 for offset in tap)
        self._write(tensor_map, to, copied_pixels(tensor_map, self.memory[tensor_map.pointer.buffer], corner, tap))

    def _write(self, tensor_map: TensorMap, to: int, copied: Array) -> None:
        addresses = to + ELEMENT * np.arange(copied.size)
        self.elements[swizzled(addresses, tensor_map.swizzle_bytes) // ELEMENT] = copied.ravel()

    def store_box(self, tensor_map: TensorMap, start: int, corner: tuple[int, ...]) -> None:
        """Copies a box to a tensor, cut off at its ends; nothing is stored twice."""
        assert isinstance(tensor_map.copy, Box)
        sizes = tensor_map.copy.sizes[::-1]
        staged = self.met(start + ELEMENT * np.arange(math.prod(sizes)), tensor_map.swizzle_bytes).reshape(sizes)
        tensor = viewed(tensor_map, self.memory[tensor_map.pointer.buffer])
        there, here = overlap(tensor.shape, sizes, corner[::-1])
        assert np.isnan(tensor[there]).all(), "stored twice"
        tensor[there] = staged[here]

    def store_pixels(self, tensor_map: TensorMap, start: int, corner: tuple[int, int, int, int]) -> None:
        """Stores pixels in im2col mode from a (channel, w, h, n) on; the walk must not leave an image."""
        walk = tensor_map.copy
        assert isinstance(walk, Im2col)
        assert min(walk.lower) >= 0
        assert max(walk.upper) <= 0
        sizes = (walk.pixels, walk.channels)
        staged = self.met(start + ELEMENT * np.arange(math.prod(sizes)), tensor_map.swizzle_bytes).reshape(sizes)
        tensor = viewed(tensor_map, self.memory[tensor_map.pointer.buffer])
        there, here = walked_pixels(tensor_map, tensor, corner, (0, 0))
        assert np.isnan(tensor[there]).all(), "stored twice"
        tensor[there] = staged[here]

    def beside(self, addresses: Mapping[str, Addresses]) -> dict[str, Array]:
        """All tensors, those that were loaded to where results are staged by what is at these addresses."""
        return self.memory | {name: self.elements[each // ELEMENT] for name, each in addresses.items()}
