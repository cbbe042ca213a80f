"""One FindDB under many processes and threads, across forks and kills."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from helpers.finddb import finddb_children
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, row
from helpers.processes.forks import in_a_fork
from helpers.processes.waiting import LIMIT_S

from miofind.errors import DatabaseError
from miofind.finddb import MEMORY, LayeredStore, Store

PAIRS = 8
"""Writers, and readers as many."""
RECORDS = 4


def start(*arguments: object) -> subprocess.Popen[str]:
    """A fresh process that runs one of the jobs of finddb_children, once it is told to begin."""
    script = Path(finddb_children.__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)


def test_many_processes_lose_nothing(tmp_path):
    lose_nothing(tmp_path / "finddb.db", PAIRS)


def test_many_processes_lose_nothing_on_a_server(postgres_url):
    lose_nothing(postgres_url, 4)


def lose_nothing(address, pairs):
    """As many writers of a new FindDB as `pairs`, and as many readers."""
    each = 4
    children = [start("crowd", address, first, each, RECORDS) for first in range(0, pairs, each)]
    said = []
    for child in children:
        child.stdout.readline()
    for child in children:
        child.stdin.write("begin\n")
        child.stdin.flush()
    for child in children:
        said.append(child.communicate(timeout=LIMIT_S)[0])
    assert said == [""] * len(children)
    with Store(address) as store:
        assert len(store.problems()) == pairs + 1
        assert store.stats().rows == 2 * pairs * RECORDS
        assert len(store.history(DEVICE, "shared").rows) == pairs * RECORDS
        assert store.check() == ()


@pytest.mark.parametrize("where", ["file", "memory"])
def test_threads_share_a_store(tmp_path, where):
    path = MEMORY if where == "memory" else tmp_path / "finddb.db"
    with Store(path) as store, ThreadPoolExecutor(8) as pool:

        def work(number: int) -> int:
            store.record(DEVICE, f"{PROBLEM}-{number % 5}", [row("ConvA", f'{{"tile":{number}}}')])
            return len(store.answer(DEVICE, f"{PROBLEM}-{number % 5}").rows)

        assert all(list(pool.map(work, range(40))))
        assert store.stats().rows == 40
        assert store.check() == ()


def test_threads_share_the_one_fall_to_memory(tmp_path, caplog):
    (tmp_path / "finddb.db").mkdir()
    with LayeredStore(Store(tmp_path / "finddb.db")) as layered, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: layered.record(DEVICE, f"{PROBLEM}-{n}", [row()]), range(32)))
        assert len(layered.user.problems()) == 32
        assert all(layered.answer(DEVICE, f"{PROBLEM}-{n}") for n in range(32))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_store_lives_on_in_a_forked_child(tmp_path, where):
    with Store(MEMORY if where == "memory" else tmp_path / "finddb.db") as store:
        store.record(DEVICE, PROBLEM, [row("Before")])

        def work() -> None:
            assert store.answer(DEVICE, PROBLEM)
            assert store.record(DEVICE, "child", [row("Child")])

        assert in_a_fork(work) == 0
        store.record(DEVICE, "parent", [row("Parent")])
        kept = {"file": {PROBLEM, "child", "parent"}, "memory": {PROBLEM, "parent"}}[where]
        assert {key.network_config for key in store.problems()} == kept
        assert store.check() == ()


def test_a_fork_waits_for_other_threads(tmp_path):
    with Store(tmp_path / "finddb.db") as store:
        end = threading.Event()

        def keep_writing() -> None:
            number = 0
            while not end.is_set():
                number += 1
                store.record(DEVICE, f"thread-{number}", [row()])
                time.sleep(0.001)  # Python's locks are not fair

        thread = threading.Thread(target=keep_writing)
        thread.start()
        try:
            statuses = [in_a_fork(lambda n=n: store.record(DEVICE, f"child-{n}", [row()])) for n in range(5)]
        finally:
            end.set()
            thread.join()
        assert statuses == [0] * 5
        names = {key.network_config for key in store.problems()}
        assert {f"child-{n}" for n in range(5)} <= names
        assert store.check() == ()


@pytest.mark.parametrize("after", [1, 20])
def test_a_killed_process_loses_no_acknowledged_row(tmp_path, after):
    path = tmp_path / "finddb.db"
    with start("write_forever", path) as child:
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("begin\n")
        child.stdin.flush()
        lines = [child.stdout.readline() for _ in range(after)]
        child.kill()
        lines += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL
    with Store(path) as store:
        for number in range(len([line for line in lines if line.endswith("\n")])):
            assert len(store.answer(DEVICE, f"problem-{number}").rows) == 2
        assert store.check() == ()
        store.record(DEVICE, "afterwards", [row()])


def test_a_forgotten_store_closes_its_file(tmp_path):
    store = Store(tmp_path / "finddb.db")
    store.record(DEVICE, PROBLEM, [row()])
    assert (tmp_path / "finddb.db-wal").exists()
    del store
    gc.collect()
    assert [path.name for path in Path(tmp_path).iterdir()] == ["finddb.db"]


def test_what_goes_wrong_is_told_while_another_thread_imports_sqlalchemy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module stands in sys.modules before its body has run: it has no exceptions yet, and has raised none."""
    monkeypatch.setitem(sys.modules, "sqlalchemy.exc", ModuleType("sqlalchemy.exc"))
    with Store(tmp_path / "none.db", read_only=True) as store, pytest.raises(DatabaseError, match=r"none\.db"):
        store.answer("device", "problem")
