"""Solvers of other packages that raise: they are left out, and the find goes on with the others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import miofind
from miofind import options, row_check, solver
from miofind.errors import NoSolutionError
from miofind.find import plan, records, scopes, stored, validity
from miofind.finddb import ReleaseRules, Store, write_release
from miofind.solution import ConvSolution
from miofind.solver import Solver, solvers
from miofind.suites import SuiteProblem
from miofind.tune.forecast import forecast
from miofind.tune.values import TuneOptions

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
    for module in (solver, plan, records, scopes, stored, validity, options, row_check):
        monkeypatch.setattr(module, "solvers", lambda: registry)
    scopes.requested_scope.cache_clear()


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    scopes.requested_scope.cache_clear()


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


@pytest.mark.parametrize("value", [None, "soon", math.nan, math.inf, -1.0, 1j], ids=repr)
@pytest.mark.parametrize("tuning", [False, True], ids=["defaults", "search"])
def test_an_estimate_is_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, tuning: bool) -> None:
    body = {"id": "vendor/Broken", "estimate_ms": lambda *_: value}
    register(monkeypatch, type("Broken", (DIRECT,), body)(), *solvers().values())
    asked = miofind.FindOptions(tuning=tuning, only=("vendor/Broken", "ConvCpuIm2colGemm"))
    made = plan.make_plan(PROBLEM, miofind.Device.cpu(), asked)
    assert {planned.solver.id for planned in made.candidates} == {"ConvCpuIm2colGemm"}
    assert f"estimate_ms={value!r} must be a finite number" in made.refusals["vendor/Broken"]


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FindDB in which a sound vendor/Broken is the best."""
    registered = dict(solvers())
    sound = type("Sound", (DIRECT,), {"id": "vendor/Broken"})()
    register(monkeypatch, sound, *registered.values())
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        miofind.find_solutions(PROBLEM, handle=handle)
        key = handle.database.user.problems()[0]
        history = handle.database.user.history(key.device, key.network_config)
        assert history is not None
        best = next(row for row in history.rows if row.solver_id == "vendor/Broken")
        fast = replace(best, time_ms=1e-6, min_ms=None, p20_ms=None, p80_ms=None, created_at="", id="")
        handle.database.user.record(key.device, key.network_config, [fast])
    monkeypatch.undo()
    return tmp_path / "finddb.db"


def broken_later(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    registered = dict(solvers())
    register(monkeypatch, type("Broken", (DIRECT,), {"id": "vendor/Broken", method: fails})(), *registered.values())


LATER = (
    "is_applicable",
    "default_configs",
    "solution",
    "estimate_ms",
    "check_config",
    "workspace_bytes",
    "error_growth",
)


@pytest.mark.parametrize("method", LATER)
def test_what_is_known_is_used(known: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    broken_later(monkeypatch, method)
    with miofind.Handle("cpu", database=known, strict=True) as handle:
        asked = SuiteProblem(problem=PROBLEM, suite="", layer="", count=1)
        assert forecast([asked], [handle], TuneOptions()).known == 1
        found = miofind.find_solutions(PROBLEM, handle=handle)
    assert "ConvCpuDirect" in [solution.solver_id for solution in found]


@pytest.mark.parametrize("method", LATER)
def test_a_check_and_a_release_go_on(known: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    broken_later(monkeypatch, method)
    fails_a_check = method in ("is_applicable", "solution", "check_config")
    shipping = row_check.Shipping()
    with Store(known, read_only=True) as store:
        findings = store.check(row_check.RowCheck())
        write_release([store], known.with_name("out.db"), ReleaseRules(keep=shipping, widen=row_check.with_refusals))
    assert bool(findings) is bool(shipping.findings) is fails_a_check
    assert all("vendor/Broken fails over it: ValueError('told by the solver')" in line for line in findings)
    with Store(known.with_name("out.db"), read_only=True) as shipped:
        assert "ConvCpuDirect" in {row.solver_id for _, row in shipped.rows()}
