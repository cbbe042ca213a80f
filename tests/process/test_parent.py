"""A child's end of the connection: whole messages from many threads, and an end to it all with the parent."""

from __future__ import annotations

import multiprocessing.connection
import threading

import pytest

from miofind.process.parent import Parent, ParentGoneError


def test_threads_send_whole_messages() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    parent = Parent(theirs)
    threads = [threading.Thread(target=parent.send, args=((name, "x" * 10_000),)) for name in range(8)]
    for thread in threads:
        thread.start()
    found = {ours.recv() for _ in threads}
    for thread in threads:
        thread.join()
    assert found == {(name, "x" * 10_000) for name in range(8)}
    ours.send("job")
    assert parent.receive() == "job"


def test_what_cannot_be_written_leaves_the_connection_as_it_was() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    parent = Parent(theirs)
    with pytest.raises((AttributeError, TypeError)):
        parent.send(threading.Lock())
    parent.send("after it")
    assert ours.recv() == "after it"


def test_nothing_follows_half_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    parent = Parent(theirs)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(theirs), "send_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            parent.send("half")
    parent.send("more")
    assert not ours.poll(0.1)


def test_a_parent_that_hung_up_is_gone() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    parent = Parent(theirs)
    ours.close()
    with pytest.raises(ParentGoneError):
        parent.receive()
    with pytest.raises(ParentGoneError):
        parent.send("nobody hears it")
