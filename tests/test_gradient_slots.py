"""Cells of dx in slots of warpgroup products: each tap of a pixel is multiplied once, and each pixel written once."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miofind.device import Device
from miofind.problem import Direction, Layout, ProblemDescription
from miofind.solution import Config
from miofind.solver import solver_by_id
from miofind.tiling.gradient_slots import GradientSlots

DEVICE = Device.virtual("90a")
SOLVER = solver_by_id("ConvFirstLayerDataWgmma")


@st.composite
def layers(draw: st.DrawFn) -> ProblemDescription:
    sizes = [draw(st.integers(1, 40)), draw(st.integers(1, 200))]
    taps = [draw(st.integers(1, 5)), draw(st.integers(1, 9))]
    pads = [(draw(st.integers(0, 9)), draw(st.integers(0, 9))) for _ in range(2)]
    assume(all(size + sum(pad) >= tap for size, pad, tap in zip(sizes, pads, taps, strict=True)))
    channels = draw(st.integers(1, 4))
    return ProblemDescription.convolution(
        x=(draw(st.integers(1, 3)), channels, *sizes),
        w=(draw(st.sampled_from([8, 37])), channels, *taps),
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
def test_cells_meet_every_output_of_their_pixels_once(problem: ProblemDescription, seed: int) -> None:
    config = drawn_config(seed)
    tiling, stride, pad = GradientSlots.of(problem, config, DEVICE), problem.conv.stride[1], problem.conv.pad_before[1]
    wide, met = config["widen"] * stride, tiling.shifts - config["widen"] + 1
    for pixel in range(problem.spatial[1]):
        cell, within = divmod(pixel + tiling.left, wide)
        first = cell * config["widen"] - tiling.ahead - (met - 1)  # the column of dy of shift 0
        taps = {first + shift: within - tiling.phase + (met - 1 - shift) * stride for shift in range(tiling.shifts)}
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
    tiling = GradientSlots.of(problem, config, DEVICE)
    wide = config["widen"] * problem.conv.stride[1]
    assert tiling.columns % 8 == 0
    assert tiling.columns * (tiling.tiles - 1) < tiling.cells <= tiling.columns * tiling.tiles
    assert tiling.first_cell * wide <= tiling.left
    assert (tiling.first_cell + tiling.cells) * wide >= tiling.left + problem.spatial[1]
    count = tiling.height.end - tiling.height.first
    assert tiling.rows * (tiling.row_strips - 1) < count <= tiling.rows * tiling.row_strips
    assert tiling.strips == problem.n * tiling.tiles * tiling.row_strips
    assert config["teams"] * (tiling.blocks - 1) < tiling.strips <= config["teams"] * tiling.blocks


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_what_tiles_meet_is_staged(problem: ProblemDescription, seed: int) -> None:
    """Planes are staged from a multiple of 8 columns on, so that vectors of a row are aligned and lie within."""
    config = drawn_config(seed)
    tiling, widen = GradientSlots.of(problem, config, DEVICE), config["widen"]
    last = problem.y.layout.channels_last
    for tile in range(tiling.tiles):
        cell = tiling.first_cell + tile * tiling.columns
        column = cell * widen - tiling.ahead - (tiling.shifts - widen)
        lead = 0 if last else column % 8
        assert lead + (tiling.columns - 1) * widen + tiling.shifts <= tiling.staged
        assert last or (column - lead) % tiling.in_vector == tiling.staged % tiling.in_vector == 0


@given(problem=layers(), seed=st.integers(0, 10**6))
def test_pairs_of_elements_are_aligned_and_of_pixels_that_there_are(problem: ProblemDescription, seed: int) -> None:
    config = drawn_config(seed)
    tiling = GradientSlots.of(problem, config, DEVICE)
    wide, width = config["widen"] * problem.conv.stride[1], problem.spatial[1]
    channels = problem.c if problem.x.layout.channels_last else 1
    if not tiling.paired:
        return
    for cell in range(tiling.first_cell, tiling.first_cell + tiling.cells):
        first = (cell * wide - tiling.left) * channels  # of the cell's elements in a row
        for element in range(first, first + wide * channels, 2):
            assert element % 2 == width * channels % 2 == 0
            inside = [0 <= at // channels < width for at in (element, element + 1)]
            assert inside[0] == inside[1]


@pytest.mark.parametrize(
    ("taps", "stride", "padding", "left"), [(7, 2, 3, 4), (3, 2, 1, 2), (3, 1, 1, 2), (4, 4, 0, 0), (4, 2, 1, 1)]
)
def test_cells_begin_at_even_columns_where_that_costs_no_product(
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
    tiling = GradientSlots.of(problem, config, DEVICE)
    assert (tiling.left, tiling.paired) == (left, left % 2 == 0)
    assert tiling.shifts == -(-taps // stride) + 1


def test_configurations_differ() -> None:
    """No two say the same, so that none is measured twice."""
    for layout in (Layout.NHWC, Layout.NCHW):
        problem = ProblemDescription.convolution(
            x=(4, 3, 64, 64), w=(64, 3, 3, 3), padding=1, dtype="float16", layout=layout, direction="backward_data"
        )
        made = [SOLVER.solution(problem, DEVICE, config) for config in SOLVER.configs(problem, DEVICE)]
        assert len({repr(solution) for solution in made}) == len(made)
