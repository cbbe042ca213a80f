"""Composed forms of all solvers on a GPU, through both gates; and fused problems found, recorded and found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.runs.gates import check_both_gates

from miofind.compiler import Compiler
from miofind.core.epilogue import Epilogue
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device, Place
from miofind.find.pipeline import find
from miofind.options import FindOptions, OnMiss
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry, composed
from miofind.solver.solver import Solver

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

EPILOGUES = {
    Direction.FORWARD: ("bias.channel_bias.clamp", "scale.bias.residual.silu.statistics"),
    Direction.BACKWARD_DATA: ("residual.drelu", "dsilu"),
    Direction.BACKWARD_WEIGHTS: ("bias_gradient",),
}
SOLVERS = [
    solver
    for solver in Registry.default().values()
    if any(key.place is Place.CUDA for key in solver.keys)
    and any(problem.direction in EPILOGUES for problem in solver.examples())
]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_composed_forms_pass_both_gates(solver: Solver, device: Device, compiler: Compiler) -> None:
    """Each example of another direction, type or layout, with the solver's first default configuration."""
    form, seen = composed(solver), set()
    for problem in solver.examples():
        kind = (problem.direction, problem.y.dtype, problem.y.layout)
        texts = EPILOGUES.get(problem.direction, ())
        if not texts or problem.epilogue or kind in seen:
            continue
        seen.add(kind)
        fused = replace(problem, epilogue=Epilogue.of(texts[len(seen) % len(texts)]))
        if not form.applicability(fused, device):
            continue
        config = form.default_configs(fused, device)[0]
        check_both_gates(fused, form, config, device, compiler)


def test_a_fused_problem_is_found_and_found_again(tmp_path: Path) -> None:
    problem = ProblemDescription.convolution(
        x=(4, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC", epilogue="bias.residual.relu"
    )
    path = tmp_path / "found.db"
    with Handle(database=path) as handle:
        measured = find(problem, FindOptions(isolate=True), handle)
    forms = {solution.solver_id.endswith("+Pointwise") for solution in measured}
    assert True in forms
    with Handle(database=path) as handle:
        found = find(problem, FindOptions(on_miss=OnMiss.ERROR), handle)
        bare = find(problem.bare, FindOptions(on_miss=OnMiss.ERROR), handle)
    assert [solution.id for solution in found] == [solution.id for solution in measured]
    assert f"{bare[0].solver_id}+Pointwise" in {solution.solver_id for solution in found}
