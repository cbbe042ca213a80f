"""What most tests on a GPU need: the current device, whether it is a Hopper, and a compiler without a cache."""

from __future__ import annotations

import pytest

from miofind.compiler import Compiler
from miofind.device.device import Device


@pytest.fixture(scope="module")
def device() -> Device:
    return Device.cuda()


@pytest.fixture(scope="module")
def hopper(device: Device) -> None:
    """Skips tests of kernels for wgmma on devices other than Hopper's."""
    if device.arch != "90a":
        pytest.skip(f"needs compute capability 9.0, {device.name} has {device.sm / 10:.1f}")


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()
