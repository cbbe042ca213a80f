"""What a fused convolution does to its sums beside scale and bias: an activation, and where a residual is added."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from miofind.core.epilogue import Activation, EpilogueParameters
from miofind.errors import InvalidOptionError

_DIGITS = {torch.float16: 11, torch.bfloat16: 8}
"""Of a significand, in bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonlinearity:
    """An activation with its numbers, and what else has numbers: the residual's place and its factor.

    Attributes:
        activation: a name of `miofind.Activation`.
        residual_position: "before" or "after" the activation.
        beta: the residual's factor.
        low, high: clamp's bounds.
        slope: of leaky_relu or elu; None for PyTorch's defaults.
    """

    activation: str = "none"
    residual_position: str = "before"
    beta: float = 1.0
    low: float = 0.0
    high: float = 6.0
    slope: float | None = None

    @property
    def is_valid(self) -> bool:
        """Whether kernels take its numbers: finite ones, and bounds in order."""
        try:
            EpilogueParameters(beta=self.beta, low=self.low, high=self.high, slope=self.slope)
        except InvalidOptionError:
            return False
        return True

    @property
    def leak(self) -> float:
        """The slope that is in force."""
        default = 0.01 if self.activation == Activation.LEAKY_RELU else 1.0
        return default if self.slope is None else self.slope

    def is_told_by_result(self, dtype: Any) -> bool:
        """Whether results of a PyTorch dtype, rounded as they are, tell the activation's derivative."""
        if self.activation == "leaky_relu":
            return self.leak >= 0
        if self.activation == "clamp":
            return _has(dtype, self.low) and _has(dtype, self.high)
        return self.activation in ("none", "relu")


def _has(dtype: Any, number: float) -> bool:
    """Whether results of a dtype are compared with a number as it is.

    Kernels and PyTorch round it to float32, as they round results in float32; one that 16 bits lack is no bound.
    """
    digits = _DIGITS.get(dtype)
    if digits is None or math.isinf(number):
        return True
    mantissa, exponent = math.frexp(number)
    return mantissa * 2**digits % 1 == 0 and -13 <= exponent <= 16  # the normal numbers of float16
