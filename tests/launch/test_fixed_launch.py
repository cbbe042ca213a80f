"""A launch of the measuring kernels: what it hands to the driver each time, packed once."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import pytest

from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.launch.device_kernels import DeviceKernels, GridStride, int32, int64
from miofind.launch.fixed_launch import FixedLaunch
from miofind.solver.steps import KernelStep, Pointer, Scalar
from miofind.solver.structs import Struct, StructType

TERMS = StructType("Terms", first="int32", factor="float64", pad=("int32", 3))
ADDRESSES = {"x": 1 << 40, "y": 300}


class Kernel:
    function = 7


class Laid(ctypes.Structure):
    """TERMS as ctypes lays it out."""

    _fields_ = (("first", ctypes.c_int32), ("factor", ctypes.c_double), ("pad", ctypes.c_int32 * 3))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the driver; the address of the parameters is among them."""
    calls: list[tuple[Any, ...]] = []
    driver = types.SimpleNamespace(launchKernel=lambda *arguments: calls.append(arguments))
    cupy = types.ModuleType("cupy")
    vars(cupy)["cuda"] = types.SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return calls


def step(*args: Pointer | Scalar | Struct) -> KernelStep:
    return KernelStep(source="a.cu", entry="a", grid=(1, 2, 3), block=(4, 5, 6), shared_bytes=16, args=args)


def given(parameters: int, *types: type) -> list[Any]:
    """What the parameters at an address point to."""
    pointers = (ctypes.c_void_p * len(types)).from_address(parameters)
    for pointer, kind in zip(pointers, types, strict=True):
        assert pointer is not None
        assert pointer % ctypes.alignment(kind) == 0
    return [kind.from_address(pointer) for pointer, kind in zip(pointers, types, strict=True)]  # type: ignore[attr-defined]


def test_arguments_lie_as_the_kernel_reads_them(launched: list[tuple[Any, ...]]) -> None:
    terms = TERMS(first=-1, factor=0.5, pad=(2, 3, 4))
    args = (int32(-5), Pointer(buffer="x"), int32(6), terms, int32(7), Pointer(buffer="y", offset_bytes=8), int64(-8))
    launch = FixedLaunch(step(*args), Kernel(), ADDRESSES, 9)  # type: ignore[arg-type]
    for _ in range(2):
        launch()
    assert launched[0] == launched[1]
    *geometry, parameters, extra = launched[0]
    assert (geometry, extra) == ([7, 1, 2, 3, 4, 5, 6, 16, 9], 0)
    number, address = ctypes.c_int32, ctypes.c_uint64
    first, x, second, laid, third, y, last = given(
        parameters, number, address, number, Laid, number, address, ctypes.c_int64
    )
    assert [first.value, second.value, third.value, last.value] == [-5, 6, 7, -8]
    assert [x.value, y.value] == [1 << 40, 308]
    assert (laid.first, laid.factor, [*laid.pad]) == (-1, 0.5, [2, 3, 4])


def test_a_kernel_may_take_nothing(launched: list[tuple[Any, ...]]) -> None:
    FixedLaunch(step(), Kernel(), {}, 9)()  # type: ignore[arg-type]
    assert launched[0][0] == 7


@pytest.mark.parametrize(
    "argument", [int32(2**31), TERMS(first=2**31, factor=0.5, pad=(2, 3, 4))], ids=["number", "struct"]
)
@pytest.mark.usefixtures("launched")
def test_a_number_that_does_not_fit_is_named(argument: Scalar | Struct) -> None:
    with pytest.raises(LaunchError, match="2147483648 does not fit into int32"):
        FixedLaunch(step(int32(0), argument), Kernel(), ADDRESSES, 9)  # type: ignore[arg-type]


@pytest.mark.usefixtures("launched")
def test_kernels_that_differ_in_a_define_are_loaded_apart_and_each_once() -> None:
    loaded: list[tuple[str, object]] = []

    class Compiler:
        def load(self, step: KernelStep, device: Device) -> Kernel:
            loaded.append((step.entry, dict(step.defines)["T"]))
            return Kernel()

    kernels = DeviceKernels(Device.virtual("90a"), Compiler())  # type: ignore[arg-type]
    for dtype in ("float16", "float32", "float16"):
        for count in (1, 2):
            for entry in ("a", "b"):
                kernel = GridStride(source="a.cu", entry=entry, items=count, dtype=dtype)
                kernels.bind(kernel, ("x", int64(count)), ADDRESSES, 9)()
    assert loaded == [("a", "float16"), ("b", "float16"), ("a", "float32"), ("b", "float32")]
