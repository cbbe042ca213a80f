"""Problems by their shapes: the plain form of the command line says what `ProblemDescription.convolution` takes."""

from __future__ import annotations

import pytest

from miofind.core.problem import Direction, ProblemDescription
from miofind.driver.shapes import is_shape_line, parse_shapes
from miofind.errors import InvalidProblemError

convolution = ProblemDescription.convolution


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--x 32,64,56,56 --w 64,64,3,3", convolution(x=(32, 64, 56, 56), w=(64, 64, 3, 3))),
        (
            "--x 32,64,56,56 --w 64,64,3,3 --padding 1 --stride 1 --dilation 1 --groups 1 --dtype float16"
            " --layout NHWC --direction forward",
            convolution(x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC"),
        ),
        (
            "--w=8,1,3,5 --x=2x8x9x9 --padding=1,2 --stride=2,1 --dilation=1,2 --groups=8 --math=tf32",
            convolution(
                x=(2, 8, 9, 9), w=(8, 1, 3, 5), padding=(1, 2), stride=(2, 1), dilation=(1, 2), groups=8, math="tf32"
            ),
        ),
        (
            "--x 2,4,9,9 --w 8,4,3,3 --padding 0:1,1:0 --direction backward_data",
            convolution(x=(2, 4, 9, 9), w=(8, 4, 3, 3), padding=((0, 1), (1, 0)), direction="backward_data"),
        ),
        ("--x 2,4,9,9 --w 8,4,3,3 --padding same", convolution(x=(2, 4, 9, 9), w=(8, 4, 3, 3), padding="same")),
        ("--x 2,4,9,9 --w 8,4,3,3 --padding valid", convolution(x=(2, 4, 9, 9), w=(8, 4, 3, 3), padding="valid")),
        ("--x 2,4,9 --w 8,4,3 --layout NHWC", convolution(x=(2, 4, 9), w=(8, 4, 3), layout="NWC")),
        ("--x 2,4,9,9,9 --w 8,4,3,3,3", convolution(x=(2, 4, 9, 9, 9), w=(8, 4, 3, 3, 3))),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_line_names_a_problem(line: str, problem: ProblemDescription) -> None:
    assert is_shape_line(line.split())
    assert parse_shapes(line.split()) == (problem,)


@pytest.mark.parametrize(
    ("text", "directions"),
    [
        ("all", list(Direction)),
        ("backward_weights,forward", [Direction.BACKWARD_WEIGHTS, Direction.FORWARD]),
        ("forward,forward", [Direction.FORWARD]),
    ],
)
def test_several_directions(text: str, directions: list[Direction]) -> None:
    found = parse_shapes(["--x", "2,4,9,9", "--w", "8,4,3,3", "--direction", text])
    assert [problem.direction for problem in found] == directions


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--x 2,4,9,9", "--w is missing"),
        ("--x 2,4,9,9 --w 8,4,3,3 -n 2", "-n is no flag beside --x and --w: it is MIOpenDriver's"),
        ("--x 2,4,9,9 --w 8,4,3,3 --pad_h=1", "--pad_h=1 is no flag beside --x and --w: it is MIOpenDriver's"),
        ("--x 2,4,9,9 --w 8,5,3,3", "w=(8, 5, 3, 3) has 5 channels a filter"),
        ("--x 2,4,9,9 --w 8,4,3,3 --padding 1:1", "padding="),
        ("--x 2,4,9,9 --w 8,4,3,3 --padding 1:1,1", "before:after in each dimension"),
        ("--x 2,4,9,9 --w 8,4,3,3 --stride 1,1,1", "stride="),
        ("--x 2,4,9,9 --w 8,4,3,3 --dtype int8", "--dtype='int8' is unknown"),
        ("--x 2,4,9,9 --w 8,4,3,3 --direction sideways", "--direction='sideways' is unknown"),
        ("--x 2,4,9,9 --w 8,4,3,3 --x 1,1,1,1", "--x is given twice"),
        ("--x 2,4,9,9 --w", "--w needs a value"),
        ("--x , --w 8,4,3,3", "--x '' must be a whole number"),
        ("--x 1,4,6,6 --w 8,4,3,3 --padding sme", "--padding 'sme' must be same, valid, or numbers"),
        ("--x 1,8,8,4 --w 8,4,3,3", "in any layout: permute the axes of (n, *spatial, c) by (0, 3, 1, 2)"),
    ],
)
def test_a_refusal_names_flag_and_value(line: str, told: str) -> None:
    with pytest.raises(InvalidProblemError) as caught:
        parse_shapes(line.split())
    assert told in str(caught.value)


@pytest.mark.parametrize("line", ["", "conv -n 1", "-x 3", "--pad_h 1", "conv2d-forward-n1"])
def test_other_words_are_no_shapes(line: str) -> None:
    assert not is_shape_line(line.split())
