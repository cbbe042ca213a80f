"""Fused problems, found: composed forms of the fastest bare solvers, their rows, and what options make of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from miofind.core.epilogue import EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.epilogue_reference import apply_epilogue
from miofind.find.lookup.validity import solver_hash
from miofind.find.pipeline import find
from miofind.launch.invoker import bases_of, make_invoker
from miofind.options import FindOptions, OnMiss
from miofind.reference import reference_on_host, round_once
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Source

PROBLEM = ProblemDescription.convolution(
    x=(2, 4, 7, 6), w=(6, 4, 3, 3), padding=1, epilogue="scale.bias.channel_bias.residual.leaky_relu"
)
NUMBERS = EpilogueParameters(alpha=0.5, beta=-2.0, slope=0.25)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "found.db"


def test_a_fused_problem_is_measured_recorded_and_answered(database: Path) -> None:
    with Handle("cpu", database=database) as handle:
        measured = find(PROBLEM, FindOptions(), handle)
        bare = find(PROBLEM.bare, FindOptions(on_miss=OnMiss.ERROR), handle)
    assert {solution.source for solution in measured} == {Source.MEASURED}
    assert all(solution.solver_id.endswith("+Pointwise") for solution in measured)
    assert f"{bare[0].solver_id}+Pointwise" in {solution.solver_id for solution in measured}
    with Handle("cpu", database=database) as handle:
        found = find(PROBLEM, FindOptions(on_miss=OnMiss.ERROR), handle)
        rows = [
            row
            for history in handle.database.histories(handle.device.identity, PROBLEM.network_config)
            for row in history.rows
        ]
        assert all(row.source_hash == solver_hash(handle.registry[row.solver_id], fused=True) for row in rows)
    assert [solution.id for solution in found] == [solution.id for solution in measured]
    assert {solution.source for solution in found} == {Source.FINDDB}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_composed_solution_computes_the_reference_of_rounded_sums(dtype: str) -> None:
    problem = ProblemDescription.convolution(
        x=(3, 4, 5, 6), w=(6, 4, 3, 2), dtype=dtype, layout="NHWC", epilogue=PROBLEM.epilogue
    )
    random = np.random.default_rng(0)
    arrays = {
        operand.name: round_once(random.standard_normal(operand.shape), operand.tensor.dtype)
        for operand in problem.operands
    }
    with Handle("cpu") as handle:
        solver = handle.registry["ConvCpuDirect+Pointwise"]
        (config,) = solver.default_configs(problem, handle.device)
        invoker = make_invoker(problem, handle.device, solver, config, handle.compiler)
        invoker.run(bases_of(problem, arrays, None, NUMBERS), 0)
    sums = round_once(reference_on_host(problem.bare, x=arrays["x"], w=arrays["w"]), problem.y.dtype)
    wanted = apply_epilogue(problem, sums.astype(np.float64), arrays, NUMBERS)
    assert np.array_equal(arrays["y"], round_once(wanted, problem.y.dtype))
    assert solver.rounds_twice(problem, config) == (dtype in ("float16", "bfloat16"))
