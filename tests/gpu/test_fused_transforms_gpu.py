"""Winograd's solvers that fuse an epilogue, on a GPU: all gates for configurations that reach every exit."""

from __future__ import annotations

from typing import Any

import pytest
from drawn_configs import spread

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.solver.registry import Registry
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

EPILOGUES = ("scale.bias.channel_bias.residual.clamp", "bias.silu.residual", "channel_bias.gelu")
GRADIENTS = ("residual.drelu", "dsilu")
WINOGRAD: dict[str, dict[str, Any]] = {
    "3x3": {"x": (8, 64, 28, 28), "w": (96, 64, 3, 3), "padding": 1},
    "last": {"x": (8, 64, 28, 28), "w": (96, 64, 3, 3), "padding": 1, "layout": "NHWC"},
    "odd": {"x": (3, 33, 17, 15), "w": (35, 33, 3, 3), "padding": ((1, 0), (0, 2))},
    "groups": {"x": (4, 128, 13, 14), "w": (64, 32, 3, 3), "padding": 1, "groups": 4, "layout": "NHWC"},
}
ANY_WINOGRAD: dict[str, dict[str, Any]] = {
    **WINOGRAD,
    "tf32": {"x": (4, 32, 20, 18), "w": (48, 32, 5, 5), "padding": 2, "math": "tf32"},
    "1d": {"x": (5, 48, 77), "w": (32, 24, 3), "padding": 1, "groups": 2, "layout": "NWC"},
}
LIBRARY_WINOGRAD: dict[str, dict[str, Any]] = {
    **ANY_WINOGRAD,
    "float16": {"x": (4, 64, 17, 28), "w": (64, 64, 3, 3), "padding": 1, "dtype": "float16", "layout": "NHWC"},
    "bfloat16": {"x": (2, 48, 18, 20), "w": (40, 48, 3, 3), "dtype": "bfloat16"},
    "mixed": {**WINOGRAD["odd"], "layout": {"x": "NHWC", "w": "NCHW", "y": "NCHW"}},
}
SHAPES = {
    "ConvWinogradFused": WINOGRAD,
    "ConvWinogradMma": ANY_WINOGRAD,
    "ConvWinograd": LIBRARY_WINOGRAD,
}
CASES = [
    pytest.param(solver_id, fields, id=f"{solver_id}-{name}")
    for solver_id, shapes in SHAPES.items()
    for name, fields in shapes.items()
]


def check(solver_id: str, problem: ProblemDescription, device: Device, compiler: Compiler) -> None:
    """Configurations pass the gates that they claim to."""
    solver = Registry.default()[solver_id]
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    failures = []
    with Verifier(problem, device, compiler, seed=5) as verifier:
        for config in spread(solver, problem, device, 1, defaults=2):
            invoker = make_invoker(problem, device, solver, config, compiler)
            verdict = verifier.verify(invoker, claims_of(solver, problem, device, config, compiler))
            if not verdict.ok:
                failures.append(f"{config.json}: {verdict.message}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("solver_id", "fields"), CASES)
def test_results_have_their_epilogue(
    solver_id: str, fields: dict[str, Any], epilogue: str, device: Device, compiler: Compiler
) -> None:
    check(solver_id, ProblemDescription.convolution(**fields, epilogue=epilogue), device, compiler)


@pytest.mark.parametrize("epilogue", GRADIENTS)
@pytest.mark.parametrize(("solver_id", "fields"), CASES)
def test_gradients_have_their_epilogue(
    solver_id: str, fields: dict[str, Any], epilogue: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**fields, direction="backward_data", epilogue=epilogue)
    check(solver_id, problem, device, compiler)
