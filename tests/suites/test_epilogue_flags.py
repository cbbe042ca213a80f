"""Epilogues on command lines: flags of their own, the short form, and MIOpen's lines of fused convolutions."""

from __future__ import annotations

from pathlib import Path

import pytest

from miofind.core.problem import Direction, ProblemDescription
from miofind.driver.line import driver_line, parse_driver_line
from miofind.driver.shapes import parse_shapes
from miofind.errors import InvalidProblemError
from miofind.suites.suite import load_csv

_SHAPES = ["--x", "2,4,9,9", "--w", "8,4,3,3"]
_BARE = ProblemDescription.convolution(x=(2, 4, 9, 9), w=(8, 4, 3, 3))
_LINE = "conv -n 2 -c 4 -H 9 -W 9 -k 8 -y 3 -x 3"

_FORMS = [
    ("--bias", "bias"),
    ("--bias --activation relu", "bias.relu"),
    ("--scale --bias --channel-bias --residual before --activation silu", "scale.bias.channel_bias.residual.silu"),
    ("--activation=gelu_tanh --residual=after", "gelu_tanh.residual"),
    ("--bias --parameter-dtype float32 --activation clamp", "bias.clamp"),
    ("--epilogue bias.residual.relu", "bias.residual.relu"),
    ("--epilogue=scale.bias", "scale.bias"),
]


@pytest.mark.parametrize(("flags", "epilogue"), _FORMS)
def test_shapes_and_lines_take_the_same_flags(flags: str, epilogue: str) -> None:
    for problems in (parse_shapes([*_SHAPES, *flags.split()]), parse_driver_line(f"{_LINE} {flags}")):
        (problem,) = problems
        assert problem.epilogue.text == epilogue
        assert problem.bare == _BARE


def test_the_dtype_of_scale_and_bias() -> None:
    (problem,) = parse_driver_line(f"convfp16{_LINE[4:]} --bias --parameter-dtype float32")
    assert problem.network_config.endswith("-float16-NCHW-e.float32.bias")


@pytest.mark.parametrize(
    ("line", "epilogue"),
    [("-b 1 -F 1", "bias"), ("--bias 1 -F 1", "bias"), ("-b 0 -F 1", ""), ("--bias --scale", "scale.bias")],
)
def test_the_drivers_own_bias(line: str, epilogue: str) -> None:
    (problem,) = parse_driver_line(f"{_LINE} {line}")
    assert problem.epilogue.text == epilogue


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--epilogue bias.relu --bias", "--epilogue bias.relu and --bias are two forms"),
        ("--residual", "--residual needs a value"),
        ("--residual first", "--residual='first' is unknown"),
        ("--activation relu6", "--activation='relu6' is unknown"),
        ("--epilogue relu.bias", "in the order of computation: 'bias.relu'"),
        ("--epilogue bais", "unknown word 'bais'"),
        ("--parameter-dtype float32 --activation relu", "add one of them"),
        ("--bias --parameter-dtype float16", "scale and bias are float32"),
    ],
)
def test_refusals_name_flag_and_value(flags: str, told: str) -> None:
    for read in (lambda: parse_shapes([*_SHAPES, *flags.split()]), lambda: parse_driver_line(f"{_LINE} {flags}")):
        with pytest.raises(InvalidProblemError) as caught:
            read()
        assert told in str(caught.value)


@pytest.mark.parametrize("bits", ["0", "2", "3", "7"])
def test_lines_of_backward_directions_take_none(bits: str) -> None:
    with pytest.raises(
        InvalidProblemError, match=rf"--forw \(-F\) {bits} asks for .*backward_.* is of forward problems alone"
    ):
        parse_driver_line(f"{_LINE} --bias -F {bits}")


@pytest.mark.parametrize("flags", ["--bias", "--epilogue residual", "--epilogue drelu", "--epilogue bias_gradient"])
def test_transposed_convolutions_take_none(flags: str) -> None:
    with pytest.raises(InvalidProblemError, match="-m trans takes no epilogue"):
        parse_driver_line(f"{_LINE} {flags} -m trans")


@pytest.mark.parametrize("direction", ["all", "backward_data", "forward,backward_weights"])
def test_shapes_of_backward_directions_take_none(direction: str) -> None:
    with pytest.raises(InvalidProblemError, match=f"--direction {direction} asks for .*backward"):
        parse_shapes([*_SHAPES, "--bias", "--direction", direction])


def test_a_switch_of_shapes_takes_no_value() -> None:
    with pytest.raises(InvalidProblemError, match="--bias takes no value"):
        parse_shapes([*_SHAPES, "--bias=1"])


