"""Configurations of a solver held to the gates of correctness."""

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
    solver: Solver,
    problem: ProblemDescription,
    device: Device,
    compiler: Compiler,
    configs: Collection[Config],
    *,
    seed: int = 5,
) -> None:
    """Configurations pass the gates that they claim to, on inputs of a seed; there is at least one."""
    failures = []
    assert configs
    with Verifier(problem, device, compiler, seed=seed) as verifier:
        for config in configs:
            invoker = make_invoker(problem, device, solver, config, compiler)
            verdict = verifier.verify(invoker, claims_of(solver, problem, device, config, compiler))
            if not verdict.ok:
                failures.append(f"{config.json}: {verdict.message}")
    assert not failures, "\n".join(failures)


def check_both_gates(
    problem: ProblemDescription, solver: Solver, config: Config, device: Device, compiler: Compiler
) -> None:
    """A configuration gives right results, and the same ones again."""
    with Verifier(problem, device, compiler) as verifier:
        invoker = make_invoker(problem, device, solver, config, compiler)
        claims = claims_of(solver, problem, device, config, compiler)
        verdict = verifier.verify(invoker, claims)
        assert verdict.ok, verdict.message
        assert verifier.repeat(invoker, claims, verdict.fingerprint) == ""
