"""ConvImplicitGemmWgmma without a GPU: what it refuses, what its tensor maps reach, and what its steps add up to."""

from __future__ import annotations

import functools
import importlib.resources
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawn_configs import drawn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from miofind.device import Device
from miofind.errors import InvalidConfigError
from miofind.problem import Direction, Layout, MathMode, ProblemDescription
from miofind.reference import reference_on_host
from miofind.solution import Box, Config, ConvSolution, Im2col, KernelStep, Pointer, Scalar, TensorMap
from miofind.solver import solver_by_id

Array = NDArray[np.float64]

DEVICE = Device.virtual("90a")
SOLVER = solver_by_id("ConvImplicitGemmWgmma")
PRODUCT = "implicit_gemm_wgmma"
FORWARD, DATA, WEIGHTS = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS
KINDS: dict[str, dict[str, str]] = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "tf32": {"dtype": "float32", "math": "tf32"},
}


def conv(kind: str = "float16", **fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**{"layout": Layout.NHWC, **KINDS[kind], **fields})


LARGE: dict[str, ProblemDescription] = {
    "3x3": conv(x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1),
    "few pixels": conv(x=(1, 512, 7, 7), w=(512, 512, 3, 3), padding=1),
    "data": conv(x=(32, 128, 28, 28), w=(128, 128, 3, 3), padding=1, direction=DATA),
    "weights": conv(x=(32, 128, 28, 28), w=(128, 128, 3, 3), padding=1, direction=WEIGHTS),
    "groups": conv(x=(8, 256, 28, 28), w=(256, 64, 3, 3), padding=1, groups=4),
    "weights of groups": conv(x=(8, 192, 14, 14), w=(192, 48, 3, 3), padding=1, groups=4, direction=WEIGHTS),
    "tf32": conv("tf32", x=(16, 256, 14, 14), w=(512, 256, 1, 1), stride=2),
    "tf32 data": conv("tf32", x=(4, 64, 14, 14), w=(72, 64, 3, 3), padding=1, direction=DATA),
    "bfloat16": conv("bfloat16", x=(4, 24, 35, 33), w=(40, 24, 5, 5), padding=2, stride=2, dilation=2),
}
each_large = pytest.mark.parametrize("problem", LARGE.values(), ids=LARGE)


@functools.cache
def sampled(problem: ProblemDescription) -> list[Config]:
    """The default configurations and some of all."""
    return list(dict.fromkeys([*SOLVER.default_configs(problem, DEVICE), *drawn(SOLVER, problem, DEVICE, 60)]))


def product_of(solution: ConvSolution) -> KernelStep:
    [step] = [step for step in solution.kernels if step.entry == PRODUCT]
    return step


def maps_of(step: KernelStep) -> tuple[TensorMap, TensorMap, TensorMap]:
    rows, columns, target = (arg for arg in step.args if isinstance(arg, TensorMap))
    return rows, columns, target


def parameters_of(entry: str) -> list[tuple[str, str]]:
    """Types and names of a kernel's parameters, from its source."""
    source = importlib.resources.files("miofind.kernels_src").joinpath(SOLVER.sources[0]).read_text(encoding="utf-8")
    found = re.search(rf"\b{entry}\((.*?)\)\s*{{", source, re.DOTALL)
    assert found, entry
    return [(words[-2], words[-1].lstrip("*")) for text in found[1].split(",") if (words := text.split())]


