"""What a caller may ask of a find."""

from __future__ import annotations

import pytest

from miofind import FindMode, FindOptions
from miofind.errors import InvalidOptionError, UnknownSolverError


def test_values_are_taken_by_name_and_case_is_ignored() -> None:
    options = FindOptions(find_mode="Hybrid", order="WORKSPACE", only=("CUDNN", "convdirectnaive"))  # type: ignore[arg-type]
    assert options.find_mode is FindMode.HYBRID
    assert options.only == ("convdirectnaive", "cudnn")


def test_equal_options_are_one_key() -> None:
    assert hash(FindOptions(only=("cudnn",))) == hash(FindOptions(only=("CUDNN",)))
    assert FindOptions() != FindOptions(deterministic=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workspace_limit_bytes": -1}, "workspace_limit_bytes=-1"),
        ({"workspace_limit_bytes": True}, "workspace_limit_bytes=True"),
        ({"workspace_limit_bytes": 0.5}, "workspace_limit_bytes=0.5 must be a whole number"),
        ({"workspace_limit_bytes": float("inf")}, "workspace_limit_bytes=inf must be a whole number"),
        ({"workspace_limit_bytes": 2**63}, "below 2\\*\\*63"),
        ({"max_error": float("nan")}, "max_error=nan"),
        ({"time_budget_s": "soon"}, "time_budget_s='soon'"),
        ({"trials": 0}, "trials=0 must be a whole number from 1"),
        ({"trials": 2.5}, "trials=2.5 must be"),
        ({"trials": True}, "trials=True must be"),
        ({"patience": 0}, "patience=0 must be a whole number from 1"),
        ({"patience": 2**31}, "patience=2147483648 must be .* to 2147483647 or None"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0"),
        ({"seed": None}, "seed=None must be a whole number from 0 to 2147483647$"),
        ({"retry_failed": 1}, "retry_failed=1 must be True or False"),
        ({"find_mode": "quick"}, "find_mode='quick' is unknown"),
        ({"order": "speed"}, "order='speed' is unknown"),
    ],
    ids=lambda value: str(value),
)
def test_impossible_values(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        FindOptions(**given)  # type: ignore[arg-type]


def test_a_limit_written_as_a_float_is_whole_bytes() -> None:
    """1e9 was taken and then refused by the FindDB, after everything had been measured."""
    limit = FindOptions(workspace_limit_bytes=1e9).workspace_limit_bytes  # type: ignore[arg-type]
    assert limit == 10**9
    assert isinstance(limit, int)


def test_unknown_names() -> None:
    with pytest.raises(UnknownSolverError, match="only='MagicSolver' is no solver"):
        FindOptions(only=("MagicSolver",))
