"""Launches that begin while the kernel before them in the stream still runs: programmatic dependent launch.

CuPy has no such launch, so the driver is called through cuda-bindings. The kernel waits for itself where it must.

Source: CUDA programming guide, Programmatic Dependent Launch; driver API, cuLaunchKernelEx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from miofind.device.device import Device
from miofind.solver.steps import KernelStep, Step

if TYPE_CHECKING:
    from miofind.compiler import Kernel

_MIN_SM = 90
_MIN_DRIVER = 12030  # the first whose graphs keep such launches when they are captured


def may_begin_early(steps: Sequence[Step]) -> tuple[bool, ...]:
    """Whether each step may begin before the one before it has ended: kernels that wait themselves, after a kernel."""
    return tuple(
        isinstance(step, KernelStep) and step.waits_itself and isinstance(last, KernelStep)
        for step, last in zip(steps, (None, *steps), strict=False)
    )


def launches_early(device: Device) -> bool:
    """Whether the device, its driver and the installed packages have such launches."""
    if device.sm < _MIN_SM:
        return False
    try:
        import cupy
        from cuda.bindings import driver
    except ImportError:
        return False
    return hasattr(driver, "cuLaunchKernelEx") and cupy.cuda.runtime.driverGetVersion() >= _MIN_DRIVER


def early_launcher(step: KernelStep, kernel: Kernel) -> Callable[[int, int, int], None]:
    """A launch of a step's kernel that may begin early, called like CuPy's with a stream, parameters' address and 0.

    Keeps the launch's description, and writes the stream into it: not to be shared between threads.
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
