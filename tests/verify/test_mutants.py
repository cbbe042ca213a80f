"""A default find tells wrong solvers from right ones that look odd, on the CPU place."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import cuda, host
from mutants.find import find

from miofind.compiler import BinaryCache, Compiler
from miofind.device.device import Device
from miofind.solver.candidate import Status

FAILED = {"writes_into_an_input_and_mends_it", "packing_fails"}
"""May be recorded as failed instead, since what they do raises."""


@pytest.fixture(autouse=True)
def forgotten() -> None:
    host.forget()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", host.MUTANTS)
def test_a_default_find_records_the_mutant_as_wrong(tmp_path: Path, name: str) -> None:
    recorded = find(host.SOLVERS[name], host.RIGHT, Device.cpu(), tmp_path / "finddb.db")
    wrong = {Status.WRONG_RESULT, Status.LAUNCH_FAILED} if name in FAILED else {Status.WRONG_RESULT}
    assert set(recorded.statuses) <= wrong, f"{host.SOLVERS[name].mutant.fault} {recorded.statuses}"
    assert recorded.statuses, "it was tried"
    assert all(recorded.messages)
    assert recorded.answered == (host.RIGHT.id,)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", host.CONTROLS)
def test_a_default_find_does_not_call_a_right_solver_wrong(tmp_path: Path, name: str) -> None:
    recorded = find(host.SOLVERS[name], host.RIGHT, Device.cpu(), tmp_path / "finddb.db")
    assert [status.usable for status in recorded.statuses] == [True], recorded.messages
    assert set(recorded.answered) == {host.SOLVERS[name].id, host.RIGHT.id}


def test_there_are_enough_of_them() -> None:
    assert len(host.MUTANTS) >= 40
    assert len(host.CONTROLS) >= 8


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    pytest.importorskip("cuda.bindings.nvrtc")
    return Compiler(BinaryCache(tmp_path_factory.mktemp("mutants") / "kernels"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if number % 5 == 0 else pytest.mark.full_matrix)
        for number, name in enumerate(cuda.SOLVERS)
    ],
)
def test_the_kernels_of_the_gpu_compile(compiler: Compiler, name: str) -> None:
    for step in cuda.SOLVERS[name].kernels(Device.virtual("90a")):
        compiler.build(step, "90a")


def test_there_are_enough_of_them_on_the_gpu() -> None:
    assert len(cuda.MUTANTS) >= 40
    assert len(cuda.CONTROLS) >= 8
