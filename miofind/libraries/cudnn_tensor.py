"""A tensor as a cuDNN descriptor: in memory, in a graph alone, or one number of a launch."""

from __future__ import annotations

from collections.abc import Sequence

from miofind.core.problem import DataType
from miofind.libraries.cudnn_backend import Attribute, Descriptor, Kind, Type

TENSOR_ALIGNMENT = 16
_DATA_TYPES = {DataType.FLOAT32: 0, DataType.FLOAT16: 2, DataType.BFLOAT16: 9}


def tensor_descriptor(
    shape: Sequence[int],
    strides: Sequence[int],
    number: int,
    *,
    dtype: DataType = DataType.FLOAT32,
    kind: Attribute | None = None,
) -> Descriptor:
    """The descriptor of a tensor that a graph knows by a number, aligned to TENSOR_ALIGNMENT bytes.

    Args:
        kind: TENSOR_IS_VIRTUAL for one that is never in memory, TENSOR_IS_BY_VALUE for a number that a launch reads
            from host memory at its own alignment; None for one in device memory.
    """
    alignment = dtype.itemsize if kind is Attribute.TENSOR_IS_BY_VALUE else TENSOR_ALIGNMENT
    descriptor = Descriptor(Kind.TENSOR)
    descriptor.set(Attribute.TENSOR_DATA_TYPE, Type.DATA_TYPE, _DATA_TYPES[dtype])
    descriptor.set(Attribute.TENSOR_DIMENSIONS, Type.INT64, *shape)
    descriptor.set(Attribute.TENSOR_STRIDES, Type.INT64, *strides)
    descriptor.set(Attribute.TENSOR_UNIQUE_ID, Type.INT64, number)
    if kind is not None:
        descriptor.set(kind, Type.BOOLEAN, True)
    return descriptor.set(Attribute.TENSOR_ALIGNMENT, Type.INT64, alignment).finalize()
