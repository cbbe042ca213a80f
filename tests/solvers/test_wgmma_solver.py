"""ConvImplicitGemmWgmma without a GPU: what it refuses, what its tensor maps reach, and what its steps add up to."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.in_numpy.wgmma import Launch, viewed
from helpers.problems.drawn_configs import WGMMA_TILINGS, drawn, drawn_wgmma, lacking_tilings
from helpers.problems.struct_fields import named_args
from helpers.problems.wgmma_forms import KINDS, ONE_FIRST
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from miofind.compiler.sources import read_source
from miofind.core.problem import Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.steps import (
    Argument,
    Box,
    Config,
    ConfigValue,
    ConvSolution,
    Im2col,
    KernelStep,
    Pointer,
    Scalar,
    TensorMap,
)
from miofind.solver.structs import Struct
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.common.wgmma_product import NchwTensors, WgmmaProduct

pytestmark = pytest.mark.sampled(3)

Array = NDArray[np.float64]

DEVICE = Device.virtual("90a")
SOLVER = Registry.default()["ConvImplicitGemmWgmma"]
PRODUCT = "implicit_gemm_wgmma"
FORWARD, DATA, WEIGHTS = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS


def conv(kind: str = "float16", **fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**{"layout": Layout.NHWC, **KINDS[kind], **fields})


LARGE: dict[str, ProblemDescription] = {
    "3x3": conv(x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1),
    "few pixels": conv(x=(1, 512, 7, 7), w=(512, 512, 3, 3), padding=1),
    "data": conv(x=(32, 128, 28, 28), w=(128, 128, 3, 3), padding=1, direction=DATA),
    "strided data": conv(x=(16, 128, 29, 28), w=(128, 128, 3, 3), padding=1, stride=2, direction=DATA),
    "strided data of groups": conv(x=(4, 128, 28, 31), w=(512, 32, 1, 3), stride=2, groups=4, direction=DATA),
    "strided tf32 data": conv("tf32", x=(4, 64, 29, 27), w=(72, 64, 3, 2), padding=2, stride=(1, 2), direction=DATA),
    "weights": conv(x=(32, 128, 28, 28), w=(128, 128, 3, 3), padding=1, direction=WEIGHTS),
    "groups": conv(x=(8, 256, 28, 28), w=(256, 64, 3, 3), padding=1, groups=4),
    "weights of groups": conv(x=(8, 192, 14, 14), w=(192, 48, 3, 3), padding=1, groups=4, direction=WEIGHTS),
    "tf32": conv("tf32", x=(16, 256, 14, 14), w=(512, 256, 1, 1), stride=2),
    "tf32 data": conv("tf32", x=(4, 64, 14, 14), w=(72, 64, 3, 3), padding=1, direction=DATA),
    "bfloat16": conv("bfloat16", x=(4, 24, 35, 33), w=(40, 24, 5, 5), padding=2, stride=2, dilation=2),
    "pointwise": conv(x=(4, 256, 28, 28), w=(512, 256, 1, 1)),
    "pointwise groups": conv(x=(4, 528, 24, 24), w=(560, 264, 1, 1), groups=2),
    "pointwise weights": conv(x=(4, 256, 28, 28), w=(512, 256, 1, 1), direction=WEIGHTS),
    "planes": conv(x=(4, 264, 28, 28), w=(520, 264, 1, 1), layout="NCHW"),
    "planes of groups": conv(x=(4, 512, 24, 24), w=(384, 256, 1, 1), groups=2, layout="NCHW"),
    "planes of data": conv(x=(4, 256, 28, 30), w=(512, 256, 1, 1), layout="NCHW", direction=DATA),
    "planes of weights": conv(x=(4, 256, 28, 28), w=(512, 256, 1, 1), layout="NCHW", direction=WEIGHTS),
    "planes of tf32 weights": conv("tf32", x=(4, 64, 20, 21), w=(128, 64, 1, 1), layout="NCHW", direction=WEIGHTS),
    "planes of rows": conv(
        x=(4, 256, 32, 32), w=(512, 256, 3, 3), padding=1, stride=2, layout=ONE_FIRST[WEIGHTS], direction=WEIGHTS
    ),
    "planes in y": conv(x=(4, 128, 28, 28), w=(192, 128, 3, 3), padding=1, layout=ONE_FIRST[FORWARD]),
    "planes in dx": conv(x=(4, 128, 15, 15), w=(192, 128, 3, 3), layout=ONE_FIRST[DATA], direction=DATA),
    "planes in tf32 y": conv("tf32", x=(4, 64, 14, 14), w=(192, 64, 3, 3), stride=2, layout=ONE_FIRST[FORWARD]),
}
each_large = pytest.mark.parametrize("problem", LARGE.values(), ids=LARGE)


@functools.cache
def sampled(problem: ProblemDescription) -> list[Config]:
    """The default configurations, some of all, and some of every kind of tiling that the problem has."""
    defaults = dict.fromkeys(SOLVER.default_configs(problem, DEVICE))
    return list(defaults | drawn_wgmma(SOLVER, problem, DEVICE, 60, 3))


def changed(config: Config, **values: ConfigValue) -> Config:
    return Config(dict(config) | values)


def shares(config: Config) -> int:
    """Parts of the depth that the blocks of a cluster add."""
    return int(str(config["cluster"]).split("x")[2])


def product_of(solution: ConvSolution) -> KernelStep:
    [step] = [step for step in solution.kernels if step.entry == PRODUCT]
    return step


def maps_of(step: KernelStep) -> tuple[TensorMap, TensorMap, TensorMap]:
    rows, columns, target = (arg for arg in step.args if isinstance(arg, TensorMap))
    return rows, columns, target


def phases_of(step: KernelStep) -> list[tuple[int, int]]:
    """Steps of a product's phases, and how many blocks share a tile of each."""
    named, strided = named_args(step), dict(step.defines)["STRIDED"]
    found = []
    for phase in named["phases"][: named["phases_with_taps"]]:
        taps = phase["h"]["taps"] * phase["w"]["taps"]
        steps = named["tap_blocks"] * taps if strided else named["k_tiles"]
        found.append((steps, 1 << phase["log2_cluster_k"]))
    return found


