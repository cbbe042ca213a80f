"""Random arguments of `aten::convolution`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCall:
    """Shapes and strides of x and w, and the arguments behind them."""

    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    x_strides: tuple[int, ...]
    w_strides: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def geometry(self) -> tuple[Any, ...]:
        """The arguments behind the bias."""
        lists = list(self.stride), list(self.padding), list(self.dilation)
        return (*lists, self.transposed, list(self.output_padding), self.groups)

    @property
    def is_dense(self) -> bool:
        """Whether no element of x and w is left out or met twice."""
        return all(self.x_strides) and all(self.w_strides)


@st.composite
def drawn_calls(draw: st.DrawFn, least_batch: int = 0, ranks: tuple[int, ...] = (1, 2, 3)) -> DrawnCall:
    """1-D to 3-D, channels first or last, grouped, depthwise, transposed, with sizes of 1 and empty batches."""
    rank = draw(st.sampled_from(ranks))

    def numbers(least: int, most: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(least, most)] * rank))

    groups = draw(st.sampled_from([1, 1, 2, 4]))
    inner = draw(st.sampled_from([1, 1, 2, 3]))
    outer = groups * draw(st.sampled_from([1, 2, 3]))
    transposed = draw(st.booleans())
    taps, stride, dilation, padding = numbers(1, 3), numbers(1, 2), numbers(1, 2), numbers(0, 1)
    output_padding = tuple(draw(st.integers(0, s - 1)) for s in stride) if transposed else (0,) * rank
    reach = [d * (t - 1) + 1 for d, t in zip(dilation, taps, strict=True)]
    spatial = tuple(
        draw(st.integers(0, 4)) + max(1, 2 * p + 2 - r if transposed else r - 2 * p)
        for r, p in zip(reach, padding, strict=True)
    )
    batch = draw(st.integers(least_batch, 3))
    channels = outer if transposed else groups * inner
    x_shape = (batch, channels, *spatial)
    w_shape = (outer, inner, *taps)
    return DrawnCall(
        x_shape=x_shape,
        w_shape=w_shape,
        x_strides=draw(_strides(x_shape)),
        w_strides=draw(_strides(w_shape)),
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
        groups=groups,
    )


@st.composite
def _strides(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a packed tensor, channels first or last, told apart along dimensions of size 1, too."""
    rank = len(shape)
    order = draw(st.sampled_from([tuple(range(rank)), (0, *range(2, rank), 1)]))
    strides, step = [0] * rank, 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(1, shape[dimension])
    return tuple(strides)


def tensors_of(call: DrawnCall, device: str, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """x and w, uninitialised."""
    x = torch.empty_strided(call.x_shape, call.x_strides, dtype=dtype, device=device)
    return x, torch.empty_strided(call.w_shape, call.w_strides, dtype=dtype, device=device)
