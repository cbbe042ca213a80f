"""What processes do that share a file in the tests of the FindDB; a script, so that they load nothing else."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable

from miofind.finddb import Row, Scope, Store

DEVICE = "NVIDIA H200|132|9.0|"


def write(path: str, number: str, records: str) -> None:
    """Record rows of a problem of its own and of one that all share."""
    with Store(path) as store:
        for index in range(int(records)):
            own = _row(index)
            store.record(DEVICE, f"own-{number}", [own], scope=Scope(solvers={"A": 1}), environment={"driver": "13.0"})
            store.record(DEVICE, "shared", [_row(int(number) * int(records) + index)])


def read(path: str, number: str, records: str) -> None:
    """Look up while others write; what was there once stays."""
    seen = 0
    with Store(path) as store:
        for _ in range(int(records) * 4):
            answer = store.answer(DEVICE, f"own-{number}")
            found = 0 if answer is None else len(answer.rows)
            if found < seen:
                print("rows were lost")
            seen = found


def crowd(path: str, first: str, count: str, records: str) -> None:
    """A process for each of `count` writers and as many readers, which pays once for what they import."""
    jobs = [(job, str(int(first) + index)) for index in range(int(count)) for job in (write, read)]
    children = [_fork(job, path, number, records) for job, number in jobs]
    for child in children:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            print("a process failed")


def nursery(orders_fd: str) -> None:
    """Fork a process that obeys for each FindDB asked for over a socket; this one alone pays for what they import.

    "start PATH" comes with the two pipes that become stdin and stdout; the answer is the process's id. "wait ID" is
    answered with its exit status, once it has ended.
    """
    orders = socket.socket(fileno=int(orders_fd))
    while True:
        message, pipes, *_ = socket.recv_fds(orders, 4096, 2)
        if not message:
            return
        order, _, argument = message.decode().partition(" ")
        if order == "start":
            answer = _fork(_obey_pipes, argument, *pipes)
            for pipe in pipes:
                os.close(pipe)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(int(argument), 0)[1])
        orders.sendall(f"{answer}".encode())


def _obey_pipes(path: str, stdin: int, stdout: int) -> None:
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
    obey(path)


def _fork(job: Callable[..., None], *arguments: object) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            job(*arguments)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child


def write_forever(path: str) -> None:
    """Record, and say so, until killed."""
    number = 0
    with Store(path) as store:
        while True:
            store.record(DEVICE, f"problem-{number}", [_row(0), _row(1)], scope=Scope(solvers={"A": 1}))
            print(number, flush=True)
            number += 1


def obey(path: str) -> None:
    """Do what the lines of stdin say, one after the other, and say what came of it."""
    print("begun", flush=True)
    said = ""
    with Store(path) as store:
        for line in sys.stdin:
            order, *words = line.split()
            quiet = order == "tell"
            if quiet:
                order, *words = words
                print(flush=True)
            if order == "record":
                name, count = words[0], int(words[1])
                for number in range(count):
                    row = Row(solver_id=name, solver_version=1, config="{}", status="ok", time_ms=1.0)
                    store.record(DEVICE, f"{name}-{number}", [row], scope=Scope(solvers={name: 1}))
                said = str(count)
            elif order == "count":
                said = str(len(store.problems()))
            if not quiet:
                print(said, flush=True)


def _row(tile: int) -> Row:
    return Row(solver_id="A", solver_version=1, config=f'{{"tile":{tile}}}', status="ok", time_ms=1.0)


if __name__ == "__main__":
    job, *arguments = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    {"crowd": crowd, "write_forever": write_forever, "nursery": nursery}[job](*arguments)
