"""Launches that transpose tensors, without a GPU: the kernel's arithmetic in NumPy, vectors as wide as lines allow."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.in_numpy.transpose import carry_out, tensors

from miofind.core.problem import DataType, ProblemDescription
from miofind.solvers.implicit_gemm.transpose import Transposition, transpose_step

LENGTHS = (1, 3, 7, 8, 9, 25, 49, 64, 65, 196, 257, 784)
DTYPES = (DataType.FLOAT16, DataType.FLOAT32)
BATCH = 2


def transposition(
    rows: int, columns: int, dtype: DataType = DataType.FLOAT16, name: str = "x", batch: int = BATCH
) -> Transposition:
    return Transposition(source=name, target=f"{name}_last", dtype=dtype, batch=batch, rows=rows, columns=columns)


def memory(*transpositions: Transposition) -> dict[str, np.ndarray]:
    return {
        one.source: np.arange(one.batch * one.rows * one.columns) + 1000 * i for i, one in enumerate(transpositions)
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", LENGTHS, ids="{} rows".format)
def test_each_element_moves_once_by_whole_vectors(rows: int, dtype: DataType) -> None:
    for columns in LENGTHS:
        one = transposition(rows, columns, dtype)
        buffers = memory(one)
        carry_out(transpose_step((one,)), buffers)
        expected = buffers["x"].reshape(BATCH, rows, columns).transpose(0, 2, 1).ravel()
        np.testing.assert_array_equal(buffers["x_last"], expected)


def test_two_tensors_share_a_launch() -> None:
    both = transposition(24, 49), transposition(40, 9, name="w", batch=5)
    step = transpose_step(both)
    assert [(one.source, one.target) for one in tensors(step)] == [("x", "x_last"), ("w", "w_last")]
    buffers = memory(*both)
    carry_out(step, buffers)
    for one in both:
        expected = buffers[one.source].reshape(one.batch, one.rows, one.columns).transpose(0, 2, 1).ravel()
        np.testing.assert_array_equal(buffers[one.target], expected)


@pytest.mark.parametrize("pixels", [9, 25, 49, 169, 196, 784, 900, 3136])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors_are_wide_both_ways_whatever_the_image(pixels: int, dtype: DataType) -> None:
    """Of 16 bytes where channels are multiples of them, but of 8 along wide images that are multiples of 8 alone."""
    least = 8 if pixels > 64 and pixels * dtype.itemsize % 16 == 8 else 16
    for channels in (8, 24, 64, 200, 512):
        for one in (transposition(channels, pixels, dtype), transposition(channels, pixels, dtype).back):
            widths = sorted((one.tile.loaded * dtype.itemsize, one.tile.stored * dtype.itemsize))
            assert widths == [least, 16], one


@pytest.mark.parametrize("shape", [(512, 9), (2560, 9), (1280, 25), (9, 512), (64, 49)], ids="{0[0]}x{0[1]}".format)
def test_tiles_of_few_columns_are_full(shape: tuple[int, int]) -> None:
    """3x3 filters: at least two thirds of the elements of all tiles are the matrix's."""
    one = transposition(*shape)
    down, across = one.tiles
    assert 3 * one.rows * one.columns >= 2 * down * across * one.tile.rows * one.tile.columns


def test_the_way_back_leads_back() -> None:
    problem = ProblemDescription.convolution(x=(2, 24, 7, 7), w=(16, 24, 3, 3), dtype="float16")
    there = Transposition.to_channels_last(problem, "x")
    assert (there.batch, there.rows, there.columns, there.bytes) == (2, 24, 49, 2 * 24 * 49 * 2)
    buffers = memory(there)
    given = buffers["x"].copy()
    for one in (there, there.back):
        carry_out(transpose_step((one,)), buffers)
    np.testing.assert_array_equal(buffers["x"], given)


def test_nothing_is_needed_for_single_lines() -> None:
    assert [transposition(*shape).is_needed for shape in ((1, 5), (5, 1), (2, 2))] == [False, False, True]
