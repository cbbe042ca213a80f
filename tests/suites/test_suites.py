"""Suites: the shipped tables hold, files of the user's own are read or refused with the place of the mistake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.driver.line import driver_line, parse_driver_line
from miofind.errors import InvalidOptionError, InvalidProblemError
from miofind.suites import (
    PROBLEM_CLASSES,
    Suite,
    SuiteRow,
    load,
    load_csv,
    load_lines,
    load_suite,
    problem_class,
    save_csv,
    save_lines,
    suite_names,
)

_HEADER = "suite,layer,n,c,h,w,k,fy,fx,pad_h,pad_w,stride_h,stride_w,dil_h,dil_w,groups,count"
_ROW = "mine,conv1,1,3,8,8,16,3,3,1,1,1,1,1,1,1,2"
_DISTINCT = {
    "convnext_tiny": 16,
    "convnext_tiny_fused": 16,
    "deepbench_infer_server": 103,
    "deepbench_train": 90,
    "deeplabv3_resnet50": 30,
    "efficientnet_b0": 46,
    "efficientnet_b0_fused": 46,
    "mobilenet_v2": 30,
    "mobilenet_v2_fused": 30,
    "replknet31b": 26,
    "resnet50": 23,
    "resnet50_fused": 24,
    "resnet50_training": 69,
    "resnext50_32x4d": 24,
    "resnext50_32x4d_fused": 24,
    "sd15_unet": 35,
    "sd15_unet_fused": 44,
    "sd_vae_decoder_fused": 17,
    "unet_segmentation": 19,
    "unet_segmentation_fused": 19,
    "vgg16": 9,
    "vgg16_fused": 9,
    "video_r3d_18": 11,
    "wild": 888,
    "wild_3d": 120,
    "yardstick": 191,
    "yolov8s": 41,
    "yolov8s_fused": 45,
}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_names() -> None:
    assert suite_names() == tuple(sorted(_DISTINCT))


@pytest.mark.parametrize("name", _DISTINCT)
def test_every_shipped_row_is_a_problem(name: str) -> None:
    problems = load_suite(name).problems()
    assert len(problems) == len({entry.problem for entry in problems}) == _DISTINCT[name]
    assert sum(entry.count for entry in problems) == sum(row.count for row in load_suite(name).rows)


def test_resnet50_has_its_53_convolutions_and_its_arithmetic() -> None:
    problems = load_suite("resnet50").problems()
    assert sum(entry.count for entry in problems) == 53
    flops = sum(entry.count * entry.problem.flops for entry in problems)
    assert flops == pytest.approx(2 * 4.09e9, rel=0.01)  # He et al. 2015, table 1, with torchvision's stride in the 3x3


def test_batch_dtype_layout_and_directions() -> None:
    problems = load_suite("ResNet50").problems(
        batch=32, dtype="float16", layout="NHWC", directions=["forward", "backward_weights"]
    )
    assert len(problems) == 2 * 23
    assert {entry.problem.n for entry in problems} == {32}
    assert {entry.problem.w.dtype for entry in problems} == {DataType.FLOAT16}
    assert {entry.problem.y.layout for entry in problems} == {Layout.NHWC}
    assert [entry.problem.direction for entry in problems[:2]] == [Direction.FORWARD, Direction.BACKWARD_WEIGHTS]


def test_batch_counts_samples() -> None:
    assert {entry.problem.n for entry in load_suite("sd15_unet").problems(batch=4)} == {8}


@pytest.mark.parametrize("name", ["yardstick", "wild", "deepbench_train"])
def test_batch_of_a_suite_that_has_its_own_is_refused(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"a batch of 8: the rows of suite '{name}'"):
        load_suite(name).problems(batch=8)


def test_batch_below_one_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="a batch of 0 must be at least 1"):
        load_suite("resnet50").problems(batch=0)


def test_layout_fits_every_rank() -> None:
    assert {entry.problem.x.layout for entry in load_suite("wild_3d").problems(layout="NHWC")} == {Layout.NDHWC}


def test_wild_rows_bring_their_own_dtype_and_direction() -> None:
    problems = [entry.problem for entry in load_suite("wild").problems()]
    assert {problem.x.dtype for problem in problems} == {DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}
    assert {problem.direction for problem in problems} == set(Direction)
    assert {problem.x.layout for problem in problems} == {Layout.NCHW, Layout.NHWC}


def test_asked_for_values_go_before_the_rows_own() -> None:
    problems = [entry.problem for entry in load_suite("wild").problems(dtype="bfloat16", directions=["forward"])]
    assert {(problem.x.dtype, problem.direction) for problem in problems} == {(DataType.BFLOAT16, Direction.FORWARD)}


def test_tf32_reaches_float32_rows_only() -> None:
    for entry in load_suite("wild").problems(math="tf32"):
        single = entry.problem.x.dtype is DataType.FLOAT32
        assert entry.problem.math is (MathMode.TF32 if single else MathMode.IEEE)


def test_tf32_with_another_dtype_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match="math=tf32 needs float32"):
        load_suite("resnet50").problems(math="tf32", dtype="float16")


def test_unknown_suite_names_the_known() -> None:
    with pytest.raises(InvalidOptionError, match=r"'resnet5' is unknown: known are .*resnet50"):
        load_suite("resnet5")
    with pytest.raises(InvalidOptionError, match="neither a file nor a shipped suite"):
        load("no/such.csv")


def test_equal_rows_are_one_problem_with_the_sum_of_their_counts(tmp_path: Path) -> None:
    table = write(tmp_path / "mine.csv", _HEADER, _ROW, _ROW.replace("conv1", "conv2"))
    (entry,) = load(str(table)).problems()
    assert (entry.suite, entry.layer, entry.count) == ("mine", "conv1", 4)


def test_short_table(tmp_path: Path) -> None:
    table = write(tmp_path / "mine.csv", "\ufeffn, c, h, w, k, fy, fx", "", "2, 3, 8, 9, 4, 3, 1")
    (entry,) = load_csv(table).problems(directions=["backward_data"])
    assert entry.problem.network_config == "conv2d-backward_data-n2-c3-i8x9-k4-f3x1-float32-NCHW"
    assert (entry.suite, entry.layer, entry.count) == ("mine", "line 3", 1)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], ["is empty: its first line names the columns"]),
        ([_HEADER.replace("fy,", "")], ["line 1", "column 'fy' is missing"]),
        ([_HEADER.replace("fy", "r")], ["line 1", "column 'r' is unknown", "fy"]),
        (["conv -n 1 -c 4"], ["line 1", "this is a driver line", "--lines"]),
        (["./bin/MIOpenDriver conv -n 1, -c 4"], ["line 1", "this is a driver line", "--lines"]),
        (["n,c,d,h,w,k,fy,fx"], ["line 1", "column 'fz' is missing"]),
        (["n,n,c,h,w,k,fy,fx"], ["line 1", "stands twice"]),
        ([_HEADER, _ROW, _ROW + ",1"], ["line 3", "18 values for 17 columns"]),
        ([_HEADER, _ROW.replace(",16,", ",x,")], ["line 2", "column k", "'x'", "at least 1"]),
        ([_HEADER, _ROW.replace(",16,", ",,")], ["line 2", "column k", "''"]),
        ([_HEADER, _ROW.replace(",16,", ",0,")], ["line 2", "column k", "'0'", "at least 1"]),
        ([_HEADER, "mine,conv1,1,3,8,8,16,3,3,-1,1,1,1,1,1,1,2"], ["line 2", "column pad_h", "'-1'", "at least 0"]),
        ([_HEADER, "mine,conv1,1,3,8,8,16,9,3,0,1,1,1,1,1,1,2"], ["line 2", "filter size 9"]),
        ([_HEADER, "mine,conv1,1,3,8,8,16,3,3,1,1,1,1,1,1,2,2"], ["line 2", "groups=2", "c=3"]),
        (["n,c,h,w,k,fy,fx,dtype", "1,1,1,1,1,1,1,INT8"], ["line 2", "column dtype", "'INT8'"]),
        (["n,c,h,w,k,fy,fx,direction", "1,1,1,1,1,1,1,D"], ["line 2", "column direction", "'D'"]),
        (["n,c,h,w,k,fy,fx,layout", "1,1,1,1,1,1,1,NCDHW"], ["line 2", "layout=NCDHW"]),
        (["problem,n", "x,1"], ["line 1", "column 'n' is unknown", "problem"]),
        (["problem", "conv2d-forward"], ["line 2", "column problem", "conv2d-forward"]),
        (["spatial_dims,n,c,h,w,k,fy,fx", "3,1,1,1,1,1,1,1"], ["line 2", "column spatial_dims", "'3'"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_table_names_file_line_column_and_value(tmp_path: Path, lines: list[str], words: list[str]) -> None:
    table = write(tmp_path / "mine.csv", *lines)
    with pytest.raises(InvalidProblemError) as caught:
        load_csv(table)
    assert [word for word in [str(table), *words] if word not in str(caught.value)] == []


def test_what_is_saved_is_read_back_whole(tmp_path: Path) -> None:
    """Whatever a problem has that the columns of sizes cannot say: one dimension, mixed layouts, TF32, an epilogue."""
    problems = [
        "conv1d-forward-n2-c4-i9-k6-f3-p2_0-float32-NCW-tf32",
        "conv2d-backward_weights-n1-c3-i8x8-k4-f3x3-s2x1-float16.float32.float16-NHWC.NCHW.NHWC",
        "conv3d-forward-n1-c4-i4x5x6-k8-f3x3x3-p1x1x1-g2-bfloat16-NDHWC-e.bias.relu",
    ]
    rows = [
        SuiteRow(problem=problem, suite="net", layer='a,"b"', count=3, directions=(problem.direction,))
        for problem in map(ProblemDescription.from_network_config, problems)
    ]
    both = replace(rows[0], layer="all", directions=(Direction.FORWARD, Direction.BACKWARD_DATA))
    suite = Suite(name="net", rows=(*rows, both))
    csv, lines = tmp_path / "net.csv", tmp_path / "net.txt"
    save_csv(suite, csv)
    save_lines(suite, lines)
    read = load(str(csv))
    assert read.rows[:3] == tuple(rows)
    assert [(row.layer, row.directions) for row in read.rows[3:]] == [("all", (d,)) for d in both.directions]
    assert [row.problem for row in load(str(lines)).rows] == [row.problem for row in read.rows]
    with pytest.raises(InvalidOptionError, match="cannot be written"):
        save_csv(suite, tmp_path / "none" / "net.csv")


@pytest.mark.parametrize("read", [load_csv, load_lines])
def test_unreadable_file(tmp_path: Path, read: object) -> None:
    assert callable(read)
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidOptionError, match="binary cannot be read: it is no text in UTF-8"):
        read(tmp_path / "binary")


@pytest.mark.parametrize("read", [load_csv, load_lines, load])
def test_what_is_no_text_is_told_apart(tmp_path: Path, read: Callable[[str], object]) -> None:
    """A FindDB was "'utf-8' codec can't decode byte 0xfd", a folder no shipped suite, and nothing said what to do."""
    (tmp_path / "own.db").write_bytes(b"SQLite format 3\0" + b"\xfd" * 99)
    with pytest.raises(InvalidOptionError, match=r"own.db cannot be read: it is an SQLite database, as FindDBs are"):
        read(str(tmp_path / "own.db"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidOptionError, match="name a file in it"):
        read(str(tmp_path / "folder"))
    if read is not load:
        with pytest.raises(InvalidOptionError, match="No such file or directory: correct the path"):
            read(str(tmp_path / "none"))


def test_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "lines.txt", "# mine", "", "conv -n 4 -F 3", "./bin/MIOpenDriver convfp16 -n 2 -F 4")
    problems = load(str(path)).problems()
    expected = [*parse_driver_line("conv -n 4 -F 3"), *parse_driver_line("convfp16 -n 2 -F 4")]
    assert [entry.problem for entry in problems] == expected
    assert [entry.layer for entry in problems] == ["line 3", "line 3", "line 4"]
    assert [entry.count for entry in load_lines(path).problems(dtype="float32", directions=["forward"])] == [1, 1]


def test_a_line_of_three_directions_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 80,000 took most of a minute: each problem was made anew a direction, and again for the suite."""
    lines = [f"MIOpenDriver conv -n {n} -c 8 -k 8 -F {n % 8} -m {'conv' if n < 40 else 'trans'}" for n in range(1, 80)]
    expected = [problem for line in lines for problem in parse_driver_line(line)]
    made = []
    convolution = ProblemDescription.convolution
    counted = staticmethod(lambda **arguments: made.append(1) or convolution(**arguments))
    monkeypatch.setattr(ProblemDescription, "convolution", counted)
    found = load_lines(write(tmp_path / "lines.txt", *lines)).problems()
    assert [entry.problem for entry in found] == expected
    assert len(made) == len(lines)


