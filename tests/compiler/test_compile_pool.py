"""Compiling ahead in processes: what comes of it, what a stuck or dying compiler costs, and how they end."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.processes import faulty_services
from helpers.processes.waiting import wait_until
from helpers.runs.cuda_package import CudaPackage, make_package

from miofind.compiler import BinaryCache, CompilePool, Compiler, CompileTimeoutError, nvrtc, worker
from miofind.compiler import pool as pool_module
from miofind.compiler.sources import KernelSource
from miofind.errors import CompileError, InvalidOptionError, MissingLibraryError
from miofind.process import service
from miofind.solver.steps import KernelStep

pytestmark = [pytest.mark.sampled(2), pytest.mark.usefixtures("forked_children")]

pytest.importorskip("cuda.bindings.nvrtc")

ARCH = "80"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaPackage:
    return make_package(tmp_path, monkeypatch)


@pytest.fixture
def cache(tmp_path: Path) -> BinaryCache:
    return BinaryCache(tmp_path / "cache")


class FaultyPool(CompilePool):
    """Its processes import faulty_compiler."""

    _serve = staticmethod(faulty_services.compile_kernels)


class RefusedPool(CompilePool):
    """Its processes never get ready."""

    _serve = staticmethod(faulty_services.refuse)


@pytest.fixture
def pool(cache: BinaryCache) -> Iterator[CompilePool]:
    with FaultyPool(cache, workers=1) as made:
        yield made


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a compilation that hangs leaves a file."""
    monkeypatch.setenv("FAULT_FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture
def hours_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a compilation hangs, an hour passes for the pool whenever it looks at its clock; for two looks."""
    looks = 0

    def clock() -> float:
        nonlocal looks
        for hang in folder.glob("hangs*") if looks < 2 else ():
            looks += 1
            if looks == 2:
                hang.unlink()
        return time.monotonic() + 3600 * looks

    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=clock))


def steps(package: CudaPackage, *factors: int) -> list[KernelStep]:
    return [package.step(defines=(("FACTOR", factor),)) for factor in factors]


def faulty(package: CudaPackage, fault: str) -> KernelStep:
    return package.step(defines=(("FAULT", fault),))


def is_cached(step: KernelStep, cache: BinaryCache) -> bool:
    return cache.get(Compiler(cache).key(step, ARCH)) is not None


def test_processes_may_start_before_there_is_a_step(cache: BinaryCache) -> None:
    started: list[object] = []

    class Counted(FaultyPool):
        def _started(self) -> Any:
            started.append(self)
            return super()._started()

    with Counted(cache, workers=3) as pool:
        pool.start(2)
        pool.start(2)
        wait_until(lambda: len(started) == 2, "both processes start")
        assert len(pool._threads) == 2
    with RefusedPool(cache, workers=1) as refused:
        refused.start(8)
        wait_until(lambda: not refused._works, "the pool gives up")


def test_a_compiling_process_loads_what_compiles_alone() -> None:
    """A tuning starts a process a processor, all at once: arrays, metadata of packages and solvers cost it seconds."""
    code = "import sys, miofind.compiler.worker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    unwanted = ("numpy", "ml_dtypes", "importlib.metadata", "email", "miofind.arrays", "miofind.solver.solver")
    assert [name for name in unwanted if name in loaded] == []


def test_what_is_submitted_is_in_the_cache_for_whoever_asks(
    pool: CompilePool, cache: BinaryCache, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = steps(package, 3, 4)
    assert pool.submit([*asked, asked[0]], ARCH) == 2
    assert pool.errors(asked, ARCH) == {}
    assert not pool.is_compiling(asked, ARCH)
    monkeypatch.setattr("miofind.compiler.build.compile_source", lambda *_: pytest.fail("compiled once more"))
    assert all(Compiler(cache).build(step, ARCH).has_entry("scale") for step in asked)


def test_what_is_in_the_cache_starts_no_process(
    cache: BinaryCache, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = steps(package, 3, 4)
    for step in asked:
        Compiler(cache).build(step, ARCH)
    monkeypatch.setattr(pool_module, "Service", lambda *_, **__: pytest.fail("a process was started"))
    with CompilePool(cache) as pool:
        assert pool.submit(asked, ARCH) == 0
        assert pool.errors(asked, ARCH) == {}


def test_without_threads_nothing_is_compiled_ahead(
    cache: BinaryCache, package: CudaPackage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    with CompilePool(cache, workers=2) as pool:
        assert pool.errors(steps(package, 3, 4), ARCH) == {}
        assert not pool.is_compiling(steps(package, 3, 4), ARCH)
    assert "no thread can be started (can't start new thread)" in caplog.text


def test_one_thread_does_the_work_of_several(
    cache: BinaryCache, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def once(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    with FaultyPool(cache, workers=2) as pool:
        asked = steps(package, 3, 4)
        assert pool.errors(asked, ARCH) == {}
        assert all(is_cached(step, cache) for step in asked)


def test_what_cannot_be_sent_or_received_makes_nobody_wait_for_good(
    cache: BinaryCache, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ended, and with it all hope of an answer."""

    def fails(*_: Any) -> Any:
        raise TypeError("cannot pickle it")

    monkeypatch.setattr(CompilePool, "_started", fails)
    with CompilePool(cache, workers=1) as pool:
        assert pool.errors(steps(package, 3, 4), ARCH) == {}


def test_errors_name_the_source_and_the_options(pool: CompilePool, package: CudaPackage) -> None:
    package.write(bad_cu='extern "C" __global__ void bad() { no_such_thing(); }')
    good, bad = package.step(), package.step("bad.cu", "bad", defines=(("FACTOR", 5),))
    absent = package.step(entry="absent")
    found = pool.errors([good, bad, absent], ARCH)
    assert list(found) == [bad, absent]
    assert (found[bad].source, "-DFACTOR=5" in found[bad].options) == ("bad.cu", True)
    assert "no_such_thing" in found[bad].log
    assert "has no kernel 'absent'" in str(found[absent])
    assert pool.errors([bad], ARCH)[bad] is found[bad]


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("hang", CompileTimeoutError, "did not end within 120 s"),
        ("die", CompileError, "ended its process with code 3"),
        ("raise", CompileError, "ZeroDivisionError"),
    ],
)
def test_a_compilation_that_goes_wrong_costs_itself_alone(
    pool: CompilePool,
    cache: BinaryCache,
    package: CudaPackage,
    hours_pass: None,
    fault: str,
    kind: type[CompileError],
    message: str,
) -> None:
    bad, good = faulty(package, fault), steps(package, 6, 7)
    found = pool.errors([good[0], bad, good[1]], ARCH)
    assert list(found) == [bad]
    assert type(found[bad]) is kind
    assert message in str(found[bad])
    assert found[bad].source == "scale.cu"
    assert all(is_cached(step, cache) for step in good)


