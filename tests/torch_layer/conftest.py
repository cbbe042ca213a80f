"""miofind inside PyTorch without a GPU: the same kernels at the dispatcher, for the CPU, on the CPU place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from torch_layer.direct.driver import Driver

from miofind import Handle
from miofind.launch.invoker import _HostInvoker
from miofind.torch import Override, direct, use
from miofind.torch.direct import DirectPath
from miofind.torch.fused import plans as fused_plans


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


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> DirectPath:
    """The direct path, built once for all of pytest's workers."""
    if shutil.which("g++") is None:
        pytest.skip("the direct path is built by g++")
    shared = tmp_path_factory.getbasetemp().parent / "direct path"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIOFIND_CACHE_DIR", str(shared))
        patch.setattr(direct, "_path", direct._path.__wrapped__)
        file = direct.build()
        assert direct.build() == file, "it is built once"
        return DirectPath(file)


@pytest.fixture
def driver(path: DirectPath, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """What the direct path launches by."""
    made = Driver()
    path.use_driver(made.launch, made.replace_address)
    path.use_streams("CPU", made.current_stream, made.is_capturing)
    monkeypatch.delenv(direct.VARIABLE, raising=False)
    monkeypatch.setattr(direct, "_loaded", [path])
    monkeypatch.setattr(_HostInvoker, "flat", lambda self, *parameters: made.flat(self, *parameters))
    path.enable_own("CPU")
    fused_plans.forget()
    yield made
    path.disable_own("CPU")
    path.use_streams("CPU", None, None)
    fused_plans.forget()