def test_bad_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "lines.txt", "# mine", "conv -n 4", "conv -n x")
    with pytest.raises(InvalidProblemError, match=r"lines.txt, line 3: --batchsize \(-n\) 'x'"):
        load_lines(path)


@pytest.mark.parametrize("name", ["wild", "wild_3d", "yardstick"])
def test_suites_can_be_written_as_lines(tmp_path: Path, name: str) -> None:
    problems = [entry.problem for entry in load_suite(name).problems()]
    path = write(tmp_path / "lines.txt", *map(driver_line, problems))
    assert [entry.problem for entry in load_lines(path).problems()] == problems


def convolution(x: tuple[int, ...], w: tuple[int, ...], **arguments: object) -> ProblemDescription:
    return ProblemDescription.convolution(x=x, w=w, **arguments)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (convolution((8, 32, 14, 14), (32, 1, 7, 7), groups=32, padding=3), "depthwise"),
        (convolution((8, 32, 31, 31), (64, 1, 3, 31), groups=32), "depthwise large"),
        (convolution((8, 32, 14, 14), (32, 2, 3, 3), groups=16), "grouped"),
        (convolution((8, 3, 14, 14), (32, 3, 1, 1)), "first layer"),
        (convolution((1, 32, 14, 14), (32, 32, 3, 3), dilation=2), "dilated"),
        (convolution((1, 32, 14, 14), (32, 32, 1, 1), stride=2), "1x1"),
        (convolution((2, 32, 14, 14), (32, 32, 3, 3)), "small batch"),
        (convolution((3, 32, 14, 14), (32, 32, 3, 3)), "3x3"),
        (convolution((3, 32, 4, 14, 14), (32, 32, 3, 3, 3)), "3x3"),
        (convolution((3, 32, 14, 14), (32, 32, 3, 5)), "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.network_config,
)
def test_class_is_the_first_that_fits(problem: ProblemDescription, expected: str) -> None:
    assert problem_class(problem) == expected


def test_yardstick_has_every_class() -> None:
    counts = Counter(problem_class(entry.problem) for entry in load_suite("yardstick").problems())
    assert set(counts) == set(PROBLEM_CLASSES)
