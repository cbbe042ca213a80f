"""Problems of an ONNX file: the Conv and ConvTranspose nodes of a network's graph, one sample or as many as are asked.

Shapes come from ONNX's own shape inference; weights are not looked at, and those in files beside it need not be there.
A transposed convolution is backward data of the convolution that leads from its output to its input.

Source: onnx.ai/onnx/operators, Conv and ConvTranspose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.core.tensor import one_size
from miofind.errors import (
    InvalidOptionError,
    InvalidProblemError,
    MiofindError,
    MissingLibraryError,
    described,
    install_extra,
    suggestion,
    unreadable,
)
from miofind.files import read_bounded
from miofind.suites.suite import Suite
from miofind.suites.table import SuiteRow
from miofind.suites.text import refuse_missing
from miofind.text.printable import printable_name

MAX_FILE_BYTES = (1 << 31) - 1
"""Of a message of protocol buffers; larger networks have their weights in files beside it."""

_DIRECTIONS = {"Conv": Direction.FORWARD, "ConvTranspose": Direction.BACKWARD_DATA}
_DTYPES = {
    "FLOAT": DataType.FLOAT32,
    "DOUBLE": DataType.FLOAT64,
    "FLOAT16": DataType.FLOAT16,
    "BFLOAT16": DataType.BFLOAT16,
}
_DOMAINS = ("", "ai.onnx")
_MOST_SHAPE_NUMBERS = 1024
_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxProblems:
    """What a file holds.

    Attributes:
        suite: a row for each node that is a convolution of miofind's, in the graph's order.
        left_out: the other convolutions, each with its reason.
    """

    suite: Suite
    left_out: tuple[str, ...]

    @property
    def warning(self) -> str:
        """What of the file is left out, in one line; "" where nothing is."""
        if not self.left_out:
            return ""
        more = len(self.left_out) - _MOST_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        total = len(self.left_out) + len(self.suite.rows)
        shown = "; ".join(self.left_out[:_MOST_SHOWN])
        return f"{self.suite.name}: {len(self.left_out)} of {total} convolutions are left out: {shown}{rest}"


def load_onnx(path: str | Path, *, sizes: Mapping[str, int] | None = None) -> OnnxProblems:
    """The convolutions of an ONNX file, in inference, channels first, each with the element type that the file has.

    Args:
        path: a model in ONNX's binary form.
        sizes: a number for each symbolic size of the graph's inputs, such as {"batch": 32}; a size without a name is
            called by its input and dimension, such as "x.0".

    Raises:
        MissingLibraryError: the package onnx is not installed.
        InvalidOptionError: the file cannot be read or is no ONNX model; a symbolic size is not given, or one is given
            that the graph has not.
    """
    file = Path(path)
    refuse_missing(file)
    onnx = _library()
    model = _model(onnx, file)
    _fix_sizes(model, sizes or {}, file)
    return _found(onnx, _inferred(onnx, model, file), file)


def _library() -> Any:
    try:
        import onnx
        import onnx.inliner
        import onnx.shape_inference
    except ImportError as error:
        raise MissingLibraryError(
            f"onnx is not installed, and files in its format are read by it: {install_extra('onnx')}"
        ) from error
    return onnx


def _model(onnx: Any, file: Path) -> Any:
    """The parsed model, its functions inlined, large weights replaced by their shapes."""
    content = _content(file)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's own, whose module differs between its implementations
        raise InvalidOptionError(f"{file} is no ONNX model, or is damaged: {described(error, str)}") from error
    if not model.graph.node:
        raise InvalidOptionError(f"{file} is no ONNX model, or is damaged: it has no graph with nodes")
    del content
    _drop_weights(onnx, model.graph)
    return _called(onnx.inliner.inline_local_functions, model, file) if model.functions else model


def _content(file: Path) -> bytes:
    try:
        is_large = file.stat().st_size > MAX_FILE_BYTES
        with file.open("rb") as opened:
            content = b"" if is_large else read_bounded(opened, MAX_FILE_BYTES)
    except OSError as error:
        raise unreadable(f"file {file}", error) from error
    if is_large or len(content) > MAX_FILE_BYTES:
        raise InvalidOptionError(
            f"{file} has more than {MAX_FILE_BYTES} bytes, the most of an ONNX file: save it with its weights in files "
            "beside it (save_as_external_data)"
        )
    return content


def _drop_weights(onnx: Any, graph: Any) -> None:
    """Let large weights be known by their type and shape alone: shape inference copies the model more than once."""
    kept = []
    inputs = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _MOST_SHAPE_NUMBERS and not tensor.external_data:
            kept.append(tensor)
        elif tensor.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _fix_sizes(model: Any, sizes: Mapping[str, int], file: Path) -> None:
    """Put numbers for the symbolic sizes of the graph, wherever it names them."""
    given = {str(name): _checked_size(name, size) for name, size in sizes.items()}
    graph = model.graph
    symbols: dict[str, list[Any]] = {}
    for value in graph.input:
        for i, dimension in enumerate(value.type.tensor_type.shape.dim):
            if not dimension.HasField("dim_value") or dimension.dim_value < 1:
                symbols.setdefault(dimension.dim_param or f"{value.name}.{i}", []).append(dimension)
    if unknown := [name for name in given if name not in symbols]:
        near = suggestion(unknown[0], symbols) or f": it has {_names(symbols) or 'none'}"
        raise InvalidOptionError(f"{file} has no symbolic size {_told(unknown[0])!r}{near}")
    for name, dimensions in symbols.items():
        if name in given:
            for dimension in dimensions:
                dimension.dim_value = given[name]
    for value in (*graph.value_info, *graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in given:
                dimension.dim_value = given[dimension.dim_param]


def _checked_size(name: object, size: object) -> int:
    try:
        return one_size(size, f"sizes[{_told(name)!r}]")
    except InvalidProblemError as error:
        raise InvalidOptionError(str(error)) from error


def _inferred(onnx: Any, model: Any, file: Path) -> Any:
    return _called(onnx.shape_inference.infer_shapes, model, file, data_prop=True)


def _called(function: Any, model: Any, file: Path, **arguments: Any) -> Any:
    try:
        return function(model, **arguments)
    except Exception as error:  # onnx's own, protobuf's, ValueError: its C++ side raises what it likes
        raise InvalidOptionError(f"{file}: onnx cannot work out its shapes: {described(error, str)}") from error


def _found(onnx: Any, model: Any, file: Path) -> OnnxProblems:
    rows, left_out = [], []
    unknown = _unknown_sizes(model.graph)
    for node in _nodes(onnx, model.graph):
        name = _told(node.layer)
        try:
            problem = _problem(onnx, node)
        except _UnknownShapeError as error:
            if unknown:
                raise InvalidOptionError(
                    f"{file} has symbolic sizes, and its convolutions depend on them: give a number for "
                    f"{_names(unknown)}"
                ) from error
            left_out.append(f"{name}: {error}")
            continue
        except MiofindError as error:
            left_out.append(f"{name}: {error}")
            continue
        directions = (problem.direction,)
        rows.append(SuiteRow(problem=problem, suite=file.stem, layer=node.layer, count=1, directions=directions))
    return OnnxProblems(suite=Suite(name=file.stem, rows=tuple(rows)), left_out=tuple(left_out))


def _unknown_sizes(graph: Any) -> list[str]:
    """The names of the sizes of inputs that have no number."""
    names = [
        dimension.dim_param or f"{value.name}.{i}"
        for value in graph.input
        for i, dimension in enumerate(value.type.tensor_type.shape.dim)
        if dimension.dim_value < 1
    ]
    return list(dict.fromkeys(names))


def _names(names: Any) -> str:
    return ", ".join(map(_told, names))


def _told(name: object) -> str:
    """A name of the file's in a message; those that are no UTF-8 come as bytes."""
    return printable_name(str(name))


