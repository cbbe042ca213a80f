"""An infinity in an input reaches the results that sum it and no others, unless a solver says that it spreads."""

from __future__ import annotations

import numpy as np
import pytest
from device_buffers import Buffer, download, upload
from nonfinite import infinities
from small_examples import small_examples

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.solver.solver import Solver

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("solver", "problem"), list(small_examples()), ids=lambda case: getattr(case, "id", None) or str(case)
)
def test_infinities_reach_what_sums_them(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    import cupy

    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    kept = [c for c in solver.default_configs(problem, device) if not solver.spreads_nonfinite(problem, c)]
    if not kept:
        pytest.skip("says that it spreads them")
    for config in kept[:3]:
        invoker = make_invoker(problem, device, solver, config, compiler)
        workspace = Buffer(invoker.workspace_bytes)
        for infinity in infinities(problem, seed=4):
            buffers = upload(problem, infinity.inputs)
            tensors = [buffer.address for buffer in buffers.values()]
            invoker.run((*tensors, workspace.address), cupy.cuda.get_current_stream().ptr)
            infinity.check(download(problem, buffers))
            np.testing.assert_array_equal(workspace.memory[:8].get(), 0xFF)
