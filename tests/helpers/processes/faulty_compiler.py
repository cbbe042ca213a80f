"""Imported by the processes of a CompilePool that faulty_services.py starts: NVRTC fails as a define FAULT says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from miofind.compiler import build
from miofind.compiler.nvrtc import Compiled
from miofind.compiler.sources import KernelSource

_compile_source = build.compile_source


def _faulty(source: KernelSource, options: tuple[str, ...], arch: str) -> Compiled:
    if "-DFAULT=hang" in options:
        Path(os.environ["FAULT_FOLDER"], f"hangs{os.getpid()}").touch()
        time.sleep(3600)
    if "-DFAULT=ctrl_c" in options:
        os.kill(os.getpid(), signal.SIGINT)
    if "-DFAULT=die" in options:
        os._exit(3)
    if "-DFAULT=kill" in options:
        os.kill(os.getpid(), signal.SIGKILL)
    if "-DFAULT=terminate" in options:
        os.kill(os.getpid(), signal.SIGTERM)
    if "-DFAULT=exhaust" in options:
        raise MemoryError("none is left")
    if "-DFAULT=raise" in options:
        raise ZeroDivisionError("broken for this test")
    return _compile_source(source, options, arch)


build.compile_source = _faulty
