"""What a measuring process loads while it has no job: all that it can, as long as that is wanted."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miofind.compiler import BinaryCache, Compiler
from miofind.device.device import Device
from miofind.evaluate import warm_up as module
from miofind.evaluate.measuring_child import MeasuringSetup, serve
from miofind.evaluate.warm_up import warm_up
from miofind.process.parent import ParentGoneError
from miofind.solver.registry import Registry

GPU = Device.virtual("90a")


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(BinaryCache(tmp_path))


def test_solvers_of_the_place_and_what_checks_and_times_are_loaded() -> None:
    """A machine without a GPU lacks CuPy at least: the rest is loaded all the same."""
    code = (
        "import sys; from miofind.compiler import BinaryCache, Compiler; from miofind.device.device import Device;"
        "from miofind.evaluate.warm_up import warm_up; from miofind.solver.registry import Registry;"
        "warm_up(Device.virtual('90a'), Compiler(BinaryCache()), Registry.default(), lambda: True);"
        "print('\\n'.join(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    named = {
        "miofind.solvers.implicit_gemm.wgmma",
        "miofind.solvers.depthwise.mma",
        "miofind.verify.harness_cuda",
        "miofind.measure.backend_cuda",
        "numpy.random",
    }
    assert named <= set(loaded)
    assert not any(name.startswith("miofind.solvers.cpu.") for name in loaded)


def test_it_stops_where_there_is_something_better_to_do(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    parts = [lambda number=number: loaded.append(number) for number in range(3)]
    monkeypatch.setattr(module, "_parts", lambda *_: iter(parts))
    warm_up(GPU, compiler, Registry.default(), lambda: len(loaded) < 2)
    assert loaded == [0, 1]


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(0)])
def test_what_cannot_be_loaded_is_left_to_who_needs_it(
    error: BaseException, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[int] = []

    def broken() -> None:
        raise error

    monkeypatch.setattr(module, "_parts", lambda *_: iter([broken, lambda: loaded.append(1)]))
    with caplog.at_level(logging.DEBUG, logger="miofind"):
        warm_up(GPU, compiler, Registry.default(), lambda: True)
    assert loaded == [1]
    assert "not loaded ahead" in caplog.text


def test_ctrl_c_ends_it(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_parts", lambda *_: iter([interrupted]))
    with pytest.raises(KeyboardInterrupt):
        warm_up(GPU, compiler, Registry.default(), lambda: True)


def test_the_cpu_place_has_nothing_to_load(compiler: Compiler) -> None:
    assert list(module._parts(Device.cpu(), compiler, Registry.default())) == []


def test_a_measuring_process_warms_up_until_it_has_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready before, and goes on with the job."""
    told: list[str] = []

    class Parent:
        def ready(self) -> None:
            told.append("ready")

        def is_silent(self, seconds: float) -> bool:
            return "part 1" not in told

        def receive(self) -> object:
            told.append("a job is taken")
            raise ParentGoneError("nobody wants it")

        def send(self, message: object) -> None: ...

    parts = [lambda number=number: told.append(f"part {number}") for number in range(4)]
    monkeypatch.setattr(module, "_parts", lambda *_: iter(parts))
    with pytest.raises(ParentGoneError):
        serve(Parent(), MeasuringSetup(device=Device.cpu(), registry=Registry.default()))  # type: ignore[arg-type]
    assert told == ["ready", "part 0", "part 1", "a job is taken"]


def test_what_cannot_be_told_ends_no_process(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usual_harness_steps", lambda *_, **__: 1 / 0)
    warm_up(GPU, compiler, Registry.default(), lambda: True)


def test_sources_and_products_are_among_what_is_loaded(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    read, planned = list[str](), list[Any]()
    monkeypatch.setattr(Compiler, "key", lambda _, step, arch: read.append(step.source))
    cublaslt = SimpleNamespace(matmul_plan=lambda step, device: planned.append((step.m, step.n, step.k)))
    monkeypatch.setitem(sys.modules, "miofind.libraries.cublaslt", cublaslt)
    warm_up(GPU, compiler, Registry([]), lambda: True)
    assert {"harness/verify.cu", "harness/reference.cu", "harness/measure.cu"} <= set(read)
    assert planned == [(64, 64, 64)]
