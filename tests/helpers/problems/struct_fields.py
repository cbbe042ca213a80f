"""What a kernel's structures hold, for tests that read a step as its kernel would."""

from __future__ import annotations

from typing import Any

from miofind.solver.steps import KernelStep
from miofind.solver.structs import Struct
from miofind.solvers.common.divisor import DIVISOR, divide_by


def fields_of(struct: Struct) -> dict[str, Any]:
    """Values by name, structures as such dictionaries, but divisors as what they divide by."""
    names = [name for name, _, _ in struct.type.fields]
    return dict(zip(names, map(_value, struct.values), strict=True))


def named_args(step: KernelStep) -> dict[str, Any]:
    """The fields of a step's only structure, those of `walk` and `grid` among them."""
    [fields] = [fields_of(arg) for arg in step.args if isinstance(arg, Struct)]
    return {**fields, **fields.pop("walk"), **fields.pop("grid")}


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_value, value))
    if isinstance(value, Struct) and value.type == DIVISOR:
        assert value == divide_by(int(value.values[0]))  # type: ignore[arg-type]
        return value.values[0]
    return fields_of(value) if isinstance(value, Struct) else value
