"""miofind inside PyTorch without a GPU: the same kernels at the dispatcher, for the CPU, on the CPU place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from miofind import Handle
from miofind.torch import Override, fused_plans, use


@pytest.fixture(scope="session")
def cpu_handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    """The CPU place, with a FindDB that nothing writes to."""
    with Handle("cpu", database=tmp_path_factory.mktemp("torch") / "finddb.db") as handle:
        yield handle


@pytest.fixture
def override_on_cpu(cpu_handle: Handle) -> Iterator[Override]:
    """PyTorch's convolutions of the CPU run by miofind; nothing is measured, estimates choose."""
    fused_plans.forget()
    with use("estimate", handle=cpu_handle, devices="cpu") as override:
        yield override
        assert override.is_enabled, "a test is to leave the override as it found it"
