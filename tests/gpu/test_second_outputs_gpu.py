"""Outputs besides the convolution's own, on a GPU: the passes that sum channels, the gate that checks them, calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.runs.device_buffers import addresses, memory_order, upload
from helpers.runs.gates import check_both_gates
from helpers.runs.step_launcher import make_step_launcher

import miofind
from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import Invoker, make_invoker
from miofind.reference.convolution import numpy_dtype
from miofind.solver.registry import Registry
from miofind.solver.steps import KernelStep
from miofind.solvers.pointwise.channel_sums import PARTIALS, channel_sums_regions, channel_sums_steps
from miofind.verify.channel_sums import wrong_sums
from miofind.verify.claims import Claims
from miofind.verify.verifier import Verifier

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SIZES = (
    (2, 64, 4, 5),
    (3, 6, 5, 5),
    (3, 63, 7, 1),
    (5, 1, 3, 3),
    (2, 7, 1, 1),
    (4, 8, 14, 15),
    (1, 4104, 3, 1),
    (1, 513, 2, 3),
    (2, 12, 3, 2),
    (70, 40, 28, 29),
    (8, 65, 56, 57),
    (1, 2, 300, 301),
    (32, 264, 7, 7),
    (32, 64, 112, 112),
    (32, 2048, 7, 7),
)
OVER = (0, 2, 3)
X, W = (4, 16, 14, 14), (32, 16, 3, 3)
Fault = Callable[[dict[str, int], int], None]


def summing(size: tuple[int, ...], layout: str, dtype: str, epilogue: str) -> ProblemDescription:
    n, k, *spatial = size
    direction = "backward_weights" if "gradient" in epilogue else "forward"
    shapes = {"x": (n, 1, *spatial), "w": (k, 1, 1, 1)}
    return ProblemDescription.convolution(**shapes, dtype=dtype, layout=layout, epilogue=epilogue, direction=direction)


@pytest.mark.parametrize("epilogue", ["statistics", "bias_gradient", "float32.bias_gradient"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_are_those_of_what_lies_there(
    size: tuple[int, ...], layout: str, dtype: str, epilogue: str, device: Device, compiler: Compiler
) -> None:
    problem = summing(size, layout, dtype, epilogue.removeprefix("float32." if dtype == "float64" else ""))
    y = np.random.default_rng(3).standard_normal(problem.y.shape).astype(numpy_dtype(problem.y.dtype))
    buffers = upload(problem, {"y": y})
    (region,) = channel_sums_regions(problem, device)
    partials = cupy.full(region.bytes + 1024, 0xFF, cupy.uint8)
    where = {**addresses(buffers), PARTIALS: int(partials.data.ptr)}
    found = []
    for _ in range(2):
        for step in channel_sums_steps(problem, device):
            assert isinstance(step, KernelStep)
            make_step_launcher(step, compiler.load(step, device))(where, cupy.cuda.get_current_stream().ptr)
        cupy.cuda.get_current_stream().synchronize()
        found.append(
            {each.name: buffers[each.name].read(numpy_dtype(each.tensor.dtype)) for each in problem.second_outputs}
        )
    assert (partials[region.bytes :] == 0xFF).all(), "nothing is written behind the workspace"
    assert wrong_sums(problem, {"y": y, **found[0]}) == ()
    assert all((found[0][name] == found[1][name]).all() for name in found[0]), "equal bits of equal inputs"
    order = memory_order(problem, "y")
    left = buffers["y"].read(numpy_dtype(problem.y.dtype)).reshape([y.shape[i] for i in order])
    np.testing.assert_array_equal(left, y.transpose(order))


class Faulty(Invoker):
    """Runs another invoker, then does damage on the same stream."""

    def __init__(self, inner: Invoker, fault: Fault) -> None:
        self._inner, self._fault = inner, fault
        self.problem, self.device = inner.problem, inner.device
        self.solver_id, self.config = inner.solver_id, inner.config
        self.workspace_bytes, self.alignment_bytes = inner.workspace_bytes, inner.alignment_bytes
        self.deterministic = True

    def run(self, bases: tuple[Any, ...], stream: int) -> None:
        self._inner.run(bases, stream)
        names = (operand.name for operand in self.problem.operands)
        self._fault(dict(zip(names, bases, strict=False)), stream)


def small(epilogue: str, dtype: str = "float16", layout: str = "NHWC") -> ProblemDescription:
    direction = "backward_weights" if "gradient" in epilogue else "forward"
    return ProblemDescription.convolution(
        x=(3, 24, 17, 15), w=(36, 8, 3, 3), groups=3, padding=1, dtype=dtype, layout=layout,
        epilogue=epilogue, direction=direction,
    )  # fmt: skip


def composed_form(problem: ProblemDescription, device: Device, compiler: Compiler) -> Invoker:
    solver = Registry.default()["ConvDirectNaive+Pointwise"]
    return make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], compiler)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "epilogue", ["statistics", "bias.residual.relu.statistics", "silu.statistics", "bias_gradient"]
)
def test_composed_forms_pass_both_gates(
    epilogue: str, dtype: str, layout: str, device: Device, compiler: Compiler
) -> None:
    problem, solver = small(epilogue, dtype, layout), Registry.default()["ConvDirectNaive+Pointwise"]
    check_both_gates(problem, solver, solver.default_configs(problem, device)[0], device, compiler)


def _unwritten(name: str) -> Fault:
    return lambda at, stream: cupy.cuda.runtime.memsetAsync(at[name], 0x7B, 4, stream)


def _behind(name: str, channels: int) -> Fault:
    return lambda at, stream: cupy.cuda.runtime.memsetAsync(at[name] + 4 * channels, 0, 4, stream)


def _misplaced(at: dict[str, int], stream: int) -> None:
    """Channel 11 has what is channel 12's, which is of the next group."""
    device_to_device = 3
    cupy.cuda.runtime.memcpyAsync(at["sum_of_squares"] + 44, at["sum_of_squares"] + 48, 4, device_to_device, stream)


