"""A CUDA graph outlives what ran when it was captured: solutions, handles, threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import miofind
from miofind import FindMode, FindOptions, ProblemDescription

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gone", ["thread", "handle"])
def test_a_captured_run_can_be_replayed_after_what_ran_is_gone(gone: str) -> None:
    script = Path(__file__).with_name("captured_runs.py")
    command = [sys.executable, "-X", "faulthandler", str(script), gone]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def here(collect: Callable[[], object]) -> None:
    collect()


def in_a_thread(collect: Callable[[], object]) -> None:
    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()


@pytest.mark.parametrize("where", [here, in_a_thread])
@pytest.mark.parametrize("only", ["ConvImplicitGemmMma", "ConvCudnn", "ConvGemm1x1"])
def test_what_is_collected_breaks_no_capture(only: str, where: Callable[[Callable[[], object]], None]) -> None:
    """A handle that found and ran, in a cycle that nobody refers to, while a graph is captured in PyTorch's mode."""
    import cupy

    x, w = cupy.ones((4, 32, 16, 16), np.float16), cupy.ones((64, 32, 1, 1), np.float16)
    problem = ProblemDescription.convolution(x=x.shape, w=w.shape, dtype="float16")
    handle = miofind.Handle("cuda", database=":memory:")
    options = FindOptions(find_mode=FindMode.NORMAL, only=(only,), time_budget_s=5)
    found: Any = miofind.find_solutions(problem, options=options, handle=handle)
    y = miofind.run_solution(found[0], x, w)
    assert (y == 32).all()
    cycle = SimpleNamespace(handle=handle, found=found)
    cycle.itself = cycle
    gc.collect()
    stream, a = cupy.cuda.Stream(non_blocking=True), cupy.zeros(64, np.float32)
    a += 0  # has its kernel loaded
    cupy.cuda.Device().synchronize()
    alive = weakref.ref(handle)
    del handle, found, cycle
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        a += 1
        assert alive() is not None
        where(gc.collect)
        assert alive() is None
        a += 1
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert (a == 2).all()
