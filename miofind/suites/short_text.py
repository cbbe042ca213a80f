"""Problems in a few characters, for the cells of tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from miofind.core.problem import Direction, ProblemDescription

SHORT_DIRECTIONS = {Direction.FORWARD: "fwd", Direction.BACKWARD_DATA: "data", Direction.BACKWARD_WEIGHTS: "weights"}


def short_problem(problem: ProblemDescription) -> str:
    """Sizes and epilogue in one short text, such as "64x56x56 > 64, 3x3 s2 p1 d2 g32 bias.relu"."""
    conv = problem.conv
    parts = [f"{_cross((problem.c, *problem.spatial))} > {problem.k}, {_cross(problem.filter)}"]
    if any(s != 1 for s in conv.stride):
        parts.append(f"s{_short_sizes(conv.stride)}")
    if any(conv.pad_before) or any(conv.pad_after):
        after = "" if conv.pad_after == conv.pad_before else f"_{_short_sizes(conv.pad_after)}"
        parts.append(f"p{_short_sizes(conv.pad_before)}{after}")
    if any(d != 1 for d in conv.dilation):
        parts.append(f"d{_short_sizes(conv.dilation)}")
    if problem.groups > 1:
        parts.append(f"g{problem.groups}")
    if problem.epilogue:
        parts.append(problem.epilogue.text)
    return " ".join(parts)


def short_direction(problem: ProblemDescription) -> str:
    """The direction in one short word."""
    return SHORT_DIRECTIONS[problem.direction]


def _cross(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _short_sizes(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else _cross(sizes)
