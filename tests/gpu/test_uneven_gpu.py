"""Solvers that keep direct summation's bound keep it whatever finite values inputs have."""

from __future__ import annotations

import pytest
from device_buffers import Buffer, download, upload
from small_examples import small_examples
from uneven import uneven_inputs

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.solver.solver import Solver

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("solver", "problem"), list(small_examples()), ids=lambda case: getattr(case, "id", None) or str(case)
)
def test_the_bound_holds_whatever_finite_values_inputs_have(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    import cupy

    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    kept = [c for c in solver.default_configs(problem, device) if solver.keeps_bound(problem, c)]
    if not kept:
        pytest.skip("says that its errors are wider")
    trials = list(uneven_inputs(problem, seed=4))
    for config in kept[:3]:
        invoker = make_invoker(problem, device, solver, config, compiler)
        workspace = Buffer(invoker.workspace_bytes)
        for uneven in trials:
            buffers = upload(problem, uneven.inputs)
            tensors = [buffer.address for buffer in buffers.values()]
            invoker.run((*tensors, workspace.address), cupy.cuda.get_current_stream().ptr)
            uneven.check(download(problem, buffers), solver.error_reach(problem, config))
