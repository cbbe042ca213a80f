"""Programmatic dependent launch: of which steps, on which devices, and what the driver is told. No GPU, no CuPy."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from miofind.compiler import kernel_hash
from miofind.compiler.sources import read_source
from miofind.core.problem import DataType, ProblemDescription
from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.launch import invoker, pdl
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import (
    Config,
    ConvSolution,
    KernelStep,
    MatmulStep,
    Pointer,
    Region,
    Scalar,
    Step,
    WorkspacePlan,
    dependent_launches,
)
from miofind.solvers.implicit_gemm.transpose import Transposition, transpose_step

driver = pytest.importorskip("cuda.bindings.driver")

SOLVER = Registry.default()["ConvChannelsLast"]
PROBLEM = ProblemDescription.convolution(x=(2, 16, 9, 6), w=(24, 16, 3, 3), dtype="float16")
HOPPER = replace(Device.virtual("90a"), index=0)
PLAIN = KernelStep(source="a.cu", entry="plain", grid=(1, 2, 3), block=(4, 5, 6), shared_bytes=16, args=())
WAITING = replace(PLAIN, source="b.cu", entry="waiting", pdl=True)
SECOND = replace(PLAIN, entry="second", pdl=True)
AT = Pointer(buffer="x")
PRODUCT = MatmulStep(
    m=1, n=1, k=1, transpose_a=False, transpose_b=False, lda=1, ldb=1, ldc=1, a=AT, b=AT, c=AT,
    dtype_ab=DataType.FLOAT16, dtype_c=DataType.FLOAT16,
)  # fmt: skip

Launch = tuple[str, int, int]


class DriverError(RuntimeError):
    """Stands in for CuPy's error."""


class Kernel:
    """Stands in for a loaded kernel, which functions tell apart."""

    def __init__(self, step: KernelStep) -> None:
        self.function = 100 + ["plain", "waiting"].index(step.entry)


class Compiler:
    def load(self, step: KernelStep, device: Device) -> Kernel:
        return Kernel(step)


class Driver:
    """Notes launches of both kinds; `status` is what dependent ones answer, `version` the driver's."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []
        self.seen: list[dict[str, Any]] = []
        self.status = 0
        self.version = 12080

    def plainly(self, function: int, *rest: int) -> None:
        self.launched.append(("plain", function, rest[7]))

    def dependent(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[int]:
        self.launched.append(("dependent", int(function), int(config.hStream)))
        [attribute] = config.attrs
        pointers = (ctypes.c_void_p * 2).from_address(parameters)
        self.seen.append(
            {
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "shared_bytes": config.sharedMemBytes,
                "attributes": config.numAttrs,
                "id": attribute.id.name,
                "allowed": attribute.value.programmaticStreamSerializationAllowed,
                "extra": extra,
                "values": [ctypes.c_int64.from_address(pointer).value for pointer in pointers if pointer],
            }
        )
        return (driver.CUresult(self.status),)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver, below a CuPy that does nothing."""
    made = Driver()
    cupy, below = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    calls = types.SimpleNamespace(launchKernel=made.plainly, CUDADriverError=DriverError)
    runtime = types.SimpleNamespace(setDevice=lambda index: None, driverGetVersion=lambda: made.version)
    vars(below).update(driver=calls, runtime=runtime, Device=lambda index: contextlib.nullcontext())
    vars(cupy).update(cuda=below)
    for module in (cupy, below):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", made.dependent)
    monkeypatch.setattr(invoker, "cuda_device_count", lambda: 1)
    return made


Make = Callable[..., invoker.Invoker]


