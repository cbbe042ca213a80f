"""What is to be computed: tensors, a convolution, a direction.

Pure values, validated on construction.

The field's letters, used everywhere: n c (batch, input channels), k (output channels), spatial sizes outermost first
(d h w for the input, z y x for the filter, od oh ow for the output), pad, stride, dilation, groups. The tensors are
x (n, c, *spatial), w (k, c/groups, *filter) and y (n, k, *out_spatial), whatever the direction and the layout;
dx, dw and dy are gradients with the shapes of x, w and y.
"""

from __future__ import annotations

import functools
import math as _math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from miofind.core.arguments import Padding, ProblemArguments, Sizes
from miofind.core.epilogue import EPILOGUE_TENSORS, NO_EPILOGUE, Epilogue
from miofind.core.network_config import parse_network_config, write_network_config
from miofind.core.operand import Operand, Role
from miofind.core.tensor import (
    MAX_DIMENSION,
    MAX_INT32_ELEMENTS,
    MAX_TENSOR_BYTES,
    ConvolutionDescriptor,
    DataType,
    Direction,
    Layout,
    MathMode,
    TensorDescriptor,
    data_type,
    enum_value,
    named_padding,
    sizes,
)
from miofind.errors import InvalidProblemError, brief, with_known_keywords

__all__ = [
    "MAX_DIMENSION",
    "MAX_INT32_ELEMENTS",
    "MAX_TENSOR_BYTES",
    "ConvolutionDescriptor",
    "DataType",
    "Direction",
    "Epilogue",
    "Layout",
    "MathMode",
    "Operand",
    "ProblemDescription",
    "Role",
    "TensorDescriptor",
    "enum_value",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDescription:
    """One convolution to solve: three tensors, a convolution, a direction, the arithmetic allowed and an epilogue.

    Shapes describe the forward convolution whatever the direction. Build one with `ProblemDescription.convolution`,
    `from_arrays`, a MIOpenDriver line or a suite. Equal problems have equal `network_config`, the key of
    every cache and database; it is computed once.

    Attributes:
        epilogue: what is done to the sums before they are written, and what is written besides them.
        operands: the tensors that a run is given, in the order of their addresses: x, w, y, whatever the direction,
            then what the epilogue reads, then what it writes.

    Raises:
        InvalidProblemError: the message names the field and the value.
    """

    x: TensorDescriptor
    w: TensorDescriptor
    y: TensorDescriptor
    conv: ConvolutionDescriptor
    direction: Direction = Direction.FORWARD
    math: MathMode = MathMode.IEEE
    epilogue: Epilogue = NO_EPILOGUE
    network_config: str = field(init=False, repr=False, compare=False, default="")
    operands: tuple[Operand, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", enum_value(Direction, self.direction, "direction"))
        object.__setattr__(self, "math", enum_value(MathMode, self.math, "math"))
        _check_shapes(self)
        _check_types(self)
        object.__setattr__(self, "epilogue", _checked_epilogue(self))
        operands = _operands(self)
        if self.epilogue:
            operands += (*_epilogue_operands(self), *_second_outputs(self))
        object.__setattr__(self, "operands", operands)
        tensors = {"x": self.x, "w": self.w, "y": self.y}
        text = write_network_config(self.direction, tensors, self.conv, self.math, self.epilogue)
        object.__setattr__(self, "network_config", text)

    def __hash__(self) -> int:
        return hash(self.network_config)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProblemDescription):
            return NotImplemented
        return self.network_config == other.network_config

    def __str__(self) -> str:
        return self.network_config

    @staticmethod
    @with_known_keywords
    def convolution(
        *,
        x: Sequence[int],
        w: Sequence[int],
        padding: Padding = 0,
        stride: Sizes = 1,
        dilation: Sizes = 1,
        groups: int = 1,
        direction: Direction | str = Direction.FORWARD,
        dtype: object = DataType.FLOAT32,
        layout: Layout | str | Mapping[str, Layout | str] | None = None,
        math: MathMode | str = MathMode.IEEE,
        epilogue: Epilogue | str | None = None,
    ) -> ProblemDescription:
        """A convolution problem from its shapes.

        Args:
            x: (n, c, *spatial), 1 to 3 spatial dimensions, logical order.
            w: (k, c/groups, *filter).
            padding: an int, an int a dimension, a (before, after) pair a dimension, "valid" for none, or "same" for
                outputs as large as inputs, with stride 1 alone: of an odd number the larger half comes after.
            stride, dilation: an int, or an int a dimension.
            groups: group count; divides c and k.
            direction: "forward", "backward_data" or "backward_weights"; the shapes are the forward ones in each.
            dtype: one for all tensors, or a mapping with keys "x", "w", "y": "float64", "float32", "float16",
                "bfloat16", other names of them such as "half", or a dtype of NumPy, CuPy, PyTorch or ml_dtypes.
            layout: memory order, one for all tensors or a mapping with keys "x", "w", "y"; channels first if left out.
            math: float32 only: "ieee" or "tf32".
            epilogue: what is done to the sums, and second outputs: an `Epilogue` or its text, such as
                "bias.residual.relu" or "statistics", forward, "residual.drelu" for backward data, or "bias_gradient"
                for backward weights.

        Raises:
            InvalidProblemError: the message names the field and the value.
        """
        x_shape, w_shape = sizes(x, "x"), sizes(w, "w")
        rank = len(x_shape) - 2
        if rank not in (1, 2, 3):
            raise InvalidProblemError(f"x={brief(x_shape)} must have 3 to 5 dimensions: (n, c, *spatial)")
        if len(w_shape) != rank + 2:
            raise InvalidProblemError(f"w={brief(w_shape)} must have {rank + 2} dimensions like x={x_shape}")
        if isinstance(padding, str):
            padding = named_padding(padding, w_shape[2:], stride, dilation)
        conv = ConvolutionDescriptor.of(rank, padding=padding, stride=stride, dilation=dilation, groups=groups)
        out = tuple(conv.output_size(x_shape[i + 2], w_shape[i + 2], i) for i in range(rank))
        dtypes = _per_tensor(dtype, "dtype")
        layouts = _per_tensor(Layout.of(rank, channels_last=False) if layout is None else layout, "layout")
        shapes = {"x": x_shape, "w": w_shape, "y": (x_shape[0], w_shape[0], *out)}
        tensors = {
            name: _named_tensor(
                name,
                shape,
                data_type(dtypes[name], "dtype"),
                enum_value(Layout, layouts[name], "layout"),
            )
            for name, shape in shapes.items()
        }
        return ProblemDescription(
            **tensors,
            conv=conv,
            direction=enum_value(Direction, direction, "direction"),
            math=enum_value(MathMode, math, "math"),
            epilogue=Epilogue.of(epilogue),
        )

    @property
    def bare(self) -> ProblemDescription:
        """The same convolution without its epilogue."""
        return _bare(self) if self.epilogue else self

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
    def is_large(self) -> bool:
        """Whether x or y has more elements than kernels count that count in 32 bits."""
        return max(self.x.size, self.y.size) > MAX_INT32_ELEMENTS

    @property
    def flops(self) -> int:
        """Floating-point operations of direct arithmetic, a multiply-add counted as two; the same in each direction."""
        return 2 * self.y.size * self.w.shape[1] * _math.prod(self.filter)

    @property
    def bytes(self) -> int:
        """Least bytes through device memory: each operand once."""
        return sum(operand.tensor.bytes for operand in self.operands)

    @property
    def accumulator(self) -> DataType:
        """Element type that products are summed in: float64 for float64, else float32."""
        return self.x.dtype.accumulator

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
    def inputs(self) -> tuple[Operand, ...]:
        """The operands that are read: the two that are multiplied, in the order of `run_solution`, then all others."""
        factors = self.direction.inputs
        read = (operand for operand in self.operands if operand.is_input)
        return tuple(sorted(read, key=lambda each: factors.index(each.name) if each.name in factors else len(factors)))

    @property
    def output(self) -> TensorDescriptor:
        """The tensor that is written, the main one where there are several."""
        return self.tensor(self.direction.output)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The operands that are written: the main one, then the epilogue's in order."""
        return tuple(operand for operand in self.operands if not operand.is_input)

    @property
    def second_outputs(self) -> tuple[Operand, ...]:
        """Those of the outputs that the epilogue adds, in order; none for most problems."""
        return self.outputs[1:]

    @property
    def trains(self) -> bool:
        """Whether its epilogue is one of training: of a gradient, or with outputs of its own."""
        return bool(self.epilogue) and (bool(self.epilogue.outputs) or self.direction is not Direction.FORWARD)

    def tensor(self, name: str) -> TensorDescriptor:
        """The descriptor of the operand of that name.

        Raises:
            KeyError: the problem has no such operand.
        """
        for operand in self.operands:
            if operand.name == name:
                return operand.tensor
        raise KeyError(name)

    def in_direction(self, direction: Direction) -> ProblemDescription:
        """The convolution of the same tensors in a direction."""
        return self if direction is self.direction else replace(self, direction=direction)

    def lifted(self, spatial_dims: int) -> ProblemDescription:
        """The same convolution over the same memory with unit spatial dimensions put in front."""
        if spatial_dims < self.spatial_dims:
            raise ValueError(f"cannot lift {self.spatial_dims} spatial dimensions to {spatial_dims}")
        return self if spatial_dims == self.spatial_dims else _lifted(self, spatial_dims)

    @property
    def flattened(self) -> ProblemDescription:
        """The same convolution over the same memory as one of images, where a volume's is one; else the problem itself.

        That is so where an axis is one element that the filter does not reach beyond, so that it can be left out; where
        two neighbouring axes have no filter, stride or padding, so that they are one (1x1x1, 3x1x1); and, with channels
        last, where the depth has none, so that slices are a batch (1x3x3). It is what finds look up and measure.
        """
        if self.spatial_dims < 3:
            return self
        from miofind.core.flattening import flattened

        found = flattened(self)
        return self if found == self else found

    @staticmethod
    def from_arrays(
        *,
        x: Any = None,
        w: Any = None,
        dy: Any = None,
        out: Any = None,
        x_shape: Sequence[int] | None = None,
        w_shape: Sequence[int] | None = None,
        **arguments: Unpack[ProblemArguments],
    ) -> ProblemDescription:
        """The problem that two arrays pose: x and w forward, dy and w backward data, dy and x backward weights.

        Args:
            x, w, dy, out: arrays of any kind that `run_solution` takes; layouts come from their strides.
            x_shape: (n, c, *spatial), for backward data.
            w_shape: (k, c/groups, *filter), for backward weights.
            arguments: padding, stride, dilation, groups and math, as in `convolution`; forward, of the epilogue, the
                arrays scale, bias, channel_bias and residual, residual_position and activation, as in
                `miofind.convolution`.

        Raises:
            InvalidArrayError, InvalidProblemError: the message names the array or field.
        """
        from miofind.arrays.array_problem import problem_from_arrays

        return problem_from_arrays(x=x, w=w, dy=dy, out=out, x_shape=x_shape, w_shape=w_shape, **arguments)

    @staticmethod
    def from_network_config(text: str) -> ProblemDescription:
        """The problem that a `network_config` names.

        Raises:
            InvalidProblemError: the text is not a canonical network_config.
        """
        problem = ProblemDescription.convolution(**parse_network_config(text))
        if problem.network_config != text:
            canonical = problem.network_config
            raise InvalidProblemError(f"network_config {text!r} is not canonical: it should be {canonical!r}")
        return problem


@functools.lru_cache(maxsize=256)  # solvers ask for each of a problem's configurations
def _lifted(problem: ProblemDescription, spatial_dims: int) -> ProblemDescription:
    extra = spatial_dims - problem.spatial_dims
    ones, zeros = (1,) * extra, (0,) * extra

    def lift(t: TensorDescriptor) -> TensorDescriptor:
        layout = Layout.of(spatial_dims, channels_last=t.layout.channels_last)
        return TensorDescriptor(shape=(*t.shape[:2], *ones, *t.shape[2:]), dtype=t.dtype, layout=layout)

    conv = ConvolutionDescriptor(
        pad_before=zeros + problem.conv.pad_before,
        pad_after=zeros + problem.conv.pad_after,
        stride=ones + problem.conv.stride,
        dilation=ones + problem.conv.dilation,
        groups=problem.groups,
    )
    x, w, y = map(lift, (problem.x, problem.w, problem.y))
    return replace(problem, x=x, w=w, y=y, conv=conv)


@functools.lru_cache(maxsize=256)
def _bare(problem: ProblemDescription) -> ProblemDescription:
    return replace(problem, epilogue=NO_EPILOGUE)


def _operands(problem: ProblemDescription) -> tuple[Operand, ...]:
    """The operands of the convolution itself."""
    output = problem.direction.output
    return tuple(
        Operand(name=name, tensor=tensor, role=Role.OUTPUT if name == output else Role.INPUT)
        for name, tensor in (("x", problem.x), ("w", problem.w), ("y", problem.y))
    )


def _epilogue_operands(problem: ProblemDescription) -> Iterator[Operand]:
    """The operands that the epilogue reads."""
    y, epilogue = problem.y, problem.epilogue
    output = problem.x if problem.direction is Direction.BACKWARD_DATA else y
    batch, channels = y.shape[:2]
    ones = (1,) * problem.spatial_dims
    for name in epilogue.operands:
        if name in EPILOGUE_TENSORS:
            yield Operand(name=name, tensor=output, role=Role.INPUT)
        elif name == "channel_bias":
            tensor = TensorDescriptor(shape=(batch, channels, *ones), dtype=y.dtype, layout=y.layout)
            yield Operand(name=name, tensor=tensor, role=Role.INPUT, shape=(batch, channels))
        else:
            dtype = epilogue.parameter_dtype or y.dtype
            tensor = TensorDescriptor(shape=(1, channels, *ones), dtype=dtype, layout=y.layout)
            yield Operand(name=name, tensor=tensor, role=Role.INPUT, shape=(channels,))


def _second_outputs(problem: ProblemDescription) -> Iterator[Operand]:
    """The operands that the epilogue writes: one number of each output channel."""
    epilogue, layout = problem.epilogue, problem.y.layout
    shape = (1, problem.k, *(1,) * problem.spatial_dims)
    for name in epilogue.outputs:
        dtype = problem.accumulator if epilogue.statistics else epilogue.parameter_dtype or problem.w.dtype
        tensor = TensorDescriptor(shape=shape, dtype=dtype, layout=layout)
        yield Operand(name=name, tensor=tensor, role=Role.OUTPUT, shape=(problem.k,))


def _checked_epilogue(problem: ProblemDescription) -> Epilogue:
    """The problem's epilogue as its key has it: the output's own dtype is the default one."""
    epilogue = Epilogue.of(problem.epilogue)
    if not epilogue:
        return epilogue
    if problem.direction not in epilogue.directions:
        known = " and ".join(epilogue.directions)
        raise InvalidProblemError(f"epilogue={epilogue.text} is of {known} problems, not of {problem.direction} ones")
    dtype, own = epilogue.parameter_dtype, (problem.w if epilogue.bias_gradient else problem.y).dtype
    if dtype is None:
        return epilogue
    if dtype is own:
        return replace(epilogue, parameter_dtype=None)
    if dtype is not problem.accumulator:
        what = "the bias gradient is" if epilogue.bias_gradient else "scale and bias are"
        output = "dw" if epilogue.bias_gradient else "y"
        kinds = f"{own} as {output}" + ("" if own is problem.accumulator else f" or {problem.accumulator}")
        raise InvalidProblemError(f"epilogue={epilogue.text}: {what} {kinds}, not {dtype}: convert one")
    return epilogue


def _named_tensor(name: str, shape: tuple[int, ...], dtype: DataType, layout: Layout) -> TensorDescriptor:
    """A tensor whose errors say which of x, w and y it is."""
    try:
        return TensorDescriptor(shape=shape, dtype=dtype, layout=layout)
    except InvalidProblemError as error:
        raise InvalidProblemError(f"{name}: {error}") from error


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
            f"{_of_channels_last(x.shape, w.shape, groups)}"
        )
    out = tuple(conv.output_size(x.shape[i + 2], w.shape[i + 2], i) for i in range(rank))
    if y.shape != (x.shape[0], k, *out):
        raise InvalidProblemError(f"y={y.shape} must be {(x.shape[0], k, *out)} for x={x.shape} and w={w.shape}")


def _of_channels_last(x: tuple[int, ...], w: tuple[int, ...], groups: int) -> str:
    """What to do with an image whose shape has its channels last, as other frameworks have it; "" for others."""
    if x[-1] != groups * w[1]:
        return ""
    axes = (0, len(x) - 1, *range(1, len(x) - 1))
    return f"; shapes are (n, c, *spatial) in any layout: permute the axes of (n, *spatial, c) by {axes}"


def _check_types(problem: ProblemDescription) -> None:
    dtypes = {problem.x.dtype, problem.w.dtype, problem.y.dtype}
    if problem.math is MathMode.TF32 and dtypes != {DataType.FLOAT32}:
        raise InvalidProblemError(f"math=tf32 needs float32 tensors, not {', '.join(sorted(dtypes))}")
    if DataType.FLOAT64 in dtypes and len(dtypes) > 1:
        others = ", ".join(sorted(dtypes - {DataType.FLOAT64}))
        told = ", ".join(f"{name} is {getattr(problem, name).dtype}" for name in ("x", "w", "y"))
        raise InvalidProblemError(f"dtype: float64 does not mix with {others}, and {told}: convert one")
