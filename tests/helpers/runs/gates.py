"""Configurations of a solver held to the gates of correctness on a GPU."""

from __future__ import annotations

from collections.abc import Collection

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.solver.solver import Solver
from miofind.solver.steps import Config
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier


def check_gates(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler, configs: Collection[Config]
) -> None:
    """Configurations pass the gates; there is at least one."""
    failures = []
    assert configs
    with Verifier(problem, device, compiler, seed=5) as verifier:
        for config in configs:
            invoker = make_invoker(problem, device, solver, config, compiler)
            verdict = verifier.verify(invoker, claims_of(solver, problem, device, config, compiler))
            if not verdict.ok:
                failures.append(f"{config.json}: {verdict.message}")
    assert not failures, "\n".join(failures)
