"""Processes that share a GPU: while one measures the others stand still, whatever becomes of it."""

from __future__ import annotations

import importlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.processes.waiting import wait_until

FOLDER = Path(__file__).parents[2] / "benchmarks"
START = f"import sys, time; sys.path.insert(0, {str(FOLDER)!r}); from pathlib import Path; from turns import Turns; "
START += "turns, told = Turns(Path(sys.argv[1])), open(sys.argv[2], 'ab', buffering=0); "
COUNTS = """
turns.join()
import os
if os.fork() == 0:
    os.setpgid(0, 0)  # as miofind's own children have groups of their own
while True:
    told.write(b'.')
    time.sleep(0.01)
"""
MEASURES = """
turns.join()
with turns.alone():
    told.write(b'.')
    time.sleep(1000)
"""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "turns", raising=False)
    return importlib.import_module("turns")


@pytest.fixture
def started(turns: ModuleType, tmp_path: Path) -> Iterator[Callable[[str, str], Any]]:
    """Runs a program in a session of its own, and gives it and a function that tells how far it is."""
    folder = tmp_path / "turns"
    folder.mkdir()
    with ExitStack() as stack:

        def start(program: str, name: str) -> tuple[Any, Callable[[], int]]:
            told = tmp_path / name
            words = [sys.executable, "-c", START + program, str(folder), str(told)]
            child = subprocess.Popen(words, start_new_session=True)
            stack.callback(child.wait)
            stack.callback(turns.signal_sessions, signal.SIGKILL, [child.pid])
            wait_until(lambda: told.exists() and told.stat().st_size > 0, f"{name} tells")
            return child, lambda: told.stat().st_size

        yield start


def stands_still(turns: ModuleType, session: int) -> bool:
    """Whether all processes of a session are stopped: the leader, and its child in a group of its own."""
    stats = [Path(f"/proc/{process}/stat").read_text() for process in turns._processes({session})]
    return [stat.rpartition(")")[2].split()[0] for stat in stats] == ["T", "T"]


def test_the_others_stand_still_meanwhile(turns: ModuleType, started: Any, tmp_path: Path) -> None:
    child, count = started(COUNTS, "counts")
    with turns.Turns(tmp_path / "turns").alone():
        assert stands_still(turns, child.pid)
    before = count()
    wait_until(lambda: count() > before, "it goes on")


def test_a_process_that_dies_while_it_is_alone_wakes_the_others(
    turns: ModuleType, started: Any, tmp_path: Path
) -> None:
    child, count = started(COUNTS, "counts")
    holder, _ = started(MEASURES, "measures")
    assert stands_still(turns, child.pid)
    holder.kill()
    holder.wait()
    turns.Turns(tmp_path / "turns").leave(holder.pid)
    before = count()
    wait_until(lambda: count() > before, "it goes on")


def test_one_that_ends_while_another_is_alone_wakes_nobody(turns: ModuleType, started: Any, tmp_path: Path) -> None:
    child, _ = started(COUNTS, "ends")
    other, _ = started(COUNTS, "counts")
    shared = turns.Turns(tmp_path / "turns")
    with shared.alone():
        child.kill()
        child.wait()
        shared.leave(child.pid)
        assert stands_still(turns, other.pid)
    assert not (tmp_path / "turns" / str(child.pid)).exists(), "its number may be another's"
    with shared.alone():
        assert stands_still(turns, other.pid)


def test_who_was_stopped_goes_on_where_the_folder_is_gone(turns: ModuleType, started: Any, tmp_path: Path) -> None:
    """As where the benchmark is interrupted."""
    child, count = started(COUNTS, "counts")
    with turns.Turns(tmp_path / "turns").alone():
        assert stands_still(turns, child.pid)
        shutil.rmtree(tmp_path / "turns")
    before = count()
    wait_until(lambda: count() > before, "it goes on")


def test_a_process_with_the_gpu_to_itself_waits_for_nobody(turns: ModuleType) -> None:
    alone = turns.Turns()
    alone.join()
    with alone.alone():
        alone.leave(1)


def test_what_is_started_while_signals_are_sent_gets_one_too(
    turns: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, told = iter([[1, 2], [1, 2, 3], [1, 2, 3]]), list[int]()
    monkeypatch.setattr(turns, "_processes", lambda sessions: next(listed))
    monkeypatch.setattr(turns.os, "kill", lambda process, number: told.append(process))
    turns.signal_sessions(signal.SIGSTOP, [1])
    assert sorted(told) == [1, 2, 3]
