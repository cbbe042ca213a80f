"""Problems as values: what is accepted, what is refused and with which words, what is derived."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from helpers.problems.problem_strategies import problems, refusal
from hypothesis import given

from miofind.core.problem import (
    ConvolutionDescriptor,
    DataType,
    Direction,
    Layout,
    MathMode,
    ProblemDescription,
    Role,
    TensorDescriptor,
)
from miofind.errors import InvalidProblemError


def convolution(**arguments: object) -> ProblemDescription:
    return ProblemDescription.convolution(**{"x": (2, 8, 9, 7), "w": (6, 8, 3, 3), **arguments})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": (1, 4)}, ["x=(1, 4)", "3 to 5 dimensions"]),
        ({"x": (1, 4, 2, 2, 2, 2)}, ["x=(1, 4, 2, 2, 2, 2)", "3 to 5 dimensions"]),
        ({"x": 7}, ["x=7", "sequence"]),
        ({"x": "1488"}, ["x='1488'", "sequence"]),
        ({"x": (0, 4, 8, 8)}, ["x[0]=0", "between 1"]),
        ({"x": (1, 4, -8, 8)}, ["x[2]=-8", "between 1"]),
        ({"x": (1, 4, 8.0, 8)}, ["x[2]=8.0", "integer"]),
        ({"x": (True, 4, 8, 8)}, ["x[0]=True", "not a bool"]),
        ({"x": (2**31, 4, 8, 8)}, ["x[0]=2147483648", "2147483647"]),
        ({"x": (2**30, 4, 2**20, 8)}, ["shape=", "bytes", "limit"]),
        ({"w": (4, 4, 3)}, ["w=(4, 4, 3)", "4 dimensions", "x=(1, 4, 8, 8)"]),
        ({"w": (4, 3, 3, 3)}, ["w=(4, 3, 3, 3)", "3 channels", "wants 4"]),
        ({"w": (4, 4, 9, 3)}, ["filter size 9", "dimension 0", "padded input is 8"]),
        ({"dilation": (1, 4)}, ["dilation 4", "spans 9", "dimension 1"]),
        ({"groups": 3}, ["groups=3", "c=4"]),
        ({"groups": 0}, ["groups=0", "between 1"]),
        ({"groups": 4, "w": (6, 1, 3, 3)}, ["groups=4", "k=6"]),
        ({"padding": -1}, ["padding=-1", "between 0"]),
        ({"padding": (1, 1, 1)}, ["padding=(1, 1, 1)", "2 entries"]),
        ({"padding": ((1, 2),)}, ["padding=((1, 2),)", "2 (before, after) pairs"]),
        ({"padding": ((1, 2, 3), (0, 0))}, ["padding[0]=(1, 2, 3)", "2 entries"]),
        ({"padding": ((1, -2), (0, 0))}, ["padding[0][1]=-2", "between 0"]),
        ({"padding": "sam"}, ["padding='sam'", "'same', 'valid'", "Did you mean same"]),
        ({"padding": "same", "stride": 2}, ["padding='same'", "stride 1, not 2"]),
        ({"dtype": "float"}, ["dtype='float'", "float64 in NumPy"]),
        ({"dtype": np.dtype(">f4")}, ["dtype='>f4'", "bfloat16"]),
        ({"dtype": int}, ["dtype='int64'", "bfloat16"]),
        ({"stride": 0}, ["stride=0", "between 1"]),
        ({"stride": (1, 0)}, ["stride[1]=0", "between 1"]),
        ({"stride": None}, ["stride=None", "integer"]),
        ({"dilation": 0}, ["dilation=0", "between 1"]),
        ({"direction": "sideways"}, ["direction='sideways'", "backward_weights"]),
        ({"dtype": "int8"}, ["dtype='int8'", "bfloat16"]),
        ({"dtype": {"x": "float16"}}, ["dtype=", "keys x, w and y"]),
        ({"dtype": {"x": "float64", "w": "float32", "y": "float64"}}, ["dtype", "float64", "float32"]),
        ({"layout": "CHWN"}, ["layout='CHWN'", "NHWC"]),
        ({"layout": "NDHWC"}, ["layout=NDHWC", "wants 5"]),
        ({"math": "fast"}, ["math='fast'", "tf32"]),
        ({"math": "tf32", "dtype": "float16"}, ["math=tf32", "float32", "float16"]),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_refusal_names_field_and_value(arguments: dict[str, object], words: list[str]) -> None:
    message = refusal(**arguments)
    assert message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("dtype", "spellings"),
    [
        ("float64", ["float64", "double", "fp64", "f8", "d", float, np.float64, np.dtype("<f8")]),
        ("float32", ["Float32", "single", "fp32", "<f4", "f", np.float32, np.dtype("f4")]),
        ("float16", ["float16", "half", "fp16", "=f2", "e", "torch.float16", np.float16, np.dtype("e")]),
        ("bfloat16", ["bfloat16", "bf16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), DataType.BFLOAT16]),
    ],
)
def test_every_spelling_of_a_dtype(dtype: str, spellings: list[object]) -> None:
    torch = pytest.importorskip("torch")
    for spelling in (*spellings, getattr(torch, dtype)):
        problem = convolution(dtype=spelling)
        assert problem.network_config == convolution(dtype=dtype).network_config, spelling
        assert TensorDescriptor(shape=(1, 2, 3, 4), dtype=spelling).dtype is DataType(dtype)


@pytest.mark.parametrize(("taps", "dilation"), [((3, 3), 1), ((4, 1), (1, 3)), ((2, 5), (3, 2))])
def test_same_padding_is_pytorchs(taps: tuple[int, int], dilation: object) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Conv2d(2, 2, taps, padding="same", dilation=dilation)
    left, right, top, bottom = layer._reversed_padding_repeated_twice
    problem = ProblemDescription.convolution(x=(1, 2, 9, 7), w=(2, 2, *taps), padding="same", dilation=dilation)
    assert (problem.conv.pad_before, problem.conv.pad_after) == ((top, left), (bottom, right))
    assert problem.out_spatial == problem.spatial
    assert convolution(padding="valid") == convolution(padding=0)


def test_output_tensor_must_fit() -> None:
    problem = convolution()
    y = TensorDescriptor(shape=(2, 6, 7, 6))
    with pytest.raises(InvalidProblemError, match=r"y=\(2, 6, 7, 6\) must be \(2, 6, 7, 5\)"):
        ProblemDescription(x=problem.x, w=problem.w, y=y, conv=problem.conv)


def test_descriptors_of_different_rank_are_refused() -> None:
    problem = convolution()
    conv = ConvolutionDescriptor.of(3)
    with pytest.raises(InvalidProblemError, match=r"x=\(2, 8, 9, 7\) must have 5 dimensions"):
        ProblemDescription(x=problem.x, w=problem.w, y=problem.y, conv=conv)


def test_shapes_follow_from_the_definition() -> None:
    problem = convolution(padding=((1, 0), (2, 3)), stride=(2, 3), dilation=(1, 2), groups=2, w=(6, 4, 3, 3))
    assert problem.out_spatial == ((9 + 1 - 3) // 2 + 1, (7 + 5 - 5) // 3 + 1)
    assert problem.y.shape == (2, 6, *problem.out_spatial)
    assert (problem.n, problem.c, problem.k, problem.groups) == (2, 8, 6, 2)
    assert (problem.spatial, problem.filter, problem.spatial_dims) == ((9, 7), (3, 3), 2)


@pytest.mark.parametrize(
    ("direction", "output", "inputs", "reduction_length"),
    [
        ("forward", "y", ("x", "w"), 8 * 9),
        ("backward_data", "x", ("y", "w"), 6 * 9),
        ("backward_weights", "w", ("y", "x"), 2 * 7 * 5),
    ],
)
def test_direction_decides_tensors_and_reduction(
    direction: str, output: str, inputs: tuple[str, str], reduction_length: int
) -> None:
    problem = convolution(direction=direction)
    assert problem.direction.output == output
    assert problem.direction.inputs == inputs
    assert problem.output is problem.tensor(output)
    assert problem.reduction_length == reduction_length


@pytest.mark.parametrize("direction", Direction)
def test_operands_keep_their_order_and_the_direction_decides_their_roles(direction: Direction) -> None:
    problem = convolution(direction=direction)
    assert [(operand.name, operand.tensor) for operand in problem.operands] == [
        ("x", problem.x),
        ("w", problem.w),
        ("y", problem.y),
    ]
    assert [operand.name for operand in problem.operands if operand.role is Role.OUTPUT] == [direction.output]
    assert tuple(operand.name for operand in problem.inputs) == direction.inputs
    turned = problem.in_direction(Direction.BACKWARD_WEIGHTS)
    assert [operand.is_input for operand in turned.operands] == [True, False, True]


def test_a_tensor_that_is_no_operand_is_not_there() -> None:
    with pytest.raises(KeyError, match="bias"):
        convolution().tensor("bias")


def test_flops_and_bytes() -> None:
    problem = convolution(groups=2, w=(6, 4, 3, 3), dtype={"x": "float16", "w": "float16", "y": "float32"})
    assert problem.flops == 2 * (2 * 6 * 7 * 5) * 4 * 9
    assert problem.bytes == 2 * (2 * 8 * 9 * 7) + 2 * (6 * 4 * 9) + 4 * (2 * 6 * 7 * 5)


@pytest.mark.parametrize(
    ("layout", "strides"),
    [("NCHW", (504, 63, 7, 1)), ("NHWC", (504, 1, 56, 8))],
)
def test_strides_follow_the_layout(layout: str, strides: tuple[int, ...]) -> None:
    assert convolution(layout=layout).x.strides == strides


def test_layouts_of_every_rank() -> None:
    for layout in Layout:
        assert Layout.of(layout.spatial_dims, channels_last=layout.channels_last) is layout


def test_names_ignore_case_and_become_enums() -> None:
    problem = convolution(direction="FORWARD", dtype="Float32", layout="nhwc", math="TF32")
    assert problem.direction is Direction.FORWARD
    assert (problem.x.dtype, problem.x.layout, problem.math) == (DataType.FLOAT32, Layout.NHWC, MathMode.TF32)


@pytest.mark.parametrize(
    ("padding", "before", "after"),
    [
        (1, (1, 1), (1, 1)),
        ((1, 2), (1, 2), (1, 2)),
        ([1, 2], (1, 2), (1, 2)),
        (((1, 2), (0, 3)), (1, 0), (2, 3)),
    ],
    ids=str,
)
def test_forms_of_padding(padding: object, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    conv = convolution(padding=padding).conv
    assert (conv.pad_before, conv.pad_after) == (before, after)


def test_1x1_means_one_tap_and_no_padding() -> None:
    assert convolution(w=(6, 8, 1, 1), stride=2).is_1x1
    assert not convolution(w=(6, 8, 1, 1), padding=1).is_1x1
    assert not convolution().is_1x1


def test_equal_problems_are_one_key() -> None:
    first, second = convolution(padding=1), convolution(padding=((1, 1), (1, 1)))
    assert first == second
    assert len({first, second, convolution()}) == 2
    assert first != str(first)


def test_a_numpy_integer_is_a_size() -> None:
    numpy = pytest.importorskip("numpy")
    assert convolution(x=tuple(numpy.array([2, 8, 9, 7]))) == convolution()


@given(problems())
def test_lifting_keeps_memory_and_arithmetic(problem: ProblemDescription) -> None:
    lifted = problem.lifted(3)
    extra = 3 - problem.spatial_dims
    assert lifted.out_spatial == (1,) * extra + problem.out_spatial
    assert (lifted.flops, lifted.bytes) == (problem.flops, problem.bytes)
    assert lifted.reduction_length == problem.reduction_length
    for name in "xwy":
        kept = lifted.tensor(name).strides[:2] + lifted.tensor(name).strides[2 + extra :]
        assert kept == problem.tensor(name).strides
    assert problem.lifted(problem.spatial_dims) is problem


def test_lifting_downwards_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot lift 2 spatial dimensions to 1"):
        convolution().lifted(1)


@given(problems())
def test_every_tensor_is_packed(problem: ProblemDescription) -> None:
    for name in "xwy":
        tensor = problem.tensor(name)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        assert last + 1 == tensor.size == math.prod(tensor.shape)
