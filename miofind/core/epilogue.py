"""What a kernel does to sums before it writes them as results: the epilogue of a fused convolution.

The order is fixed, the arithmetic is that of the accumulator (float32, float64 for float64), and results are rounded
once:

    v = alpha * sum
    v = v * scale[k]
    v = v + bias[k]
    v = v + channel_bias[n, k]
    v = v + beta * residual        where the residual comes before the activation
    v = activation(v)
    v = v + beta * residual        where it comes after

Backward data multiplies by the derivative of an activation that was applied before the convolution:

    v = (alpha * sum + beta * residual) * activation'(saved)

Beside the results, a forward convolution may write the sum and the sum of squares of each channel of what it has stored
(statistics), and one of backward weights the sum of dy of each channel (bias_gradient).

What is there decides which kernel is fast, and is part of a problem. Numbers (alpha, beta, bounds, slope) are given to
each run. Sources of the form: CUTLASS, include/cutlass/epilogue/fusion/operations.hpp; the texts follow oneDNN's
post-ops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from numbers import Real
from typing import Any, Self

from miofind.core.arguments import EPILOGUE_OF_DIRECTION, EpilogueNumbers
from miofind.core.tensor import DataType, Direction, data_type, enum_value
from miofind.errors import InvalidOptionError, InvalidProblemError, brief, suggestion

EPILOGUE_VECTORS = ("scale", "bias", "channel_bias")
"""Operands of the output's channels that an epilogue may read, in the order of computation."""

EPILOGUE_TENSORS = ("residual", "saved")
"""Operands of the output's shape, dtype and layout that an epilogue may read, in the order of computation."""

EPILOGUE_OPERANDS = (*EPILOGUE_VECTORS, *EPILOGUE_TENSORS)
"""All operands that it may read."""

EPILOGUE_NUMBERS = tuple(EpilogueNumbers.__annotations__)
"""All numbers that a run of it may be given: the fields of `EpilogueParameters`."""

STATISTICS = ("sum", "sum_of_squares")
"""Operands that a forward convolution writes with statistics."""

SECOND_OUTPUTS = (*STATISTICS, "bias_gradient")
"""All operands that may be written besides the convolution's own output."""

OUTPUT_SWITCHES = ("statistics", "bias_gradient")
"""Fields of `Epilogue` that ask for second outputs."""


class Activation(StrEnum):
    """The function that a result goes through.

    relu max(v, 0); clamp min(max(v, low), high); leaky_relu v or slope * v below 0; silu v * sigmoid(v); gelu
    v * (1 + erf(v / sqrt(2))) / 2; gelu_tanh its approximation by tanh; hardswish v * clamp(v + 3, 0, 6) / 6; sigmoid;
    tanh; elu v or slope * (exp(v) - 1) below 0; mish v * tanh(log(1 + exp(v))). NaN stays NaN in each.
    """

    NONE = "none"
    RELU = "relu"
    CLAMP = "clamp"
    LEAKY_RELU = "leaky_relu"
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    HARDSWISH = "hardswish"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    ELU = "elu"
    MISH = "mish"

    @property
    def is_exact(self) -> bool:
        """Whether it and its derivative give exact results of exact small numbers: comparisons and products alone."""
        return self in _EXACT


_EXACT = (Activation.NONE, Activation.RELU, Activation.CLAMP, Activation.LEAKY_RELU)

DERIVATIVES = (
    Activation.RELU,
    Activation.CLAMP,
    Activation.LEAKY_RELU,
    Activation.SILU,
    Activation.GELU,
    Activation.GELU_TANH,
    Activation.HARDSWISH,
)
"""Activations whose derivative a gradient may be multiplied by."""


