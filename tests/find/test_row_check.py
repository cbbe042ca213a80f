"""Rows of a FindDB against the code: what a solver says of itself is sound, wherever it was measured."""

from __future__ import annotations

from typing import Any

import pytest

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.errors import MiofindError
from miofind.find.lookup.validity import solver_hash
from miofind.find.row_check import RowCheck, device_of
from miofind.finddb import ProblemKey, Row
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

pytestmark = pytest.mark.sampled(3)

H200 = "NVIDIA H200|132|9.0|"


def row_of(solver: Solver, config: Config, **fields: Any) -> Row:
    values = {
        "solver_version": solver.version,
        "status": "ok",
        "algorithm": solver.algorithm.value,
        "library": solver.library.value,
        "source_hash": solver_hash(solver),
        "time_ms": 1.0,
    }
    return Row(solver_id=solver.id, config=config.json, **values | fields)


@pytest.mark.parametrize("solver", Registry.default().values(), ids=lambda solver: solver.id)
def test_defaults_of_examples_are_sound(solver: Solver) -> None:
    identity = Device.cpu().identity if solver.keys[0].place is Place.CPU else H200
    device = device_of(identity)
    assert device is not None
    check, expected = RowCheck(Registry.default()), 0
    for problem in solver.examples():
        if not solver.applicability(problem, device):
            continue
        for config in solver.default_configs(problem, device):
            try:
                workspace_bytes = solver.workspace_bytes(problem, device, config)
            except MiofindError:
                continue
            expected += 1
            key = ProblemKey(device=identity, network_config=problem.network_config)
            assert check(key, row_of(solver, config, workspace_bytes=workspace_bytes)) is None
    assert check.checked == expected > 0


def test_a_device_that_is_not_here_is_known_by_its_identity() -> None:
    device = device_of("NVIDIA H100 PCIe MIG 1g.10gb|16|9.0|1g.10gb")
    assert device is not None
    assert (device.place, device.arch, device.sm_count, device.mig_profile) == (Place.CUDA, "90a", 16, "1g.10gb")
    processor = device_of("Some processor|64|0.0|")
    assert processor is not None
    assert (processor.place, processor.sm_count) == (Place.CPU, 64)


@pytest.mark.parametrize("identity", ["nonsense", "a|b|c|d", "x|1|1e308|", "x|1|inf|", "x|1|nan|", "x|-1|9.0|", "|||"])
def test_an_identity_of_no_device_is_none(identity: str) -> None:
    assert device_of(identity) is None


@pytest.mark.parametrize("change", [("n32", "n" + "9" * 5000), ("n32", "n" + "9" * 18), ("c64", "c-1"), ("56", "0")])
def test_absurd_problems_are_findings(change: tuple[str, str]) -> None:
    problem = ProblemDescription.convolution(x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1, dtype="float16")
    solver = Registry.default()["ConvDirectNaive"]
    key = ProblemKey(device=H200, network_config=problem.network_config.replace(*change))
    assert key.network_config != problem.network_config
    finding = RowCheck(Registry.default())(key, row_of(solver, Config())) or ""
    assert "is not a network_config" in finding or "must be between 1 and" in finding


def test_a_failed_row_needs_no_valid_configuration() -> None:
    solver = Registry.default()["ConvCpuIm2colGemm"]
    problem = ProblemDescription.convolution(x=(1, 2, 3, 3), w=(2, 2, 1, 1))
    key = ProblemKey(device=Device.cpu().identity, network_config=problem.network_config)
    assert RowCheck(Registry.default())(key, row_of(solver, Config(), status="crashed", time_ms=None)) is None
    assert "must have the parameters" in (RowCheck(Registry.default())(key, row_of(solver, Config())) or "")


def test_a_problem_that_its_solver_does_not_serve_is_found() -> None:
    solver = Registry.default()["ConvCpuGemm1x1"]
    problem = ProblemDescription.convolution(x=(1, 2, 3, 3), w=(2, 2, 3, 3))
    key = ProblemKey(device=Device.cpu().identity, network_config=problem.network_config)
    assert "serves unpadded filters" in (RowCheck(Registry.default())(key, row_of(solver, Config())) or "")
