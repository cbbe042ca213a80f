"""What a FindDB's answers are worth when solvers come that were not there when they were measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import miofind
from miofind import FindOptions, options, solver
from miofind.find import plan, records, scopes, validity
from miofind.options import FindMode
from miofind.problem import ProblemDescription
from miofind.solver import Applicability, Solver, solvers

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
DIRECT = type(solvers()["ConvCpuDirect"])
REQUESTS = (FindOptions(find_mode=FindMode.NORMAL), FindOptions(find_mode=FindMode.NORMAL, only=("plain",)))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    scopes.requested_scope.cache_clear()


def comes(monkeypatch: pytest.MonkeyPatch, later: Solver) -> None:
    """A solver is registered."""
    registry = {**solvers(), later.id: later}
    for module in (solver, plan, records, scopes, validity, options):
        monkeypatch.setattr(module, "solvers", lambda: registry)
    scopes.requested_scope.cache_clear()


@pytest.mark.parametrize("serves", [False, True], ids=["refuses", "serves"])
@pytest.mark.parametrize("request_", REQUESTS, ids=["all", "plain"])
def test_an_answer_is_whole_unless_a_later_solver_may_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: FindOptions, serves: bool
) -> None:
    """Whether or not the request filters."""
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        miofind.find_solutions(PROBLEM, options=request_, handle=handle)
        body = {"id": "vendor/Later", "is_applicable": lambda *_: Applicability("" if serves else "refused")}
        comes(monkeypatch, type("Later", (DIRECT,), body)())
        whole = records.look_up(PROBLEM, request_, handle, partial=False)
        assert (whole is None) is serves
        assert records.look_up(PROBLEM, request_, handle), "it is an answer all the same"
