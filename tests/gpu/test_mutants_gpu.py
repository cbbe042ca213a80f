"""A default find tells wrong solvers from right ones that look odd, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import cuda
from mutants.find import find

from miofind.compiler import BinaryCache, Compiler
from miofind.device.device import Device
from miofind.errors import CompileError
from miofind.solver.candidate import Status

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cache(device: Device, tmp_path_factory: pytest.TempPathFactory) -> BinaryCache:
    """All kernels, compiled at once by all processors."""
    cache = BinaryCache(tmp_path_factory.mktemp("mutants") / "kernels")
    steps = [step for solver in (*cuda.SOLVERS.values(), cuda.RIGHT) for step in solver.kernels(device)]
    errors = [made for _, made in Compiler(cache).build_all(steps, device.arch) if isinstance(made, CompileError)]
    assert errors == []
    return cache


@pytest.fixture
def compiler(cache: BinaryCache) -> Compiler:
    """A compiler of each test's own: kernels are loaded anew, and what they keep on the device is as at first."""
    return Compiler(cache)


@pytest.mark.parametrize("name", cuda.MUTANTS)
def test_a_default_find_records_the_mutant_as_wrong(
    tmp_path: Path, name: str, device: Device, compiler: Compiler
) -> None:
    recorded = find(cuda.SOLVERS[name], cuda.RIGHT, device, tmp_path / "finddb.db", compiler)
    assert set(recorded.statuses) == {Status.WRONG_RESULT}, cuda.SOLVERS[name].mutant.fault
    assert all(recorded.messages)
    assert recorded.answered == (cuda.RIGHT.id,)


@pytest.mark.parametrize("name", cuda.CONTROLS)
def test_a_default_find_does_not_call_a_right_solver_wrong(
    tmp_path: Path, name: str, device: Device, compiler: Compiler
) -> None:
    recorded = find(cuda.SOLVERS[name], cuda.RIGHT, device, tmp_path / "finddb.db", compiler)
    assert [status.usable for status in recorded.statuses] == [True], recorded.messages
    assert set(recorded.answered) == {cuda.SOLVERS[name].id, cuda.RIGHT.id}
