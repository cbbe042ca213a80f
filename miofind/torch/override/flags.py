"""What PyTorch's switches ask of a convolution: TF32, determinism, cuDNN on or off, measuring, depthwise kernels.

They may change at any time, so every call reads them; `state` reads them in a quarter of a microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from miofind.core.tensor import MathMode

_C: Any = torch._C


class State(NamedTuple):
    """PyTorch's switches as they are read; part of the key of a plan.

    Attributes:
        precision: of float32 convolutions of cuDNN, "tf32", "ieee" or "none", the generic setting inherited: reading
            `cudnn.allow_tf32` raises where `cudnn.conv.fp32_precision` was set by itself.
        deterministic_algorithms: `torch.use_deterministic_algorithms`.
        deterministic: `torch.backends.cudnn.deterministic`.
        enabled: `torch.backends.cudnn.enabled`.
        benchmark: `torch.backends.cudnn.benchmark`.
        depthwise_kernel: `torch.backends.cudnn.depthwise_kernel`, "auto" where PyTorch has no such switch.
    """

    precision: str
    deterministic_algorithms: bool
    deterministic: bool
    enabled: bool
    benchmark: bool
    depthwise_kernel: str


def _automatic() -> str:
    return "auto"


# Since PyTorch 2.9, without which nothing is overridden.
_precision: Any = getattr(_C, "_get_fp32_precision_getter", None)
_deterministic_algorithms = _C._get_deterministic_algorithms
_deterministic = _C._get_cudnn_deterministic
_enabled = _C._get_cudnn_enabled
_benchmark = _C._get_cudnn_benchmark
_depthwise_kernel = getattr(_C, "_get_cudnn_depthwise_kernel", _automatic)


def state() -> tuple[Any, ...]:
    """The values of a `State`, as a plain tuple, which is quicker to make."""
    return (
        _precision("cuda", "conv"),
        _deterministic_algorithms(),
        _deterministic(),
        _enabled(),
        _benchmark(),
        _depthwise_kernel(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The same in miofind's terms.

    Attributes:
        math: of float32.
        deterministic: only solutions that give equal bits on every run.
        enabled: whether cuDNN, and what stands in for it, is switched on.
        benchmark: whether PyTorch would measure what it does not know.
        depthwise_kernel: "auto", or whose kernels the user wants for depthwise convolutions.
    """

    math: MathMode
    deterministic: bool
    enabled: bool
    benchmark: bool
    depthwise_kernel: str

    @staticmethod
    def of(values: tuple[Any, ...], *, on_gpu: bool) -> Flags:
        """The flags of a `state`; TF32 is of GPUs alone."""
        read = State(*values)
        return Flags(
            math=MathMode.TF32 if on_gpu and read.precision == "tf32" else MathMode.IEEE,
            deterministic=read.deterministic_algorithms or read.deterministic,
            enabled=read.enabled,
            benchmark=read.benchmark,
            depthwise_kernel=read.depthwise_kernel,
        )
