"""Composed solvers: another solver for the convolution, then passes over what it has written for the epilogue.

One applies what changes results, others sum each channel up for second outputs.

So every solver answers fused problems. A solver whose own kernels apply the epilogue moves the output once, not three
times, and rounds once; where no kernel does, or its fused form is slow, the composed form stands in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from miofind.core.epilogue import Epilogue
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.registry import composed_id
from miofind.solver.solver import APPLICABLE, Applicability, Reach, Solver
from miofind.solver.steps import Config, ConvSolution, Packing, WorkspacePlan
from miofind.solvers.pointwise.channel_sums import channel_sums_ms, channel_sums_regions, channel_sums_steps
from miofind.solvers.pointwise.epilogue_pass import VECTOR_BYTES, pass_ms, pass_step

_EXAMPLES = {
    Direction.FORWARD: ("bias.relu", "statistics"),
    Direction.BACKWARD_DATA: ("residual.drelu",),
    Direction.BACKWARD_WEIGHTS: ("bias_gradient",),
}
"""Epilogues that a composed solver is tried with, by direction."""


class Composed(Solver):
    """A solver on the bare problem, then the passes; of fused problems alone. Its configurations are the other's.

    Equal where the other solvers are.

    Args:
        inner: the solver that computes the convolution.
    """

    def __init__(self, inner: Solver) -> None:
        self.inner = inner
        fields: dict[str, object] = {"id": composed_id(inner.id)}
        for name in ("version", "algorithm", "keys", "is_dynamic", "is_last_resort", "parameters"):
            fields[name] = getattr(inner, name)
        vars(self).update(fields)  # of the class, in other solvers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Composed) and other.inner is self.inner

    def __hash__(self) -> int:
        return hash((Composed, self.inner))

    @property
    def library(self) -> Library:
        return self.inner.library

    @property
    def is_own(self) -> bool:
        return self.inner.is_own

    @property
    def names(self) -> frozenset[str]:
        return super().names | self.inner.names

    def tensor_alignment(self, problem: ProblemDescription) -> int:
        own = 1 if self.keys[0].place is Place.CPU else VECTOR_BYTES
        return max(self.inner.tensor_alignment(problem.bare), super().tensor_alignment(problem), own)

    def examples(self) -> tuple[ProblemDescription, ...]:
        return tuple(
            replace(problem.bare, epilogue=Epilogue.of(text))
            for problem in self.inner.examples()
            for text in _EXAMPLES.get(problem.direction, ())
        )

    def applicability(self, problem: ProblemDescription, device: Device) -> Applicability:
        if not problem.epilogue:
            return Applicability(f"the problem has no epilogue: {self.inner.id} computes it whole")
        return self.inner.applicability(problem.bare, device)

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return self.inner.is_applicable(problem.bare, device)

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return self.inner.default_configs(problem.bare, device)

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return self.inner.is_valid_config(problem.bare, device, config)

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        return self.inner.configs(problem.bare, device)

    def drawn_configs(
        self, problem: ProblemDescription, device: Device, points: int, seed: int | str = 0
    ) -> Iterator[Config]:
        return self.inner.drawn_configs(problem.bare, device, points, seed)

    def ranked(self, problem: ProblemDescription, device: Device, configs: Iterable[Config]) -> list[Config]:
        return self.inner.ranked(problem.bare, device, configs)

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        self.inner.check_config(problem.bare, device, config)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        bare_ms = self.inner.estimate_ms(problem.bare, device, config)
        return bare_ms + pass_ms(problem, device) + channel_sums_ms(problem, device)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return _with_passes(self.inner.solution(problem.bare, device, config), problem, device)

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        own = WorkspacePlan(regions=channel_sums_regions(problem, device))
        return self.inner.workspace_bytes(problem.bare, device, config) + own.bytes

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        packing = self.inner.packing(problem.bare, device, config)
        return packing and replace(packing, run=_with_passes(packing.run, problem, device))

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return self.inner.error_growth(problem.bare, config)

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        return self.inner.error_reach(problem.bare, config)

    def keeps_bound(self, problem: ProblemDescription, config: Config) -> bool:
        return self.inner.keeps_bound(problem.bare, config)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return self.inner.spreads_nonfinite(problem.bare, config)

    def is_exact(self, config: Config) -> bool:
        return self.inner.is_exact(config)

    def rounds_twice(self, problem: ProblemDescription, config: Config) -> bool:
        return problem.epilogue.changes_results and problem.output.dtype.itemsize < problem.accumulator.itemsize


def _with_passes(solution: ConvSolution, problem: ProblemDescription, device: Device) -> ConvSolution:
    """A solution of the bare problem and the passes behind it."""
    passes = (pass_step(problem, device),) if problem.epilogue.changes_results else ()
    regions = (*solution.workspace.regions, *channel_sums_regions(problem, device))
    return replace(
        solution,
        steps=(*solution.steps, *passes, *channel_sums_steps(problem, device)),
        workspace=WorkspacePlan(regions=regions),
    )
