"""Epilogues: their texts, what they add to a problem and its key, their numbers."""

from __future__ import annotations

import itertools
import math
import pickle
from dataclasses import fields
from typing import Any

import pytest

from miofind.core.epilogue import (
    DERIVATIVES,
    EPILOGUE_VECTORS,
    NO_EPILOGUE,
    Activation,
    Epilogue,
    EpilogueParameters,
    ResidualPosition,
)
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription, Role
from miofind.errors import InvalidOptionError, InvalidProblemError

SHAPES = {"x": (2, 8, 5, 6), "w": (12, 4, 3, 3), "groups": 2, "padding": 1}


def fused(epilogue: str | Epilogue, **arguments: object) -> ProblemDescription:
    return ProblemDescription.convolution(**SHAPES, epilogue=epilogue, **arguments)  # type: ignore[arg-type]


def every() -> list[Epilogue]:
    flags = (False, True)
    return [
        Epilogue(scale=s, bias=b, channel_bias=c, residual=r, activation=a, parameter_dtype=d)
        for s, b, c, r, a, d in itertools.product(
            flags, flags, flags, ResidualPosition, Activation, (None, DataType.FLOAT32)
        )
    ]


def test_every_text_names_one_epilogue() -> None:
    by_text: dict[str, Epilogue] = {}
    for epilogue in every():
        assert Epilogue.of(epilogue.text) == epilogue
        assert by_text.setdefault(epilogue.text, epilogue) == epilogue
    assert by_text[""] == NO_EPILOGUE
    assert not NO_EPILOGUE
    assert all(epilogue for text, epilogue in by_text.items() if text)


def test_words_stand_in_the_order_of_computation() -> None:
    after = Epilogue(bias=True, activation=Activation.SILU, residual=ResidualPosition.AFTER)
    assert after.text == "bias.silu.residual"
    assert Epilogue(scale=True, bias=True, residual=ResidualPosition.BEFORE).text == "scale.bias.residual"
    linear = Epilogue(residual=ResidualPosition.AFTER)
    assert linear == Epilogue(residual=ResidualPosition.BEFORE), "the same without an activation"
    for wrong in ("relu.bias", "bias.bias", "bias.none", "bias..relu", "relu.silu", "bias.relU", "float32.relu"):
        with pytest.raises(InvalidProblemError, match="epilogue="):
            Epilogue.of(wrong)
    with pytest.raises(InvalidProblemError, match=r"did you mean|leaky_relu"):
        Epilogue.of("leakyrelu")


def test_a_bare_problem_has_no_epilogue_in_its_key() -> None:
    bare = ProblemDescription.convolution(**SHAPES)  # type: ignore[arg-type]
    assert "-e." not in bare.network_config
    assert bare.bare is bare
    problem = fused("bias.residual.relu")
    assert problem.network_config == f"{bare.network_config}-e.bias.residual.relu"
    assert problem.bare == bare
    assert problem != bare


@pytest.mark.parametrize("text", ["bias", "float32.scale.bias.channel_bias.gelu_tanh.residual", "leaky_relu"])
def test_a_key_is_read_back(text: str) -> None:
    problem = fused(text, dtype=DataType.FLOAT16, layout=Layout.NHWC)
    again = ProblemDescription.from_network_config(problem.network_config)
    assert again == problem
    assert again.epilogue == Epilogue.of(text)
    assert again.operands == problem.operands


def test_operands_follow_those_of_the_convolution() -> None:
    problem = fused("float32.scale.bias.channel_bias.silu.residual", dtype=DataType.BFLOAT16, layout=Layout.NHWC)
    shapes = {operand.name: (operand.shape, operand.tensor.dtype) for operand in problem.operands}
    assert list(shapes) == ["x", "w", "y", "scale", "bias", "channel_bias", "residual"]
    assert shapes["scale"] == shapes["bias"] == ((12,), DataType.FLOAT32)
    assert shapes["channel_bias"] == ((2, 12), DataType.BFLOAT16)
    assert shapes["residual"] == (problem.y.shape, DataType.BFLOAT16)
    assert [operand.name for operand in problem.operands if operand.role is Role.OUTPUT] == ["y"]
    assert [operand.name for operand in problem.inputs] == ["x", "w", "scale", "bias", "channel_bias", "residual"]
    assert problem.bytes == problem.bare.bytes + 12 * 8 + 2 * 12 * 2 + problem.y.bytes


