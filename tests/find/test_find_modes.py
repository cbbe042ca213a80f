"""What DYNAMIC_HYBRID leaves out, and what not. tests/runtime/test_api_cpu.py has which modes measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import miofind
from miofind.evaluate.executors import InProcess
from miofind.solver.registry import Registry
from miofind.solvers.cpu.direct import ConvCpuDirect

PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))


class _Static(ConvCpuDirect):
    """Compiles for each shape."""

    is_dynamic = False


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[miofind.Handle]:
    registry = Registry.default().with_solvers(_Static())
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as made:
        yield made


@pytest.mark.parametrize("on_miss", ["find", "estimate"])
def test_dynamic_hybrid_leaves_out_what_compiles_for_each_shape_on_a_miss(handle: miofind.Handle, on_miss: str) -> None:
    options = miofind.FindOptions(find_mode="dynamic_hybrid", on_miss=on_miss)
    found = {s.solver_id for s in miofind.find_solutions(PROBLEM, options=options, handle=handle)}
    assert found
    assert _Static.id not in found


def test_dynamic_hybrid_takes_a_hit_as_it_is(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MIOpen's does: the mode spares a find what it would compile, not a run what is known to be fast."""
    miofind.find_solutions(PROBLEM, handle=handle)
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    options = miofind.FindOptions(find_mode="dynamic_hybrid")
    assert _Static.id in {s.solver_id for s in miofind.find_solutions(PROBLEM, options=options, handle=handle)}
