"""A child that serves: made ready, heard, silent, ended, and over with its parent."""

from __future__ import annotations

import itertools
import logging
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.processes import child_services
from helpers.processes.waiting import wait_until

from miofind.errors import DatabaseError
from miofind.process import restarts
from miofind.process import service as service_module
from miofind.process.child import ChildExit
from miofind.process.protocol import Alive, Failed, Finished
from miofind.process.restarts import ATTEMPTS, Restarts, attempts
from miofind.process.service import Service, Silence, told

Start = Callable[..., Service]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts services and ends them."""
    started: list[Service] = []

    def begin(*arguments: Any, **options: Any) -> Service:
        started.append(Service(*arguments, **options))
        return started[-1]

    yield begin
    for service in started:
        service.kill()


def test_a_service_gets_its_setup_and_messages(start: Start) -> None:
    service = start(child_services.echo, {"what": "setup"})
    assert service.await_ready() is None
    service.send("one")
    service.send(("two", 2))
    assert [service.receive() for _ in range(3)] == [{"what": "setup"}, "one", ("two", 2)]
    assert service.is_alive
    service.kill()
    assert not service.is_alive


def test_what_a_service_has_loaded_is_no_garbage(start: Start) -> None:
    service = start(child_services.tell_of_garbage, None)
    assert service.await_ready() is None
    assert service.receive() == {"early": False, "then": True, "keeps": True}


def test_a_service_that_returns_has_finished(start: Start) -> None:
    service = start(child_services.finish, 3)
    assert service.await_ready() is None
    assert [service.receive(), service.receive()] == [3, Finished()]
    assert service.receive() == ChildExit(0)


def test_what_a_service_raises_is_told(start: Start) -> None:
    refused = start(child_services.raise_error, "own").await_ready()
    assert isinstance(refused, Failed)
    assert isinstance(refused.error, DatabaseError)
    assert told(refused, "it") == refused.message == "the disk is full"
    service = start(child_services.raise_error, "foreign")
    assert service.await_ready() is None
    assert service.receive() == Failed("ZeroDivisionError: by zero")
    service = start(child_services.raise_error, "not made of its message")
    assert service.await_ready() is None
    assert service.receive() == Failed("the disk is full")


@pytest.mark.parametrize(
    ("number", "is_from_outside"), [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGSEGV, False)]
)
def test_an_end_comes_after_the_last_word_and_names_the_signal(
    start: Start, number: signal.Signals, is_from_outside: bool
) -> None:
    service = start(child_services.die, number)
    assert service.await_ready() is None
    assert service.receive() == "a last word"
    end = service.receive()
    assert end == ChildExit(-number)
    assert end.is_from_outside == is_from_outside
    assert told(end, "the process") == f"the process ended with code {-number} ({number.name})"
    service.send("nobody hears it")
    assert service.receive() == end


def test_who_only_logs_is_not_waited_for(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    service = start(child_services.log_for_good, None)
    assert service.await_ready() is None
    while "still here" not in caplog.text:
        assert service.receive(0.1) == Silence(0.1)


def test_a_stopped_child_gives_no_sign_of_life(start: Start) -> None:
    service = start(child_services.stop, None, silence_s=1.0)
    assert service.await_ready() is None
    assert service.receive() == Silence(1.0)
    assert service.is_alive


def test_signs_of_life_are_no_messages_and_end_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    service = Service.__new__(Service)
    service._child = SimpleNamespace(connection=ours)  # type: ignore[assignment]
    service._silence_s = 10.0
    clock = itertools.count(step=6)  # 12 s from one sign to the look after the next
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for message in (Alive(), Alive(), "at last"):
        theirs.send(message)
    assert service.receive() == "at last"


def test_a_child_that_is_asked_to_gives_signs_of_life(start: Start) -> None:
    service = start(child_services.echo, "setup", silence_s=60.0)
    assert service.await_ready() is None
    assert service.receive() == "setup"
    assert isinstance(service._child.connection.recv(), Alive)


def test_waiting_ends_where_nobody_wants_the_answer(start: Start) -> None:
    wanted = threading.Event()
    wanted.set()
    service = start(child_services.echo, "setup")
    assert service.await_ready() is None
    assert service.receive() == "setup"
    threading.Timer(0.1, wanted.clear).start()
    assert isinstance(service.receive(is_wanted=wanted.is_set), Silence)


def test_a_service_outlives_the_thread_that_started_it(start: Start) -> None:
    """The kernel ends a child with the thread that it was started by."""
    services: list[Service] = []
    thread = threading.Thread(target=lambda: services.append(start(child_services.echo, "setup")))
    thread.start()
    thread.join()
    assert services[0].await_ready() is None
    assert services[0].receive() == "setup"
    time.sleep(0.2)
    assert services[0].is_alive


_PARENT = """
import sys, time
from helpers.processes import child_services
from miofind.process.service import Service
service = Service(child_services.hold_the_interpreter, sys.argv[1])
assert service.await_ready() is None
time.sleep(600)
"""


def test_a_service_ends_with_a_parent_that_is_killed_whatever_it_is_stuck_in(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    with subprocess.Popen([sys.executable, "-c", _PARENT, str(pid_file)], env=environment) as parent:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith(";"), "a child")
        child = int(pid_file.read_text()[:-1])
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(child), "its end")


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_is_given_up_after_as_many_fruitless_ends_as_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Restarts()
    assert [counted.ended() for _ in range(ATTEMPTS - 1)] == [False] * (ATTEMPTS - 1)
    counted.progressed()
    assert [counted.ended() for _ in range(ATTEMPTS)] == [False] * (ATTEMPTS - 1) + [True]
    pauses: list[float] = []
    monkeypatch.setattr(restarts.time, "sleep", pauses.append)
    assert list(attempts()) == list(range(ATTEMPTS))
    assert tuple(pauses) == restarts.PAUSES_S


def test_what_a_child_logs_is_of_the_parents_level(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="miofind"):
        service = start(child_services.log_once, None)
    assert service.await_ready() is None
    assert service.receive() == "logged"
    assert "still here" not in caplog.text