def test_the_outputs_dtype_is_the_default_of_parameters() -> None:
    assert fused("float32.bias") == fused("bias")
    assert fused("float16.bias", dtype=DataType.FLOAT16) == fused("bias", dtype=DataType.FLOAT16)
    with pytest.raises(InvalidProblemError, match="scale and bias are float16 as y or float32, not bfloat16"):
        fused("bfloat16.bias", dtype=DataType.FLOAT16)


@pytest.mark.parametrize("direction", [Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS])
def test_gradients_take_no_bias(direction: Direction) -> None:
    with pytest.raises(InvalidProblemError, match="is of forward problems, not of"):
        fused("bias", direction=direction)


def test_a_gradient_takes_a_residual_and_a_derivative() -> None:
    problem = fused("residual.dgelu_tanh", direction="backward_data", dtype="float16", layout="NHWC")
    assert problem.network_config.endswith("-e.residual.dgelu_tanh")
    assert ProblemDescription.from_network_config(problem.network_config).operands == problem.operands
    operands = {operand.name: operand for operand in problem.operands}
    assert list(operands) == ["x", "w", "y", "residual", "saved"]
    assert operands["residual"].tensor == operands["saved"].tensor == problem.x
    assert operands["saved"].role is Role.INPUT
    assert fused("residual", direction="backward_data").epilogue == fused("residual").epilogue
    for derivative in Activation:
        if derivative in DERIVATIVES:
            epilogue = Epilogue.of(f"d{derivative}")
            assert epilogue == Epilogue(derivative=derivative)
            assert epilogue.directions == (Direction.BACKWARD_DATA,)
            assert epilogue.nonlinearity is derivative


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"derivative": "tanh"}, "is not computed: use one of relu"),
        ({"derivative": "relu", "bias": True}, "beside a derivative stands a residual alone"),
        ({"derivative": "relu", "activation": "relu"}, "beside a derivative stands a residual alone"),
        ({"derivative": "relu", "statistics": True}, "beside a derivative stands a residual alone"),
        ({"derivative": "relu", "residual": "after"}, "write residual.drelu"),
    ],
)
def test_what_does_not_go_with_a_derivative_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidProblemError, match=told):
        Epilogue(**fields)


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_WEIGHTS])
def test_derivatives_are_of_backward_data(direction: Direction) -> None:
    with pytest.raises(InvalidProblemError, match="is of backward_data problems, not of"):
        fused("drelu", direction=direction)


def test_lifting_keeps_the_epilogue() -> None:
    lifted = fused("bias.relu.residual").lifted(3)
    assert lifted.epilogue.text == "bias.relu.residual"
    assert {operand.name: operand.shape for operand in lifted.operands}["bias"] == (12,)


def test_numbers_are_those_of_the_activation() -> None:
    given = EpilogueParameters(alpha=2, beta=-1, low=-3, high=math.inf, slope=0.25)
    assert given.numbers(Activation.RELU) == (2, -1, 0, 0)
    assert given.numbers(Activation.CLAMP) == (2, -1, -3, math.inf)
    assert given.numbers(Activation.ELU) == given.numbers(Activation.LEAKY_RELU) == (2, -1, 0.25, 0)
    defaults = EpilogueParameters()
    assert defaults.numbers(Activation.LEAKY_RELU) == (1, 1, 0.01, 0)
    assert defaults.numbers(Activation.ELU) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    "wrong", [{"alpha": math.nan}, {"beta": math.inf}, {"slope": "1"}, {"low": 2, "high": 1}, {"alpha": True}]
)
def test_numbers_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError, match="|".join(wrong)):
        EpilogueParameters(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        ("bias", ("alpha",)),
        ("residual.relu", ("alpha", "beta")),
        ("clamp", ("alpha", "low", "high")),
        ("leaky_relu.residual", ("alpha", "beta", "slope")),
        ("elu", ("alpha", "slope")),
        ("residual.dclamp", ("alpha", "beta", "low", "high")),
        ("dleaky_relu", ("alpha", "slope")),
        ("dsilu", ("alpha",)),
    ],
)
def test_an_epilogue_takes_the_numbers_that_change_what_it_does(text: str, numbers: tuple[str, ...]) -> None:
    epilogue = Epilogue.of(text)
    assert epilogue.numbers == numbers
    changed = {"alpha": 2.0, "beta": 3.0, "low": -1.0, "high": 1.0, "slope": 0.5}
    taken = {name: changed.pop(name) for name in numbers}
    neutral: dict[str, object] = dict.fromkeys(changed) | {"alpha": 1, "beta": 1.0}
    assert epilogue.parameters(neutral | taken) == EpilogueParameters(**taken)
    for name, value in changed.items():
        with pytest.raises(InvalidOptionError, match=f"^{name}="):
            epilogue.parameters({name: value})


