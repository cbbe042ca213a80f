"""The CUDA check harness over host memory, with more operands than one launch guards: what of them was overwritten."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.problems.struct_fields import fields_of
from helpers.runs.fake_invokers import FakeInvoker

from miofind.core.problem import Operand, ProblemDescription, Role, TensorDescriptor
from miofind.core.values import Values
from miofind.device.device import Device
from miofind.evaluate.harness_kernels import harness_steps
from miofind.launch.device_kernels import GridStride
from miofind.solver.steps import RUN_PARAMETERS, KernelStep, Pointer
from miofind.solver.structs import Struct
from miofind.verify import harness_cuda
from miofind.verify.harness import GUARD_BYTES, WORKSPACE, PackedForm, Poison, Setting
from miofind.verify.harness_cuda import CudaHarness
from miofind.verify.sampling import SampleBudget

MORE = {"scale": 6, "bias": 6, "residual": 180, "mask": 45, "last": 1}
SETTINGS = (
    Setting(values=Values.TERNARY),
    Setting(values=Values.NORMAL, poison=Poison.FINITE, keeps_workspace=True, is_aligned=True),
)


class Many(ProblemDescription):
    """A convolution with five inputs more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        more = (
            Operand(name=name, tensor=TensorDescriptor(shape=(1, size, 1, 1)), role=Role.INPUT)
            for name, size in MORE.items()
        )
        object.__setattr__(self, "operands", (*self.operands, *more))


PLAIN = ProblemDescription.convolution(x=(2, 4, 5, 3), w=(6, 4, 3, 3), padding=1)
PROBLEM = Many(x=PLAIN.x, w=PLAIN.w, y=PLAIN.y, conv=PLAIN.conv)
NAMES = [operand.name for operand in PROBLEM.operands]


def bytes_at(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * count).from_address(address), np.uint8)


class Memory:
    """Stands in for DeviceMemory."""

    stream_address = 9
    free_bytes = 1 << 30

    is_capturing = False

    def __init__(self, device_index: int) -> None:
        self.blocks: dict[int, np.ndarray] = {}
        self.events: list[str] = []
        self.stream = types.SimpleNamespace(synchronize=lambda: self.events.append("waited for"))

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @contextlib.contextmanager
    def beside(self) -> Iterator[int]:
        yield 10

    def graph_of(self, work: Callable[[], None]) -> types.SimpleNamespace:
        self.is_capturing = True
        try:
            work()
        finally:
            self.is_capturing = False
        return types.SimpleNamespace(launch=lambda stream: self.events.append("launched"))

    def allocate(self, size: int) -> int:
        block = np.zeros(size + 512, np.uint8)
        address = -(-block.ctypes.data // 512) * 512
        self.blocks[address] = block
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]

    def set_bytes(self, address: int, value: int, size: int) -> None:
        bytes_at(address, size)[:] = value

    def upload(self, values: np.ndarray) -> int:
        address = self.allocate(values.nbytes)
        bytes_at(address, values.nbytes)[:] = values.view(np.uint8).reshape(-1)
        return address

    def download(self, address: int, count: int, dtype: Any) -> np.ndarray:
        return bytes_at(address, count * np.dtype(dtype).itemsize).view(dtype).copy()

    def close(self) -> None:
        self.blocks.clear()


class Kernels:
    """Stands in for DeviceKernels: fills, guards and sums up; whatever else is checked is right."""

    def __init__(self, device: Device, compiler: Any) -> None:
        pass

    def bind(
        self, kernel: GridStride, arguments: tuple[Any, ...], addresses: dict[str, int], stream: int
    ) -> Callable[[], None]:
        values = []
        for each in arguments:
            pointer = Pointer(buffer=each) if isinstance(each, str) else each
            is_address = isinstance(pointer, Pointer)
            number = pointer if isinstance(pointer, Struct) else getattr(pointer, "value", None)
            values.append(addresses[pointer.buffer] + pointer.offset_bytes if is_address else number)
        return lambda: getattr(self, kernel.entry, self.nothing)(*values)

    def bind_step(self, step: KernelStep, addresses: dict[str, int], stream: int) -> Callable[[], None]:
        return self.nothing

    def nothing(self, *_: int) -> None:
        pass

    def random_inputs(self, out: int, size: int, seed: int, *_: int) -> None:
        bytes_at(out, 4 * size)[:] = np.random.default_rng(seed).integers(0, 256, 4 * size, np.uint8)

    def bands(self, starts: tuple[int, ...], bands: dict[str, Any]) -> Iterator[np.ndarray]:
        assert bands["band_bytes"] == GUARD_BYTES
        for start, size in zip(starts, bands["bytes"], strict=True):
            yield bytes_at(start - GUARD_BYTES, GUARD_BYTES)
            yield bytes_at(start + size, GUARD_BYTES)

    def verify_poison(self, *values: Any) -> None:
        *starts, given = values
        for band in self.bands(tuple(starts), fields := fields_of(given)):
            band[:] = fields["poison"]

    def verify_guards(self, *values: Any) -> None:
        *starts, given, report = values
        slots = bytes_at(report, 64).view(np.uint64)
        for i, band in enumerate(self.bands(tuple(starts), fields := fields_of(given))):
            slots[i] += np.count_nonzero(band != fields["poison"])

    def verify_late(self, table: int, buffers: int, late_ns: int) -> None:
        for source, target, size in bytes_at(table, 24 * buffers).view(np.int64).reshape(-1, 3).tolist():
            bytes_at(target, size)[:] = bytes_at(source, size)

    def verify_checksum(self, words: int, count: int, slot: int) -> None:
        given = bytes_at(words, 2 * count).view(np.uint16).astype(np.uint64)
        bytes_at(slot, 8).view(np.uint64)[0] += (given * np.arange(3, count + 3, dtype=np.uint64)).sum()


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaHarness]:
    monkeypatch.setattr(harness_cuda, "DeviceMemory", Memory)
    monkeypatch.setattr(harness_cuda, "DeviceKernels", Kernels)
    device = Device.virtual("90a")
    made = CudaHarness(PROBLEM, device, None, 5, SampleBudget.of(device))  # type: ignore[arg-type]
    yield made
    made.close()


