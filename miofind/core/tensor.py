"""The parts of a problem: element types, memory orders, directions, tensors, and how a filter moves over them.

Pure values, validated on construction.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeGuard, TypeVar

from miofind.errors import InvalidProblemError, brief, suggestion

MAX_DIMENSION = 2**31 - 1
MAX_TENSOR_BYTES = 2**47
MAX_INT32_ELEMENTS = 2**31 - 2**22
"""Elements of a tensor that kernels count in 32 bits, tails of their tiles included."""


class DataType(StrEnum):
    """Element type of a tensor."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def accumulator(self) -> DataType:
        """What products of its numbers are summed in: float64 for float64, else float32."""
        return DataType.FLOAT64 if self is DataType.FLOAT64 else DataType.FLOAT32

    @property
    def mantissa_bits(self) -> int:
        """Explicit mantissa bits; the unit roundoff is 2 ** -(mantissa_bits + 1)."""
        return _MANTISSA[self]


_ITEMSIZE = {DataType.FLOAT64: 8, DataType.FLOAT32: 4, DataType.FLOAT16: 2, DataType.BFLOAT16: 2}
_MANTISSA = {DataType.FLOAT64: 52, DataType.FLOAT32: 23, DataType.FLOAT16: 10, DataType.BFLOAT16: 7}


class Layout(StrEnum):
    """Memory order of a tensor, outermost dimension first. For w read K for N: NHWC is (k, y, x, c)."""

    NCW = "NCW"
    NWC = "NWC"
    NCHW = "NCHW"
    NHWC = "NHWC"
    NCDHW = "NCDHW"
    NDHWC = "NDHWC"

    @property
    def spatial_dims(self) -> int:
        """Number of spatial dimensions, 1 to 3."""
        return len(self) - 2

    @property
    def channels_last(self) -> bool:
        """Whether channels are the innermost dimension."""
        return self.endswith("C")

    @staticmethod
    def of(spatial_dims: int, *, channels_last: bool) -> Layout:
        """The layout with that many spatial dimensions."""
        return (_CHANNELS_LAST if channels_last else _CHANNELS_FIRST)[spatial_dims]


_CHANNELS_FIRST = {1: Layout.NCW, 2: Layout.NCHW, 3: Layout.NCDHW}
_CHANNELS_LAST = {1: Layout.NWC, 2: Layout.NHWC, 3: Layout.NDHWC}


