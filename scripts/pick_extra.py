"""Prints the extra of miofind that fits this machine's NVIDIA driver: cuda13, cuda12, or nothing without a usable GPU.

Asks the driver itself, and nvidia-smi where its library cannot be loaded. Imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys


def main() -> None:
    """Print the extra; say on stderr what was found."""
    version = driver_cuda_version()
    extra = extra_for(version)
    found = "no usable NVIDIA GPU" if version is None else "an NVIDIA driver for CUDA {}.{}".format(*version)
    note = {"": "the CPU place only"}.get(extra, f"miofind[{extra}]")
    if version is not None and not extra:
        note += "; CUDA 12 or newer is needed: update the driver"
    print(f"Found {found}: {note}.", file=sys.stderr)
    print(extra)


def extra_for(version: tuple[int, int] | None) -> str:
    """The extra for the newest CUDA version that a driver supports."""
    if version is None or version < (12, 0):
        return ""
    return "cuda12" if version < (13, 0) else "cuda13"


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version the driver supports, None without a driver or without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _from_nvidia_smi()
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    if (
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGetCount(ctypes.byref(count))
    ):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if count.value else None


def _from_nvidia_smi() -> tuple[int, int] | None:
    try:
        result = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return cuda_version_in(result.stdout) if result.returncode == 0 else None


def cuda_version_in(text: str) -> tuple[int, int] | None:
    """The CUDA version in nvidia-smi's heading, whatever words newer drivers put between."""
    match = re.search(r"CUDA(?:\s+\w+)*\s+Version\s*:\s*(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


if __name__ == "__main__":
    main()
