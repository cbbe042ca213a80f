"""Strips and column tiles of rows of dy: every pixel of dx is completed once, from all outputs that it meets."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config
from miofind.solvers.few_channels.data_tiling import DataTiling
from miofind.solvers.few_channels.row_streaming import ColumnTiles, RowStreaming
from miofind.solvers.few_channels.row_streaming_tf32 import RowStreamingTf32, TapBlocks
from miofind.solvers.few_channels.s2d_blocks import S2dRows

DEVICE = Device.virtual("90a")
SOLVER = Registry.default()["ConvFirstLayerDataRows"]
SPLIT_SOLVER = Registry.default()["ConvFirstLayerDataRowsTf32"]
CELL_SOLVER = Registry.default()["ConvFirstLayerData"]


@st.composite
def layers(draw: st.DrawFn, dtype: DataType = DataType.FLOAT16) -> ProblemDescription:
    sizes = [draw(st.integers(1, 40)), draw(st.integers(1, 200))]
    taps = [draw(st.integers(1, 5)), draw(st.integers(1, 9))]
    pads = [(draw(st.integers(0, 9)), draw(st.integers(0, 9))) for _ in range(2)]
    assume(all(size + sum(pad) >= tap for size, pad, tap in zip(sizes, pads, taps, strict=True)))
    return ProblemDescription.convolution(
        x=(draw(st.integers(1, 3)), 2, *sizes),
        w=(draw(st.sampled_from([8, 37])), 2, *taps),
        padding=pads,
        stride=[draw(st.integers(1, 5)) for _ in range(2)],
        dtype=dtype,
        layout=draw(st.sampled_from([Layout.NHWC, Layout.NCHW])),
        direction=Direction.BACKWARD_DATA,
    )


def drawn_config(seed: int, solver: Solver = SOLVER) -> Config:
    names = solver.parameters.items()
    return Config({name: random.Random(seed + rank).choice(values) for rank, (name, values) in enumerate(names)})


@given(problem=layers())
def test_blocks_meet_every_output_of_their_pixels_once(problem: ProblemDescription) -> None:
    for axis in range(2):
        stride, pad, taps = problem.conv.stride[axis], problem.conv.pad_before[axis], problem.filter[axis]
        s2d_blocks = S2dRows.of(problem, axis)
        for pixel in range(problem.spatial[axis]):
            block, within = divmod(pixel + pad, stride)
            assert s2d_blocks.first <= block < s2d_blocks.end
            met = {(block - i, tap) for i in range(s2d_blocks.met) if (tap := within + i * stride) < taps}
            assert met == {(i, r) for i in range(-20, 250) for r in range(taps) if i * stride - pad + r == pixel}


@given(problem=layers(), most=st.integers(1, 20), vector=st.sampled_from([1, 2, 4, 8]))
def test_column_tiles_complete_every_block_once(problem: ProblemDescription, most: int, vector: int) -> None:
    width, columns = S2dRows.of(problem, 1), problem.out_spatial[1]
    tiles = ColumnTiles.of(problem, width, 16 * most, vector)
    assert tiles.base % vector == tiles.step % vector == 0
    assert tiles.columns % 16 == 0
    assert tiles.count == 1 or tiles.columns <= 16 * most
    completed = []
    for tile in range(tiles.count):
        begin = tiles.base + tile * tiles.step
        assert tile == 0 or begin < columns
        first = width.first if tile == 0 else begin + width.met - 1
        end = width.end if tile + 1 == tiles.count else begin + tiles.step + width.met - 1
        for block in range(first, end):
            completed.append(block)
            met = [column for column in range(block - width.met + 1, block + 1) if 0 <= column < columns]
            assert all(begin <= column < begin + tiles.columns for column in met)
    assert completed == list(range(width.first, width.end))


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_strips_cover_the_rows_and_none_is_empty(problem: ProblemDescription, seed: int) -> None:
    tiling = RowStreaming.of(problem, drawn_config(seed), DEVICE)
    count = tiling.height.end - tiling.height.first
    assert tiling.strips.rows * (tiling.strips.row_strips - 1) < count <= tiling.strips.rows * tiling.strips.row_strips
    assert tiling.strips.count == problem.n * tiling.tiles.count * tiling.strips.row_strips


@given(problem=layers(DataType.FLOAT32), seed=st.integers(0, 10**6))
def test_float32_is_cut_into_whole_shares(problem: ProblemDescription, seed: int) -> None:
    config = drawn_config(seed, SPLIT_SOLVER)
    tiling = RowStreamingTf32.of(problem, config, DEVICE)
    count = tiling.height.end - tiling.height.first
    assert tiling.strips.rows * (tiling.strips.row_strips - 1) < count <= tiling.strips.rows * tiling.strips.row_strips
    assert tiling.strips.count == problem.n * tiling.tiles.count * tiling.strips.row_strips
    assert 8 * tiling.steps >= problem.k
    assert tiling.steps % config["warps_k"] == 0
    assert tiling.steps // config["warps_k"] % tiling.chunk == 0


@given(problem=layers(DataType.FLOAT32), warps=st.integers(1, 3))
def test_every_tap_is_a_column_and_packed_rows_move_up_by_pairs(problem: ProblemDescription, warps: int) -> None:
    taps, rows = TapBlocks.of(problem, warps), problem.filter[0]
    row_taps, stride = problem.filter[1] * problem.c, problem.conv.stride[0]
    pitch = row_taps + row_taps % 2
    if not taps.packed:
        assert taps.groups == rows
        assert 8 * (taps.count - 1) < row_taps <= 8 * taps.count
        return
    assert (taps.groups, 8 * taps.count >= rows * pitch) == (1, True)
    assert taps.count < rows * -(-row_taps // 8)
    assert stride >= rows or warps == 1
    shift = stride * pitch // 2  # in pairs of columns, of which a lane has one in every block of four
    for pair in range(rows * pitch // 2 - shift):
        block, lane = divmod(pair, 4)
        source = block + shift // 4 + (lane + shift % 4 >= 4), (lane + shift) % 4
        assert source == divmod(pair + shift, 4)


@pytest.mark.parametrize(("channels", "taps", "blocks"), [(3, 3, 4), (4, 3, 5), (1, 3, 2), (3, 7, 20)])
def test_small_filters_share_blocks(channels: int, taps: int, blocks: int) -> None:
    problem = ProblemDescription.convolution(x=(1, channels, 64, 64), w=(64, channels, taps, taps), padding=1)
    assert TapBlocks.of(problem, 1) == TapBlocks(packed=True, groups=1, count=blocks)


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_tiles_of_blocks_cover_a_row_and_stage_what_they_meet(problem: ProblemDescription, seed: int) -> None:
    config = drawn_config(seed, CELL_SOLVER)
    tiling = DataTiling.of(problem, config, DEVICE)
    width, stride = tiling.width, problem.conv.stride[1]
    assert tiling.s2d_blocks % 16 == 0
    assert tiling.s2d_blocks <= 16 * config["blocks"] * config["warps"]
    assert tiling.s2d_blocks * (tiling.s2d_tiles - 1) < width.count <= tiling.s2d_blocks * tiling.s2d_tiles
    for pixel in range(problem.spatial[1]):
        block, within = divmod(pixel + width.origin, width.size)
        staged = block // tiling.s2d_blocks * tiling.s2d_blocks + width.first  # the first column of the tile
        for column in range(problem.out_spatial[1]):
            tap = pixel + problem.conv.pad_before[1] - column * stride
            if not 0 <= tap < problem.filter[1]:
                continue
            depth = column - block - width.first  # of the s2d block's product
            assert 0 <= depth < width.taps
            assert tap == width.last_tap + within - depth * stride
            assert staged <= column < staged + tiling.columns


def test_strips_of_large_batches_fill_the_device_evenly() -> None:
    """16 images of 224 rows on 132 multiprocessors: strips of 28 rows, not one more turn for a few."""
    problem = ProblemDescription.convolution(
        x=(16, 3, 224, 224), w=(64, 3, 3, 3), padding=1, dtype="float16", layout="NHWC", direction="backward_data"
    )
    config = Config.of(blocks=2, warps_m=7, warps_n=1, warps_k=1, stages=4, resident=1)
    tiling = RowStreaming.of(problem, config, DEVICE)
    assert (tiling.tiles.count, tiling.tiles.columns, tiling.strips.rows, tiling.strips.count) == (1, 224, 28, 128)
