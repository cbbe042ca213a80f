"""A process that compiles: receives steps, fills the binary cache on disk, says how each went. Needs no GPU."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass

from miofind.compiler.build import Compiler
from miofind.compiler.cache import BinaryCache
from miofind.compiler.nvrtc import compile_options, compile_source, toolchain
from miofind.compiler.sources import KernelSource
from miofind.errors import CompileError, MissingLibraryError
from miofind.process.parent import Parent
from miofind.solver.steps import KernelStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A step to compile for an architecture."""

    step: KernelStep
    arch: str


Answer = CompileError | MissingLibraryError | None
"""What became of a request: None once the binary is in the cache, or where nothing can be said of the step."""


@dataclass(frozen=True, slots=True)
class CompileReply:
    """A request is done with."""

    answer: Answer


_NICENESS = 5
"""What is measured meanwhile, and what plans, go first: on a host of as many processors as compilers each find took 85
instead of 60 ms."""


def serve(parent: Parent, cache: BinaryCache) -> None:
    """Compile what the parent asks for, one request after another; processes of usual priority go first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    compiler = Compiler(cache)
    try:
        _compile_first()
    except (CompileError, MissingLibraryError) as error:  # each request meets what is missing, and is answered with it
        logger.debug("nothing was compiled before the first request: %s", error)
    parent.ready()
    while True:
        parent.send(CompileReply(_answer(compiler, parent.receive())))


_FIRST = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void first(__half* half, __nv_bfloat16* brain) {
  *half = __float2half(1.0f);
  *brain = __float2bfloat16(1.0f);
}
"""


def _compile_first() -> None:
    """Compile a few lines, for what NVRTC loads with a process's first ones: no steps wait for that by then.

    It takes 0.1 to 0.4 s where as many processes as processors load it at once (H200's host).

    Raises:
        CompileError, MissingLibraryError: nothing can be compiled.
    """
    arch = str(max(toolchain().sms))
    source = KernelSource(name="first.cu", text=_FIRST, headers={}, digest="")
    compile_source(source, compile_options((), (), arch), arch)


def _answer(compiler: Compiler, request: CompileRequest) -> Answer:
    try:
        compiler.build(request.step, request.arch)
    except (CompileError, MissingLibraryError) as error:
        return error
    except MemoryError:  # it speaks of the moment: whoever measures tries again
        logger.debug("no memory to compile %s", request.step.source, exc_info=True)
    except Exception as error:  # NVRTC's own failures: who waits for the step is to read them
        logger.debug("compiling %s failed", request.step.source, exc_info=True)
        message = f"{request.step.source} cannot be compiled for sm_{request.arch}: {error!r}"
        return CompileError(message, source=request.step.source, options=request.step.options, log="")
    return None
