"""What a fused convolution does to its sums beside scale and bias: an activation, and where a residual is added."""

from __future__ import annotations

from dataclasses import dataclass

from miofind.core.epilogue import Activation, EpilogueParameters
from miofind.errors import InvalidOptionError


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
