"""The GEMM solvers and cuBLASLt plans on a GPU: both gates for every configuration, replay, capture and threads."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.libraries.cublaslt import MatmulAlgorithm, matmul_algorithms, matmul_plan
from miofind.libraries.matmul_choice import ALGORITHM_ATTRIBUTES
from miofind.solver.solver import Solver
from miofind.solver.steps import MatmulStep, Pointer
from miofind.solvers.vendor.gemm1x1 import ConvGemm1x1
from miofind.solvers.vendor.im2col_gemm import ConvIm2colGemm

pytestmark = pytest.mark.gpu

WORKSPACE = 32 << 20
SHAPES: dict[str, dict[str, Any]] = {
    "1x1": {"x": (8, 64, 28, 28), "w": (128, 64, 1, 1)},
    "1x1_odd": {"x": (3, 33, 7, 9), "w": (17, 33, 1, 1)},
    "1x1_stride": {"x": (8, 64, 28, 27), "w": (96, 64, 1, 1), "stride": 2},
    "1x1_groups": {"x": (3, 64, 9, 8), "w": (128, 8, 1, 1), "groups": 8},
    "1x1_3d": {"x": (2, 16, 5, 6, 7), "w": (24, 16, 1, 1, 1)},
    "3x3": {"x": (8, 64, 14, 14), "w": (96, 64, 3, 3), "padding": 1},
    "stride": {"x": (4, 24, 17, 15), "w": (40, 24, 3, 3), "padding": 1, "stride": 2},
    "first_layer": {"x": (4, 3, 37, 37), "w": (16, 3, 7, 7), "padding": 3, "stride": 2},
    "dilated_groups": {"x": (4, 128, 17, 17), "w": (64, 32, 3, 3), "padding": 2, "dilation": 2, "groups": 4},
    "depthwise": {"x": (4, 40, 11, 12), "w": (40, 1, 5, 3), "padding": (2, 1), "groups": 40},
    "odd": {"x": (4, 33, 15, 15), "w": (35, 33, 3, 3), "padding": ((1, 0), (0, 2))},
    "no_padding": {"x": (4, 16, 9, 10), "w": (16, 16, 2, 2)},
    "1d": {"x": (5, 24, 60), "w": (16, 12, 9), "dilation": 3, "groups": 2},
    "3d": {"x": (3, 8, 6, 7, 8), "w": (16, 8, 3, 2, 3), "padding": (1, 0, 1), "stride": (1, 2, 1)},
}


def solver_of(problem: ProblemDescription) -> Solver:
    return ConvGemm1x1() if problem.is_1x1 else ConvIm2colGemm()


def check(problem: ProblemDescription, device: Device, compiler: Compiler) -> None:
    """Every configuration passes both gates."""
    solver = solver_of(problem)
    assert solver.applicability(problem, device)
    check_gates(solver, problem, device, compiler, list(solver.configs(problem, device)), seed=3)


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("direction", [direction.value for direction in Direction])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "tf32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_configuration_passes_both_gates(
    shape: dict[str, Any], dtype: str, direction: str, last: bool, device: Device, compiler: Compiler
) -> None:
    layout = {3: ("NCW", "NWC"), 4: ("NCHW", "NHWC"), 5: ("NCDHW", "NDHWC")}[len(shape["x"])][last]
    kind = {"dtype": "float32", "math": "tf32"} if dtype == "tf32" else {"dtype": dtype}
    check(ProblemDescription.convolution(**shape, **kind, direction=direction, layout=layout), device, compiler)


@pytest.mark.parametrize("direction", [direction.value for direction in Direction])
@pytest.mark.parametrize("orders", [("NCHW", "NHWC"), ("NHWC", "NCHW")], ids="_".join)
def test_gemm1x1_mixes_layouts(orders: tuple[str, str], direction: str, device: Device, compiler: Compiler) -> None:
    layout = {"x": orders[0], "w": "NCHW", "y": orders[1]}
    for name in ("1x1", "1x1_stride", "1x1_groups"):
        problem = ProblemDescription.convolution(**SHAPES[name], dtype="float16", layout=layout, direction=direction)
        check(problem, device, compiler)


def product(m: int, n: int, k: int, dtype: DataType = DataType.FLOAT16, **fields: Any) -> MatmulStep:
    """C (m, n) = A (m, k) B (k, n), column-major and packed."""
    packed: dict[str, Any] = {"transpose_a": False, "transpose_b": False, "lda": m, "ldb": k, "ldc": m}
    buffers = {name: Pointer(buffer=name) for name in "abc"}
    region = {"workspace": "matmul", "workspace_bytes": WORKSPACE}
    return MatmulStep(m=m, n=n, k=k, dtype_ab=dtype, **{**packed, **buffers, **region, "dtype_c": dtype, **fields})


class Operands:
    """Random operands of a product in device memory."""

    def __init__(self, step: MatmulStep) -> None:
        import cupy

        self.step = step
        kinds = {DataType.FLOAT16: cupy.float16, DataType.FLOAT32: cupy.float32}
        random = cupy.random.default_rng(5)
        # CuPy's arrays are row-major: the transposes are the column-major matrices.
        self.a = random.standard_normal((step.k, step.m)).astype(kinds[step.dtype_ab])
        self.b = random.standard_normal((step.n, step.k)).astype(kinds[step.dtype_ab])
        self.c = cupy.full((step.n, step.m), cupy.nan, kinds[step.dtype_c])
        self.workspace = cupy.empty(WORKSPACE, cupy.uint8)

    def run(self, device: Device, stream: int = 0) -> Any:
        plan = matmul_plan(self.step, device)
        addresses = (operand.data.ptr for operand in (self.a, self.b, self.c, self.workspace))
        plan.launch(*addresses, stream)
        return self.c

    def error(self) -> float:
        """Largest absolute error."""
        import cupy

        exact = self.b.astype(cupy.float64) @ self.a.astype(cupy.float64)
        return float(abs(self.c - exact).max())


PRODUCTS = {
    "square": product(512, 512, 512),
    "narrow": product(64, 64, 100352),
    "odd": product(147, 65, 1251),
    "tiny": product(7, 5, 3),
    "to_float32": product(576, 4096, 64, dtype_c=DataType.FLOAT32),
    "float32": product(512, 384, 1024, DataType.FLOAT32),
    "tf32": product(512, 384, 1024, DataType.FLOAT32, math=MathMode.TF32),
}


def algorithms(step: MatmulStep, device: Device) -> Iterator[tuple[MatmulAlgorithm, MatmulStep]]:
    for found in matmul_algorithms(step, device):
        chosen = {"algorithm": found.algorithm, "workspace_bytes": found.workspace_bytes}
        yield found, dataclasses.replace(step, **chosen)


@pytest.mark.parametrize("step", PRODUCTS.values(), ids=PRODUCTS)
def test_recorded_algorithms_run_in_their_workspace_and_repeat_their_bits(step: MatmulStep, device: Device) -> None:
    found = list(algorithms(step, device))
    assert found
    for algorithm, chosen in found:
        assert tuple(name for name, _ in algorithm.algorithm) == ALGORITHM_ATTRIBUTES
        assert algorithm.workspace_bytes <= WORKSPACE
        assert matmul_plan(chosen, device).workspace_bytes == algorithm.workspace_bytes
        operands = Operands(chosen)
        first = operands.run(device).copy()
        assert operands.error() < 0.1 * step.k**0.5
        assert (operands.run(device) == first).all()


def test_ieee_products_do_not_round_their_inputs(device: Device) -> None:
    errors = {}
    for math in MathMode:
        operands = Operands(product(256, 256, 256, DataType.FLOAT32, math=math))
        operands.run(device)
        errors[math] = operands.error()
    assert errors[MathMode.IEEE] < 1e-4 < errors[MathMode.TF32]


def test_no_workspace_is_respected(device: Device) -> None:
    step = product(64, 64, 100352, workspace=None, workspace_bytes=0)
    assert matmul_plan(step, device).workspace_bytes == 0
    assert all(found.workspace_bytes == 0 for found in matmul_algorithms(step, device))


def test_an_algorithm_that_needs_more_workspace_is_refused(device: Device) -> None:
    greedy = [chosen for found, chosen in algorithms(product(64, 64, 100352), device) if found.workspace_bytes]
    assert greedy
    with pytest.raises(LaunchError, match="workspace"):
        matmul_plan(dataclasses.replace(greedy[0], workspace_bytes=0), device)


def test_an_unknown_algorithm_is_refused(device: Device) -> None:
    unknown = tuple((name, 9999 if name == "ID" else 0) for name in ALGORITHM_ATTRIBUTES)
    with pytest.raises(LaunchError, match="m=64 n=64 k=64"):
        matmul_plan(product(64, 64, 64, algorithm=unknown), device)


def test_a_leading_dimension_below_the_rows_is_refused(device: Device) -> None:
    with pytest.raises(LaunchError, match="m=64"):
        matmul_plan(product(64, 64, 64, lda=32), device)


def test_plans_are_cached_by_shape_and_alignment(device: Device) -> None:
    step = product(64, 64, 64)
    same = dataclasses.replace(step, a=Pointer(buffer="x", offset_bytes=64))
    odd = dataclasses.replace(step, a=Pointer(buffer="x", offset_bytes=2))
    assert matmul_plan(step, device) is matmul_plan(same, device)
    assert matmul_plan(step, device) is not matmul_plan(odd, device)


def test_operands_at_odd_addresses(device: Device) -> None:
    import cupy

    step = product(64, 64, 64, a=Pointer(buffer="x", offset_bytes=2))
    operands = Operands(step)
    shifted = cupy.empty(operands.a.size + 1, cupy.float16)
    shifted[1:] = operands.a.ravel()
    operands.a = shifted[1:].reshape(operands.a.shape)
    operands.run(device)
    assert operands.error() < 0.1


def test_a_launch_can_be_captured_and_replayed(device: Device) -> None:
    import cupy

    operands = Operands(product(256, 128, 512))
    matmul_plan(operands.step, device)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        operands.run(device, stream.ptr)
        graph = stream.end_capture()
        assert bool(cupy.isnan(operands.c).all())
        graph.launch(stream)
        stream.synchronize()
    assert operands.error() < 1


def test_plans_serve_several_threads(device: Device) -> None:
    import cupy

    operands = [Operands(product(128, 128, 64 * (1 + i % 2))) for i in range(8)]
    failures: list[BaseException] = []

    def work(one: Operands) -> None:
        try:
            with cupy.cuda.Device(device.index), cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(50):
                    one.run(device, stream.ptr)
                stream.synchronize()
        except BaseException as error:
            failures.append(error)

    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(one,)) for one in operands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(one.error() < 0.5 for one in operands)