REFUSED: dict[str, tuple[ProblemDescription, str]] = {
    "mixed types": (
        conv(x=(2, 16, 8, 8), w=(16, 16, 3, 3), dtype={"x": "float16", "w": "float16", "y": "bfloat16"}),
        "one dtype",
    ),
    "float32": (conv("tf32", x=(2, 16, 8, 8), w=(16, 16, 3, 3), math="ieee"), "math='tf32'"),
    "TF32 weights": (conv("tf32", x=(2, 16, 8, 8), w=(16, 16, 3, 3), direction=WEIGHTS), "16 bits"),
    "few channels": (conv(x=(2, 3, 8, 8), w=(16, 3, 3, 3)), "3 channels"),
    "odd channels": (conv(x=(2, 12, 8, 8), w=(16, 12, 3, 3)), "no multiple of 8"),
    "odd filters": (conv(x=(2, 16, 8, 8), w=(20, 16, 3, 3)), "20 filters"),
    "odd TF32 channels": (conv("tf32", x=(2, 14, 8, 8), w=(16, 14, 3, 3)), "no multiple of 4"),
    "depthwise": (conv(x=(2, 16, 8, 8), w=(16, 1, 3, 3), groups=16), "1 channels"),
    "narrow groups": (conv(x=(2, 16, 8, 8), w=(16, 8, 3, 3), groups=2), "groups"),
    "data of long strides": (
        conv(x=(2, 16, 8, 8), w=(16, 16, 3, 3), stride=(1, 3), direction=DATA),
        "strides of 1 and 2, not (1, 3)",
    ),
    "channels-first data of endless strides": (  # whose phases nobody can count
        conv(x=(2, 16, 8, 8), w=(16, 16, 1, 1), stride=2**31 - 1, layout="NCHW", direction=DATA),
        "strides of 1 and 2",
    ),
    "long strides": (conv(x=(2, 16, 40, 40), w=(16, 16, 1, 1), stride=(1, 9)), "stride (1, 9)"),
    "wide padding": (conv(x=(2, 16, 8, 8), w=(16, 16, 1, 1), padding=200), "padding"),
    "wide filters": (conv(x=(2, 16, 600, 4), w=(16, 16, 2, 1), dilation=(300, 1)), "filter is too large"),
    "wide filters within padding": (
        conv(x=(2, 16, 600, 4), w=(16, 16, 2, 1), dilation=(300, 1), padding=((0, 200), (0, 0))),
        "reach",
    ),
    "many elements": (conv(x=(1, 8, 2**14, 2**14), w=(8, 8, 1, 1)), "32 bits"),
    "channels first": (conv(x=(2, 16, 8, 8), w=(16, 16, 3, 3), layout="NCHW"), "channels-last operands"),
    "channels first for filters": (
        conv(x=(2, 16, 8, 8), w=(16, 16, 3, 3), layout={"x": "NHWC", "w": "NCHW", "y": "NHWC"}),
        "channels-last operands",
    ),
    "channels first for operands": (
        conv(x=(2, 16, 8, 8), w=(16, 16, 1, 1), layout={"x": "NCHW", "w": "NCHW", "y": "NHWC"}),
        "channels-last operands",
    ),
    "channels first for one of two": (
        conv(x=(2, 16, 8, 8), w=(16, 16, 1, 1), layout={"x": "NCHW", "w": "NCHW", "y": "NHWC"}, direction=WEIGHTS),
        "channels-last operands",
    ),
    "channels first with padding": (conv(x=(2, 16, 8, 8), w=(16, 16, 1, 1), padding=1, layout="NCHW"), "no padding"),
    "channels first with stride": (conv(x=(2, 16, 8, 8), w=(16, 16, 1, 1), stride=2, layout="NCHW"), "stride 1"),
    "channels first, odd images": (conv(x=(2, 16, 14, 14), w=(16, 16, 1, 1), layout="NCHW"), "196 elements"),
    "channels first for strided data": (
        conv(x=(2, 16, 8, 8), w=(16, 16, 3, 3), stride=2, layout=ONE_FIRST[DATA], direction=DATA),
        "with stride 1",
    ),
    "channels first in TF32": (conv("tf32", x=(2, 16, 8, 8), w=(16, 16, 1, 1), layout="NCHW"), "in 16 bits"),
    "three dimensions": (conv(x=(2, 16, 4, 8, 8), w=(16, 16, 3, 3, 3), layout="NDHWC"), "NDHWC"),
}