@pytest.mark.parametrize(
    "epilogue", ["bias", "float32.scale.bias.channel_bias.residual.relu", "float32.bias.mish.residual", "sigmoid"]
)
def test_a_line_written_is_the_problem_when_read(epilogue: str) -> None:
    problem = ProblemDescription.convolution(x=(2, 4, 9, 9), w=(8, 4, 3, 3), dtype="float16", epilogue=epilogue)
    assert parse_driver_line(driver_line(problem)) == (problem,)
    assert parse_driver_line(driver_line(problem))[0].direction is Direction.FORWARD


@pytest.mark.parametrize(
    ("flags", "epilogue"),
    [
        ("-F 4", "bias.relu"),
        ("-F 4 -m 0", "bias"),
        ("-F 4 -m 1", "bias.sigmoid"),
        ("-F 4 -m 2 -A 1.0 -B 1.0", "bias.tanh"),
        ("-F 4 -m 7 -A 6.0", "bias.clamp"),
        ("-F 4 -m 8 -A 0.2", "bias.leaky_relu"),
        ("-F 4 -m 9 -G 1.0", "bias.elu"),
        ("-F 5 --activMode 3", "relu"),
        ("-F 6 -m 3", "bias"),
        ("-F 0 -M 1", "scale.bias.relu"),
        ("-F 1 -M 1 -m 8", "scale.bias.leaky_relu"),
        ("-F 3 -M 1", "scale.bias"),
    ],
)
def test_fusion_modes(flags: str, epilogue: str) -> None:
    (problem,) = parse_driver_line(f"./bin/MIOpenDriver CBAInfer{_LINE[4:]} {flags} -V 0 -i 10 -t 1 -w 1 -z conv")
    assert problem.bare == _BARE
    assert problem.epilogue.text == epilogue


@pytest.mark.parametrize(("base", "dtype"), [("CBAInferfp16", "float16"), ("CBAInferbfp16", "bfloat16")])
def test_types_and_defaults_of_fused_lines(base: str, dtype: str) -> None:
    """The batch is 32 by default there, 100 in other lines."""
    (problem,) = parse_driver_line(f"{base} -F 4 -z same -g 1 --layout NHWC")
    assert problem.network_config == f"conv2d-forward-n32-c3-i32x32-k32-f3x3-p1x1-{dtype}-NHWC-e.bias.relu"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("-F 2", "a batch norm and an activation without a convolution"),
        ("-F 7", "(-F) 7 must be between 0 and 6"),
        ("", "--bnMode (-M) 0 with --fusion_mode (-F) 0"),
        ("-F 4 -m 4", "(-m) 4 (softrelu)"),
        ("-F 4 -m 12", "(-m) 12 is no activation"),
        ("-F 4 --bias", "flag --bias is unknown"),
        ("-F 4 --spatial_dim 3", "a CBAInfer line has 2"),
        ("-F 4 -D ConvForward", "--dot_graph (-D) 'ConvForward'"),
    ],
)
def test_refused_lines_of_fused_convolutions(flags: str, told: str) -> None:
    with pytest.raises(InvalidProblemError) as caught:
        parse_driver_line(f"CBAInfer {flags}")
    assert told in str(caught.value)


def test_a_bias_gradient_asks_for_backward_weights() -> None:
    (problem,) = parse_shapes([*_SHAPES, "--epilogue", "bias_gradient"])
    assert problem.direction is Direction.BACKWARD_WEIGHTS
    assert parse_driver_line(driver_line(problem)) == (problem,)
    (own,) = parse_driver_line(f"{_LINE} --epilogue bias_gradient")
    assert own.direction is Direction.BACKWARD_WEIGHTS
    with pytest.raises(
        InvalidProblemError, match="asks for forward, and epilogue bias_gradient is of backward_weights"
    ):
        parse_shapes([*_SHAPES, "--epilogue", "bias_gradient", "--direction", "forward"])


def test_rows_of_a_bias_gradient_are_in_their_direction_alone(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    rows = ("n,c,h,w,k,fy,fx,direction,epilogue", "2,8,9,9,16,3,3,backward_weights,bias_gradient", "2,8,9,9,16,3,3,,")
    table.write_text("\n".join(rows) + "\n")
    suite = load_csv(table)
    asked = suite.problems(directions=["forward", "backward_weights"], dtype="float16")
    found = [(entry.problem.direction, entry.problem.epilogue.text) for entry in asked]
    assert found == [
        (Direction.BACKWARD_WEIGHTS, "bias_gradient"),
        (Direction.FORWARD, ""),
        (Direction.BACKWARD_WEIGHTS, ""),
    ]
