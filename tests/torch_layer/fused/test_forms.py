"""Forms: calls as compiled graphs name them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from miofind.torch.fused.calls import BackwardData, BackwardWeights, Call, Forward, Statistics
from miofind.torch.fused.forms import TENSORS, call_of, form_of
from miofind.torch.fused.ops import ARGUMENTS, BY_FORM, OPERATORS

WINDOW = ([2, 1], (1, 0), [1, 1], 2)
CALLS: list[Call] = [
    Forward("x", "w", None, "scale", None, "clamp", *WINDOW, high=math.inf, channels_last=True, channel_bias="c"),
    Forward("x", "w", "bias", None, "residual", "elu", *WINDOW, "after", 0.5, slope=0.1),
    Statistics("x", "w", None, *WINDOW, channels_last=False),
    BackwardData("dy", "x", "w", None, "saved", "relu", *WINDOW, low=-1e-300),
    BackwardWeights("dy", "x", "w", *WINDOW, torch.float32, True),
    BackwardWeights("dy", "x", "w", *WINDOW),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_form_and_tensors_are_the_call(call: Call) -> None:
    form = form_of(call)
    assert form is not None
    tensors = [getattr(call, name) for name in TENSORS[type(call)]]
    made = call_of(type(call), tensors, form)
    assert [_listed(value) for value in made] == [_listed(value) for value in call]
    assert form_of(made) == form


def _listed(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("given", [object(), [1, object()]], ids=["a number", "one of a list"])
def test_what_depends_on_inputs_has_no_form(given: Any) -> None:
    assert form_of(CALLS[2]._replace(groups=given)) is None
    assert form_of(CALLS[2]._replace(stride=given)) is None


def test_each_operator_has_one_that_takes_its_tensors_and_a_form() -> None:
    for kind, by_form in BY_FORM.items():
        assert ARGUMENTS[OPERATORS[kind]] is kind
        *tensors, form = by_form._schema.arguments
        assert tuple(each.name for each in tensors) == TENSORS[kind]
        assert str(form.type) == "str"
        wanted = {each.name: str(each.type) for each in OPERATORS[kind]._schema.arguments}
        assert {each.name: str(each.type) for each in tensors}.items() <= wanted.items()
        assert [str(each.type) for each in by_form._schema.returns] == [
            str(each.type) for each in OPERATORS[kind]._schema.returns
        ]
