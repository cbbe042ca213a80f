"""What DYNAMIC_HYBRID leaves out, and what not. tests/runtime/test_api_cpu.py has which modes measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import miofind
from miofind.evaluate.executors import InProcess
from miofind.find.lookup import scopes
from miofind.solver.solver import solver_by_id

PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[miofind.Handle]:
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as made:
        yield made


@pytest.fixture
def static_solver(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Id of a solver that compiles for each shape."""
    solver = solver_by_id("ConvCpuDirect")
    monkeypatch.setattr(type(solver), "is_dynamic", False)
    scopes.requested_scope.cache_clear()
    yield solver.id
    scopes.requested_scope.cache_clear()


@pytest.mark.parametrize("on_miss", ["find", "estimate"])
def test_dynamic_hybrid_leaves_out_what_compiles_for_each_shape_on_a_miss(
    handle: miofind.Handle, static_solver: str, on_miss: str
) -> None:
    options = miofind.FindOptions(find_mode="dynamic_hybrid", on_miss=on_miss)
    found = {s.solver_id for s in miofind.find_solutions(PROBLEM, options=options, handle=handle)}
    assert found
    assert static_solver not in found


def test_dynamic_hybrid_takes_a_hit_as_it_is(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch, static_solver: str
) -> None:
    """As MIOpen's does: the mode spares a find what it would compile, not a run what is known to be fast."""
    miofind.find_solutions(PROBLEM, handle=handle)
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    options = miofind.FindOptions(find_mode="dynamic_hybrid")
    assert static_solver in {s.solver_id for s in miofind.find_solutions(PROBLEM, options=options, handle=handle)}
