"""What a problem's second outputs must be: sums of y or dy, or of its squares, over images and space for each channel.

They are held to what the tensor holds after the run, which is checked by itself. Where the sums of any of a channel's
numbers are numbers of the accumulator's type, a result is exact whatever the order: then it must equal the rounded
sum. Otherwise |error| <= roundings(length) * u * sum of magnitudes, and the result's own rounding: `roundings` of
partial sums that are added pairwise, or nearly so, and no long sum one after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.operand import Operand
from miofind.core.problem import DataType, ProblemDescription
from miofind.reference.convolution import round_once
from miofind.solver.structs import Struct, StructType
from miofind.verify.accuracy import half_ulp, least_exponent, overflow

SUMMED = "y"
"""The operand that all second outputs sum."""

Wide = NDArray[np.float64]

CHANNEL_SUMS = StructType(
    "ChannelSums",
    **dict.fromkeys(("images", "channels", "plane", "image_stride", "channel_stride", "place_stride"), "int64"),
    **dict.fromkeys(("roundings", "tiny", "sum_overflow", "overflow"), "float64"),
    **dict.fromkeys(("squares", "digits", "least_quantum", "mantissa_bits", "least_exponent"), "int32"),
)
"""What `verify_channel_sums` of harness/channel_sums.cu takes by value."""

_LEAST_ROUNDINGS = 16.0
_ROUNDINGS_PER_DOUBLING = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongSum:
    """The channels of a second output that are wrong.

    Attributes:
        name: of the output.
        wrong, channels: how many are, and how many there are.
        channel: the worst of them.
        got, wanted, bound: there: what was written, the exact sum and the largest |got - wanted| allowed.
    """

    name: str
    wrong: int
    channels: int
    channel: int
    got: float
    wanted: float
    bound: float

    def __str__(self) -> str:
        return (
            f"{self.wrong} of {self.channels} channels of {self.name} are wrong, the worst {self.channel}: "
            f"got {self.got!r}, wanted {self.wanted!r} within {self.bound:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SumStandard:
    """What sums of a channel are held to.

    Attributes:
        squares: of squares.
        roundings: bound of |error| over the sum of magnitudes.
        digits: binary ones that a number of the accumulator's type has.
        least_quantum: exponent of its least positive number.
        tiny: bound of |error| whatever the magnitudes: of squares that are subnormal.
        dtype, number: of the results, and of the sums.
    """

    squares: bool
    roundings: float
    digits: int
    least_quantum: int
    tiny: float
    dtype: DataType
    number: DataType

    @staticmethod
    def of(problem: ProblemDescription, output: Operand) -> SumStandard:
        """The standard of a second output."""
        number = problem.accumulator
        length = problem.n * math.prod(problem.out_spatial)
        digits = number.mantissa_bits + 1
        least = least_exponent(number) - number.mantissa_bits
        # Of float64 twice, because the reference is no more exact than the candidate.
        unit = 2.0**-digits * (2 if number is DataType.FLOAT64 else 1)
        return SumStandard(
            squares=output.name == "sum_of_squares",
            roundings=unit * (_LEAST_ROUNDINGS + _ROUNDINGS_PER_DOUBLING * math.log2(length)),
            digits=digits,
            least_quantum=least,
            tiny=length * 2.0**least,
            dtype=output.tensor.dtype,
            number=number,
        )


def channel_sums_terms(problem: ProblemDescription, output: Operand) -> Struct:
    """What the kernel is given of a second output."""
    y, standard = problem.tensor(SUMMED), SumStandard.of(problem, output)
    return CHANNEL_SUMS(
        images=y.shape[0],
        channels=y.shape[1],
        plane=math.prod(y.shape[2:]),
        image_stride=y.strides[0],
        channel_stride=y.strides[1],
        place_stride=y.strides[-1],
        roundings=standard.roundings,
        tiny=standard.tiny,
        sum_overflow=overflow(standard.number),
        overflow=overflow(standard.dtype),
        squares=int(standard.squares),
        digits=standard.digits,
        least_quantum=standard.least_quantum,
        mantissa_bits=standard.dtype.mantissa_bits,
        least_exponent=int(least_exponent(standard.dtype)),
    )


def wrong_sums(problem: ProblemDescription, arrays: Mapping[str, NDArray[Any]]) -> tuple[WrongSum, ...]:
    """The second outputs that are wrong, of arrays of all operands by name in their logical shapes."""
    if not problem.second_outputs:
        return ()
    rows = arrays[SUMMED].reshape(problem.n, problem.k, -1).swapaxes(0, 1)
    with np.errstate(all="ignore"):  # infinities are among the numbers
        found = [_wrong(problem, operand, rows, arrays[operand.name].reshape(-1)) for operand in problem.second_outputs]
    return tuple(wrong for wrong in found if wrong is not None)


def _wrong(
    problem: ProblemDescription, output: Operand, channels: NDArray[Any], results: NDArray[Any]
) -> WrongSum | None:
    """What is wrong of one output; `channels` are (k, n, places)."""
    standard = SumStandard.of(problem, output)
    held = [_held(standard, channel, float(result)) for channel, result in zip(channels, results, strict=True)]
    wrong = [(each.share, -number) for number, each in enumerate(held) if each.is_wrong]
    if not wrong:
        return None
    worst = -max(wrong)[1]
    return WrongSum(
        name=output.name,
        wrong=len(wrong),
        channels=problem.k,
        channel=worst,
        got=float(results[worst]),
        wanted=held[worst].wanted,
        bound=held[worst].bound,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A channel's result against its standard; `share` is the error over what is allowed."""

    is_wrong: bool
    wanted: float
    bound: float
    share: float


def _held(standard: SumStandard, channel: NDArray[Any], got: float) -> _Held:
    values = channel.astype(np.float64).reshape(-1)
    if standard.squares:
        values = values * values
    total, magnitude = float(np.sum(values)), float(np.sum(np.abs(values)))
    if not math.isfinite(total):
        is_right = got == total or (math.isnan(got) and math.isnan(total))
        return _Held(is_wrong=not is_right, wanted=total, bound=0.0, share=math.inf)
    arithmetic = 0.0 if _is_exact(standard, values, magnitude) else standard.roundings * magnitude + standard.tiny
    if magnitude + arithmetic >= overflow(standard.number) and not math.isfinite(got):
        return _Held(is_wrong=False, wanted=total, bound=math.inf, share=0.0)
    if math.isinf(got) and got * total > 0 and abs(total) + arithmetic >= overflow(standard.dtype):
        return _Held(is_wrong=False, wanted=total, bound=math.inf, share=0.0)
    if arithmetic == 0:
        total, bound = float(round_once(np.array([total]), standard.dtype)[0]), 0.0
    else:
        bound = arithmetic + float(half_ulp(np.array([abs(total) + arithmetic]), standard.dtype)[0])
    error = abs(got - total)
    share = error / bound if bound else math.inf
    return _Held(is_wrong=not error <= bound, wanted=total, bound=bound, share=math.inf if math.isnan(share) else share)


def _is_exact(standard: SumStandard, values: Wide, magnitude: float) -> bool:
    """Whether all sums of some of the values are numbers of the accumulator's type."""
    quantum = _quantum(values)
    return quantum >= standard.least_quantum and magnitude <= math.ldexp(1.0, quantum + standard.digits)


def _quantum(values: Wide) -> int:
    """Exponent of the last binary one of all values; 0 where all are 0."""
    mantissas, exponents = np.frexp(values[values != 0])
    whole = np.ldexp(np.abs(mantissas), 53).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    return int(np.min(exponents - 53 + lowest)) if lowest.size else 0