@pytest.mark.parametrize(("problem", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses_with_a_reason(problem: ProblemDescription, words: str) -> None:
    answer = SOLVER.applicability(problem, DEVICE)
    assert not answer
    assert words in answer.reason


@pytest.mark.parametrize(("arch", "words"), [("80", "9.0"), ("89", "9.0"), ("100a", "90a only")])
def test_runs_on_hopper_alone(arch: str, words: str) -> None:
    answer = SOLVER.applicability(LARGE["3x3"], Device.virtual(arch))
    assert not answer
    assert words in answer.reason


ACCEPTED: dict[str, ProblemDescription] = {
    "8 channels": conv(x=(1, 8, 9, 9), w=(8, 8, 3, 3)),
    "24 to 40": conv(x=(1, 24, 9, 9), w=(40, 24, 3, 3), direction=WEIGHTS),
    "4 TF32 channels": conv("tf32", x=(1, 4, 9, 9), w=(12, 4, 3, 3), direction=DATA),
    "one pixel": conv(x=(1, 64, 1, 1), w=(64, 64, 1, 1)),
    "padding of the limit": conv(x=(1, 16, 4, 4), w=(16, 16, 3, 3), padding=127),
    "stride of the limit": conv(x=(1, 16, 40, 40), w=(16, 16, 1, 1), stride=8),
    "data of one pixel": conv(x=(1, 16, 1, 1), w=(16, 16, 1, 1), stride=2, direction=DATA),
    "data of stride and dilation": conv(x=(1, 16, 9, 9), w=(16, 16, 3, 3), stride=2, dilation=(2, 3), direction=DATA),
    "strided data of one dimension": conv(
        x=(2, 16, 50), w=(24, 16, 5), stride=2, padding=((3, 1),), layout=Layout.NWC, direction=DATA
    ),
    "one dimension": conv(x=(2, 16, 50), w=(24, 16, 5), layout=Layout.NWC, direction=WEIGHTS),
    "groups of 16": conv(x=(2, 64, 8, 8), w=(64, 16, 3, 3), groups=4),
    "groups of other sizes": conv(x=(2, 64, 8, 8), w=(96, 32, 3, 3), groups=2, direction=DATA),
    "pointwise groups of 24": conv(x=(2, 72, 8, 8), w=(120, 24, 1, 1), groups=3),
    "pointwise data of groups of 48": conv(x=(2, 72, 8, 8), w=(144, 24, 1, 1), groups=3, direction=DATA),
    "pointwise weights of groups of 24": conv(x=(2, 72, 8, 8), w=(192, 24, 1, 1), groups=3, direction=WEIGHTS),
}


@pytest.mark.parametrize("problem", ACCEPTED.values(), ids=ACCEPTED)
def test_what_it_accepts_has_a_default_configuration(problem: ProblemDescription) -> None:
    answer = SOLVER.applicability(problem, DEVICE)
    assert answer, answer.reason
    defaults = SOLVER.default_configs(problem, DEVICE)
    assert defaults
    for config in defaults:
        SOLVER.check_config(problem, DEVICE, config)


@each_large
def test_default_configurations_are_ordered(problem: ProblemDescription) -> None:
    defaults = SOLVER.default_configs(problem, DEVICE)
    times = [SOLVER.estimate_ms(problem, DEVICE, config) for config in defaults]
    assert times == sorted(times)
    for config in defaults:
        SOLVER.check_config(problem, DEVICE, config)


def test_a_device_with_less_shared_memory_runs_fewer_configurations() -> None:
    problem = LARGE["3x3"]
    scarce = replace(DEVICE, shared_bytes=100 << 10)
    fitting = [config for config in sampled(problem) if SOLVER.is_valid_config(problem, scarce, config)]
    assert 0 < len(fitting) < len(sampled(problem))
    fitting += SOLVER.default_configs(problem, scarce)
    steps = [product_of(SOLVER.solution(problem, scarce, config)) for config in fitting]
    assert max(step.shared_bytes for step in steps) <= scarce.shared_bytes


def test_configurations_that_cannot_run_are_refused() -> None:
    """Each value is allowed, and all together are valid for a larger problem."""
    small = ACCEPTED["8 channels"]
    beyond = [config for config in sampled(LARGE["few pixels"]) if not SOLVER.is_valid_config(small, DEVICE, config)]
    assert beyond
    for config in beyond:
        with pytest.raises(InvalidConfigError, match="cannot run"):
            SOLVER.check_config(small, DEVICE, config)


@each_large
def test_partials_are_added_in_a_workspace_of_their_own(problem: ProblemDescription) -> None:
    found = set()
    for config in sampled(problem):
        solution, splits = SOLVER.solution(problem, DEVICE, config), config["splits"]
        found.add(splits > 1)
        assert solution.deterministic
        regions = {region.name: region.bytes for region in solution.workspace.regions}
        written = [arg.buffer for arg in product_of(solution).args if isinstance(arg, Pointer)]
        if splits == 1:
            assert "partials" not in regions
            assert product_of(solution) == solution.kernels[-1]
            assert "partials" not in written
            continue
        assert regions["partials"] == 4 * splits * problem.output.size
        assert SOLVER.workspace_bytes(problem, DEVICE, config) >= regions["partials"]
        assert written == ["partials"]
        add, lanes = solution.kernels[-1], SplitK(results=problem.output.size, splits=splits).lanes
        assert [arg.buffer for arg in add.args if isinstance(arg, Pointer)] == ["partials", problem.direction.output]
        assert [arg.value for arg in add.args if isinstance(arg, Scalar)] == [problem.output.size, splits, lanes]
        assert 4 * add.grid[0] * add.block[0] >= problem.output.size * lanes
        assert problem.output.size % 4 == 0
    assert True in found


@each_large
def test_every_part_has_steps(problem: ProblemDescription) -> None:
    """A part without one would free a stage that was never filled."""
    for config in sampled(problem):
        step = product_of(SOLVER.solution(problem, DEVICE, config))
        named, parts = named_args(step), config["splits"] * shares(config)
        assert dict(step.defines)["STRIDED"] == int(is_strided(problem))
        assert named["splits"] == parts
        assert parts == 1 or 2 * parts <= named["k_tiles"]
        for steps, shared in phases_of(step):
            assert shared <= shares(config)
            assert steps >= config["splits"] * shared
            assert steps * shares(config) <= named["k_tiles"] * shared  # none has more than of the first phase
        assert named["k_tiles"] * parts < 2**31  # the kernel's product


def is_strided(problem: ProblemDescription) -> bool:
    """Whether pixels of the result differ in the taps that they meet."""
    return problem.direction is DATA and max(problem.conv.stride) > 1


def is_pointwise(problem: ProblemDescription) -> bool:
    conv = problem.conv
    return math.prod(problem.filter) == max(conv.stride) == 1 and not any((*conv.pad_before, *conv.pad_after))


@pytest.mark.parametrize("problem", (LARGE | ACCEPTED).values(), ids=LARGE | ACCEPTED)
def test_kernels_are_told_how_the_copies_walk(problem: ProblemDescription) -> None:
    planar = problem.lifted(2)
    pixels = "y" if problem.direction is DATA else "x"
    for config in sampled(problem):
        step = product_of(SOLVER.solution(problem, DEVICE, config))
        named, maps = named_args(step), maps_of(step)
        assert named["groups"] == problem.groups
        tiles = named["tiles_m"] * named["tiles_n"] * named["groups"] * config["splits"]
        assert named["work_tiles"] == sum(-(-tiles * shared // shares(config)) for _, shared in phases_of(step))
        assert named["out_size"] == problem.output.size
        planes = WgmmaProduct.of(problem).nchw
        is_second = problem.direction is WEIGHTS or config["swapped"] == 1 or planes is not NchwTensors.NONE
        walk = maps[1 if is_second else 0]
        assert walk.pointer.buffer == pixels
        assert dict(step.defines)["POINTWISE"] == int(isinstance(walk.copy, Box)) == int(is_pointwise(problem))
        for axis, (name, taps) in enumerate((("w", "taps_x"), ("h", "taps_y"))):
            asked, dilation = planar.conv.stride[1 - axis], planar.conv.dilation[1 - axis]
            common = math.gcd(asked, dilation) if problem.direction is DATA else 1
            assert named[f"dilation_{name}"] * common == dilation
            assert named[taps] == planar.filter[1 - axis]
            count = named["width" if name == "w" else "height"]
            if planes is NchwTensors.ALL:
                length = walk.copy.sizes[0] if name == "w" else walk.sizes[0]
                assert count == math.ceil(walk.sizes[0] / length)
            elif not isinstance(walk.copy, Im2col):
                assert count == planar.tensor(pixels).shape[3 - axis]
            if not isinstance(walk.copy, Im2col):
                assert (named[f"low_{name}"], named[f"stride_{name}"], named[taps]) == (0, 1, 1)
                continue
            low, high, stride = (corner[axis] for corner in (walk.copy.lower, walk.copy.upper, walk.copy.strides))
            assert (named[f"low_{name}"], named[f"stride_{name}"]) == (low, asked)
            assert stride == (1 if problem.direction is DATA else asked)
            assert len(range(low, walk.sizes[1 + axis] + high, stride)) == count


@pytest.mark.parametrize("problem", [*filter(is_pointwise, (LARGE | ACCEPTED).values())])
def test_boxes_of_pixels_end_with_the_group(problem: ProblemDescription) -> None:
    """Where a step is deeper than what is left of the group, it reads zeros."""
    pixels = "y" if problem.direction is DATA else "x"
    channels = problem.k if pixels == "y" else problem.c
    for config in sampled(problem):
        maps = maps_of(product_of(SOLVER.solution(problem, DEVICE, config)))
        [boxes] = [tensor_map for tensor_map in maps[:2] if tensor_map.pointer.buffer == pixels]
        sizes = (channels // problem.groups, problem.groups, problem.tensor(pixels).size // channels)
        if WgmmaProduct.of(problem).nchw is NchwTensors.ALL:
            sizes = (math.prod(problem.spatial), channels, problem.n)
            assert problem.direction is WEIGHTS or problem.groups == 1 or sizes[1] // problem.groups % 64 == 0
        assert boxes.sizes == sizes


@each_large
def test_grids_are_whole_clusters(problem: ProblemDescription) -> None:
    """Blocks stay and take item by item, but those that add what they have computed are there for one."""
    seen = set()
    for config in sampled(problem):
        step = product_of(SOLVER.solution(problem, DEVICE, config))
        defines, items = dict(step.defines), named_args(step)["work_tiles"]
        assert "x".join(str(defines[f"CLUSTER_{axis}"]) for axis in "MNK") == config["cluster"]
        cluster = math.prod(int(defines[f"CLUSTER_{axis}"]) for axis in "MNK")
        seen.add(config["cluster"])
        if shares(config) > 1:
            assert cluster == shares(config)
            assert step.grid == (items * cluster, 1, 1)
            continue
        assert step.grid[0] % cluster == 0
        assert cluster <= step.grid[0] <= cluster * items
        assert step.grid[0] <= DEVICE.sm_count * config["blocks"]
        assert cluster * items <= step.grid[0] or DEVICE.sm_count * config["blocks"] - step.grid[0] < cluster
    product = WgmmaProduct.of(problem)
    lacking = {"2x1x1"} if product.size_m <= 64 else set()
    if product.nchw is not NchwTensors.NONE:
        lacking = {"2x1x1", "1x2x1"}
    lacking |= {"2x1x1", "1x2x1"} if is_strided(problem) else set()
    assert seen == set(SOLVER.parameters["cluster"]) - lacking


@each_large
def test_shared_memory_holds_what_the_kernel_lays_there(problem: ProblemDescription) -> None:
    """The ring of stages, from the next multiple of 1024 on; behind it blocks, or in its place sums as floats."""
    itemsize = problem.x.dtype.itemsize
    for config in sampled(problem):
        step = product_of(SOLVER.solution(problem, DEVICE, config))
        defines = {name: value for name, value in step.defines if isinstance(value, int)}
        tile_m, tile_n = 64 * defines["CONSUMERS"] * defines["ROWS"], defines["TILE_N"]
        ring = defines["STAGES"] * (tile_m + tile_n) * defines["TILE_K"] * itemsize
        block = 64 * (64 if defines["SWAPPED"] else defines["BLOCK_N"]) * itemsize
        blocks = 2 * defines["CONSUMERS"] * block
        needed = max(ring, tile_m * (tile_n + 8) * 4) if shares(config) > 1 else ring + blocks
        assert step.shared_bytes >= 1023 + needed
        assert config["blocks"] * (step.shared_bytes + 1024 + 16 * defines["STAGES"]) <= DEVICE.shared_bytes + 1024
        assert defines["BLOCK_N"] * itemsize in (32, 64, 128)
        assert tile_n % defines["BLOCK_N"] == 0
        assert step.block == (128 * defines["CONSUMERS"] + 64, 1, 1)


@pytest.mark.parametrize("direction", list(Direction))
def test_only_tf32_backward_data_lays_the_filter_out_anew(direction: Direction) -> None:
    for kind in KINDS:
        problem = conv(kind, x=(2, 24, 9, 9), w=(40, 24, 3, 3), padding=1, direction=direction)
        if not SOLVER.applicability(problem, DEVICE):
            continue
        for config in SOLVER.default_configs(problem, DEVICE):
            solution = SOLVER.solution(problem, DEVICE, config)
            regions = {region.name: region.bytes for region in solution.workspace.regions}
            anew = kind == "tf32" and direction is DATA
            assert regions.get("filters") == (problem.w.bytes if anew else None)
            assert solution.kernels[0].entry == ("transpose" if anew else PRODUCT)


@pytest.mark.parametrize("entry", [PRODUCT, f"{PRODUCT}_finish"])
def test_steps_give_what_their_kernels_take(entry: str) -> None:
    source = read_source(SOLVER.sources[0]).text
    found = re.search(rf"\b{entry}\((.*?)\)\s*{{", source, re.DOTALL)
    assert found
    wanted = ["pointer" if "*" in parameter else parameter.split()[-2] for parameter in found[1].split(",")]
    given = {
        tuple(_parameter_type(arg) for arg in step.args)
        for problem in LARGE.values()
        for config in sampled(problem)
        for step in SOLVER.solution(problem, DEVICE, config).kernels
        if step.entry == entry
    }
    assert given == {tuple(wanted)}


def _parameter_type(arg: Argument) -> str:
    if isinstance(arg, Scalar):
        return {"int32": "int", "uint32": "unsigned", "int64": "int64"}[arg.ctype]
    if isinstance(arg, Struct):
        return arg.type.name
    return "TensorMap" if isinstance(arg, TensorMap) else "pointer"


def complaints(tensor_map: TensorMap) -> list[str]:
    """What the driver would refuse of a map, or the kernels could not use.

    Source: CUDA driver API, cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col; PTX ISA, tensors in im2col mode.
    """
    itemsize = {"float16": 2, "bfloat16": 2, "float32": 4, "tfloat32": 4}[tensor_map.element]
    copy = tensor_map.copy
    if isinstance(copy, Im2col):
        innermost = copy.channels
        rules = {
            "rank": len(tensor_map.sizes) == 4 and len(copy.lower) == len(copy.upper) == len(copy.strides) == 2,
            "corners": all(-128 <= corner <= 127 for corner in (*copy.lower, *copy.upper)),
            "channels": 1 <= copy.channels <= 256,
            "pixels": 1 <= copy.pixels <= 1024,
            "strides": all(1 <= stride <= 8 for stride in copy.strides),
        }
    else:
        innermost = copy.sizes[0]
        rules = {
            "rank": len(copy.sizes) == len(tensor_map.sizes) == 3,
            "box": all(1 <= size <= 256 for size in copy.sizes),
        }
    rules |= {
        "sizes": all(1 <= size <= 2**32 for size in tensor_map.sizes),
        "strides_bytes": all(0 < stride < 2**40 and stride % 16 == 0 for stride in tensor_map.strides_bytes),
        "as many strides": len(tensor_map.strides_bytes) == len(tensor_map.sizes) - 1,
        "whole swizzles": innermost * itemsize == tensor_map.swizzle_bytes,
        "swizzle": tensor_map.swizzle_bytes in (32, 64, 128),
        "offset": tensor_map.pointer.offset_bytes % 16 == 0,
    }
    return [name for name, is_kept in rules.items() if not is_kept]


@pytest.mark.parametrize("problem", (LARGE | ACCEPTED).values(), ids=LARGE | ACCEPTED)
def test_maps_are_what_the_driver_takes(problem: ProblemDescription) -> None:
    for config in sampled(problem):
        for tensor_map in maps_of(product_of(SOLVER.solution(problem, DEVICE, config))):
            assert complaints(tensor_map) == [], tensor_map


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_loaded_is_rounded_to_tf32(kind: str) -> None:
    problem = conv(kind, x=(2, 24, 9, 9), w=(40, 24, 3, 3), padding=1)
    element = problem.x.dtype.value
    for config in SOLVER.default_configs(problem, DEVICE):
        rows, columns, target = maps_of(product_of(SOLVER.solution(problem, DEVICE, config)))
        assert rows.element == columns.element == ("tfloat32" if kind == "tf32" else element)
        assert target.element == element


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("direction", list(Direction))
def test_copies_and_stores_keep_to_a_group(direction: Direction, taps: int) -> None:
    """Copies take whole parts of a group's channels, or boxes that end with it; stores, cut off at its end or not."""
    kinds = set()
    for groups, c, k in ((2, 48, 64), (4, 16, 40), (3, 64, 192)):
        shape = {"x": (2, groups * c, 9, 9), "w": (groups * k, c, taps, taps)}
        problem = conv(**shape, padding=taps // 2, groups=groups, direction=direction)
        if not SOLVER.applicability(problem, DEVICE):
            continue
        for config in sampled(problem):
            rows, columns, target = maps_of(product_of(SOLVER.solution(problem, DEVICE, config)))
            pixels = columns if direction is WEIGHTS or config["swapped"] else rows
            kinds.add(type(pixels.copy))
            of_group = k if direction is DATA else c
            if isinstance(pixels.copy, Box):
                assert pixels.sizes[:2] == (of_group, groups)
            elif direction is not WEIGHTS:
                assert of_group % pixels.copy.channels == 0
            if direction is WEIGHTS:
                assert isinstance(target.copy, Box)
                assert config["splits"] > 1 or shares(config) > 1 or k % target.copy.sizes[-1] == 0
            else:
                assert target.sizes[:2] == (c if direction is DATA else k, groups)
    assert kinds == {Box if taps == 1 else Im2col}


def tiling(**values: ConfigValue) -> Config:
    """A small tile of one block, except for what is given."""
    plain = {"consumers": 1, "rows": 1, "tile_n": 64, "depth_bytes": 128, "stages": 3, "splits": 1, "blocks": 1}
    return Config({**plain, "cluster": "1x1x1", "swapped": 0, **values})


WIDE = conv(x=(4, 256, 16, 16), w=(256, 256, 3, 3), padding=1)
WIDE_WEIGHTS = conv(x=(4, 256, 16, 16), w=(256, 256, 3, 3), padding=1, direction=WEIGHTS)
WIDE_TF32 = conv("tf32", x=(4, 256, 16, 16), w=(256, 256, 3, 3), padding=1)
STRIDED = conv(x=(4, 256, 16, 16), w=(256, 256, 3, 3), padding=1, stride=2, direction=DATA)
NARROW = conv(x=(4, 64, 8, 8), w=(64, 64, 1, 1))
GROUPS_OF_WEIGHTS = conv(x=(8, 96, 16, 16), w=(144, 48, 3, 3), padding=1, groups=2, direction=WEIGHTS)
SHALLOW = tiling(depth_bytes=32, tile_n=256)
EDGES: dict[str, tuple[ProblemDescription, Config, dict[str, ConfigValue]]] = {
    "swapped weights": (WIDE_WEIGHTS, tiling(), {"swapped": 1}),
    "swapped TF32": (WIDE_TF32, tiling(), {"swapped": 1}),
    "swapped and split": (WIDE, tiling(swapped=1), {"splits": 2}),
    "swapped in clusters of rows": (WIDE, tiling(swapped=1), {"cluster": "2x1x1"}),
    "swapped in clusters of columns": (WIDE, tiling(swapped=1), {"cluster": "1x2x1"}),
    "swapped in clusters of depth": (WIDE, tiling(swapped=1), {"cluster": "1x1x2"}),
    "swapped with two blocks of rows": (WIDE, tiling(swapped=1, consumers=2), {"rows": 2}),
    "swapped with few pixels a tile": (WIDE, tiling(swapped=1), {"tile_n": 32}),
    "swapped with half a block of pixels": (WIDE, tiling(swapped=1), {"tile_n": 96}),
    "swapped strided data": (STRIDED, tiling(), {"swapped": 1}),
    "strided data in clusters of rows": (STRIDED, tiling(), {"cluster": "2x1x1"}),
    "strided data in clusters of columns": (STRIDED, tiling(), {"cluster": "1x2x1"}),
    "shares and splits": (WIDE, tiling(cluster="1x1x2"), {"splits": 2}),
    "splits and shares": (WIDE, tiling(splits=4), {"cluster": "1x1x4"}),
    "shares of one step": (NARROW, tiling(depth_bytes=32, cluster="1x1x2"), {"cluster": "1x1x4"}),
    "splits of one step": (NARROW, tiling(depth_bytes=32, splits=2), {"splits": 4}),
    "clusters of rows beyond the tensor": (
        conv(x=(1, 64, 8, 8), w=(64, 64, 1, 1)),
        tiling(),
        {"cluster": "2x1x1"},
    ),
    "clusters of columns beyond the tensor": (NARROW, tiling(tile_n=32, cluster="1x2x1"), {"tile_n": 64}),
    "more rows than consumers": (WIDE, tiling(), {"rows": 2}),
    "more sums than registers": (WIDE, tiling(consumers=2, rows=2, tile_n=128), {"tile_n": 192}),
    "more sums than registers of two blocks": (WIDE, tiling(consumers=2, tile_n=192), {"blocks": 2}),
    "more stages than shared memory": (WIDE, tiling(tile_n=256, stages=4), {"stages": 6}),
    "more blocks than shared memory": (WIDE, tiling(tile_n=64, stages=8), {"blocks": 2}),
    "shallow weights": (WIDE_WEIGHTS, tiling(), {"depth_bytes": 64}),
    "steps mostly beyond the depth": (
        conv(x=(4, 32, 16, 16), w=(64, 32, 3, 3)),
        tiling(depth_bytes=64),
        {"depth_bytes": 128},
    ),
    "steps into the next group": (
        conv(x=(4, 96, 16, 16), w=(128, 48, 3, 3), groups=2),
        tiling(depth_bytes=32),
        {"depth_bytes": 64},
    ),
    "tiles mostly beyond the columns": (NARROW, tiling(), {"tile_n": 128}),
    "tiles mostly beyond the rows": (conv(x=(1, 64, 8, 8), w=(64, 64, 1, 1)), tiling(), {"consumers": 2}),
    "stores into the next group's filters": (GROUPS_OF_WEIGHTS, tiling(splits=2), {"splits": 1}),
    "stores into the next group's filters, added": (
        GROUPS_OF_WEIGHTS,
        tiling(cluster="1x1x2"),
        {"cluster": "1x1x1"},
    ),
    "columns beyond 32 bits": (conv(x=(2**25 - 1, 8, 1, 8), w=(8, 8, 1, 1), layout="NCHW"), SHALLOW, {"tile_n": 192}),
    "parts of more than a gigabyte": (
        conv(x=(64, 256, 64, 64), w=(256, 256, 3, 3), padding=1),
        tiling(splits=4),
        {"splits": 8},
    ),
}


@pytest.mark.parametrize(("problem", "config", "change"), EDGES.values(), ids=EDGES)
def test_one_value_more_is_refused(problem: ProblemDescription, config: Config, change: dict[str, ConfigValue]) -> None:
    SOLVER.check_config(problem, DEVICE, config)
    beyond = changed(config, **change)
    assert all(value in SOLVER.parameters[name] for name, value in beyond.items())
    with pytest.raises(InvalidConfigError, match="cannot run"):
        SOLVER.check_config(problem, DEVICE, beyond)


@pytest.mark.parametrize(
    "asked", [{}, {"direction": DATA, "dtype": "float32", "math": "tf32"}], ids=["forward", "tf32 data"]
)
def test_steps_into_the_next_group_are_boxes_along_the_depth_alone(asked: dict[str, object]) -> None:
    """One tap alone reads zeros beyond its group, and a filter whose depth lies side by side."""
    shape = {"x": (4, 144, 16, 16), "w": (144, 72, 1, 1), "groups": 2, **asked}
    config = tiling(depth_bytes=128)
    assert SOLVER.is_valid_config(conv(**shape), DEVICE, config)
    for walked in ({"padding": 1}, {"w": (144, 72, 3, 1)}):
        assert not SOLVER.is_valid_config(conv(**shape | walked), DEVICE, config)
    across = {"direction": DATA, "dtype": "float16", "math": "ieee"}
    assert not SOLVER.is_valid_config(conv(**shape | across), DEVICE, config)


@st.composite
def problems(draw: st.DrawFn, most: int, extent: int, batch: int) -> ProblemDescription:
    """A problem of any direction that it serves.

    Args:
        most: channels and filters of a group, in multiples of 16 bytes.
        extent: pixels of an axis besides those that a filter needs.
        batch: images.
    """
    direction, kind = draw(st.sampled_from(list(Direction))), draw(st.sampled_from(["float16", "tf32"]))
    rank, groups, is_pointwise = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.booleans())
    unit = 8 if kind == "float16" else 4
    c, k = (unit * draw(st.integers(1, most)) for _ in range(2))
    taps = [1 if is_pointwise else draw(st.integers(1, 3)) for _ in range(rank)]
    dilation = [draw(st.integers(1, 3)) for _ in range(rank)]
    padding = [[0 if is_pointwise else draw(st.integers(0, 4)) for _ in range(2)] for _ in range(rank)]
    reach = [step * (tap - 1) + 1 for step, tap in zip(dilation, taps, strict=True)]
    least = [max(1, size - sum(pads)) for size, pads in zip(reach, padding, strict=True)]
    strides = st.just(1) if is_pointwise and draw(st.booleans()) else st.integers(1, 2 if direction is DATA else 3)
    last, first = (Layout.of(rank, channels_last=is_last) for is_last in (True, False))
    alone = "x" if direction is DATA else "y"
    layouts: list[Any] = [last, {**dict.fromkeys("xwy", last), alone: first}]
    layout = draw(st.sampled_from([*layouts, first] if is_pointwise else layouts))
    problem = ProblemDescription.convolution(
        x=(draw(st.integers(1, batch)), groups * c, *(draw(st.integers(size, size + extent)) for size in least)),
        w=(groups * k, c, *taps),
        padding=padding,
        stride=[draw(strides) for _ in range(rank)],
        dilation=dilation,
        groups=groups,
        direction=direction,
        layout=layout,
        dtype=KINDS[kind]["dtype"],
        math=KINDS[kind].get("math", MathMode.IEEE),
    )
    assume(SOLVER.applicability(problem, DEVICE))
    return problem


DEVICES = (
    DEVICE,
    replace(DEVICE, sm_count=1),
    replace(DEVICE, sm_count=78),
    replace(DEVICE, shared_bytes=100 << 10),
)


@settings(max_examples=200)
@given(problem=problems(most=200, extent=200, batch=128), device=st.sampled_from(DEVICES))
def test_default_configurations_are_few_and_valid(problem: ProblemDescription, device: Device) -> None:
    defaults = SOLVER.default_configs(problem, device)
    assert len(set(defaults)) == len(defaults) <= 8
    assert defaults or not SOLVER.applicability(problem, device)
    for config in defaults:
        assert set(config) == set(SOLVER.parameters)
        assert all(config[name] in values for name, values in SOLVER.parameters.items())
        SOLVER.check_config(problem, device, config)
        assert 0 < SOLVER.estimate_ms(problem, device, config) < math.inf


def in_memory(tensor: Array, layout: Layout) -> Array:
    """Elements in order."""
    return np.ascontiguousarray(np.moveaxis(tensor, 1, -1) if layout.channels_last else tensor).ravel()


def laid_out_anew(problem: ProblemDescription, w: Array) -> Array:
    """The filter turned for each group: [group, tap, c, k]."""
    groups, c = problem.groups, problem.c // problem.groups
    return np.ascontiguousarray(w.reshape(groups, -1, c, math.prod(problem.filter)).transpose(0, 3, 2, 1)).ravel()


def drawn_inputs(problem: ProblemDescription, seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.integers(-3, 4, problem.tensor(name).shape).astype(np.float64)
        for name in problem.direction.inputs
    }


def computed(problem: ProblemDescription, config: Config, inputs: dict[str, Array]) -> Array:
    """The result's memory, from what a configuration's launch reaches by its maps; each place is written once."""
    memory = {name: in_memory(values, problem.tensor(name).layout) for name, values in inputs.items()}
    if problem.direction is DATA:
        memory["filters"] = laid_out_anew(problem, inputs["w"])
    solution = SOLVER.solution(problem, DEVICE, config)
    step = product_of(solution)
    parts = Launch(step, named_args(step), memory).run(problem.output.size)
    [written] = [arg.buffer for arg in step.args if isinstance(arg, Pointer)]
    if written == "partials":
        [region] = [region for region in solution.workspace.regions if region.name == "partials"]
        assert region.bytes == 4 * parts.size
    if WgmmaProduct.of(problem).nchw is not NchwTensors.OUTPUT:
        viewed(maps_of(step)[2], parts[: problem.output.size])  # covers the result
    return parts.reshape(-1, problem.output.size).sum(axis=0)


@settings(max_examples=80)
@given(problem=problems(most=5, extent=6, batch=2), data=st.data(), seed=st.integers(0, 99))
def test_launches_compute_the_convolution(problem: ProblemDescription, data: st.DataObject, seed: int) -> None:
    inputs = drawn_inputs(problem, seed)
    config = data.draw(st.sampled_from(list(drawn_wgmma(SOLVER, problem, DEVICE, 4, 1))))
    expected = in_memory(reference_on_host(problem, **inputs), problem.output.layout)
    np.testing.assert_array_equal(computed(problem, config, inputs), expected)


def tiled(
    shapes: dict[str, dict[str, Any]], kinds: list[str], direction: Direction, **common: Any
) -> dict[str, ProblemDescription]:
    return {
        f"{name} {kind} {direction.value}": conv(kind, **fields, direction=direction, **common)
        for name, fields in shapes.items()
        for kind in kinds
    }


WALKED_GROUPS = {"walked groups": {"x": (2, 160, 12, 11), "w": (160, 80, 3, 2), "padding": 1, "groups": 2}}
POINTWISE_GROUPS = {"pointwise groups": {"x": (2, 528, 16, 17), "w": (576, 264, 1, 1), "groups": 2}}
OF_PIXELS: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 72, 12, 11), "w": (136, 72, 3, 3), "padding": ((1, 0), (2, 1))},
    "walked far": {"x": (1, 136, 19, 17), "w": (136, 136, 2, 3), "padding": 3, "dilation": 3},
    "pointwise": {"x": (2, 264, 16, 17), "w": (328, 264, 1, 1)},
}
OF_PHASES: dict[str, dict[str, Any]] = {
    "strided": {"x": (2, 136, 23, 24), "w": (136, 136, 3, 3), "padding": ((1, 0), (2, 1)), "stride": 2},
    "strided columns": {"x": (2, 72, 12, 23), "w": (264, 72, 2, 3), "padding": 1, "stride": (1, 2), "dilation": (3, 1)},
    "strided rows": {"x": (2, 72, 25, 12), "w": (264, 72, 4, 1), "padding": ((0, 3), (0, 0)), "stride": (2, 1)},
    "strided far": {"x": (2, 72, 23, 25), "w": (264, 72, 3, 2), "padding": 3, "stride": 2, "dilation": (3, 2)},
    "strided points": {"x": (2, 136, 21, 26), "w": (520, 136, 1, 1), "stride": 2},
    "strided groups": {"x": (2, 144, 21, 22), "w": (288, 72, 3, 2), "padding": 1, "stride": 2, "groups": 2},
}
OF_WEIGHTS: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 72, 24, 23), "w": (136, 72, 2, 3), "padding": 1},
    "strided": {
        "x": (4, 40, 33, 35),
        "w": (72, 40, 3, 3),
        "padding": ((1, 0), (2, 1)),
        "stride": 2,
        "dilation": (2, 1),
    },
    "whole groups": {"x": (4, 144, 17, 18), "w": (256, 72, 2, 1), "padding": ((1, 0), (0, 0)), "groups": 2},
    "pointwise": {"x": (4, 264, 17, 18), "w": (136, 264, 1, 1)},
    "pointwise whole groups": {"x": (4, 144, 17, 18), "w": (256, 72, 1, 1), "groups": 2},
}
CUT_GROUPS: dict[str, dict[str, Any]] = {
    "cut groups": {"x": (4, 80, 17, 18), "w": (144, 40, 1, 3), "padding": ((0, 0), (0, 2)), "groups": 2},
    "pointwise cut groups": {"x": (4, 144, 17, 18), "w": (144, 72, 1, 1), "groups": 2},
}
IN_NCHW = {"planes": {"x": (6, 264, 16, 17), "w": (328, 264, 1, 1)}}
IN_NCHW_OF_GROUPS = {"planes of groups": {"x": (6, 512, 12, 14), "w": (512, 256, 1, 1), "groups": 2}}
IN_NCHW_OF_ROWS = {
    "planes of rows": {"x": (8, 72, 18, 10), "w": (136, 72, 3, 3), "padding": ((0, 0), (0, 0))},
    "planes of strided rows": {"x": (8, 80, 31, 15), "w": (256, 40, 3, 2), "padding": 1, "stride": 2, "groups": 2},
}
IN_NCHW_OF_RESULTS = {
    "odd planes": {"x": (2, 136, 11, 13), "w": (136, 136, 3, 3), "padding": 1},
    "even planes": {"x": (2, 136, 11, 14), "w": (136, 136, 3, 3), "padding": 1},
    "whole planes": {"x": (2, 136, 12, 14), "w": (136, 136, 3, 3), "padding": 1},
    "planes of walked groups": {"x": (3, 256, 9, 11), "w": (384, 128, 2, 3), "padding": 1, "groups": 2},
}
TILED = {
    **tiled(OF_PIXELS | WALKED_GROUPS | POINTWISE_GROUPS, ["float16"], FORWARD),
    **tiled(OF_PIXELS | WALKED_GROUPS | POINTWISE_GROUPS, ["float16"], DATA),
    **tiled(OF_PHASES, ["float16", "tf32"], DATA),
    **tiled(WALKED_GROUPS | POINTWISE_GROUPS, ["tf32"], FORWARD),
    **tiled(WALKED_GROUPS | POINTWISE_GROUPS, ["tf32"], DATA),
    **tiled(OF_WEIGHTS | CUT_GROUPS, ["float16"], WEIGHTS),
    **tiled(IN_NCHW | IN_NCHW_OF_GROUPS, ["float16"], FORWARD, layout="NCHW"),
    **tiled(IN_NCHW | IN_NCHW_OF_GROUPS, ["float16"], DATA, layout="NCHW"),
    **tiled(IN_NCHW | IN_NCHW_OF_GROUPS, ["float16", "tf32"], WEIGHTS, layout="NCHW"),
    **tiled(IN_NCHW_OF_RESULTS, ["float16", "tf32"], FORWARD, layout=ONE_FIRST[FORWARD]),
    **tiled(IN_NCHW_OF_RESULTS, ["float16", "tf32"], DATA, layout=ONE_FIRST[DATA]),
    **tiled(IN_NCHW_OF_ROWS, ["float16"], WEIGHTS, layout=ONE_FIRST[WEIGHTS]),
}
TF32 = [name for name in TILED if " tf32 " in name]
OF_16_BITS = [name for name in TILED if name not in TF32]
SAMPLED = {*OF_16_BITS[::2], *TF32[::4]}
"""Those of the fast tests; `full_matrix` has all."""


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem, id=name, marks=[] if name in SAMPLED else pytest.mark.full_matrix)
        for name, problem in TILED.items()
    ],
)
def test_each_kind_of_tiling_computes_the_convolution(problem: ProblemDescription) -> None:
    """Many tiles, steps and parts, none of which are whole."""
    inputs = drawn_inputs(problem, 7)
    expected = in_memory(reference_on_host(problem, **inputs), problem.output.layout)
    missing = set()
    for name, held in WGMMA_TILINGS.items():
        configs = drawn(SOLVER, problem, DEVICE, 3, held)[-1:]
        if not configs:
            missing.add(name)
        for config in configs:
            np.testing.assert_array_equal(computed(problem, config, inputs), expected, err_msg=config.json)
    assert missing == lacking_tilings(problem)


