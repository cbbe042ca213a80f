"""MIOpen's find-db text: keys of the documented grammar are problems, all others are counted and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidOptionError, InvalidProblemError
from miofind.suites.find_db_text import load_find_db, parse_find_db_key

FORWARD = "64-56-58-3x5-128-28-29-32-1x2-2x2-1x1-0-NCHW-FP16-F"
VALUE = "ConvHipImplicitGemmFwdXdlops:0.0731,0,miopenConvolutionFwdAlgoImplicitGEMM;ConvDirectNaiveConvFwd:9.1,0,x"


@pytest.mark.parametrize(
    ("key", "network_config"),
    [
        (FORWARD, "conv2d-forward-n32-c64-i56x58-k128-f3x5-p1x2-s2-float16-NCHW"),
        (
            "128-28-28-3x3-64-56-56-32-1x1-2x2-1x1-0-NCHW-FP32-B",
            "conv2d-backward_data-n32-c64-i56x56-k128-f3x3-p1-s2-float32-NCHW",
        ),
        (
            "128-28-28-1x1-64-56-56-32-0x0-2x2-1x1-0-NHWC-NHWC-NHWC-BF16-W",
            "conv2d-backward_weights-n32-c64-i56x56-k128-f1x1-s2-bfloat16-NHWC",
        ),
        (
            "32-8-8-3x3-32-8-8-4-2x2-1x1-2x2-0-NCHW-FP32-F_g32",
            "conv2d-forward-n4-c32-i8x8-k32-f3x3-p2-d2-g32-float32-NCHW",
        ),
        (
            "3-8-9-10-3x3x3-16-8-9-10-2-1x1x1-1x1x1-1x1x1-0-NCDHW-FP32-F",
            "conv3d-forward-n2-c3-i8x9x10-k16-f3x3x3-p1-float32-NCDHW",
        ),
        (
            "16-8-9-10-3x3x3-3-8-9-10-2-1x1x1-1x1x1-1x1x1-0-NDHWC-NDHWC-NDHWC-FP16-B",
            "conv3d-backward_data-n2-c3-i8x9x10-k16-f3x3x3-p1-float16-NDHWC",
        ),
    ],
    ids=["forward", "data", "weights", "groups", "3-D", "3-D data"],
)
def test_keys_are_problems(key: str, network_config: str) -> None:
    expected = ProblemDescription.from_network_config(_filled(network_config))
    assert parse_find_db_key(key) == expected


def _filled(network_config: str) -> str:
    """Sizes written once for all dimensions, written out."""
    parts = network_config.split("-")
    rank = int(parts[0][4])
    return "-".join(
        f"{part[0]}{'x'.join([part[1:]] * rank)}" if part[0] in "psd" and part[1:].isdigit() else part for part in parts
    )


def test_each_tensor_may_have_its_own_layout_and_type() -> None:
    mixed = "128-28-28-3x3-64-56-56-32-1x1-2x2-1x1-0-NHWC-NCHW-NCHW-BF16FP32FP16-B"
    problem = parse_find_db_key(mixed)
    assert [problem.tensor(name).dtype for name in "ywx"] == ["bfloat16", "float32", "float16"]
    assert [problem.tensor(name).layout for name in "ywx"] == ["NHWC", "NCHW", "NCHW"]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "no key",
        FORWARD.replace("FP16", "INT8"),
        FORWARD.replace("FP16", "FP16FP16"),
        FORWARD.replace("NCHW", "CHWN"),
        FORWARD.replace("NCHW", "NCHW-NHWC"),
        FORWARD.replace("NCHW", "NCDHW"),
        FORWARD.replace("-0-NCHW", "-1-NCHW"),
        FORWARD[:-1] + "X",
        FORWARD.replace("-28-29-", "-28-28-"),
        FORWARD.replace("-56-58-", "-0-58-"),
        FORWARD.replace("64-", "9999999999-"),
        FORWARD + "_g0",
        FORWARD + "_g3",
        FORWARD + "_ciFP8",
        FORWARD.replace("3x5", "3x5x1"),
        FORWARD.replace("-1x2-", "-1x2x3-"),
        "576-4-4-1x1-192-4-4-8-1x1-2x2-3x3-0-NCHW-FP32-F",
    ],
    ids=lambda key: key or "empty",
)
def test_what_names_no_problem_is_refused(key: str) -> None:
    with pytest.raises(InvalidProblemError):
        parse_find_db_key(key)


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gfx90a.HIP.fdb.txt"
    lines = [f"{FORWARD}={VALUE}", "", f"{FORWARD.replace('FP16', 'INT8')}={VALUE}", f"{FORWARD}_g2"]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = load_find_db(file)
    assert [(row.suite, row.layer, row.count) for row in found.suite.rows] == [
        ("gfx90a.HIP", "line 1", 1),
        ("gfx90a.HIP", "line 4", 1),
    ]
    assert [entry.problem.groups for entry in found.suite.problems()] == [1, 2]
    assert found.warning.startswith("gfx90a.HIP: 1 of 3 keys name no problem and are left out: '64-56-58-3x5-")


def test_one_warning_names_few_of_many(tmp_path: Path) -> None:
    file = tmp_path / "damaged.fdb.txt"
    file.write_bytes(b"\xff\x00=\n" + b"".join(b"%d=x\n" % i for i in range(9)) + b"k" * 10_000)
    warning = load_find_db(file).warning
    assert "11 of 11 keys" in warning
    assert warning.endswith("and 8 more")
    assert len(warning) < 400


def test_a_file_without_unknown_keys_warns_of_nothing(tmp_path: Path) -> None:
    file = tmp_path / "sound.fdb.txt"
    file.write_text(f"{FORWARD}={VALUE}\n", encoding="utf-8")
    assert load_find_db(file).warning == ""


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"none\.fdb\.txt cannot be read"):
        load_find_db(tmp_path / "none.fdb.txt")
