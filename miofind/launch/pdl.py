"""Programmatic dependent launch (PDL): a kernel begins while the kernel before it in the stream still runs.

CuPy has no such launch: cuda-bindings calls the driver. The kernel itself waits (griddepcontrol.wait) where it must.

Source: CUDA programming guide, Programmatic Dependent Launch; driver API, cuLaunchKernelEx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from miofind.device.device import Device
from miofind.solver.steps import KernelStep

if TYPE_CHECKING:
    from miofind.compiler import Kernel

_MIN_SM = 90
_MIN_DRIVER = 12030  # the first whose captured graphs keep dependent launches


def supports_pdl(device: Device) -> bool:
    """Whether the device, its driver and the installed packages have PDL."""
    if device.sm < _MIN_SM:
        return False
    try:
        import cupy
        from cuda.bindings import driver
    except ImportError:
        return False
    return hasattr(driver, "cuLaunchKernelEx") and cupy.cuda.runtime.driverGetVersion() >= _MIN_DRIVER


def pdl_launcher(step: KernelStep, kernel: Kernel) -> Callable[[int, int, int], None]:
    """The launch of a step's kernel with PDL, called like CuPy's launch: stream, address of the parameters, 0.

    It writes the stream into one launch configuration: do not share it between threads.
    """
    import cupy
    from cuda.bindings import driver

    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = step.block
    config.sharedMemBytes = step.shared_bytes
    config.attrs = [attribute]
    config.numAttrs = 1
    start, function, success = driver.cuLaunchKernelEx, driver.CUfunction(kernel.function), driver.CUresult(0)

    def launch(stream: int, parameters: int, extra: int) -> None:
        config.hStream = stream
        (status,) = start(config, function, parameters, extra)
        if status != success:
            raise cupy.cuda.driver.CUDADriverError(int(status))

    return launch
