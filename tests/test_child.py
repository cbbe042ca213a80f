"""The connection to a spawned process: whole messages from many threads, and nothing after half a one."""

from __future__ import annotations

import multiprocessing.connection
import signal
import subprocess
import threading
from typing import Any

import pytest

from miofind import child as child_module
from miofind.child import Child, Line


def test_threads_send_whole_messages() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    line = Line(theirs)
    threads = [threading.Thread(target=line.send, args=((name, "x" * 10_000),)) for name in range(8)]
    for thread in threads:
        thread.start()
    found = {ours.recv() for _ in threads}
    for thread in threads:
        thread.join()
    assert found == {(name, "x" * 10_000) for name in range(8)}
    ours.send("job")
    assert line.receive() == "job"


def test_what_cannot_be_written_leaves_the_line_as_it_was() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    line = Line(theirs)
    with pytest.raises((AttributeError, TypeError)):
        line.send(threading.Lock())
    line.send("after it")
    assert ours.recv() == "after it"


def test_nothing_follows_half_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    line = Line(theirs)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(theirs), "send_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            line.send("half")
    line.send("more")
    assert not ours.poll(0.1)


def test_ctrl_c_while_a_process_is_begun_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Popen forgot a process that it had begun: it stayed a zombie as long as its parent lived."""
    begun: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            begun.append(self)
            signal.raise_signal(signal.SIGINT)
            self.is_whole = True

    monkeypatch.setattr(child_module.subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Child("import time; time.sleep(600)", "", [])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun[0].is_whole
    assert begun[0].returncode == -signal.SIGKILL
