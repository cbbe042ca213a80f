"""Random valid problems for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.errors import InvalidProblemError

_SIXTEEN_AND_THIRTY_TWO_BITS = (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)


@st.composite
def problems(draw: st.DrawFn) -> ProblemDescription:
    """A problem of any rank, direction, dtypes, layouts, padding, stride, dilation and group count."""
    rank = draw(st.integers(1, 3))

    def sizes(least: int, most: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(least, most)] * rank))

    groups = draw(st.integers(1, 4))
    taps, dilation = sizes(1, 5), sizes(1, 3)
    padding = tuple(zip(sizes(0, 4), sizes(0, 4), strict=True))
    if draw(st.booleans()):
        padding = tuple((before, before) for before, _ in padding)
    reach = [d * (f - 1) + 1 for d, f in zip(dilation, taps, strict=True)]
    spatial = [max(1, r - sum(p)) + draw(st.integers(0, 40)) for r, p in zip(reach, padding, strict=True)]
    channels = draw(st.integers(1, 5))
    dtypes = draw(_per_tensor(_SIXTEEN_AND_THIRTY_TWO_BITS) | st.just(dict.fromkeys("xwy", DataType.FLOAT64)))
    layouts = draw(_per_tensor([Layout.of(rank, channels_last=last) for last in (False, True)]))
    single = set(dtypes.values()) == {DataType.FLOAT32}
    return ProblemDescription.convolution(
        x=(draw(st.integers(1, 300)), channels * groups, *spatial),
        w=(draw(st.integers(1, 5)) * groups, channels, *taps),
        padding=padding,
        stride=sizes(1, 4),
        dilation=dilation,
        groups=groups,
        direction=draw(st.sampled_from(Direction)),
        dtype=dtypes,
        layout=layouts,
        math=draw(st.sampled_from(MathMode)) if single else MathMode.IEEE,
    )


def _per_tensor(values: object) -> st.SearchStrategy[dict[str, object]]:
    """One value for all three tensors, or one for each."""
    one = st.sampled_from(values)
    return one.map(lambda value: dict.fromkeys("xwy", value)) | st.fixed_dictionaries(dict.fromkeys("xwy", one))


def refusal(**arguments: object) -> str:
    """The message with which `ProblemDescription.convolution` refuses its arguments, "" if it accepts them."""
    try:
        ProblemDescription.convolution(**{"x": (1, 4, 8, 8), "w": (4, 4, 3, 3), **arguments})
    except InvalidProblemError as error:
        return str(error)
    return ""
