"""A fourth operand, which no solver has: by its name through invokers, bound steps, checks, harnesses and timers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.runs.fake_invokers import FakeInvoker, compute, right, then

from miofind.arrays import operands
from miofind.core.epilogue import DEFAULT_PARAMETERS
from miofind.core.problem import Direction, Operand, ProblemDescription, Role, TensorDescriptor
from miofind.device.device import Device
from miofind.errors import InvalidArrayError
from miofind.launch import bound_steps, invoker
from miofind.launch.bound_steps import BoundCudnn
from miofind.launch.invoker import Bases, bases_of, make_invoker
from miofind.measure.timer import Timer
from miofind.solver.registry import Registry
from miofind.solver.steps import (
    Config,
    ConvSolution,
    CudnnStep,
    HostStep,
    KernelStep,
    Pointer,
    Region,
    Scalar,
    WorkspacePlan,
)
from miofind.verify.claims import Claims
from miofind.verify.verifier import Verifier

PLAN = WorkspacePlan((Region(name="head", bytes=300), Region(name="parts", bytes=8)))


class Shifted(ProblemDescription):
    """A convolution with an operand more: "shift", (1, k, 1, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shift = Operand(name="shift", tensor=TensorDescriptor(shape=(1, self.k, 1, 1)), role=Role.INPUT)
        object.__setattr__(self, "operands", (*self.operands, shift))


def shifted(**arguments: Any) -> Shifted:
    plain = ProblemDescription.convolution(x=(2, 3, 5, 4), w=(4, 3, 3, 3), padding=1, **arguments)
    return Shifted(x=plain.x, w=plain.w, y=plain.y, conv=plain.conv, direction=plain.direction)


FORWARD = shifted()
FOUR = ["x", "w", "y", "shift"]


def add_shift(problem: ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
    """A host step: the convolution and the shift, of which a copy stays in the workspace."""
    buffers["parts"].view(np.float32)[:2] = buffers["shift"].reshape(-1)[:2]
    buffers["y"][...] = compute(problem, dict(buffers)) + buffers["shift"]


def arrays_of(problem: ProblemDescription) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {
        operand.name: generator.standard_normal(operand.tensor.shape).astype(np.float32) for operand in problem.operands
    }


def test_a_problem_counts_all_its_operands() -> None:
    assert [operand.name for operand in FORWARD.operands] == FOUR
    assert [operand.name for operand in FORWARD.inputs] == ["x", "w", "shift"]
    assert [operand.name for operand in shifted(direction="backward_data").inputs] == ["y", "w", "shift"]
    assert FORWARD.tensor("shift").bytes == 16
    assert FORWARD.bytes == FORWARD.x.bytes + FORWARD.w.bytes + FORWARD.y.bytes + 16


def test_bases_follow_the_order_of_the_operands() -> None:
    assert bases_of(FORWARD, {"shift": 4, "y": 3, "w": 2, "x": 1}, 5) == (1, 2, 3, 4, 5)
    assert bases_of(FORWARD, {"w": 2}, None) == (0, 2, 0, 0, None)


def test_a_host_step_finds_its_operand_by_name() -> None:
    step = HostStep(module=__name__, function="add_shift")
    solver = Registry.default()["ConvCpuDirect"]
    part = ConvSolution(steps=(step,), workspace=PLAN)
    made = make_invoker(FORWARD, Device.cpu(), solver, Config(), None, part)  # type: ignore[arg-type]
    given, workspace = arrays_of(FORWARD), np.zeros(made.workspace_bytes, np.uint8)
    made.run(bases_of(FORWARD, given, workspace), 0)
    wanted = compute(FORWARD, given) + given["shift"]
    np.testing.assert_allclose(given["y"], wanted, rtol=1e-6)
    at = PLAN.offsets["parts"]
    np.testing.assert_array_equal(workspace[at : at + 8].view(np.float32), given["shift"].reshape(-1)[:2])


class Launches:
    """Kernels that are launched: the 64-bit arguments that they were given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def bind(self, step: KernelStep, kernel: Any) -> Any:
        def launch(stream: int, parameters: int, extra: int) -> None:
            pointers = (ctypes.c_void_p * len(step.args)).from_address(parameters)
            self.seen.append([ctypes.c_uint64.from_address(pointer).value for pointer in pointers if pointer])

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Launches below a CuPy that does nothing."""
    made, cupy = Launches(), types.ModuleType("cupy")
    runtime = types.SimpleNamespace(setDevice=lambda index: None, driverGetVersion=lambda: 12080)
    vars(cupy)["cuda"] = types.SimpleNamespace(Device=lambda index: contextlib.nullcontext(), runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(bound_steps, "_plain_launcher", made.bind)
    monkeypatch.setattr(invoker, "cuda_device_count", lambda: 1)
    return made


def test_a_kernel_step_finds_its_operand_by_name(launches: Launches) -> None:
    class Compiler:
        def load(self, step: KernelStep, device: Device) -> Any:
            return None

    args = (
        Pointer(buffer="shift", offset_bytes=8),
        Pointer(buffer="x"),
        Scalar(ctype="uint64", value=7),
        Pointer(buffer="parts", offset_bytes=4),
        Pointer(buffer="y"),
    )
    step = KernelStep(source="a.cu", entry="a", grid=(1, 1, 1), block=(32, 1, 1), args=args)
    device = replace(Device.virtual("80"), index=0)
    solver = Registry.default()["ConvDirectNaive"]
    config = solver.default_configs(FORWARD, device)[0]
    part = ConvSolution(steps=(step,), workspace=PLAN)
    made = make_invoker(FORWARD, device, solver, config, Compiler(), part)  # type: ignore[arg-type]
    made.run((1000, 2000, 3000, 4000, 5000), 0)
    made.run((1001, 2001, 3001, 4001, 5001), 0)
    parts = PLAN.offsets["parts"] + 4
    assert launches.seen == [[4008, 1000, 7, 5000 + parts, 3000], [4009, 1001, 7, 5001 + parts, 3001]]


def test_cudnn_is_given_all_operands_and_its_part_of_the_workspace() -> None:
    seen: list[tuple[Bases, int]] = []
    problem = ProblemDescription.convolution(x=(1, 8, 4, 4), w=(8, 8, 1, 1))
    fused = ProblemDescription.convolution(x=(1, 8, 4, 4), w=(8, 8, 1, 1), epilogue="bias")
    plan = types.SimpleNamespace(prepare=lambda: None, launch=lambda bases, stream: seen.append((bases, stream)))
    for workspace in (None, "head", "parts"):
        step = CudnnStep(engine=0, knobs=(), workspace=workspace)
        BoundCudnn(step, plan, PLAN, problem)((1, 2, 3, 5000), 7)  # type: ignore[arg-type]
        BoundCudnn(step, plan, PLAN, fused)((1, 2, 3, 4, DEFAULT_PARAMETERS, 5000), 7)  # type: ignore[arg-type]
    offset = PLAN.offsets["parts"]
    assert seen == [((1, 2, 3, 5000), 7)] * 4 + [((1, 2, 3, 5000 + offset), 7)] * 2


class Tensor:
    """Stands in for a PyTorch tensor on a device."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def test_tensors_like_the_last_ones_are_checked_by_one_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own checks come first, and again where an address is 0 or misaligned or the guard says no."""
    is_like, checked = True, []

    def check(name: str, tensor: Tensor) -> int:
        checked.append(name)
        if tensor.address % 16 or not tensor.address:
            raise InvalidArrayError(name)
        return tensor.address

    monkeypatch.setattr(operands, "_torch_guard", lambda *tensors: lambda *others: is_like and len(others) == 4)
    memory = operands.OperandMemory(sizes_bytes=(16, 16, 16, 16), written=2, alignment=16)
    check_all = operands.check_of_all([functools.partial(check, name) for name in FOUR], memory, 0)
    addresses = (16, 32, 48, 64)
    for _ in range(3):
        assert check_all(tuple(map(Tensor, addresses))) == addresses
    assert checked == FOUR
    for wrong in (0, 72):
        for place, name in enumerate(FOUR):
            with pytest.raises(InvalidArrayError, match=f"^{name}$"):
                check_all(tuple(Tensor(wrong if i == place else address) for i, address in enumerate(addresses)))
    with pytest.raises(InvalidArrayError, match="out shares memory"):
        check_all(tuple(map(Tensor, (16, 32, 64, 64))))
    checked.clear()
    is_like = False
    assert check_all(tuple(map(Tensor, addresses))) == addresses
    assert checked == FOUR


def test_a_guard_takes_a_tensor_in_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own is false of those that it is given twice."""

    class TensorGuards:
        def __init__(self, *tensors: Tensor, **sizes: None) -> None:
            self.count = len(tensors)

        def check(self, *tensors: Tensor) -> bool:
            return len(tensors) == self.count == len(set(map(id, tensors)))

    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", types.SimpleNamespace(TensorGuards=TensorGuards))
    monkeypatch.setattr(operands, "framework_of", lambda tensor: operands.Framework.TORCH)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    x, w, y, residual = map(Tensor, (16, 32, 48, 64))
    apart, repeated = operands._torch_guard(x, w, y, residual), operands._torch_guard(x, w, y, x)
    assert apart is not None
    assert repeated is not None
    assert apart(x, w, y, residual)
    assert repeated(w, x, y, w)
    assert not apart(x, w, y, x)
    assert not repeated(x, w, y, residual)


@pytest.mark.parametrize("direction", Direction)
def test_verification_gives_guards_and_compares_all_operands(direction: Direction) -> None:
    """A candidate that does not use it is right; one that writes to it, or beside it, is not."""
    problem = shifted(direction=direction)

    def overwrite(tensors: dict[str, Any], workspace: Any) -> None:
        tensors["shift"][...] = 0

    def write_behind(tensors: dict[str, Any], workspace: Any) -> None:
        shift = tensors["shift"]
        np.lib.stride_tricks.as_strided(shift.reshape(-1), (5,))[4] = 0

    with Verifier(problem, Device.cpu(), None) as verifier:  # type: ignore[arg-type]
        verdict = verifier.verify(FakeInvoker(problem, right(problem)), Claims())
        assert verdict.ok, verdict.message
        for fault, told in ((overwrite, "overwritten: input shift"), (write_behind, "the guard band after shift")):
            assert told in verifier.verify(FakeInvoker(problem, then(right(problem), fault)), Claims()).message


def test_verification_lays_all_operands_at_addresses_of_their_own() -> None:
    places: list[set[int]] = []

    def run(tensors: dict[str, Any], workspace: Any) -> None:
        assert list(tensors) == FOUR
        places.append({array.__array_interface__["data"][0] % 512 for array in tensors.values()})
        right(FORWARD)(tensors, workspace)

    with Verifier(FORWARD, Device.cpu(), None) as verifier:  # type: ignore[arg-type]
        assert verifier.verify(FakeInvoker(FORWARD, run), Claims()).ok
    assert {2, 6, 10, 14} in places


def test_measurement_gives_all_operands() -> None:
    seen: list[list[str]] = []

    def run(tensors: dict[str, Any], workspace: Any) -> None:
        assert all(np.isfinite(array).all() for array in tensors.values())
        seen.append(list(tensors))

    with Timer(FORWARD, Device.cpu(), None) as timer:  # type: ignore[arg-type]
        timer.prepare(FakeInvoker(FORWARD, run))
    assert seen[0] == FOUR
