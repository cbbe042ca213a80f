"""Compiling beside a program: what comes of it, who is called when, and that processes do not stay."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes.waiting import LIMIT_S, wait_until
from helpers.runs.cuda_package import CudaPackage, make_package

import miofind.runtime.background as module
from miofind.compiler import BinaryCache, CompilePool, Compiler
from miofind.device.device import Device
from miofind.errors import CompileError
from miofind.runtime.background import BackgroundCompiler, wait_until_compiled
from miofind.solver.steps import KernelStep

pytestmark = pytest.mark.usefixtures("forked_children")

pytest.importorskip("cuda.bindings.nvrtc")

DEVICE = Device.virtual("80")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaPackage:
    return make_package(tmp_path, monkeypatch)


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(BinaryCache(tmp_path / "cache"))


@pytest.fixture
def background(compiler: Compiler) -> Iterator[BackgroundCompiler]:
    made = BackgroundCompiler(compiler, DEVICE, workers=1)
    yield made
    made.close()


def steps(package: CudaPackage, *factors: int) -> list[KernelStep]:
    return [package.step(defines=(("FACTOR", factor),)) for factor in factors]


def test_who_asks_is_called_once_all_is_compiled(
    background: BackgroundCompiler, compiler: Compiler, package: CudaPackage
) -> None:
    asked = steps(package, 3, 4)
    pending = background.begin(asked)
    assert pending is not None
    found: list[bool] = []
    pending.when_done(lambda: found.extend(compiler.is_at_hand(step, DEVICE) for step in asked))
    assert background.wait(LIMIT_S)
    assert found == [True, True]
    pending.when_done(lambda: found.append(False))
    assert found == [True, True, False], "what is there already is told at once"
    assert background.begin(asked) is None


def test_all_that_wait_are_called(background: BackgroundCompiler, package: CudaPackage) -> None:
    called: list[int] = []
    for number in range(3):
        pending = background.begin(steps(package, 3, 4))
        assert pending is not None
        pending.when_done(lambda number=number: called.append(number))  # type: ignore[misc]
    assert wait_until_compiled(LIMIT_S)
    assert sorted(called) == [0, 1, 2]


def test_who_fails_when_called_holds_up_nobody(background: BackgroundCompiler, package: CudaPackage) -> None:
    pending = background.begin(steps(package, 3))
    assert pending is not None
    called = threading.Event()
    pending.when_done(lambda: {}["nothing"])
    pending.when_done(called.set)
    assert background.wait(LIMIT_S)
    assert called.is_set()


def test_waiting_has_an_end(
    background: BackgroundCompiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()

    class Late(CompilePool):
        def _started(self) -> object:  # type: ignore[override]
            may_start.wait(LIMIT_S)
            return super()._started()

    monkeypatch.setattr(module, "CompilePool", Late)
    assert background.begin(steps(package, 3)) is not None
    assert not background.wait(0.0)
    assert not wait_until_compiled(0.0)
    may_start.set()
    assert wait_until_compiled(LIMIT_S)


def test_what_cannot_be_compiled_is_tried_once(background: BackgroundCompiler, package: CudaPackage) -> None:
    broken = package.step(defines=(("FACTOR", "this is no number"),))
    assert background.begin([broken]) is not None
    assert background.wait(LIMIT_S)
    with pytest.raises(CompileError, match="does not compile"):
        background.begin([broken])
    assert background.begin(steps(package, 3)) is not None


def test_a_failure_keeps_nothing_of_who_is_told(background: BackgroundCompiler, package: CudaPackage) -> None:
    class Tensor:
        """What a caller has at hand."""

    def told() -> weakref.ref[Tensor]:
        tensor = Tensor()
        with contextlib.suppress(CompileError):
            background.begin([broken])
        return weakref.ref(tensor)

    broken = package.step(defines=(("FACTOR", "this is no number"),))
    assert background.begin([broken]) is not None
    assert background.wait(LIMIT_S)
    kept = told()
    gc.collect()
    assert kept() is None


def test_without_a_folder_or_when_closed_nothing_is_waited_for(
    background: BackgroundCompiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BinaryCache, "directory", None)
        assert background.begin(steps(package, 3)) is None
    background.close()
    assert background.begin(steps(package, 4)) is None


def test_closing_calls_who_waits(background: BackgroundCompiler, package: CudaPackage) -> None:
    pending = background.begin(steps(package, *range(3, 40)))
    assert pending is not None
    called = threading.Event()
    pending.when_done(called.set)
    background.close()
    assert called.wait(LIMIT_S)


def test_processes_end_when_there_is_nothing_to_compile(compiler: Compiler, package: CudaPackage) -> None:
    """A process ends with the thread that hands it its tasks."""
    others = set(threading.enumerate())
    brief = BackgroundCompiler(compiler, DEVICE, workers=1, idle_s=0.0)
    for factor in (3, 4):
        assert brief.begin(steps(package, factor)) is not None
        assert brief.wait(LIMIT_S)
        wait_until(lambda: set(threading.enumerate()) <= others, "the processes end")
        assert brief._pool is None
        assert brief.begin(steps(package, factor)) is None


def test_processes_stay_from_the_last_step_on(background: BackgroundCompiler, package: CudaPackage) -> None:
    for factor in range(3, 6):
        assert background.begin(steps(package, factor)) is not None
        assert background.wait(LIMIT_S)
    wait_until(lambda: _timers() == 1, "one thread waits to end them, for what came last")
    background.close()
    assert _timers() == 0


def _timers() -> int:
    return sum(isinstance(thread, threading.Timer) for thread in threading.enumerate())
