"""ConvGroupedPlanes: grouped convolution of NCHW tensors on tensor cores, forward and backward data.

Rows of pixels are multiplied as they lie in memory. Kernel: kernels_src/grouped/nchw.cu. ConvGroupedPlanesWeights
serves backward weights.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, smaller
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import APPLICABLE, OF_IMAGES, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer, int32s
from miofind.solvers.common.axis_defines import axis_defines
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.examples import grouped_example
from miofind.solvers.common.packed_groups import (
    SOURCE,
    GroupedAxis,
    PackedGroups,
    aligned_units_of,
    least_ample,
    refuse_groups,
)
from miofind.solvers.grouped.nchw_tiling import KEYS, NchwTiling, nchw_unit_channels

_DEFAULTS, _MOST_ALIKE = 8, 2
_ROWS = (1, 2, 3, 4, 7)  # 3 serves odd images that nothing else does
_TURNS = (0, 1, 2, 4, 8)
_MAX_DEPTH, _MAX_MATRICES = 2, 100
_MAX_SUMS, _MAX_REGISTERS = 128, 255
_LEAST_THREADS, _MAX_THREADS = 32, 512
_MAX_GRID = 2**16 - 1


def _matrices(problem: ProblemDescription) -> int:
    """Registers of a thread that hold filters."""
    return 4 * math.prod(problem.lifted(2).filter) * (nchw_unit_channels(problem)[0] // 16)


def _registers(problem: ProblemDescription, tiling: NchwTiling) -> int:
    """Registers of a thread that spills nothing: sums, filters, a row of pixels, and addresses."""
    fused = epilogue_registers(problem, 2, 2)
    return 8 * ceil_div(tiling.sums + _matrices(problem) + 2 * tiling.depth * tiling.in_tiles + fused + 60, 8)


def _resident(problem: ProblemDescription, tiling: NchwTiling, device: Device) -> int:
    """Blocks that a multiprocessor holds at once."""
    return resident_blocks(_registers(problem, tiling), tiling.threads, tiling.shared_bytes, SmLimits.of(device))


def _splits(problem: ProblemDescription, tiling: NchwTiling, device: Device, tiles: int) -> int:
    """Blocks that share the tiles of a channel tile, `tiles` each; if that is 0, as many as are resident at once."""
    resident = device.sm_count * _resident(problem, tiling, device)
    at_once = smaller(tiling.tile_count, larger(1, resident // tiling.channel_tiles))
    return chosen(tiles > 0, ceil_div(tiling.tile_count, larger(1, tiles)), at_once)


def _defines(
    problem: ProblemDescription, config: Config, tiling: NchwTiling, resident: int
) -> tuple[tuple[str, str | int], ...]:
    planar = problem.lifted(2)
    return (
        ("ELEMENT", planar.x.dtype.value),
        ("GROUP_C", planar.c // planar.groups),
        ("GROUP_K", planar.k // planar.groups),
        ("FLIPPED", int(planar.direction is Direction.BACKWARD_DATA)),
        *axis_defines(planar, IN=planar.tensor(SOURCE[planar.direction]).shape[2:], OUT=planar.output.shape[2:]),
        *((name.upper(), config[name]) for name in ("units", "images", "row_groups", "stages")),
        ("WARP_ROWS", config["rows"]),
        ("ROW_TILES", tiling.row_tiles),
        ("PITCH", tiling.source.pitch),
        ("MIN_BLOCKS", resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        *epilogue_defines(problem),
    )


# Set against ResNeXt-50's layers at batch 32 on an H200, some 30 configurations of each: issue slots of a thread to
# copy a vector, to lay out 16 bytes and to store 16; a warp's instructions besides products for a fragment of 16
# channels x 8 pixels and for a tile of 8 pixels of results; cycles of a scheduler for a product; cycles of a tile and
# of a block at least.
_COPY, _LAY_OUT, _STORE = 14, 18, 4
_FRAGMENT, _SHIFT, _RESULT = 1.1, 1.9, 1.4
_PRODUCT = 4.1
_ALONE = 3.7  # how much longer the warps of one block take, if each had a scheduler of its own
_TILE_LATENCY, _BLOCK_LATENCY = 1000, 4300
_ARRANGED, _LOADED = 0.15, 1.7  # cycles of shared memory to arrange an element, and to load a word
_SERIAL_SHARE = 0.59  # share of the shorter of memory and multiprocessors that does not overlap
_BANDWIDTH_SHARE = 0.885  # of the nominal one that copies reach
_LAUNCH_MS = 0.0017


def _busy_cycles(tiling: NchwTiling) -> float:
    """Cycles of a multiprocessor's schedulers that one tile of one block takes."""
    (height, width), source, warps = tiling.axes, tiling.source, tiling.threads // 32
    slots = (source.copies * _COPY + tiling.written * _STORE) / 32
    if source.is_flat:
        slots += source.channels * source.images * source.rows * ceil_div(source.width, 8) * _LAY_OUT / 32
    rows_in = (tiling.rows - 1) * height.stride + height.reach + 1
    fragments = rows_in * tiling.in_tiles * tiling.depth
    shifts = 2 * min(width.taps - 1, width.reach) + 3 * (width.stride - 1)
    products = tiling.rows * tiling.width * height.taps * width.taps * tiling.depth
    results = tiling.rows * tiling.width * height.phases * width.phases
    slots += warps * (fragments * (_FRAGMENT + _SHIFT * shifts / width.stride) + results * _RESULT + products)
    return larger(slots / 4, warps * products * _PRODUCT / 4)


