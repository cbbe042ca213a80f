"""Bad moments for a process: Ctrl-C in a find, finds once main has returned, forks, NumPy's traps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands.cli_runner import use_own_folders
from helpers.finddb.finddb_entries import DEVICE, VERSIONS, row, scope
from helpers.processes.forks import forked_by_a_thread
from helpers.processes.waiting import LIMIT_S

import miofind
from miofind.compiler import BinaryCache, CompilePool, Compiler, build, nvrtc
from miofind.compiler.nvrtc import Compiled
from miofind.core.problem import DataType
from miofind.errors import ForkedProcessError
from miofind.evaluate.executors import Isolated
from miofind.find import warm_start
from miofind.finddb import Store
from miofind.reference.convolution import reference_on_host, round_once
from miofind.solver.candidate import Status
from miofind.solver.steps import KernelStep

pytestmark = pytest.mark.sampled(2)

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
OTHER = miofind.ProblemDescription.convolution(x=(1, 3, 6, 5), w=(2, 3, 3, 3))
STEP = KernelStep(source="pass_through.cu", entry="pass_through", grid=(1, 1, 1), block=(32, 1, 1), args=())


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))


# A program that ends, or is interrupted.

BEGIN = """
import atexit, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import miofind
problem = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
one_by_one = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 1, 1))
"""


@contextmanager
def started(script: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", BEGIN + textwrap.dedent(script)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


BUSY = {
    "in a step": """
        from miofind.solvers.cpu import gemm1x1 as cpu_gemm1x1
        def wait(*_):
            print("busy", flush=True)
            time.sleep(3600)
        cpu_gemm1x1.multiply = wait
        miofind.find_solutions(one_by_one)
        """,
    "in a child's step": """
        from helpers.processes import faulty_services
        from miofind.evaluate.executors import Isolated
        def tell():
            while not os.path.exists(os.environ["FAULT_FOLDER"] + "/once"):
                time.sleep(0.01)
            print("busy", flush=True)
        threading.Thread(target=tell, daemon=True).start()
        handle = miofind.default_handle(miofind.Device.cpu())
        Isolated._serve = staticmethod(faulty_services.measure)
        handle._executors[True] = Isolated(handle.device)
        miofind.find_solutions(one_by_one, options=miofind.FindOptions(isolate=True), handle=handle)
        """,
    "while a kernel is compiled": """
        from miofind.compiler import Compiler, build
        from miofind.solver.steps import KernelStep
        def wait(*_):
            print("busy", flush=True)
            threading.Event().wait()
        build.compile_source = wait
        steps = [KernelStep(source="harness/random_inputs.cu", entry=f"e{i}", grid=(1,) * 3, block=(32, 1, 1), args=(),
                            defines=(("N", i),)) for i in range(4)]
        list(Compiler().build_all(steps, "90a", workers=1))
        """,
    "while a solver plans its kernels": """
        from miofind.solvers.cpu import gemm1x1 as cpu_gemm1x1
        def wait(*_):
            print("busy", flush=True)
            threading.Event().wait()
        cpu_gemm1x1.ConvCpuGemm1x1.solution = wait
        miofind.find_solutions(one_by_one)
        """,
    "while a child starts": """
        handle = miofind.default_handle(miofind.Device.cpu())
        handle.executor(isolate=True).prepare()
        print("busy", flush=True)
        time.sleep(3600)
        """,
}


@pytest.mark.parametrize("script", BUSY.values(), ids=BUSY.keys())
def test_ctrl_c_in_a_find_leaves_one_traceback(tmp_path: Path, script: str) -> None:
    """A thread that compiled held up the end of the process, and a second Ctrl-C there left a further traceback."""
    (tmp_path / "fault").write_text("wait to be killed", encoding="utf-8")
    with started(script, FAULT_FOLDER=str(tmp_path)) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line == "busy\n", child.communicate()[1]
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=LIMIT_S)
    assert child.returncode == -signal.SIGINT, told
    assert told.count("Traceback") == 1, told
    assert "Exception ignored" not in told
    assert told.rstrip().endswith("KeyboardInterrupt")


AFTER_MAIN = {
    "a thread": """
        def find():
            threading.main_thread().join()
            print(len(miofind.find_solutions(problem)) > 0, flush=True)
        threading.Thread(target=find).start()
        """,
    "a thread with a child": """
        def find():
            threading.main_thread().join()
            print(len(miofind.find_solutions(problem, options=miofind.FindOptions(isolate=True))) > 0, flush=True)
            miofind.default_handle(miofind.Device.cpu()).close()
        threading.Thread(target=find).start()
        """,
    "a search": """
        def find():
            threading.main_thread().join()
            print(len(miofind.find_solutions(problem, options=miofind.FindOptions(tuning=True, trials=4))) > 0)
        threading.Thread(target=find).start()
        """,
    "the end": """
        atexit.register(lambda: print(len(miofind.find_solutions(problem)) > 0, flush=True))
        """,
}


@pytest.mark.parametrize("script", AFTER_MAIN.values(), ids=AFTER_MAIN.keys())
def test_a_find_works_once_main_has_returned(script: str) -> None:
    """It raised "cannot schedule new futures after interpreter shutdown"."""
    with started(script) as child:
        printed, told = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, printed, told) == (0, "True\n", "")


# A forked child.


def test_a_forked_child_waits_for_no_lock_of_its_parents_threads(tmp_path: Path) -> None:
    with miofind.Handle("cpu", database=tmp_path / "finddb.db") as handle, ExitStack() as held:
        miofind.find_solutions(PROBLEM, handle=handle)
        pool = held.enter_context(CompilePool(handle.compiler.cache, workers=1))
        for lock in (
            handle.lock,
            handle.measuring,
            handle.compiler._lock,
            handle.compiler.cache._lock,
            handle.invokers._lock,
            handle.database._lock,
            warm_start._sharing,
            pool._changed,
        ):
            held.enter_context(lock)

        def work() -> None:
            x, w = np.ones(OTHER.x.shape, np.float32), np.ones(OTHER.w.shape, np.float32)
            found = miofind.find_solutions(OTHER, options=miofind.FindOptions(tuning=True, trials=4), handle=handle)
            assert (miofind.run_solution(found[0], x, w) == 27).all()
            assert handle.compiler.cache.stats().entries == 0
            assert pool.submit([STEP], "90a") == 0
            assert pool.errors([STEP], "90a") == {}
            handle.close()

        assert forked_by_a_thread(work) == 0


FORK_IN_A_FIRST_FIND = """
import os, sys, threading, time, warnings
import miofind
warnings.simplefilter("ignore", DeprecationWarning)
problem, other = (miofind.ProblemDescription.convolution(x=(1, 2, 5, n), w=(2, 2, 1, 1)) for n in (5, 6))
handle = miofind.Handle("cpu", database=sys.argv[1])
finding = threading.Thread(target=miofind.find_solutions, args=(problem,), kwargs={"handle": handle})
finding.start()
time.sleep(float(sys.argv[2]))
child = os.fork()
if not child:
    os._exit(0 if miofind.find_solutions(other, handle=handle) else 1)
