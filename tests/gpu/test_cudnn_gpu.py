"""cuDNN's plans on a GPU: right results, honest notes, replay, capture and threads."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miofind.core.problem import DataType, Direction, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.libraries.cudnn import conv_plan, cudnn_version, engine_plans
from miofind.libraries.cudnn_notes import Note
from miofind.solver.solver import MAX_DEFAULT_CONFIGS, Solver
from miofind.solver.steps import Config, CudnnStep
from miofind.solvers.vendor.cudnn import SOLVERS

pytestmark = pytest.mark.gpu
SOLVER: Solver = SOLVERS[0]
GUARD = 4096
NUMPY = {DataType.FLOAT32: np.float32, DataType.FLOAT16: np.float16, DataType.BFLOAT16: ml_dtypes.bfloat16}
ROUNDOFF = {DataType.FLOAT32: 2.0**-24, DataType.FLOAT16: 2.0**-11, DataType.BFLOAT16: 2.0**-8}


def problem(**fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**({"x": (4, 16, 14, 14), "w": (24, 16, 3, 3), "padding": 1} | fields))


def reference(of: ProblemDescription, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output in float64, logical order: one product of matrices a group and filter tap."""
    conv, groups = of.conv, of.groups
    pads = [(0, 0), (0, 0), *zip(conv.pad_before, conv.pad_after, strict=True)]
    x = (
        np.pad(inputs["x"], pads)
        if "x" in inputs
        else np.zeros([n + sum(p) for n, p in zip(of.x.shape, pads, strict=True)])
    )
    out = {name: np.zeros(of.tensor(name).shape) for name in "wy"}

    def grouped(a: np.ndarray) -> np.ndarray:
        return a.reshape(a.shape[0], groups, a.shape[1] // groups, -1)

    for tap in itertools.product(*map(range, of.filter)):
        steps = zip(tap, conv.dilation, conv.stride, of.out_spatial, strict=True)
        window = (..., *(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, s, o in steps))
        if of.direction is Direction.BACKWARD_WEIGHTS:
            out["w"][(..., *tap)] = np.einsum("ngks,ngcs->gkc", grouped(inputs["y"]), grouped(x[window])).reshape(
                of.k, -1
            )
            continue
        w = inputs["w"][(..., *tap)].reshape(groups, of.k // groups, -1)
        if of.direction is Direction.FORWARD:
            out["y"] += np.einsum("ngcs,gkc->ngks", grouped(x[window]), w).reshape(of.y.shape)
        else:
            x[window] += np.einsum("ngks,gkc->ngcs", grouped(inputs["y"]), w).reshape(x[window].shape)
    if of.direction is Direction.BACKWARD_DATA:
        return x[(..., *(slice(p, p + n) for p, n in zip(conv.pad_before, of.spatial, strict=True)))]
    return out[of.direction.output]


class Bench:
    """Buffers of one problem on the GPU and its exact result."""

    def __init__(self, of: ProblemDescription, *, integers: bool = False) -> None:
        self.problem = of
        self.buffers: dict[str, Any] = {}
        rng = np.random.default_rng(7)
        shapes = {operand.name: operand.tensor.shape for operand in of.operands}
        draw = (lambda shape: rng.integers(-1, 2, shape)) if integers else rng.standard_normal
        self.load({name: draw(shape) for name, shape in shapes.items()})

    def load(self, values: Mapping[str, np.ndarray]) -> None:
        """Rounds values of all tensors to their types and copies them to the GPU."""
        import cupy

        inputs = {}
        for name, value in values.items():
            rounded = value.astype(NUMPY[self.problem.tensor(name).dtype])
            if name in self.problem.direction.inputs:
                inputs[name] = rounded.astype(np.float64)
            packed = np.ascontiguousarray(rounded.transpose(self._order(name)))
            self.buffers[name] = cupy.asarray(packed.view(np.uint8))
        self.exact = reference(self.problem, inputs)
        self.norm = np.sqrt(reference(self.problem, {name: value**2 for name, value in inputs.items()}))

    def _order(self, name: str) -> tuple[int, ...]:
        rank = self.problem.spatial_dims + 2
        return (0, *range(2, rank), 1) if self.problem.tensor(name).layout.channels_last else tuple(range(rank))

    def run(self, step: CudnnStep) -> np.ndarray:
        """The output of one run, in float64 and logical order, having checked the guards around the workspace."""
        import cupy

        output = self.buffers[self.problem.direction.output]
        output.fill(0xFF)
        workspace = cupy.full(step.workspace_bytes + 2 * GUARD, 0xA5, cupy.uint8)
        plan = conv_plan(self.problem, step, Device.cuda())
        cupy.cuda.runtime.deviceSynchronize()
        plan.launch((*(buffer.data.ptr for buffer in self.buffers.values()), workspace.data.ptr + GUARD), 0)
        cupy.cuda.runtime.deviceSynchronize()
        guards = cupy.concatenate([workspace[:GUARD], workspace[GUARD + step.workspace_bytes :]])
        assert bool((guards == 0xA5).all())
        return self.result()

    def result(self) -> np.ndarray:
        import cupy

        name = self.problem.direction.output
        tensor = self.problem.output
        packed = cupy.asnumpy(self.buffers[name]).view(NUMPY[tensor.dtype])
        order = self._order(name)
        shape = [tensor.shape[axis] for axis in order]
        return packed.reshape(shape).transpose(np.argsort(order)).astype(np.float64)

    def error(self, result: np.ndarray) -> float:
        """Largest error in units of sqrt(x^2 * w^2), the rounding of the output taken off."""
        rounding = ROUNDOFF[self.problem.output.dtype] * np.abs(self.exact) * 1.01
        error = np.abs(result - self.exact) - rounding
        return float(np.max(error / np.maximum(self.norm, 1e-30)))


def steps(of: ProblemDescription, configs: Any) -> list[CudnnStep]:
    return [SOLVER.solution(of, Device.cuda(), config).steps[0] for config in configs]


PROBLEMS = {
    "float16-nhwc": problem(dtype="float16", layout="NHWC"),
    "float16-nchw": problem(dtype="float16"),
    "bfloat16": problem(dtype="bfloat16", layout="NHWC"),
    "float32": problem(),
    "tf32": problem(math="tf32", layout="NHWC"),
    "1d": problem(x=(4, 16, 60), w=(24, 16, 5), padding=2, dtype="float16", layout="NWC"),
    "3d": problem(x=(2, 8, 6, 9, 9), w=(16, 8, 3, 3, 3), dtype="float16", layout="NDHWC"),
    "3d-float32": problem(x=(2, 8, 6, 9, 9), w=(16, 8, 3, 3, 3)),
    "grouped": problem(w=(24, 4, 3, 3), groups=4, dtype="float16", layout="NHWC"),
    "depthwise": problem(w=(16, 1, 3, 3), groups=16, dtype="float16", layout="NHWC"),
    "asymmetric": problem(padding=((0, 1), (2, 1)), stride=2, dtype="float16", layout="NHWC"),
    "asymmetric-float32": problem(padding=((0, 1), (2, 1)), stride=2),
    "dilated": problem(padding=2, dilation=2, dtype="bfloat16", layout="NHWC"),
    "odd-channels": problem(x=(2, 3, 17, 13), w=(7, 3, 5, 3), padding=1, dtype="float16", layout="NHWC"),
    "first-layer": problem(x=(2, 3, 38, 42), w=(64, 3, 7, 7), padding=3, stride=2, dtype="float16", layout="NHWC"),
    "first-layer-nchw": problem(x=(2, 3, 38, 42), w=(64, 3, 7, 7), padding=3, stride=2, dtype="float16"),
    "wide-padding": problem(x=(2, 8, 6, 6), w=(8, 8, 3, 3), padding=4, dtype="float16", layout="NHWC"),
    "mixed-layouts": problem(dtype="float16", layout={"x": "NHWC", "w": "NCHW", "y": "NHWC"}),
    "1x1": problem(w=(24, 16, 1, 1), padding=0, dtype="float16", layout="NHWC"),
}


def directed(of: ProblemDescription, direction: Direction) -> ProblemDescription:
    return dataclasses.replace(of, direction=direction)


def bound(of: ProblemDescription) -> float:
    """Error of direct summation in units of sqrt(x^2 * w^2): what 8 * u * sqrt(K) and TF32's rounding allow."""
    summation = 2.0**-24 * (8 * np.sqrt(of.reduction_length) + of.reduction_length / 2)
    return summation + (2.0**-7 if of.math is MathMode.TF32 else 0)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", PROBLEMS)
def test_direct_default_plans_compute_the_convolution(name: str, direction: Direction) -> None:
    of = directed(PROBLEMS[name], direction)
    bench, integers = Bench(of), Bench(of, integers=True)
    configs = SOLVER.default_configs(of, Device.cuda())
    assert 1 <= len(configs) <= MAX_DEFAULT_CONFIGS
    for config in configs:
        SOLVER.check_config(of, Device.cuda(), config)
        if SOLVER.error_growth(of, config) > 1:
            continue
        (step,) = steps(of, [config])
        assert bench.error(bench.run(step)) <= bound(of), config
        rounded = integers.exact.astype(NUMPY[of.output.dtype]).astype(np.float64)
        np.testing.assert_array_equal(integers.run(step), rounded, err_msg=config.json)


@pytest.mark.parametrize("name", ["first-layer", "first-layer-nchw", "float16-nhwc"])
def test_direct_default_plans_add_in_float32(name: str) -> None:
    """Two products of 4096 that cancel leave the other sums of eighths exact; float16 would lose them."""
    of = PROBLEMS[name]
    filters = np.full((of.k, of.w.size // of.k), 0.125)
    pairs = np.random.default_rng(7).random(filters.shape).argsort(axis=1)[:, :2]
    np.put_along_axis(filters, pairs, np.array([4096.0, -4096.0]), axis=1)
    bench = Bench(of)
    bench.load({"x": np.ones(of.x.shape), "w": filters.reshape(of.w.shape), "y": np.zeros(of.y.shape)})
    rounded = bench.exact.astype(np.float16).astype(np.float64)
    for config in SOLVER.default_configs(of, Device.cuda()):
        if SOLVER.error_growth(of, config) == 1:
            np.testing.assert_array_equal(bench.run(*steps(of, [config])), rounded, err_msg=config.json)


@pytest.mark.parametrize("direction", Direction)
def test_no_plan_of_an_ieee_problem_uses_tf32(direction: Direction) -> None:
    of = problem(direction=direction)
    bench = Bench(of)
    plans = [config for config in SOLVER.configs(of, Device.cuda()) if SOLVER.error_growth(of, config) == 1]
    assert plans
    for config in plans:
        assert bench.error(bench.run(*steps(of, [config]))) < 1e-5, config


def test_plans_that_claim_determinism_repeat_bit_for_bit() -> None:
    of = problem(x=(8, 16, 28, 28), direction="backward_weights", dtype="float16", layout="NHWC")
    bench = Bench(of)
    for config in SOLVER.configs(of, Device.cuda()):
        solution = SOLVER.solution(of, Device.cuda(), config)
        if solution.deterministic:
            first = bench.run(solution.steps[0])
            assert all(np.array_equal(first, bench.run(solution.steps[0])) for _ in range(2)), config


def test_a_config_survives_its_text() -> None:
    of = PROBLEMS["float16-nhwc"]
    for config in SOLVER.configs(of, Device.cuda()):
        again = Config.from_json(config.json)
        SOLVER.check_config(of, Device.cuda(), again)
        assert steps(of, [again]) == steps(of, [config])


def test_the_heuristics_choice_runs() -> None:
    of = PROBLEMS["float32"]
    bench = Bench(of)
    virtual = SOLVER.default_configs(of, Device.virtual("90a"))
    assert bench.error(bench.run(*steps(of, virtual))) < 1e-5


def test_a_plan_runs_in_a_captured_graph() -> None:
    import cupy

    of = PROBLEMS["float16-nhwc"]
    bench = Bench(of)
    for step in steps(of, SOLVER.default_configs(of, Device.cuda())):
        expected = bench.run(step)
        plan = conv_plan(of, step, Device.cuda())
        workspace = cupy.empty(max(1, step.workspace_bytes), cupy.uint8)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            plan.launch((*(buffer.data.ptr for buffer in bench.buffers.values()), workspace.data.ptr), stream.ptr)
            graph = stream.end_capture()
        bench.buffers["y"].fill(0xFF)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(bench.result(), expected)


def test_one_plan_runs_in_many_threads() -> None:
    import cupy

    of = problem(x=(16, 32, 28, 28), w=(32, 32, 3, 3), dtype="float16", layout="NHWC")
    bench = Bench(of)
    (step,) = steps(of, SOLVER.default_configs(of, Device.cuda())[:1])
    expected = bench.run(step)
    shared = conv_plan(of, step, Device.cuda())
    outcomes: list[bool] = []

    def work() -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        y, workspace = cupy.zeros_like(bench.buffers["y"]), cupy.empty(max(1, step.workspace_bytes), cupy.uint8)
        cupy.cuda.runtime.deviceSynchronize()
        for _ in range(200):
            given = {**bench.buffers, "y": y, "workspace": workspace}
            shared.launch(tuple(buffer.data.ptr for buffer in given.values()), stream.ptr)
        stream.synchronize()
        result = cupy.asnumpy(y).view(np.float16).reshape(16, 28, 28, 32).transpose(0, 3, 1, 2)
        outcomes.append(np.array_equal(result, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 4


def _with_workspace() -> tuple[ProblemDescription, CudnnStep]:
    for of in (PROBLEMS["float16-nchw"], PROBLEMS["float32"]):
        for step in steps(of, SOLVER.configs(of, Device.cuda())):
            if step.workspace_bytes > 0:
                return of, step
    pytest.skip("no plan wants workspace")


def test_a_record_that_declares_too_little_workspace_is_refused() -> None:
    of, step = _with_workspace()
    with pytest.raises(LaunchError, match="bytes of workspace"):
        conv_plan(of, dataclasses.replace(step, workspace_bytes=step.workspace_bytes - 1), Device.cuda())


def test_a_record_that_hides_a_note_is_refused() -> None:
    of = PROBLEMS["tf32"]
    hidden = next(p for p in engine_plans(of, Device.cuda()) if Note.TENSOR_CORE in p.notes)
    step = CudnnStep(engine=hidden.engine, knobs=hidden.knobs, workspace_bytes=hidden.workspace_bytes)
    with pytest.raises(LaunchError, match="tensor_core"):
        conv_plan(of, step, Device.cuda())


def test_a_tf32_record_is_refused_for_an_ieee_problem() -> None:
    of = PROBLEMS["tf32"]
    step = steps(of, SOLVER.default_configs(of, Device.cuda())[:1])[0]
    assert "tensor_core" in step.notes
    with pytest.raises(LaunchError, match="tensor_core"):
        conv_plan(dataclasses.replace(of, math=MathMode.IEEE), step, Device.cuda())


@pytest.mark.parametrize(("engine", "knobs"), [(9999, ()), (0, ((2, 77),)), (0, ((200, 1),))])
def test_an_impossible_record_is_a_launch_error(engine: int, knobs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(LaunchError, match=f"cuDNN {cudnn_version()}"):
        conv_plan(problem(), CudnnStep(engine=engine, knobs=knobs), Device.cuda())


def test_neither_the_frontend_nor_torch_is_imported() -> None:
    code = (
        "import sys; from miofind import Device, ProblemDescription as P;"
        "from miofind.libraries.cudnn import engine_plans;"
        "assert engine_plans(P.convolution(x=(1, 8, 8, 8), w=(8, 8, 3, 3)), Device.cuda());"
        "assert not {'torch', 'cudnn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