class _UnknownShapeError(MiofindError):
    """A tensor has no shape in numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A convolution of the graph or of a graph in one of its nodes, and the types of the tensors that it may read."""

    proto: Any
    values: Mapping[str, Any]

    @property
    def layer(self) -> str:
        return str(self.proto.name or next(iter(self.proto.output), "") or self.proto.op_type)


def _nodes(onnx: Any, graph: Any, outer: Mapping[str, Any] | None = None) -> Iterator[_Node]:
    """The convolutions of a graph, and of those that its nodes hold: branches and bodies of loops, each once."""
    values = dict(outer or {})
    for value in (*graph.value_info, *graph.output, *graph.input):
        values[value.name] = value.type.tensor_type
    for tensor in graph.initializer:
        values[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type
    for node in graph.node:
        if node.op_type in _DIRECTIONS and node.domain in _DOMAINS:
            yield _Node(proto=node, values=values)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _nodes(onnx, inner, values)


def _problem(onnx: Any, node: _Node) -> ProblemDescription:
    """The problem that a node poses.

    Raises:
        _UnknownShapeError: the shape of its input or its weights has no numbers.
        InvalidProblemError: miofind has no such convolution, or nobody has.
    """
    if len(node.proto.input) < 2:
        raise InvalidProblemError("it has no weights")
    x, w = (_shape(node, name) for name in node.proto.input[:2])
    rank = len(x) - 2
    if rank not in (1, 2, 3) or len(w) != len(x):
        raise InvalidProblemError(f"its tensors have the shapes {x} and {w}: 3 to 5 dimensions, as many in both")
    values = _attributes(onnx, node.proto)
    geometry = _Geometry.of(values, x[2:], w[2:])
    groups = one_size(values.get("group", 1), "group")
    arguments: dict[str, Any] = {
        "w": w,
        "stride": geometry.stride,
        "dilation": geometry.dilation,
        "groups": groups,
        "dtype": _dtype(onnx, node),
    }
    if node.proto.op_type == "Conv":
        return ProblemDescription.convolution(x=x, padding=geometry.padding(), **arguments)
    sizes = geometry.transposed_sizes()
    problem = ProblemDescription.convolution(
        x=(x[0], w[1] * groups, *sizes),
        padding=geometry.transposed_padding(sizes),
        direction=Direction.BACKWARD_DATA,
        **arguments,
    )
    if problem.y.shape != x:
        raise InvalidProblemError(f"no convolution leads from its output of {problem.x.shape} to its input of {x}")
    return problem


def _attributes(onnx: Any, node: Any) -> dict[str, Any]:
    try:
        return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    except ValueError as error:
        raise InvalidProblemError(f"its attributes are damaged: {described(error, str)}") from error


def _shape(node: _Node, name: str) -> tuple[int, ...]:
    tensor = node.values.get(name)
    if tensor is None or not tensor.HasField("shape"):
        raise _UnknownShapeError(f"the shape of {_told(name)} cannot be worked out")
    if any(dimension.dim_value < 1 for dimension in tensor.shape.dim):
        shown = ", ".join(_told(d.dim_value or d.dim_param or "?") for d in tensor.shape.dim)
        raise _UnknownShapeError(f"the shape of {_told(name)} is ({shown})")
    return tuple(dimension.dim_value for dimension in tensor.shape.dim)


def _dtype(onnx: Any, node: _Node) -> DataType:
    number = node.values[node.proto.input[0]].elem_type
    name = onnx.TensorProto.DataType.Name(number) if number in onnx.TensorProto.DataType.values() else str(number)
    if name not in _DTYPES:
        raise InvalidProblemError(f"its element type is {name}")
    return _DTYPES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """How a node's filter moves; one entry a spatial dimension, `pads` with all those before and then all behind."""

    spatial: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]
    auto_pad: str
    output_padding: tuple[int, ...]
    output_shape: tuple[int, ...]

    @staticmethod
    def of(values: Mapping[str, Any], spatial: tuple[int, ...], taps: tuple[int, ...]) -> _Geometry:
        """The geometry that attributes give to an input and weights of these sizes."""
        rank = len(spatial)
        kernel = _integers(values, "kernel_shape", taps, rank)
        if kernel != taps:
            raise InvalidProblemError(f"its kernel_shape is {kernel}, its weights have {taps}")
        mode = values.get("auto_pad") or b"NOTSET"
        return _Geometry(
            spatial=spatial,
            filter=taps,
            stride=_integers(values, "strides", (1,) * rank, rank, least=1),
            dilation=_integers(values, "dilations", (1,) * rank, rank, least=1),
            pads=_integers(values, "pads", (0,) * 2 * rank, 2 * rank),
            auto_pad=mode.decode("utf-8", "replace") if isinstance(mode, bytes) else str(mode),
            output_padding=_integers(values, "output_padding", (0,) * rank, rank),
            output_shape=tuple(values.get("output_shape", ()))[-rank:],
        )

    @property
    def reach(self) -> tuple[int, ...]:
        """Elements that the dilated filter spans."""
        return tuple(d * (taps - 1) + 1 for d, taps in zip(self.dilation, self.filter, strict=True))

    def padding(self) -> tuple[tuple[int, int], ...]:
        """(before, after) a spatial dimension, of a convolution."""
        if not self._is_same:
            return self._pads
        totals = [
            max((-(-size // stride) - 1) * stride + reach - size, 0)
            for size, stride, reach in zip(self.spatial, self.stride, self.reach, strict=True)
        ]
        return self._halves(totals, larger_first=self.auto_pad == "SAME_LOWER")

    def transposed_sizes(self) -> tuple[int, ...]:
        """The sizes of a transposed convolution's output."""
        if self.output_shape:
            return self.output_shape
        if self._is_same:
            return tuple(size * stride for size, stride in zip(self.spatial, self.stride, strict=True))
        return tuple(full - sum(pair) for full, pair in zip(self._full_sizes, self._pads, strict=True))

    def transposed_padding(self, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(before, after) a spatial dimension, of a transposed convolution whose output has these sizes."""
        if not (self.output_shape or self._is_same):
            return self._pads
        totals = [full - size for full, size in zip(self._full_sizes, sizes, strict=True)]
        return self._halves(totals, larger_first=self.auto_pad != "SAME_UPPER")

    @property
    def _is_same(self) -> bool:
        return self.auto_pad in ("SAME_UPPER", "SAME_LOWER")

    @property
    def _pads(self) -> tuple[tuple[int, int], ...]:
        if self.auto_pad == "VALID":
            return ((0, 0),) * len(self.spatial)
        if self.auto_pad != "NOTSET":
            raise InvalidProblemError(f"its auto_pad is {_told(self.auto_pad)!r}")
        return tuple(zip(self.pads[: len(self.spatial)], self.pads[len(self.spatial) :], strict=True))

    @property
    def _full_sizes(self) -> tuple[int, ...]:
        """The sizes of a transposed convolution's output without padding."""
        parts = zip(self.spatial, self.stride, self.reach, self.output_padding, strict=True)
        return tuple((size - 1) * stride + reach + extra for size, stride, reach, extra in parts)

    def _halves(self, totals: Sequence[int], *, larger_first: bool) -> tuple[tuple[int, int], ...]:
        halves = [(total // 2, total - total // 2) for total in totals]
        return tuple((high, low) if larger_first else (low, high) for low, high in halves)


def _integers(
    values: Mapping[str, Any], name: str, default: tuple[int, ...], count: int, least: int | None = None
) -> tuple[int, ...]:
    value = values.get(name)
    numbers = tuple(value) if isinstance(value, (list, tuple)) else default if value is None else (value,)
    if len(numbers) != count or any(not isinstance(number, int) for number in numbers):
        raise InvalidProblemError(f"its {name} is {numbers}: {count} integers are needed")
    if least is not None and min(numbers) < least:
        raise InvalidProblemError(f"its {name} is {numbers}: {least} is the least")
    return numbers
