"""Arrays of other libraries: layouts from strides, strict checks, allocation."""

from __future__ import annotations

import numpy as np
import pytest

from miofind.arrays import arrays, operands
from miofind.core.problem import DataType, Layout, ProblemDescription, TensorDescriptor
from miofind.errors import InvalidArrayError, InvalidOptionError, WorkspaceError

NHWC = TensorDescriptor(shape=(2, 3, 4, 5), dtype=DataType.FLOAT32, layout=Layout.NHWC)


def channels_last(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    n, c, *spatial = shape
    return np.zeros((n, *spatial, c), dtype).transpose(0, len(shape) - 1, *range(1, len(shape) - 1))


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((2, 3, 4, 5)), (Layout.NCHW,)),
        (channels_last((2, 3, 4, 5)), (Layout.NHWC,)),
        (np.zeros((2, 1, 4, 5)), (Layout.NCHW, Layout.NHWC)),
        (np.zeros((2, 3, 1, 1)), (Layout.NCHW, Layout.NHWC)),
        (np.zeros((2, 3, 4)), (Layout.NCW,)),
        (channels_last((2, 3, 4, 5, 6)), (Layout.NDHWC,)),
        (np.zeros((2, 3, 4, 10))[..., ::2], ()),
        (np.zeros((2, 3)), ()),
    ],
    ids=["nchw", "nhwc", "one-channel", "one-pixel", "1d", "3d", "gaps", "matrix"],
)
def test_layouts_of(array: np.ndarray, expected: tuple[Layout, ...]) -> None:
    strides = tuple(step // array.itemsize for step in array.strides)
    assert arrays.layouts_of(array.shape, strides) == expected


def test_ambiguous_tensor_follows_its_peers() -> None:
    problem = ProblemDescription.from_arrays(x=channels_last((2, 8, 5, 5)), w=np.zeros((4, 8, 1, 1), np.float32))
    assert {problem.x.layout, problem.w.layout, problem.y.layout} == {Layout.NHWC}


def test_ambiguous_tensors_alone_are_channels_first() -> None:
    problem = ProblemDescription.from_arrays(x=np.zeros((2, 1, 5, 5)), w=np.zeros((4, 1, 1, 1)))
    assert problem.x.layout is Layout.NCHW


def test_output_decides_its_own_layout() -> None:
    out = np.zeros((2, 6, 3, 3), np.float32)
    problem = ProblemDescription.from_arrays(x=channels_last((2, 8, 5, 5)), w=channels_last((6, 8, 3, 3)), out=out)
    assert (problem.x.layout, problem.y.layout) == (Layout.NHWC, Layout.NCHW)


def test_from_arrays_directions() -> None:
    x, w, dy = np.zeros((2, 8, 5, 5)), np.zeros((6, 8, 3, 3)), np.zeros((2, 6, 3, 3))
    assert ProblemDescription.from_arrays(x=x, w=w).direction == "forward"
    assert ProblemDescription.from_arrays(dy=dy, w=w, x_shape=(2, 8, 5, 5)).direction == "backward_data"
    assert ProblemDescription.from_arrays(dy=dy, x=x, w_shape=(6, 8, 3, 3)).direction == "backward_weights"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": np.zeros((2, 8, 5, 5))}, "pass x and w"),
        ({"dy": np.zeros((2, 6, 3, 3)), "w": np.zeros((6, 8, 3, 3))}, "x_shape"),
        ({"x": np.zeros((2, 8, 5, 5), int), "w": np.zeros((6, 8, 3, 3))}, "dtype int64"),
        ({"x": np.zeros((2, 8, 5, 10))[..., ::2], "w": np.zeros((6, 8, 3, 3))}, "contiguous copy"),
        ({"x": [[1.0]], "w": np.zeros((6, 8, 3, 3))}, "x is a list"),
        ({"x": np.zeros((2, 8, 5, 5)), "w": np.zeros((6, 8, 3, 3)), "out": np.zeros((1, 6, 3, 3))}, "out|y has shape"),
    ],
    ids=["one-array", "no-x-shape", "int", "gaps", "list", "wrong-out"],
)
def test_from_arrays_refuses(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProblemDescription.from_arrays(**given)


def test_allocate_has_shape_dtype_and_layout() -> None:
    made = arrays.allocate(np.zeros(1), NHWC, -1)
    assert made.shape == NHWC.shape
    assert tuple(step // 4 for step in made.strides) == NHWC.strides


def test_check_accepts_any_stride_of_a_size_one_dimension() -> None:
    tensor = TensorDescriptor(shape=(1, 3, 4, 1), dtype=DataType.FLOAT32)
    odd = np.lib.stride_tricks.as_strided(np.zeros(12, np.float32), (1, 3, 4, 1), (999, 16, 4, 777))
    assert operands.strict_check("x", tensor, -1, 2)(odd) is odd


def test_check_refuses_strides_of_no_whole_elements() -> None:
    tensor = TensorDescriptor(shape=(1, 1, 1, 3), dtype=DataType.FLOAT32)
    field = np.zeros((1, 1, 1, 3), [("a", "f4"), ("b", "u1")])["a"]
    with pytest.raises(InvalidArrayError, match=r"x has strides .*5\) \(bytes\), no multiples of its elements' 4"):
        operands.strict_check("x", tensor, -1, 2)(field)
    with pytest.raises(InvalidArrayError, match="dtype"):
        operands.strict_check("x", tensor, -1, 2)(np.zeros((1, 1, 1, 3), "V0"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (channels_last((2, 3, 4, 6)), r"x has shape \(2, 3, 4, 6\), the problem wants \(2, 3, 4, 5\)"),
        (np.zeros((2, 4, 5, 3), np.float32), r"wants \(2, 3, 4, 5\): .*x.transpose\(0, 3, 1, 2\), in PyTorch"),
        (np.zeros((2, 3, 4), np.float32), r"wants \(2, 3, 4, 5\): .*from_arrays"),
        (channels_last((2, 3, 4, 5), "float16"), "x has dtype float16, the problem wants float32: convert it"),
        (np.zeros((2, 3, 4, 5), np.float32), "x has strides .* NHWC wants"),
        ("text", "x is a str"),
        (None, "x is missing"),
    ],
    ids=["shape", "order", "dimensions", "dtype", "strides", "str", "none"],
)
def test_check_refuses(array: object, message: str) -> None:
    with pytest.raises(InvalidArrayError, match=message):
        operands.strict_check("x", NHWC, -1, 2)(array)


def test_check_refuses_host_memory_on_a_gpu() -> None:
    with pytest.raises(InvalidArrayError, match="x is on the host, the solution runs on cuda:0"):
        operands.strict_check("x", NHWC, 0, 16)(channels_last((2, 3, 4, 5)))


def test_workspace_too_small() -> None:
    with pytest.raises(WorkspaceError, match="has 8 bytes, the solution needs 16"):
        operands.workspace_address(np.empty(8, np.uint8), 16, -1)


def test_workspace_not_contiguous() -> None:
    with pytest.raises(WorkspaceError, match="not contiguous"):
        operands.workspace_address(np.empty(64, np.uint8)[::2], 16, -1)


def test_stream_of_an_unknown_kind() -> None:
    with pytest.raises(InvalidOptionError, match="is no stream"):
        operands.stream_address("legacy")


def test_torch_tensors_on_the_host() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    v = arrays.view(tensor, "x")
    assert (v.dtype, v.shape, v.strides) == (DataType.BFLOAT16, NHWC.shape, NHWC.strides)
    assert np.array_equal(v.host.astype(np.float32), tensor.float().numpy())
    needs_grad = torch.zeros(2, 3, 4, 5, requires_grad=True)
    with pytest.raises(InvalidArrayError, match=r"no_grad\(\) or pass x.detach"):
        arrays.view(needs_grad, "x")
    with torch.no_grad():
        arrays.view(needs_grad, "x")
