"""Problems of one filter a channel and of several groups, for solvers' `examples()`."""

from __future__ import annotations

from miofind.core.problem import ProblemDescription


def depthwise_example(c: int, *, w: tuple[int, ...], k: int | None = None, **fields: object) -> ProblemDescription:
    """A depthwise convolution.

    Args:
        c: channels, as many as groups.
        w: taps.
        k: filters, a multiple of `c`; by default as many.
        fields: what else `ProblemDescription.convolution` takes.
    """
    return ProblemDescription.convolution(w=(k or c, 1, *w), groups=c, **fields)  # type: ignore[arg-type]


def grouped_example(
    groups: int, c: int, k: int, *, x: tuple[int, ...], w: tuple[int, ...], **fields: object
) -> ProblemDescription:
    """A grouped convolution.

    Args:
        groups: how many.
        c, k: channels and filters of a group.
        x: images, then their sizes.
        w: taps.
        fields: what else `ProblemDescription.convolution` takes.
    """
    return ProblemDescription.convolution(
        x=(x[0], groups * c, *x[1:]),
        w=(groups * k, c, *w),
        groups=groups,
        **fields,  # type: ignore[arg-type]
    )
