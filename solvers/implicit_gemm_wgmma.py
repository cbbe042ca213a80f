"""ConvImplicitGemmWgmma: convolution as a matrix product on Hopper's tensor cores, channels last, in all directions.

Kernel: kernels_src/implicit_gemm_wgmma.cu. Pixels come by the copy engine's im2col mode, so that nothing is laid out in
memory. Knows nothing of how candidates are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.device import Device, Library, Place
from miofind.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.solution import (
    Box,
    Config,
    ConfigValue,
    ConvSolution,
    Im2col,
    KernelStep,
    Pointer,
    Region,
    Scalar,
    TensorMap,
    WorkspacePlan,
)
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.tiling.correlation import ceil_div
from miofind.tiling.divisor import divisor

_SOURCE = "implicit_gemm_wgmma.cu"
_PARTS = "parts"
_FILTERS = "filters"
_SPANS_BYTES = (128, 64, 32)
_SPAN_BYTES = max(_SPANS_BYTES)
"""What swizzles cover."""

_ROW_BLOCK = 64
_MAX_INT = 2**31 - 1
_SHARED_BYTES = 227 << 10
_STATIC_BYTES = 1024 + 256
_MAX_CORNER = 127
_MAX_TAP_OFFSET = 255
_MAX_STRIDE = 8
_MAX_PARTS_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A problem as a matrix product, the same for all configurations.

    Attributes:
        problem: lifted to two spatial dimensions.
        rows, columns: of the result of one group; for backward weights the columns are of one tap.
        depth: channels or filters that each tap sums over, or output pixels.
        taps: of the filter.
        pixels: name of the tensor that im2col copies read.
        walked: rows and columns of the pixels that they walk, in one image.
        low, high: their corners, rows first.
        strides: as the copies take them, rows first.
    """

    problem: ProblemDescription
    rows: int
    columns: int
    depth: int
    taps: tuple[int, int]
    pixels: str
    walked: tuple[int, int]
    low: tuple[int, int]
    high: tuple[int, int]
    strides: tuple[int, int]

    @staticmethod
    def of(problem: ProblemDescription) -> _Product:
        planar = problem.lifted(2)
        conv = planar.conv
        c, k = planar.c // planar.groups, planar.k // planar.groups
        taps = (planar.filter[0], planar.filter[1])
        reach = [(taps[i] - 1) * conv.dilation[i] for i in range(2)]
        outputs = math.prod(planar.out_spatial) * planar.n
        if planar.direction is Direction.BACKWARD_DATA:
            low = [conv.pad_before[i] - reach[i] for i in range(2)]
            high = [low[i] + planar.spatial[i] - planar.out_spatial[i] for i in range(2)]
            rows, columns, depth, pixels = math.prod(planar.spatial) * planar.n, c, k, "y"
            walked = planar.spatial
        else:
            low = [-conv.pad_before[i] for i in range(2)]
            high = [conv.pad_after[i] - reach[i] for i in range(2)]
            pixels, walked = "x", planar.out_spatial
            forward = planar.direction is Direction.FORWARD
            rows, columns, depth = (outputs, k, c) if forward else (k, c, outputs)
        return _Product(
            problem=planar,
            rows=rows,
            columns=columns,
            depth=depth,
            taps=taps,
            pixels=pixels,
            walked=(walked[0], walked[1]),
            low=(low[0], low[1]),
            high=(high[0], high[1]),
            strides=(conv.stride[0], conv.stride[1]),
        )

    @property
    def is_weights(self) -> bool:
        return self.problem.direction is Direction.BACKWARD_WEIGHTS

    @property
    def element_bytes(self) -> int:
        return self.problem.x.dtype.itemsize

    @property
    def transposes_filters(self) -> bool:
        """Whether the filter is laid out anew: TF32 products take operands with their depth side by side alone."""
        return self.problem.direction is Direction.BACKWARD_DATA and self.element_bytes == 4

    def steps(self, tile_k: int) -> int:
        """Steps of a tile's depth."""
        return ceil_div(self.depth, tile_k) * (1 if self.is_weights else math.prod(self.taps))

    def width(self, config: Config) -> int:
        """Columns of a block, which are swizzled together where they lie side by side; for weights of one tap."""
        spans = [span // self.element_bytes for span in _SPANS_BYTES]
        wide = [span for span in spans if config["tile_n"] % span == 0]
        fitting = [span for span in wide if span >= self.columns] if self.is_weights else []
        return min(fitting, default=max(wide))

    def column_blocks(self, config: Config) -> int:
        """Blocks of columns of one group."""
        return ceil_div(self.columns, self.width(config)) * (math.prod(self.taps) if self.is_weights else 1)

    def tiles(self, config: Config) -> tuple[int, int]:
        """Tiles of one group along rows and columns, those of a cluster counted as one."""
        rows = _tile_m(config) * int(config["cluster_m"])
        blocks = config["tile_n"] // self.width(config) * int(config["cluster_n"])
        return ceil_div(self.rows, rows), ceil_div(self.column_blocks(config), blocks)

    def items(self, config: Config) -> int:
        """Parts of tiles that clusters compute."""
        return math.prod(self.tiles(config)) * self.problem.groups * int(config["splits"])


def _tile_m(config: Config) -> int:
    return 64 * int(config["consumers"]) * int(config["rows"])


def _shared_bytes(product: _Product, config: Config) -> int:
    """Dynamic shared memory: the ring of stages, and the tile on its way out."""
    tile_m, tile_n = _tile_m(config), int(config["tile_n"])
    stage = (tile_m + tile_n) * int(config["tile_k"])
    return 1024 + product.element_bytes * (int(config["stages"]) * stage + tile_m * tile_n)


def _threads(config: Config) -> int:
    return 128 * int(config["consumers"]) + 64


def _cluster(config: Config) -> int:
    return int(config["cluster_m"]) * int(config["cluster_n"])


def _clusters(config: Config, device: Device) -> int:
    """Clusters that run at once; those of four leave processors of an odd group idle."""
    size, blocks = _cluster(config), max(1, device.sm_count) * int(config["blocks"])
    return max(1, blocks // size - (1 if size > 2 else 0))


def _sums(config: Config) -> int:
    """Sums that a thread has registers for, besides all else."""
    return min(255, 65536 // (_threads(config) * int(config["blocks"])) // 8 * 8) - 40


def _map(product: _Product, buffer: str, sizes: Sequence[int], copy: Box | Im2col, *, loads: bool = True) -> TensorMap:
    """A map of a packed tensor, dimensions innermost first; what a copy takes of the innermost is swizzled together."""
    itemsize, element = product.element_bytes, product.problem.x.dtype.value
    strides = [itemsize * math.prod(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    innermost = copy.sizes[0] if isinstance(copy, Box) else copy.channels
    return TensorMap(
        pointer=Pointer(buffer=buffer),
        element="tfloat32" if element == "float32" and loads else element,
        sizes=tuple(sizes),
        strides_bytes=tuple(strides),
        copy=copy,
        swizzle_bytes=itemsize * innermost,
    )


def _maps(product: _Product, config: Config) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Maps of the rows' and the columns' operand and of the result."""
    problem, groups = product.problem, product.problem.groups
    tile_k, tile_n, wide = int(config["tile_k"]), int(config["tile_n"]), product.width(config)
    along_m, along_n = int(config["cluster_m"]), int(config["cluster_n"])
    taps = math.prod(product.taps)
    c, k = problem.c // groups, problem.k // groups
    _, channels, height, width = problem.tensor(product.pixels).shape
    walk = Im2col(
        lower=(product.low[1], product.low[0]),
        upper=(product.high[1], product.high[0]),
        strides=(product.strides[1], product.strides[0]),
        channels=wide if product.is_weights else tile_k,
        pixels=tile_k // along_m if product.is_weights else _tile_m(config) // along_n,
    )
    pixels = _map(product, product.pixels, (channels, width, height, problem.n), walk)
    outputs = math.prod(problem.out_spatial) * problem.n
    inputs = math.prod(problem.spatial) * problem.n
    out = Box(sizes=(wide, 1, _ROW_BLOCK))
    deep = Box(sizes=(tile_k, 1, tile_n // along_m))
    if product.is_weights:
        rows = _map(product, "y", (k, groups, outputs), Box(sizes=(_ROW_BLOCK, 1, tile_k // along_n)))
        return rows, pixels, _map(product, "w", (c, taps, problem.k), out, loads=False)
    if problem.direction is Direction.FORWARD:
        columns = _map(product, "w", (c, taps, problem.k), deep)
        return pixels, columns, _map(product, "y", (k, groups, outputs), out, loads=False)
    target = _map(product, "x", (c, groups, inputs), out, loads=False)
    if product.transposes_filters:
        return pixels, _map(product, _FILTERS, (k, taps, problem.c), deep), target
    return pixels, _map(product, "w", (c, taps, problem.k), Box(sizes=(wide, 1, tile_k // along_m))), target


_DEFINED = ("tile_n", "tile_k", "stages", "consumers", "rows", "blocks", "cluster_m", "cluster_n")
_KINDS = {Direction.FORWARD: "FORWARD", Direction.BACKWARD_DATA: "DATA", Direction.BACKWARD_WEIGHTS: "WEIGHTS"}


def _multiply(product: _Product, config: Config, device: Device) -> KernelStep:
    problem, conv = product.problem, product.problem.conv
    tiles_m, tiles_n = product.tiles(config)
    tile_k, splits = int(config["tile_k"]), int(config["splits"])
    items = product.items(config)
    c, k = problem.c // problem.groups, problem.k // problem.groups
    channels = k if problem.direction is Direction.BACKWARD_DATA else c
    chunks = ceil_div(c, product.width(config)) if product.is_weights else ceil_div(channels, tile_k)
    values = (
        *(product.rows, product.columns, problem.groups, channels, product.taps[0]),
        *(*product.strides, *product.low, *conv.dilation),
        *(product.steps(tile_k), items),
    )
    divisors = (product.taps[1], chunks, *product.walked, tiles_m, tiles_n, splits)
    parts = Pointer(buffer=_PARTS if splits > 1 else "y")
    return KernelStep(
        source=_SOURCE,
        entry="implicit_gemm_wgmma",
        grid=(min(items, _clusters(config, device)) * _cluster(config), 1, 1),
        block=(_threads(config), 1, 1),
        shared_bytes=_shared_bytes(product, config),
        defines=_defines(product, config),
        args=(
            *_maps(product, config),
            parts,
            *(Scalar(ctype="int32", value=value) for value in values),
            *(scalar for by in divisors for scalar in divisor(by)),
        ),
    )


def _add(product: _Product, config: Config) -> KernelStep:
    problem = product.problem
    count = problem.output.size
    target = {Direction.FORWARD: "y", Direction.BACKWARD_DATA: "x"}.get(problem.direction, "w")
    return KernelStep(
        source=_SOURCE,
        entry="add_parts",
        grid=(ceil_div(count, 4 * 256), 1, 1),
        block=(256, 1, 1),
        defines=_defines(product, config),
        args=(
            Pointer(buffer=_PARTS),
            Pointer(buffer=target),
            Scalar(ctype="int64", value=count),
            Scalar(ctype="int32", value=int(config["splits"])),
        ),
    )


def _transpose(product: _Product, config: Config) -> KernelStep:
    problem = product.problem
    c, k, taps = problem.c // problem.groups, problem.k // problem.groups, math.prod(product.taps)
    return KernelStep(
        source=_SOURCE,
        entry="transpose_filters",
        grid=(ceil_div(c, 32) * ceil_div(k, 32) * taps * problem.groups, 1, 1),
        block=(256, 1, 1),
        defines=_defines(product, config),
        args=(
            Pointer(buffer="w"),
            Pointer(buffer=_FILTERS),
            *(Scalar(ctype="int32", value=value) for value in (problem.groups, k, c, taps)),
        ),
    )


def _is_valid_cluster(product: _Product, config: Config) -> bool:
    """Whether blocks can share what a cluster has in common, in whole repetitions of a swizzle."""
    along_m, along_n, tile_k = int(config["cluster_m"]), int(config["cluster_n"]), int(config["tile_k"])
    if along_m * along_n > 4:
        return False
    if along_m > 1 and product.rows <= _tile_m(config) * (along_m - 1):
        return False
    if along_n > 1 and product.column_blocks(config) * product.width(config) <= config["tile_n"] * (along_n - 1):
        return False
    deep = product.problem.direction is Direction.FORWARD or product.transposes_filters
    length = int(config["tile_n"]) // along_m if deep else tile_k // along_m
    return length % 8 == 0 and (not product.is_weights or tile_k // along_n % 8 == 0)


def _defines(product: _Product, config: Config) -> tuple[tuple[str, str | int], ...]:
    return (
        ("ELEMENT", product.problem.x.dtype.value),
        ("KIND", _KINDS[product.problem.direction]),
        ("WIDE", product.width(config)),
        *((name.upper(), int(config[name])) for name in _DEFINED),
    )


# Of an H200: rows times columns times bytes of depth that a multiprocessor multiplies a cycle, bytes that it gets from
# the L2 cache in one, cycles a second.
_OPERATIONS = 4096
_CACHE_BYTES = 44
_CLOCK_HZ = 1.7e9
_LAUNCH_MS = 2.0e-3
_FILL_CYCLES = 1500
_STEP_CYCLES = 60


def _busy_ms(product: _Product, config: Config, device: Device) -> float:
    tile_m, tile_n, tile_k = _tile_m(config), int(config["tile_n"]), int(config["tile_k"])
    splits, blocks = int(config["splits"]), int(config["blocks"])
    steps = product.steps(tile_k) / splits
    depth_bytes = product.element_bytes * tile_k
    multiply = tile_m * tile_n * depth_bytes / _OPERATIONS * blocks
    if tile_n < 128:  # each product reads its operands, 128 bytes a cycle
        multiply *= 2 * (64 + tile_n) / tile_n / 4
    copy = (tile_m + tile_n) * depth_bytes / _CACHE_BYTES * blocks
    out = tile_m * tile_n * (4 if splits > 1 else product.element_bytes) / 32
    waves = ceil_div(product.items(config), max(1, device.sm_count) * blocks)
    cycles = _FILL_CYCLES + waves * (steps * max(multiply, copy, _STEP_CYCLES * depth_bytes / 32) + out)
    ms = 1e3 * cycles / _CLOCK_HZ
    if product.transposes_filters:
        ms += _LAUNCH_MS
    if splits > 1:
        moved = product.problem.output.size * (4 * splits + product.element_bytes)
        ms += _LAUNCH_MS + 1e3 * moved / device.bandwidth_bytes_per_s
    return ms


class ConvImplicitGemmWgmma(Solver):
    """Convolution as a matrix product on wgmma and TMA: NHWC, sums in float32.

    Serves float16 and bfloat16, and float32 as TF32 but for backward weights. Channels and filters of a group take
    multiples of 16 bytes; backward data has stride 1. Parts of a tile's depth are added
    in a second pass, in order, so equal inputs give equal bits.

    Source: NVIDIA CUTLASS, include/cutlass/conv, for im2col copies of each direction; PTX ISA, wgmma.
    """

    id = "ConvImplicitGemmWgmma"
    algorithm = Algorithm.IMPLICIT_GEMM
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
            layouts=frozenset({Layout.NWC, Layout.NHWC}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    alignment_bytes = 16
    is_dynamic = True
    sources = (_SOURCE,)
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "consumers": (1, 2),
        "rows": (1, 2),
        "tile_n": (32, 64, 96, 128, 192, 256),
        "tile_k": (8, 16, 32, 64),
        "stages": (3, 4, 5, 6, 8),
        "splits": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256),
        "blocks": (1, 2, 3, 4),
        "cluster_m": (1, 2, 4),
        "cluster_n": (1, 2, 4),
    }

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "layout": Layout.NHWC, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, weights = Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS
        return (
            conv(x=(2, 64, 14, 14), w=(128, 64, 3, 3), padding=1),
            conv(x=(3, 24, 15, 9), w=(40, 24, 3, 2), padding=((1, 2), (0, 1)), stride=2),
            conv(x=(2, 128, 9, 9), w=(96, 64, 1, 1), groups=2, dtype=DataType.BFLOAT16),
            conv(x=(2, 36, 14, 14), w=(20, 36, 3, 3), padding=1, dtype=DataType.FLOAT32, math="tf32"),
            conv(data, x=(2, 20, 9, 9), w=(36, 20, 3, 3), padding=1, dtype=DataType.FLOAT32, math="tf32"),
            conv(data, x=(2, 72, 12, 11), w=(64, 72, 5, 3), padding=(2, 1)),
            conv(weights, x=(2, 64, 14, 14), w=(72, 64, 3, 3), padding=1, dilation=2),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if len({tensor.dtype for tensor in (problem.x, problem.w, problem.y)}) > 1:
            return Applicability("needs one dtype for x, w and y")
        if problem.x.dtype is DataType.FLOAT32:
            if problem.math is not MathMode.TF32:
                return Applicability("multiplies float32 as TF32, which math='tf32' allows")
            if problem.direction is Direction.BACKWARD_WEIGHTS:
                return Applicability("serves backward weights in 16 bits: TF32 products take no transposed operands")
        c, k = problem.c // problem.groups, problem.k // problem.groups
        unit = 16 // problem.x.dtype.itemsize
        if c % unit or k % unit:
            return Applicability(f"copies 16 bytes: {c} channels or {k} filters a group are no multiple of {unit}")
        if problem.output.size == 0 or problem.flops == 0:
            return Applicability("has no empty products")
        conv = problem.conv
        if problem.direction is Direction.BACKWARD_DATA and max(conv.stride) > 1:
            return Applicability("backward data is served with stride 1")
        if max(tensor.size for tensor in (problem.x, problem.w, problem.y)) > _MAX_INT:
            return Applicability(f"counts elements in 32 bits: a tensor has more than {_MAX_INT}")
        product = _Product.of(problem)
        if max(map(abs, (*product.low, *product.high))) > _MAX_CORNER:
            return Applicability(
                f"copies meet pixels up to {_MAX_CORNER} beyond the tensor: padding or filter is too large"
            )
        planar = product.problem
        if max((t - 1) * d for t, d in zip(planar.filter, planar.conv.dilation, strict=True)) > _MAX_TAP_OFFSET:
            return Applicability(f"taps reach at most {_MAX_TAP_OFFSET} pixels: the filter is too large")
        if max(conv.stride) > _MAX_STRIDE:
            return Applicability(f"stride {conv.stride} is more than {_MAX_STRIDE}")
        if not any(self.is_valid_config(problem, device, config) for config in _candidates(product)):
            return Applicability("has groups whose channels fit no step")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        product = _Product.of(problem)
        tile_m, tile_n, tile_k = _tile_m(config), int(config["tile_n"]), int(config["tile_k"])
        splits, blocks = int(config["splits"]), int(config["blocks"])
        if config["rows"] * tile_n > 256 or (config["rows"] == 2 and config["consumers"] == 1):
            return False
        depth_bytes = product.element_bytes * tile_k
        if depth_bytes not in ((_SPAN_BYTES,) if product.is_weights else (32, 64, _SPAN_BYTES)):
            return False
        if problem.groups > 1 and not product.is_weights and product.depth % tile_k:
            return False
        if problem.groups > 1 and product.is_weights and product.rows % _ROW_BLOCK and splits == 1:
            return False  # stores are cut off at the tensor's end, not at a group's
        if tile_n >= 2 * max(32, product.column_blocks(config) * product.width(config)) or tile_m >= 2 * max(64, product.rows):
            return False
        if depth_bytes > 32 and not product.is_weights and tile_k >= 2 * product.depth:
            return False
        if splits > 1:
            parts = splits * problem.output.size * 4
            if product.steps(tile_k) < 2 * splits or parts > _MAX_PARTS_BYTES or problem.output.size % 4:
                return False
        if config["rows"] * tile_n // 2 > _sums(config):
            return False
        if not _is_valid_cluster(product, config):
            return False
        shared = (device.shared_bytes or _SHARED_BYTES) + 1024
        if blocks * (_shared_bytes(product, config) + _STATIC_BYTES) > shared:
            return False
        return product.items(config) <= _MAX_INT and product.steps(tile_k) * splits <= _MAX_INT

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        product = _Product.of(problem)
        valid = [config for config in _candidates(product) if self.is_valid_config(problem, device, config)]
        return tuple(sorted(valid, key=lambda config: _busy_ms(product, config, device))[:8])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        moved_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
        return _LAUNCH_MS + max(moved_ms, _busy_ms(_Product.of(problem), config, device))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        product = _Product.of(problem)
        steps, regions = [_multiply(product, config, device)], []
        if product.transposes_filters:
            steps.insert(0, _transpose(product, config))
            regions.append(Region(name=_FILTERS, bytes=problem.w.bytes))
        if config["splits"] > 1:
            steps.append(_add(product, config))
            regions.append(Region(name=_PARTS, bytes=4 * int(config["splits"]) * problem.output.size))
        return ConvSolution(steps=tuple(steps), workspace=WorkspacePlan(tuple(regions)))


_TILES = (
    {"consumers": 2, "rows": 1, "tile_n": 256, "stages": 3},
    {"consumers": 2, "rows": 2, "tile_n": 128, "stages": 3},
    {"consumers": 2, "rows": 1, "tile_n": 192, "stages": 4},
    {"consumers": 2, "rows": 1, "tile_n": 128, "stages": 5},
    {"consumers": 2, "rows": 1, "tile_n": 96, "stages": 5},
    {"consumers": 2, "rows": 1, "tile_n": 64, "stages": 6},
    {"consumers": 2, "rows": 1, "tile_n": 32, "stages": 6},
    {"consumers": 1, "rows": 1, "tile_n": 128, "stages": 5},
    {"consumers": 1, "rows": 1, "tile_n": 64, "stages": 6},
    {"consumers": 1, "rows": 1, "tile_n": 32, "stages": 6},
)


def _candidates(product: _Product) -> list[Config]:
    """Likely configurations, whatever the problem."""
    spans = (_SPAN_BYTES,) if product.is_weights else (_SPAN_BYTES, 64, 32)
    depths = [span // product.element_bytes for span in spans]
    splits = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    return [
        Config({**tile, "tile_k": depth, "splits": count, "blocks": blocks, "cluster_m": 1, "cluster_n": 1})
        for tile in _TILES
        for depth in depths
        for count in splits
        for blocks in (1, 2, 3, 4)
    ]


SOLVERS = (ConvImplicitGemmWgmma(),)
