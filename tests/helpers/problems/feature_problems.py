"""What a convolution may have, such as strides, dtypes and layouts, and problems with it where a solver's examples have
none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miofind.core.network_config import parse_network_config
from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device, Place
from miofind.errors import InvalidProblemError
from miofind.solver.solver import KernelKey, Solver

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """One thing that a convolution may have.

    Attributes:
        is_in: whether a problem has it.
        added: the arguments of `ProblemDescription.convolution` with it.
        places: where solvers are asked for it.
    """

    is_in: Callable[[ProblemDescription], bool]
    added: Callable[[Arguments], Arguments]
    places: frozenset[Place] = frozenset(Place)


@dataclass(frozen=True)
class Kind:
    """A direction, the arithmetic, and the dtype and the memory order that all tensors have."""

    direction: Direction
    dtype: DataType
    math: MathMode
    channels_last: bool

    @staticmethod
    def of(problem: ProblemDescription) -> Kind | None:
        """The problem's kind, None where its tensors differ in dtype or memory order."""
        if len({(t.dtype, t.layout) for t in (problem.x, problem.w, problem.y)}) > 1:
            return None
        return Kind(problem.direction, problem.y.dtype, problem.math, problem.y.layout.channels_last)

    def __str__(self) -> str:
        dtype = self.dtype if self.math is MathMode.IEEE else self.math
        return f"{self.direction} {dtype} channels {'last' if self.channels_last else 'first'}"

    def is_of(self, key: KernelKey) -> bool:
        """Whether a key names the dtype and a layout."""
        orders = {layout.channels_last for layout in key.layouts}
        return self.dtype in key.every_dtype and self.channels_last in orders

    def differences(self, problem: ProblemDescription) -> int:
        """In how much a problem is of another kind."""
        tensors = (problem.x, problem.w, problem.y)
        return sum(
            (
                problem.direction is not self.direction,
                problem.math is not self.math,
                any(tensor.dtype is not self.dtype for tensor in tensors),
                any(tensor.layout.channels_last != self.channels_last for tensor in tensors),
            )
        )

    def given(self, arguments: Arguments) -> Arguments:
        """The arguments of `ProblemDescription.convolution` for a problem of this kind."""
        layout = Layout.of(_dims(arguments), channels_last=self.channels_last)
        return arguments | {"direction": self.direction, "dtype": self.dtype, "math": self.math, "layout": layout}


KINDS = tuple(
    Kind(direction, dtype, math, channels_last)
    for direction in Direction
    for dtype, math in (*((dtype, MathMode.IEEE) for dtype in DataType), (DataType.FLOAT32, MathMode.TF32))
    for channels_last in (False, True)
)


def _dims(arguments: Arguments) -> int:
    return len(arguments["x"]) - 2


def _with_groups(arguments: Arguments) -> Arguments:
    (n, c, *spatial), (k, *rest) = arguments["x"], arguments["w"]
    groups = arguments.get("groups", 1)
    return arguments | {"x": (n, 2 * c, *spatial), "w": (2 * k, *rest), "groups": 2 * groups}


def _with_odd_sizes(arguments: Arguments) -> Arguments:
    n, c, *spatial = arguments["x"]
    return arguments | {"x": (n, c, *(size + 1 - size % 2 for size in spatial))}


def _with_several_taps(arguments: Arguments) -> Arguments:
    return arguments | {"w": (*arguments["w"][:2], *(3,) * _dims(arguments))}


def _with_float32_output(arguments: Arguments) -> Arguments:
    output = Direction(arguments["direction"]).output
    return arguments | {"dtype": arguments["dtype"] | {output: DataType.FLOAT32}}


def _vast_padding(steps: str) -> Feature:
    """Padding that would take 64 MB if it were laid out, and as large strides or dilations, so that outputs are few."""

    def is_in(problem: ProblemDescription) -> bool:
        least = min(*problem.conv.pad_before, *getattr(problem.conv, steps))
        return max(problem.out_spatial) < _vast(problem.spatial_dims) <= least

    def added(arguments: Arguments) -> Arguments:
        dims = _dims(arguments)
        return arguments | {"padding": ((_vast(dims), _vast(dims)),) * dims, steps: (_vast(dims),) * dims}

    return Feature(is_in=is_in, added=added, places=frozenset({Place.CPU}))


def _vast(dims: int) -> int:
    return 1 << 23 // dims


def _layout_differs(name: str) -> Feature:
    """The memory order of one tensor is not that of the two others."""
    others = [other for other in "xwy" if other != name]

    def is_in(problem: ProblemDescription) -> bool:
        return all(problem.tensor(name).layout is not problem.tensor(other).layout for other in others)

    def added(arguments: Arguments) -> Arguments:
        common = Layout(arguments["layout"][others[0]])
        own = Layout.of(_dims(arguments), channels_last=not common.channels_last)
        return arguments | {"layout": {name: own, others[0]: common, others[1]: common}}

    return Feature(is_in=is_in, added=added)


