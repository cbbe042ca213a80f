"""MIOpenDriver lines: read as MIOpenDriver reads them, written so that they read back."""

from __future__ import annotations

import shlex

import pytest
from helpers.problems.problem_strategies import problems
from hypothesis import given
from hypothesis import strategies as st

from miofind.core.problem import ProblemDescription
from miofind.driver.line import _words, driver_line, parse_driver_line
from miofind.errors import InvalidProblemError

_RESNET = "conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1"


def configs(line: str) -> list[str]:
    return [problem.network_config for problem in parse_driver_line(line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("conv -F 1", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NCHW"),
        ("convfp16 -F 1", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float16-NCHW"),
        ("convbfp16 -F 1", "conv2d-forward-n100-c3-i32x32-k32-f3x3-bfloat16-NCHW"),
        (f"{_RESNET} -F 2", "conv2d-backward_data-n32-c64-i56x56-k64-f3x3-p1x1-float32-NCHW"),
        (
            f"{_RESNET} -u 2 -v 1 -l 1 -j 2 -g 2 -F 4",
            "conv2d-backward_weights-n32-c64-i56x56-k64-f3x3-p1x1-s2x1-d1x2-g2-float32-NCHW",
        ),
        (
            "conv --batchsize 1 --in_channels 4 --in_h 9 --in_w 8 --out_channels 6 --fil_h 3 --fil_w 2 --pad_h 1"
            " --pad_w 0 --conv_stride_h 2 --conv_stride_w 1 --dilation_h 1 --dilation_w 2 --group_count 2 --forw 1"
            " --mode conv",
            "conv2d-forward-n1-c4-i9x8-k6-f3x2-p1x0-s2x1-d1x2-g2-float32-NCHW",
        ),
        ("conv -g 0 -F 1", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NCHW"),
        ("conv -I NHWC -O NHWC -f nhwc -F 1", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NHWC"),
        ("conv -I NHWC -F 1", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NHWC.NCHW.NCHW"),
        ("conv --layout NHWC -f NCHW -F 1", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NHWC.NCHW.NHWC"),
        (
            "conv -F 1 --spatial_dim 3 --in_d 8 --fil_d 2 --pad_d 1 --conv_stride_d 2 --dilation_d 3",
            "conv3d-forward-n100-c3-i8x32x32-k32-f2x3x3-p1x0x0-s2x1x1-d3x1x1-float32-NCDHW",
        ),
        (
            "conv -F 1 -_ 3 -! 8 -@ 2 -$ 1 -# 2 -^ 3",
            "conv3d-forward-n100-c3-i8x32x32-k32-f2x3x3-p1x0x0-s2x1x1-d3x1x1-float32-NCDHW",
        ),
        ("conv -F 1 --in_d 1 --fil_d 1 --pad_d 0", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NCHW"),
        ("conv -F 1 --spatial_dim 1 -W 9 -x 2", "conv1d-forward-n100-c3-i9-k32-f2-float32-NCW"),
        ("conv -F 1 --dtype float64", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float64-NCHW"),
        ("conv -F 1 --math tf32", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NCHW-tf32"),
        ("conv -F 1 --math=tf32", "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NCHW-tf32"),
        ("conv -F 1 -p 1 --pad_after_h 2", "conv2d-forward-n100-c3-i32x32-k32-f3x3-p1x0_2x0-float32-NCHW"),
        (
            "conv -F 1 -V 0 -i 100 -t 1 -w 1 -s 0 -S -1 -G 0 -o 0 -P 0 -C /tmp -b 0 -r 0 -Z 0 -L 1 -U -1",
            "conv2d-forward-n100-c3-i32x32-k32-f3x3-float32-NCHW",
        ),
    ],
    ids=lambda value: value if value.startswith("conv") and " " in value else "",
)
def test_reads(line: str, expected: str) -> None:
    assert configs(line) == [expected]


@pytest.mark.parametrize(
    "prefix",
    [
        "MIOpenDriver",
        "./bin/MIOpenDriver",
        "MIOpen(HIP): Command [LogCmdConvolution] ./bin/MIOpenDriver",
        "miofind",
        "miofind find",
    ],
)
def test_program_in_front_is_dropped(prefix: str) -> None:
    assert configs(f"{prefix} {_RESNET}") == configs(_RESNET)


@pytest.mark.parametrize(
    ("bits", "directions"),
    [
        (0, ["forward", "backward_data", "backward_weights"]),
        (1, ["forward"]),
        (2, ["backward_data"]),
        (3, ["forward", "backward_data"]),
        (4, ["backward_weights"]),
        (5, ["forward", "backward_weights"]),
        (6, ["backward_data", "backward_weights"]),
        (7, ["forward", "backward_data", "backward_weights"]),
    ],
)
def test_direction_bits(bits: int, directions: list[str]) -> None:
    assert [problem.direction for problem in parse_driver_line(f"conv -F {bits}")] == directions


def test_without_direction_bits_all_three_are_meant() -> None:
    assert configs("conv") == configs("conv -F 0")


@pytest.mark.parametrize(
    ("line", "padding"),
    [
        ("conv -F 1 -z same -y 5 -x 4 -p 9 -q 9", "p2x1"),
        ("conv -F 1 -z same -H 31 -W 32 -u 2 -v 2", "p1x0"),
        ("conv -F 1 -z same -y 1 -x 1 -u 2 -v 2", "s2x2"),
        ("conv -F 1 -z valid -p 9 -q 9", "f3x3-float32"),
        ("conv -F 1 -z same -l 2 -p 3 -q 3", "p3x3"),
        ("conv -F 1 -z default -p 3 -q 3", "p3x3"),
    ],
)
def test_padding_modes(line: str, padding: str) -> None:
    """Source: ROCm/MIOpen, driver/conv_driver.hpp: "same" pads (filter - stride or remainder) / 2, undilated only."""
    assert padding in configs(line)[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "conv -m trans -n 2 -c 6 -H 5 -W 7 -k 4 -F 1",
            "conv2d-backward_data-n2-c4-i7x9-k6-f3x3-float32-NCHW",
        ),
        ("conv -m trans -n 2 -c 6 -H 5 -W 7 -k 4 -F 2", "conv2d-forward-n2-c4-i7x9-k6-f3x3-float32-NCHW"),
        ("conv -m trans -n 2 -c 6 -H 5 -W 7 -k 4 -F 4", "conv2d-backward_weights-n2-c4-i7x9-k6-f3x3-float32-NCHW"),
        (
            "convfp16 -m trans -n 2 -c 6 -H 5 -W 7 -k 4 -g 2 -p 1 -q 1 -u 2 -v 2 -Y 1 -X 0 -F 1",
            "conv2d-backward_data-n2-c4-i10x13-k6-f3x3-p1x1-s2x2-g2-float16-NCHW",
        ),
        (
            "conv -m trans -n 2 -c 6 -H 5 -W 7 -k 4 -I NHWC -F 1",
            "conv2d-backward_data-n2-c4-i7x9-k6-f3x3-float32-NCHW.NCHW.NHWC",
        ),
    ],
)
def test_transposed_convolution_becomes_the_mirrored_direction(line: str, expected: str) -> None:
    assert configs(line) == [expected]


def test_transposed_output_size_is_pytorchs() -> None:
    """Source: torch.nn.ConvTranspose2d, (in - 1) * stride - 2 * pad + dilation * (filter - 1) + output_pad + 1."""
    (problem,) = parse_driver_line("conv -m trans -H 5 -W 7 -p 1 -q 2 -u 3 -v 2 -l 2 -j 1 -Y 2 -X 1 -F 1")
    assert problem.spatial == (4 * 3 - 2 + 4 + 2 + 1, 6 * 2 - 4 + 2 + 1 + 1)
    assert problem.out_spatial == (5, 7)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["''", "convbfp16"]),
        ("pool -n 1", ["'pool'", "conv"]),
        ("convint8 -n 1", ["'convint8'", "convfp16"]),
        ("conv -n", ["--batchsize (-n)", "needs a value"]),
        ("conv --pad_after_w", ["--pad_after_w", "needs a value"]),
        ("conv -n x", ["--batchsize (-n)", "'x'", "integer"]),
        ("conv -n 3.5", ["--batchsize (-n)", "'3.5'", "integer"]),
        ("conv -n ''", ["--batchsize (-n)", "''", "integer"]),
        ("conv -n ٣", ["--batchsize (-n)", "integer"]),
        ("conv -n 0", ["--batchsize (-n)", "0", "between 1"]),
        ("conv -H -5", ["--in_h (-H)", "-5", "between 1"]),
        ("conv -p -1", ["--pad_h (-p)", "-1", "between 0"]),
        ("conv -n 2147483648", ["--batchsize (-n)", "2147483648"]),
        ("conv -n 1 --batchsize 2", ["--batchsize (-n)", "twice", "1", "2"]),
        ("conv -Q 1", ["-Q", "unknown"]),
        ("conv -n 1 --x 1,8,14,14", ["flag --x", "of shapes", "do not mix"]),
        ("conv --padding=1", ["flag --padding", "of shapes", "do not mix"]),
        ("conv --colour 1", ["--colour", "unknown"]),
        ("conv -n32", ["-n32", "write -n 32"]),
        ("conv -N 32", ["-N", "Did you mean -n?"]),
        ("conv -dilation 2", ["-dilation", "Did you mean", "--dilation_h"]),
        ("conv --pad-h 2", ["--pad-h", "Did you mean --pad_h"]),
        ("conv -D 5", ["--dout_data (-D) 5", "--in_d with --spatial_dim 3"]),
        ("conv -e 3", ["--weights (-e) 3", "leave it out"]),
        ("conv -V 2", ["--verify (-V) '2'", "'0' or '1'", "leave it out"]),
        ("conv -w 3", ["--wall (-w) '3'", "-x"]),
        ("conv 32", ["'32'", "not a flag"]),
        ("conv -n 32 'x", ["cannot be read", "quotation"]),
        ("conv -F 8", ["--forw (-F)", "8"]),
        ("conv -m group", ["--mode (-m)", "'group'", "'trans'"]),
        ("conv -z reflect", ["--pad_mode (-z)", "'reflect'", "'same'"]),
        ("conv -g 2", ["groups=2", "c=3"]),
        ("conv -y 40", ["filter size 40", "padded input is 32"]),
        ("conv -I CHWN", ["--in_layout", "'CHWN'"]),
        ("conv --spatial_dim 3 -I NHWC", ["--in_layout", "NHWC", "use NDHWC"]),
        ("conv --spatial_dim 4", ["--spatial_dim (-_)", "4", "1, 2 or 3"]),
        ("conv --in_d 8", ["--in_d (-!)", "8", "--spatial_dim 2"]),
        ("conv --spatial_dim 1 -u 2", ["--conv_stride_h (-u)", "2", "--spatial_dim 1"]),
        ("conv -r 1", ["--pad_val (-r)", "'1'"]),
        ("conv -b 2", ["--bias (-b)", "'2'"]),
        ("conv -Z 1", ["--tensor_vect (-Z)", "'1'"]),
        ("conv -U fp8", ["--in_cast_type (-U)", "'fp8'"]),
        ("conv -Y 1", ["--trans_output_pad_h (-Y)", "1", "-m trans"]),
        ("conv -m trans -Y 1", ["--trans_output_pad_h (-Y)", "1", "below the stride 1"]),
        ("conv -m trans -H 1 -p 2", ["--pad_h (-p)", "2", "output size of -1"]),
        ("conv -m trans -c 4 -k 3 -g 2", ["-m trans", "groups=2", "c=3"]),
        ("conv -z same --pad_after_h 1", ["--pad_after_h", "1", "--pad_mode same"]),
        ("convfp16 --dtype float64", ["--dtype", "float64", "convfp16"]),
        ("conv --dtype int8", ["--dtype", "'int8'"]),
        ("conv --math fast", ["math", "'fast'"]),
        ("convfp16 --math tf32", ["math=tf32", "float16"]),
    ],
)
def test_refusal_names_flag_and_value(line: str, words: list[str]) -> None:
    with pytest.raises(InvalidProblemError) as caught:
        parse_driver_line(line)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []


@given(problems())
def test_every_problem_can_be_written_and_read_back(problem: ProblemDescription) -> None:
    assert parse_driver_line(driver_line(problem)) == (problem,)


@given(problems())
def test_a_written_line_needs_no_quoting(problem: ProblemDescription) -> None:
    line = driver_line(problem)
    assert shlex.join(line.split(" ")) == line


def test_miopendriver_takes_what_it_can_express() -> None:
    (problem,) = parse_driver_line("convbfp16 -n 2 -c 4 -H 9 -W 8 -k 6 -g 2 -u 2 --layout NHWC -F 2")
    assert driver_line(problem) == (
        "convbfp16 -n 2 -c 4 -H 9 -W 8 -k 6 -y 3 -x 3 -p 0 -q 0 -u 2 -v 1 -l 1 -j 1"
        " --in_layout NHWC --fil_layout NHWC --out_layout NHWC -m conv -g 2 -F 2"
    )


@given(st.lists(st.sampled_from(["-n", "-F", "--mode", "trans", "0", "-1", "7", "-g", "--math", "=", "--", "-", "#"])))
def test_no_line_ends_in_another_error(words: list[str]) -> None:
    try:
        parse_driver_line(" ".join(["conv", *words]))
    except InvalidProblemError:
        return


@given(st.text(st.sampled_from("aA-=1 \t\r\n\v\f\x1c\x85\xa0\u2028#\"'\\"), max_size=12))
def test_words_are_those_of_a_shell(text):
    try:
        expected = shlex.split(text)
    except ValueError:
        with pytest.raises(InvalidProblemError, match="cannot be read"):
            _words(text)
        return
    assert _words(text) == expected
