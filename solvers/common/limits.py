"""What most kernels ask of tensors, since they count in 32 bits: reasons, "" where all is well.

Pure arithmetic on shapes.
"""

from __future__ import annotations

from miofind.core.problem import ProblemDescription

MAX_ELEMENTS = 2**31 - 2**22
"""Elements of a tensor, and blocks of a grid, that are counted in 32 bits."""

MAX_PADDING = 2**20
"""Padding that leaves coordinates in 32 bits."""


def mixed(problem: ProblemDescription) -> str:
    """Whether tensors differ in dtype or layout."""
    kinds = {(tensor.dtype, tensor.layout) for tensor in (problem.x, problem.w, problem.y)}
    return "needs one dtype and one layout for x, w and y" if len(kinds) > 1 else ""


def oversized(problem: ProblemDescription, most: int = MAX_ELEMENTS) -> str:
    """Whether a tensor has more than `most` elements."""
    if max(tensor.size for tensor in (problem.x, problem.w, problem.y)) > most:
        return f"counts elements in 32 bits: a tensor has more than {most}"
    return ""


def overpadded(problem: ProblemDescription) -> str:
    """Whether padding is more than MAX_PADDING."""
    if max(*problem.conv.pad_before, *problem.conv.pad_after) > MAX_PADDING:
        return f"counts coordinates in 32 bits: padding is more than {MAX_PADDING}"
    return ""