FAULTS = [
    ("statistics", _unwritten("sum"), "1 of 36 channels of sum are wrong, the worst 0"),
    ("statistics", _unwritten("sum_of_squares"), "1 of 36 channels of sum_of_squares are wrong, the worst 0"),
    ("statistics", _misplaced, "1 of 36 channels of sum_of_squares are wrong, the worst 11"),
    ("statistics", _behind("sum", 36), "the guard band after sum"),
    ("float32.bias_gradient", _unwritten("bias_gradient"), "1 of 36 channels of bias_gradient are wrong, the worst 0"),
    ("float32.bias_gradient", _behind("bias_gradient", 36), "the guard band after bias_gradient"),
]


@pytest.mark.parametrize(("epilogue", "fault", "told"), FAULTS, ids=lambda value: value if type(value) is str else "")
def test_faults_are_told(epilogue: str, fault: Fault, told: str, device: Device, compiler: Compiler) -> None:
    invoker = composed_form(small(epilogue), device, compiler)
    with Verifier(invoker.problem, device, compiler, seed=11) as verifier:
        verdict = verifier.verify(invoker, Claims())
        assert verdict.ok, verdict.message
        verdict = verifier.verify(Faulty(invoker, fault), Claims())
    assert not verdict.ok
    assert told in verdict.message


def test_bits_that_change_are_seen(device: Device, compiler: Compiler) -> None:
    invoker, runs = composed_form(small("statistics"), device, compiler), [0]

    def fault(at: dict[str, int], stream: int) -> None:
        """The last bit of the first sum differs in every other run, in which it stays within its bound."""
        runs[0] += 1
        memory = cupy.cuda.UnownedMemory(at["sum"], 4, None)
        bits = cupy.ndarray((1,), cupy.uint32, cupy.cuda.MemoryPointer(memory, 0))
        with warnings.catch_warnings(action="ignore"), cupy.cuda.ExternalStream(stream):
            bits += np.uint32(runs[0] % 2)

    claims = Claims(exact=False)
    with Verifier(invoker.problem, device, compiler, seed=11) as verifier:
        verdict = verifier.verify(invoker, claims)
        changed = [verifier.repeat(Faulty(invoker, fault), claims, verdict.fingerprint, once=True) for _ in range(2)]
    assert verdict.ok, verdict.message
    assert any("differs from that of the first run" in message for message in changed)


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    path = tmp_path_factory.mktemp("finddb") / "finddb.db"
    with miofind.Handle("cuda:0", database=path, strict=True) as made:
        yield made


def _arrays(library: str) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    shapes = {"x": X, "w": W, "dy": (X[0], W[0], 14, 14)}
    host = {name: generator.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    if library == "cupy":
        return {name: cupy.asarray(array) for name, array in host.items()}
    torch = pytest.importorskip("torch")
    return {name: torch.from_numpy(array).cuda() for name, array in host.items()}


def _wide(array: Any) -> np.ndarray:
    host = cupy.asnumpy(array) if isinstance(array, cupy.ndarray) else array.cpu().numpy()
    return host.astype(np.float64)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_every_solution_writes_all_outputs(handle: miofind.Handle, library: str) -> None:
    given = _arrays(library)
    x, w, dy = given["x"], given["w"], given["dy"]
    forward = ProblemDescription.from_arrays(x=x, w=w, padding=1, activation="relu", statistics=True)
    for solution in miofind.find_solutions(forward, handle=handle):
        found = miofind.run_solution(solution, x, w)
        assert type(found.sum) is type(x)
        y = _wide(found.y)
        np.testing.assert_allclose(_wide(found.sum), y.sum(OVER), rtol=1e-5)
        np.testing.assert_allclose(_wide(found.sum_of_squares), np.square(y).sum(OVER), rtol=1e-5)
    weights = ProblemDescription.from_arrays(x=x, dy=dy, w_shape=W, padding=1, bias_gradient=True)
    for solution in miofind.find_solutions(weights, handle=handle):
        made = miofind.run_solution(solution, x=x, dy=dy)
        np.testing.assert_allclose(_wide(made.bias_gradient), _wide(dy).sum(OVER), rtol=2**-10, atol=1e-3)


def test_a_captured_run_writes_all_outputs(handle: miofind.Handle) -> None:
    given = _arrays("cupy")
    x, w = given["x"], given["w"]
    problem = ProblemDescription.from_arrays(x=x, w=w, padding=1, statistics=True)
    solution = miofind.find_solutions(problem, handle=handle)[0].prepare()
    out = miofind.run_solution(solution, x, w)
    wanted = [array.copy() for array in out]
    workspace = cupy.empty(max(1, solution.workspace_bytes), cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    miofind.run_solution(solution, x, w, out=out, workspace=workspace, stream=stream)
    graph = stream.end_capture()
    for array in out:
        array.fill(0)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for array, before in zip(out, wanted, strict=True):
        assert (array == before).all()
