"""What is to be computed: tensors, a convolution, a direction.

Pure values, validated on construction; knows nothing of devices, solvers or arrays.

The field's letters, used everywhere: n c (batch, input channels), k (output channels), spatial sizes outermost first
(d h w for the input, z y x for the filter, od oh ow for the output), pad, stride, dilation, groups. The tensors are
x (n, c, *spatial), w (k, c/groups, *filter) and y (n, k, *out_spatial), whatever the direction and the layout;
dx, dw and dy are gradients with the shapes of x, w and y.
"""

from __future__ import annotations

import math as _math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from miofind.errors import InvalidProblemError

MAX_DIMENSION = 2**31 - 1
MAX_TENSOR_BYTES = 2**47


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
        return len(self.value) - 2

    @property
    def channels_last(self) -> bool:
        """Whether channels are the innermost dimension."""
        return self.value.endswith("C")

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


_E = TypeVar("_E", bound=StrEnum)


def enum_value(kind: type[_E], value: object, field_name: str) -> _E:
    """The member of `kind` named `value`, whatever its case.

    Raises:
        InvalidProblemError: no such member; the message lists those there are.
    """
    if isinstance(value, kind):
        return value
    for member in kind:
        if str(value).lower() == member.value.lower():
            return member
    known = ", ".join(member.value for member in kind)
    raise InvalidProblemError(f"{field_name}={value!r} is unknown: use one of {known}")


def _size(value: object, field_name: str, least: int = 1) -> int:
    """`value` as an int in [least, MAX_DIMENSION]."""
    if isinstance(value, bool):
        raise InvalidProblemError(f"{field_name}={value!r} must be an integer, not a bool")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidProblemError(f"{field_name}={value!r} must be an integer") from None
    if not least <= number <= MAX_DIMENSION:
        raise InvalidProblemError(f"{field_name}={number} must be between {least} and {MAX_DIMENSION}")
    return number


def _sizes(value: object, field_name: str, count: int | None = None, least: int = 1) -> tuple[int, ...]:
    """`value` as a tuple of sizes; an int stands for `count` equal ones."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        if count is None:
            raise InvalidProblemError(f"{field_name}={value!r} must be a sequence of integers")
        return (_size(value, field_name, least),) * count
    if count is not None and len(value) != count:
        raise InvalidProblemError(f"{field_name}={tuple(value)!r} must have {count} entries, one a spatial dimension")
    return tuple(_size(item, f"{field_name}[{i}]", least) for i, item in enumerate(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescriptor:
    """A packed tensor: logical shape, element type and memory order.

    Attributes:
        shape: (n, c, *spatial) for x and y, (k, c/groups, *filter) for w; logical order whatever the layout.
        dtype: element type.
        layout: memory order; its rank is the shape's.

    Raises:
        InvalidProblemError: a size below 1 or above 2**31 - 1, a tensor above 2**47 bytes, a layout of another rank.
    """

    shape: tuple[int, ...]
    dtype: DataType = DataType.FLOAT32
    layout: Layout = Layout.NCHW

    def __post_init__(self) -> None:
        shape = _sizes(self.shape, "shape")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", enum_value(DataType, self.dtype, "dtype"))
        object.__setattr__(self, "layout", enum_value(Layout, self.layout, "layout"))
        if len(shape) != self.layout.spatial_dims + 2:
            raise InvalidProblemError(
                f"shape={shape} has {len(shape)} dimensions, layout={self.layout} wants {self.layout.spatial_dims + 2}"
            )
        if self.bytes > MAX_TENSOR_BYTES:
            raise InvalidProblemError(f"shape={shape} takes {self.bytes} bytes: the limit is {MAX_TENSOR_BYTES}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return _math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the packed tensor."""
        return self.size * self.dtype.itemsize

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
            object.__setattr__(self, name, _sizes(getattr(self, name), name, rank, least))
        object.__setattr__(self, "groups", _size(self.groups, "groups"))

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
            stride=_sizes(stride, "stride", spatial_dims),
            dilation=_sizes(dilation, "dilation", spatial_dims),
            groups=_size(groups, "groups"),
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


