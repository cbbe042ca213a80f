"""Imported by measuring processes of test_sandbox: makes them fail as FAULT says, after FAULT_AFTER runs that go well.

FAULT is "crash", "hang" or "raise", each of ConvCpuGemm1x1's runs, or "memory", of the process before any candidate.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from miofind import evaluate
from miofind.solvers import cpu_gemm1x1

_FAULT = os.environ.get("FAULT", "")
_AFTER = int(os.environ.get("FAULT_AFTER", "0"))
_multiply = cpu_gemm1x1.multiply
_runs = 0


def _faulty(*arguments: Any) -> None:
    global _runs
    _runs += 1
    if _runs <= _AFTER:
        _multiply(*arguments)
    elif _FAULT == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif _FAULT == "hang":
        time.sleep(600)
    elif _FAULT == "raise":
        raise ArithmeticError("broken for this test")


def _no_memory(*arguments: Any, **options: Any) -> None:
    raise MemoryError("none is left")


if _FAULT == "memory":
    evaluate.Verifier = _no_memory  # type: ignore[assignment, misc]
elif _FAULT:
    cpu_gemm1x1.multiply = _faulty