ended = threading.Timer(600, os.kill, (child, 9))
ended.start()
status = os.waitpid(child, 0)[1]
ended.cancel()
finding.join()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    "after_s", [0.05, 0.2, *(pytest.param(after_s, marks=pytest.mark.full_matrix) for after_s in (0.01, 0.1, 0.3))]
)
def test_a_fork_waits_for_another_threads_imports(tmp_path: Path, after_s: float) -> None:
    """The child waited for good for a module that a thread of its parent was importing."""
    done = subprocess.run(
        [sys.executable, "-c", FORK_IN_A_FIRST_FIND, str(tmp_path / "finddb.db"), str(after_s)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


def test_a_forked_child_leaves_its_parents_processes_alone(tmp_path: Path) -> None:
    isolated = miofind.FindOptions(isolate=True)
    with miofind.Handle("cpu", database=tmp_path / "finddb.db") as handle:
        miofind.find_solutions(PROBLEM, options=isolated, handle=handle)
        executor = handle.executor(isolate=True)
        assert isinstance(executor, Isolated)
        child = executor._child
        assert child is not None

        def work() -> None:
            executor.close()
            child.kill()
            handle.close()
            assert miofind.find_solutions(OTHER, options=isolated, handle=handle)
            handle.close()

        assert forked_by_a_thread(work) == 0
        assert child.is_alive
        assert executor._child is child


@pytest.mark.parametrize("same", [True, False], ids=["the same kernel", "another"])
def test_a_forked_child_compiles_what_its_parent_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """The lock of the kernel was held for good."""
    compiler, parent = Compiler(BinaryCache(tmp_path)), os.getpid()
    begun, end = threading.Event(), threading.Event()
    step = KernelStep(source="harness/random_inputs.cu", entry="made", grid=(1, 1, 1), block=(32, 1, 1), args=())
    other = KernelStep(source="harness/verify.cu", entry="made", grid=(1, 1, 1), block=(32, 1, 1), args=())

    def compiled(*_: Any) -> Compiled:
        if os.getpid() == parent:
            begun.set()
            assert end.wait(LIMIT_S)
        return Compiled(cubin=b"\x7fELF", log="")

    monkeypatch.setattr(build, "compile_source", compiled)
    thread = threading.Thread(target=compiler._build, args=(step, "90a"))
    thread.start()
    try:
        assert begun.wait(LIMIT_S)
        assert forked_by_a_thread(lambda: compiler._build(step if same else other, "90a")) == 0
    finally:
        end.set()
        thread.join()


def test_a_child_that_was_forked_while_nvrtc_worked_is_told(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    step = KernelStep(
        source="harness/random_inputs.cu", entry="random_inputs", grid=(1, 1, 1), block=(32, 1, 1), args=()
    )

    def work() -> None:
        for cache in ("one", "two"):
            with pytest.raises(ForkedProcessError, match="while a thread of its parent compiled"):
                Compiler(BinaryCache(tmp_path / cache)).build(step, "90a")

    with nvrtc._at_work():
        assert forked_by_a_thread(work) == 0
    with nvrtc._at_work():  # the parent goes on
        pass
    assert forked_by_a_thread(lambda: nvrtc._at_work().__enter__()) == 0


# NumPy's traps.

DTYPES = ("float32", "float16", "bfloat16", "float64")
DIRECTIONS = ("forward", "backward_data", "backward_weights")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_numpy_is_told_to_raise_fails_no_candidate(tmp_path: Path, dtype: str, direction: str) -> None:
    """Normal values that round to subnormal ones raise FloatingPointError, and so does half of a Winograd transform."""
    problem = miofind.ProblemDescription.convolution(
        x=(2, 64, 9, 9), w=(16, 64, 3, 3), padding=1, dtype=dtype, direction=direction
    )
    asked = miofind.FindOptions(max_error=1.0, find_mode="normal")
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        with np.errstate(all="raise"):
            miofind.find_solutions(problem, options=asked, handle=handle)
        history = handle.database.user.history(handle.device.identity, problem.network_config)
    assert history is not None
    failed = [f"{row.candidate}: {row.status} {row.message}" for row in history.rows if not Status(row.status).usable]
    assert failed == []


def test_numpy_that_raises_changes_neither_runs_nor_references(tmp_path: Path) -> None:
    x = np.full(PROBLEM.x.shape, 3e38, np.float32)
    x[0, 0, 0, 0] = 1e-45
    w = np.ones(PROBLEM.w.shape, np.float32)
    values = np.array([1e300, 1e-300, np.inf, np.nan, -1e39])
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        before = [round_once(values, dtype) for dtype in DataType]
        with np.errstate(all="raise"):
            after = [round_once(values, dtype) for dtype in DataType]
            summed = reference_on_host(PROBLEM, x=np.full(PROBLEM.x.shape, np.inf), w=-np.ones(PROBLEM.w.shape))
            for solution in miofind.find_solutions(PROBLEM, handle=handle):
                assert np.isinf(miofind.run_solution(solution, x, w)).any(), solution.id
    assert (summed == -np.inf).all()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.astype(np.float64), other.astype(np.float64))


OUTSIDE_OF_LOADING = """
import sys
import miofind
from miofind.finddb import MEMORY, Store, sqlite_database
from miofind.process import forks
handle = miofind.Handle("cpu", database=sys.argv[1])
def is_waited_for():
    databases = (lock for each in sqlite_database._databases for lock in (each._read_lock, each._write_lock))
    return any(lock._is_owned() for lock in (forks._loading, *databases))
class Told:
    def find_spec(self, name, path=None, target=None):
        if not is_waited_for():
            print(name)
sys.meta_path.insert(0, Told())
{code}
sys.meta_path.clear()
"""
FIND = "miofind.ProblemDescription.convolution(x=(1, 2, 5, 5), w=(2, 2, 1, 1))"


@pytest.mark.parametrize(
    "code",
    [
        f"miofind.find_solutions({FIND}, handle=handle)",
        "Store(MEMORY).merge(Store(sys.argv[2], read_only=True))",
        "from miofind.finddb import upgrade; upgrade(sys.argv[2])",
        "from miofind.finddb import write_release; write_release([Store(sys.argv[2])], sys.argv[1])",
        "Store('postgresql://nobody@127.0.0.1:1/nothing')",
    ],
    ids=["find", "merge", "upgrade", "release", "server"],
)
def test_what_imports_late_imports_nothing_that_a_fork_does_not_wait_for(code: str, tmp_path: Path) -> None:
    known = tmp_path / "known.db"
    with Store(known) as store:
        store.record(DEVICE, "p", [row()], scope=scope(), environment=VERSIONS)
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE_OF_LOADING.format(code=code), str(tmp_path / "finddb.db"), str(known)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stdout.split() == []


AMID_A_USE = """
import os, sys, threading, time
import miofind.runtime.handle
from miofind.finddb import Store
from miofind.process import forks
store = Store(sys.argv[1], read_only=True)
is_used = threading.Event()
def use():
    with store._database.opened():
        is_used.set()
        while not forks._held:  # until the fork waits for this block
            time.sleep(0.001)
        from miofind.finddb import upgrade
threading.Thread(target=use, daemon=True).start()
is_used.wait()
if os.fork() == 0:
    os._exit(0)
print("sqlalchemy" in sys.modules, os.wait()[1])
"""


def test_a_fork_and_an_import_amid_a_use_of_a_database_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """The fork has what imports wait for, and waits for the database."""
    Store(tmp_path / "finddb.db").open().close()
    command = [sys.executable, "-c", AMID_A_USE, str(tmp_path / "finddb.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "True 0\n"
