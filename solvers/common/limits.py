"""What most kernels ask of tensors, since they count in 32 bits.

Pure arithmetic on shapes.
"""

from __future__ import annotations

from miofind.core.problem import MAX_INT32_ELEMENTS, ProblemDescription
from miofind.solver.solver import APPLICABLE, Applicability, first_refusal

MAX_ELEMENTS = MAX_INT32_ELEMENTS
"""Elements of a tensor, and blocks of a grid, that are counted in 32 bits."""

MAX_PADDING = 2**20
"""Padding that leaves coordinates in 32 bits."""


def refuse_mixed_dtypes(problem: ProblemDescription) -> Applicability:
    """Refuse tensors that differ in dtype."""
    dtypes = {tensor.dtype for tensor in (problem.x, problem.w, problem.y)}
    return Applicability("needs one dtype for x, w and y" if len(dtypes) > 1 else "")


def refuse_mixed(problem: ProblemDescription) -> Applicability:
    """Refuse tensors that differ in dtype or layout."""
    kinds = {(tensor.dtype, tensor.layout) for tensor in (problem.x, problem.w, problem.y)}
    return Applicability("needs one dtype and one layout for x, w and y" if len(kinds) > 1 else "")


def refuse_oversized(problem: ProblemDescription, most: int = MAX_ELEMENTS) -> Applicability:
    """Refuse tensors of more than `most` elements."""
    if max(tensor.size for tensor in (problem.x, problem.w, problem.y)) > most:
        return Applicability(f"counts elements in 32 bits: a tensor has more than {most}")
    return APPLICABLE


def refuse_overpadded(problem: ProblemDescription) -> Applicability:
    """Refuse padding of more than MAX_PADDING."""
    if max(*problem.conv.pad_before, *problem.conv.pad_after) > MAX_PADDING:
        return Applicability(f"counts coordinates in 32 bits: padding is more than {MAX_PADDING}")
    return APPLICABLE


def refuse_sizes(problem: ProblemDescription, most: int = MAX_ELEMENTS) -> Applicability:
    """Refuse tensors of more than `most` elements, and padding of more than MAX_PADDING."""
    return first_refusal(refuse_oversized(problem, most), refuse_overpadded(problem))


def refuse_tensors(problem: ProblemDescription, most: int = MAX_ELEMENTS) -> Applicability:
    """Refuse what kernels of one dtype and layout that count in 32 bits cannot compute: all of the above."""
    return first_refusal(refuse_mixed(problem), refuse_sizes(problem, most))