class ResidualPosition(StrEnum):
    """Where the residual is added."""

    NONE = "none"
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What is done to sums before they are written, in the fixed order of this module. False without anything.

    Equal functions are equal: a residual after no activation is one before it.

    Attributes:
        scale, bias: an operand of that name, (k,): a factor and a summand of each output channel.
        channel_bias: an operand of that name, (n, k), in the output's dtype: a summand of each image's output channel,
            such as a diffusion model's time embedding.
        residual: whether an operand of that name, of the output's shape, dtype and layout, is added, and where.
        activation: the function that results go through.
        derivative: one of DERIVATIVES, by whose derivative at an operand named saved, of the output's shape, dtype and
            layout, results are multiplied; backward data, with no other field but a residual before it. Of relu, clamp
            and leaky_relu (with a slope that is not negative) saved may be the result or the argument, of others it is
            the argument.
        statistics: whether operands named sum and sum_of_squares, (k,), of the accumulator's type, are written: of the
            results as they are stored, over n and space; forward.
        bias_gradient: whether an operand of that name, (k,), is written: the sum of dy over n and space in the
            accumulator's type, rounded once; backward weights, and nothing else with it.
        parameter_dtype: element type of scale and bias, or of the bias gradient; None for the output's.

    Raises:
        InvalidProblemError: an unknown position, activation or dtype, or a derivative or bias gradient beside what
            does not go with it.
    """

    scale: bool = False
    bias: bool = False
    channel_bias: bool = False
    residual: ResidualPosition = ResidualPosition.NONE
    activation: Activation = Activation.NONE
    parameter_dtype: DataType | None = None
    statistics: bool = False
    bias_gradient: bool = False
    derivative: Activation = Activation.NONE

    def __post_init__(self) -> None:
        for name in (*EPILOGUE_VECTORS, *OUTPUT_SWITCHES):
            if not isinstance(getattr(self, name), bool):
                raise InvalidProblemError(f"{name}={brief(getattr(self, name))} of an epilogue must be True or False")
        residual = enum_value(ResidualPosition, self.residual, "residual")
        activation = enum_value(Activation, self.activation, "activation")
        derivative = enum_value(Activation, self.derivative, "derivative")
        if activation is derivative is Activation.NONE and residual is ResidualPosition.AFTER:
            residual = ResidualPosition.BEFORE
        dtype = self.parameter_dtype
        if dtype is not None:
            has_parameters = self.scale or self.bias or self.bias_gradient
            dtype = data_type(dtype, "parameter_dtype") if has_parameters else None
        object.__setattr__(self, "residual", residual)
        object.__setattr__(self, "activation", activation)
        object.__setattr__(self, "derivative", derivative)
        object.__setattr__(self, "parameter_dtype", dtype)
        if self.bias_gradient and replace(self, bias_gradient=False):
            raise InvalidProblemError(f"epilogue={self.text}: bias_gradient stands alone: leave out all else")
        if derivative is not Activation.NONE:
            self._check_derivative()

    def _check_derivative(self) -> None:
        """Do nothing where the derivative is known and nothing stands beside it but a residual before it.

        Raises:
            InvalidProblemError: otherwise.
        """
        if self.derivative not in DERIVATIVES:
            known = ", ".join(DERIVATIVES)
            raise InvalidProblemError(f"derivative={self.derivative} is not computed: use one of {known}")
        if replace(self, residual=ResidualPosition.NONE, derivative=Activation.NONE):
            raise InvalidProblemError(
                f"epilogue={self.text}: beside a derivative stands a residual alone: leave out all else"
            )
        if self.residual is ResidualPosition.AFTER:
            raise InvalidProblemError(
                f"epilogue={self.text}: the residual is added before the derivative is multiplied by: write "
                f"residual.d{self.derivative}"
            )

    def __bool__(self) -> bool:
        return self is not NO_EPILOGUE and self != NO_EPILOGUE

    @property
    def has_residual(self) -> bool:
        """Whether a residual is added."""
        return self.residual is not ResidualPosition.NONE

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that it reads, in order."""
        present = {
            "scale": self.scale,
            "bias": self.bias,
            "channel_bias": self.channel_bias,
            "residual": self.has_residual,
            "saved": self.derivative is not Activation.NONE,
        }
        return tuple(name for name, is_there in present.items() if is_there)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the operands that are written besides the convolution's own output, in order."""
        return STATISTICS * self.statistics + ("bias_gradient",) * self.bias_gradient

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Those that it goes with."""
        named = {
            "activation": self.activation is not Activation.NONE,
            "derivative": self.derivative is not Activation.NONE,
            "statistics": self.statistics,
            "bias_gradient": self.bias_gradient,
        }
        asked = {*self.operands, *(name for name, is_there in named.items() if is_there)}
        return tuple(direction for direction in Direction if asked <= EPILOGUE_OF_DIRECTION[direction])

    @property
    def nonlinearity(self) -> Activation:
        """The activation that results go through, or that whose derivative they are multiplied by."""
        return self.activation if self.derivative is Activation.NONE else self.derivative

    @property
    def changes_results(self) -> bool:
        """Whether results are others than without it; not where it only asks for more outputs."""
        changes = self.scale or self.bias or self.channel_bias or self.has_residual
        return changes or self.nonlinearity is not Activation.NONE

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the numbers that a run of it may be given, of those of `EpilogueParameters`; none without it."""
        of_residual = ("beta",) * self.has_residual
        return ("alpha", *of_residual, *_NUMBERS_OF.get(self.nonlinearity, ())) if self.changes_results else ()

    def parameters(self, given: Mapping[str, Any]) -> EpilogueParameters:
        """The numbers of a run, from those given by name; None is none given.

        Raises:
            InvalidOptionError: a number that it has no use for, or that `EpilogueParameters` refuses.
        """
        taken = {name: value for name, value in given.items() if value is not None}
        made = EpilogueParameters(**taken)
        for name in taken.keys() - set(self.numbers):
            if name not in ("alpha", "beta") or getattr(made, name) != 1:
                raise InvalidOptionError(f"{name}={brief(taken[name])}: {self._no_use_for(name)}")
        return made

    def _no_use_for(self, name: str) -> str:
        """Why a number changes nothing, and what to do."""
        if name == "alpha":
            told = f"the epilogue {self.text}" if self else "a convolution without an epilogue"
            return f"{told} has no factor: multiply w by it"
        if name == "beta":
            return f"{self.text or 'a convolution without an epilogue'} adds no residual, whose factor it is"
        takers = " and ".join(kind.value for kind, names in _NUMBERS_OF.items() if name in names)
        return f"the activation {self.nonlinearity} has no {name}: leave it out (of {takers} it is a parameter)"

    @property
    def text(self) -> str:
        """Its words in the order of computation, joined by dots, such as "bias.residual.relu"; "" without anything."""
        words = [] if self.parameter_dtype is None else [self.parameter_dtype.value]
        words += [name for name in EPILOGUE_VECTORS if getattr(self, name)]
        words += ["residual"] * (self.residual is ResidualPosition.BEFORE)
        words += [self.activation.value] * (self.activation is not Activation.NONE)
        words += [f"d{self.derivative}"] * (self.derivative is not Activation.NONE)
        words += ["residual"] * (self.residual is ResidualPosition.AFTER)
        words += [name for name in OUTPUT_SWITCHES if getattr(self, name)]
        return ".".join(words)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, value: Epilogue | str | None) -> Self | Epilogue:
        """An epilogue from one, from its text, or from None for nothing.

        Raises:
            InvalidProblemError: the text has an unknown word, a word twice, or words in another order.
        """
        if value is None:
            return NO_EPILOGUE
        if isinstance(value, Epilogue):
            return value
        if not isinstance(value, str):
            raise InvalidProblemError(f"epilogue={brief(value)} must be an Epilogue or its text, such as 'bias.relu'")
        return _read(value)


