"""Solvers that keep direct summation's bound keep it whatever finite values inputs have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_buffers import Buffer, download, upload
from uneven import uneven_inputs

from miofind.compiler import Compiler
from miofind.device import Device, Place
from miofind.invoker import make_invoker
from miofind.problem import ProblemDescription
from miofind.solver import Solver, solvers

pytestmark = pytest.mark.gpu

_MOST_ELEMENTS = 1 << 20
_PROBLEMS = 6


def cases() -> Iterator[tuple[Solver, ProblemDescription]]:
    """A few examples of every solver."""
    for solver in solvers().values():
        if any(key.place is Place.CUDA for key in solver.keys):
            small = [p for p in solver.examples() if max(t.size for t in (p.x, p.w, p.y)) <= _MOST_ELEMENTS]
            yield from ((solver, problem) for problem in small[:_PROBLEMS])


@pytest.mark.parametrize(("solver", "problem"), list(cases()), ids=lambda case: getattr(case, "id", None) or str(case))
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
            tensors = [buffers[name].address for name in ("x", "w", "y")]
            invoker.run(*tensors, workspace.address, cupy.cuda.get_current_stream().ptr)
            uneven.check(download(problem, buffers), solver.error_reach(problem, config))
