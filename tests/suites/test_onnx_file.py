"""Convolutions of ONNX graphs: what a node computes is what its problem computes, and what is no model is one error."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from helpers.commands.cli_runner import run, run_json, use_own_folders
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from miofind.core.problem import Direction
from miofind.errors import InvalidOptionError
from miofind.reference.convolution import reference_on_host
from miofind.suites.onnx_file import load_onnx

X, W = (2, 4, 9, 8), (6, 4, 3, 3)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": (X, W, {}),
    "asymmetric": (X, W, {"pads": [0, 1, 2, 3], "strides": [2, 1]}),
    "same upper": (X, W, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": (X, W, {"auto_pad": "SAME_LOWER", "strides": [2, 2], "kernel_shape": [3, 3]}),
    "valid": (X, W, {"auto_pad": "VALID", "dilations": [2, 1]}),
    "grouped": (X, (6, 2, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "1-D": ((2, 4, 9), (6, 4, 3), {"pads": [2, 0], "dilations": [2]}),
    "3-D": ((1, 2, 4, 5, 6), (3, 2, 2, 3, 3), {"pads": [0, 1, 1, 0, 1, 1]}),
}
# Attributes of a transposed node, and what is cut off PyTorch's unpadded output in front and behind.
TRANSPOSED: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "plain": ({}, [(0, 0), (0, 0)]),
    "padded": ({"strides": [2, 1], "pads": [1, 0, 0, 2]}, [(1, 0), (0, 2)]),
    "output padding": ({"strides": [2, 2], "output_padding": [1, 1], "pads": [1] * 4}, [(1, 1), (1, 1)]),
    "grouped": ({"group": 2, "strides": [2, 2], "dilations": [1, 2]}, [(0, 0), (0, 0)]),
    "shaped": ({"strides": [2, 2], "output_shape": [18, 16]}, [(1, 0), (1, 0)]),
    "same upper": ({"strides": [2, 2], "auto_pad": "SAME_UPPER"}, [(0, 1), (0, 1)]),
    "same lower": ({"strides": [2, 2], "auto_pad": "SAME_LOWER"}, [(1, 0), (1, 0)]),
    "shaped, same upper": (
        {"strides": [2, 2], "auto_pad": "SAME_UPPER", "output_shape": [16, 17]},
        [(1, 2), (0, 0)],
    ),
}


def save(
    path: Path, nodes: list[Any], *, x: Any = X, weights: dict[str, Any], x_dtype: int = TensorProto.FLOAT
) -> Path:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", x_dtype, x)],
        [helper.make_tensor_value_info(nodes[-1].output[0], x_dtype, None)],
        [onnx.numpy_helper.from_array(values, name) for name, values in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def conv(x: str = "x", w: str = "w", y: str = "y", op: str = "Conv", **attributes: Any) -> Any:
    return helper.make_node(op, [x, w], [y], name=f"/{y}/Conv", **attributes)


def floats(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_a_node_s_problem_computes_what_the_node_does(case: str, tmp_path: Path) -> None:
    x_shape, w_shape, attributes = CASES[case]
    x, w = floats(x_shape), floats(w_shape)
    path = save(tmp_path / "net.onnx", [conv(**attributes)], x=x_shape, weights={"w": w})
    found = load_onnx(path)
    (row,) = found.suite.rows
    assert (found.left_out, found.warning, row.layer, row.count) == ((), "", "/y/Conv", 1)
    assert row.directions == (Direction.FORWARD,)
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    np.testing.assert_array_equal(reference_on_host(row.problem, x=x, w=w), expected)


@pytest.mark.parametrize("case", TRANSPOSED)
def test_a_transposed_node_is_backward_data(case: str, tmp_path: Path) -> None:
    attributes, cut = TRANSPOSED[case]
    x, w = floats(X), floats((4, 3, 3, 3))
    path = save(tmp_path / "net.onnx", [conv(op="ConvTranspose", **attributes)], weights={"w": w})
    (row,) = load_onnx(path).suite.rows
    assert row.directions == (Direction.BACKWARD_DATA,)
    whole = torch.nn.functional.conv_transpose2d(
        torch.from_numpy(x),
        torch.from_numpy(w),
        stride=attributes.get("strides", 1),
        output_padding=attributes.get("output_padding", 0),
        groups=attributes.get("group", 1),
        dilation=attributes.get("dilations", 1),
    ).numpy()
    kept = (slice(front, size - behind) for (front, behind), size in zip(cut, whole.shape[2:], strict=True))
    np.testing.assert_array_equal(reference_on_host(row.problem, y=x, w=w), whole[:, :, *kept])


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal convolutions, a large one behind a reshape, and one in each branch of an If; sizes are symbolic."""
    large = np.zeros((64, 8, 3, 3), np.float32)
    branch = helper.make_graph(
        [helper.make_node("Conv", ["d", "w"], ["inner"], name="inner", pads=[1] * 4)],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    nodes = [
        conv("x", "w", "a", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        conv("b", "w", "c", pads=[1] * 4),
        helper.make_node("Reshape", ["c", "shape"], ["r"]),
        conv("r", "large", "s", strides=[2, 2]),
        helper.make_node("Reshape", ["c", "back"], ["d"]),
        helper.make_node("If", ["flag"], ["e"], then_branch=branch, else_branch=branch),
    ]
    weights = {
        "w": np.zeros((4, 4, 3, 3), np.float32),
        "large": large,
        "shape": np.array([0, 8, -1, 6]),
        "back": np.array([0, 4, 0, 6]),
        "flag": np.array(True),
    }
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    return save(path, nodes, x=("batch", 4, "height", 6), weights=weights)


def test_symbolic_sizes_are_given(network: Path) -> None:
    found = load_onnx(network, sizes={"batch": 5, "height": 8}).suite
    assert [(each.layer, each.count) for each in found.problems()] == [("/a/Conv", 4), ("/s/Conv", 1)]
    assert [each.problem.network_config for each in found.problems(dtype="float16", layout="NHWC")] == [
        "conv2d-forward-n5-c4-i8x6-k4-f3x3-p1x1-float16-NHWC",
        "conv2d-forward-n5-c8-i4x6-k64-f3x3-s2x2-float16-NHWC",
    ]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, ["batch, height", "give a number"]),
        ({"batch": 5}, ["height"]),
        ({"batch": 5, "heigth": 8}, ["'heigth'", "height?"]),
        ({"batch": 0, "height": 8}, ["sizes['batch']=0"]),
        ({"batch": 1.5, "height": 8}, ["sizes['batch']=1.5"]),
    ],
)
def test_sizes_that_do_not_fit_are_named(network: Path, sizes: Any, words: list[str]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        load_onnx(network, sizes=sizes)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_size_without_a_name_is_called_by_its_place(tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", [conv()], x=(None, 4, 9, 8), weights={"w": floats(W)})
    with pytest.raises(InvalidOptionError, match=r"x\.0"):
        load_onnx(path)
    assert load_onnx(path, sizes={"x.0": 7}).suite.rows[0].problem.n == 7


def test_what_miofind_has_not_is_left_out_and_told(tmp_path: Path) -> None:
    nodes = [
        conv(y="good"),
        conv(y="strange", strides=[0, 1]),
        conv(y="large", kernel_shape=[5, 5]),
        conv(y="padded", auto_pad="EVEN"),
        conv(y="grouped", group=3),
        conv(y="far", pads=[2**62] * 4),
        helper.make_node("Conv", ["x"], ["alone"], name="alone"),
    ]
    found = load_onnx(save(tmp_path / "net.onnx", nodes, weights={"w": floats(W)}))
    assert [row.layer for row in found.suite.rows] == ["/good/Conv"]
    assert len(found.left_out) == 6
    assert "net: 6 of 7 convolutions are left out: /strange/Conv: its strides" in found.warning
    integers = save(tmp_path / "int.onnx", [conv()], weights={"w": floats(W)}, x_dtype=TensorProto.INT8)
    assert "INT8" in load_onnx(integers).warning


def test_files_that_are_no_models_are_one_error(tmp_path: Path, network: Path) -> None:
    content = network.read_bytes()
    for name, damaged in {
        "empty": b"",
        "text": b"suite,layer\n1,2\n",
        "cut": content[: len(content) // 2],
        "noise": np.random.default_rng(2).bytes(5000),
        "zeros": bytes(5000),
    }.items():
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(damaged)
        with pytest.raises(InvalidOptionError, match=rf"{name}\.onnx"):
            load_onnx(path)
    with (tmp_path / "vast.onnx").open("wb") as vast:
        vast.truncate(1 << 32)
    with pytest.raises(InvalidOptionError, match=r"vast\.onnx has more than"):
        load_onnx(tmp_path / "vast.onnx")
    with pytest.raises(InvalidOptionError, match="No such file"):
        load_onnx(tmp_path / "none.onnx")


def test_names_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", [conv(x="gone")], weights={"w": floats(W)})
    path.write_bytes(path.read_bytes().replace(b"gone", b"go\xff\xfe"))
    assert "left out" in load_onnx(path).warning
    path = save(tmp_path / "net.onnx", [conv()], x=("many", 4, 9, 8), weights={"w": floats(W)})
    path.write_bytes(path.read_bytes().replace(b"many", b"ma\xff\xfe"))
    with pytest.raises(InvalidOptionError, match="ma"):
        load_onnx(path)


def test_flipped_bytes_end_in_problems_or_in_an_error(tmp_path: Path, network: Path) -> None:
    path, random = tmp_path / "net.onnx", np.random.default_rng(3)
    content = network.read_bytes()
    tail = len(content) - 1200  # beside the large weights, whose values nobody reads
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(0, 2400, 3):
            damaged[place if place < 1200 else tail + place - 1200] = random.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(InvalidOptionError):
            load_onnx(path, sizes={"batch": 5, "height": 8})


def test_commands_take_networks(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)
    words = ["tune", "--suite", str(network), "--device", "cpu", "--dry-run"]
    assert "batch, height" in run(*words, code=2).stderr
    assert "NAME=N" in run(*words, "--size", "batch", code=2).stderr
    assert "--suite FILE.onnx" in run("tune", "--suite", "resnet50", "--size", "batch=2", code=2).stderr
    assert run_json(*words, "--size", "batch=5", "--size", "height=8")["forecasts"][0]["problems"] == 2
