"""Space-to-depth blocks of dx by wgmma: each tap of a pixel is multiplied once, and each pixel written once."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Box, Config, TensorMap
from miofind.solvers.few_channels.data_wgmma_tiling import DataWgmmaTiling

DEVICE = Device.virtual("90a")
SOLVER = Registry.default()["ConvFirstLayerDataWgmma"]


@st.composite
def layers(draw: st.DrawFn) -> ProblemDescription:
    sizes = [draw(st.integers(1, 40)), draw(st.integers(1, 200))]
    taps = [draw(st.integers(1, 5)), draw(st.integers(1, 9))]
    pads = [(draw(st.integers(0, 9)), draw(st.integers(0, 9))) for _ in range(2)]
    assume(all(size + sum(pad) >= tap for size, pad, tap in zip(sizes, pads, taps, strict=True)))
    channels = draw(st.integers(1, 4))
    return ProblemDescription.convolution(
        x=(draw(st.integers(1, 3)), channels, *sizes),
        w=(draw(st.sampled_from([8, 16, 37, 40, 96])), channels, *taps),
        padding=pads,
        stride=[draw(st.integers(1, 5)) for _ in range(2)],
        dtype="float16",
        layout=draw(st.sampled_from([Layout.NHWC, Layout.NCHW])),
        direction=Direction.BACKWARD_DATA,
    )


def drawn_config(seed: int) -> Config:
    names = SOLVER.parameters.items()
    return Config({name: random.Random(seed + rank).choice(values) for rank, (name, values) in enumerate(names)})


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_blocks_meet_every_output_of_their_pixels_once(problem: ProblemDescription, seed: int) -> None:
    config = drawn_config(seed)
    tiling, stride, pad = (
        DataWgmmaTiling.of(problem, config, DEVICE),
        problem.conv.stride[1],
        problem.conv.pad_before[1],
    )
    wide, met = config["widen"] * stride, tiling.shifts - config["widen"] + 1
    for pixel in range(problem.spatial[1]):
        block, within = divmod(pixel + tiling.left, wide)
        first = block * config["widen"] - tiling.ahead - (met - 1)  # the column of dy of shift 0
        within -= tiling.s2d_offset
        taps = {first + shift: within + (met - 1 - shift) * stride for shift in range(tiling.shifts)}
        multiplied = {(column, tap) for column, tap in taps.items() if 0 <= tap < problem.filter[1]}
        assert multiplied == {
            (column, tap)
            for column in range(-20, 250)
            for tap in [pixel + pad - column * stride]
            if 0 <= tap < problem.filter[1]
        }


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_tiles_and_strips_cover_every_pixel_once(problem: ProblemDescription, seed: int) -> None:
    config = drawn_config(seed)
    tiling = DataWgmmaTiling.of(problem, config, DEVICE)
    wide = config["widen"] * problem.conv.stride[1]
    assert tiling.columns % 8 == 0
    assert tiling.columns * (tiling.tiles - 1) < tiling.s2d_blocks <= tiling.columns * tiling.tiles
    assert tiling.first_s2d * wide <= tiling.left
    assert (tiling.first_s2d + tiling.s2d_blocks) * wide >= tiling.left + problem.spatial[1]
    count = tiling.height.end - tiling.height.first
    assert tiling.strips.rows * (tiling.strips.row_strips - 1) < count <= tiling.strips.rows * tiling.strips.row_strips
    assert tiling.strips.count == problem.n * tiling.tiles * tiling.strips.row_strips
    assert config["teams"] * (tiling.blocks - 1) < tiling.strips.count <= config["teams"] * tiling.blocks


def met_columns(tiling: DataWgmmaTiling, widen: int) -> list[range]:
    """Columns of dy that each tile of a row meets."""
    s2d_blocks = [tiling.first_s2d + tile * tiling.columns for tile in range(tiling.tiles)]
    firsts = [block * widen - tiling.ahead - (tiling.shifts - widen) for block in s2d_blocks]
    return [range(first, first + (tiling.columns - 1) * widen + tiling.shifts) for first in firsts]


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_what_tiles_meet_is_staged_channels_first(problem: ProblemDescription, seed: int) -> None:
    """From a multiple of 8 columns on, so that vectors of a row are aligned and lie within."""
    assume(not problem.y.layout.channels_last)
    config = drawn_config(seed)
    tiling = DataWgmmaTiling.of(problem, config, DEVICE)
    assert tiling.boxes is None
    for met in met_columns(tiling, config["widen"]):
        assert met[-1] < met[0] - met[0] % 8 + tiling.staged
        assert (met[0] - met[0] % 8) % tiling.in_vector == tiling.staged % tiling.in_vector == 0


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_what_tiles_meet_is_in_boxes(problem: ProblemDescription, seed: int) -> None:
    """Boxes begin with whole groups of columns; every 16 filters of a column lie within a row of a box."""
    assume(problem.y.layout.channels_last and problem.k % 8 == 0)
    config = drawn_config(seed)
    tiling, widen = DataWgmmaTiling.of(problem, config, DEVICE), config["widen"]
    boxes = tiling.boxes
    assert boxes is not None
    assert boxes.columns * boxes.phases == widen
    assert problem.out_spatial[1] % boxes.columns == 0
    parts = -(-2 * boxes.columns * problem.k // boxes.swizzle_bytes)
    assert boxes.count % (parts * boxes.phases) == 0
    rows = boxes.count // (parts * boxes.phases) * boxes.rows
    assert boxes.bytes == parts * boxes.phases * -(-rows // 8) * 8 * boxes.swizzle_bytes
    for met in met_columns(tiling, widen):
        assert (met[0] - boxes.lead) % boxes.columns == 0
        assert met[-1] < met[0] - boxes.lead + rows * widen
    for column in range(boxes.columns):
        for first in range(0, 2 * problem.k, 32):
            assert (column * 2 * problem.k + first) % boxes.swizzle_bytes <= boxes.swizzle_bytes - 32


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_products_read_what_boxes_bring(problem: ProblemDescription, seed: int) -> None:
    """Loads and word_offset of data_wgmma_nhwc.cuh, in bytes of a stage without its swizzle."""
    assume(problem.y.layout.channels_last and problem.k % 8 == 0)
    config, draw = drawn_config(seed), random.Random(seed)
    tiling, widen, k, width = (
        DataWgmmaTiling.of(problem, config, DEVICE),
        config["widen"],
        problem.k,
        problem.out_spatial[1],
    )
    boxes = tiling.boxes
    assert boxes is not None
    part_bytes = boxes.bytes // -(-2 * boxes.columns * k // boxes.swizzle_bytes)
    phase_bytes = part_bytes // boxes.phases
    for columns in met_columns(tiling, widen):
        first, rest = divmod(columns[0] - boxes.lead, boxes.columns)
        assert rest == 0
        for _ in range(20):
            shift, block, term = draw.randrange(tiling.shifts), draw.randrange(tiling.columns), draw.randrange(k)
            staged, (step, within) = boxes.lead + shift, divmod(term, 16)
            part, in_row = divmod(staged % boxes.columns * 2 * k + 32 * step, boxes.swizzle_bytes)
            at = part * part_bytes + staged % widen // boxes.columns * phase_bytes
            at += (staged // widen + block) * boxes.swizzle_bytes + in_row + 2 * within
            part, rest = divmod(at, part_bytes)
            phase, rest = divmod(rest, phase_bytes)
            row, byte = divmod(rest, boxes.swizzle_bytes)
            element = part * boxes.swizzle_bytes // 2 + byte // 2  # of the columns that are side by side
            group = first + phase + row * boxes.phases
            assert element < boxes.columns * k
            column = columns[0] + shift + block * widen
            assert group * boxes.columns * k + element == column * k + term
            assert (0 <= group < width // boxes.columns) == (0 <= column < width)


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_pairs_of_elements_are_aligned_and_of_pixels_that_there_are(problem: ProblemDescription, seed: int) -> None:
    config = drawn_config(seed)
    tiling = DataWgmmaTiling.of(problem, config, DEVICE)
    wide, width = config["widen"] * problem.conv.stride[1], problem.spatial[1]
    channels = problem.c if problem.x.layout.channels_last else 1
    if tiling.out_vector == 1:
        return
    for block in range(tiling.first_s2d, tiling.first_s2d + tiling.s2d_blocks):
        first = (block * wide - tiling.left) * channels  # of the s2d block's elements in a row
        for element in range(first, first + wide * channels, 2):
            assert element % 2 == width * channels % 2 == 0
            inside = [0 <= at // channels < width for at in (element, element + 1)]
            assert inside[0] == inside[1]


@pytest.mark.parametrize(
    ("taps", "stride", "padding", "left"), [(7, 2, 3, 4), (3, 2, 1, 2), (3, 1, 1, 2), (4, 4, 0, 0), (4, 2, 1, 1)]
)
def test_blocks_begin_at_even_columns_where_that_costs_no_product(
    taps: int, stride: int, padding: int, left: int
) -> None:
    problem = ProblemDescription.convolution(
        x=(1, 3, 64, 64),
        w=(64, 3, taps, taps),
        padding=padding,
        stride=stride,
        dtype="float16",
        direction="backward_data",
    )
    config = Config.of(tile_w=64, widen=2, teams=1, stages=2, resident=1)
    tiling = DataWgmmaTiling.of(problem, config, DEVICE)
    assert (tiling.left, tiling.out_vector) == (left, 2 - left % 2)
    assert tiling.shifts == -(-taps // stride) + 1


@pytest.mark.parametrize(
    ("k", "width", "widen", "columns", "swizzle_bytes", "count"),
    [
        (64, 112, 1, 1, 128, 1),
        (64, 224, 2, 2, 128, 2),  # columns of a s2d block are neighbours in a row of two swizzle spans
        (64, 109, 2, 1, 128, 2),  # they would not divide a row of dy: two phases of columns
        (32, 112, 2, 2, 128, 1),
        (32, 112, 1, 1, 64, 1),
        (96, 112, 2, 2, 128, 3),
        (16, 112, 1, 1, 32, 1),
        (40, 112, 2, 1, 128, 2),  # 16 filters from the 33rd on are not all of one column
        (64, 521, 4, 1, 128, 12),  # a box has up to 256 columns of dy
    ],
)
def test_rows_come_in_few_boxes(k: int, width: int, widen: int, columns: int, swizzle_bytes: int, count: int) -> None:
    problem = ProblemDescription.convolution(
        x=(1, 3, 8, width),
        w=(k, 3, 3, 3),
        padding=1,
        dtype="float16",
        layout=Layout.NHWC,
        direction="backward_data",
    )
    config = Config.of(tile_w=256, widen=widen, teams=1, stages=2, resident=1)
    boxes = DataWgmmaTiling.of(problem, config, DEVICE).boxes
    assert boxes is not None
    assert (boxes.columns, boxes.swizzle_bytes, boxes.count) == (columns, swizzle_bytes, count)
    step = SOLVER.solution(problem, DEVICE, config).kernels[0]
    [tensor_map] = [arg for arg in step.args if isinstance(arg, TensorMap)]
    assert isinstance(tensor_map.copy, Box)
    assert tensor_map.sizes == (columns * k, width // columns, 8)
    assert max(size * step for size, step in zip(tensor_map.copy.sizes, tensor_map.copy.steps, strict=True)) <= 256


def test_filters_that_are_no_whole_words_are_refused() -> None:
    def reason(layout: Layout) -> str:
        problem = ProblemDescription.convolution(
            x=(1, 3, 8, 8), w=(12, 3, 3, 3), dtype="float16", layout=layout, direction="backward_data"
        )
        return SOLVER.applicability(problem, DEVICE).reason

    assert "multiples of 8, not 12" in reason(Layout.NHWC)
    assert not reason(Layout.NCHW)


def test_configurations_differ() -> None:
    """No two say the same, so that none is measured twice."""
    for layout in (Layout.NHWC, Layout.NCHW):
        problem = ProblemDescription.convolution(
            x=(4, 3, 64, 64), w=(64, 3, 3, 3), padding=1, dtype="float16", layout=layout, direction="backward_data"
        )
        made = [SOLVER.solution(problem, DEVICE, config) for config in SOLVER.configs(problem, DEVICE)]
        assert len({repr(solution) for solution in made}) == len(made)
