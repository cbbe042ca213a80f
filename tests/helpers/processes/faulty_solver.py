"""Imported by children that faulty_services.py starts: ConvCpuGemm1x1 misbehaves as FAULT_FOLDER/fault says, a word.

No candidate is left behind in the race, nor cut off but where the fault is "cut off", and each final has a verdict, so
that what happens does not depend on times.

FAULT_FOLDER/stage names the stage from which a candidate's runs go wrong: "first run", "screening" or "race". Faults
that come once leave a file FAULT_FOLDER/once behind, those that never end a file FAULT_FOLDER/hangs.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miofind.evaluate import evaluate, measuring_child
from miofind.measure import effort as effort_module
from miofind.measure import race
from miofind.measure.verdict import MIN_ROUNDS
from miofind.solvers.cpu import direct, gemm1x1, im2col_gemm

_FOLDER = Path(os.environ["FAULT_FOLDER"])
_ONCE = _FOLDER / "once"
_STAGES = ("first run", "screening", "race")
_BLOCK_BYTES = 64 << 20
_SPARE_BYTES = 448 << 20

_multiply = gemm1x1.multiply
_verifier = evaluate.Verifier
_complaint = measuring_child.complaint
_kept: list[Any] = []
_stage = 0


def _asked(name: str) -> str:
    file = _FOLDER / name
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _segfault(*_: Any) -> None:
    ctypes.string_at(0)


def _kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(*_: Any) -> None:
    os._exit(0)


def _spin(*_: Any) -> None:
    (_FOLDER / "hangs").touch()
    while True:
        pass


def _sleep(*_: Any) -> None:
    (_FOLDER / "hangs").touch()
    time.sleep(3600)


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
    time.sleep(3600)


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
    is_due = _stage >= _STAGES.index(_asked("stage") or _STAGES[0])
    (_RUNS.get(_asked("fault"), _multiply) if is_due else _multiply)(problem, config, buffers)


def _in_stage(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """The same, from which on it is that stage."""

    def entered(*arguments: Any, **options: Any) -> Any:
        global _stage
        _stage = max(_stage, _STAGES.index(name))
        return act(*arguments, **options)

    return entered


def _verifying(*arguments: Any, **options: Any) -> Any:
    """A new verifier begins a job."""
    global _stage
    _stage = 0
    fault = _asked("fault")
    if fault == "memory":
        raise MemoryError("none is left")
    if fault == "die" or (fault == "die once" and not _ONCE.exists()):
        _ONCE.touch()
        _kill()
    return _verifier(*arguments, **options)


_COMPILES = {
    "compile forever": _sleep,
    "compile and crash": _segfault,
    "compile and sys.exit": _sys_exit,
    "compile and own Ctrl-C": _own_ctrl_c,
}


def _compiling(kind: type[Any], slow: bool) -> None:
    solution = kind.solution

    def compiled(*arguments: Any) -> Any:
        fault = _COMPILES.get(_asked("fault"))
        if fault is not None and slow:
            time.sleep(0.3)  # so that all are compiled at a time
        elif fault is not None:
            fault()
        return solution(*arguments)

    kind.solution = compiled


def _complain(*arguments: Any) -> str:
    fault = _asked("fault")
    if fault == "sick" or (fault == "sick once" and not _ONCE.exists()):
        _ONCE.touch()
        return "a kernel gives wrong results"
    return _complaint(*arguments)


for effort, schedule in effort_module._SCHEDULES.items():
    cutoffs = {} if _asked("fault") == "cut off" else {"cutoff": 1e9, "long_cutoff": 1e9}
    least = max(schedule.least_final_rounds, MIN_ROUNDS) if schedule.final_rounds else 0
    effort_module._SCHEDULES[effort] = replace(schedule, keep=1e9, least_final_rounds=least, **cutoffs)

for kind in (direct.ConvCpuDirect, im2col_gemm.ConvCpuIm2colGemm, gemm1x1.ConvCpuGemm1x1):
    _compiling(kind, slow=kind is not gemm1x1.ConvCpuGemm1x1)
gemm1x1.multiply = _faulty
evaluate.Verifier = _verifying  # type: ignore[assignment, misc]
measuring_child.complaint = _complain
race._Runner.take = _in_stage("screening", race._Runner.take)  # type: ignore[method-assign]
race.Race.finish = _in_stage("race", race.Race.finish)  # type: ignore[method-assign]
