"""What a mutant is: one right convolution with one change, and what its solver says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.options import FindOptions
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.solver.steps import Config, ConfigValue

# Wide enough for solvers whose bound is wider than direct summation's; a default find leaves these out.
ANY_ERROR = FindOptions(max_error=1.0)
DEFAULT = FindOptions()


def conv(**fields: Any) -> ProblemDescription:
    """A small problem that has everything: strides, dilations, uneven padding and groups."""
    everything = {
        "x": (3, 6, 11, 10),
        "w": (8, 3, 3, 3),
        "padding": ((1, 0), (1, 2)),
        "stride": (2, 1),
        "dilation": (1, 2),
        "groups": 2,
    }
    return ProblemDescription.convolution(**(everything | fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a mutant's solver says of itself; what it does may be something else.

    Attributes:
        exact: small integers give exact results.
        deterministic: equal inputs give equal bits.
        spreads_nonfinite: an infinity or NaN may reach results that do not sum it.
        rounds_twice: sums are rounded to the output's dtype before the epilogue.
        error_growth: how much wider its error bound is than direct summation's.
        alignment_bytes: of the tensors' addresses.
        workspace_bytes: of one region, "scratch".
        estimate_ms: where among the others it is tried; the right solver says 2.
    """

    exact: bool = True
    deterministic: bool = True
    spreads_nonfinite: bool = False
    rounds_twice: bool = False
    error_growth: float = 1.0
    alignment_bytes: int = 1
    workspace_bytes: int = 0
    estimate_ms: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One solver to be tried by a find.

    Attributes:
        name: of the function or branch that differs from the right convolution.
        fault: what is wrong, in a sentence; of a right one, what is odd.
        problem: shows the fault.
    """

    name: str
    fault: str
    problem: ProblemDescription
    declared: Declared = Declared()

    @property
    def options(self) -> FindOptions:
        """The defaults, and the error bound that the solver asks for."""
        return ANY_ERROR if self.declared.error_growth > 1 else DEFAULT


class MutantSolver(Solver):
    """Serves the problem of one mutant; its only configuration is the mutant's name."""

    algorithm = Algorithm.DIRECT
    place: ClassVar[Place]

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.id = f"mutant/{mutant.name}"  # type: ignore[misc]
        self.parameters: Mapping[str, Sequence[ConfigValue]] = {"mutant": (mutant.name,)}  # type: ignore[misc]
        self.alignment_bytes = mutant.declared.alignment_bytes  # type: ignore[misc]

    def __init_subclass__(cls) -> None:
        cls.keys = (
            KernelKey(
                place=cls.place,
                library=Library.PLAIN,
                dtypes=frozenset(DataType),
                layouts=frozenset(Layout),
                min_sm=0 if cls.place is Place.CPU else 80,
            ),
        )

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (self.mutant.problem,)

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if self.mutant.problem.epilogue and not problem.epilogue:  # it may be right of that, and leave others behind
            return Applicability("serves fused problems")
        return APPLICABLE

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def rounds_twice(self, problem: ProblemDescription, config: Config) -> bool:
        return self.mutant.declared.rounds_twice

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return (Config.of(mutant=self.mutant.name),)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return self.mutant.declared.estimate_ms

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return self.mutant.declared.error_growth

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return self.mutant.declared.spreads_nonfinite

    def is_exact(self, config: Config) -> bool:
        return self.mutant.declared.exact
