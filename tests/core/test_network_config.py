"""The key of every cache and database. A change of one of these strings voids what users have stored: do not."""

from __future__ import annotations

import pytest
from helpers.problems.problem_strategies import problems
from hypothesis import given
from hypothesis import strategies as st

from miofind.core.network_config import end_of_fused
from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidProblemError

_BASE = {"x": (32, 64, 56, 56), "w": (64, 64, 3, 3)}
_VOLUME = {"x": (2, 4, 8, 10, 12), "w": (6, 4, 3, 3, 3)}
_SIGNAL = {"x": (2, 4, 16), "w": (6, 4, 3)}

GOLDEN = {
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-float32-NCHW": _BASE,
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-p1x1-float32-NCHW": {**_BASE, "padding": 1},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-p1x2-float32-NCHW": {**_BASE, "padding": (1, 2)},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-p0x1_1x2-float32-NCHW": {**_BASE, "padding": ((0, 1), (1, 2))},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-p0x0_1x1-float32-NCHW": {**_BASE, "padding": ((0, 1), (0, 1))},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-s2x2-float32-NCHW": {**_BASE, "stride": 2},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-s1x2-float32-NCHW": {**_BASE, "stride": (1, 2)},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-d2x2-float32-NCHW": {**_BASE, "dilation": 2},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-p1x1-s2x2-d2x3-g64-float32-NCHW": {
        "x": (32, 64, 56, 56),
        "w": (64, 1, 3, 3),
        "padding": 1,
        "stride": 2,
        "dilation": (2, 3),
        "groups": 64,
    },
    "conv2d-backward_data-n32-c64-i56x56-k64-f3x3-float32-NCHW": {**_BASE, "direction": "backward_data"},
    "conv2d-backward_weights-n32-c64-i56x56-k64-f3x3-float32-NCHW": {**_BASE, "direction": "backward_weights"},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-float16-NHWC": {**_BASE, "dtype": "float16", "layout": "NHWC"},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-bfloat16-NCHW": {**_BASE, "dtype": "bfloat16"},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-float64-NCHW": {**_BASE, "dtype": "float64"},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-float32-NCHW-tf32": {**_BASE, "math": "tf32"},
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-float16.float16.float32-NHWC": {
        **_BASE,
        "dtype": {"x": "float16", "w": "float16", "y": "float32"},
        "layout": "NHWC",
    },
    "conv2d-forward-n32-c64-i56x56-k64-f3x3-float32-NHWC.NCHW.NHWC": {
        **_BASE,
        "layout": {"x": "NHWC", "w": "NCHW", "y": "NHWC"},
    },
    "conv1d-forward-n2-c4-i16-k6-f3-float32-NCW": _SIGNAL,
    "conv1d-backward_data-n2-c4-i16-k6-f3-p1_0-s2-float32-NWC": {
        **_SIGNAL,
        "padding": ((1, 0),),
        "stride": 2,
        "direction": "backward_data",
        "layout": "NWC",
    },
    "conv3d-forward-n2-c4-i8x10x12-k6-f3x3x3-float32-NCDHW": _VOLUME,
    "conv3d-backward_weights-n2-c4-i8x10x12-k6-f3x3x3-p1x0x2-s1x2x2-float16-NDHWC": {
        **_VOLUME,
        "padding": (1, 0, 2),
        "stride": (1, 2, 2),
        "direction": "backward_weights",
        "dtype": "float16",
        "layout": "NDHWC",
    },
}


@pytest.mark.parametrize(("text", "arguments"), GOLDEN.items(), ids=GOLDEN.keys())
def test_golden(text: str, arguments: dict[str, object]) -> None:
    problem = ProblemDescription.convolution(**arguments)
    assert problem.network_config == str(problem) == text
    assert ProblemDescription.from_network_config(text) == problem


@pytest.mark.parametrize("math", ["ieee", "tf32"])
@pytest.mark.parametrize("layout", ["NCHW", {"x": "NCHW", "w": "NHWC", "y": "NCHW"}], ids=str)
def test_fused_forms_follow_their_bare_problem(math: str, layout: object) -> None:
    texts = ("", "bias", "bias.relu", "residual", "scale.bias.relu")
    given = [
        ProblemDescription.convolution(**_BASE, math=a, layout=b, epilogue=text)
        for a in ("ieee", "tf32")
        for b in ("NCHW", "NHWC", {"x": "NCHW", "w": "NHWC", "y": "NCHW"})
        for text in texts
    ]
    bare = ProblemDescription.convolution(**_BASE, math=math, layout=layout)
    first, end = bare.network_config, end_of_fused(bare.network_config)
    found = [problem for problem in given if first <= problem.network_config < end]
    assert [problem.epilogue.text for problem in found] == list(texts)
    assert {problem.bare for problem in found} == {bare}


@given(problems())
def test_round_trip(problem: ProblemDescription) -> None:
    again = ProblemDescription.from_network_config(problem.network_config)
    assert (again.x, again.w, again.y, again.conv) == (problem.x, problem.w, problem.y, problem.conv)
    assert (again.direction, again.math) == (problem.direction, problem.math)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a network_config"),
        ("conv2d", "is not a network_config"),
        ("conv4d-forward-n1-c1-i5x5-k1-f1x1-float32-NCHW", "is not a network_config"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-float32-NCHW\n", "is not a network_config"),
        ("conv2d-forward-n١-c1-i5x5-k1-f1x1-float32-NCHW", "is not a network_config"),
        ("conv2d-forward-n01-c1-i5x5-k1-f1x1-float32-NCHW", "not canonical"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-p0x0-float32-NCHW", "not canonical"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-p1x1_1x1-float32-NCHW", "not canonical"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-s1x1-float32-NCHW", "not canonical"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-g1-float32-NCHW", "not canonical"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-float32-NCHW-ieee", "not canonical"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-float32.float32.float32-NCHW", "not canonical"),
        ("conv2d-forward-n1-c1-i5-k1-f1x1-float32-NCHW", "must have 2 sizes a field"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-s1-float32-NCHW", "stride"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-g0-float32-NCHW", "groups=0"),
        ("conv2d-forward-n1-c4-i5x5-k4-f1x1-g3-float32-NCHW", "groups=3"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-float32.float16-NCHW", "must name one dtype or three"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-int8-NCHW", "dtype='int8'"),
        ("conv2d-forward-n1-c1-i5x5-k1-f1x1-float32-NCDHW", "layout=NCDHW"),
        ("conv2d-forward-n0-c1-i5x5-k1-f1x1-float32-NCHW", r"x\[0\]=0"),
        ("conv2d-up-n1-c1-i5x5-k1-f1x1-float32-NCHW", "direction='up'"),
    ],
    ids=repr,
)
def test_refusal(text: str, words: str) -> None:
    with pytest.raises(InvalidProblemError, match=words):
        ProblemDescription.from_network_config(text)


@given(st.text(alphabet="conv123d-forwadnkifpsgxNCHW._0", max_size=60))
def test_no_text_ends_in_another_error(text: str) -> None:
    try:
        problem = ProblemDescription.from_network_config(text)
    except InvalidProblemError:
        return
    assert problem.network_config == text