def named_args(step: KernelStep) -> dict[str, Any]:
    """Values of a step's scalars by the names of its kernel's parameters."""
    names = [name for _, name in parameters_of(step.entry)]
    return {name: arg.value for name, arg in zip(names, step.args, strict=True) if isinstance(arg, Scalar)}


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
    "strided data": (conv(x=(2, 16, 8, 8), w=(16, 16, 3, 3), stride=(1, 2), direction=DATA), "stride 1"),
    "long strides": (conv(x=(2, 16, 40, 40), w=(16, 16, 1, 1), stride=(1, 9)), "stride (1, 9)"),
    "wide padding": (conv(x=(2, 16, 8, 8), w=(16, 16, 1, 1), padding=200), "padding"),
    "wide filters": (conv(x=(2, 16, 600, 4), w=(16, 16, 2, 1), dilation=(300, 1)), "filter is too large"),
    "wide filters within padding": (
        conv(x=(2, 16, 600, 4), w=(16, 16, 2, 1), dilation=(300, 1), padding=((0, 200), (0, 0))),
        "reach",
    ),
    "many elements": (conv(x=(1, 8, 2**14, 2**14), w=(8, 8, 1, 1)), "32 bits"),
    "channels first": (conv(x=(2, 16, 8, 8), w=(16, 16, 3, 3), layout="NCHW"), "NCHW"),
    "channels first for one": (
        conv(x=(2, 16, 8, 8), w=(16, 16, 3, 3), layout={"x": "NHWC", "w": "NCHW", "y": "NHWC"}),
        "w is NCHW",
    ),
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
    "one dimension": conv(x=(2, 16, 50), w=(24, 16, 5), layout=Layout.NWC, direction=WEIGHTS),
    "groups of 16": conv(x=(2, 64, 8, 8), w=(64, 16, 3, 3), groups=4),
    "groups of other sizes": conv(x=(2, 64, 8, 8), w=(96, 32, 3, 3), groups=2, direction=DATA),
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
def test_parts_are_added_in_order_in_a_workspace_of_their_own(problem: ProblemDescription) -> None:
    found = set()
    for config in sampled(problem):
        solution, splits = SOLVER.solution(problem, DEVICE, config), config["splits"]
        found.add(splits > 1)
        assert solution.deterministic
        regions = {region.name: region.bytes for region in solution.workspace.regions}
        written = [arg.buffer for arg in product_of(solution).args if isinstance(arg, Pointer)]
        if splits == 1:
            assert "parts" not in regions
            assert product_of(solution) == solution.kernels[-1]
            assert "parts" not in written
            continue
        assert regions["parts"] == 4 * splits * problem.output.size
        assert SOLVER.workspace_bytes(problem, DEVICE, config) >= regions["parts"]
        assert written == ["parts"]
        add = solution.kernels[-1]
        assert [arg.buffer for arg in add.args if isinstance(arg, Pointer)] == ["parts", problem.direction.output]
        assert named_args(add) == {"count": problem.output.size, "splits": splits}
        assert 4 * add.grid[0] * add.block[0] >= problem.output.size
        assert problem.output.size % 4 == 0
    assert True in found


@each_large
def test_every_part_has_a_step(problem: ProblemDescription) -> None:
    """A part without one would free a stage that was never filled."""
    for config in sampled(problem):
        named = named_args(product_of(SOLVER.solution(problem, DEVICE, config)))
        assert named["splits"] == config["splits"] <= named["steps"]


@pytest.mark.parametrize("problem", (LARGE | ACCEPTED).values(), ids=LARGE | ACCEPTED)
def test_kernels_are_told_how_the_copies_walk(problem: ProblemDescription) -> None:
    planar = problem.lifted(2)
    for config in SOLVER.default_configs(problem, DEVICE):
        step = product_of(SOLVER.solution(problem, DEVICE, config))
        named = named_args(step)
        [walk] = [tensor_map for tensor_map in maps_of(step) if isinstance(tensor_map.copy, Im2col)]
        for axis, (name, taps) in enumerate((("w", "taps_x"), ("h", "taps_y"))):
            low, high, stride = (corner[axis] for corner in (walk.copy.lower, walk.copy.upper, walk.copy.strides))
            assert (named[f"low_{name}"], named[f"stride_{name}"]) == (low, stride)
            assert named[f"dilation_{name}"] == planar.conv.dilation[1 - axis]
            assert named[taps] == planar.filter[1 - axis]
            positions = range(low, walk.sizes[1 + axis] + high, stride)
            assert len(positions) == named["width" if name == "w" else "height"]
        assert named["groups"] == problem.groups
        assert named["items"] == named["tiles_m"] * named["tiles_n"] * named["groups"] * named["splits"]