@pytest.mark.parametrize("fault", ["kill", "terminate", "exhaust"])
def test_who_was_killed_or_had_no_memory_is_not_to_blame(pool: CompilePool, package: CudaPackage, fault: str) -> None:
    """It was recorded as failed to compile, and never measured again."""
    assert pool.errors([faulty(package, fault), *steps(package, 6)], ARCH) == {}


def test_a_compiler_ignores_ctrl_c(pool: CompilePool, cache: BinaryCache, package: CudaPackage) -> None:
    step = faulty(package, "ctrl_c")
    assert pool.errors([step], ARCH) == {}
    assert is_cached(step, cache)


def test_what_is_wanted_goes_before_what_is_only_likely(cache: BinaryCache, package: CudaPackage) -> None:
    likely, wanted = steps(package, *range(100, 140)), steps(package, 8)
    with CompilePool(cache, workers=1) as pool:
        pool.submit(likely, ARCH)
        pool.errors(wanted, ARCH)
        assert not is_cached(likely[-1], cache)
        pool.errors(likely[-1:], ARCH)
        assert not all(is_cached(step, cache) for step in likely)
    assert is_cached(wanted[0], cache)


def test_no_more_waits_than_the_bound_and_what_is_wanted_is_taken_all_the_same(
    cache: BinaryCache, package: CudaPackage
) -> None:
    many = steps(package, *range(20))
    with CompilePool(cache, workers=1, max_waiting=2) as pool:
        assert pool.submit(many, ARCH) <= 3  # the one at work does not wait
        assert pool.errors(many[:8], ARCH) == {}
        assert all(is_cached(step, cache) for step in many[:8])