FEATURES: Mapping[str, Feature] = {
    "stride": Feature(
        is_in=lambda problem: max(problem.conv.stride) > 1,
        added=lambda arguments: arguments | {"stride": (2,) * _dims(arguments)},
    ),
    "dilation": Feature(
        is_in=lambda problem: any(
            d > 1 and taps > 1 for d, taps in zip(problem.conv.dilation, problem.filter, strict=True)
        ),
        added=lambda arguments: arguments | {"dilation": (2,) * _dims(arguments)},
    ),
    "padding": Feature(
        is_in=lambda problem: max(problem.conv.pad_before) > 0,
        added=lambda arguments: arguments | {"padding": ((1, 1),) * _dims(arguments)},
    ),
    "uneven padding": Feature(
        is_in=lambda problem: problem.conv.pad_before != problem.conv.pad_after,
        added=lambda arguments: arguments | {"padding": ((1, 0),) * _dims(arguments)},
    ),
    "groups": Feature(is_in=lambda problem: problem.groups > 1, added=_with_groups),
    "batch": Feature(
        is_in=lambda problem: problem.n > 1,
        added=lambda arguments: arguments | {"x": (3, *arguments["x"][1:])},
    ),
    "odd sizes": Feature(is_in=lambda problem: all(size % 2 for size in problem.spatial), added=_with_odd_sizes),
    "several taps": Feature(is_in=lambda problem: max(problem.filter) > 1, added=_with_several_taps),
    "mixed dtypes": Feature(
        is_in=lambda problem: len({problem.x.dtype, problem.w.dtype, problem.y.dtype}) > 1, added=_with_float32_output
    ),
    **{f"layout of {name}": _layout_differs(name) for name in "xwy"},
    **{f"vast padding, {steps}": _vast_padding(steps) for steps in ("stride", "dilation")},
}


def derived_problems(solver: Solver, device: Device) -> Iterator[tuple[str, ProblemDescription]]:
    """What a solver accepts and its examples lack: kinds of problems, and of each direction features.

    A problem is made of the example that lacks least, of several of the smallest that the solver still accepts.

    Yields:
        The kind or the feature's name, and the problem; nothing for what the solver refuses with all of its examples.
    """
    examples = [problem for problem in solver.examples() if solver.applicability(problem, device)]
    known = sorted(examples, key=lambda problem: problem.flops)
    for kind, problem in accepted_kinds(solver, device).items():
        if kind not in map(Kind.of, known):
            known.append(problem)
            yield str(kind), problem
    directions = dict.fromkeys(problem.direction for problem in known)
    for direction, (name, feature) in itertools.product(directions, FEATURES.items()):
        own = [problem for problem in known if problem.direction is direction]
        if device.place not in feature.places or any(map(feature.is_in, own)):
            continue
        changed = (made(feature.added(arguments_of(problem))) for problem in own)
        found = (problem for problem in changed if problem is not None and feature.is_in(problem))
        accepted = _first_accepted(solver, device, found)
        if accepted is not None:
            yield name, accepted


def accepted_kinds(solver: Solver, device: Device) -> dict[Kind, ProblemDescription]:
    """The kinds of which a solver accepts one of its examples without the epilogue, with that problem."""
    examples = [problem for problem in solver.examples() if solver.applicability(problem, device)]
    bare = dict.fromkeys(problem.bare for problem in examples)
    smallest_first = sorted(bare, key=lambda problem: problem.flops)
    found = {}
    for kind in (kind for kind in KINDS if any(map(kind.is_of, solver.keys))):
        nearest_first = sorted(smallest_first, key=kind.differences)
        changed = (made(kind.given(arguments_of(problem))) for problem in nearest_first)
        accepted = _first_accepted(solver, device, filter(None, changed))
        if accepted is not None:
            found[kind] = accepted
    return found


def _first_accepted(
    solver: Solver, device: Device, problems: Iterable[ProblemDescription]
) -> ProblemDescription | None:
    return next((problem for problem in problems if solver.applicability(problem, device)), None)


def arguments_of(problem: ProblemDescription) -> Arguments:
    """What `ProblemDescription.convolution` makes the problem of."""
    return dict(parse_network_config(problem.network_config))


def made(arguments: Arguments) -> ProblemDescription | None:
    """The problem of these arguments, None where there is no such convolution."""
    try:
        return ProblemDescription.convolution(**arguments)
    except InvalidProblemError:
        return None
