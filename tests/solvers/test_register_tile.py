"""The arithmetic of tiles of outputs that threads of the depthwise kernels compute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.solvers.depthwise.register_tile import (
    RegisterTileAxis,
    padded_size,
    refuse_register_tiles,
    tap_pitch,
    vector,
)


def axis_problem(size: int, taps: int, pad: int, stride: int, dilation: int) -> ProblemDescription:
    """A depthwise problem whose rows and columns are alike."""
    return ProblemDescription.convolution(
        x=(1, 1, size, size), w=(1, 1, taps, taps), padding=pad, stride=stride, dilation=dilation
    )


@given(
    size=st.integers(1, 60),
    taps=st.integers(1, 7),
    pad=st.integers(0, 12),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    length=st.sampled_from([1, 2, 4, 7, 8, 14]),
    transposed=st.booleans(),
)
def test_strips_meet_the_sources_that_the_convolution_pairs(
    size: int, taps: int, pad: int, stride: int, dilation: int, length: int, transposed: bool
) -> None:
    """Every pair of an input and an output that a tap joins lies in the window of the tile that computes it."""
    if size + 2 * pad < (taps - 1) * dilation + 1:
        return
    problem = axis_problem(size, taps, pad, stride, dilation)
    axis = RegisterTileAxis.of(problem, 0, length, transposed=transposed)
    outputs = problem.out_spatial[0]
    assert (axis.size, axis.outputs) == ((outputs, size) if transposed else (size, outputs))
    assert (axis.count - 1) * axis.length < axis.outputs <= axis.count * axis.length
    joined = {
        (out * stride - pad + tap * dilation, out)
        for out in range(outputs)
        for tap in range(taps)
        if 0 <= out * stride - pad + tap * dilation < size
    }
    sources: dict[int, set[int]] = {tile: set() for tile in range(axis.count)}
    for x, y in joined:
        target, source = (x, y) if transposed else (y, x)
        sources[target // axis.length].add(source - target // axis.length * axis.step)
    for met in sources.values():
        assert all(axis.first <= source <= axis.last for source in met)
        assert len(met) <= axis.met <= axis.window


@given(size=st.integers(1, 40), taps=st.integers(1, 7), length=st.sampled_from([1, 4, 7, 8]), transposed=st.booleans())
def test_strips_leave_the_axis_where_it_is_padded(size: int, taps: int, length: int, transposed: bool) -> None:
    axis = RegisterTileAxis.of(axis_problem(size, taps, taps - 1, 1, 1), 0, length, transposed=transposed)
    starts = [tile * axis.step for tile in range(axis.count)]
    leaves = [start + axis.first < 0 or start + axis.last >= axis.size for start in starts]
    assert axis.leaves == (axis.count > 1 and any(leaves))


def test_products_leave_out_what_is_known_to_be_padding() -> None:
    whole = RegisterTileAxis.of(axis_problem(7, 7, 3, 1, 1), 0, 7, transposed=False)
    assert whole.products == 4 + 5 + 6 + 7 + 6 + 5 + 4
    assert RegisterTileAxis.of(axis_problem(14, 7, 3, 1, 1), 0, 7, transposed=False).products == 49


def test_transposed_strips_of_stride_2_share_the_taps_out() -> None:
    """Of three taps, even and odd inputs meet one and two; together each tap serves every second input."""
    axis = RegisterTileAxis.of(axis_problem(16, 3, 1, 2, 1), 0, 4, transposed=True)
    assert (axis.length, axis.step, axis.products) == (4, 2, 6)
    assert RegisterTileAxis.of(axis_problem(15, 3, 1, 2, 1), 0, 7, transposed=True).length == 8


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("count", [1, 7, 49, 64, 65])
def test_a_segment_fits_wherever_it_begins(itemsize: int, count: int) -> None:
    copied = 16 // itemsize
    held = padded_size(itemsize, count)
    assert held % copied == 0
    assert all(start + count <= held for start in range(copied))
    assert held < count + 2 * copied


def test_vectors_divide_rows_and_strips() -> None:
    assert [vector(2, width, 8) for width in (7, 14, 28, 56)] == [1, 2, 4, 8]
    assert [vector(4, width, 8) for width in (7, 14, 28, 56)] == [1, 2, 4, 4]
    assert vector(2, 56, 14) == 2


@pytest.mark.parametrize("taps", range(1, 65))
def test_filters_lie_in_whole_words_of_different_banks(taps: int) -> None:
    pitch = tap_pitch(taps)
    assert taps <= pitch < taps + 8
    assert len({pitch * lane % 32 for lane in range(8)}) == 8


def test_refusals_name_what_is_not_served() -> None:
    def depthwise(**fields: object) -> ProblemDescription:
        given = {"x": (2, 8, 20, 20), "w": (8, 1, 3, 3), "groups": 8} | fields
        return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

    assert not refuse_register_tiles(depthwise()).refused
    assert not refuse_register_tiles(depthwise(w=(24, 1, 3, 3))).refused
    assert "groups=4 c=8" in refuse_register_tiles(depthwise(w=(8, 2, 3, 3), groups=4)).reason
    assert (
        "one dtype" in refuse_register_tiles(depthwise(dtype={"x": "float16", "w": "float16", "y": "float32"})).reason
    )
    assert "64 taps" in refuse_register_tiles(depthwise(w=(8, 1, 9, 9))).reason
    assert "strides up to 8" in refuse_register_tiles(depthwise(stride=9)).reason
    assert "padding" in refuse_register_tiles(depthwise(padding=2**21, x=(1, 8, 3), w=(8, 1, 3))).reason
    assert "dilated" in refuse_register_tiles(depthwise(dilation=70, padding=70)).reason


@pytest.mark.parametrize("direction", list(Direction))
def test_short_rows_are_lifted_without_padding(direction: Direction) -> None:
    problem = ProblemDescription.convolution(
        x=(2, 3, 30), w=(3, 1, 5), padding=2, groups=3, dtype=DataType.FLOAT16, layout=Layout.NCW, direction=direction
    )
    axis = RegisterTileAxis.of(problem.lifted(2), 0, 4, transposed=direction is Direction.BACKWARD_DATA)
    assert (axis.length, axis.count, axis.first, axis.last) == (1, 1, 0, 0)
