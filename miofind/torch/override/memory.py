"""Memory and streams as PyTorch has them: what a launch is given, and room for a find beside PyTorch's own cache.

Results and workspaces come from PyTorch's allocator, which hands memory out again in the order of the stream that it
was asked on: that is the stream that the kernels go to, so nothing has to be recorded.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from miofind.core.problem import ProblemDescription
from miofind.torch.override.dtypes import numpy_dtype

_ROOM = 16
"""Times the bytes of a problem's tensors that a find is sure to do with, its copies and rotating buffers included."""

_LEAST_ROOM_BYTES = 1 << 30
_MOST_SKIPPED = 1023


class Backoff:
    """In which calls a workspace is asked for, after there was no memory for it.

    PyTorch gives its whole cache back to the driver before it says so, which takes longer than most convolutions. So
    each failure in a row about doubles the calls that do without, up to 1023; the first leaves out none.
    """

    __slots__ = ("_calls", "_left")

    def __init__(self) -> None:
        self._calls = self._left = 0

    def skips(self) -> bool:
        """Whether this call is to do without."""
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def failed(self) -> None:
        """There was no memory in this call."""
        self._left, self._calls = self._calls, min(2 * self._calls + 1, _MOST_SKIPPED)


def stream_reader() -> Callable[[int], int]:
    """Reads the address of PyTorch's current stream on a device by its ordinal."""
    short_cut: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return short_cut or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))


def results(shape: tuple[int, ...], strides: tuple[int, ...], like: Any) -> Callable[[Any], Any]:
    """Allocates uninitialised results of one form on the device and of the element type of a tensor, given such a one.

    PyTorch's short cut for its compiler takes half the time of `new_empty_strided`. It allocates on the current device,
    and leaves memory as it is where `use_deterministic_algorithms` would have it filled, as cuDNN's results are not.
    """
    quick = getattr(_inductor_guards(), f"_empty_strided_{like.device.type}", None)
    if quick is None:
        return lambda tensor: tensor.new_empty_strided(shape, strides)
    dtype, index = like.dtype, like.get_device()
    if index < 0 or torch.cuda.device_count() == 1:
        return lambda tensor: quick(shape, strides, dtype)
    current = torch.cuda.current_device

    def on_device(tensor: Any) -> Any:
        return quick(shape, strides, dtype) if current() == index else tensor.new_empty_strided(shape, strides)

    return on_device


def _inductor_guards() -> Any:
    """PyTorch's module of such short cuts; None where there is none."""
    try:
        return importlib.import_module("torch._C._dynamo.guards")
    except ImportError:
        return None


def host_array(tensor: Any) -> Any:
    """The memory of a tensor of the CPU, which is to outlive it, as a NumPy array of the same shape and strides.

    By its address: `Tensor.numpy` has PyTorch never resize the tensor's storage again, which `fully_shard` does.
    """
    dtype = numpy_dtype(tensor.dtype)
    strides, extents = tensor.stride(), tensor.shape
    last = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
    size = 0 if 0 in extents else (1 + last) * dtype.itemsize
    memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return np.ndarray(tuple(extents), dtype, memory, strides=[stride * dtype.itemsize for stride in strides])


def is_capturing(device: Any) -> bool:
    """Whether a CUDA graph is being captured on the device's current stream."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


def make_room(problem: ProblemDescription, device: Any) -> None:
    """Have PyTorch give cached memory back to the driver where a find, which asks the driver, might lack it."""
    if device.type != "cuda":
        return
    wanted = max(_LEAST_ROOM_BYTES, _ROOM * problem.bytes)
    if torch.cuda.mem_get_info(device)[0] < wanted:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