class Direction(StrEnum):
    """Which tensor is computed: y from x and w, dx from dy and w, or dw from dy and x."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward_data"
    BACKWARD_WEIGHTS = "backward_weights"

    @property
    def output(self) -> str:
        """Name of the tensor that is written: "x", "w" or "y"."""
        return _OUTPUT[self]

    @property
    def inputs(self) -> tuple[str, str]:
        """Names of the tensors that are read, in the order of `run_solution`."""
        return _INPUTS[self]


_OUTPUT = {Direction.FORWARD: "y", Direction.BACKWARD_DATA: "x", Direction.BACKWARD_WEIGHTS: "w"}
_INPUTS = {
    Direction.FORWARD: ("x", "w"),
    Direction.BACKWARD_DATA: ("y", "w"),
    Direction.BACKWARD_WEIGHTS: ("y", "x"),
}


class MathMode(StrEnum):
    """Arithmetic allowed for float32: full precision, or inputs rounded to TF32 (10 mantissa bits)."""

    IEEE = "ieee"
    TF32 = "tf32"


_DTYPE_NAMES = {
    name: dtype
    for dtype, names in {
        DataType.FLOAT64: ("double", "fp64", "f8", "d"),
        DataType.FLOAT32: ("single", "fp32", "f4", "f"),
        DataType.FLOAT16: ("half", "fp16", "f2", "e"),
        DataType.BFLOAT16: ("bf16",),
    }.items()
    for name in (dtype.value, *names)
}
"""Those of NumPy and PyTorch, and their short forms; "float" is not among them: NumPy's has 64 bits, PyTorch's 32."""


_E = TypeVar("_E", bound=StrEnum)


def enum_value(kind: type[_E], value: object, field_name: str) -> _E:
    """The member of `kind` named `value`, whatever its case.

    Raises:
        InvalidProblemError: no such member; the message lists those there are.
    """
    if isinstance(value, kind):
        return value
    name = str(value).lower()
    try:  # Dynamo traces this, and in older releases no loop over an enum, nor contextlib.suppress
        return kind(name)
    except ValueError:
        pass
    for member in kind:
        if name == member.value.lower():
            return member
    known = ", ".join(member.value for member in kind)
    near = suggestion(name, (member.value for member in kind))
    raise InvalidProblemError(f"{field_name}={brief(value)} is unknown: use one of {known}{near}")


def data_type(value: object, field_name: str) -> DataType:
    """The element type that a value names: a `DataType`, its name, or a dtype of NumPy, CuPy, PyTorch or ml_dtypes.

    Such as "float16", "f2", "half", numpy.float16, numpy.dtype("f2"), torch.float16, "bf16", ml_dtypes.bfloat16.

    Raises:
        InvalidProblemError: no such type, the bytes of its elements swapped, or "float", which means two types.
    """
    if isinstance(value, DataType):
        return value
    if not isinstance(value, str):
        value = _dtype_name(value)
    name = str(value).removeprefix("torch.").lower()
    if name == "float":
        raise InvalidProblemError(f"{field_name}='float' is float64 in NumPy and float32 in PyTorch: write which")
    known = _DTYPE_NAMES.get(name.lstrip("=<"))
    return enum_value(DataType, value, field_name) if known is None else known


def _dtype_name(value: object) -> object:
    """The name of a dtype or type that NumPy knows; what is none of these as it is."""
    import numpy as np  # here, since processes that compile are given names alone

    if isinstance(value, (type, np.dtype)):
        with contextlib.suppress(TypeError, ValueError):  # the second of PyTorch's tensor types, as torch.HalfTensor
            dtype = np.dtype(value)
            return dtype.name if dtype.isnative else dtype.str
    return value


def one_size(value: object, field_name: str, least: int = 1) -> int:
    """`value` as an int in [least, MAX_DIMENSION].

    Raises:
        InvalidProblemError: not an integer, or out of range.
    """
    if isinstance(value, bool):
        raise InvalidProblemError(f"{field_name}={brief(value)} must be an integer, not a bool")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidProblemError(f"{field_name}={brief(value)} must be an integer") from None
    if not least <= number <= MAX_DIMENSION:
        shown = number if number.bit_length() <= 256 else f"(an integer of {number.bit_length()} bits)"
        raise InvalidProblemError(f"{field_name}={shown} must be between {least} and {MAX_DIMENSION}")
    return number


def sizes(value: object, field_name: str, count: int | None = None, least: int = 1) -> tuple[int, ...]:
    """`value` as a tuple of sizes; an int stands for `count` equal ones.

    Raises:
        InvalidProblemError: no sequence of integers, of another length than `count`, or out of range.
    """
    if _are_sizes(value, least) and count in (None, len(value)):  # mostly; what follows takes ten times as long
        return value
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        if count is None:
            raise InvalidProblemError(f"{field_name}={brief(value)} must be a sequence of integers")
        return (one_size(value, field_name, least),) * count
    if count is not None and len(value) != count:
        raise InvalidProblemError(
            f"{field_name}={brief(tuple(value))} must have {count} entries, one a spatial dimension"
        )
    return tuple(one_size(item, f"{field_name}[{i}]", least) for i, item in enumerate(value))


def _are_sizes(value: object, least: int) -> TypeGuard[tuple[int, ...]]:
    """Whether it is a tuple of plain integers in [least, MAX_DIMENSION]."""
    if type(value) is not tuple or {*map(type, value)} != {int}:
        return False
    return bool(least <= min(value) and max(value) <= MAX_DIMENSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescriptor:
    """A packed tensor: logical shape, element type and memory order.

    Attributes:
        shape: (n, c, *spatial) for x and y, (k, c/groups, *filter) for w; logical order whatever the layout.
        dtype: element type.
        layout: memory order; its rank is the shape's.
        size: number of elements.
        bytes: of the packed tensor.

    Raises:
        InvalidProblemError: a size below 1 or above 2**31 - 1, a tensor above 2**47 bytes, a layout of another rank.
    """

    shape: tuple[int, ...]
    dtype: DataType = DataType.FLOAT32
    layout: Layout = Layout.NCHW
    size: int = field(init=False, repr=False, compare=False, default=0)
    bytes: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        shape = sizes(self.shape, "shape")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", data_type(self.dtype, "dtype"))
        object.__setattr__(self, "layout", enum_value(Layout, self.layout, "layout"))
        if len(shape) != self.layout.spatial_dims + 2:
            raise InvalidProblemError(
                f"shape={shape} has {len(shape)} dimensions, layout={self.layout} wants {self.layout.spatial_dims + 2}"
            )
        object.__setattr__(self, "size", math.prod(shape))
        object.__setattr__(self, "bytes", self.size * self.dtype.itemsize)
        if self.bytes > MAX_TENSOR_BYTES:
            raise InvalidProblemError(f"shape={shape} takes {self.bytes} bytes: the limit is {MAX_TENSOR_BYTES}")

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each logical dimension."""
        rank = len(self.shape)
        order = (0, *range(2, rank), 1) if self.layout.channels_last else tuple(range(rank))
        strides = [0] * rank
        step = 1
        for dimension in reversed(order):
            strides[dimension] = step
            step *= self.shape[dimension]
        return tuple(strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionDescriptor:
    """How the filter moves: padding before and after, stride and dilation a spatial dimension, and groups.

    Raises:
        InvalidProblemError: a negative padding, a stride, dilation or group count below 1, unequal ranks.
    """

    pad_before: tuple[int, ...]
    pad_after: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        rank = len(self.stride)
        for name, least in (("pad_before", 0), ("pad_after", 0), ("stride", 1), ("dilation", 1)):
            object.__setattr__(self, name, sizes(getattr(self, name), name, rank, least))
        object.__setattr__(self, "groups", one_size(self.groups, "groups"))

    @staticmethod
    def of(
        spatial_dims: int, *, padding: object = 0, stride: object = 1, dilation: object = 1, groups: object = 1
    ) -> ConvolutionDescriptor:
        """A descriptor from the forms users write.

        Args:
            spatial_dims: 1, 2 or 3.
            padding: one int, one int a dimension, or a (before, after) pair a dimension.
            stride, dilation: one int or one int a dimension.
            groups: group count.
        """
        before, after = _padding(padding, spatial_dims)
        return ConvolutionDescriptor(
            pad_before=before,
            pad_after=after,
            stride=sizes(stride, "stride", spatial_dims),
            dilation=sizes(dilation, "dilation", spatial_dims),
            groups=one_size(groups, "groups"),
        )

    def output_size(self, size: int, filter_size: int, dimension: int) -> int:
        """Output size along one spatial dimension.

        Raises:
            InvalidProblemError: the dilated filter is larger than the padded input.
        """
        padded = size + self.pad_before[dimension] + self.pad_after[dimension]
        reach = self.dilation[dimension] * (filter_size - 1) + 1
        if reach > padded:
            raise InvalidProblemError(
                f"filter size {filter_size} with dilation {self.dilation[dimension]} spans {reach} in spatial "
                f"dimension {dimension}, but the padded input is {padded}: enlarge the input or the padding"
            )
        return (padded - reach) // self.stride[dimension] + 1


def named_padding(
    name: str, filter_sizes: Sequence[int], stride: object, dilation: object
) -> int | tuple[tuple[int, int], ...]:
    """The padding that a name stands for, in numbers: "valid" none, "same" one that makes outputs as large as inputs.

    Where that is an odd number of elements, there is one more behind than before. Source: PyTorch, torch.nn.Conv2d.

    Raises:
        InvalidProblemError: another name, or a stride with "same".
    """
    rank = len(filter_sizes)
    if name.lower() == "valid":
        return ((0, 0),) * rank
    if name.lower() != "same":
        near = suggestion(name, ("same", "valid"))
        known = "'same', 'valid', an integer, or one a dimension"
        raise InvalidProblemError(f"padding={brief(name)} must be {known}{near}")
    if any(step != 1 for step in sizes(stride, "stride", rank)):
        raise InvalidProblemError(f"padding='same' needs stride 1, not {stride}: give the padding in numbers")
    reaches = zip(sizes(dilation, "dilation", rank), filter_sizes, strict=True)
    totals = [step * (taps - 1) for step, taps in reaches]
    return tuple((total // 2, total - total // 2) for total in totals)


def _padding(value: object, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding before and after from an int, a tuple of ints or a tuple of pairs."""
    paired = isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Sequence) for v in value)
    if not paired:
        both = sizes(value, "padding", rank, 0)
        return both, both
    assert isinstance(value, Sequence)
    if len(value) != rank:
        raise InvalidProblemError(
            f"padding={brief(value)} must have {rank} (before, after) pairs, one a spatial dimension"
        )
    pairs = [sizes(pair, f"padding[{i}]", 2, 0) for i, pair in enumerate(value)]
    return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