def _padding(value: object, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding before and after from an int, a tuple of ints or a tuple of pairs."""
    paired = isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Sequence) for v in value)
    if not paired:
        both = _sizes(value, "padding", rank, 0)
        return both, both
    assert isinstance(value, Sequence)
    if len(value) != rank:
        raise InvalidProblemError(f"padding={value!r} must have {rank} (before, after) pairs, one a spatial dimension")
    pairs = [_sizes(pair, f"padding[{i}]", 2, 0) for i, pair in enumerate(value)]
    return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDescription:
    """One convolution to solve: three tensors, a convolution, a direction and the arithmetic allowed.

    Shapes describe the forward convolution whatever the direction. Build one with `ProblemDescription.convolution`,
    `miofind.from_arrays`, a MIOpenDriver line or a suite. Equal problems have equal `network_config`, the key of
    every cache and database; it is computed once.

    Raises:
        InvalidProblemError: the message names the field and the value.
    """

    x: TensorDescriptor
    w: TensorDescriptor
    y: TensorDescriptor
    conv: ConvolutionDescriptor
    direction: Direction = Direction.FORWARD
    math: MathMode = MathMode.IEEE
    network_config: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", enum_value(Direction, self.direction, "direction"))
        object.__setattr__(self, "math", enum_value(MathMode, self.math, "math"))
        _check_shapes(self)
        _check_types(self)
        object.__setattr__(self, "network_config", _network_config(self))

    def __hash__(self) -> int:
        return hash(self.network_config)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProblemDescription):
            return NotImplemented
        return self.network_config == other.network_config

    def __str__(self) -> str:
        return self.network_config

    @staticmethod
    def convolution(
        *,
        x: Sequence[int],
        w: Sequence[int],
        padding: object = 0,
        stride: object = 1,
        dilation: object = 1,
        groups: int = 1,
        direction: Direction | str = Direction.FORWARD,
        dtype: DataType | str | Mapping[str, DataType | str] = DataType.FLOAT32,
        layout: Layout | str | Mapping[str, Layout | str] | None = None,
        math: MathMode | str = MathMode.IEEE,
    ) -> ProblemDescription:
        """A convolution problem from its shapes.

        Args:
            x: (n, c, *spatial), 1 to 3 spatial dimensions, logical order.
            w: (k, c/groups, *filter).
            padding: an int, an int a dimension, or a (before, after) pair a dimension.
            stride, dilation: an int, or an int a dimension.
            groups: group count; divides c and k.
            direction: "forward", "backward_data" or "backward_weights"; the shapes are the forward ones in each.
            dtype: one for all tensors, or a mapping with keys "x", "w", "y".
            layout: memory order, one for all tensors or a mapping with keys "x", "w", "y"; channels first if left out.
            math: float32 only: "ieee" or "tf32".

        Raises:
            InvalidProblemError: the message names the field and the value.
        """
        x_shape, w_shape = _sizes(x, "x"), _sizes(w, "w")
        rank = len(x_shape) - 2
        if rank not in (1, 2, 3):
            raise InvalidProblemError(f"x={x_shape} must have 3 to 5 dimensions: (n, c, *spatial)")
        if len(w_shape) != rank + 2:
            raise InvalidProblemError(f"w={w_shape} must have {rank + 2} dimensions like x={x_shape}")
        conv = ConvolutionDescriptor.of(rank, padding=padding, stride=stride, dilation=dilation, groups=groups)
        out = tuple(conv.output_size(x_shape[i + 2], w_shape[i + 2], i) for i in range(rank))
        dtypes = _per_tensor(dtype, "dtype")
        layouts = _per_tensor(Layout.of(rank, channels_last=False) if layout is None else layout, "layout")
        shapes = {"x": x_shape, "w": w_shape, "y": (x_shape[0], w_shape[0], *out)}
        tensors = {
            name: TensorDescriptor(
                shape=shape,
                dtype=enum_value(DataType, dtypes[name], "dtype"),
                layout=enum_value(Layout, layouts[name], "layout"),
            )
            for name, shape in shapes.items()
        }
        return ProblemDescription(
            **tensors,
            conv=conv,
            direction=enum_value(Direction, direction, "direction"),
            math=enum_value(MathMode, math, "math"),
        )

    @property
    def spatial_dims(self) -> int:
        """Number of spatial dimensions, 1 to 3."""
        return len(self.conv.stride)

    @property
    def n(self) -> int:
        """Batch."""
        return self.x.shape[0]

    @property
    def c(self) -> int:
        """Input channels."""
        return self.x.shape[1]

    @property
    def k(self) -> int:
        """Output channels."""
        return self.w.shape[0]

    @property
    def groups(self) -> int:
        """Group count."""
        return self.conv.groups

    @property
    def spatial(self) -> tuple[int, ...]:
        """Input sizes, outermost first."""
        return self.x.shape[2:]

    @property
    def filter(self) -> tuple[int, ...]:
        """Filter sizes, outermost first."""
        return self.w.shape[2:]

    @property
    def out_spatial(self) -> tuple[int, ...]:
        """Output sizes, outermost first."""
        return self.y.shape[2:]

    @property
    def is_1x1(self) -> bool:
        """Whether the filter has one tap and nothing is padded."""
        return _math.prod(self.filter) == 1 and not any(self.conv.pad_before) and not any(self.conv.pad_after)

    @property
    def flops(self) -> int:
        """Floating-point operations of direct arithmetic, a multiply-add counted as two; the same in each direction."""
        return 2 * self.y.size * self.w.shape[1] * _math.prod(self.filter)

    @property
    def bytes(self) -> int:
        """Least bytes through device memory: each tensor once."""
        return self.x.bytes + self.w.bytes + self.y.bytes

    @property
    def reduction_length(self) -> int:
        """Products summed for one element of the output: its largest number over the output."""
        taps = _math.prod(self.filter)
        if self.direction is Direction.FORWARD:
            return self.w.shape[1] * taps
        if self.direction is Direction.BACKWARD_DATA:
            return self.k // self.groups * taps
        return self.n * _math.prod(self.out_spatial)

    @property
    def output(self) -> TensorDescriptor:
        """The tensor that is written."""
        return self.tensor(self.direction.output)

    def tensor(self, name: str) -> TensorDescriptor:
        """The descriptor of "x", "w" or "y"."""
        return {"x": self.x, "w": self.w, "y": self.y}[name]

    def lifted(self, spatial_dims: int) -> ProblemDescription:
        """The same convolution over the same memory with unit spatial dimensions put in front."""
        extra = spatial_dims - self.spatial_dims
        if extra < 0:
            raise ValueError(f"cannot lift {self.spatial_dims} spatial dimensions to {spatial_dims}")
        if extra == 0:
            return self
        ones, zeros = (1,) * extra, (0,) * extra

        def lift(t: TensorDescriptor) -> TensorDescriptor:
            layout = Layout.of(spatial_dims, channels_last=t.layout.channels_last)
            return TensorDescriptor(shape=(*t.shape[:2], *ones, *t.shape[2:]), dtype=t.dtype, layout=layout)

        conv = ConvolutionDescriptor(
            pad_before=zeros + self.conv.pad_before,
            pad_after=zeros + self.conv.pad_after,
            stride=ones + self.conv.stride,
            dilation=ones + self.conv.dilation,
            groups=self.groups,
        )
        return ProblemDescription(
            x=lift(self.x), w=lift(self.w), y=lift(self.y), conv=conv, direction=self.direction, math=self.math
        )

    @staticmethod
    def from_network_config(text: str) -> ProblemDescription:
        """The problem that a `network_config` names.

        Raises:
            InvalidProblemError: the text is not a canonical network_config.
        """
        problem = _parse_network_config(text)
        if problem.network_config != text:
            canonical = problem.network_config
            raise InvalidProblemError(f"network_config {text!r} is not canonical: it should be {canonical!r}")
        return problem


def _per_tensor(value: object, field_name: str) -> Mapping[str, Any]:
    """`value` for each of x, w, y."""
    if not isinstance(value, Mapping):
        return {"x": value, "w": value, "y": value}
    if set(value) != {"x", "w", "y"}:
        raise InvalidProblemError(f"{field_name}={dict(value)!r} must have the keys x, w and y")
    return value


def _check_shapes(problem: ProblemDescription) -> None:
    x, w, y, conv = problem.x, problem.w, problem.y, problem.conv
    rank = len(conv.stride)
    if rank not in (1, 2, 3):
        raise InvalidProblemError(f"stride={conv.stride} must have 1 to 3 entries, one a spatial dimension")
    for name, t in (("x", x), ("w", w), ("y", y)):
        if len(t.shape) != rank + 2:
            raise InvalidProblemError(f"{name}={t.shape} must have {rank + 2} dimensions")
    c, k, groups = x.shape[1], w.shape[0], conv.groups
    if c % groups:
        raise InvalidProblemError(f"groups={groups} must divide the input channels c={c}")
    if k % groups:
        raise InvalidProblemError(f"groups={groups} must divide the output channels k={k}")
    if w.shape[1] != c // groups:
        raise InvalidProblemError(
            f"w={w.shape} has {w.shape[1]} channels a filter: x={x.shape} with groups={groups} wants {c // groups}"
        )
    out = tuple(conv.output_size(x.shape[i + 2], w.shape[i + 2], i) for i in range(rank))
    if y.shape != (x.shape[0], k, *out):
        raise InvalidProblemError(f"y={y.shape} must be {(x.shape[0], k, *out)} for x={x.shape} and w={w.shape}")


def _check_types(problem: ProblemDescription) -> None:
    dtypes = {problem.x.dtype, problem.w.dtype, problem.y.dtype}
    if problem.math is MathMode.TF32 and dtypes != {DataType.FLOAT32}:
        raise InvalidProblemError(f"math=tf32 needs float32 tensors, not {', '.join(sorted(dtypes))}")
    if DataType.FLOAT64 in dtypes and len(dtypes) > 1:
        raise InvalidProblemError(f"dtype: float64 does not mix with {', '.join(sorted(dtypes - {DataType.FLOAT64}))}")


def _cross(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _network_config(problem: ProblemDescription) -> str:
    """Canonical text of every field that changes the answer; defaults are left out, so that new fields void nothing."""
    conv, rank = problem.conv, problem.spatial_dims
    parts = [
        f"conv{rank}d",
        problem.direction.value,
        f"n{problem.n}",
        f"c{problem.c}",
        f"i{_cross(problem.spatial)}",
        f"k{problem.k}",
        f"f{_cross(problem.filter)}",
    ]
    if any(conv.pad_before) or any(conv.pad_after):
        same = conv.pad_before == conv.pad_after
        parts.append(f"p{_cross(conv.pad_before)}" + ("" if same else f"_{_cross(conv.pad_after)}"))
    if conv.stride != (1,) * rank:
        parts.append(f"s{_cross(conv.stride)}")
    if conv.dilation != (1,) * rank:
        parts.append(f"d{_cross(conv.dilation)}")
    if conv.groups != 1:
        parts.append(f"g{conv.groups}")
    tensors = (problem.x, problem.w, problem.y)
    for values in ([t.dtype.value for t in tensors], [t.layout.value for t in tensors]):
        parts.append(values[0] if len(set(values)) == 1 else ".".join(values))
    if problem.math is not MathMode.IEEE:
        parts.append(problem.math.value)
    return "-".join(parts)


_SIZES = r"\d{1,10}(?:x\d{1,10}){0,2}"
_NETWORK_CONFIG = re.compile(
    rf"conv[123]d-(?P<direction>[a-z_]+)-n(?P<n>\d{{1,10}})-c(?P<c>\d{{1,10}})-i(?P<i>{_SIZES})-k(?P<k>\d{{1,10}})-f(?P<f>{_SIZES})"
    rf"(?:-p(?P<before>{_SIZES})(?:_(?P<after>{_SIZES}))?)?(?:-s(?P<s>{_SIZES}))?(?:-d(?P<d>{_SIZES}))?(?:-g(?P<g>\d{{1,10}}))?"
    r"-(?P<dtype>[a-z0-9.]+)-(?P<layout>[A-Z.]+)(?:-(?P<math>[a-z0-9]+))?"
)


def _parse_network_config(text: str) -> ProblemDescription:
    match = _NETWORK_CONFIG.fullmatch(text)
    if match is None:
        raise InvalidProblemError(f"{text!r} is not a network_config")

    def sizes(name: str, default: int) -> tuple[int, ...]:
        value = match[name]
        return (default,) * rank if value is None else tuple(map(int, value.split("x")))

    def tensors(name: str) -> dict[str, str]:
        values = match[name].split(".")
        if len(values) not in (1, 3):
            raise InvalidProblemError(f"{text!r} must name one {name} or three")
        return dict(zip("xwy", values * 3 if len(values) == 1 else values, strict=True))

    rank = int(text[4])
    spatial, taps, groups = sizes("i", 1), sizes("f", 1), int(match["g"] or 1)
    before = sizes("before", 0)
    after = before if match["after"] is None else sizes("after", 0)
    if not len(spatial) == len(taps) == len(before) == len(after) == rank:
        raise InvalidProblemError(f"{text!r} must have {rank} sizes a field")
    if groups < 1:
        raise InvalidProblemError(f"groups={groups} must be at least 1")
    return ProblemDescription.convolution(
        x=(int(match["n"]), int(match["c"]), *spatial),
        w=(int(match["k"]), max(1, int(match["c"]) // groups), *taps),
        padding=tuple(zip(before, after, strict=True)),
        stride=sizes("s", 1),
        dilation=sizes("d", 1),
        groups=groups,
        direction=match["direction"],
        dtype=tensors("dtype"),
        layout=tensors("layout"),
        math=match["math"] or MathMode.IEEE,
    )
