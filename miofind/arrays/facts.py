"""What of given arrays shapes their problem, and how those of forms that no problem has are taken for others.

Images without a batch are taken for a batch of one, empty batches for one image, and arrays that are not packed for
copies that are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from miofind.arrays import arrays
from miofind.core.epilogue import EPILOGUE_TENSORS
from miofind.core.tensor import DataType, Direction, Layout, TensorDescriptor
from miofind.errors import InvalidArrayError

LIKE = "like"
"""Name of an array that the output is made like, where it is not given itself."""

IMAGES = frozenset({"x", "y", *EPILOGUE_TENSORS, "channel_bias"})
"""Operands whose first dimension is the batch."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What of an array shapes the problem."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DataType


@dataclass(frozen=True, slots=True)
class Form:
    """The facts of a call's arrays in a form that a problem has.

    Attributes:
        facts: by tensor name.
        missing_shape: of the output, where the inputs leave it open.
        unbatched: they had no batch.
        empty: the batch had no images.
    """

    facts: Mapping[str, Facts]
    missing_shape: tuple[int, ...] | None
    unbatched: bool = False
    empty: bool = False


def batched(direction: Direction, form: Form) -> Form:
    """The form with a batch of one, where the first image has a dimension less than the filter.

    Raises:
        InvalidArrayError: another image has a batch.
    """
    if direction is Direction.BACKWARD_WEIGHTS and form.missing_shape is not None:
        weights = form.missing_shape
    else:
        weights = (form.facts.get("w") or form.facts[LIKE]).shape
    rank = len(weights) - 2
    first = form.facts[direction.inputs[0]]
    if rank not in (1, 2, 3) or len(first.shape) != rank + 1:
        return form
    images = _images(direction, form.facts)
    for name in images:
        fact = form.facts[name]
        if len(fact.shape) != (1 if name == "channel_bias" else rank + 1):
            told = user_name(name, direction)
            raise InvalidArrayError(
                f"{told} has shape {fact.shape} and {user_name(first.name, direction)} {first.shape}, of one image "
                "without a batch: give all images a batch or none"
            )
    lifted = {
        name: replace(fact, shape=(1, *fact.shape), strides=(0, *fact.strides)) if name in images else fact
        for name, fact in form.facts.items()
    }
    missing = form.missing_shape
    if missing is not None and direction is Direction.BACKWARD_DATA:
        missing = (1, *missing)
    return Form(lifted, missing, unbatched=True)


def filled(direction: Direction, form: Form) -> Form:
    """The form with one image, where all batches have none."""
    images = _images(direction, form.facts)
    shapes = [form.facts[name].shape for name in images]
    if form.missing_shape and direction is Direction.BACKWARD_DATA:
        shapes.append(form.missing_shape)
    if any(not shape or shape[0] for shape in shapes):
        return form
    one = {
        name: replace(fact, shape=(1, *fact.shape[1:])) if name in images else fact for name, fact in form.facts.items()
    }
    missing = form.missing_shape
    if missing is not None and direction is Direction.BACKWARD_DATA:
        missing = (1, *missing[1:])
    return Form(one, missing, form.unbatched, empty=True)


def packed(facts: Mapping[str, Facts], names: Iterable[str]) -> dict[str, Facts]:
    """Those of the arrays that are not packed, as copies that are: in the memory order that theirs is nearest to."""
    made = {}
    for name in names:
        fact = facts[name]
        rank = len(fact.shape) - 2
        if rank in (1, 2, 3) and min(fact.shape) > 0 and not arrays.layouts_of(fact.shape, fact.strides):
            layout = Layout.of(rank, channels_last=_has_channels_last(fact))
            made[name] = replace(fact, strides=TensorDescriptor(shape=fact.shape, layout=layout).strides)
    return made


def _has_channels_last(fact: Facts) -> bool:
    """Whether neighbours along the channels lie nearer in memory than any along a spatial dimension."""
    along = [abs(step) for size, step in zip(fact.shape[2:], fact.strides[2:], strict=True) if size > 1]
    return fact.shape[1] > 1 and bool(along) and abs(fact.strides[1]) < min(along)


def user_name(tensor: str, direction: Direction) -> str:
    """What a user calls a tensor of a direction."""
    return "dy" if tensor == "y" and direction is not Direction.FORWARD else tensor


def _images(direction: Direction, facts: Mapping[str, Facts]) -> frozenset[str]:
    own = set() if direction is Direction.BACKWARD_WEIGHTS else {LIKE}
    return frozenset(facts) & (IMAGES | own)