def test_the_oldest_answers_are_forgotten_and_no_others_looked_at(
    pool: CompilePool, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step that was taken walked through all that were remembered, with the lock held."""

    class Walked(collections.OrderedDict[object, object]):
        steps = 0

        def __iter__(self) -> Iterator[object]:
            for name in super().__iter__():
                self.steps += 1
                yield name

    monkeypatch.setattr(pool_module, "_MAX_REMEMBERED", 4)
    pool._tasks = walked = Walked()  # type: ignore[assignment]
    asked = steps(package, *range(6))
    for step in asked[:4]:
        assert pool.errors([step], ARCH) == {}
    assert walked.steps == 0
    for step in asked[4:]:
        assert pool.errors([step], ARCH) == {}
    assert walked.steps == 2
    assert list(walked) == [pool_module._name(step, ARCH) for step in asked[2:]]


def test_a_closed_pool_ends_at_once_and_knows_of_no_errors(
    cache: BinaryCache, package: CudaPackage, folder: Path
) -> None:
    pool = FaultyPool(cache, workers=2)
    hanging = [package.step(defines=(("FAULT", "hang"), ("FACTOR", factor))) for factor in (1, 2)]
    pool.submit([*hanging, *steps(package, *range(50))], ARCH)
    wait_until(lambda: len(list(folder.glob("hangs*"))) == 2, "two compilations that hang")
    assert pool.is_compiling(hanging[1:], ARCH)
    assert not pool.is_compiling(steps(package, 77), ARCH), "it was never taken"
    pool.close()
    assert not pool.is_compiling(hanging, ARCH)
    pool.close()
    assert pool.submit(steps(package, 3), ARCH) == 0
    assert pool.errors(steps(package, 3), ARCH) == {}
    assert not any(is_cached(step, cache) for step in steps(package, *range(50)))


def test_where_no_process_can_start_nothing_is_blamed(
    cache: BinaryCache, package: CudaPackage, caplog: pytest.LogCaptureFixture
) -> None:
    with RefusedPool(cache, workers=2) as pool:
        assert pool.errors(steps(package, 3, 4), ARCH) == {}
        assert pool.submit(steps(package, 5), ARCH) == 0
    assert "nothing is compiled ahead: the service is refused" in caplog.text


def test_where_the_cache_has_no_folder_nothing_is_compiled(tmp_path: Path, package: CudaPackage) -> None:
    (tmp_path / "file").touch()
    with CompilePool(BinaryCache(tmp_path / "file" / "cache")) as pool:
        assert pool.submit(steps(package, 3), ARCH) == 0


def test_as_many_processes_as_processors_less_one(cache: BinaryCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, workers in ((1, 1), (2, 1), (16, 15)):
        monkeypatch.setattr(pool_module, "processors", lambda count=processors: count)
        with CompilePool(cache) as pool:
            assert pool._workers == workers


_PARENT = """
import sys, time
from pathlib import Path
from miofind.compiler import BinaryCache, CompilePool
from miofind.solver.steps import KernelStep
from helpers.processes import faulty_services
step = KernelStep(source="scale.cu", entry="scale", package=sys.argv[1], grid=(1, 1, 1), block=(1, 1, 1), args=(),
                  defines=(("FAULT", sys.argv[3]),))
CompilePool._serve = staticmethod(faulty_services.say_process_and_compile)
pool = CompilePool(BinaryCache(Path(sys.argv[2])), workers=1)
pool.submit([step], "80")
time.sleep(3600)
"""


@pytest.mark.parametrize("fault", ["hang", "none"])
def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path, package: CudaPackage, fault: str) -> None:
    """The one is stuck in a compilation, the other waits for work."""
    told = tmp_path / "process"
    (tmp_path / "says_its_process.py").write_text(
        f"import os\nopen({str(told)!r}, 'w').write(str(os.getpid()) + ';')\n"
    )
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests), str(tmp_path)])}
    arguments = [sys.executable, "-c", _PARENT, package.name, str(tmp_path / "cache"), fault]
    with subprocess.Popen(arguments, env=environment) as parent:
        wait_until(lambda: told.exists() and told.read_text().endswith(";"), "a process that compiles")
        done = "hangs*" if fault == "hang" else "cache/**/*.cubin*"
        wait_until(lambda: any(tmp_path.glob(done)), "a compilation that hangs, or is done")
        number = int(told.read_text()[:-1])
        assert is_running(number)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(number), "the end of the process")


def is_running(number: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("workers", "2"),
        ("workers", True),
        ("max_waiting", 0),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("timeout_s", "soon"),
    ],
)
def test_a_pool_that_could_never_answer_is_refused(cache: BinaryCache, name: str, value: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"{name}="):
        CompilePool(cache, **{name: value})


@pytest.mark.skipif(not hasattr(os, "nice"), reason="nobody gives way on this system")
def test_a_process_that_compiles_gives_way_to_what_is_measured() -> None:
    code = (
        "import os; from miofind.compiler import BinaryCache, worker\n"
        "class Parent:\n"
        "    def ready(self): print(os.nice(0)); raise SystemExit\n"
        "print(os.nice(0)); worker.serve(Parent(), BinaryCache())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    before, then = map(int, told)
    assert then == min(19, before + 5)


class Told(Exception):
    """Ends a process' service, which goes on for good."""


@pytest.mark.parametrize("missing", [False, True])
def test_a_process_is_ready_once_it_has_compiled_or_cannot(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVRTC loads with the first lines is loaded before there are steps, and each step is told what is missing."""
    told: list[str] = []

    def compiled(source: KernelSource, options: tuple[str, ...], arch: str) -> None:
        if missing:
            raise MissingLibraryError("no NVRTC")
        assert nvrtc.compile_source(source, options, arch).cubin
        told.append("compiled")

    def ready() -> None:
        told.append("ready")
        raise Told

    monkeypatch.setattr(worker, "compile_source", compiled)
    monkeypatch.setattr(worker.os, "nice", lambda _: None, raising=False)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    with pytest.raises(Told):
        worker.serve(SimpleNamespace(ready=ready), BinaryCache())  # type: ignore[arg-type]
    assert told == [*(["compiled"] if not missing else []), "ready"]
