"""A candidate through both gates of a find, and once more for results that repeat."""

from __future__ import annotations

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.solver.solver import Solver
from miofind.solver.steps import Config
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier


def check_both_gates(
    problem: ProblemDescription, solver: Solver, config: Config, device: Device, compiler: Compiler
) -> None:
    """Right results, and the same ones again."""
    with Verifier(problem, device, compiler) as verifier:
        invoker = make_invoker(problem, device, solver, config, compiler)
        claims = claims_of(solver, problem, device, config, compiler)
        verdict = verifier.verify(invoker, claims)
        assert verdict.ok, verdict.message
        assert verifier.repeat(invoker, claims, verdict.fingerprint) == ""
