"""Configurations, launches and refusals of the depthwise solvers of volumes."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from helpers.problems.struct_fields import fields_of

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, KernelStep
from miofind.solver.structs import Struct
from miofind.solvers.depthwise.channels_last_rows import bank_conflicts
from miofind.solvers.depthwise.volume_tiling import VolumeAxis, best_pitch, wavefronts

H200 = dataclasses.replace(Device.virtual("90a"), clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12)
IMAGES = Registry.default()["ConvDepthwiseVolume"]
WEIGHTS = Registry.default()["ConvDepthwiseVolumeWeights"]
LAYOUTS = (Layout.NCDHW, Layout.NDHWC)
SHAPES: dict[str, dict[str, object]] = {
    "56x56": {"x": (8, 54, 16, 56, 56), "w": (54, 1, 3, 3, 3), "padding": 1, "groups": 54},
    "images_stride": {"x": (8, 108, 16, 56, 56), "w": (108, 1, 3, 3, 3), "padding": 1, "stride": (1, 2, 2)},
    "stride": {"x": (2, 24, 9, 29, 31), "w": (24, 1, 3, 3, 3), "padding": ((1, 0), (0, 2), 1), "stride": 2},
    "7x7": {"x": (8, 432, 16, 7, 7), "w": (432, 1, 3, 3, 3), "padding": 1},
    "5x5x5": {"x": (1, 32, 64, 64, 64), "w": (32, 1, 5, 5, 5), "padding": 2},
    "7x7x7": {"x": (2, 64, 32, 32, 32), "w": (64, 1, 7, 7, 7), "padding": 3},
    "dilation": {"x": (2, 13, 15, 14, 17), "w": (13, 1, 3, 2, 3), "padding": 2, "dilation": (2, 1, 3)},
}


def make(
    shape: str, direction: Direction, layout: Layout = Layout.NCDHW, dtype: DataType = DataType.FLOAT16
) -> ProblemDescription:
    given = SHAPES[shape] | {"direction": direction, "dtype": dtype, "layout": layout}
    groups = SHAPES[shape]["x"][1]  # type: ignore[index]
    return ProblemDescription.convolution(**given | {"groups": groups})  # type: ignore[arg-type]


def solver_of(problem: ProblemDescription) -> Solver:
    return WEIGHTS if problem.direction is Direction.BACKWARD_WEIGHTS else IMAGES


def steps(problem: ProblemDescription, config: Config) -> tuple[KernelStep, ...]:
    return tuple(solver_of(problem).solution(problem, H200, config).kernels)


def define(step: KernelStep, name: str) -> int:
    return int(dict(step.defines)[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_cover_every_unit_and_fit(shape: str, direction: Direction, layout: Layout) -> None:
    problem = make(shape, direction, layout)
    solver = solver_of(problem)
    assert solver.applicability(problem, H200)
    axes = [VolumeAxis.of(problem, dim) for dim in range(3)]
    found = [*solver.default_configs(problem, H200), *solver.drawn_configs(problem, H200, 1500)]
    assert len(found) >= 8
    for config in found:
        first = steps(problem, config)[0]
        channels = define(first, "CHANNELS")
        tiles = [
            -(-axis.units // (define(first, f"BLOCK_{name}") * define(first, f"TILE_{name}")))
            for axis, name in zip(axes[1:], ("ROWS", "COLUMNS"), strict=True)
        ]
        parts = -(-(axes[0].end_unit - axes[0].first_unit) // config["depth"])
        items = problem.n * axes[0].residues * tiles[0] * tiles[1] * parts
        blocks = -(-problem.c // channels) * items
        if direction is Direction.BACKWARD_WEIGHTS:
            groups = define(first, "FILTER_GROUPS")
            assert (groups - 1) * define(first, "FILTER_D") < problem.filter[0] <= groups * define(first, "FILTER_D")
            assert define(first, "SPLITS") == -(-items // config["turns"])
            blocks = -(-problem.c // channels) * groups * define(first, "SPLITS")
        assert first.grid == (blocks, 1, 1)
        assert first.block[0] % 32 == 0
        assert first.block[0] <= 512
        assert first.shared_bytes <= H200.shared_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_defaults_come_in_the_order_of_their_estimates(shape: str, direction: Direction, layout: Layout) -> None:
    problem = make(shape, direction, layout)
    solver = solver_of(problem)
    estimates = [each.estimate_ms for each in solver.estimated_defaults(problem, H200)]
    assert estimates == sorted(estimates)
    assert 2 <= len(estimates) <= 8


@pytest.mark.parametrize("direction", list(Direction))
def test_wider_elements_and_more_work_take_longer(direction: Direction) -> None:
    def estimate(shape: str, dtype: DataType) -> float:
        problem = make(shape, direction, dtype=dtype)
        return solver_of(problem).estimated_defaults(problem, H200)[0].estimate_ms

    assert estimate("56x56", DataType.FLOAT16) < estimate("56x56", DataType.FLOAT32)
    assert estimate("7x7", DataType.FLOAT16) < estimate("56x56", DataType.FLOAT16) / 2


def test_narrow_results_pass_through_shared_memory() -> None:
    """Rows of 7 or 14 elements allow no stores of 16 bytes; those of 56 do."""
    for shape, staged in (("7x7", {1}), ("56x56", {0})):
        problem = make(shape, Direction.FORWARD)
        wide = [config for config in IMAGES.drawn_configs(problem, H200, 4000) if config["columns"] == 8]
        assert {define(steps(problem, config)[0], "STAGED") for config in wide} == staged
    problem = make("7x7", Direction.FORWARD, Layout.NDHWC)
    assert {define(steps(problem, config)[0], "STAGED") for config in IMAGES.default_configs(problem, H200)} == {0}


def test_large_filters_are_read_from_shared_memory_row_by_row() -> None:
    for shape, held, rolled in (("56x56", 1, 0), ("5x5x5", 0, 1), ("7x7x7", 0, 1)):
        for direction in (Direction.FORWARD, Direction.BACKWARD_DATA):
            problem = make(shape, direction)
            launches = [steps(problem, config)[0] for config in IMAGES.default_configs(problem, H200)]
            assert {(define(step, "HELD"), define(step, "ROLLED")) for step in launches} == {(held, rolled)}


def test_sums_of_several_blocks_meet_in_a_second_kernel() -> None:
    problem = make("56x56", Direction.BACKWARD_WEIGHTS)
    for config in WEIGHTS.drawn_configs(problem, H200, 1000):
        solution = WEIGHTS.solution(problem, H200, config)
        launches = list(solution.kernels)
        splits = define(launches[0], "SPLITS")
        assert len(launches) == 1 + (splits > 1)
        assert [region.bytes for region in solution.workspace.regions] == [4 * splits * problem.w.size] * (splits > 1)
        if splits > 1:
            assert launches[1].pdl


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("taps", "stride", "dilation", "pad"), [(3, 1, 1, 1), (3, 2, 1, 1), (4, 3, 1, 5), (3, 1, 2, 0)]
)
def test_windows_hold_what_units_meet(backward: bool, taps: int, stride: int, dilation: int, pad: int) -> None:
    """By every pair of an output and a tap of each of four units: the inputs that these join lie in the window."""
    size = 40
    out = (size + 2 * pad - (taps - 1) * dilation - 1) // stride + 1
    sizes = (out, size) if backward else (size, out)
    axis = VolumeAxis(
        size=sizes[0],
        out_size=sizes[1],
        taps=taps,
        stride=stride,
        dilation=dilation,
        pad=pad,
        backward=backward,
    )
    met = set()
    for unit in range(4):
        first = axis.first + unit * axis.step
        for output in range(unit * axis.outs, (unit + 1) * axis.outs):
            for tap in range(taps):
                reached = output + pad - tap * dilation if backward else output * stride - pad + tap * dilation
                if backward and reached % stride:
                    continue
                at = reached // stride if backward else reached
                assert 0 <= at - first < axis.window(1)
                met.add(at - axis.first)
    assert max(met) < axis.window(4)


def marched(
    volume: Mapping[str, Any], taps: int, stride: int, *, backward: bool
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """What blocks write, as `March` of volume.cuh and the loop of volume.cu walk the depth.

    Each has its unit, its plane, and the pairs of a plane that was met and the tap that joins both.
    """
    span, in_planes, out_planes = -(-taps // stride), 1 if backward else stride, stride if backward else 1
    for residue, part in itertools.product(range(volume["residues"]), range(volume["parts"])):
        first = volume["first_unit"] + part * volume["part_units"]
        units = min(first + volume["part_units"], volume["end_unit"]) - first
        planes = units + span - 1 if backward else stride * (units - 1) + taps
        lead = span - 1 if backward else 0
        first_in = volume["first_in"] + residue + volume["in_step"] * (in_planes * first - lead)
        first_out = volume["first_out"] + residue + volume["out_step"] * out_planes * first
        met = defaultdict(list)
        for iteration in range(units + span - 1):
            for plane in range(iteration * in_planes, (iteration + 1) * in_planes):
                at = first_in + volume["in_step"] * plane
                if plane >= planes or not 0 <= at < volume["in_size"][0]:
                    continue
                for slot, out in itertools.product(range(span), range(out_planes)):
                    tap = stride * (span - 1 - slot) + out if backward else stride * slot + plane % in_planes
                    if tap < taps:
                        met[iteration - slot, out].append((at, tap))
            unit = iteration - span + 1
            for out in range(out_planes if unit >= 0 else 0):
                at = first_out + volume["out_step"] * (out_planes * unit + out)
                if 0 <= at < volume["out_size"][0]:
                    yield first + unit, at, met[unit, out]


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize(
    ("size", "taps", "stride", "dilation", "pad"),
    [(40, 3, 1, 1, 1), (41, 3, 2, 1, 1), (43, 4, 3, 1, 5), (37, 3, 1, 2, 3), (40, 5, 2, 1, 4), (19, 2, 3, 1, 0)],
)
def test_marches_write_each_plane_once_with_all_its_taps(
    direction: Direction, size: int, taps: int, stride: int, dilation: int, pad: int
) -> None:
    """And walk no unit in vain."""
    problem = ProblemDescription.convolution(
        x=(1, 8, size, 12, 12),
        w=(8, 1, taps, 3, 3),
        padding=(pad, 1, 1),
        stride=(stride, 1, 1),
        dilation=(dilation, 1, 1),
        groups=8,
        direction=direction,
    )
    backward = direction is Direction.BACKWARD_DATA
    wanted = defaultdict(list)
    for y, tap in itertools.product(range(problem.out_spatial[0]), range(taps)):
        x = y * stride - pad + tap * dilation
        if 0 <= x < size:
            wanted[x if backward else y].append((y if backward else x, tap))
    configs = {config["depth"]: config for config in IMAGES.drawn_configs(problem, H200, 200)}
    parts = set()
    for config in configs.values():
        (volume,) = [fields_of(arg) for arg in steps(problem, config)[0].args if isinstance(arg, Struct)]
        written = [*marched(volume, taps, stride, backward=backward)]
        assert sorted(plane for _, plane, _ in written) == [*range(problem.output.shape[2])]
        assert {unit for unit, _, _ in written} == {*range(volume["first_unit"], volume["end_unit"])}
        for _, plane, pairs in written:
            assert sorted(pairs) == sorted(wanted[plane])
        parts.add(volume["parts"])
    assert len(parts) > 1


@pytest.mark.parametrize(("step", "lanes"), [(2, 4), (4, 8), (1, 7), (8, 16)])
def test_pitches_have_the_fewest_conflicts(step: int, lanes: int) -> None:
    """As the rows of channels-last images count them, where lanes read neighbours."""
    pitch = best_pitch(16, 2, 8, 8, step, lanes)
    assert pitch >= 16
    assert pitch * 2 % 16 == 0
    each = [wavefronts(16 * (2 + more), 8, 8, step, lanes) for more in range(4)]
    assert wavefronts(2 * pitch, 8, 8, step, lanes) == min(each)
    counted = bank_conflicts(np.array([2 * pitch]), 8, step, lanes)
    assert wavefronts(2 * pitch, 8, 8, step, lanes) == 2 * counted[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"w": (16, 1, 3, 3, 3)}, "one filter a channel"),
        ({"groups": 4, "w": (8, 2, 3, 3, 3)}, "one filter a channel"),
        ({"stride": (2, 1, 1), "dilation": (2, 1, 1)}, "by stride or by dilation"),
        ({"stride": (1, 2, 1), "dilation": (1, 2, 1), "direction": "backward_data"}, "by stride or by dilation"),
        ({"x": (2, 8, 9, 91, 91), "stride": (1, 9, 9), "dtype": "float16"}, "no tile fits"),
        ({"stride": 7, "direction": "backward_data"}, "no tile fits"),
        (
            {"x": (1, 8, 1021, 512, 512), "layout": "NDHWC", "stride": (1, 2, 2)},
            "tiles of (1, 8, 1021, 512, 512) reach",
        ),
        ({"layout": {"x": "NCDHW", "w": "NCDHW", "y": "NDHWC"}}, "one layout"),
        ({"padding": (1, 1, 2**21), "stride": (1, 1, 2**12)}, "padding"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(fields: dict[str, object], words: str) -> None:
    given = {"x": (2, 8, 9, 30, 30), "w": (8, 1, 3, 3, 3), "padding": 1, "groups": 8} | fields
    problem = ProblemDescription.convolution(**given)  # type: ignore[arg-type]
    assert words in solver_of(problem).applicability(problem, H200).reason


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "fields",
    [
        {"x": (2, 12, 8, 28, 27), "w": (12, 1, 7, 7, 7), "padding": 3, "stride": (1, 2, 2)},
        {"x": (2, 13, 9, 28, 27), "w": (13, 1, 5, 5, 5), "padding": 2, "stride": 2},
        {"x": (2, 16, 16, 29, 29), "w": (16, 1, 3, 3, 3), "padding": 1, "stride": 3},
        {"x": (2, 12, 9, 28, 29), "w": (12, 1, 3, 3, 3), "padding": 1, "stride": (1, 4, 4)},
        {"x": (1, 8, 1021, 512, 512), "w": (8, 1, 3, 3, 3), "padding": 1, "stride": (1, 2, 2)},
        {"x": (2, 16, 9, 30, 91), "w": (16, 1, 5, 5, 5), "padding": 2, "stride": 2},
    ],
)
def test_odd_widths_and_wide_strides_have_a_tile(fields: dict[str, object], direction: Direction) -> None:
    """Channels first, where threads copy single elements to shared memory, and registers are many."""
    groups = fields["x"][1]  # type: ignore[index]
    for dtype in (DataType.FLOAT16, DataType.FLOAT32):
        problem = ProblemDescription.convolution(**fields, groups=groups, dtype=dtype, direction=direction)  # type: ignore[arg-type]
        answer = solver_of(problem).applicability(problem, H200)
        assert answer, answer.reason
        defaults = solver_of(problem).default_configs(problem, H200)
        assert defaults
        usual = [config for config in defaults if config["columns"] > 1]
        assert not usual or usual == list(defaults), "what is for these alone is no default beside others"


def test_images_are_left_to_the_solvers_of_images() -> None:
    problem = ProblemDescription.convolution(x=(2, 8, 14, 14), w=(8, 1, 3, 3), padding=1, groups=8)
    assert "served are NCDHW, NDHWC" in IMAGES.applicability(problem, H200).reason
