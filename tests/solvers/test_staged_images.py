"""The arithmetic of planes in shared memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miofind.core.problem import DataType, Layout, TensorDescriptor
from miofind.solvers.common.correlation import Axis
from miofind.solvers.depthwise.staged_images import StagedColumns, StagedVector, gap_slots


@given(
    size=st.integers(1, 100),
    outputs=st.integers(1, 100),
    taps=st.integers(1, 60),
    pad=st.integers(-40, 60),
    tile=st.sampled_from([8, 16, 64]),
)
def test_staged_columns_hold_every_input_that_a_tile_meets(
    size: int, outputs: int, taps: int, pad: int, tile: int
) -> None:
    axis = Axis(size=size, outputs=outputs, taps=taps, pad=pad, stride=1, dilation=1)
    columns = StagedColumns.of(axis, tile)
    assert columns.first % 8 == 0
    for start in range(0, outputs, tile):
        met = {o - pad + t for o in range(start, min(start + tile, outputs)) for t in range(taps)} & set(range(size))
        staged = range(start + columns.first, start + columns.first + columns.count)
        assert met <= set(staged)
        for o, column in ((start, i) for i in met if start - pad <= i < start - pad + taps):
            assert (column - staged.start) - (o - start) + columns.left == column - o + pad


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize("shape", [(2, 12, 7, 7), (2, 3, 5, 9), (1, 16, 14, 14), (1, 5, 8, 32)])
@pytest.mark.parametrize("channels", [1, 4, 8])
def test_vectors_lie_within_a_run_of_the_tensor(layout: Layout, shape: tuple[int, ...], channels: int) -> None:
    tensor = TensorDescriptor(shape=shape, dtype=DataType.FLOAT16, layout=layout)
    vector = StagedVector.of(tensor, channels, whole=True)
    run = channels if layout.channels_last else math.prod(shape[2:]) * channels if vector.flat else shape[3]
    assert 16 % (2 * vector.length) == 0
    assert run % vector.length == 0
    assert tensor.size % vector.length == 0


@pytest.mark.parametrize("images", [1, 2, 4, 8])
def test_gaps_hold_what_a_block_of_slots_reaches(images: int) -> None:
    starts = range(-15, 16) if images == 1 else range(-16 + images, 16, images)
    assert all(-start <= gap_slots(images) for start in starts)