@each_large
def test_grids_are_whole_clusters(problem: ProblemDescription) -> None:
    sizes = set()
    for config in sampled(problem):
        step = product_of(SOLVER.solution(problem, DEVICE, config))
        defines = dict(step.defines)
        cluster = int(defines["CLUSTER_M"]) * int(defines["CLUSTER_N"])
        sizes.add(cluster)
        assert step.grid[0] % cluster == 0
        assert cluster <= step.grid[0] <= cluster * named_args(step)["items"]
    assert len(sizes) > 1


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
            assert solution.kernels[0].entry == ("transpose_filters" if anew else PRODUCT)


@pytest.mark.parametrize("entry", [PRODUCT, "add_parts", "transpose_filters"])
def test_steps_give_what_their_kernels_take(entry: str) -> None:
    ctypes = {"int": "int32", "unsigned": "uint32", "int64": "int64"}
    seen = 0
    for problem in LARGE.values():
        for config in sampled(problem):
            for step in SOLVER.solution(problem, DEVICE, config).kernels:
                if step.entry != entry:
                    continue
                seen += 1
                for (wanted, name), arg in zip(parameters_of(entry), step.args, strict=True):
                    if isinstance(arg, Scalar):
                        assert arg.ctype == ctypes[wanted], name
                    elif isinstance(arg, TensorMap):
                        assert wanted == "TensorMap", name
                    else:
                        assert wanted.endswith("*"), name
    assert seen


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


@pytest.mark.parametrize("direction", list(Direction))
def test_copies_and_stores_keep_to_a_group(direction: Direction) -> None:
    """Copies take whole parts of a group's channels; stores, cut off at the tensor's end alone, of its filters."""
    for groups, c, k in ((2, 48, 64), (4, 16, 40), (3, 64, 192)):
        problem = conv(x=(2, groups * c, 9, 9), w=(groups * k, c, 3, 3), padding=1, groups=groups, direction=direction)
        if not SOLVER.applicability(problem, DEVICE):
            continue
        for config in sampled(problem):
            rows, _, target = maps_of(product_of(SOLVER.solution(problem, DEVICE, config)))
            if direction is WEIGHTS:
                assert isinstance(target.copy, Box)
                assert config["splits"] > 1 or k % target.copy.sizes[-1] == 0
            else:
                assert isinstance(rows.copy, Im2col)
                assert (c if direction is FORWARD else k) % rows.copy.channels == 0


@st.composite
def served(draw: st.DrawFn) -> ProblemDescription:
    """A small problem of any direction that it serves."""
    direction, kind = draw(st.sampled_from(list(Direction))), draw(st.sampled_from(["float16", "tf32"]))
    rank, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    unit = 8 if kind == "float16" else 4
    c, k = (unit * draw(st.integers(1, 4)) for _ in range(2))
    taps = [draw(st.integers(1, 3)) for _ in range(rank)]
    dilation = [draw(st.integers(1, 3)) for _ in range(rank)]
    padding = [[draw(st.integers(0, 4)) for _ in range(2)] for _ in range(rank)]
    reach = [step * (tap - 1) + 1 for step, tap in zip(dilation, taps, strict=True)]
    least = [max(1, size - sum(pads)) for size, pads in zip(reach, padding, strict=True)]
    problem = ProblemDescription.convolution(
        x=(draw(st.integers(1, 2)), groups * c, *(draw(st.integers(size, size + 6)) for size in least)),
        w=(groups * k, c, *taps),
        padding=padding,
        stride=1 if direction is DATA else [draw(st.integers(1, 3)) for _ in range(rank)],
        dilation=dilation,
        groups=groups,
        direction=direction,
        layout=Layout.of(rank, channels_last=True),
        dtype=KINDS[kind]["dtype"],
        math=KINDS[kind].get("math", MathMode.IEEE),
    )
    assume(SOLVER.applicability(problem, DEVICE))
    return problem


def viewed(tensor_map: TensorMap, memory: Array) -> Array:
    """A tensor as its map has it, dimensions outermost first; the map covers its buffer and no more."""
    itemsize = 2 if tensor_map.element in ("float16", "bfloat16") else 4
    assert tensor_map.pointer.offset_bytes == 0
    assert math.prod(tensor_map.sizes) == memory.size
    strides = [stride // itemsize for stride in reversed(tensor_map.strides_bytes)] + [1]
    sizes = tensor_map.sizes[::-1]
    assert sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) < memory.size
    return np.lib.stride_tricks.as_strided(memory, sizes, [memory.itemsize * stride for stride in strides])


