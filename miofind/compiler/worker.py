"""A process that compiles: receives steps, fills the binary cache on disk, says how each went. Needs no GPU.

Ends when its parent does, and leaves Ctrl-C to it.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from miofind.compiler.build import Compiler
from miofind.compiler.cache import BinaryCache
from miofind.errors import CompileError, MissingLibraryError
from miofind.solver.steps import KernelStep

logger = logging.getLogger(__name__)

ENTRY = "import sys; from miofind.compiler.worker import main; main(sys.argv[1:])"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started; what it compiles from now on is to blame for its end."""


@dataclass(frozen=True, slots=True)
class Order:
    """A step to compile for an architecture."""

    step: KernelStep
    arch: str


Answer = CompileError | MissingLibraryError | None
"""What became of an order: None once the binary is in the cache, or where nothing can be said of the step."""


@dataclass(frozen=True, slots=True)
class Done:
    """An order was carried out."""

    answer: Answer


def _end_with_parent() -> None:
    """Let the kernel end this process with its parent: a compiler that is stuck looks at nothing by itself."""
    if not sys.platform.startswith("linux"):
        return  # the closed connection ends a process that is not stuck
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _serve(connection: Connection[Any, Any], compiler: Compiler) -> None:
    """Compile until the parent hangs up."""
    while True:
        try:
            order = connection.recv()
            connection.send(Done(_answer(compiler, order)))
        except (EOFError, ConnectionError):
            return


def _answer(compiler: Compiler, order: Order) -> Answer:
    try:
        compiler.build(order.step, order.arch)
    except (CompileError, MissingLibraryError) as error:
        return error
    except MemoryError:  # it speaks of the moment: whoever measures tries again
        logger.debug("no memory to compile %s", order.step.source, exc_info=True)
    except Exception as error:  # NVRTC's own failures: who waits for the step is to read them
        logger.debug("compiling %s failed", order.step.source, exc_info=True)
        message = f"{order.step.source} cannot be compiled for sm_{order.arch}: {error!r}"
        return CompileError(message, source=order.step.source, options=order.step.options, log="")
    return None


def main(arguments: list[str]) -> None:
    """Entry: the connection's file descriptor, the parent's process id, the cache's folder, modules to import first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    if os.getppid() != int(arguments[1]):
        return
    os.dup2(2, 1)  # what compilers print must not stand among the parent's results
    connection: Connection[Any, Any] = Connection(int(arguments[0]))
    for name in arguments[3:]:
        importlib.import_module(name)
    connection.send(Ready())
    _serve(connection, Compiler(BinaryCache(Path(arguments[2]))))
