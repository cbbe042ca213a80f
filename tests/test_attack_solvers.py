"""Solvers of other packages that raise: they are left out, and the find goes on with the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import miofind
from miofind import options, solver
from miofind.errors import NoSolutionError
from miofind.find import plan, records
from miofind.solution import ConvSolution
from miofind.solver import Solver, solvers

PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
DIRECT = type(solvers()["ConvCpuDirect"])


def fails(*_: Any) -> Any:
    raise ValueError("told by the solver")


class _FailsWhenRun(DIRECT):  # type: ignore[valid-type, misc]
    def solution(self, *arguments: Any) -> ConvSolution:
        made = super().solution(*arguments)
        return replace(made, steps=tuple(replace(step, module=__name__, function="fails") for step in made.steps))


def broken(method: str) -> Solver:
    if method == "run":
        return type("Broken", (_FailsWhenRun,), {"id": "vendor/Broken"})()  # type: ignore[no-any-return]
    if method == "config":
        body = {"id": "vendor/Broken", "default_configs": lambda *_: [{"not": "a Config"}]}
        return type("Broken", (DIRECT,), body)()  # type: ignore[no-any-return]
    return type("Broken", (DIRECT,), {"id": "vendor/Broken", method: fails})()  # type: ignore[no-any-return]


METHODS = ("is_applicable", "default_configs", "solution", "estimate_ms", "is_exact", "check_config", "run", "config")


def register(monkeypatch: pytest.MonkeyPatch, *known: Solver) -> None:
    registry = {item.id: item for item in known}
    for module in (solver, plan, records, options):
        monkeypatch.setattr(module, "solvers", lambda: registry)
    records._request.cache_clear()


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    records._request.cache_clear()


@pytest.mark.parametrize("method", METHODS)
def test_others_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    register(monkeypatch, broken(method), *solvers().values())
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        found = miofind.find_solutions(PROBLEM, handle=handle)
    assert "ConvCpuDirect" in [solution.solver_id for solution in found]
    assert "vendor/Broken" not in [solution.solver_id for solution in found]


@pytest.mark.parametrize("method", METHODS)
def test_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    register(monkeypatch, broken(method))
    with (
        miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle,
        pytest.raises(NoSolutionError, match=r"vendor/Broken.*(told by the solver|must be a Config)"),
    ):
        miofind.find_solutions(PROBLEM, handle=handle)
