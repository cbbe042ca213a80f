"""The convolutions of programs that torch.export has written: forward, in the memory formats of the export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from miofind.core.tensor import one_size
from miofind.errors import InvalidOptionError, InvalidProblemError, brief, described, suggestion
from miofind.torch.override.calls import ConvolutionCall, Unserved
from miofind.torch.override.flags import Flags, state
from miofind.torch.recording.recorder import as_on, recorded_call
from miofind.torch.recording.recording import RecordedCall, Recording

_CONVOLUTION = torch.ops.aten.convolution.default


def exported_problems(program: Any, *, sizes: Mapping[str, int] | None = None, device: str = "cuda") -> Recording:
    """The convolutions of one run of an exported program; nothing is computed.

    Args:
        program: a torch.export.ExportedProgram, or the path of a .pt2 file. To read a file is to trust it, as with
            torch.load.
        sizes: a number for each symbolic size, by its symbol, such as "s77", or by input and dimension: "x.0".
        device: "cuda" or "cpu": what the program is to run on, whatever it was exported on.

    Raises:
        InvalidOptionError: the file cannot be read, or a symbolic size is not given, is unknown or out of its range.
    """
    if device not in ("cuda", "cpu"):
        raise InvalidOptionError(f"device={brief(device)} must be 'cuda' or 'cpu'")
    name = "exported"
    if isinstance(program, (str, Path)):
        program, name = _loaded(Path(program)), Path(program).stem
    if not isinstance(program, torch.export.ExportedProgram):
        raise InvalidOptionError(f"program={brief(program)} must be a torch.export.ExportedProgram or a path")
    numbers = _Numbers(program, sizes or {})
    nodes = list(_convolutions(program.run_decompositions()))
    numbers.require(node.meta["val"] for node in _tensors_read(nodes))
    math = Flags.of(state(), on_gpu=device == "cuda").math
    recording = Recording(name)
    for node in nodes:
        recording.note(_noted(node, numbers, device, math))
    return recording


def _loaded(path: Path) -> Any:
    if not path.is_file():  # of which torch.export would log a traceback
        raise InvalidOptionError(f"there is no file {path}: correct the path")
    try:
        return torch.export.load(path)
    except Exception as error:  # zip files, JSON, pickles, versions: each has its own
        raise InvalidOptionError(f"{path} cannot be read as an exported program: {described(error, str)}") from error


def _convolutions(program: Any) -> Iterator[Any]:
    """The nodes that convolve, of the graph and of those of its branches and loops."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.target is _CONVOLUTION)


def _tensors_read(nodes: list[Any]) -> Iterator[Any]:
    for node in nodes:
        yield from node.args[:2]


def _noted(node: Any, numbers: _Numbers, device: str, math: Any) -> RecordedCall:
    x, w, bias, *geometry = node.args
    layer = _layer(node)
    with as_on(device) as place:
        tensors = [_placed(argument.meta["val"], numbers, place) for argument in (x, w)]
        bias_sizes = None if bias is None else [*numbers.of(bias.meta["val"].shape)]
        try:
            call = ConvolutionCall.of(*tensors, bias_sizes, *map(numbers.each, geometry))
        except Unserved as reason:
            return RecordedCall(layer=layer, computed="y", reason=str(reason))
    return recorded_call(call, layer, "y", math, has_bias=bias is not None)


def _placed(value: Any, numbers: _Numbers, place: str) -> Any:
    """A tensor without memory that looks like a value of the graph."""
    shape, strides = numbers.of(value.shape), numbers.of(value.stride())
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=place)


def _layer(node: Any) -> str:
    """The path of the module whose call became a node."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return str(stack[-1] or node.name) if stack else str(node.name)


class _Numbers:
    """The numbers that stand for a program's symbolic sizes."""

    def __init__(self, program: Any, sizes: Mapping[str, int]) -> None:
        self._places = _places(program)
        self._given: dict[Any, int] = {}
        symbols = {str(symbol): symbol for symbol in (*program.range_constraints, *self._places)}
        named = symbols | {place: symbol for symbol, places in self._places.items() for place in places}
        for name, size in sizes.items():
            if name not in named:
                near = suggestion(name, named) or f": it has {', '.join(map(self._told, self._places)) or 'none'}"
                raise InvalidOptionError(f"the program has no symbolic size {brief(name)}{near}")
            self._given[named[name]] = _in_range(name, size, program.range_constraints.get(named[name]))

    def require(self, values: Any) -> None:
        """Do nothing where all that these tensors' shapes depend on is given.

        Raises:
            InvalidOptionError: it names what is not.
        """
        sizes = [size for value in values for size in (*value.shape, *value.stride())]
        free = {symbol for size in sizes if not isinstance(size, int) for symbol in size.node.expr.free_symbols}
        if missing := sorted(free - self._given.keys(), key=str):
            told = ", ".join(map(self._told, missing))
            raise InvalidOptionError(
                f"the program has symbolic sizes, and its convolutions depend on them: give {told}"
            )

    def of(self, sizes: Any) -> tuple[int, ...]:
        """Sizes in numbers."""
        return tuple(self._number(size) for size in sizes)

    def each(self, argument: Any) -> Any:
        """An argument of a node, whose sizes have become numbers."""
        return list(map(self._number, argument)) if isinstance(argument, (list, tuple)) else self._number(argument)

    def _number(self, size: Any) -> Any:
        if isinstance(size, torch.fx.Node):
            size = size.meta["val"]
        return int(size.node.expr.subs(self._given)) if isinstance(size, torch.SymInt) else size

    def _told(self, symbol: Any) -> str:
        places = self._places.get(symbol, ())
        return f"{symbol} ({', '.join(places)})" if places else str(symbol)


def _places(program: Any) -> dict[Any, tuple[str, ...]]:
    """Where each symbol is a size of an input: "x.0" for the first of x."""
    found: dict[Any, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for i, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                symbol = size.node.expr
                found[symbol] = (*found.get(symbol, ()), f"{node.name}.{i}")
    return found


def _in_range(name: str, size: Any, allowed: Any) -> int:
    try:
        number = one_size(size, f"sizes[{name!r}]")
    except InvalidProblemError as error:
        raise InvalidOptionError(str(error)) from error
    if allowed is not None and not allowed.lower <= number <= allowed.upper:
        raise InvalidOptionError(
            f"sizes[{name!r}]={number}: the program was exported for {allowed.lower} to {allowed.upper}"
        )
    return number
