"""Threads that work through what they are given: order, errors, what is given up, and no thread to be had."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes.waiting import LIMIT_S

import miofind
from miofind.process.threads import Helper, in_threads


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("workers", [1, 3, 100])
def test_results_come_in_order(workers: int) -> None:
    assert list(in_threads(lambda n: n * n, range(20), workers, "test")) == [n * n for n in range(20)]
    assert list(in_threads(lambda n: n, (), workers, "test")) == []


@pytest.mark.usefixtures("no_threads")
def test_where_no_thread_can_be_had_the_callers_works() -> None:
    by: list[threading.Thread] = []

    def work(number: int) -> int:
        by.append(threading.current_thread())
        return -number

    assert list(in_threads(work, range(5), 2, "test")) == [0, -1, -2, -3, -4]
    assert set(by) == {threading.current_thread()}


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_work_raises_comes_at_its_turn(error: type[BaseException]) -> None:
    def work(number: int) -> int:
        if number == 2:
            raise error("for this test")
        return number

    results = in_threads(work, range(4), 2, "test")
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(error, match="for this test"):
        next(results)


def test_what_has_not_begun_is_given_up() -> None:
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def work(number: int) -> int:
        seen.append(number)
        if number == 1:
            begun.set()
            assert go_on.wait(LIMIT_S)
        return number

    results = in_threads(work, range(100), 1, "test-given-up")
    assert next(results) == 0
    assert begun.wait(LIMIT_S)
    results.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "test-given-up":
            thread.join(LIMIT_S)
    assert seen == [0, 1]


@pytest.fixture
def helper() -> Iterator[Helper]:
    made = Helper("test-helper")
    yield made
    made.give_up()


def test_a_helper_does_one_thing_after_another(helper: Helper) -> None:
    done: list[int] = []
    for number in range(10):
        helper.submit(lambda number=number: done.append(number))
    helper.finish()
    assert done == list(range(10))


def test_a_helper_that_is_given_up_does_what_it_began(helper: Helper) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        done.append("first")

    helper.submit(work)
    helper.submit(lambda: done.append("second"))
    assert begun.wait(LIMIT_S)
    helper.give_up()
    go_on.set()
    helper.finish()
    assert done == ["first"]


@pytest.mark.usefixtures("no_threads")
def test_a_helper_without_a_thread_does_nothing(helper: Helper) -> None:
    done: list[int] = []
    helper.submit(lambda: done.append(1))
    helper.finish()
    assert done == []


OWN_OF_THREADS = frozenset(vars(threading.Thread(target=int))) | {
    *("_args", "_context", "_daemonic", "_handle", "_ident", "_initialized", "_invoke_excepthook", "_is_stopped"),
    *("_kwargs", "_name", "_native_id", "_os_name", "_started", "_stderr", "_target", "_tstate_lock"),
}
"""Attributes that threading.Thread sets of itself, of Python 3.11 to 3.14 and of this one."""


def test_threads_of_ours_set_nothing_that_threads_have() -> None:
    """Tuning by a process a device once set `_handle`, and no such thread began from Python 3.13 on."""
    found = {}
    for path in Path(miofind.__file__).parent.rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.ClassDef) and any(ast.unparse(base).endswith("Thread") for base in each.bases):
                set_ones = {
                    node.attr
                    for node in ast.walk(each)
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                }
                found[each.name] = set_ones & OWN_OF_THREADS
    assert len(found) >= 4, "there are threads of ours"
    assert not any(found.values()), found
