"""A default find tells wrong solvers from right ones that look odd, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import cuda
from mutants.find import find

from miofind.candidate import Status
from miofind.compiler import Compiler
from miofind.device import Device
from miofind.errors import CompileError

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled(device: Device, compiler: Compiler) -> None:
    """All kernels at once, by all processors."""
    steps = [step for solver in (*cuda.SOLVERS.values(), cuda.RIGHT) for step in solver.kernels(device)]
    errors = [made for _, made in compiler.build_all(steps, device.arch) if isinstance(made, CompileError)]
    assert errors == []


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
