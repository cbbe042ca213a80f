"""Binaries onto a device: the only user of CuPy's Module."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from miofind.compiler.cache import Binary
from miofind.device.captures import captures_undisturbed
from miofind.device.device import Device, Place, check_fork, require_cupy
from miofind.errors import LaunchError, NoDeviceError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel loaded on a device.

    Attributes:
        function: the CUfunction, valid as long as this object lives.
        entry: its name.
        device_index: CUDA ordinal of its device.
        binary: what it was loaded from.
    """

    function: int
    entry: str
    device_index: int
    binary: Binary
    loaded: LoadedFunction = field(repr=False)

    def allow_shared_bytes(self, dynamic_bytes: int) -> None:
        """Let launches use that much dynamic shared memory, or more if they may already.

        Unasked the driver grants 48 KiB less what the kernel has statically (cuda.h, CUfunction_attribute). The limit
        is never lowered: steps that differ in shared memory alone share one kernel.

        Raises:
            LaunchError: the device has less.
        """
        import cupy

        driver = cupy.cuda.driver
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        try:
            with cupy.cuda.Device(self.device_index):
                if driver.funcGetAttribute(attribute, self.function) < dynamic_bytes:
                    driver.funcSetAttribute(self.function, attribute, dynamic_bytes)
        except driver.CUDADriverError as error:
            raise LaunchError(
                f"kernel {self.entry} cannot have {dynamic_bytes} bytes of dynamic shared memory"
                f" on CUDA device {self.device_index}: {error}"
            ) from error


class LoadedFunction:
    """CuPy's function of a kernel; its module is unloaded with this object, without breaking a capture."""

    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function

    def __del__(self, finalizing: Any = sys.is_finalizing) -> None:
        if not finalizing():
            with captures_undisturbed():
                self.function = None


def load_kernel(binary: Binary, entry: str, device: Device) -> Kernel:
    """A kernel of a binary, loaded in the context of the device.

    Raises:
        ForkedProcessError: this process was forked from one that had used CUDA.
        LaunchError: the driver refuses the binary.
        MissingLibraryError: CuPy is not installed.
        NoDeviceError: there is no driver, or the device is virtual or the CPU place.
    """
    if device.place is not Place.CUDA or device.index < 0:
        raise NoDeviceError(
            f"kernel {entry} cannot be loaded on {device.name or device.place}: it is no CUDA device here"
        )
    require_cupy()
    check_fork()
    import cupy

    failures = (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)
    try:
        with cupy.cuda.Device(device.index):
            loaded = LoadedFunction(_function(binary, entry))
    except failures as error:
        raise LaunchError(
            f"kernel {entry} cannot be loaded on {device.name} (device {device.index}): {error}"
        ) from error
    return Kernel(function=loaded.function.ptr, entry=entry, device_index=device.index, binary=binary, loaded=loaded)


def _function(binary: Binary, entry: str) -> Any:
    """CuPy's Function, which keeps its module loaded; from the bytes that were checked, never anew from their file."""
    import cupy

    module = cupy.cuda.function.Module()
    module.load(binary.cubin)
    return module.get_function(entry)