def _filter_cycles(problem: ProblemDescription, tiling: NchwTiling) -> float:
    """Cycles of a multiprocessor's shared memory that a block takes to have its filters in registers."""
    if PackedGroups.of(problem).groups == 1:
        return _LOADED * tiling.threads / 32 * _matrices(problem)
    return _ARRANGED * math.prod(problem.w.shape) / tiling.channel_tiles


def _work_ms(problem: ProblemDescription, device: Device, tiling: NchwTiling, config: Config) -> float:
    """Milliseconds of multiprocessors and memory together."""
    resident, busy = _resident(problem, tiling, device), _busy_cycles(tiling)
    splits = _splits(problem, tiling, device, config["turns"])
    tiles, blocks = tiling.tile_count / splits, tiling.channel_tiles * splits
    filters = _filter_cycles(problem, tiling)
    alone = _TILE_LATENCY * chosen(config["stages"] == 1, 2, 1) + _ALONE * 128 * busy / tiling.threads
    full, rest = divmod(blocks, device.sm_count * resident)
    latency = ceil_div(tiling.tile_count, splits) * alone
    cycles = full * (_BLOCK_LATENCY / 2 + larger(resident * (tiles * busy + filters), latency)) + _BLOCK_LATENCY / 2
    most = ceil_div(rest, device.sm_count) * (tiles * busy + filters)
    cycles += chosen(rest > 0, _BLOCK_LATENCY / 2 + larger(most, latency + filters), 0.0)
    processing = 1e3 * cycles / device.clock_hz
    halo = 0.1 * (tiling.source.rows - tiling.rows * config["row_groups"] * tiling.axes[0].stride) / tiling.source.rows
    memory = 1e3 * problem.bytes * (1 + larger(0.0, halo)) / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    ms: float = larger(memory, processing) + _SERIAL_SHARE * smaller(memory, processing)
    return ms


