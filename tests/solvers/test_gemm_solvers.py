"""The steps that the GEMM solvers emit, carried out in NumPy and compared with direct convolution."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import pytest
from helpers.problems.struct_fields import fields_of

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.libraries.gemm import MAX_BATCH, BatchedGemm, GemmOperand
from miofind.libraries.matmul_choice import ALGORITHM_ATTRIBUTES, TENSOR_ALIGNMENT, MatmulShape
from miofind.reference.epilogue import activated, apply_epilogue
from miofind.solver.solver import Solver
from miofind.solver.steps import Argument, Config, ConvSolution, KernelStep, MatmulStep, Pointer, Scalar
from miofind.solver.structs import Struct
from miofind.solvers.vendor.column_configs import MAX_STEPS
from miofind.solvers.vendor.gemm1x1 import ConvGemm1x1
from miofind.solvers.vendor.im2col_gemm import ConvIm2colGemm

DEVICE = Device.virtual("90a")
DIRECTIONS = [direction.value for direction in Direction]
NUMPY = {DataType.FLOAT32: np.float32, DataType.FLOAT16: np.float16}


@dataclass(frozen=True)
class Memory:
    """Buffers as bytes, so that wrong offsets and element types show."""

    buffers: dict[str, np.ndarray]

    def view(self, pointer: Pointer, dtype: np.dtype | type) -> np.ndarray:
        data = self.buffers[pointer.buffer]
        assert 0 <= pointer.offset_bytes <= data.nbytes
        usable = (data.nbytes - pointer.offset_bytes) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize
        return data[pointer.offset_bytes : pointer.offset_bytes + usable].view(dtype)


def matrices(flat: np.ndarray, shape: tuple[int, int], ld: int, batch: int, stride: int) -> np.ndarray:
    """(batch, rows, columns) of column-major matrices; fails where they leave the buffer."""
    rows, columns = shape
    assert ld >= rows
    assert (batch - 1) * stride + (columns - 1) * ld + rows <= flat.size
    steps = (stride * flat.itemsize, flat.itemsize, ld * flat.itemsize)
    return np.lib.stride_tricks.as_strided(flat, (batch, rows, columns), steps)


def run_matmul(step: MatmulStep, memory: Memory) -> None:
    ab, c = NUMPY[step.dtype_ab], NUMPY[step.dtype_c]
    shape_a = (step.k, step.m) if step.transpose_a else (step.m, step.k)
    shape_b = (step.n, step.k) if step.transpose_b else (step.k, step.n)
    a = matrices(memory.view(step.a, ab), shape_a, step.lda, step.batch, step.stride_a)
    b = matrices(memory.view(step.b, ab), shape_b, step.ldb, step.batch, step.stride_b)
    out = matrices(memory.view(step.c, c), (step.m, step.n), step.ldc, step.batch, step.stride_c)
    a = (a.transpose(0, 2, 1) if step.transpose_a else a).astype(np.float64)
    b = (b.transpose(0, 2, 1) if step.transpose_b else b).astype(np.float64)
    product = step.alpha * (a @ b)
    if step.epilogue is None:
        out[...] = product + (step.beta * out if step.beta else 0)
        return
    if step.epilogue.bias:
        product += memory.view(step.epilogue.bias, c)[: step.m, np.newaxis]  # one of each row
    if step.epilogue.residual:
        product += matrices(
            memory.view(step.epilogue.residual, c), (step.m, step.n), step.ldc, step.batch, step.stride_c
        )
    out[...] = activated(product, step.epilogue.activation)


SIZES = ("depth", "height", "width")
OUT_SIZES = ("out_depth", "out_height", "out_width")
PADS = ("pad_front", "pad_top", "pad_left")


def kernel_sizes(step: KernelStep) -> tuple[dict[str, int], dict[str, object]]:
    return fields_of(step.args[2]), dict(step.defines)


def taps_of(sizes: dict[str, int], defines: dict[str, object]):
    """(tap index, for each axis the pairs of output and input positions that meet) of every tap."""
    filters = [int(defines[f"FILTER_{axis}"]) for axis in "DHW"]
    for index, taps in enumerate(itertools.product(*map(range, filters))):
        pairs = []
        for axis, size, out_size, pad, tap in zip("DHW", SIZES, OUT_SIZES, PADS, taps, strict=True):
            stride, dilation = int(defines[f"STRIDE_{axis}"]), int(defines[f"DILATION_{axis}"])
            out = np.arange(sizes[out_size])
            position = out * stride - sizes[pad] + tap * dilation
            kept = (position >= 0) & (position < sizes[size])
            assert kept.all() or defines["BOUNDED"] == 1
            pairs.append((out[kept], position[kept]))
        yield index, pairs


def as_view(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    view = array.view()
    view.shape = shape
    return view


def run_columns(step: KernelStep, memory: Memory, images: int) -> None:
    sizes, defines = kernel_sizes(step)
    element, column = NUMPY[DataType(defines["ELEMENT"])], NUMPY[DataType(defines["COLUMN"])]
    folds, last = "_fold_" in step.entry, step.entry.endswith("nhwc")
    columns_at, x_at = step.args[:2] if folds else step.args[1::-1]
    c, cg, taps = sizes["channels"], sizes["group_channels"], math.prod(int(defines[f"FILTER_{a}"]) for a in "DHW")
    ins, outs = (tuple(sizes[name] for name in names) for names in (SIZES, OUT_SIZES))
    x = memory.view(x_at, element)[: images * c * math.prod(ins)]
    groups, depth = c // cg, sizes["padded_elements"]
    flat = memory.view(columns_at, column)[: images * groups * depth * math.prod(outs)]
    if last:
        x = x.reshape(images, *ins, c).transpose(0, 4, 1, 2, 3)
        rows = flat.reshape(images, *outs, groups, depth)[..., : cg * taps]
        columns = as_view(rows, (images, *outs, groups, taps, cg)).transpose(0, 4, 6, 5, 1, 2, 3)
    else:
        x = x.reshape(images, c, *ins)
        rows = flat.reshape(images, groups, depth, *outs)[:, :, : cg * taps]
        columns = as_view(rows, (images, groups, cg, taps, *outs))
    if folds:
        summed = np.zeros(x.shape, np.float64)
    else:
        assert element == column
        flat[...] = 0
    for index, ((od, id_), (oh, ih), (ow, iw)) in taps_of(sizes, defines):
        inside, pixels = np.ix_(id_, ih, iw), np.ix_(od, oh, ow)
        grouped = columns[:, :, :, index]
        if folds:
            part = grouped[(slice(None),) * 3 + pixels].reshape(images, c, len(od), len(oh), len(ow))
            summed[(slice(None),) * 2 + inside] += part
        else:
            part = x[(slice(None),) * 2 + inside]
            grouped[(slice(None),) * 3 + pixels] = part.reshape(images, c // cg, cg, *part.shape[2:])
    if folds:
        x[...] = summed


def covered_images(step: KernelStep) -> int:
    """Images that the launch covers, by the kernel's own decomposition of its blocks."""
    sizes, defines = kernel_sizes(step)
    vector, taps = int(defines["VECTOR"]), math.prod(int(defines[f"FILTER_{a}"]) for a in "DHW")
    (x, y, _), blocks = step.block, step.grid[0]
    assert 1 <= x * y <= 256
    folds, c = "_fold_" in step.entry, sizes["channels"]
    line = [sizes[name] for name in (SIZES if folds else OUT_SIZES)]
    if step.entry.endswith("nchw"):
        assert not folds or vector == 1
        assert folds or sizes["out_width"] % vector == 0
        an_image = -(-math.prod(line) // vector // x) * -(-c // (4 * y if folds else y))
    else:
        read, cg, depth = int(defines["READ"]), sizes["group_channels"], sizes["padded_elements"]
        assert cg % (vector if folds else read) == 0
        assert (taps * cg if folds else depth) % vector == 0
        assert vector % read == 0
        width = c // vector if folds else c // cg * depth // vector
        across = y if folds else (8 if vector > read else 4) * y
        an_image = line[0] * line[1] * -(-width // x) * -(-line[2] // across)
    assert blocks % an_image == 0
    return blocks // an_image


def run_sum(step: KernelStep, memory: Memory) -> None:
    width, depth, size, count = (int(arg.value) for arg in step.args[2:])
    sums = memory.view(step.args[0], np.float32)[: count * size].reshape(count, -1, depth).sum(0, dtype=np.float64)
    memory.view(step.args[1], element_of(step))[: size // depth * width] = sums[:, :width].reshape(-1)


def run_pad(step: KernelStep, memory: Memory) -> None:
    width, depth, size = (int(arg.value) for arg in step.args[2:])
    rows = memory.view(step.args[0], element_of(step))[: size // depth * width].reshape(-1, width)
    memory.view(step.args[1], element_of(step))[:size] = np.pad(rows, ((0, 0), (0, depth - width))).reshape(-1)


def element_of(step: KernelStep) -> type:
    return NUMPY[DataType(dict(step.defines)["ELEMENT"])]


def to_memory(values: np.ndarray, channels_last: bool, dtype: DataType) -> np.ndarray:
    ordered = np.moveaxis(values, 1, -1) if channels_last else values
    return np.ascontiguousarray(ordered, NUMPY[dtype]).reshape(-1).view(np.uint8)


def from_memory(data: np.ndarray, tensor) -> np.ndarray:
    n, c, *spatial = tensor.shape
    flat = data.view(NUMPY[tensor.dtype]).astype(np.float64)
    if tensor.layout.channels_last:
        return np.moveaxis(flat.reshape(n, *spatial, c), -1, 1)
    return flat.reshape(tensor.shape)


def execute(problem: ProblemDescription, solution: ConvSolution, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The output tensor; outputs and workspace begin as NaN."""
    buffers = {}
    for name in ("x", "w", "y"):
        tensor = problem.tensor(name)
        values = inputs.get(name, np.full(tensor.shape, np.nan))
        buffers[name] = to_memory(values, tensor.layout.channels_last, tensor.dtype)
    for operand in problem.operands[3:]:
        buffers[operand.name] = to_memory(
            inputs[operand.name], operand.tensor.layout.channels_last, operand.tensor.dtype
        )
    for region in solution.workspace.regions:
        buffers[region.name] = np.full(region.bytes, 0xFF, np.uint8)
    memory = Memory(buffers)
    for step in solution.steps:
        if isinstance(step, MatmulStep):
            assert step.workspace_bytes == len(buffers.get(step.workspace or "", ()))
            run_matmul(step, memory)
        elif step.entry == "im2col_sum":
            run_sum(step, memory)
        elif step.entry == "im2col_pad":
            run_pad(step, memory)
        else:
            run_columns(step, memory, covered_images(step))
    return from_memory(buffers[problem.direction.output], problem.output)


def direct(problem: ProblemDescription, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Direct convolution in float64, one tap at a time."""
    p = problem.lifted(3)
    lifted = {
        name: inputs.get(name, np.zeros(problem.tensor(name).shape)).reshape(p.tensor(name).shape) for name in "xwy"
    }
    x, w, y = (lifted[name].astype(np.float64) for name in "xwy")
    g, before, after = p.groups, p.conv.pad_before, p.conv.pad_after
    padded = np.pad(x, ((0, 0), (0, 0), *zip(before, after, strict=True)))
    padded = padded.reshape(p.n, g, p.c // g, *padded.shape[2:])
    w = w.reshape(g, p.k // g, p.c // g, *p.filter)
    y = y.reshape(p.n, g, p.k // g, *p.out_spatial)
    for taps in itertools.product(*map(range, p.filter)):
        window = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(taps, p.conv.dilation, p.out_spatial, p.conv.stride, strict=True)
        )
        seen, tap = padded[(slice(None),) * 3 + window], w[(slice(None),) * 3 + taps]
        if p.direction is Direction.FORWARD:
            y += np.einsum("ngcdhw,gkc->ngkdhw", seen, tap)
        elif p.direction is Direction.BACKWARD_DATA:
            seen += np.einsum("ngkdhw,gkc->ngcdhw", y, tap)
        else:
            tap += np.einsum("ngkdhw,ngcdhw->gkc", y, seen)
    inner = tuple(slice(b, b + size) for b, size in zip(before, p.spatial, strict=True))
    outputs = {"x": padded[(slice(None),) * 3 + inner], "w": w, "y": y}
    return outputs[p.direction.output].reshape(problem.output.shape)


def draw(problem: ProblemDescription) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {operand.name: rng.integers(-1, 2, operand.tensor.shape).astype(np.float64) for operand in problem.inputs}


def check(solver: Solver, problem: ProblemDescription, config: Config) -> ConvSolution:
    solver.check_config(problem, DEVICE, config)
    solution = solver.solution(problem, DEVICE, config)
    inputs = draw(problem)
    shaped = {operand.name: inputs[operand.name].reshape(operand.shape) for operand in problem.operands[3:]}
    wanted = apply_epilogue(problem, direct(problem, inputs), shaped)
    np.testing.assert_array_equal(execute(problem, solution, inputs), wanted.astype(NUMPY[problem.output.dtype]))
    for step in solution.steps:
        if isinstance(step, MatmulStep):
            shape = MatmulShape.of(step)
            assert step.dtype_ab.itemsize <= shape.alignment_a <= TENSOR_ALIGNMENT
    assert solver.estimate_ms(problem, DEVICE, config) > 0
    return solution


def check_all(solver: Solver, problem: ProblemDescription, *configs: Config) -> None:
    assert solver.applicability(problem, DEVICE)
    defaults = solver.default_configs(problem, DEVICE)
    assert 1 <= len(defaults) <= 8
    every = dict.fromkeys((*defaults, *solver.configs(problem, DEVICE), *configs))
    for config in every:
        check(solver, problem, config)


SHAPES_1X1 = {
    "plain": {"x": (3, 4, 5, 6), "w": (8, 4, 1, 1)},
    "one_image": {"x": (1, 4, 5, 3), "w": (8, 4, 1, 1)},
    "one_pixel": {"x": (4, 6, 1, 1), "w": (3, 6, 1, 1)},
    "stride": {"x": (3, 8, 7, 8), "w": (6, 8, 1, 1), "stride": (2, 3)},
    "stride_to_one_pixel": {"x": (3, 8, 2, 2), "w": (6, 8, 1, 1), "stride": 2},
    "stride_of_one_pixel": {"x": (3, 8, 1, 1), "w": (6, 8, 1, 1), "stride": 2},
    "groups": {"x": (3, 8, 3, 4), "w": (12, 2, 1, 1), "groups": 4},
    "more_groups_than_images": {"x": (2, 12, 3, 3), "w": (12, 2, 1, 1), "groups": 6},
    "depthwise_stride": {"x": (5, 6, 5, 5), "w": (12, 1, 1, 1), "groups": 6, "stride": 2},
    "1d": {"x": (3, 4, 9), "w": (8, 4, 1), "stride": 2},
    "3d": {"x": (2, 4, 3, 4, 5), "w": (8, 2, 1, 1, 1), "stride": (1, 2, 1), "groups": 2},
}


def problem_of(shape: dict, direction: str, dtype: str, channels_last: bool) -> ProblemDescription:
    rank = len(shape["x"]) - 2
    layout = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}[rank][channels_last]
    return ProblemDescription.convolution(**shape, direction=direction, dtype=dtype, layout=layout)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES_1X1.values(), ids=SHAPES_1X1)
def test_gemm1x1_computes_the_convolution(shape, direction, dtype, channels_last):
    check_all(ConvGemm1x1(), problem_of(shape, direction, dtype, channels_last))


@pytest.mark.parametrize("y_layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("x_layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["plain", "stride", "groups", "more_groups_than_images"])
def test_gemm1x1_mixes_layouts(name, direction, x_layout, y_layout):
    problem = ProblemDescription.convolution(
        **SHAPES_1X1[name], direction=direction, dtype="float16", layout={"x": x_layout, "w": "NCHW", "y": y_layout}
    )
    check_all(ConvGemm1x1(), problem)


def test_gemm1x1_copies_nothing_at_stride_1():
    for direction in ("forward", "backward_data"):
        problem = problem_of(SHAPES_1X1["plain"], direction, "float16", True)
        config = ConvGemm1x1().default_configs(problem, DEVICE)[1]
        solution = ConvGemm1x1().solution(problem, DEVICE, config)
        assert len(solution.steps) == 1
        assert solution.workspace.bytes == 0


def test_gemm1x1_uneven_slots_cover_every_image():
    problem = problem_of({"x": (7, 4, 3, 3), "w": (4, 4, 1, 1)}, "backward_weights", "float16", False)
    for slots in (1, 2, 3, 5, 7):
        check(ConvGemm1x1(), problem, Config.of(slots=slots, algorithm={}, workspace_bytes=0))


SHAPES = {
    "3x3": {"x": (5, 4, 6, 8), "w": (8, 4, 3, 3), "padding": 1},
    "no_padding": {"x": (2, 8, 7, 6), "w": (4, 8, 3, 3)},
    "stride": {"x": (3, 8, 9, 7), "w": (6, 8, 3, 3), "padding": 1, "stride": 2},
    "stride_over_filter": {"x": (2, 4, 9, 9), "w": (4, 4, 2, 2), "stride": 3},
    "dilation": {"x": (2, 4, 9, 11), "w": (6, 4, 3, 2), "padding": (2, 1), "dilation": (2, 3)},
    "asymmetric": {"x": (3, 4, 5, 6), "w": (6, 4, 3, 2), "padding": ((0, 2), (1, 0)), "stride": (2, 1)},
    "pad_over_filter": {"x": (2, 4, 3, 3), "w": (4, 4, 2, 2), "padding": 4, "stride": 3},
    "pad_after_unused": {"x": (2, 4, 6, 6), "w": (4, 4, 3, 3), "padding": ((0, 1), (0, 1)), "stride": 2},
    "groups": {"x": (3, 12, 5, 4), "w": (6, 4, 3, 3), "groups": 3, "padding": 1},
    "more_groups_than_images": {"x": (2, 12, 4, 4), "w": (6, 2, 3, 3), "groups": 6, "padding": 1},
    "depthwise": {"x": (3, 5, 6, 4), "w": (10, 1, 3, 3), "groups": 5, "padding": 1},
    "padded_1x1": {"x": (2, 4, 3, 5), "w": (6, 4, 1, 1), "padding": 1, "stride": 2},
    "whole_input": {"x": (5, 4, 3, 4), "w": (6, 4, 3, 4)},
    "wide": {"x": (2, 40, 3, 3), "w": (3, 40, 3, 3), "padding": 1},
    "first_layer": {"x": (3, 3, 13, 11), "w": (16, 3, 7, 7), "padding": 3, "stride": 2},
    "padded_groups": {"x": (2, 21, 6, 5), "w": (6, 7, 3, 3), "groups": 3, "padding": 1},
    "1d": {"x": (3, 4, 12), "w": (6, 2, 5), "padding": 2, "dilation": 2, "groups": 2},
    "3d": {"x": (3, 4, 4, 5, 6), "w": (6, 4, 3, 2, 3), "padding": (1, 0, 1), "stride": (1, 2, 1)},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_im2col_computes_the_convolution(shape, direction, dtype, channels_last):
    check_all(ConvIm2colGemm(), problem_of(shape, direction, dtype, channels_last))


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("images", [1, 2, 3, 5])
def test_im2col_cuts_the_batch_in_uneven_chunks(images, direction, channels_last):
    problem = problem_of(SHAPES["3x3"], direction, "float16", channels_last)
    config = Config.of(images=images, slots=1, algorithm={}, workspace_bytes=0)
    check(ConvIm2colGemm(), problem, config)


@pytest.mark.parametrize("solver", [ConvGemm1x1(), ConvIm2colGemm()], ids=lambda solver: solver.id)
def test_accepts_its_examples(solver):
    for problem in solver.examples():
        assert solver.applicability(problem, DEVICE)
        for config in solver.default_configs(problem, DEVICE):
            solver.check_config(problem, DEVICE, config)
            assert solver.solution(problem, DEVICE, config).steps


def test_im2col_keeps_backward_data_columns_in_float32():
    problem = problem_of(SHAPES["3x3"], "backward_data", "float16", True)
    solution = check(ConvIm2colGemm(), problem, Config.of(images=5, slots=1, algorithm={}, workspace_bytes=0))
    products = [step for step in solution.steps if isinstance(step, MatmulStep)]
    assert {step.dtype_c for step in products} == {DataType.FLOAT32}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_backward_weights_sums_chunks_in_float32(dtype):
    problem = problem_of(SHAPES["3x3"], "backward_weights", dtype, True)
    config = Config.of(images=2, slots=1, algorithm={}, workspace_bytes=0)
    products = [s for s in check(ConvIm2colGemm(), problem, config).steps if isinstance(s, MatmulStep)]
    assert [step.beta for step in products] == [0.0, 1.0, 1.0]
    assert {step.dtype_c for step in products} == {DataType.FLOAT32}


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_im2col_aligns_the_depth_of_a_first_layer(direction, channels_last):
    problem = problem_of(SHAPES["first_layer"], direction, "float16", channels_last)
    config = ConvIm2colGemm().default_configs(problem, DEVICE)[0]
    steps = ConvIm2colGemm().solution(problem, DEVICE, config).steps
    products = [step for step in steps if isinstance(step, MatmulStep)]
    assert all(152 in (step.m, step.n, step.k) for step in products)


def test_estimates_know_that_splitting_the_depth_takes_workspace():
    shape = {"x": (32, 64, 56, 56), "w": (64, 64, 1, 1)}
    problem = problem_of(shape, "backward_weights", "float16", True)
    some, none = ConvGemm1x1().default_configs(problem, DEVICE)
    assert none["workspace_bytes"] == 0
    assert ConvGemm1x1().estimate_ms(problem, DEVICE, some) < ConvGemm1x1().estimate_ms(problem, DEVICE, none)


def test_im2col_leaves_one_tap_to_gemm1x1():
    reason = ConvIm2colGemm().applicability(problem_of(SHAPES_1X1["plain"], "forward", "float16", True), DEVICE).reason
    assert "ConvGemm1x1" in reason


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ({"x": (1, 64, 2048, 2048), "w": (1, 64, 31, 31), "padding": 15}, "columns of 1 images"),
        ({"x": (2**24, 1, 3, 3), "w": (1, 1, 3, 3), "padding": 200}, "steps"),
    ],
    ids=["columns", "steps"],
)
def test_im2col_refuses_with_a_reason(shape, word):
    problem = problem_of(shape, "forward", "float16", False)
    assert word in ConvIm2colGemm().applicability(problem, DEVICE).reason


def test_gemm1x1_refuses_too_many_steps():
    problem = problem_of({"x": (5000, 5000, 2, 2), "w": (5000, 1, 1, 1), "groups": 5000}, "forward", "float16", False)
    assert "steps" in ConvGemm1x1().applicability(problem, DEVICE).reason


def test_refuses_mixed_types():
    problem = ProblemDescription.convolution(
        x=(2, 4, 5, 5), w=(4, 4, 1, 1), dtype={"x": "float16", "w": "float16", "y": "float32"}
    )
    assert "one dtype" in ConvGemm1x1().applicability(problem, DEVICE).reason


RECORDED = dict.fromkeys(ALGORITHM_ATTRIBUTES, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 0},
        {"slots": 2},
        {"slots": True},
        {"slots": "1"},
        {"workspace_bytes": -1},
        {"workspace_bytes": 2**40},
        {"algorithm": {"ID": 1}},
        {"algorithm": {**RECORDED, "ID": -1}},
        {"algorithm": {**RECORDED, "ID": 2**31}},
        {"algorithm": {**RECORDED, "SURPRISE": 1}},
        {"algorithm": 3},
        {"images": 1},
    ],
    ids=str,
)
def test_refuses_configurations_outside_the_schema(change):
    problem = problem_of(SHAPES_1X1["plain"], "forward", "float16", True)
    config = Config({"slots": 1, "algorithm": {}, "workspace_bytes": 0, **change})
    with pytest.raises(InvalidConfigError, match="ConvGemm1x1"):
        ConvGemm1x1().check_config(problem, DEVICE, config)


@pytest.mark.parametrize("images", [0, 4, 1.0], ids=str)
def test_im2col_refuses_chunks_outside_the_batch(images):
    problem = problem_of(SHAPES["stride"], "forward", "float16", True)
    with pytest.raises(InvalidConfigError, match="images"):
        ConvIm2colGemm().check_config(
            problem, DEVICE, Config.of(images=images, slots=1, algorithm={}, workspace_bytes=0)
        )


def test_recorded_algorithm_serves_products_of_its_shape_only():
    problem = problem_of(SHAPES["3x3"], "forward", "float16", True)
    config = Config.of(images=2, slots=1, algorithm=RECORDED, workspace_bytes=512)
    products = [s for s in check(ConvIm2colGemm(), problem, config).steps if isinstance(s, MatmulStep)]
    assert [bool(step.algorithm) for step in products] == [True, True, False]
    assert {step.workspace_bytes for step in products} == {512}


def test_recorded_algorithm_serves_writing_and_adding_products():
    problem = problem_of({**SHAPES["3x3"], "x": (4, 4, 6, 8)}, "backward_weights", "float16", True)
    config = Config.of(images=2, slots=1, algorithm=RECORDED, workspace_bytes=0)
    products = [s for s in check(ConvIm2colGemm(), problem, config).steps if isinstance(s, MatmulStep)]
    assert [(step.beta, bool(step.algorithm)) for step in products] == [(0.0, True), (1.0, True)]


def test_steps_stay_bounded():
    problem = problem_of({"x": (4096, 2, 3, 3), "w": (2, 2, 3, 3), "padding": 1}, "backward_weights", "float16", False)
    for config in ConvIm2colGemm().configs(problem, DEVICE):
        assert len(ConvIm2colGemm().solution(problem, DEVICE, config).steps) <= MAX_STEPS


def test_batches_are_cut_where_the_library_needs_it():
    def operand(buffer: str) -> GemmOperand:
        return GemmOperand(buffer=buffer, dtype=DataType.FLOAT16, ld=2, image_stride=4, group_stride=4)

    product = BatchedGemm(
        rows=2, columns=2, depth=2, left=operand("x"), right=operand("w"), out=operand("y"), images=3 * MAX_BATCH - 1
    )
    steps = list(product.steps())
    assert [step.batch for step in steps] == [MAX_BATCH, MAX_BATCH, MAX_BATCH - 1]
    assert [step.a.offset_bytes for step in steps] == [0, 8 * MAX_BATCH, 16 * MAX_BATCH]


def test_kernel_signatures_match_the_arguments():
    text = resources.files("miofind.kernels_src").joinpath("vendor/im2col.cu").read_text()
    entries = {}
    for name, arguments in re.findall(r"__global__ void (\w+)\(([^)]*)\)", text):
        entries[name] = ["*" if "*" in a else a.split()[-2] for a in arguments.split(",")]
    kinds = {"int32": "int", "int64": "int64"}

    def kind_of(arg: Argument) -> str:
        if isinstance(arg, Struct):
            return arg.type.name
        return kinds[arg.ctype] if isinstance(arg, Scalar) else "*"

    seen = set()
    for direction, last in itertools.product(DIRECTIONS, (False, True)):
        problem = problem_of(SHAPES["first_layer"], direction, "float16", last)
        config = Config.of(images=2, slots=1, algorithm={}, workspace_bytes=0)
        for step in ConvIm2colGemm().solution(problem, DEVICE, config).kernels:
            assert [kind_of(arg) for arg in step.args] == entries[step.entry]
            seen.add(step.entry)
    assert seen == set(entries)


@pytest.mark.parametrize("text", ["bias", "bias.relu", "residual.relu", "bias.residual", "relu"])
@pytest.mark.parametrize("batch", [1, 3])
def test_products_take_epilogues(text: str, batch: int) -> None:
    """Chunks of images take their own part of the residual."""
    conv, half = ProblemDescription.convolution, {"dtype": "float32", "layout": "NHWC", "epilogue": text}
    check_all(ConvGemm1x1(), conv(x=(batch, 8, 3, 4), w=(6, 8, 1, 1), **half))
    check_all(ConvGemm1x1(), conv(x=(batch, 8, 5, 4), w=(6, 8, 1, 1), stride=2, **half))
    check_all(ConvIm2colGemm(), conv(x=(batch, 3, 6, 5), w=(6, 3, 3, 3), padding=1, **half))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"epilogue": "scale"}, "no scale"),
        ({"epilogue": "channel_bias"}, "no scale and no bias of each image"),
        ({"epilogue": "float32.bias"}, "in the output's dtype"),
        ({"epilogue": "relu.residual"}, "before the activation"),
        ({"epilogue": "bias.silu"}, "not silu"),
        ({"epilogue": "bias.gelu_tanh"}, "not gelu_tanh"),
        ({"epilogue": "bias", "layout": "NCHW"}, "channels must be last"),
        ({"epilogue": "bias", "w": (6, 4, 1, 1), "groups": 2}, "in one group"),
    ],
)
def test_epilogues_that_products_do_not_take_are_refused(fields: dict[str, Any], reason: str) -> None:
    given = {"x": (2, 8, 3, 4), "w": (6, 8, 1, 1), "dtype": "float16", "layout": "NHWC"} | fields
    answer = ConvGemm1x1().applicability(ProblemDescription.convolution(**given), DEVICE)
    assert reason in answer.reason