def test_arrays_of_operands_have_no_spatial_dimensions_of_one() -> None:
    problem = fused("float32.bias.channel_bias.residual", dtype="float16", layout="NHWC")
    arrays = {operand.name: operand.array for operand in problem.operands}
    bias, channel_bias = arrays["bias"], arrays["channel_bias"]
    assert (bias.shape, bias.strides, bias.dtype, bias.bytes) == ((12,), (1,), DataType.FLOAT32, 48)
    assert (channel_bias.shape, channel_bias.strides, channel_bias.bytes) == ((2, 12), (12, 1), 48)
    assert arrays["residual"] == arrays["y"] == problem.y


def test_fused_problems_are_pickled() -> None:
    problem = fused("float32.bias.residual.relu", dtype="float16")
    assert pickle.loads(pickle.dumps(problem)).epilogue == problem.epilogue


@pytest.mark.parametrize(
    ("text", "direction"),
    [
        ("statistics", Direction.FORWARD),
        ("float32.bias.residual.relu.statistics", Direction.FORWARD),
        ("bias_gradient", Direction.BACKWARD_WEIGHTS),
        ("float32.bias_gradient", Direction.BACKWARD_WEIGHTS),
    ],
)
def test_a_key_of_second_outputs_is_read_back(text: str, direction: Direction) -> None:
    problem = fused(text, dtype=DataType.FLOAT16, direction=direction)
    assert problem.network_config == f"{problem.bare.network_config}-e.{text}"
    again = ProblemDescription.from_network_config(problem.network_config)
    assert again == problem
    assert again.operands == problem.operands
    assert problem.trains
    assert not problem.bare.trains
    for other in Direction:
        if other is not direction:
            with pytest.raises(InvalidProblemError, match=f"is of {direction} problems, not of {other} ones"):
                problem.in_direction(other)


def test_second_outputs_are_the_last_operands() -> None:
    forward = fused("bias.relu.statistics", dtype=DataType.BFLOAT16)
    shapes = {operand.name: (operand.shape, operand.tensor.dtype) for operand in forward.outputs}
    assert [operand.name for operand in forward.operands] == ["x", "w", "y", "bias", "sum", "sum_of_squares"]
    assert shapes["sum"] == shapes["sum_of_squares"] == ((12,), DataType.FLOAT32)
    assert forward.output == forward.y
    assert [operand.name for operand in forward.inputs] == ["x", "w", "bias"]
    assert forward.bytes == forward.bare.bytes + 12 * 2 + 2 * 12 * 4
    assert fused("statistics", dtype=DataType.FLOAT64).outputs[-1].tensor.dtype is DataType.FLOAT64


@pytest.mark.parametrize(
    ("text", "dtype"), [("bias_gradient", DataType.FLOAT16), ("float32.bias_gradient", DataType.FLOAT32)]
)
def test_a_bias_gradient_has_the_filters_dtype_unless_asked(text: str, dtype: DataType) -> None:
    problem = fused(text, dtype=DataType.FLOAT16, direction=Direction.BACKWARD_WEIGHTS)
    assert [operand.name for operand in problem.outputs] == ["w", "bias_gradient"]
    assert problem.outputs[1].tensor.dtype is dtype
    assert problem.outputs[1].shape == (12,)


@pytest.mark.parametrize("text", ["bias.bias_gradient", "relu.bias_gradient", "statistics.bias_gradient"])
def test_a_bias_gradient_stands_alone(text: str) -> None:
    with pytest.raises(InvalidProblemError, match="bias_gradient stands alone"):
        Epilogue.of(text)


def test_second_outputs_change_no_results() -> None:
    assert not Epilogue.of("statistics").changes_results
    assert not Epilogue.of("float32.bias_gradient").changes_results
    assert Epilogue.of("bias.statistics").changes_results
    assert Epilogue.of("statistics").numbers == ()
    assert Epilogue.of("relu.statistics").numbers == ("alpha",)
    with pytest.raises(InvalidOptionError, match=r"alpha=2\.0: the epilogue statistics has no factor"):
        Epilogue.of("statistics").parameters({"alpha": 2.0})


def test_all_else_of_an_epilogue_changes_results() -> None:
    others = {"parameter_dtype": None, "statistics": False, "bias_gradient": False}
    values = {
        "residual": ResidualPosition.BEFORE,
        "activation": Activation.RELU,
        "derivative": Activation.RELU,
        **dict.fromkeys(EPILOGUE_VECTORS, True),
    }
    assert values.keys() | others.keys() == {field.name for field in fields(Epilogue)}
    for name, value in values.items():
        assert Epilogue(**{name: value}).changes_results
