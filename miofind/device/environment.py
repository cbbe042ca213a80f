"""Versions of everything a measurement depends on; the provenance of a row. Imports no library it names."""

from __future__ import annotations

import functools
import importlib.metadata

from miofind.device.device import Device, Place
from miofind.process.forks import loading

_CUDA_PACKAGES = {
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu12"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}


_CPU_PACKAGES = {"numpy": ("numpy",)}


@functools.cache
def versions(device: Device) -> dict[str, str]:
    """Version by name of what a time on a device depends on: NumPy on the CPU place, else CUDA's libraries and driver.

    A row that was measured with others is stale: usable, and queued for a re-check.
    """
    found = {}
    with loading():  # the first question imports what reads the answer
        for name, packages in (_CPU_PACKAGES if device.place is Place.CPU else _CUDA_PACKAGES).items():
            for package in packages:
                try:
                    found[name] = importlib.metadata.version(package)
                    break
                except importlib.metadata.PackageNotFoundError:
                    continue
    if device.place is Place.CUDA and device.index >= 0:
        found["driver"] = _driver_version()
    return found


@functools.cache
def _driver_version() -> str:
    """The driver's CUDA version, such as "13.0"."""
    import cupy

    version = int(cupy.cuda.runtime.driverGetVersion())
    return f"{version // 1000}.{version % 1000 // 10}"
