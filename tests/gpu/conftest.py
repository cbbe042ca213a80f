"""What most tests on a GPU need: the current device, and a compiler without a cache of binaries."""

from __future__ import annotations

import pytest

from miofind.compiler import Compiler
from miofind.device.device import Device


@pytest.fixture(scope="module")
def device() -> Device:
    return Device.cuda()


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()