_NUMBERS_OF = {
    Activation.CLAMP: ("low", "high"),
    Activation.LEAKY_RELU: ("slope",),
    Activation.ELU: ("slope",),
}
"""Names of the parameters of activations that have any."""

NO_EPILOGUE = Epilogue()
"""What a bare convolution has."""


def _read(text: str) -> Epilogue:
    """The epilogue that a text names."""
    words = text.split(".") if text else []
    activations = [a.value for a in Activation if a is not Activation.NONE]
    derivatives = {f"d{a}": a for a in DERIVATIVES}
    dtypes = [dtype.value for dtype in DataType]
    known = (*EPILOGUE_VECTORS, "residual", *activations, *derivatives, *OUTPUT_SWITCHES, *dtypes)
    for word in words:
        if word not in known:
            near = suggestion(word, known) or f": known are {', '.join(known)}"
            raise InvalidProblemError(f"epilogue={brief(text)} has the unknown word {word!r:.40}{near}")
    activation = next((word for word in words if word in activations), Activation.NONE.value)
    after = activation in words and "residual" in words[words.index(activation) :]
    residual = ResidualPosition.AFTER if after else ResidualPosition.BEFORE
    epilogue = Epilogue(
        scale="scale" in words,
        bias="bias" in words,
        channel_bias="channel_bias" in words,
        residual=residual if "residual" in words else ResidualPosition.NONE,
        activation=Activation(activation),
        parameter_dtype=next((DataType(word) for word in words if word in dtypes), None),
        statistics="statistics" in words,
        bias_gradient="bias_gradient" in words,
        derivative=next((derivatives[word] for word in words if word in derivatives), Activation.NONE),
    )
    if epilogue.text != text:
        raise InvalidProblemError(
            f"epilogue={brief(text)} must have each word once and in the order of computation: {epilogue.text!r}"
        )
    return epilogue


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueParameters:
    """The numbers of an epilogue, given to each run; kernels take them as float32, as float64 for float64 problems.

    Attributes:
        alpha: factor of the convolution's sums.
        beta: factor of the residual.
        low, high: bounds of clamp; infinite for none.
        slope: factor below 0: leaky_relu's slope, elu's alpha; None for PyTorch's defaults, 0.01 and 1.

    Raises:
        InvalidOptionError: a number that is none, not finite (low and high may be infinite), or low above high.
    """

    alpha: float = 1.0
    beta: float = 1.0
    low: float = 0.0
    high: float = 6.0
    slope: float | None = None

    def __post_init__(self) -> None:
        for name in EPILOGUE_NUMBERS:
            value = getattr(self, name)
            if name == "slope" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise InvalidOptionError(f"{name}={brief(value)} must be a number")
            try:
                number = float(value)
            except OverflowError:
                raise InvalidOptionError(f"{name}={brief(value)} must be finite") from None
            if math.isnan(number) or (math.isinf(number) and name not in ("low", "high")):
                raise InvalidOptionError(f"{name}={number} must be finite")
            object.__setattr__(self, name, number)
        if self.low > self.high:
            raise InvalidOptionError(f"low={self.low} must not be above high={self.high}")

    def numbers(self, activation: Activation) -> tuple[float, float, float, float]:
        """Alpha, beta and the two parameters of an activation, as kernels take them; 0 for those that it has not."""
        if activation is Activation.CLAMP:
            return self.alpha, self.beta, self.low, self.high
        if activation in _SLOPES:
            slope = _SLOPES[activation] if self.slope is None else self.slope
            return self.alpha, self.beta, slope, 0.0
        return self.alpha, self.beta, 0.0, 0.0


_SLOPES = {Activation.LEAKY_RELU: 0.01, Activation.ELU: 1.0}

DEFAULT_PARAMETERS = EpilogueParameters()
"""What a run has that is given no numbers."""