def walked(tensor_map: TensorMap, memory: Array, tap: tuple[int, int]) -> Array:
    """What copies give of the pixels that a tap (x, y) meets: (pixels, channels), zeros beyond the tensor."""
    copy, image = tensor_map.copy, viewed(tensor_map, memory)
    assert isinstance(copy, Im2col)
    columns, rows = (
        np.arange(copy.lower[i], tensor_map.sizes[1 + i] + copy.upper[i], copy.strides[i]) + tap[i] for i in range(2)
    )
    met = np.zeros((len(image), len(rows), len(columns), image.shape[-1]))
    inside = [
        np.flatnonzero((at >= 0) & (at < size)) for at, size in ((rows, image.shape[1]), (columns, image.shape[2]))
    ]
    met[np.ix_(range(len(image)), *inside)] = image[np.ix_(range(len(image)), rows[inside[0]], columns[inside[1]])]
    return met.reshape(-1, image.shape[-1])


def in_memory(tensor: Array) -> Array:
    """Elements in order, channels last."""
    return np.ascontiguousarray(np.moveaxis(tensor, 1, -1)).ravel()


def laid_out_anew(problem: ProblemDescription, w: Array) -> Array:
    """The filter as `transpose_filters` leaves it: [group, c, tap, k]."""
    groups, c = problem.groups, problem.c // problem.groups
    return np.ascontiguousarray(w.reshape(groups, -1, c, math.prod(problem.filter)).transpose(0, 2, 3, 1)).ravel()


def summed(problem: ProblemDescription, solution: ConvSolution, memory: dict[str, Array]) -> Array:
    """The result's memory, as the header of the kernel says, from what the maps reach."""
    planar = problem.lifted(2)
    rows, columns, target = maps_of(product_of(solution))
    result = np.zeros(problem.output.size)
    out, groups = viewed(target, result), problem.groups
    c, k = problem.c // groups, problem.k // groups
    for tap in range(math.prod(planar.filter)):
        at = [tap // planar.filter[1], tap % planar.filter[1]]
        if problem.direction is DATA:
            at = [taps - 1 - i for taps, i in zip(planar.filter, at, strict=True)]
        offset = (at[1] * planar.conv.dilation[1], at[0] * planar.conv.dilation[0])
        walk = columns if problem.direction is WEIGHTS else rows
        pixels = walked(walk, memory[walk.pointer.buffer], offset)
        other = rows if problem.direction is WEIGHTS else columns
        factor = viewed(other, memory[other.pointer.buffer])
        for group in range(groups):
            of_c, of_k = slice(group * c, (group + 1) * c), slice(group * k, (group + 1) * k)
            if problem.direction is FORWARD:
                out[:, group] += pixels[:, of_c] @ factor[of_k, tap].T
            elif problem.direction is WEIGHTS:
                out[of_k, tap] += factor[:, group].T @ pixels[:, of_c]
            elif other.pointer.buffer == "w":
                out[:, group] += pixels[:, of_k] @ factor[of_k, tap]
            else:
                out[:, group] += pixels[:, of_k] @ factor[of_c, tap].T
    return result


@settings(max_examples=100, deadline=None)
@given(problem=served(), seed=st.integers(0, 99))
def test_maps_reach_what_the_convolution_joins(problem: ProblemDescription, seed: int) -> None:
    generator = np.random.default_rng(seed)
    inputs = {
        name: generator.integers(-3, 4, problem.tensor(name).shape).astype(np.float64)
        for name in problem.direction.inputs
    }
    memory = {name: in_memory(values) for name, values in inputs.items()}
    if problem.direction is DATA:
        memory["filters"] = laid_out_anew(problem, inputs["w"])
    config = SOLVER.default_configs(problem, DEVICE)[seed % len(SOLVER.default_configs(problem, DEVICE))]
    solution = SOLVER.solution(problem, DEVICE, config)
    expected = in_memory(reference_on_host(problem, **inputs))
    np.testing.assert_array_equal(summed(problem, solution, memory), expected)
