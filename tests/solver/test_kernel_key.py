"""What a kernel key says of operands: one set of element types for all, or others for some, and the accumulator's."""

from __future__ import annotations

from typing import Any

import pytest

from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import KernelKey

HALF, SINGLE, DOUBLE = DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64


def key(*dtypes: DataType, **fields: Any) -> KernelKey:
    layouts = frozenset({Layout.NCHW})
    return KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(dtypes), layouts=layouts, **fields)


def problem(**dtypes: DataType) -> ProblemDescription:
    every = {"x": HALF, "w": HALF, "y": HALF, **dtypes}
    return ProblemDescription.convolution(x=(1, 2, 4, 4), w=(2, 2, 3, 3), dtype=every)


def refusal(served: KernelKey, asked: ProblemDescription) -> str:
    return served.applicability(asked, Device.cpu()).reason


def test_one_set_serves_all_operands() -> None:
    assert refusal(key(HALF), problem()) == ""
    assert refusal(key(HALF, SINGLE), problem(y=SINGLE)) == ""
    assert refusal(key(HALF), problem(w=SINGLE)) == "w is float32, served are float16"
    assert refusal(key(HALF, DOUBLE), problem(y=SINGLE)) == "y is float32, served are float16, float64"


@pytest.mark.parametrize("name", ["x", "w", "y"])
def test_an_operand_may_have_types_of_its_own(name: str) -> None:
    wide = key(HALF, operand_dtypes={name: frozenset({SINGLE})})
    assert refusal(wide, problem(**{name: SINGLE})) == ""
    assert refusal(wide, problem()) == f"{name} is float16, served are float32"
    for other in {"x", "w", "y"} - {name}:
        assert refusal(wide, problem(**{name: SINGLE, other: SINGLE})) == f"{other} is float32, served are float16"
    assert wide.every_dtype == {HALF, SINGLE}


def test_a_problem_of_another_accumulator_is_refused() -> None:
    double = dict.fromkeys("xwy", DOUBLE)
    assert problem().accumulator is problem(y=SINGLE).accumulator is SINGLE
    assert problem(**double).accumulator is DOUBLE
    assert refusal(key(HALF, accumulator=SINGLE), problem()) == ""
    assert refusal(key(HALF, accumulator=HALF), problem()) == "accumulates in float16, the problem in float32"
    assert refusal(key(*DataType), problem(**double)) == ""
    single = key(*DataType, accumulator=SINGLE)
    assert refusal(single, problem(**double)) == "accumulates in float32, the problem in float64"


def test_a_key_is_a_value() -> None:
    assert key(HALF, operand_dtypes={"y": frozenset({SINGLE})}) != key(HALF)
    assert len({key(HALF), key(HALF), key(SINGLE)}) == 2
