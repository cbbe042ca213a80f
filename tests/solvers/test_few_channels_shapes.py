"""What the few-channels kernels read of their structures: thread blocks compute every result exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.problems.struct_fields import fields_of

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import KernelStep
from miofind.solver.structs import Struct

DEVICE = Device.virtual("90a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Channels, rows and columns of an image of the result; they may reach beyond it."""

    image: int
    channels: range
    rows: range
    columns: range


def tiles(shape: Mapping[str, int], of: Mapping[str, Any], block: int) -> Iterator[Part]:
    """go_to of output_tiles.cuh; kernels that sum over outputs meet each of these once."""
    first, filters = divmod(block, shape["filter_tiles"])
    for number in range(first, shape["tiles"], shape["tile_step"]):
        image, in_image = divmod(number, shape["image_tiles"])
        row, column = divmod(in_image, shape["row_tiles"])
        yield Part(
            image=image,
            channels=_run(filters, of["TILE_K"]),
            rows=_run(row, of["TILE_H"]),
            columns=_run(column, of["TILE_W"]),
        )


def strips_of_outputs(shape: Mapping[str, int], of: Mapping[str, Any], block: int) -> Iterator[Part]:
    """forward_wgmma.cu."""
    outputs = 1 + of["STRIDE_X"] % 2
    first, filters = divmod(block, shape["filter_tiles"])
    for number in range(first, shape["tiles"], shape["tile_step"]):
        image, in_image = divmod(number, shape["image_tiles"])
        strip, column = divmod(in_image, shape["row_tiles"])
        begin = strip * shape["strip_rows"] + min(strip, shape["longer_strips"])
        yield Part(
            image=image,
            channels=_run(filters, of["FILTER_BLOCKS"] * 64 // outputs),
            rows=range(begin, begin + shape["strip_rows"] + (strip < shape["longer_strips"])),
            columns=_run(column, of["COLUMNS"] * outputs),
        )


def streamed_rows(shape: Mapping[str, int], of: Mapping[str, Any], block: int) -> Iterator[Part]:
    """strip_of of row_streaming.cuh."""
    image, in_image = divmod(block, shape["image_strips"])
    number, tile = divmod(in_image, shape["column_tiles"])
    column, met = shape["first_out_column"] + tile * of["COLUMN_STEP"], -(-of["FILTER_X"] // of["STRIDE_X"])
    first = shape["first_column"] if tile == 0 else column + met - 1
    is_last = tile + 1 == shape["column_tiles"]
    end = shape["end_column"] if is_last else column + of["COLUMN_STEP"] + met - 1
    yield Part(
        image=image,
        channels=range(of["CHANNELS"]),
        rows=_pixels(_strip(shape, number), of["STRIDE_Y"], shape["pad_top"]),
        columns=_pixels(range(first, end), of["STRIDE_X"], shape["pad_left"]),
    )


def rows_in_registers(shape: Mapping[str, int], of: Mapping[str, Any], block: int) -> Iterator[Part]:
    """data.cu."""
    image, in_image = divmod(block, shape["image_strips"])
    number, tile = divmod(in_image, shape["s2d_tiles"])
    yield Part(
        image=image,
        channels=range(of["CHANNELS"]),
        rows=_pixels(_strip(shape, number), of["STRIDE_Y"], shape["pad_top"]),
        columns=_pixels(_run(tile, of["S2D_BLOCKS"]), of["STRIDE_X"], shape["s2d_left"]),
    )


def teams_of_warpgroups(shape: Mapping[str, int], of: Mapping[str, Any], block: int) -> Iterator[Part]:
    """data_wgmma.cu."""
    for strip in range(block * of["TEAMS"], min(shape["strips"], (block + 1) * of["TEAMS"])):
        image, in_image = divmod(strip, shape["image_strips"])
        number, tile = divmod(in_image, shape["s2d_tiles"])
        rows, met = _strip(shape, number), -(-of["FILTER_Y"] // of["STRIDE_Y"])
        assert len(rows) + met - 1 <= shape["strip_steps"]
        first = shape["first_s2d"] + tile * of["COLUMNS"]
        yield Part(
            image=image,
            channels=range(of["CHANNELS"]),
            rows=_pixels(rows, of["STRIDE_Y"], shape["s2d_top"]),
            columns=_pixels(range(first, first + of["COLUMNS"]), of["S2D_STRIDES"] * of["STRIDE_X"], shape["s2d_left"]),
        )


READ = {
    "ConvFirstLayer": tiles,
    "ConvFirstLayerWgmma": strips_of_outputs,
    "ConvFirstLayerWeights": tiles,
    "ConvFirstLayerWgmmaWeights": tiles,
    "ConvFirstLayerData": rows_in_registers,
    "ConvFirstLayerDataRows": streamed_rows,
    "ConvFirstLayerDataRowsTf32": streamed_rows,
    "ConvFirstLayerDataWgmma": teams_of_warpgroups,
}


@pytest.mark.parametrize("solver_id", READ)
def test_blocks_compute_every_result_once(solver_id: str) -> None:
    solver = Registry.default().named(solver_id)
    for problem in solver.examples():
        tensor = problem.y if problem.direction is not Direction.BACKWARD_DATA else problem.x
        for config in solver.default_configs(problem, DEVICE)[:4]:
            step = solver.solution(problem, DEVICE, config).steps[0]
            assert isinstance(step, KernelStep)
            (struct,) = (arg for arg in step.args if isinstance(arg, Struct))
            assert struct.type.define in step.defines
            shape, computed = fields_of(struct), np.zeros(tensor.shape, int)
            _check_images(shape, problem)
            for block in range(step.grid[0]):
                for part in READ[solver_id](shape, dict(step.defines), block):
                    computed[part.image][_within(part, tensor.shape[1:])] += 1
            assert (computed == 1).all(), (problem, config)


def _check_images(shape: Mapping[str, int], problem: ProblemDescription) -> None:
    assert (shape["height"], shape["width"]) == problem.spatial
    assert (shape["out_height"], shape["out_width"]) == problem.out_spatial
    assert shape.get("out_channels", problem.k) == problem.k
    assert shape.get("pad_top", problem.conv.pad_before[0]) == problem.conv.pad_before[0]
    assert shape.get("pad_left", problem.conv.pad_before[1]) == problem.conv.pad_before[1]


def _run(number: int, size: int) -> range:
    return range(number * size, (number + 1) * size)


def _strip(shape: Mapping[str, int], number: int) -> range:
    """Rows of s2d blocks."""
    begin = shape["first_row"] + number * shape["strip_rows"]
    return range(begin, min(begin + shape["strip_rows"], shape["end_row"]))


def _pixels(s2d_blocks: range, size: int, before: int) -> range:
    return range(s2d_blocks.start * size - before, s2d_blocks.stop * size - before)


def _within(part: Part, sizes: tuple[int, ...]) -> tuple[slice, ...]:
    parts = (part.channels, part.rows, part.columns)
    return tuple(slice(max(0, at.start), max(0, min(at.stop, size))) for at, size in zip(parts, sizes, strict=True))
