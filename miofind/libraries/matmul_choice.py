"""Which algorithm of cuBLASLt a matrix product takes, as part of a solver's configuration.

A configuration has "algorithm" ({} for the heuristics' first within the workspace, or the recorded attributes) and
"workspace_bytes". Calls no library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miofind.core.problem import DataType
from miofind.errors import InvalidConfigError
from miofind.solver.steps import Config, MatmulStep, Pointer, Step

WORKSPACE_REGION = "matmul"
# NVIDIA recommends 32 MiB on Hopper and 4 MiB before. Source: cuBLAS documentation, cublasSetWorkspace().
WORKSPACE_BYTES = 32 << 20
MAX_WORKSPACE_BYTES = 1 << 30
TENSOR_ALIGNMENT = 16

# Attributes that name one algorithm, in the order in which they are recorded.
ALGORITHM_ATTRIBUTES = (
    "ID",
    "TILE_ID",
    "SPLITK_NUM",
    "REDUCTION_SCHEME",
    "CTA_SWIZZLING",
    "CUSTOM_OPTION",
    "STAGES_ID",
    "INNER_SHAPE_ID",
    "CLUSTER_SHAPE_ID",
)
_MAX_ATTRIBUTE = 2**31 - 1
# The library reports -1 for some of its float32 algorithms and takes it back.
_LEAST_ATTRIBUTE = {"SPLITK_NUM": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulShape:
    """What a plan and a recorded algorithm depend on; addresses count by their alignment alone.

    Attributes:
        alignment_a, alignment_b, alignment_c: largest power of two, up to TENSOR_ALIGNMENT bytes, that divides every
            address of the operand, given that buffers begin at multiples of TENSOR_ALIGNMENT.
    """

    step: MatmulStep
    alignment_a: int
    alignment_b: int
    alignment_c: int

    @staticmethod
    def of(step: MatmulStep) -> MatmulShape:
        """The shape of one step."""

        def alignment(pointer: Pointer, stride: int, dtype: DataType) -> int:
            return math.gcd(TENSOR_ALIGNMENT, pointer.offset_bytes, stride * dtype.itemsize)

        nowhere = Pointer(buffer="")
        return MatmulShape(
            step=dataclasses.replace(step, a=nowhere, b=nowhere, c=nowhere),
            alignment_a=alignment(step.a, step.stride_a, step.dtype_ab),
            alignment_b=alignment(step.b, step.stride_b, step.dtype_ab),
            alignment_c=alignment(step.c, step.stride_c, step.dtype_c),
        )

    @property
    def without_scalars(self) -> MatmulShape:
        """The same but for alpha, beta and the algorithm."""
        step = dataclasses.replace(self.step, alpha=1.0, beta=0.0, algorithm=())
        return dataclasses.replace(self, step=step)


def with_library_choice(steps: Sequence[Step], config: Config) -> tuple[Step, ...]:
    """`steps` with the configuration's workspace, and its algorithm in every product shaped like the first.

    Products of another shape, such as those of a last, smaller chunk, are left to the library's heuristics.
    """
    size = config["workspace_bytes"]
    region = WORKSPACE_REGION if size else None
    algorithm = tuple((name, config["algorithm"][name]) for name in ALGORITHM_ATTRIBUTES if config["algorithm"])
    first: MatmulShape | None = None
    out: list[Step] = []
    for step in steps:
        if not isinstance(step, MatmulStep):
            out.append(step)
            continue
        given = dataclasses.replace(step, workspace=region, workspace_bytes=size)
        shape = MatmulShape.of(given).without_scalars
        first = first or shape
        out.append(dataclasses.replace(given, algorithm=algorithm) if shape == first else given)
    return tuple(out)


def check_library_choice(solver_id: str, config: Mapping[str, object]) -> None:
    """Do nothing for a valid "algorithm" and "workspace_bytes".

    "algorithm" is {} for the heuristics' first, or has all of ALGORITHM_ATTRIBUTES, each in [0, 2**31);
    SPLITK_NUM may be -1.

    Raises:
        InvalidConfigError: they are none of it.
    """
    check_int(solver_id, config, "workspace_bytes", 0, MAX_WORKSPACE_BYTES)
    algorithm = config["algorithm"]
    if algorithm == {}:
        return
    if not isinstance(algorithm, dict) or set(algorithm) != set(ALGORITHM_ATTRIBUTES):
        known = ", ".join(ALGORITHM_ATTRIBUTES)
        raise InvalidConfigError(f"{solver_id}: algorithm={algorithm!r} must be {{}} or have exactly {known}")
    for name in ALGORITHM_ATTRIBUTES:
        check_int(solver_id, algorithm, name, _LEAST_ATTRIBUTE.get(name, 0), _MAX_ATTRIBUTE)


def check_int(solver_id: str, values: Mapping[str, object], name: str, least: int, most: int) -> None:
    """Do nothing for an int in [least, most].

    Raises:
        InvalidConfigError: it is none.
    """
    value = values[name]
    if type(value) is not int or not least <= value <= most:
        raise InvalidConfigError(f"{solver_id}: {name}={value!r} must be an int between {least} and {most}")
