"""kernels_src/winograd/fused.cu and winograd/fused_filters.cu in NumPy, block by block.

Knows a launch by its defines and structures alone, and how the kernels count with them; within the 1024 elements of
eight filters' eight channels, places are in any order that both kernels know.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from helpers.in_numpy.epilogue import Finish
from helpers.problems.struct_fields import fields_of
from numpy.typing import NDArray

from miofind.solver.steps import EpilogueArgument, KernelStep, Pointer

Array = NDArray[np.float64]
_B = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], dtype=np.float64)
_G = np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]], dtype=np.float64) / 2
_A = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], dtype=np.float64)


def carry_out(step: KernelStep, buffers: Mapping[str, Array]) -> None:
    """Runs one step on flat buffers."""
    flat = [buffers[arg.buffer] for arg in step.args if isinstance(arg, Pointer)]
    shape = fields_of(step.args[len(flat)])
    defines = {
        name: int(value) for name, value in step.defines if not name.startswith("EPILOGUE") and "_FIELDS" not in name
    }
    if step.entry == "winograd_fused_filters":
        _filters(flat[0], flat[1], shape, flipped=bool(defines["FLIPPED"]))
        return
    last = step.args[-1]
    finish = Finish.of(last if isinstance(last, EpilogueArgument) else None, dict(step.defines))
    for block in range(step.grid[0]):
        for sums, place, channels in _block(block, flat, shape, defines):
            flat[2][place[2]] = finish(sums, place, channels, buffers)


def _filters(w: Array, to: Array, shape: Mapping[str, int], *, flipped: bool) -> None:
    for number in range(shape["blocks"]):
        line, unit = divmod(number, shape["out_channel_blocks"])
        group, step = divmod(line, shape["channel_blocks"])
        part = to[1024 * number : 1024 * (number + 1)].reshape(8, 8, 4, 4)
        for output, channel in itertools.product(range(8 * unit, 8 * unit + 8), range(8 * step, 8 * step + 8)):
            taps = np.zeros((3, 3))
            if output < shape["out_channels"] and channel < shape["channels"]:
                at = group * shape["group_stride"] + output * shape["out_channel_stride"]
                at += channel * shape["channel_stride"]
                taps = w[at + shape["tap_stride"] * np.arange(9)].reshape(3, 3)
            part[output % 8, channel % 8] = _G @ (taps[::-1, ::-1] if flipped else taps) @ _G.T


def _block(
    block: int, flat: list[Array], shape: Mapping[str, Any], defines: Mapping[str, int]
) -> Iterator[tuple[Array, tuple[int, Array, Array], int]]:
    """The sums of a block: of each pixel those of its filters, where they belong, and the channels of all groups."""
    x, filters, _ = flat
    strides = [f"{name}_stride" for name in ("image", "channel", "row", "column")]
    source, target = shape["x"], shape["y"]
    (channels, height, width), from_strides = _sizes(source), [source[name] for name in strides]
    (results, out_height, out_width), to_strides = _sizes(target), [target[name] for name in strides]
    rows, cols, images = defines["TILE_ROWS"], defines["TILE_COLUMNS"], defines["IMAGES"]
    assert images * rows * cols == 16 * defines["MMA_TILES_M"] * defines["WARPS_T"]
    number, of_filter = divmod(block, shape["filter_blocks"])
    tile, group = divmod(number, shape["groups"])
    line, column = divmod(tile, shape["column_blocks"])
    image, row = divmod(line, shape["row_blocks"])
    own = 8 * defines["MMA_TILES_N"] * defines["WARPS_K"]
    first, last = of_filter * own, min(results, (of_filter + 1) * own)
    factors = _unpacked(filters, group, channels, results)[:, :, :, first:last]
    for i, r, c in itertools.product(range(images), range(rows), range(cols)):
        n, h, w = image * images + i, 2 * (row * rows + r), 2 * (column * cols + c)
        if n >= shape["batch"] or h >= out_height or w >= out_width:
            continue
        patch = np.zeros((4, 4, channels))
        for a, b in itertools.product(range(4), range(4)):
            at_h, at_w = h - shape["pad_top"] + a, w - shape["pad_left"] + b
            if 0 <= at_h < height and 0 <= at_w < width:
                at = np.dot((n, at_h, at_w), (from_strides[0], *from_strides[2:]))
                patch[a, b] = x[at + (group * channels + np.arange(channels)) * from_strides[1]]
        places = np.einsum("ia,abc,jb->ijc", _B, patch, _B)
        tiled = np.einsum("ai,ijk,bj->abk", _A, np.einsum("ijc,ijck->ijk", places, factors), _A)
        for a, b in itertools.product(range(2), range(2)):
            if h + a < out_height and w + b < out_width:
                at = np.dot((n, h + a, w + b), (to_strides[0], *to_strides[2:]))
                channel = group * results + np.arange(first, last)
                yield tiled[a, b], (n, channel, at + channel * to_strides[1]), shape["groups"] * results


def _sizes(images: Mapping[str, int]) -> tuple[int, int, int]:
    return images["channels"], images["height"], images["width"]


def _unpacked(filters: Array, group: int, channels: int, results: int) -> Array:
    """A group's transformed filters, (4, 4, channels, results)."""
    steps, units = -(-channels // 8), -(-results // 8)
    size = steps * units * 1024
    parts = filters[group * size : (group + 1) * size].reshape(steps, units, 8, 8, 4, 4)
    places = parts.transpose(4, 5, 0, 3, 1, 2).reshape(4, 4, 8 * steps, 8 * units)
    return places[:, :, :channels, :results]