# What default_configs ranks by estimate. The smallest tiles, and whole images, serve what nothing else does.
_SHORT_LIST = (
    *Config.product(
        {
            "rows": (1, 2, 4, 7),
            "row_groups": (1, 2, 4),
            "images": (1, 2, 4),
            "units": (1, 2),
            "stages": (2, 3),
            "turns": (0, 1, 2, 4, 8),
        }
    ),
    *Config.product(
        {"rows": _ROWS, "row_groups": (1, 2, 4), "images": (1,), "units": (1,), "stages": (1,), "turns": (1,)}
    ),
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


def _varied(ranked: Sequence[EstimatedConfig]) -> tuple[EstimatedConfig, ...]:
    """The likely best, at most two of each shape of a tile: estimates of others differ by less than they are off."""
    taken: Counter[tuple[int, ...]] = Counter()
    kept = []
    for each in ranked:
        shape = (each.config["rows"], each.config["row_groups"], each.config["images"])
        if taken[shape] < _MOST_ALIKE:
            kept.append(each)
        taken[shape] += 1
        if len(kept) == _DEFAULTS:
            break
    return tuple(kept)


def _is_of_size(problem: ProblemDescription, config: Config) -> bool:
    """Whether no smaller value of a parameter does the same."""
    height = GroupedAxis.of(problem.lifted(2), 0)
    is_of_size: bool = (
        (config["rows"] <= least_ample(_ROWS, height.outputs))
        & ((config["row_groups"] == 1) | (config["row_groups"] // 2 * config["rows"] < height.outputs))
        & (config["images"] < 2 * problem.n)
        & (config["units"] < 2 * aligned_units_of(problem))
    )
    return is_of_size


def _can_run(problem: ProblemDescription, device: Device, config: Config) -> bool:
    """Whether a block, a thread and a grid have what it takes, and tiles are enough for its turns and stages."""
    tiling = NchwTiling.of(problem, config)
    is_whole = (tiling.row_tiles == 1) | ((config["images"] == 1) & (not tiling.source.is_flat))
    can_run: bool = (
        is_whole
        & (config["turns"] <= tiling.tile_count)
        & (tiling.sums <= _MAX_SUMS)
        & (tiling.threads >= _LEAST_THREADS)
        & (tiling.threads <= _MAX_THREADS)
        & (_registers(problem, tiling) <= _MAX_REGISTERS)
        & (_resident(problem, tiling, device) > 0)
        & _uses_all_blocks(problem, tiling, device, config)
    )
    return can_run


def _uses_all_blocks(problem: ProblemDescription, tiling: NchwTiling, device: Device, config: Config) -> bool:
    """Whether blocks use all their buffers, and have more than two tiles where `turns` is 0.

    For one or two tiles, a number of tiles gives each block the same, which measured faster.
    """
    splits = _splits(problem, tiling, device, config["turns"])
    is_uneven = tiling.tile_count > 2 * splits
    for turns in filter(None, _TURNS):
        is_uneven = is_uneven & (splits != ceil_div(tiling.tile_count, turns))
    has_stages = config["stages"] <= ceil_div(tiling.tile_count, splits) + 1
    uses_all: bool = (splits <= _MAX_GRID) & has_stages & ((config["turns"] > 0) | is_uneven)
    return uses_all


@functools.lru_cache(maxsize=16)  # whether there are any is asked before which
def _valid_list(problem: ProblemDescription, device: Device) -> ConfigTable:
    """The short list as far as it is valid."""
    return _short_list().valid(functools.partial(_is_of_size, problem), functools.partial(_can_run, problem, device))


class ConvGroupedPlanes(Solver):
    """Grouped convolution of NCHW tensors: block-diagonal matrices of filters times rows of pixels, float32 sums.

    Groups of less than 16 channels share products, whose zeros are multiplied: an infinity or NaN of the input spreads
    to the results of groups whose channels are among the same 16. Padding is multiplied as zeros: an infinity or NaN of
    the filter spreads to outputs at the border.

    Configuration: a warp computes 16 results of a unit, the fewest groups that fill them, for `rows` whole rows. A
    block has `row_groups` times as many rows, `images` images, `units` units and `stages` stages. It computes `turns`
    tiles one after another; with 0, as many as let all blocks be resident at once.
    """

    id = "ConvGroupedPlanes"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_IMAGES
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "rows": _ROWS,
        "row_groups": (1, 2, 4),
        "images": (1, 2, 4),
        "units": (1, 2),
        "stages": (1, 2, 3),
        "turns": _TURNS,
    }
    sources = ("grouped/nchw.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        grouped = functools.partial(grouped_example, dtype=DataType.FLOAT16, layout=Layout.NCHW, padding=1)
        brain, data = DataType.BFLOAT16, Direction.BACKWARD_DATA
        return (
            grouped(8, 4, 4, x=(2, 30, 28), w=(3, 3)),
            grouped(4, 8, 8, x=(3, 28, 28), w=(3, 3), stride=2, dtype=brain),
            grouped(3, 32, 32, x=(5, 7, 7), w=(3, 3)),
            grouped(2, 16, 16, x=(3, 14, 14), w=(3, 3), stride=2, direction=data, dtype=brain),
            grouped(2, 32, 32, x=(3, 14, 14), w=(3, 3), stride=2, direction=data),
            grouped(4, 4, 6, x=(2, 13, 9), w=(4, 3), padding=((4, 0), (2, 1)), dilation=(1, 2)),
            grouped(2, 16, 32, x=(2, 9, 12), w=(1, 1), padding=0, direction=data),
            grouped(4, 2, 4, x=(2, 50), w=(5,), padding=2, stride=2, layout=Layout.NCW),
            grouped(8, 4, 4, x=(2, 30, 28), w=(3, 3), epilogue="bias.relu"),
            grouped(2, 16, 32, x=(3, 28, 28), w=(3, 3), stride=2, dtype=brain, epilogue="scale.bias.residual.silu"),
            grouped(3, 16, 16, x=(5, 7, 7), w=(3, 3), epilogue="channel_bias.silu.residual"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_groups(problem)).refused:
            return answer
        if max(problem.conv.stride) > 2:
            return Applicability(f"serves strides of 1 and 2, not {problem.conv.stride}")
        unit_in, _ = nchw_unit_channels(problem)
        if unit_in // 16 > _MAX_DEPTH:
            return Applicability(
                f"sums up to {16 * _MAX_DEPTH} channels of the fewest groups that fill 16, not {unit_in}"
            )
        if _matrices(problem) > _MAX_MATRICES:
            return Applicability(
                f"keeps filters in registers: {problem.filter} taps of {unit_in} channels are too many"
            )
        width = GroupedAxis.of(problem.lifted(2), 1)
        least, most = (-7, 7) if width.stride == 1 else (-2, 3)
        if width.first < least or width.first + width.reach > most:
            return Applicability(
                f"shifts columns by {least} to {most}, not by {width.first} to {width.first + width.reach}"
            )
        if not _valid_list(problem, device).configs:
            return Applicability("rows are too wide, or images of odd width too large, for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return bool(_is_of_size(problem, config)) and bool(_can_run(problem, device, config))

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return any(channels // problem.groups % 16 for channels in (problem.c, problem.k))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return _varied(self._ranked(problem, device))

    def _ranked(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """The short list as far as it is valid, the least estimate first."""
        return self.ranked_table(problem, device, _valid_list(problem, device))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return _LAUNCH_MS + _work_ms(problem, device, NchwTiling.of(problem, config), config)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = NchwTiling.of(problem, config)
        source, target = SOURCE[problem.direction], problem.direction.output
        step = KernelStep(
            source="grouped/nchw.cu",
            entry="grouped_nchw",
            grid=(tiling.channel_tiles, _splits(problem, tiling, device, config["turns"]), 1),
            block=(tiling.threads, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=_defines(problem, config, tiling, _resident(problem, tiling, device)),
            args=(
                *(Pointer(buffer=name) for name in (source, "w", target)),
                *int32s(problem.n, problem.tensor(source).shape[1], problem.tensor(target).shape[1], tiling.tile_count),
                *epilogue_arguments(problem),
            ),
        )
        return ConvSolution(steps=(step,))


SOLVERS = (ConvGroupedPlanes(),)