LATE = Setting(values=Values.NORMAL, is_late=True)


@pytest.mark.parametrize("can_be_captured", [True, False])
def test_a_late_runs_inputs_are_made_in_its_graph_or_before_it(harness: CudaHarness, can_be_captured: bool) -> None:
    memory, under_capture, inputs = harness._memory, [], []

    def run(tensors: dict[str, int], workspace: int) -> None:
        under_capture.append(memory.is_capturing)  # type: ignore[attr-defined]
        inputs.append([bytes_at(tensors[name], PROBLEM.tensor(name).bytes).copy() for name in harness.inputs])
        if memory.is_capturing and not can_be_captured:  # type: ignore[attr-defined]
            raise RuntimeError("an operation that no capture takes")

    invoker = FakeInvoker(PROBLEM, run)
    for _ in range(2):
        assert harness.check(invoker, LATE, 1.0).is_right
    assert under_capture == ([True] * 2 if can_be_captured else [True, False] * 2)
    assert memory.events == (["launched", "waited for"] * 2 if can_be_captured else [])  # type: ignore[attr-defined]
    for each in inputs:
        for made, first in zip(each, inputs[0], strict=True):
            assert not (made == Poison.NAN).all()
            assert (made == first).all()
    assert len(harness._tables) == 2


def test_a_late_run_whose_inputs_have_no_room_twice_finds_them_as_they_are(
    harness: CudaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(size: int) -> int:
        raise MemoryError(size)

    under_capture: list[bool] = []
    memory = harness._memory
    invoker = FakeInvoker(PROBLEM, lambda *_: under_capture.append(memory.is_capturing))  # type: ignore[attr-defined]
    assert harness.check(invoker, Setting(values=Values.NORMAL), 1.0).is_right
    monkeypatch.setattr(memory, "allocate", full)
    assert harness.check(invoker, LATE, 1.0).is_right
    assert under_capture == [False, False]


def test_inputs_come_late_where_kernels_begin_early_and_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_cuda, "DeviceMemory", Memory)
    monkeypatch.setattr(harness_cuda, "DeviceKernels", Kernels)
    monkeypatch.setattr(harness_cuda, "supports_pdl", lambda device: device.sm >= 90)
    large = ProblemDescription.convolution(x=(1, 64, 256, 257), w=(8, 64, 1, 1))
    found = []
    for problem, arch in ((PROBLEM, "80"), (PROBLEM, "90a"), (large, "90a")):
        device = Device.virtual(arch)
        made = CudaHarness(problem, device, None, 5, SampleBudget.of(device))  # type: ignore[arg-type]
        found.append(made.has_late_inputs)
        made.close()
    assert found == [False, True, False]


def overwriting(name: str, where: str) -> FakeInvoker:
    """Writes two bytes into a buffer, or before or behind it."""

    def run(tensors: dict[str, int], workspace: int) -> None:
        size = 64 if name == WORKSPACE else PROBLEM.tensor(name).bytes
        start = workspace if name == WORKSPACE else tensors[name]
        bytes_at(start + {"inside": 0, "before": -2, "after": size}[where], 2)[:] ^= 0x55

    return FakeInvoker(PROBLEM, run, workspace_bytes=64)


def told(name: str, where: str) -> tuple[str, ...]:
    if where != "inside":
        return (f"the guard band {where} {name}",)
    return () if name in ("y", WORKSPACE) else (f"input {name}",)


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("name", [*NAMES, WORKSPACE])
def test_an_overwritten_operand_is_named(harness: CudaHarness, name: str, where: str) -> None:
    for setting in SETTINGS:
        assert harness.check(overwriting(name, where), setting, 1.0).damaged == told(name, where)


