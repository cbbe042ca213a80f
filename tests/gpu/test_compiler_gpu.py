"""Loading and launching compiled kernels on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.runs.cuda_package import SCALE, CudaPackage, make_package

from miofind.compiler import BinaryCache, Compiler, Kernel
from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.solver.steps import KernelStep

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SHARED = """\
extern "C" __global__ void reversed(int* y, const int* x, int n) {
  extern __shared__ int values[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) values[n - 1 - i] = x[i];
  __syncthreads();  // every value is in place before any is read
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = values[i];
}
"""


STATIC = """\
extern "C" __global__ void both(int* y, const int* x, int n) {
  extern __shared__ int moving[];
  __shared__ int fixed[4096];
  for (int i = threadIdx.x; i < n; i += blockDim.x) (i < 4096 ? fixed[i] : moving[i - 4096]) = x[i];
  __syncthreads();  // every value is in place before any is read
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[n - 1 - i] = i < 4096 ? fixed[i] : moving[i - 4096];
}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaPackage:
    return make_package(tmp_path, monkeypatch)


def launch(kernel: Kernel, step: KernelStep, *arguments: object) -> None:
    """Launch by the handle alone, as an invoker does."""
    values = [
        np.array([argument.data.ptr if isinstance(argument, cupy.ndarray) else argument], dtype=dtype)
        for argument, dtype in zip(arguments, (np.uint64, np.uint64, np.int32), strict=True)
    ]
    pointers = np.array([value.ctypes.data for value in values], dtype=np.uint64)
    stream = cupy.cuda.get_current_stream().ptr
    size = (*step.grid, *step.block, step.shared_bytes, stream, pointers.ctypes.data, 0)
    cupy.cuda.driver.launchKernel(kernel.function, *size)
    cupy.cuda.get_current_stream().synchronize()


def check_scale(kernel: Kernel, step: KernelStep, factor: int) -> None:
    x = cupy.arange(32, dtype=np.float32)
    y = cupy.full(32, np.nan, dtype=np.float32)
    launch(kernel, step, y, x, 32)
    np.testing.assert_array_equal(y.get(), factor * x.get())


def test_a_kernel_runs(tmp_path: Path, package: CudaPackage, device: Device) -> None:
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    for factor in (2, 5):
        step = package.step(defines=(("FACTOR", factor),))
        kernel = compiler.load(step, device)
        check_scale(kernel, step, factor)
        assert compiler.load(step, device) is kernel


def test_a_kernel_runs_from_memory(tmp_path: Path, package: CudaPackage, device: Device) -> None:
    (tmp_path / "file").touch()
    step = package.step()
    check_scale(Compiler(BinaryCache(tmp_path / "file" / "cache")).load(step, device), step, 2)


def test_an_adopted_kernel_runs(tmp_path: Path, package: CudaPackage, device: Device) -> None:
    step = package.step()
    cubin = Compiler(BinaryCache(tmp_path / "cache")).build(step, device.arch).cubin
    compiler = Compiler(BinaryCache(tmp_path / "other"))
    compiler.adopt(step, device.arch, cubin)
    check_scale(compiler.load(step, device), step, 2)


def test_a_kernel_whose_file_is_gone_runs(
    tmp_path: Path, package: CudaPackage, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    step = package.step()
    binary = compiler.build(step, device.arch)
    assert binary.path is not None
    binary.path.unlink()
    monkeypatch.setattr(compiler, "build", lambda step, arch: binary)
    check_scale(compiler.load(step, device), step, 2)


def test_a_kernel_whose_file_is_rubbish_runs(
    tmp_path: Path, package: CudaPackage, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    step = package.step()
    binary = compiler.build(step, device.arch)
    assert binary.path is not None
    binary.path.write_bytes(b"rubbish")
    monkeypatch.setattr(compiler, "build", lambda step, arch: binary)
    check_scale(compiler.load(step, device), step, 2)


def test_more_than_48_kib_of_shared_memory(tmp_path: Path, package: CudaPackage, device: Device) -> None:
    package.write(reversed_cu=SHARED)
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    small, large = (
        package.step("reversed.cu", "reversed", shared_bytes=size) for size in (50 << 10, device.shared_bytes)
    )
    kernel = compiler.load(large, device)
    assert compiler.load(small, device) is kernel
    Compiler(BinaryCache(tmp_path / "cache")).load(small, device)
    x = cupy.arange(device.shared_bytes // 4, dtype=np.int32)
    y = cupy.empty_like(x)
    launch(kernel, large, y, x, x.size)
    np.testing.assert_array_equal(y.get(), x.get()[::-1])


def test_static_and_dynamic_shared_memory_above_48_kib(tmp_path: Path, package: CudaPackage, device: Device) -> None:
    package.write(both_cu=STATIC)
    step = package.step("both.cu", "both", shared_bytes=40 << 10)
    x = cupy.arange(4096 + (10 << 10), dtype=np.int32)
    y = cupy.empty_like(x)
    launch(Compiler(BinaryCache(tmp_path / "cache")).load(step, device), step, y, x, x.size)
    np.testing.assert_array_equal(y.get(), x.get()[::-1])


def test_more_shared_memory_than_there_is(tmp_path: Path, package: CudaPackage, device: Device) -> None:
    step = package.step(shared_bytes=device.shared_bytes + 1024)
    with pytest.raises(LaunchError, match=f"cannot have {step.shared_bytes} bytes of dynamic shared memory"):
        Compiler(BinaryCache(tmp_path / "cache")).load(step, device)


def test_a_binary_of_another_architecture_is_refused(tmp_path: Path, package: CudaPackage, device: Device) -> None:
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    step = package.step()
    compiler.adopt(step, device.arch, compiler.build(step, "80" if device.sm >= 90 else "90a").cubin)
    with pytest.raises(LaunchError, match="scale cannot be loaded on"):
        compiler.load(step, device)


def test_threads_load_and_build_with_cuda_in_use(tmp_path: Path, package: CudaPackage, device: Device) -> None:
    package.write(scale_cu=SCALE)
    cupy.zeros(4)
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    steps = [package.step(defines=(("FACTOR", 1 + number % 4),)) for number in range(32)]
    assert len(list(compiler.build_all(steps, device.arch))) == 32
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda step: compiler.load(step, device), steps))
    assert len({kernel.function for kernel in kernels}) == 4
    for number in range(4):
        check_scale(kernels[number], steps[number], 1 + number)
