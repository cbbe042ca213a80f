"""Small integers through a solver on a GPU, for its tests. Imports CuPy when it is used."""

from __future__ import annotations

import numpy as np
from device_buffers import Buffer, download, integers, upload

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.reference import numpy_dtype, reference_on_host
from miofind.solver.solver import Solver
from miofind.solver.steps import Config


def check_exact(
    problem: ProblemDescription, solver: Solver, config: Config, device: Device, compiler: Compiler
) -> None:
    """Exact results from small integers, guard bands intact."""
    import cupy

    inputs = integers(problem, seed=len(config.json))
    invoker = make_invoker(problem, device, solver, config, compiler)
    buffers = upload(problem, inputs)
    workspace = Buffer(invoker.workspace_bytes)
    tensors = [buffer.address for buffer in buffers.values()]
    invoker.run((*tensors, workspace.address), cupy.cuda.get_current_stream().ptr)
    result = download(problem, buffers)
    workspace.read(np.dtype(np.uint8))
    expected = reference_on_host(problem, **inputs).astype(numpy_dtype(problem.output.dtype)).astype(np.float64)
    np.testing.assert_array_equal(result, expected, err_msg=config.json)
