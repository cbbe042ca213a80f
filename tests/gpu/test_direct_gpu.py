"""The direct and implicit GEMM solvers and the reference kernel on a GPU: the host's reference, within guard bands."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_buffers import upload
from helpers.runs.gates import check_gates
from helpers.runs.step_launcher import make_step_launcher
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.reference import convolution as reference
from miofind.reference.convolution import numpy_dtype, reference_on_host, reference_step
from miofind.solver.registry import Registry

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SOLVERS = ("ConvDirectNaive", "ConvDirectTiled", "ConvDirectTiledWeights")
TURNED = Registry.default()["ConvChannelsLastMma"]
TENSOR_CORE_SOLVERS = ("ConvDepthwiseLarge", "ConvDepthwiseLargeWeights")
SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (4, 64, 28, 28), "w": (64, 64, 3, 3), "padding": 1},
    "odd": {"x": (2, 19, 17, 15), "w": (37, 19, 3, 3), "padding": ((1, 0), (2, 1))},
    "1x1": {"x": (3, 48, 14, 14), "w": (72, 48, 1, 1)},
    "1x1_stride": {"x": (2, 24, 15, 16), "w": (40, 24, 1, 1), "stride": 2},
    "stride": {"x": (2, 24, 17, 16), "w": (32, 24, 3, 3), "padding": 1, "stride": 2},
    "stride_and_dilation": {"x": (2, 6, 19, 18), "w": (4, 6, 3, 3), "stride": (3, 2), "dilation": (2, 3), "padding": 4},
    "first_layer": {"x": (2, 3, 41, 43), "w": (16, 3, 7, 7), "padding": 3, "stride": 2},
    "patches": {"x": (2, 3, 32, 32), "w": (24, 3, 4, 4), "stride": 4},
    "depthwise": {"x": (2, 40, 23, 20), "w": (40, 1, 3, 3), "padding": 1, "groups": 40},
    "depthwise_stride": {"x": (2, 32, 15, 17), "w": (64, 1, 5, 5), "padding": 2, "stride": 2, "groups": 32},
    "depthwise_large": {"x": (1, 8, 32, 32), "w": (8, 1, 31, 31), "padding": 15, "groups": 8},
    "depthwise_short_rows": {"x": (9, 12, 7, 7), "w": (12, 1, 13, 13), "padding": 6, "groups": 12},
    "depthwise_uneven": {"x": (3, 10, 33, 75), "w": (10, 1, 9, 21), "padding": ((2, 7), (20, 1)), "groups": 10},
    "depthwise_beyond_the_filter": {"x": (2, 8, 9, 6), "w": (8, 1, 5, 7), "padding": ((9, 0), (1, 12)), "groups": 8},
    "depthwise_1d": {"x": (2, 6, 200), "w": (6, 1, 31), "padding": 15, "groups": 6},
    "groups": {"x": (2, 32, 14, 13), "w": (64, 4, 3, 3), "padding": 1, "groups": 8},
    "dilated": {"x": (1, 16, 33, 33), "w": (16, 16, 3, 3), "padding": 12, "dilation": 12},
    "padding_beyond_the_filter": {"x": (1, 5, 6, 7), "w": (3, 5, 2, 2), "padding": 5, "stride": 2},
    "1d": {"x": (3, 12, 100), "w": (20, 12, 9), "padding": 12, "dilation": 3},
    "3d": {"x": (1, 6, 5, 9, 8), "w": (8, 3, 3, 3, 2), "padding": 1, "stride": (1, 2, 2), "groups": 2},
}


def make(shape: str, channels_last: bool, **fields: Any) -> ProblemDescription:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=channels_last)
    return ProblemDescription.convolution(**SHAPES[shape], layout=layout, **fields)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("solver_id", SOLVERS)
def test_float32_is_exact(
    solver_id: str, shape: str, direction: Direction, channels_last: bool, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, channels_last, direction=direction)
    solver = Registry.default().named(solver_id)
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    for config in spread(solver, problem, device, 4):
        check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT64])
@pytest.mark.parametrize("shape", ["odd", "1x1", "stride", "depthwise", "1d"])
@pytest.mark.parametrize("solver_id", SOLVERS)
def test_other_dtypes_are_exact(
    solver_id: str,
    shape: str,
    dtype: DataType,
    direction: Direction,
    channels_last: bool,
    device: Device,
    compiler: Compiler,
) -> None:
    problem = make(shape, channels_last, direction=direction, dtype=dtype)
    solver = Registry.default().named(solver_id)
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    for config in spread(solver, problem, device, 2):
        check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name.startswith("depthwise_")])
def test_depthwise_on_tensor_cores_is_exact(
    shape: str, dtype: DataType, direction: Direction, channels_last: bool, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, channels_last, direction=direction, dtype=dtype)
    for solver in map(Registry.default().named, TENSOR_CORE_SOLVERS):
        if not solver.applicability(problem, device):
            continue
        for config in spread(solver, problem, device, 6):
            check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32])
@pytest.mark.parametrize("shape", SHAPES)
def test_implicit_gemm_is_exact(
    shape: str, dtype: DataType, direction: Direction, channels_last: bool, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, channels_last, direction=direction, dtype=dtype)
    solver = Registry.default()["ConvImplicitGemmMma"]
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    for config in spread(solver, problem, device, 4):
        check_exact(problem, solver, config, device, compiler)


def random_problem(seed: int) -> ProblemDescription:
    """A small problem with any channels, padding, stride and dilation."""
    generator = random.Random(seed)
    pick = generator.choice
    rank, groups, c = pick([1, 2, 2, 2, 3]), pick([1, 1, 1, 2, 3]), pick([2, 3, 8, 20, 64])
    dilation, taps = [pick([1, 1, 2, 3]) for _ in range(rank)], [pick([1, 1, 2, 3, 5]) for _ in range(rank)]
    reach = [step * (tap - 1) + 1 for tap, step in zip(taps, dilation, strict=True)]
    dtype = pick([DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32])
    return ProblemDescription.convolution(
        x=(pick([1, 2, 5]), groups * c, *(generator.randint(r, r + (20 if rank < 3 else 5)) for r in reach)),
        w=(groups * pick([1, 4, 6, 24, 40]), c, *taps),
        padding=[[pick([0, r // 2, generator.randint(0, r + 3)]) for _ in range(2)] for r in reach],
        stride=[pick([1, 1, 2]) for _ in taps],
        dilation=dilation,
        groups=groups,
        dtype=dtype,
        math=pick(["ieee", "tf32"]) if dtype is DataType.FLOAT32 else "ieee",
        layout=Layout.of(rank, channels_last=pick([True, False])),
        direction=pick(list(Direction)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_implicit_gemm_is_exact_on_random_problems(seed: int, device: Device, compiler: Compiler) -> None:
    problem = random_problem(seed)
    solver = Registry.default()["ConvImplicitGemmMma"]
    assert solver.applicability(problem, device)
    for config in spread(solver, problem, device, 6):
        check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("problem", TURNED.examples(), ids=str)
def test_transposed_implicit_gemm_is_exact(problem: ProblemDescription, device: Device, compiler: Compiler) -> None:
    assert TURNED.applicability(problem, device)
    for config in spread(TURNED, problem, device, 6):
        check_exact(problem, TURNED, config, device, compiler)


@pytest.mark.parametrize("math", ["ieee", "tf32"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
def test_implicit_gemm_of_float32_keeps_its_bound(
    direction: Direction, channels_last: bool, math: str, device: Device, compiler: Compiler
) -> None:
    """Long sums of normal numbers, which tensor cores would truncate."""
    problem = ProblemDescription.convolution(
        x=(4, 512, 14, 14),
        w=(64, 512, 3, 3),
        padding=1,
        layout=Layout.of(2, channels_last=channels_last),
        direction=direction,
        math=math,
    )
    solver = Registry.default()["ConvImplicitGemmMma"]
    check_gates(solver, problem, device, compiler, spread(solver, problem, device, 4), seed=7)


@pytest.mark.parametrize("direction", list(Direction))
def test_naive_mixes_dtypes_and_layouts(direction: Direction, device: Device, compiler: Compiler) -> None:
    problem = ProblemDescription.convolution(
        **SHAPES["groups"],
        direction=direction,
        dtype={"x": "float16", "w": "bfloat16", "y": "float32"},
        layout={"x": "NHWC", "w": "NCHW", "y": "NHWC"},
    )
    solver = Registry.default()["ConvDirectNaive"]
    for config in solver.configs(problem, device):
        check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("dtype", list(DataType))
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", ["odd", "stride_and_dilation", "groups", "3d"])
@pytest.mark.parametrize("least_filled", [1 / 256, 2.0], ids=["tiles", "threads"])
def test_reference_kernel_is_the_host_reference(
    least_filled: float,
    shape: str,
    direction: Direction,
    channels_last: bool,
    dtype: DataType,
    device: Device,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All three sums of listed elements and of the whole output: to the last few bits of float64, and of float32."""
    monkeypatch.setattr(reference, "_MANY_ELEMENTS", 1)
    monkeypatch.setattr(reference, "_LEAST_FILLED", least_filled)
    monkeypatch.setattr(reference, "_LEAST_TILES", 1)
    problem = make(shape, channels_last, direction=direction, dtype=dtype)
    generator = np.random.default_rng(5)
    types = {name: numpy_dtype(problem.tensor(name).dtype) for name in direction.inputs}
    inputs = {name: generator.standard_normal(problem.tensor(name).shape).astype(t) for name, t in types.items()}
    wide = {name: values.astype(np.float64) for name, values in inputs.items()}
    operands = (wide, {n: np.abs(v) for n, v in wide.items()}, {n: v * v for n, v in wide.items()})
    buffers = upload(problem, inputs)
    addresses = {name: buffer.address for name, buffer in buffers.items()}
    some = generator.choice(problem.output.size, min(500, problem.output.size), replace=False).astype(np.int64)
    for indices in (some, None):
        count = problem.output.size if indices is None else indices.size
        listed = None if indices is None else cupy.asarray(indices)
        sums, scales = cupy.full(count, cupy.nan), cupy.full((count, 2), cupy.nan, cupy.float32)
        step = reference_step(problem, None if indices is None else count)
        launch = make_step_launcher(step, compiler.load(step, device))
        own = {"indices": 0 if listed is None else listed.data.ptr, "sums": sums.data.ptr, "scales": scales.data.ptr}
        launch(addresses | own, cupy.cuda.get_current_stream().ptr)
        expected = [reference_on_host(problem, **each, indices=indices).reshape(-1) for each in operands]
        scale = expected[1] + np.sqrt(expected[2])
        assert (np.abs(sums.get() - expected[0]) <= 1e-13 * scale).all()
        rounded_up = np.stack([expected[1], np.sqrt(expected[2])], axis=1)
        assert (scales.get() >= rounded_up * (1 - 1e-12)).all()
        assert (scales.get() <= rounded_up * (1 + 2.0**-22)).all()

        sums_alone = cupy.full(count, cupy.nan)
        launch(addresses | own | {"sums": sums_alone.data.ptr, "scales": 0}, cupy.cuda.get_current_stream().ptr)
        assert (np.abs(sums_alone.get() - expected[0]) <= 1e-13 * scale).all()


