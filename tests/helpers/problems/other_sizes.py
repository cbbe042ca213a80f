"""Problems that differ in one size, of which some share their kernels where a solver `is_dynamic`.

Not all do: vectors are as wide as sizes' divisors allow. So there are several of each size, with the same divisors and
with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from helpers.problems.feature_problems import Arguments, arguments_of, made

from miofind.core.problem import ProblemDescription

_FACTORS = (3, 5, 2)
_STEPS = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Size:
    """A size that may be an argument of a kernel.

    Attributes:
        of: its value in a problem.
        others: arguments of `ProblemDescription.convolution` with other values.
    """

    of: Callable[[ProblemDescription], object]
    others: Callable[[Arguments], Iterator[Arguments]]


def _of_n(arguments: Arguments) -> Iterator[Arguments]:
    n, *rest = arguments["x"]
    yield from (arguments | {"x": (n * factor, *rest)} for factor in _FACTORS)


def _of_c(arguments: Arguments) -> Iterator[Arguments]:
    (n, c, *spatial), (k, depth, *taps) = arguments["x"], arguments["w"]
    for factor in _FACTORS:
        if depth == 1:  # as many groups as there are channels
            fields = {"w": (k * factor, depth, *taps), "groups": arguments["groups"] * factor}
        else:
            fields = {"w": (k, depth * factor, *taps)}
        yield arguments | {"x": (n, c * factor, *spatial)} | fields


def _of_k(arguments: Arguments) -> Iterator[Arguments]:
    k, *rest = arguments["w"]
    yield from (arguments | {"w": (k * factor, *rest)} for factor in _FACTORS)


def _of_image(arguments: Arguments) -> Iterator[Arguments]:
    yield from (_larger(arguments, step) for step in _STEPS)


def _of_padding(arguments: Arguments) -> Iterator[Arguments]:
    """With images of several sizes, so that inputs and outputs of some have the same divisors."""
    wider = (_with_wider_padding(arguments, step) for step in (*_STEPS, 0))
    none = arguments | {"padding": ((0, 0),) * len(arguments["padding"])}
    yield from (_larger(padded, step) for padded in (*wider, none) for step in range(4))


def _with_wider_padding(arguments: Arguments, step: int) -> Arguments:
    """So many strides more wherever there is padding."""
    pads = zip(arguments["padding"], arguments["stride"], strict=True)
    return arguments | {"padding": tuple(tuple(pad and pad + step * stride for pad in pair) for pair, stride in pads)}


def _larger(arguments: Arguments, step: int) -> Arguments:
    """So many strides more along each axis."""
    n, c, *spatial = arguments["x"]
    grown = (size + step * stride for size, stride in zip(spatial, arguments["stride"], strict=True))
    return arguments | {"x": (n, c, *grown)}


SIZES: Mapping[str, Size] = {
    "n": Size(of=lambda problem: problem.n, others=_of_n),
    "c": Size(of=lambda problem: problem.c, others=_of_c),
    "k": Size(of=lambda problem: problem.k, others=_of_k),
    "spatial sizes": Size(of=lambda problem: problem.spatial, others=_of_image),
    "padding": Size(of=lambda problem: problem.conv.pad_before, others=_of_padding),
}


def with_other(size: Size, problem: ProblemDescription) -> list[ProblemDescription]:
    """Problems that differ from this one, most of them in that size; padding stays 0 where it is 0."""
    found = filter(None, map(made, size.others(arguments_of(problem))))
    return [other for other in found if other != problem]
