"""The keywords of the calls over arrays, typed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, TypedDict, TypeVar

from miofind.arrays.array_problem import refuse_unknown
from miofind.core.arguments import ConvolutionArguments, DataEpilogue, ForwardEpilogue, PosedForwardEpilogue
from miofind.options import FindOptions
from miofind.runtime.handle import Handle


class FindArguments(TypedDict, total=False):
    """As in `find_solutions`."""

    options: FindOptions | None
    handle: Handle | None


class RunArguments(FindArguments, total=False):
    """What a call finds with, and what it runs with: as in `find_solutions` and `run_solution`."""

    workspace: Any
    stream: Any


class CallArguments(ConvolutionArguments, RunArguments, total=False):
    """Of calls without an epilogue."""


class ForwardArguments(ConvolutionArguments, RunArguments, ForwardEpilogue, total=False):
    """Of a forward call, beside `out` and `statistics`."""


class DataArguments(ConvolutionArguments, RunArguments, DataEpilogue, total=False):
    """Of a call of backward data, beside `out`."""


class BoundArguments(ConvolutionArguments, FindArguments, PosedForwardEpilogue, total=False):
    """Of a forward convolution that is called later, beside `statistics`."""


_DEFAULTS = {
    "padding": 0, "stride": 1, "dilation": 1, "groups": 1, "math": "ieee", "residual_position": "before",
    "statistics": False, "bias_gradient": False,
}  # fmt: skip
"""Values of keywords that are left out; None of all others."""

F = TypeVar("F", bound=Callable[..., Any])


def spelled_out(arguments: type, *others: str) -> Callable[[F], F]:
    """Has `help` and completion show a function's keywords: those of a class, and others, in place of `**arguments`."""
    names = (*others, *arguments.__annotations__)

    def with_signature(function: F) -> F:
        own = inspect.signature(function)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        spelled = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name))
            for name in names
            if name not in own.parameters
        ]
        told: Any = function
        told.__signature__ = own.replace(parameters=[*kept, *spelled])
        return function

    return with_signature


def check_keywords(arguments: Collection[str], *others: str) -> None:
    """Do nothing where all are of CallArguments.

    Args:
        arguments: names that were given.
        others: the call's own keywords, for the message.

    Raises:
        InvalidProblemError: one is not.
    """
    known = frozenset(CallArguments.__annotations__)
    refuse_unknown(frozenset(arguments) - known, known.union(others))


KEYWORDS = frozenset(RunArguments.__annotations__) | {"out"}
"""Of all calls, beside the problem's own."""