def test_operands_are_given_in_order_and_apart(harness: CudaHarness) -> None:
    seen: list[list[int]] = []
    invoker = FakeInvoker(PROBLEM, lambda tensors, _: seen.append([tensors[name] % 512 for name in NAMES]))
    for setting in SETTINGS:
        assert harness.check(invoker, setting, 1.0).is_right
    assert seen == [[2 * (2 * i + 1) for i in range(len(NAMES))], [0] * len(NAMES)]


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "w"])
def test_an_operand_that_packed_weights_run_over_is_named(harness: CudaHarness, name: str, where: str) -> None:
    given: list[dict[str, int]] = []
    pack = FakeInvoker(PROBLEM, lambda tensors, _: given.append(tensors))
    packed = PackedForm(pack=pack, run=overwriting(name, where), bytes=100)
    assert harness.pack(packed, SETTINGS[0], 0) == ()
    assert [key for key, address in given[0].items() if address] == ["w", "y"]
    assert harness.check_packed(packed, SETTINGS[0], 1.0, 0).damaged == told(name, where)


def test_an_epilogues_reference_reads_the_operands_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made after each run, and is what the output is compared with."""
    seen: list[tuple[Any, ...]] = []

    class Recording(Kernels):
        def epilogue_results(self, *values: Any) -> None:
            seen.append(values)

        def verify_compare(self, *values: Any) -> None:
            seen.append(values)

    monkeypatch.setattr(harness_cuda, "DeviceMemory", Memory)
    monkeypatch.setattr(harness_cuda, "DeviceKernels", Recording)
    problem = ProblemDescription.convolution(x=(2, 4, 5, 3), w=(6, 4, 3, 3), epilogue="bias.residual.silu")
    device, given = Device.virtual("90a"), []
    made = CudaHarness(problem, device, None, 5, SampleBudget.of(device))  # type: ignore[arg-type]
    invoker = FakeInvoker(problem, lambda tensors, _: given.append(tensors))
    for setting in SETTINGS:
        assert made.check(invoker, setting, 1.0).is_right
    for run, made_of, (_, _, sums, scales, of, _) in zip(given, seen[::2], seen[1::2], strict=True):
        _, _, _, scale, bias, channel_bias, residual, saved, results, bounds, terms = made_of
        assert (bias, residual) == (run["bias"], run["residual"])
        assert (scale, channel_bias, saved) == (0, 0, 0)
        assert (results, bounds) == (sums, scales)
        numbers = fields_of(terms)
        assert (numbers["alpha"], numbers["beta"]) == (run[RUN_PARAMETERS].alpha, run[RUN_PARAMETERS].beta)
        assert {fields_of(of)[name] for name in ("first_even", "second_odd", "factor")} == {1.0}
    made.close()


@pytest.mark.parametrize(
    "problem",
    [
        ProblemDescription.convolution(x=(2, 8, 5, 3), w=(6, 8, 3, 3), dtype="float16", epilogue="scale.bias.relu"),
        ProblemDescription.convolution(
            x=(2, 8, 5, 3), w=(6, 8, 3, 3), dtype="bfloat16", direction="backward_weights", epilogue="bias_gradient"
        ),
        ProblemDescription.convolution(x=(4, 64, 40, 40), w=(64, 64, 3, 3), direction="backward_data"),
    ],
    ids=str,
)
def test_what_checks_a_run_is_among_what_is_compiled_ahead(
    problem: ProblemDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[tuple[object, ...]] = set()

    class Listing(Kernels):
        def bind(self, kernel: GridStride, *_: Any) -> Callable[[], None]:
            launched.add((kernel.source, (("T", kernel.dtype), *kernel.defines)))
            return self.nothing

        def bind_step(self, step: KernelStep, *_: Any) -> Callable[[], None]:
            launched.add((step.source, step.defines))
            return self.nothing

    monkeypatch.setattr(harness_cuda, "DeviceMemory", Memory)
    monkeypatch.setattr(harness_cuda, "DeviceKernels", Listing)
    device = Device.virtual("90a")
    ahead = {(step.source, step.defines) for step in harness_steps(problem, device)}
    for budget in (SampleBudget(products=1, most=1 << 12), SampleBudget(products=1 << 60)):  # a sample, and the whole
        made = CudaHarness(problem, device, None, 5, budget)  # type: ignore[arg-type]
        for setting in (*SETTINGS, Setting(values=Values.NORMAL, nonfinite=True)):
            made.check(FakeInvoker(problem, lambda *_: None), setting, 1.0)
        made.close()
    assert launched
    assert launched <= ahead
    assert {source for source, _ in ahead - launched} <= {"harness/measure.cu", "harness/reference.cu"}