def test_naive_serves_tensors_beyond_32_bits(device: Device, compiler: Compiler) -> None:
    """The last element of a tensor of more than 2**31 elements, float16 to keep it small."""
    problem = ProblemDescription.convolution(x=(1, 2, 2**15, 2**15 + 8), w=(1, 2, 1, 1), dtype="float16")
    if device.memory_bytes < 16 << 30:
        pytest.skip("needs 16 GB of device memory")
    solver = Registry.default()["ConvDirectNaive"]
    invoker = make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], compiler)
    x, w = cupy.zeros(problem.x.shape, cupy.float16), cupy.ones(2, cupy.float16)
    y = cupy.full(problem.y.shape, cupy.nan, cupy.float16)
    x[0, 1, -1, -1] = 3
    invoker.run((x.data.ptr, w.data.ptr, y.data.ptr, 0), cupy.cuda.get_current_stream().ptr)
    assert float(y[0, 0, -1, -1]) == 3
    assert float(abs(y).sum(dtype=cupy.float64)) == 3


@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
def test_implicit_gemm_serves_tensors_of_almost_32_bits(layout: Layout, device: Device, compiler: Compiler) -> None:
    """The last pixel of a tensor whose offsets in bytes, though not in elements, go beyond 2**31."""
    size = 2**14
    problem = ProblemDescription.convolution(
        x=(1, 7, size, size), w=(2, 7, 3, 3), padding=1, layout=layout, dtype="float16"
    )
    if device.memory_bytes < 16 << 30:
        pytest.skip("needs 16 GB of device memory")
    solver = Registry.default()["ConvImplicitGemmMma"]
    x, w = cupy.zeros(problem.x.size, cupy.float16), cupy.ones(problem.w.size, cupy.float16)
    x[-1] = 3
    touched = [h * size + v for h in (size - 2, size - 1) for v in (size - 2, size - 1)]
    for config in solver.default_configs(problem, device)[:2]:
        invoker = make_invoker(problem, device, solver, config, compiler)
        y = cupy.full(problem.y.size, cupy.nan, cupy.float16)
        workspace = cupy.empty(max(1, invoker.workspace_bytes), cupy.uint8)
        stream = cupy.cuda.get_current_stream().ptr
        invoker.run((x.data.ptr, w.data.ptr, y.data.ptr, workspace.data.ptr), stream)
        pixels = y.reshape(size * size, 2) if layout is Layout.NHWC else y.reshape(2, size * size).T
        assert (pixels[touched].get() == 3).all()
        assert float(abs(y).sum(dtype=cupy.float64)) == 24
