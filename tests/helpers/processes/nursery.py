"""Forks children that serve a process from one that has imported what they need: starting one costs 20 ms, not 600.

For tests of what becomes of such processes. How one starts is tested in tests/process, and wherever nothing asks for
`forked_children`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

_LENGTH = struct.Struct("!I")
_IMPORTED = (
    *("miofind.process.parent", "miofind.tune.device_process", "miofind.evaluate.measuring_child"),
    *(
        "miofind.compiler.worker",
        "miofind.verify.harness_host",
        "miofind.measure.backend_host",
        "helpers.processes.faulty_services",
    ),
    *("miofind.solvers.cpu.direct", "miofind.solvers.cpu.gemm1x1", "miofind.solvers.cpu.im2col_gemm"),
    *("numpy.random", "numpy.ma"),
)


class ForkedProcess:
    """What a `Child` knows of subprocess.Popen, of a process that is the nursery's child."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._ended = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            end = select.poll()
            end.register(self._ended, select.POLLIN)
            if not end.poll(None if timeout is None else 1e3 * timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        with self._lock:
            if self.returncode is None:
                self.returncode = self._nursery.exit_code(self.pid)
                os.close(self._ended)
            return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """Starts processes as `miofind.process.child` does, but that they are forked."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                process_group=0,
            )

    def close(self) -> None:
        """End it, and what it has forked and nobody ended."""
        self._orders.close()
        self._process.wait()

    def popen(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Any, **settings: Any) -> ForkedProcess:
        """A process that runs what the command would."""
        assert settings == {"stdin": subprocess.DEVNULL, "process_group": 0}
        start, _, *words = command[command.index("-c") + 2 :]
        parents = {str(os.getpid()): str(self._process.pid)}
        arguments = [parents.get(word, word) for word in words]
        order = {"start": start, "arguments": arguments, "environment": dict(env), "folder": os.getcwd()}
        return ForkedProcess(self, self._answer(order, [*pass_fds, 1, 2]))

    def exit_code(self, pid: int) -> int:
        """That of a process that has ended."""
        return self._answer({"ended": pid})

    def _answer(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        with self._lock:
            _send(self._orders, order, descriptors)
            answer, _ = _received(self._orders)
        return int(answer)


def _send(connection: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    content = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(content))], descriptors)
    connection.sendall(content)


def _received(connection: socket.socket) -> tuple[Any, list[int]]:
    """A message and the descriptors that came with it; raises EOFError where none will come."""
    length, descriptors, *_ = socket.recv_fds(connection, _LENGTH.size, 3)
    if not length:
        raise EOFError
    left, content = _LENGTH.unpack(length)[0], b""
    while left:
        content += (part := connection.recv(left))
        left -= len(part)
    return json.loads(content), descriptors


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One for all tests of a worker of pytest's."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def forked_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that begin in the test are forked, where the system tells by a descriptor that they have ended."""
    from miofind.process import child

    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return
    monkeypatch.setattr(child, "_starter", request.getfixturevalue("nursery"))


def main(orders: socket.socket) -> str:
    """In the nursery, fork and tell how processes ended until nobody asks; in each of them what it runs."""
    from miofind.process.parent import end_with_parent

    end_with_parent(int(sys.argv[2]))
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    while True:
        try:
            order, descriptors = _received(orders)
        except (EOFError, ConnectionError):
            return ""
        if "ended" in order:
            _send(orders, os.waitstatus_to_exitcode(os.waitpid(order["ended"], 0)[1]))
            continue
        pid = os.fork()
        if pid == 0:
            orders.close()
            return _prepared(order, descriptors)
        with suppress(ProcessLookupError):  # it has ended
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(orders, pid)


def _prepared(order: dict[str, Any], descriptors: list[int]) -> str:
    """What a process runs, which has its surroundings from here on."""
    os.setpgid(0, 0)
    theirs, stdout, stderr = descriptors
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    entry, sys.path[:], _ = json.loads(order["start"])
    sys.argv[:] = ["-c", str(theirs), *order["arguments"]]
    return str(entry)


if __name__ == "__main__":
    exec(main(socket.socket(fileno=int(sys.argv[1]))))
