"""Kernels that torch.compile leaves alone: neither they nor what they call is traced.

A convolution that runs eagerly while a compiled function is on the stack, as behind a graph break or in a backward pass
within a compiled step, comes to its kernel with Dynamo's hook in force. PyTorch's own kernels are no Python; Dynamo
would compile all of miofind that a call comes through, find and gates included.
Source: pytorch, torch/csrc/dynamo/eval_frame.c, and `torch._dynamo.decorators.skip`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def untraced(kernel: _Kernel) -> _Kernel:
    """The kernel, a function of Python, whose code and all that it calls Dynamo runs as they are from now on."""
    try:
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(kernel.__code__, dynamo._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):  # it is PyTorch's own, and may change: the slower way, which is public
        slower: _Kernel = torch.compiler.disable(kernel)
        return slower
    return kernel
