"""Where Python looks for no garbage, or leaves out what was there before."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.processes.forks import in_a_fork
from helpers.processes.imports import searches_noted
from helpers.processes.waiting import LIMIT_S

from miofind.device import device
from miofind.process import garbage
from miofind.process.forks import loading
from miofind.process.garbage import (
    with_rare_garbage_collection,
    without_garbage_collection,
    without_what_is_loaded,
)
from miofind.process.held_settings import Holder
from miofind.solver.registry import Registry


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """As at a program's beginning."""
    gc.unfreeze()
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_looked_for_afterwards_as_it_was_before(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError), without_garbage_collection(), without_garbage_collection():
            assert not gc.isenabled()
            _ = 1 / 0
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_solvers_are_imported_without_a_search_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """One among all objects of PyTorch and of a network takes 0.1 s."""
    registry = Registry()
    registry._indexed = Registry.default().facts
    enabled = searches_noted(monkeypatch)
    assert registry["ConvWinograd"].id == "ConvWinograd"
    assert enabled == [False]
    assert gc.isenabled()


CUPY = """
import gc, types
from miofind.process import forks
was_enabled, do_forks_wait = gc.isenabled(), forks._loading._is_owned()
cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError))
"""


def test_cupy_is_imported_without_a_search_for_garbage_while_forks_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It makes so many objects that the first search among all falls into a program's first result."""
    (tmp_path / "cupy.py").write_text(CUPY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(device, "has_cupy", lambda: True)
    monkeypatch.setattr(device, "check_fork", lambda: None)  # it would keep this process's number
    try:
        assert device.cuda_device_count() == 1
        assert (sys.modules["cupy"].was_enabled, sys.modules["cupy"].do_forks_wait) == (False, True)
        assert gc.isenabled()
        with ThreadPoolExecutor(1) as pool, loading():  # of something else
            assert pool.submit(device.cuda_device_count).result(LIMIT_S) == 1
    finally:
        sys.modules.pop("cupy", None)


def test_what_was_there_is_looked_at_again_afterwards() -> None:
    before, left_over = _Cycle(), _Cycle()
    there = weakref.ref(left_over)
    with without_what_is_loaded():
        del left_over
        new = weakref.ref(_Cycle())
        gc.collect()
        assert new() is None
        assert there() is not None
        assert not any(each is before for each in gc.get_objects())
    gc.collect()
    assert there() is None
    assert any(each is before for each in gc.get_objects())


def test_what_the_program_froze_itself_stays_frozen() -> None:
    """As servers do before they fork, so that their children share the memory of what was loaded."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    with without_what_is_loaded(), without_what_is_loaded():
        pass
    assert gc.get_freeze_count() == frozen


def test_what_python_froze_itself_is_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with 375 frozen objects."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    monkeypatch.setattr(garbage, "_INTERPRETERS", 1_000)
    before = _Cycle()
    with without_what_is_loaded():
        assert not any(each is before for each in gc.get_objects())
    assert any(each is before for each in gc.get_objects())


@pytest.mark.parametrize("freezes", [True, False])
def test_a_program_that_froze_before_it_loaded_anything_is_told_from_python(freezes: bool) -> None:
    """By what the interpreter counts."""
    code = (
        f"import gc\nif {freezes}: gc.freeze()\n"
        "from miofind.process.garbage import without_what_is_loaded\nfrozen = gc.get_freeze_count()\n"
        "with without_what_is_loaded(): print(gc.get_freeze_count() > frozen)\n"
        "print(gc.get_freeze_count() == (frozen if {freezes} else 0))"
    ).replace("{freezes}", str(freezes))
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert told == [str(not freezes), "True"]


def test_what_was_loaded_since_is_left_out_too_when_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_what_is_loaded() as leave_out:
        since = _Cycle()
        assert any(each is since for each in gc.get_objects())
        leave_out()
        assert not any(each is since for each in gc.get_objects())
    assert any(each is since for each in gc.get_objects())
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 50_000)  # as a program leaves them
    with without_what_is_loaded() as leave_out:
        leave_out()
        assert any(each is since for each in gc.get_objects())


def _made_objects(count: int) -> list[list[object]]:
    return [[] for _ in range(count)]


def test_searches_are_rare_in_a_block_and_as_frequent_as_before_behind_it() -> None:
    usual, searches = gc.get_threshold(), []

    def noted(phase: str, info: dict[str, int]) -> None:
        searches.append(info["generation"])

    gc.callbacks.append(noted)
    try:
        with contextlib.suppress(ZeroDivisionError), with_rare_garbage_collection(), with_rare_garbage_collection():
            kept = _made_objects(garbage._RARE // 2)
            within = len(searches)
            _ = 1 / 0
        assert gc.get_threshold() == usual
        kept += _made_objects(20 * usual[0])
        assert within <= 2  # of which one is of what was there before
        assert len(searches) > within + 2
    finally:
        gc.callbacks.remove(noted)


def test_garbage_is_found_in_a_long_block() -> None:
    with with_rare_garbage_collection():
        left_over = weakref.ref(_Cycle())
        kept = _made_objects(3 * garbage._RARE)
        assert left_over() is None
    assert kept


@pytest.mark.parametrize("own", [0, 200_000])
def test_a_program_that_has_set_how_often_keeps_it(own: int) -> None:
    gc.set_threshold(own)
    with with_rare_garbage_collection():
        assert gc.get_threshold()[0] == own
    assert gc.get_threshold()[0] == own


def test_what_a_program_sets_meanwhile_stays() -> None:
    with with_rare_garbage_collection():
        gc.set_threshold(123, 4, 5)
        with with_rare_garbage_collection():
            assert gc.get_threshold()[0] == 123
    assert gc.get_threshold()[0] == 123


@pytest.mark.parametrize("function", ["begin", "end"])
def test_what_an_interrupt_leaves_is_put_right_by_the_next_block(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, real = gc.get_threshold()[0], getattr(garbage._rare_searches, function)

    def interrupted(block: object) -> None:
        monkeypatch.undo()
        if function == "begin":
            real(block)
        raise KeyboardInterrupt

    monkeypatch.setattr(garbage._rare_searches, function, interrupted)
    with pytest.raises(KeyboardInterrupt), with_rare_garbage_collection():
        pass
    with with_rare_garbage_collection():
        assert gc.get_threshold()[0] == garbage._RARE
    assert gc.get_threshold()[0] == usual


@contextlib.contextmanager
def _block_of_another_thread() -> Iterator[None]:
    begun, go_on = threading.Event(), threading.Event()

    def in_a_block() -> None:
        with with_rare_garbage_collection():
            begun.set()
            go_on.wait(LIMIT_S)

    thread = threading.Thread(target=in_a_block)
    thread.start()
    try:
        assert begun.wait(LIMIT_S)
        yield
    finally:
        go_on.set()
        thread.join(LIMIT_S)


def test_searches_stay_rare_until_the_last_thread_is_done() -> None:
    usual = gc.get_threshold()[0]
    with _block_of_another_thread():
        with with_rare_garbage_collection():
            pass
        assert gc.get_threshold()[0] == garbage._RARE
    assert gc.get_threshold()[0] == usual


def test_a_forked_child_ends_blocks_of_threads_that_it_has_not() -> None:
    usual = gc.get_threshold()[0]

    def searches_as_ever() -> None:
        assert gc.get_threshold()[0] == usual

    with _block_of_another_thread():
        assert in_a_fork(searches_as_ever) == 0


def test_a_forked_child_ends_the_block_that_it_was_forked_in_once_more() -> None:
    usual = gc.get_threshold()[0]

    def goes_on_in_the_child() -> None:
        assert gc.get_threshold()[0] == usual
        garbage._rare_searches.end(block)
        assert gc.get_threshold()[0] == usual
        with with_rare_garbage_collection():
            assert gc.get_threshold()[0] == garbage._RARE
        assert gc.get_threshold()[0] == usual

    block = Holder()
    garbage._rare_searches.begin(block)
    try:
        assert in_a_fork(goes_on_in_the_child) == 0
        assert gc.get_threshold()[0] == garbage._RARE
    finally:
        garbage._rare_searches.end(block)
