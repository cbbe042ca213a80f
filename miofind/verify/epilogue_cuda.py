"""The kernel that makes a fused problem's results, and their bounds, of its convolution's sums on a CUDA device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from miofind.core.epilogue import Activation, EpilogueParameters, ResidualPosition
from miofind.core.problem import ProblemDescription
from miofind.launch.device_kernels import Argument, GridStride
from miofind.solver.structs import Struct, StructType
from miofind.verify.accuracy import least_exponent
from miofind.verify.epilogue_bounds import EpilogueNumbers, EpilogueStandard
from miofind.verify.ranges import Powers, axes

EPILOGUE_TERMS = StructType(
    "EpilogueTerms",
    count="int64",
    **dict.fromkeys(("first_even", "first_odd", "second_even", "second_odd"), "float64"),
    second_size="int64",
    **dict.fromkeys(("alpha", "beta", "first", "second"), "float64"),
    **dict.fromkeys(("factor", "roundings"), "float64"),
    **dict.fromkeys(("slope", "roundoff", "error", "error_per_exponent", "tiny", "later_roundings"), "float64"),
    **dict.fromkeys(("rounds_sums", "doubts_sums", "activation", "derivative", "residual"), "int32"),
    **dict.fromkeys(("mantissa_bits", "least_exponent"), "int32"),
    **dict.fromkeys(("channels", "plane", "image_stride", "channel_stride", "place_stride"), "int64"),
)
"""What `epilogue_results` of harness/epilogue.cu takes by value."""

RESULT_BYTES, BOUND_BYTES = 8, 8
"""Of an element: a float64 result, and two float32 bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueTrial:
    """One trial of a fused problem: how many elements, the powers of two of its inputs, its numbers, what holds."""

    count: int
    powers: Powers
    parameters: EpilogueParameters
    standard: EpilogueStandard


def epilogue_kernel(problem: ProblemDescription, trial: EpilogueTrial) -> tuple[GridStride, tuple[Argument, ...]]:
    """The kernel and its arguments.

    Buffers: "indices", "sums" and "scales" as `reference_step` has them; the epilogue's operands, null for those that
    the problem has not; "results", float64 (count,), and "bounds", float32 (count, 2), written: what
    `epilogue_bounds.fused_results` calls `wanted`, and `magnitudes` and `arithmetic`.
    """
    parameter = problem.epilogue.parameter_dtype or problem.output.dtype
    kernel = GridStride(
        source="harness/epilogue.cu",
        entry="epilogue_results",
        items=trial.count,
        dtype=problem.output.dtype,
        defines=(("T_PARAMETER", parameter.value), EPILOGUE_TERMS.define),
    )
    buffers = ("indices", "sums", "scales", "scale", "bias", "channel_bias", "residual", "saved", "results", "bounds")
    return kernel, (*buffers, _terms(problem, trial))


def _terms(problem: ProblemDescription, trial: EpilogueTrial) -> Struct:
    output, epilogue, standard = problem.output, problem.epilogue, trial.standard
    (first_even, first_odd), (second_even, second_odd) = trial.powers.pairs
    alpha, beta, first, second = trial.parameters.numbers(epilogue.nonlinearity)
    numbers = EpilogueNumbers.of(problem, trial.parameters)
    return EPILOGUE_TERMS(
        count=trial.count,
        first_even=2.0**first_even,
        first_odd=2.0**first_odd,
        second_even=2.0**second_even,
        second_odd=2.0**second_odd,
        second_size=axes(problem)[1].size,
        alpha=alpha,
        beta=beta,
        first=first,
        second=second,
        factor=standard.factor,
        roundings=standard.roundings,
        slope=numbers.slope,
        roundoff=numbers.roundoff,
        error=numbers.error,
        error_per_exponent=numbers.error_per_exponent,
        tiny=numbers.tiny,
        later_roundings=numbers.later_roundings,
        rounds_sums=int(standard.rounds_sums),
        doubts_sums=int(standard.doubts_sums),
        activation=list(Activation).index(epilogue.activation),
        derivative=list(Activation).index(epilogue.derivative),
        residual=list(ResidualPosition).index(epilogue.residual),
        mantissa_bits=output.dtype.mantissa_bits,
        least_exponent=int(least_exponent(output.dtype)),
        channels=output.shape[1],
        plane=math.prod(output.shape[2:]),
        image_stride=output.strides[0],
        channel_stride=output.strides[1],
        place_stride=output.strides[-1],
    )
