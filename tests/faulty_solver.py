"""Imported by measuring processes of test_sandbox: makes ConvCpuGemm1x1 misbehave as FAULT says.

No candidate is left behind in the race, nor cut off beside a faulty one, so that what happens there does not depend on
times: a first run that a busy machine breaks off for some milliseconds was far behind, and with the faulty one failed
there was nobody left for a final.

Faults of a run come after FAULT_AFTER runs that go well. Those that come once leave a file FAULT_ONCE behind.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miofind.evaluate import entry as sandbox_child
from miofind.evaluate import evaluate
from miofind.measure import effort as effort_module
from miofind.solvers.cpu import direct, gemm1x1, im2col_gemm

_FAULT = os.environ.get("FAULT", "")
_AFTER = int(os.environ.get("FAULT_AFTER", "0"))
_ONCE = Path(os.environ.get("FAULT_ONCE", os.devnull))
_BLOCK_BYTES = 64 << 20
_SPARE_BYTES = 640 << 20

_multiply = gemm1x1.multiply
_verifier = evaluate.Verifier
_kept: list[Any] = []
_runs = 0


def _segfault(*_: Any) -> None:
    ctypes.string_at(0)


def _kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(*_: Any) -> None:
    os._exit(0)


def _spin(*_: Any) -> None:
    while True:
        pass


def _sleep(*_: Any) -> None:
    time.sleep(600)


def _raise(*_: Any) -> None:
    raise ArithmeticError("broken for this test")


def _sys_exit(*_: Any) -> None:
    sys.exit(0)


def _own_ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


def _log(problem: Any, config: Any, buffers: Mapping[str, Any]) -> None:
    logging.getLogger("miofind.faulty").debug("seen by the parent")
    _multiply(problem, config, buffers)


def _nan(problem: Any, config: Any, buffers: Mapping[str, Any]) -> None:
    _multiply(problem, config, buffers)
    buffers["y"][0, 0, 0, 0] = np.nan


def _wrong(problem: Any, config: Any, buffers: Mapping[str, Any]) -> None:
    _multiply(problem, config, buffers)
    buffers["y"][...] += 1


def _exhaust(*_: Any) -> None:
    """Take all the memory there is, and keep it."""
    with open("/proc/self/statm", encoding="ascii") as fields:
        taken = int(fields.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + _SPARE_BYTES, resource.RLIM_INFINITY))
    while True:
        _kept.append(np.ones(_BLOCK_BYTES, np.uint8))


def _wait_to_be_killed(problem: Any, config: Any, buffers: Mapping[str, Any]) -> None:
    """Tell who is to be killed, and wait for it the first time."""
    if _ONCE.exists():
        _multiply(problem, config, buffers)
        return
    _ONCE.write_text(str(os.getpid()), encoding="ascii")
    time.sleep(600)


_RUNS = {
    "segfault": _segfault,
    "kill": _kill,
    "exit": _exit,
    "spin": _spin,
    "raise": _raise,
    "sys.exit": _sys_exit,
    "own Ctrl-C": _own_ctrl_c,
    "log": _log,
    "nan": _nan,
    "wrong": _wrong,
    "exhaust": _exhaust,
    "wait to be killed": _wait_to_be_killed,
}


def _faulty(problem: Any, config: Any, buffers: Mapping[str, Any]) -> None:
    global _runs
    _runs += 1
    if _runs <= _AFTER:
        _multiply(problem, config, buffers)
    else:
        _RUNS[_FAULT](problem, config, buffers)


def _no_memory(*_: Any, **options: Any) -> None:
    raise MemoryError("none is left")


def _die_once(*arguments: Any, **options: Any) -> Any:
    if _ONCE.exists():
        return _verifier(*arguments, **options)
    _ONCE.touch()
    _kill()
    return None


def _slow(kind: type[Any]) -> None:
    solution = kind.solution

    def after_a_while(*arguments: Any) -> Any:
        time.sleep(0.3)
        return solution(*arguments)

    kind.solution = after_a_while


def _break_compilation(fault: Any) -> None:
    gemm1x1.ConvCpuGemm1x1.solution = fault  # type: ignore[method-assign]
    for kind in (direct.ConvCpuDirect, im2col_gemm.ConvCpuIm2colGemm):
        _slow(kind)


for effort, schedule in effort_module._SCHEDULES.items():
    cutoff = {"cutoff": 1e9, "long_cutoff": 1e9} if _FAULT else {}
    effort_module._SCHEDULES[effort] = replace(schedule, keep=1e9, **cutoff)

if _FAULT in _RUNS:
    gemm1x1.multiply = _faulty
elif _FAULT == "memory":
    evaluate.Verifier = _no_memory  # type: ignore[assignment, misc]
elif _FAULT == "die once":
    evaluate.Verifier = _die_once  # type: ignore[assignment, misc]
elif _FAULT == "die":
    evaluate.Verifier = _kill  # type: ignore[assignment, misc]
elif _FAULT == "compile forever":
    _break_compilation(_sleep)
elif _FAULT == "compile and crash":
    _break_compilation(_segfault)
elif _FAULT == "compile and sys.exit":
    _break_compilation(_sys_exit)
elif _FAULT == "compile and own Ctrl-C":
    _break_compilation(_own_ctrl_c)
elif _FAULT == "sick":
    sandbox_child.complaint = lambda *_: "a kernel gives wrong results"
elif _FAULT == "sick once" and not _ONCE.exists():
    _ONCE.touch()
    sandbox_child.complaint = lambda *_: "a kernel gives wrong results"
