"""Versions of everything a measurement depends on; the provenance of a row. Imports no library it names."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

from miofind.device import Device, Place

_PACKAGES = {
    "miofind": ("miofind",),
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu12"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}


@functools.cache
def versions(device: Device) -> dict[str, str]:
    """Version by name of this package, its libraries, Python and, on CUDA, the driver."""
    found = {"python": platform.python_version()}
    for name, packages in _PACKAGES.items():
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
