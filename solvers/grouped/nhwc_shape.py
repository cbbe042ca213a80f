"""Sizes that the kernels of grouped/nhwc.cu and grouped/nhwc_weights.cu take as one structure."""

from __future__ import annotations

from miofind.core.problem import TensorDescriptor
from miofind.solver.structs import Struct, StructType

_IN, _OUT = ("in_channels", "in_height", "in_width"), ("out_channels", "out_height", "out_width")

SHAPE = StructType("Shape", batch="int32", **dict.fromkeys((*_IN, *_OUT, "tiles"), "int32"))


def shape_of(source: TensorDescriptor, target: TensorDescriptor, tiles: int) -> Struct:
    """The structure's value.

    Args:
        source, target: tensors of images, (n, c, h, w), which the fields in_* and out_* are of.
        tiles: of all images; blocks of several stages share them out.
    """
    batch, *read = source.shape
    _, *written = target.shape
    return SHAPE(batch=batch, **dict(zip((*_IN, *_OUT), (*read, *written), strict=True)), tiles=tiles)
