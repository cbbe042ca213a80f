"""What a launch hands to the driver: addresses, offsets and scalars in the kernel's order."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import pytest

from miofind.invoker import make_step_launcher
from miofind.solution import KernelStep, Pointer, Scalar


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


def step(*args: Pointer | Scalar) -> KernelStep:
    """A launch of four arguments."""
    four = (*args, *[FILLER] * (4 - len(args)))
    return KernelStep(source="a.cu", entry="a", grid=(1, 2, 3), block=(4, 5, 6), shared_bytes=16, args=four)


def test_pointers_and_scalars_keep_the_kernels_order(launched: list[tuple[Any, ...]]) -> None:
    args = (Pointer(buffer="x"), Scalar(ctype="uint64", value=5), Pointer(buffer="y", offset_bytes=8))
    launch = make_step_launcher(step(*args), _Kernel())  # type: ignore[arg-type]
    launch({"x": 100, "y": 300}, 9)
    assert launched == [(7, 1, 2, 3, 4, 5, 6, 16, 9, [100, 5, 308, 0])]


@pytest.mark.parametrize("count", [0, 1, 4], ids="{} pointers".format)
def test_any_number_of_pointers(launched: list[tuple[Any, ...]], count: int) -> None:
    names = "wxyz"[:count]
    launch = make_step_launcher(step(*(Pointer(buffer=n) for n in names)), _Kernel())  # type: ignore[arg-type]
    launch({n: 1000 + i for i, n in enumerate(names)}, 0)
    assert launched[0][-1] == [*(1000 + i for i in range(count)), *[0] * (4 - count)]


def test_a_launch_follows_its_own_addresses(launched: list[tuple[Any, ...]]) -> None:
    launch = make_step_launcher(step(Pointer(buffer="x"), Pointer(buffer="x", offset_bytes=4)), _Kernel())  # type: ignore[arg-type]
    launch({"x": 100}, 0)
    launch({"x": 200}, 0)
    assert [call[-1][:2] for call in launched] == [[100, 104], [200, 204]]
