"""The keywords of calls over arrays: their types, and which epilogue's go with which direction.

A call takes them as `**arguments: Unpack[...]`, so that type checkers refuse a misspelt one; at run time a call tells
what was meant. The classes are the one list of names there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar

from miofind.core.tensor import Direction, MathMode

if TYPE_CHECKING:
    from miofind.core.epilogue import Activation, ResidualPosition

A = TypeVar("A")
"""An array's type: PyTorch's, CuPy's, NumPy's."""

Sizes: TypeAlias = int | Sequence[int]
"""An int for all spatial dimensions, or one for each."""

Padding: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]] | Literal["same", "valid"]
"""An int, an int a dimension, a (before, after) pair a dimension, or a name: see `ProblemDescription.convolution`."""


class ConvolutionArguments(TypedDict, total=False):
    """How the filter moves, and in which arithmetic; as in `ProblemDescription.convolution`."""

    padding: Padding
    stride: Sizes
    dilation: Sizes
    groups: int
    math: MathMode | Literal["ieee", "tf32"]


class EpilogueNumbers(TypedDict, total=False):
    """Numbers of a run; None is none given."""

    alpha: float | None
    beta: float | None
    low: float | None
    high: float | None
    slope: float | None


class _Summands(TypedDict, total=False):
    scale: Any
    bias: Any
    channel_bias: Any
    residual: Any


class EpilogueArguments(_Summands, EpilogueNumbers, total=False):
    """What a run of a problem with an epilogue is given besides x and w: arrays and numbers by name."""

    saved: Any


class DataEpilogue(EpilogueNumbers, total=False):
    """The epilogue of backward data."""

    residual: Any
    saved: Any
    derivative: Activation | str | None


class PosedForwardEpilogue(_Summands, total=False):
    """What says which epilogue a forward problem has, but for statistics."""

    activation: Activation | str | None
    residual_position: ResidualPosition | Literal["before", "after"]


class ForwardEpilogue(PosedForwardEpilogue, EpilogueNumbers, total=False):
    """The epilogue of a forward convolution, but for statistics."""


class PosedEpilogue(PosedForwardEpilogue, total=False):
    """What says which epilogue a problem has, in any direction."""

    saved: Any
    derivative: Activation | str | None
    statistics: bool
    bias_gradient: bool


class ProblemArguments(ConvolutionArguments, PosedEpilogue, total=False):
    """All that poses a problem beside x, w and dy."""


EPILOGUE_OF_DIRECTION = {
    Direction.FORWARD: frozenset(ForwardEpilogue.__annotations__) | {"statistics"},
    Direction.BACKWARD_DATA: frozenset(DataEpilogue.__annotations__),
    Direction.BACKWARD_WEIGHTS: frozenset({"bias_gradient"}),
}
"""Names of what epilogues of a direction are asked for by and given."""
