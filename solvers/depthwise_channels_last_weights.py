"""ConvDepthwiseChannelsLastWeights: backward weights of depthwise convolutions with small filters, channels-last.

Kernel: kernels_src/depthwise_channels_last_weights.cu. Knows nothing of how candidates are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.device import Device, Library, Place
from miofind.problem import DataType, Direction, Layout, ProblemDescription
from miofind.solution import Config, ConfigValue, ConvSolution, KernelStep, Pointer, Region, Scalar, WorkspacePlan
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.tiling.channels_last_rows import (
    MAX_ELEMENTS,
    RowRates,
    RowTiling,
    RowWork,
    axis_scalars,
    copy_vector,
    is_dilated,
    is_whole,
    pixel_pitch,
    row_axes,
    row_unserved,
)
from miofind.tiling.correlation import ceil_div, round_up

_SOURCE = "depthwise_channels_last_weights.cu"
_PARTS = "partial"
_SHARED_BYTES = 48 << 10
_MAX_REGISTERS = 212
_MAX_PRODUCTS = 3200
# Tests of rows, which the compiler makes ahead of a strip and keeps packed; some it puts aside, to read them once.
_SPILL_BYTES = 48
_MAX_WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    Attributes:
        blocks: how the work is shared out.
        window: columns of x that a thread reads.
        x_pitch, y_pitch: elements from one staged pixel to the next.
        whole_groups: whether all gradient columns of a thread exist.
        shared_bytes: of a block.
        registers: of a thread, about.
    """

    blocks: RowTiling
    window: int
    x_pitch: int
    y_pitch: int
    whole_rows: bool
    whole_groups: bool
    shared_bytes: int
    registers: int
    products: int
    row_units: int
    column_units: int

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        height, width = row_axes(problem)
        multiplier, itemsize = problem.k // problem.c, problem.x.dtype.itemsize
        blocks = RowTiling.of(problem, config, multiplier)
        columns, vector = config["columns"], config["vector"]
        filters, taps = blocks.channels * multiplier, height.taps * width.taps
        runs, group_step = filters // vector, columns * width.stride
        x_pitch = pixel_pitch(blocks.channels, itemsize, vector, group_step, runs)
        y_pitch = pixel_pitch(filters, itemsize, vector, columns, runs)
        window = width.stride * (columns - 1) + width.taps
        x_columns = width.stride * (columns * blocks.groups - 1) + width.taps
        stage = config["together"] * (x_columns * x_pitch + columns * blocks.groups * y_pitch)
        return _Tiling(
            blocks=blocks,
            window=window,
            x_pitch=x_pitch,
            y_pitch=y_pitch,
            whole_rows=is_whole(problem, 0, config["rows"]),
            whole_groups=is_whole(problem, 1, columns),
            shared_bytes=max(
                itemsize * config["stages"] * stage, 4 * config["together"] * blocks.groups * width.taps * filters
            ),
            products=taps * config["rows"] * columns * vector,
            column_units=width.units(backward=False, aligned=is_dilated(problem)),
            row_units=height.units(backward=False),
            registers=taps * vector + height.span * columns * vector + window * vector + 64,
        )

    @property
    def lanes(self) -> int:
        """Threads of the second pass that share an element."""
        return int(min(32, 1 << (self.blocks.parts - 1).bit_length()))


def _ints(*values: int) -> tuple[Scalar, ...]:
    return tuple(Scalar(ctype="int32", value=value) for value in values)


def _sum_step(problem: ProblemDescription, config: Config, tiling: _Tiling) -> KernelStep:
    return KernelStep(
        source=_SOURCE,
        entry="depthwise_channels_last_weights",
        grid=(tiling.blocks.blocks, 1, 1),
        block=(tiling.blocks.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling),
        args=(
            *(Pointer(buffer=name) for name in ("y", "x", "w" if tiling.blocks.parts == 1 else _PARTS)),
            *_ints(problem.n, problem.c),
            *axis_scalars(problem),
            *_ints(config["images"]),
            *tiling.blocks.divisors,
        ),
        spill_bytes=_SPILL_BYTES,
    )


