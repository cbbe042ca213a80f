"""Loading kernels, with a stand-in for CuPy: what is loaded when, from where and how often."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.runs.cuda_package import CudaPackage, make_package

from miofind.compiler import BinaryCache, Compiler, load
from miofind.device.device import Device, Place
from miofind.errors import LaunchError

pytest.importorskip("cuda.bindings.nvrtc")

DEVICES = [Device(place=Place.CUDA, index=index, name=f"GPU {index}", sm=80) for index in range(2)]


class DriverError(RuntimeError):
    """Stands in for CuPy's error."""


@dataclass
class FakeCupy:
    """Notes the devices on which a cubin is loaded; no kernel gets more than `shared_limit` bytes."""

    loads: list[int] = field(default_factory=list)
    shared: dict[int, int] = field(default_factory=dict)
    shared_limit: int = 160 << 10
    static_bytes: int = 0
    refuses: bool = False
    current: int = -1

    def load(self, cubin: bytes) -> None:
        if self.refuses or not cubin.startswith(b"\x7fELF\x02"):
            raise DriverError("no kernel image")
        self.loads.append(self.current)

    def function(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=1000 + len(self.loads))

    def set_attribute(self, function: int, attribute: int, value: int) -> None:
        if value > self.shared_limit:
            raise DriverError("invalid value")
        self.shared[function] = value

    def module(self) -> SimpleNamespace:
        @contextlib.contextmanager
        def device(index: int) -> Iterator[None]:
            before, self.current = self.current, index
            yield
            self.current = before

        def memory_module() -> SimpleNamespace:
            return SimpleNamespace(load=self.load, get_function=lambda entry: self.function())

        driver = SimpleNamespace(
            CUDADriverError=DriverError,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            funcGetAttribute=lambda attribute, function: self.shared.get(function, (48 << 10) - self.static_bytes),
            funcSetAttribute=self.set_attribute,
        )
        cuda = SimpleNamespace(
            Device=device,
            driver=driver,
            runtime=SimpleNamespace(CUDARuntimeError=DriverError),
            function=SimpleNamespace(Module=memory_module),
        )
        return SimpleNamespace(cuda=cuda)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake.module())  # type: ignore[arg-type]
    monkeypatch.setattr(load, "require_cupy", lambda: None)
    monkeypatch.setattr(load, "check_fork", lambda: None)
    return fake


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaPackage:
    return make_package(tmp_path, monkeypatch)


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(BinaryCache(tmp_path / "cache"))


def test_loaded_once_a_device(cupy: FakeCupy, compiler: Compiler, package: CudaPackage) -> None:
    first, second = (compiler.load(package.step(), device) for device in DEVICES)
    assert cupy.loads == [0, 1]
    assert (first.device_index, second.device_index) == (0, 1)
    assert compiler.load(package.step(grid=(5, 1, 1)), DEVICES[0]) is first
    assert len(cupy.loads) == 2
    assert cupy.current == -1


def test_threads_load_once(cupy: FakeCupy, compiler: Compiler, package: CudaPackage) -> None:
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda _: compiler.load(package.step(), DEVICES[0]), range(40)))
    assert all(kernel is kernels[0] for kernel in kernels)
    assert len(cupy.loads) == 1


def test_loaded_from_memory_where_nothing_is_kept(
    cupy: FakeCupy, tmp_path: Path, package: CudaPackage, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    Compiler(BinaryCache(tmp_path / "file" / "cache")).load(package.step(), DEVICES[0])
    assert cupy.loads == [0]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "content", [None, b"rubbish", b"\x7fELF\x02 of another"], ids=["evicted", "rubbish", "swapped"]
)
def test_what_was_checked_is_what_is_loaded(
    cupy: FakeCupy, compiler: Compiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """The file was opened anew for CuPy, after its checksum had been checked."""
    loaded: list[bytes] = []
    monkeypatch.setattr(cupy, "load", loaded.append)
    monkeypatch.setitem(sys.modules, "cupy", cupy.module())  # type: ignore[arg-type]
    binary = compiler.build(package.step(), "80")
    assert binary.path is not None
    binary.path.unlink()
    if content is not None:
        binary.path.write_bytes(content)
    monkeypatch.setattr(compiler, "build", lambda step, arch: binary)
    compiler.load(package.step(), DEVICES[0])
    assert loaded == [binary.cubin]


def test_shared_memory_is_asked_for_where_it_is_needed(
    cupy: FakeCupy, compiler: Compiler, package: CudaPackage
) -> None:
    kernel = compiler.load(package.step(shared_bytes=48 << 10), DEVICES[0])
    assert cupy.shared == {}
    compiler.load(package.step(shared_bytes=100 << 10), DEVICES[0])
    compiler.load(package.step(shared_bytes=64 << 10), DEVICES[0])
    assert cupy.shared == {kernel.function: 100 << 10}


def test_static_shared_memory_counts(cupy: FakeCupy, compiler: Compiler, package: CudaPackage) -> None:
    cupy.static_bytes = 16 << 10
    kernel = compiler.load(package.step(shared_bytes=40 << 10), DEVICES[0])
    assert cupy.shared == {kernel.function: 40 << 10}


def test_too_much_shared_memory(cupy: FakeCupy, compiler: Compiler, package: CudaPackage) -> None:
    with pytest.raises(LaunchError, match="scale cannot have 204800 bytes of dynamic shared memory on CUDA device 1"):
        compiler.load(package.step(shared_bytes=200 << 10), DEVICES[1])


def test_a_binary_the_driver_refuses(cupy: FakeCupy, compiler: Compiler, package: CudaPackage) -> None:
    cupy.refuses = True
    with pytest.raises(LaunchError, match=r"scale cannot be loaded on GPU 1 \(device 1\): no kernel image"):
        compiler.load(package.step(), DEVICES[1])


def test_the_module_lives_as_long_as_the_kernel(cupy: FakeCupy, compiler: Compiler, package: CudaPackage) -> None:
    kernel: Any = compiler.load(package.step(), DEVICES[0])
    assert kernel.loaded.function.ptr == kernel.function
