"""How a filter moves over an input, as PyTorch's functions are told it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from miofind.errors import InvalidArrayError, InvalidOptionError, brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How a filter moves over an input: one number a spatial dimension, and the groups of channels."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def of(filter_shape: Sequence[int], *, stride: Any, padding: Any, dilation: Any, groups: int) -> Window:
        """The window of a filter, of arguments as PyTorch's functions and modules have them.

        Args:
            filter_shape: its spatial sizes.
            stride, padding, dilation: a number, or one a dimension; of padding "valid" and "same", too.

        Raises:
            InvalidArrayError: another count of numbers.
            InvalidOptionError: another word, or "same" with a stride or uneven padding.
        """
        rank = len(filter_shape)
        return Window(
            stride=_each(stride, rank, "stride"),
            padding=_padding(padding, stride, dilation, filter_shape),
            dilation=_each(dilation, rank, "dilation"),
            groups=groups,
        )

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Stride, padding, dilation, transposed, output_padding and groups, as PyTorch's convolution takes them."""
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups

    def output_shape(self, x: Sequence[int], w: Sequence[int]) -> tuple[int, ...]:
        """(n, k, *out_spatial), of x: (n, c, *spatial) and w: (k, c/groups, *filter)."""
        steps = zip(x[2:], w[2:], self.stride, self.padding, self.dilation, strict=True)
        return (
            x[0],
            w[0],
            *((size + 2 * pad - gap * (taps - 1) - 1) // step + 1 for size, taps, step, pad, gap in steps),
        )


def _each(value: Any, rank: int, name: str) -> tuple[Any, ...]:
    """One number a spatial dimension.

    Raises:
        InvalidArrayError: another count of them.
    """
    numbers = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value,) * rank
    numbers = numbers * rank if len(numbers) == 1 else numbers
    if len(numbers) != rank:
        raise InvalidArrayError(f"{name}={brief(value)}: w has {rank} spatial dimensions, pass a number for each")
    return numbers


def _padding(padding: Any, stride: Any, dilation: Any, filter_shape: Sequence[int]) -> tuple[Any, ...]:
    """Padding before and after, one number a dimension.

    Raises:
        InvalidOptionError: another word than "valid" and "same", or "same" with a stride or uneven padding.
    """
    rank = len(filter_shape)
    if not isinstance(padding, str):
        return _each(padding, rank, "padding")
    if padding == "valid":
        return (0,) * rank
    gaps = _each(dilation, rank, "dilation")
    sums = [gap * (taps - 1) for gap, taps in zip(gaps, filter_shape, strict=True)]
    if padding != "same" or any(step != 1 for step in _each(stride, rank, "stride")) or any(n % 2 for n in sums):
        told = 'numbers, "valid", or "same" with stride 1 and filters whose reach is odd'
        raise InvalidOptionError(f"padding={brief(padding)} with stride={brief(stride)}: pass {told}")
    return tuple(n // 2 for n in sums)
