"""What a launch hands to the driver: addresses, offsets and scalars in the kernel's order."""

from __future__ import annotations

import ctypes
import struct
import sys
import types
from typing import Any

import pytest
from helpers.runs.step_launcher import make_step_launcher

from miofind.launch import tensor_maps
from miofind.solver.steps import Box, KernelStep, Pointer, Scalar, TensorMap


class _Kernel:
    function = 7


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the driver, with the values that the parameters pointed to at that moment."""
    calls: list[tuple[Any, ...]] = []

    def launch(*arguments: int) -> None:
        pointers = (ctypes.c_void_p * 4).from_address(arguments[9])
        calls.append((*arguments[:9], [ctypes.c_uint64.from_address(p).value for p in pointers]))

    driver = types.SimpleNamespace(launchKernel=launch)
    cuda = types.ModuleType("cupy.cuda")
    cuda.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return calls


FILLER = Scalar(ctype="uint64", value=0)


def step(*args: Pointer | Scalar | TensorMap) -> KernelStep:
    """A launch of four arguments."""
    four = (*args, *[FILLER] * (4 - len(args)))
    return KernelStep(source="a.cu", entry="a", grid=(1, 2, 3), block=(4, 5, 6), shared_bytes=16, args=four)


def test_pointers_and_scalars_keep_the_kernels_order(launched: list[tuple[Any, ...]]) -> None:
    args = (Pointer(buffer="x"), Scalar(ctype="uint64", value=5), Pointer(buffer="y", offset_bytes=8))
    launch = make_step_launcher(step(*args), _Kernel())
    launch({"x": 100, "y": 300}, 9)
    assert launched == [(7, 1, 2, 3, 4, 5, 6, 16, 9, [100, 5, 308, 0])]


@pytest.mark.parametrize("count", [0, 1, 4], ids="{} pointers".format)
def test_any_number_of_pointers(launched: list[tuple[Any, ...]], count: int) -> None:
    names = "wxyz"[:count]
    launch = make_step_launcher(step(*(Pointer(buffer=n) for n in names)), _Kernel())
    launch({n: 1000 + i for i, n in enumerate(names)}, 0)
    assert launched[0][-1] == [*(1000 + i for i in range(count)), *[0] * (4 - count)]


def test_a_launch_follows_its_own_addresses(launched: list[tuple[Any, ...]]) -> None:
    launch = make_step_launcher(step(Pointer(buffer="x"), Pointer(buffer="x", offset_bytes=4)), _Kernel())
    launch({"x": 100}, 0)
    launch({"x": 200}, 0)
    assert [call[-1][:2] for call in launched] == [[100, 104], [200, 204]]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses whose maps were asked for; a map that is not one holds its address in every word."""
    addresses: list[int] = []

    def encode(tensor_map: TensorMap, address: int) -> bytes:
        addresses.append(address)
        return struct.pack("<Q", address) * (tensor_maps.BYTES // 8)

    monkeypatch.setattr(tensor_maps, "encoded", encode)
    return addresses


def tensor_map(buffer: str, offset_bytes: int = 0) -> TensorMap:
    return TensorMap(
        pointer=Pointer(buffer=buffer, offset_bytes=offset_bytes),
        element="float16",
        sizes=(8, 4),
        strides_bytes=(16,),
        copy=Box(sizes=(8, 4)),
    )


def test_maps_keep_the_kernels_order(launched: list[tuple[Any, ...]], encoded: list[int]) -> None:
    args = (Pointer(buffer="y"), tensor_map("x", 32), Scalar(ctype="uint64", value=5), tensor_map("w"))
    launch = make_step_launcher(step(*args), _Kernel())
    launch({"x": 100, "w": 200, "y": 300}, 9)
    assert launched == [(7, 1, 2, 3, 4, 5, 6, 16, 9, [300, 132, 5, 200])]


def test_a_launch_of_maps_alone(launched: list[tuple[Any, ...]], encoded: list[int]) -> None:
    launch = make_step_launcher(step(tensor_map("x")), _Kernel())
    launch({"x": 100}, 0)
    assert launched[0][-1] == [100, 0, 0, 0]


def test_maps_follow_their_tensors_and_are_encoded_when_those_move(
    launched: list[tuple[Any, ...]], encoded: list[int]
) -> None:
    launch = make_step_launcher(step(tensor_map("x"), tensor_map("y")), _Kernel())
    for x, y in ((100, 500), (100, 500), (200, 500), (100, 600)):
        launch({"x": x, "y": y}, 0)
    assert [call[-1][:2] for call in launched] == [[100, 500], [100, 500], [200, 500], [100, 600]]
    assert encoded == [100, 500, 200, 100, 600]


def test_maps_lie_whole_and_aligned(encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch reads 128 bytes at a multiple of 64."""
    seen: list[tuple[int, bytes]] = []

    def launch(*arguments: int) -> None:
        pointers = (ctypes.c_void_p * 4).from_address(arguments[9])
        seen.extend((pointers[i] or 0, ctypes.string_at(pointers[i] or 0, tensor_maps.BYTES)) for i in range(2))

    cuda = types.ModuleType("cupy.cuda")
    cuda.driver = types.SimpleNamespace(launchKernel=launch)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    launchers = [make_step_launcher(step(tensor_map("x"), tensor_map("y")), _Kernel()) for _ in range(8)]
    for i, launcher in enumerate(launchers):
        launcher({"x": 1000 + i, "y": 2000 + i}, 0)
    assert all(address % 64 == 0 for address, _ in seen)
    assert [content for _, content in seen] == [
        struct.pack("<Q", first + i) * 16 for i in range(8) for first in (1000, 2000)
    ]