@pytest.mark.parametrize(
    "problem", [pytest.param(problem, id=name) for name, problem in TILED.items() if problem.groups > 1]
)
def test_groups_do_not_meet(problem: ProblemDescription) -> None:
    """What is not a number stays in its group."""
    groups, output = problem.groups, problem.direction.output
    inputs = drawn_inputs(problem, 8)
    expected = reference_on_host(problem, **inputs)

    def first_group(tensor: Array, name: str) -> Array:
        axis = 0 if name == "w" else 1
        return np.take(tensor, range(tensor.shape[axis] // groups), axis=axis)

    for name in inputs:
        kept = first_group(inputs[name], name).copy()
        inputs[name][:] = np.nan
        inputs[name][tuple(slice(size) for size in kept.shape)] = kept
    is_last = problem.output.layout.channels_last
    shape = np.moveaxis(expected, 1, -1).shape if is_last else expected.shape
    every = [config for held in WGMMA_TILINGS.values() for config in drawn(SOLVER, problem, DEVICE, 1, held)]
    for config in dict.fromkeys([every[0], every[-1]]):
        result = computed(problem, config, inputs).reshape(shape)
        result = np.moveaxis(result, -1, 1) if is_last else result
        found, wanted = first_group(result, output), first_group(expected, output)
        np.testing.assert_array_equal(found, wanted, err_msg=config.json)
