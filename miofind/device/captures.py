"""Captures of CUDA graphs by others in this process, which what is collected meanwhile must not break."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

_RELAXED = 2  # cuda.h: CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS = 0


@contextlib.contextmanager
def captures_undisturbed() -> Iterator[None]:
    """A block in which this thread may unload and free while a graph is captured, by itself or in another thread.

    A capture in CUDA's global mode, which is PyTorch's, forbids that to all threads and ends with an error where one
    does it; but Python collects what nobody refers to whenever it likes. No captured graph may use what is unloaded.

    Source: CUDA Driver API, cuThreadExchangeStreamCaptureMode.
    """
    exchange, mode = _exchange(), ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != _SUCCESS:
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> Any:
    """The driver's cuThreadExchangeStreamCaptureMode; None where there is no driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
