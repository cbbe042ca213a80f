"""How a problem is computed: inert data that a solver emits and an invoker carries out.

A `ConvSolution` is an ordered tuple of steps over named buffers and a workspace plan. Nothing here holds a pointer, a
handle or a compiled kernel, so a solution can be hashed, compared, stored and sent to another process.

Buffer names: those of the problem's operands ("x", "w" and "y", whichever of them the direction writes, then the
epilogue's); any other name is a region of the workspace.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miofind.core.epilogue import Activation
from miofind.core.operand import WORKSPACE_ALIGNMENT
from miofind.core.problem import DataType, MathMode
from miofind.device.device import Library
from miofind.errors import InvalidConfigError
from miofind.solver.structs import Struct

ConfigValue = int | float | bool | str | dict[str, int]

_HAS_DEPENDENT = ("HAS_DEPENDENT", 1)
"""Of a kernel that lets the next step begin while it runs: see common/pdl.cuh."""


class Config(Mapping[str, Any]):
    """One point of a solver's configuration space: an immutable mapping with a canonical JSON text.

    Values are ints, floats, bools, strings, or a flat mapping of ints (the knobs of a library's engine).
    Configurations with equal text are equal, and the text is all that names a candidate outside this process.
    """

    __slots__ = ("_json", "_values")

    def __init__(self, values: Mapping[str, ConfigValue] | None = None) -> None:
        self._values = dict(values or {})
        self._json: str | None = _text_of(self._values)

    @property
    def json(self) -> str:
        """The canonical text."""
        if self._json is None:
            self._json = _text_of(self._values)
        return self._json

    @staticmethod
    def of(**values: ConfigValue) -> Config:
        """A configuration from keyword arguments."""
        return Config(values)

    @staticmethod
    def product(table: Mapping[str | tuple[str, ...], Iterable[Any]]) -> tuple[Config, ...]:
        """Every combination of a table's rows, the last row's values side by side.

        Their texts are written when they are asked for: the solvers' spaces are ten thousand configurations, and a
        process asks for few of them.

        Args:
            table: a parameter and its values; for several that vary together their names and tuples of values.
        """
        rows = [[_part(names, choice) for choice in choices] for names, choices in table.items()]
        return tuple(Config._unwritten(functools.reduce(operator.or_, parts, {})) for parts in itertools.product(*rows))

    @staticmethod
    def _unwritten(values: dict[str, ConfigValue]) -> Config:
        made = object.__new__(Config)
        made._values, made._json = values, None
        return made

    @staticmethod
    def from_json(text: str) -> Config:
        """The configuration a text names.

        Raises:
            InvalidConfigError: the text is not a JSON object.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidConfigError(f"config {text[:200]!r} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidConfigError(f"config {text[:200]!r} is not a JSON object")
        return Config(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.json)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.json == other.json

    def __repr__(self) -> str:
        return f"Config({self.json})"


class ConfigProduct(Sequence[Config]):
    """What `Config.product` gives of a table, each made when it is asked for: of thousands a process needs few.

    Args:
        table: as `Config.product` takes it.

    Attributes:
        rows: by row, its choices as parts of a configuration.
        counts: of them.
    """

    def __init__(self, table: Mapping[str | tuple[str, ...], Iterable[Any]]) -> None:
        self.rows = [[_part(names, choice) for choice in choices] for names, choices in table.items()]
        self.counts = tuple(map(len, self.rows))
        self._made: dict[int, Config] = {}

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __getitem__(self, place: Any) -> Any:
        if place not in range(len(self)):
            raise IndexError(place)
        if (made := self._made.get(place)) is None:
            number, parts = place, []
            for row, count in zip(reversed(self.rows), reversed(self.counts), strict=True):
                number, digit = divmod(number, count)
                parts.append(row[digit])
            made = self._made[place] = Config._unwritten(functools.reduce(operator.or_, reversed(parts), {}))
        return made


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode  # json.dumps makes one a call


def _text_of(values: Mapping[str, ConfigValue]) -> str:
    try:
        return _encode(values)
    except (TypeError, ValueError, RecursionError) as error:
        names = ", ".join(f"{name!r:.40}" for name in values)
        raise InvalidConfigError(f"a config of {names:.200} cannot be written as JSON: {error}") from error


def _part(names: str | tuple[str, ...], choice: Any) -> dict[str, ConfigValue]:
    return {names: choice} if isinstance(names, str) else dict(zip(names, choice, strict=True))


def config_text(config: Mapping[str, object], limit: int | None = None) -> str:
    """A configuration as name=value pairs, cut to `limit` characters; what is empty is left out."""
    pairs = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            pairs += [f"{name}={{{config_text(value)}}}"] if value else []
        elif value != "":
            pairs.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    text = " ".join(pairs)
    return text if limit is None or len(text) <= limit else f"{text[: limit - 3]}..."


RUN_PARAMETERS = "run parameters"
"""What the numbers of a run's epilogue are called among the buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """An address a step is given: a buffer by name and an offset into it."""

    buffer: str
    offset_bytes: int = 0

    def on_buffers(self, names: Mapping[str, str]) -> Pointer:
        """The address with buffers of some names under others."""
        return replace(self, buffer=names.get(self.buffer, self.buffer))

    def moved(self, offsets_bytes: Mapping[str, int]) -> Pointer:
        """The address as far behind its place as its buffer's name has it."""
        return replace(self, offset_bytes=self.offset_bytes + offsets_bytes.get(self.buffer, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A number passed to a kernel by value.

    Attributes:
        ctype: "int32", "int64", "uint32", "uint64", "float32" or "float64".
    """

    ctype: str
    value: int | float


def int32s(*values: int) -> tuple[Scalar, ...]:
    """Numbers that a kernel takes as `int`, in order."""
    return tuple(Scalar(ctype="int32", value=value) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Im2col:
    """How a copy walks the pixels of a tensor of dimensions C, (D, H,) W, N, innermost first.

    Attributes:
        lower, upper: first pixel and last beyond the tensor's corners that a filter's first tap may meet, by spatial
            dimension, innermost first.
        strides: pixels between those of neighbouring outputs, by spatial dimension, innermost first.
        channels, pixels: elements of a copy; it goes on into the next row and image by itself.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    strides: tuple[int, ...]
    channels: int
    pixels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """How a copy cuts a box out of a tensor, by dimension, innermost first.

    Attributes:
        sizes: elements that it takes; times their steps at most 256.
        steps: from one to the next in the tensor; empty for neighbours.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """What the copy engine of compute capability 9.0 and newer (TMA) is given of a tensor: 128 bytes, by value.

    What lies outside the tensor reads as zero and is not written.

    Attributes:
        pointer: the tensor's first element, at a multiple of 16 bytes.
        element: "float16", "bfloat16", "float32" or "tfloat32", which rounds what it copies.
        sizes: elements by dimension, innermost first, at most five.
        strides_bytes: from one to the next by dimension but the innermost: multiples of 16.
        copy: what one copy takes.
        swizzle_bytes: span of the XOR pattern that copies lay into shared memory: 0, 32, 64 or 128.

    Source: CUDA driver API, cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col.
    """

    pointer: Pointer
    element: str
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    copy: Box | Im2col
    swizzle_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueArgument:
    """What a fused kernel takes as `Epilogue` of kernels_src/common/epilogue.cuh, by value.

    Five addresses, null for operands that the epilogue has not, then four numbers of each run: alpha, beta and the
    activation's two.

    Attributes:
        scale, bias, channel_bias, residual, saved: where the operands are.
        activation: whose parameters are taken.
        number: type of the numbers, "float32" or "float64".
    """

    scale: Pointer | None = None
    bias: Pointer | None = None
    channel_bias: Pointer | None = None
    residual: Pointer | None = None
    saved: Pointer | None = None
    activation: Activation = Activation.NONE
    number: str = "float32"

    @property
    def pointers(self) -> tuple[Pointer | None, ...]:
        """The five addresses in order."""
        return self.scale, self.bias, self.channel_bias, self.residual, self.saved

    @property
    def bytes(self) -> int:
        """Size of the structure."""
        return 8 * len(self.pointers) + 4 * (8 if self.number == "float64" else 4)

    def changed(self, change: Callable[[Pointer], Pointer]) -> EpilogueArgument:
        """The same with other addresses."""
        scale, bias, channel_bias, residual, saved = (p if p is None else change(p) for p in self.pointers)
        return replace(self, scale=scale, bias=bias, channel_bias=channel_bias, residual=residual, saved=saved)

    def on_buffers(self, names: Mapping[str, str]) -> EpilogueArgument:
        """The same with buffers of some names under others."""
        return self.changed(lambda pointer: pointer.on_buffers(names))


Argument = Pointer | Scalar | Struct | TensorMap | EpilogueArgument
"""What a kernel may be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A named part of the workspace."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class WorkspacePlan:
    """Regions of one workspace, laid one after another at 256-byte boundaries."""

    regions: tuple[Region, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the whole workspace."""
        return sum(_aligned(region.bytes) for region in self.regions)

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each region."""
        offsets, end = {}, 0
        for region in self.regions:
            offsets[region.name] = end
            end += _aligned(region.bytes)
        return offsets


def _aligned(size: int) -> int:
    return -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """One launch of a kernel compiled from kernels_src.

    Attributes:
        source: file name, relative to `package`.
        entry: name of the `extern "C"` kernel.
        defines: compile-time parameters, as -Dname=value, in this order.
        options: further NVRTC options, such as "--use_fast_math".
        grid, block: launch geometry.
        shared_bytes: dynamic shared memory.
        args: arguments in the kernel's order.
        package: package that holds the source; another package's solver names its own.
        pdl: the kernel may be launched with programmatic dependent launch (PDL), because it calls
            griddepcontrol_wait() of common/pdl.cuh before it touches memory that earlier steps read or write. Right
            after another kernel step of its solution it then begins before that one has ended. It waits for that one
            alone, which is enough: each kernel before it has waited likewise, or was launched without PDL, after the
            end of all before. Foreign kernels that are launched with PDL into the same stream, between these steps,
            must wait, too. The step before it has the define HAS_DEPENDENT, see `ConvSolution`.
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Argument, ...]
    defines: tuple[tuple[str, str | int], ...] = ()
    options: tuple[str, ...] = ()
    shared_bytes: int = 0
    package: str = "miofind.kernels_src"
    pdl: bool = False

    @property
    def binary(self) -> object:
        """What decides its binary, sources by name."""
        return (self.package, self.source, self.defines, self.options)

    @property
    def is_fused(self) -> bool:
        """Whether its kernel applies an epilogue, so that its source has the lines for that."""
        return any(name == "EPILOGUE" for name, _ in self.defines)

    def on_buffers(self, names: Mapping[str, str]) -> KernelStep:
        """The step with buffers of some names under others."""
        return self._changed(lambda pointer: pointer.on_buffers(names))

    def moved(self, offsets_bytes: Mapping[str, int]) -> KernelStep:
        """The step on what lies as far behind in its buffers as their names have it."""
        return self._changed(lambda pointer: pointer.moved(offsets_bytes))

    def _changed(self, change: Callable[[Pointer], Pointer]) -> KernelStep:
        args: list[Argument] = []
        for arg in self.args:
            if isinstance(arg, Pointer):
                args.append(change(arg))
            elif isinstance(arg, TensorMap):
                args.append(replace(arg, pointer=change(arg.pointer)))
            else:
                args.append(arg.changed(change) if isinstance(arg, EpilogueArgument) else arg)
        return replace(self, args=tuple(args))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulStep:
    """One (batched) cuBLASLt product, column-major as cuBLAS has it: C[m, n] = alpha * op(A) op(B) + beta * C.

    With an epilogue: C[m, n] = activation(alpha * op(A) op(B) + bias[m] + beta * residual[m, n]), with a run's numbers.

    Attributes:
        m, n, k: sizes of the product.
        transpose_a, transpose_b: whether op is a transposition.
        lda, ldb, ldc: leading dimensions in elements.
        batch: number of products.
        stride_a, stride_b, stride_c: elements between the operands of neighbouring products.
        dtype_ab, dtype_c: element types; products accumulate in float32 (float64 for float64).
        math: ieee or tf32, for float32 operands.
        algorithm: the library's algorithm as recorded (attribute, value) pairs; empty for the heuristics' first.
        workspace: region given to the library, or None.
        workspace_bytes: bytes of it; the library takes no algorithm that wants more.
        epilogue: bias, residual (laid out as C) and activation: relu, gelu_tanh or none.
    """

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    lda: int
    ldb: int
    ldc: int
    a: Pointer
    b: Pointer
    c: Pointer
    dtype_ab: DataType
    dtype_c: DataType
    math: MathMode = MathMode.IEEE
    batch: int = 1
    stride_a: int = 0
    stride_b: int = 0
    stride_c: int = 0
    alpha: float = 1.0
    beta: float = 0.0
    algorithm: tuple[tuple[str, int], ...] = ()
    workspace: str | None = None
    workspace_bytes: int = 0
    epilogue: EpilogueArgument | None = None

    def on_buffers(self, names: Mapping[str, str]) -> MatmulStep:
        """The step with operands of some names under others."""
        a, b, c = (pointer.on_buffers(names) for pointer in (self.a, self.b, self.c))
        return replace(self, a=a, b=b, c=c, epilogue=self.epilogue and self.epilogue.on_buffers(names))

    @property
    def library(self) -> Library:
        """The library that carries the step out."""
        return Library.CUBLAS


@dataclass(frozen=True, slots=True, kw_only=True)
class CudnnStep:
    """One cuDNN convolution of the whole problem by a recorded engine and its knobs.

    Attributes:
        engine: cuDNN's global engine index; -1 for the first plan of its heuristics that keeps the limits below.
        knobs: (knob type, choice) pairs.
        notes: names of the numerical notes that the engine may carry; an engine with others is refused.
        workspace: region given to the library, or None.
        workspace_bytes: bytes of it; a plan that wants more is refused.
        fused: the engine carries out the problem's epilogue, too; otherwise it computes the bare problem.
    """

    engine: int
    knobs: tuple[tuple[int, int], ...]
    notes: tuple[str, ...] = ()
    fused: bool = False
    workspace: str | None = None
    workspace_bytes: int = 0

    @property
    def library(self) -> Library:
        """The library that carries the step out."""
        return Library.CUDNN


@dataclass(frozen=True, slots=True, kw_only=True)
class FftStep:
    """One batch of cuFFT's float32 transforms in place: real to complex, or back and then not scaled.

    Attributes:
        lengths: of a transform, one or two, the last even. Rows hold 2 * (last / 2 + 1) floats: real numbers and two
            that mean nothing, or last / 2 + 1 complex numbers.
        batch: transforms, one after another.
        inverse: whether complex becomes real.
        data: the first number.
        workspace: region given to the library, or None.
        workspace_bytes: bytes of it; a plan that wants more is refused.
    """

    lengths: tuple[int, ...]
    batch: int
    inverse: bool
    data: Pointer
    workspace: str | None = None
    workspace_bytes: int = 0

    def on_buffers(self, names: Mapping[str, str]) -> FftStep:
        """The step with its data under another name."""
        return replace(self, data=self.data.on_buffers(names))

    @property
    def library(self) -> Library:
        """The library that carries the step out."""
        return Library.CUFFT


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """One call of a Python function on the CPU place.

    The function lives in the solver's own module and is called as `function(problem, config, buffers)`, with
    `buffers` a mapping from buffer names to NumPy arrays (regions of the workspace as uint8). x, w and y have their
    logical shapes, x (n, c, *spatial) and w (k, c/groups, *filter), whatever their memory order; the function writes
    the output in place. A function that is `fused` finds the epilogue's operands there, too, and the run's
    `EpilogueParameters` under the name RUN_PARAMETERS.

    Attributes:
        fused: it applies the problem's epilogue; otherwise it is given the bare problem.
    """

    module: str
    function: str
    fused: bool = False


Step = KernelStep | MatmulStep | CudnnStep | FftStep | HostStep


def on_buffers(steps: Iterable[Step], names: Mapping[str, str]) -> Iterator[Step]:
    """Steps with buffers of some names under others; those that name no buffers cannot be among them."""
    for step in steps:
        assert isinstance(step, KernelStep | MatmulStep | FftStep)
        yield step.on_buffers(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSolution:
    """Everything needed to compute one problem, as data.

    Attributes:
        steps: carried out in order on one stream.
        workspace: regions that the steps name.
        deterministic: equal inputs give equal bits on every run.
    """

    steps: tuple[Step, ...]
    workspace: WorkspacePlan = field(default_factory=WorkspacePlan)
    deterministic: bool = True

    def __post_init__(self) -> None:
        """Tell each kernel whether the next one is launched with PDL, which it then lets begin early."""
        object.__setattr__(self, "steps", tuple(_told(self.steps)))

    @property
    def kernels(self) -> tuple[KernelStep, ...]:
        """The steps that launch our own kernels."""
        return tuple(step for step in self.steps if isinstance(step, KernelStep))


def dependent_launches(steps: Sequence[Step]) -> tuple[bool, ...]:
    """Whether each step is launched with PDL: a kernel step that allows it, right after another kernel step."""
    return tuple(
        isinstance(step, KernelStep) and step.pdl and isinstance(last, KernelStep)
        for step, last in zip(steps, (None, *steps), strict=False)
    )


def _told(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps, each kernel with HAS_DEPENDENT where the next one is launched with PDL, and with none otherwise.

    Another kernel of a binary of which one has it has it, too, and needs no binary of its own. Where it is the second
    of its file it lets nothing begin early; where it is the first, what follows is not launched with PDL.
    """
    bare = [_with_dependent(step, has=False) for step in steps]
    if len(bare) == 1:  # as in most solutions
        yield from bare
        return
    followed = (*dependent_launches(bare)[1:], False)
    first: dict[object, str] = {}
    for step, is_followed in zip(bare, followed, strict=False):
        if is_followed and isinstance(step, KernelStep):
            first.setdefault(step.binary, step.entry)
    for step, is_followed in zip(bare, followed, strict=False):
        is_other = isinstance(step, KernelStep) and first.get(step.binary, step.entry) != step.entry
        yield _with_dependent(step, has=is_followed or is_other)


def _with_dependent(step: Step, *, has: bool) -> Step:
    """A step that has HAS_DEPENDENT, or has it not."""
    if not isinstance(step, KernelStep):
        return step
    others = tuple(define for define in step.defines if define[0] != _HAS_DEPENDENT[0])
    defines = (*others, _HAS_DEPENDENT) if has else others
    return step if defines == step.defines else replace(step, defines=defines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """A solution in two parts, for weights that stay the same: what depends on them alone, and the rest.

    Attributes:
        pack: reads the weights, "w", and writes what the rest needs of them, here named "y".
        run: the rest; here "w" is what `pack` wrote.
        bytes: of what `pack` writes.
        form: how that lies: packings of equal forms write equal bytes for one tensor of weights, whatever else of their
            problems differs; "" where each problem has a form of its own.
    """

    pack: ConvSolution
    run: ConvSolution
    bytes: int
    form: str = ""