def _finish_step(problem: ProblemDescription, tiling: _Tiling) -> KernelStep:
    return KernelStep(
        source=_SOURCE,
        entry="depthwise_channels_last_weights_finish",
        grid=(ceil_div(problem.w.size, 32), 1, 1),
        block=(32 * tiling.lanes, 1, 1),
        defines=(
            ("ELEMENT", problem.x.dtype.value),
            ("TAPS", problem.w.size // problem.k),
            ("LANES", tiling.lanes),
        ),
        args=(Pointer(buffer=_PARTS), Pointer(buffer="w"), *_ints(problem.k, tiling.blocks.parts)),
        waits_itself=True,
    )


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    height, width = row_axes(problem)
    multiplier, channels = problem.k // problem.c, tiling.blocks.channels
    return (
        ("ELEMENT", problem.x.dtype.value),
        ("FILTER_Y", height.taps),
        ("FILTER_X", width.taps),
        ("MULTIPLIER", multiplier),
        ("STRIDE_H", height.stride),
        ("STRIDE_W", width.stride),
        ("DILATED", int(is_dilated(problem))),
        ("WHOLE", int(tiling.blocks.parts == 1)),
        ("WHOLE_ROWS", int(tiling.whole_rows)),
        ("WHOLE_GROUPS", int(tiling.whole_groups)),
        ("CHANNELS", channels),
        *((name.upper(), config[name]) for name in ("vector", "columns", "rows", "stages", "together")),
        ("GROUPS", tiling.blocks.groups),
        ("X_VECTOR", copy_vector(problem, channels, problem.c)),
        ("Y_VECTOR", copy_vector(problem, channels * multiplier, problem.k)),
        ("X_PITCH", tiling.x_pitch),
        ("Y_PITCH", tiling.y_pitch),
    )


# Set against 44 measurements on an H200, the fastest and a slow configuration of each problem: half of the estimates
# are off by less than 5 %, nine in ten by less than 16 %. A byte of parts costs as much as four of the tensors: it is
# written, read, and waited for.
_RATES = RowRates(launch_ms=0.003, issue=0.7, alone=3.8, serial=0.82)
_PARTS_COST = 3.9


def _work(problem: ProblemDescription, config: Config, tiling: _Tiling) -> RowWork:
    converts = problem.x.dtype is not DataType.FLOAT32
    height, width = row_axes(problem)
    vector, taps, columns = config["vector"], height.taps * width.taps, config["columns"]
    in_rows = height.stride * (config["rows"] - 1) + height.taps
    units = height.units(backward=False)
    filled = min(1.0, units / (tiling.blocks.strips * config["rows"]))
    met = min(in_rows * filled, height.x_size / tiling.blocks.strips + height.taps - 1)
    channels, threads, groups = tiling.blocks.channels, tiling.blocks.threads, tiling.blocks.groups
    x_columns = width.stride * (columns * groups - 1) + width.taps
    vectors = config["together"] * channels // copy_vector(problem, channels, problem.c)
    row = (tiling.window + columns / height.stride) * (1 + converts * vector) + 24
    row += 9 * ceil_div(x_columns * vectors, threads) + 9 / height.stride * ceil_div(
        columns * groups * vectors, threads
    )
    images = min(problem.n, config["images"]) / config["together"]
    end = 1.5 * taps * vector + 60 * height.taps + 3 * taps * vector
    parts_bytes = 4 * tiling.blocks.parts * problem.w.size if tiling.blocks.parts > 1 else 0
    return RowWork(
        instructions=350 + images * (met * row + tiling.products * filled * (1 if tiling.whole_rows else 1.05)) + end,
        registers=tiling.registers,
        shared_bytes=tiling.shared_bytes,
        moved_bytes=problem.bytes + _PARTS_COST * parts_bytes,
    )


def _config(
    vector: int, channels: int, columns: int, tile: int, rows: int, images: int, together: int, stages: int
) -> Config:
    return Config.of(
        vector=vector,
        channels=channels,
        columns=columns,
        tile=tile,
        rows=rows,
        images=images,
        together=together,
        stages=stages,
    )


# What default_configs ranks by estimate, after those that are valid wherever one is.
_FALLBACKS = (_config(1, 16, 1, 14, 14, 32, 1, 4), _config(1, 16, 4, 56, 14, 32, 1, 4))
_SHORT_LIST = tuple(
    _config(vector, channels, columns, tile, rows, images, together, 4)
    for vector, channels in ((1, 32), (2, 32), (2, 64), (4, 64))
    for columns in (1, 2, 4, 7)
    for tile in (14, 28, 56)
    for rows in (4, 7, 14)
    for images, together in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 4), (8, 8))
)


def _is_economical(problem: ProblemDescription, config: Config, tiling: _Tiling) -> bool:
    """Whether no smaller value of a parameter does the same."""
    images, together = config["images"], config["together"]
    if images % together or images >= 2 * problem.n or images > 4 * together:
        return False
    # Several images at a time in strips of uneven height would take more tests of a row than there are predicates.
    if together > 1 and (tiling.blocks.column_tiles > 1 or not tiling.whole_rows):
        return False
    if config["channels"] >= 2 * max(16, problem.c) or config["rows"] >= 2 * max(2, tiling.row_units):
        return False
    return bool(config["tile"] < 2 * max(14, tiling.column_units) and config["columns"] < 2 * tiling.column_units)


