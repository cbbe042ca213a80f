"""Whether a device still works, and how much memory is left: asked after a candidate failed and in each new process."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.device.device import Device, Place
from miofind.device.memory import DeviceMemory, kept_bytes
from miofind.errors import MiofindError
from miofind.launch.device_kernels import DeviceKernels, filling
from miofind.process.threads import in_threads

if TYPE_CHECKING:
    from miofind.compiler import Compiler

_PATTERN = 0xA5
_SEED = 20
_TENSOR = ProblemDescription.convolution(x=(1, 16, 64, 64), w=(1, 16, 1, 1)).x


def context_error(device: Device) -> str:
    """What ended this process's CUDA context, such as an illegal address; "" while it answers.

    Waits for nothing: CUDA forbids that while another thread captures a stream, and breaks its capture off. Work whose
    faults are to be seen must have finished, as that of `DeviceMemory`'s stream has after a block of it.
    """
    if device.place is Place.CPU:
        return ""
    import cupy

    try:
        with cupy.cuda.Device(device.index):
            cupy.cuda.runtime.memGetInfo()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return ""


def begin_check(device: Device, compiler: Compiler) -> None:
    """Begin in threads what `complaint` would wait for on a GPU, while this one imports CuPy: its kernel and a context.

    The driver makes a context, and NVRTC compiles, without Python's interpreter. What fails here fails there again.
    """
    if device.place is Place.CPU:
        return
    kernel, arguments = filling(_TENSOR, Values.TERNARY, _SEED)
    compiled = functools.partial(compiler.build, kernel.step(arguments, device), device.arch)
    begun: tuple[Callable[[], object], ...] = (functools.partial(_make_context, device.index), compiled)
    in_threads(lambda begin: begin(), begun, len(begun), "miofind-check")


def _make_context(index: int) -> None:
    """Have the driver make the context of a device that CuPy, PyTorch and all else of the runtime share."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver.cuInit(0)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def complaint(device: Device, compiler: Compiler) -> str:
    """What does not work on a device: memory, copies, a kernel with a known result; "" if all does."""
    if device.place is Place.CPU:
        return ""
    import cupy

    try:
        memory = DeviceMemory(device.index)
        try:
            with memory:
                return _complaint(memory, DeviceKernels(device, compiler))
        finally:
            memory.close()
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, MemoryError, MiofindError) as error:
        return f"{type(error).__name__}: {error}"


def _complaint(memory: DeviceMemory, kernels: DeviceKernels) -> str:
    address = memory.allocate(_TENSOR.bytes)
    memory.set_bytes(address, _PATTERN, _TENSOR.bytes)
    if (memory.download(address, _TENSOR.bytes, np.uint8) != _PATTERN).any():
        return "memory does not hold what was written"
    kernels.fill(_TENSOR, address, Values.TERNARY, _SEED, memory.stream_address)
    if (memory.download(address, _TENSOR.size, np.float32) != _ternary(_TENSOR.size, _SEED)).any():
        return "a kernel gives wrong results"
    return ""


def _ternary(count: int, seed: int) -> NDArray[Any]:
    """What harness/random_inputs.cu fills a float32 tensor with, kind 1."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(33)) % np.uint64(3)).astype(np.float32) - 1


def used_bytes(device: Device) -> int:
    """Memory that this process holds, on a GPU that anybody does, without what is kept for the next measurement.

    0 where it cannot be told.
    """
    if device.place is Place.CPU:
        try:
            with open("/proc/self/statm", encoding="utf-8") as fields:
                return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0
    import cupy

    with cupy.cuda.Device(device.index):
        free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free) - kept_bytes(device.index)