@pytest.fixture
def make(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An invoker of a device and steps."""

    def made(device: Device, *steps: Step) -> invoker.Invoker:
        solution = ConvSolution(steps=steps, workspace=WorkspacePlan((Region(name="parts", bytes=300),)))
        monkeypatch.setattr(type(SOLVER), "solution", lambda *_: solution)
        monkeypatch.setattr(type(SOLVER), "check_config", lambda *_: None)
        return invoker.make_invoker(PROBLEM, device, SOLVER, Config(), Compiler())  # type: ignore[arg-type]

    return made


@pytest.mark.parametrize(
    ("steps", "flags"),
    [
        ((), ()),
        ((WAITING,), (False,)),
        ((PLAIN, WAITING, WAITING, PLAIN, WAITING), (False, True, True, False, True)),
        ((PRODUCT, WAITING, PRODUCT, WAITING, WAITING), (False, False, False, False, True)),
    ],
    ids=["none", "the first", "after kernels", "after products"],
)
def test_kernels_that_wait_use_pdl_after_kernels(steps: tuple[Step, ...], flags: tuple[bool, ...]) -> None:
    assert dependent_launches(steps) == flags
    made = ConvSolution(steps=steps).steps
    told = tuple(isinstance(step, KernelStep) and ("HAS_DEPENDENT", 1) in step.defines for step in made)
    assert told == (*flags[1:], False)[: len(steps)], "of a launch behind it"
    assert ConvSolution(steps=made).steps == made
    assert all(not step.defines for step in ConvSolution(steps=made[:1]).kernels), "none of others'"


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ((PLAIN, SECOND), "11"),
        ((SECOND, PLAIN), "00"),
        ((SECOND, PLAIN, WAITING), "110"),
        ((replace(PLAIN, defines=(("HAS_DEPENDENT", 2),)),), "0"),
        ((PLAIN, SECOND, WAITING), "110"),
        ((PLAIN, WAITING, SECOND), "111"),
        ((PLAIN, SECOND, PLAIN, SECOND), "1111"),
        ((PLAIN, SECOND, PLAIN), "110"),
        ((PLAIN, replace(SECOND, defines=(("A", 1),))), "10"),
    ],
)
def test_a_second_kernel_of_a_file_needs_no_binary_of_its_own(steps: tuple[Step, ...], told: str) -> None:
    made = ConvSolution(steps=steps).kernels
    assert "".join(str(int("HAS_DEPENDENT" in dict(step.defines))) for step in made) == told


def test_devices_and_drivers_with_pdl(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    served = {arch: pdl.supports_pdl(Device.virtual(arch)) for arch in ("80", "89", "90a", "100a", "120a")}
    assert served == {"80": False, "89": False, "90a": True, "100a": True, "120a": True}
    cuda.version = 12020
    assert not pdl.supports_pdl(HOPPER)
    cuda.version = 13000
    assert pdl.supports_pdl(HOPPER)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert not pdl.supports_pdl(HOPPER)


def test_the_driver_is_told_all_of_a_step(make: Make, cuda: Driver) -> None:
    args = (Pointer(buffer="parts", offset_bytes=8), Scalar(ctype="int64", value=-5))
    bound = make(HOPPER, PLAIN, replace(WAITING, args=args))
    for stream in (7, 9):
        bound.run((1, 2, 3, 4000), stream)
    assert cuda.launched == [("plain", 100, 7), ("dependent", 101, 7), ("plain", 100, 9), ("dependent", 101, 9)]
    told = {
        "grid": (1, 2, 3),
        "block": (4, 5, 6),
        "shared_bytes": 16,
        "attributes": 1,
        "id": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
        "allowed": 1,
        "extra": 0,
        "values": [4008, -5],
    }
    assert cuda.seen == [told, told]


@pytest.mark.parametrize("why", ["device", "driver"])
def test_launched_plainly_without_pdl(why: str, make: Make, cuda: Driver) -> None:
    """All steps run in order, in the stream that they were given."""
    cuda.version = 12080 if why == "device" else 12020
    bound = make(HOPPER if why == "driver" else replace(HOPPER, sm=89), PLAIN, WAITING, WAITING)
    bound.run((1, 2, 3, 4), 7)
    assert cuda.launched == [("plain", 100, 7), ("plain", 101, 7), ("plain", 101, 7)]


def test_a_refused_launch_names_the_solution(make: Make, cuda: Driver) -> None:
    bound = make(HOPPER, PLAIN, WAITING)
    cuda.status = 701
    with pytest.raises(LaunchError, match=r"ConvChannelsLast .* failed on .*701"):
        bound.run((1, 2, 3, 4), 7)
    cuda.status = 0
    bound.run((1, 2, 3, 4), 7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("solver", Registry.default().values(), ids=lambda solver: solver.id)
def test_kernels_that_say_that_they_wait_do(solver: Solver) -> None:
    """Somewhere in their sources; `tests/gpu/test_transpose_gpu.py` shows that it is early enough."""
    for problem in solver.examples():
        for config in solver.default_configs(problem, HOPPER) if solver.applicability(problem, HOPPER) else ():
            for step in solver.solution(problem, HOPPER, config).kernels:
                source = read_source(step.source, step.package, fused=step.is_fused)
                waits = any("griddepcontrol_wait();" in text for text in (source.text, *source.headers.values()))
                assert waits or not step.pdl, step.entry


def test_how_a_kernel_is_launched_leaves_rows_and_saved_files_valid() -> None:
    """Sources say whether a kernel waits, and they are hashed."""
    transposition = Transposition(source="x", target="y", dtype=DataType.FLOAT16, batch=2, rows=8, columns=9)
    step = transpose_step((transposition,))
    assert step.pdl
    assert kernel_hash(ConvSolution(steps=(step,))) == kernel_hash(ConvSolution(steps=(replace(step, pdl=False),)))
