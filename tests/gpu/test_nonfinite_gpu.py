"""An infinity in an input reaches the results that sum it and no others, unless a solver says that it spreads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from device_buffers import Buffer, download, upload
from nonfinite import infinities

from miofind.compiler import Compiler
from miofind.device import Device, Place
from miofind.invoker import make_invoker
from miofind.problem import ProblemDescription
from miofind.solver import Solver, solvers

pytestmark = pytest.mark.gpu

_MOST_ELEMENTS = 1 << 20
_PROBLEMS = 6


def cases() -> Iterator[tuple[Solver, ProblemDescription]]:
    """A few examples of every solver, each as float16 where that is served."""
    for solver in solvers().values():
        if any(key.place is Place.CUDA for key in solver.keys):
            small = [p for p in solver.examples() if max(t.size for t in (p.x, p.w, p.y)) <= _MOST_ELEMENTS]
            yield from ((solver, problem) for problem in small[:_PROBLEMS])


@pytest.mark.parametrize(("solver", "problem"), list(cases()), ids=lambda case: getattr(case, "id", None) or str(case))
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
            tensors = [buffers[name].address for name in ("x", "w", "y")]
            invoker.run(*tensors, workspace.address, cupy.cuda.get_current_stream().ptr)
            infinity.check(download(problem, buffers))
            np.testing.assert_array_equal(workspace.memory[:8].get(), 0xFF)
