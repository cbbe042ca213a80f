"""What grouped/nhwc.cu and grouped/nhwc_weights.cu share: their key, and their sizes as one structure."""

from __future__ import annotations

from miofind.core.problem import DataType, Layout, TensorDescriptor
from miofind.device.device import Library, Place
from miofind.solver.solver import KernelKey
from miofind.solver.structs import Struct, StructType

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
        layouts=frozenset({Layout.NWC, Layout.NHWC, Layout.NCW, Layout.NCHW}),
        min_sm=80,
    ),
)
"""What the kernels are made for, in all directions."""

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