class ConvDepthwiseChannelsLastWeights(Solver):
    """Backward weights of depthwise convolutions of channels-last images, with float32 sums in registers.

    Configuration: a block streams rows of `channels` channels through shared memory, `stages` rows of the gradient at a
    time, for tiles of up to `tile` of its columns and strips of up to `rows` of its rows of `images` images; a thread
    multiplies `columns` columns of `vector` channels.
    """

    id = "ConvDepthwiseChannelsLastWeights"
    algorithm = Algorithm.DIRECT
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
            layouts=frozenset({Layout.NWC, Layout.NHWC}),
            min_sm=80,
        ),
    )
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "vector": (1, 2, 4),
        "channels": (16, 32, 64),
        "columns": (1, 2, 4, 7),
        "tile": (14, 28, 56),
        "rows": (2, 4, 7, 14),
        "images": (1, 2, 4, 8, 16, 32),
        "together": (1, 2, 4, 8),
        "stages": (4,),
    }
    sources = (_SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        def depthwise(c: int, **fields: object) -> ProblemDescription:
            shape, k = fields.pop("w"), fields.pop("k", c)
            fields.setdefault("layout", Layout.NHWC)
            return ProblemDescription.convolution(
                w=(k, 1, *shape),  # type: ignore[misc, arg-type]
                groups=c,
                direction=Direction.BACKWARD_WEIGHTS,
                **fields,  # type: ignore[arg-type]
            )

        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        return (
            depthwise(64, x=(4, 64, 14, 14), w=(3, 3), padding=1, dtype=half),
            depthwise(48, x=(2, 48, 15, 17), w=(5, 5), padding=2, stride=2, dtype=brain),
            depthwise(24, x=(3, 24, 14, 13), w=(7, 7), padding=3, dtype=half),
            depthwise(20, x=(2, 20, 11, 12), w=(3, 5), padding=((4, 0), (1, 6)), stride=(3, 2)),
            depthwise(16, x=(1, 16, 20, 19), w=(3, 3), padding=6, dilation=(6, 2), dtype=half),
            depthwise(8, k=24, x=(2, 8, 9, 10), w=(3, 3), padding=1, stride=2, dtype=brain),
            depthwise(5, x=(1, 5, 7, 6), w=(3, 2), padding=1, dtype=half),
            depthwise(32, x=(3, 32, 100), w=(7,), padding=((6, 0),), layout=Layout.NWC),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if problem.direction is not Direction.BACKWARD_WEIGHTS:
            return Applicability("serves backward weights: ConvDepthwiseChannelsLast serves the other directions")
        reason = row_unserved(problem)
        if reason:
            return Applicability(reason)
        if not any(self.is_valid_config(problem, device, config) for config in _FALLBACKS):
            return Applicability(f"filter {problem.filter} at stride {problem.conv.stride} is too large for a thread")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        if problem.c % config["vector"] or (problem.k != problem.c and config["vector"] > 1):
            return False
        tiling = _Tiling.of(problem, config)
        if config not in _FALLBACKS and not _is_economical(problem, config, tiling):
            return False
        if tiling.products > _MAX_PRODUCTS or tiling.registers > _MAX_REGISTERS or tiling.blocks.threads > 1024:
            return False
        if tiling.blocks.threads * round_up(tiling.registers, 8) > 65536 or tiling.blocks.blocks > MAX_ELEMENTS:
            return False
        if 4 * tiling.blocks.parts * problem.w.size > max(_MAX_WORKSPACE_BYTES, problem.x.bytes):
            return False
        return tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        valid = [config for config in (*_FALLBACKS, *_SHORT_LIST) if self.is_valid_config(problem, device, config)]
        ranked = sorted(dict.fromkeys(valid), key=lambda config: self.estimate_ms(problem, device, config))
        # The best of each shape of a thread's work: estimates of one shape err alike.
        best = {(config["vector"], config["columns"]): config for config in reversed(ranked)}
        return tuple(sorted(best.values(), key=ranked.index)[:8])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config)
        return _work(problem, config, tiling).time_ms(tiling.blocks, device, _RATES)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config)
        first = _sum_step(problem, config, tiling)
        if tiling.blocks.parts == 1:
            return ConvSolution(steps=(first,))
        return ConvSolution(
            steps=(first, _finish_step(problem, tiling)),
            workspace=WorkspacePlan((Region(name=_PARTS, bytes=4 * tiling.blocks.parts * problem.w.size),)),
        )


SOLVERS = (ConvDepthwiseChannelsLastWeights(),)
