"""DYNAMIC_HYBRID leaves solvers out, NORMAL tries failures again. tests/runtime/test_api_cpu.py has who measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import miofind
from miofind.device.environment import versions
from miofind.errors import NoSolutionError
from miofind.evaluate.evaluate import Job
from miofind.evaluate.executors import InProcess
from miofind.find.lookup import validity
from miofind.finddb import Row
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


def test_dynamic_hybrid_takes_what_it_found_before(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for all solvers finds that some are missing."""
    options = miofind.FindOptions(find_mode="dynamic_hybrid")
    found = [s.id for s in miofind.find_solutions(PROBLEM, options=options, handle=handle)]
    handle.forget()
    measured: list[Job] = []
    real = InProcess.run
    monkeypatch.setattr(InProcess, "run", lambda self, job: measured.append(job) or real(self, job))
    assert [s.id for s in miofind.find_solutions(PROBLEM, options=options, handle=handle)] == found
    assert measured == []
    miofind.find_solutions(PROBLEM, handle=handle)
    assert measured != []


@pytest.mark.parametrize("status", ["wrong_result", "crashed", "launch_failed"])
@pytest.mark.parametrize("is_mended", [False, True])
def test_normal_mode_tries_again_what_failed_with_other_sources(
    handle: miofind.Handle, status: str, is_mended: bool
) -> None:
    """A failure speaks of the sources that it was seen with: what has another digest since is measured."""
    solver = handle.registry["ConvCpuDirect"]
    digest = "ab" * 32 if is_mended else validity.solver_hash(solver)
    row = Row(
        solver_id=solver.id,
        solver_version=solver.version,
        config="{}",
        status=status,
        algorithm=solver.algorithm.value,
        library=solver.library.value,
        source_hash=digest,
    )
    handle.database.record(handle.device.identity, PROBLEM.network_config, [row], environment=versions(handle.device))
    options = miofind.FindOptions(find_mode="normal", only=solver.id)
    if not is_mended:
        with pytest.raises(NoSolutionError, match="failed here before"):
            miofind.find_solutions(PROBLEM, options=options, handle=handle)
        return
    (found,) = miofind.find_solutions(PROBLEM, options=options, handle=handle)
    assert (found.solver_id, found.source) == (solver.id, "measured")
