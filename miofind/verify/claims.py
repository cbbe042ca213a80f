"""What a candidate claims of its results, and what verification holds it to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.solver.steps import Config
from miofind.verify.harness import PackedForm

if TYPE_CHECKING:
    from miofind.compiler import Compiler
    from miofind.solver.solver import Solver


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a candidate claims beside being right; determinism is its invoker's claim.

    Attributes:
        growth: how much wider its error bound is than direct summation's.
        exact: small integers give exact results, at any power of two that the types hold.
        spreads_nonfinite: an infinity or NaN may reach results that do not sum it.
        rounds_twice: sums are rounded to the output's dtype before the epilogue; false where there is no epilogue.
        packed: the candidate in two parts, for weights that stay the same; None where it has none.
    """

    growth: float = 1.0
    exact: bool = True
    spreads_nonfinite: bool = False
    rounds_twice: bool = False
    packed: PackedForm | None = None


def claims_of(
    solver: Solver, problem: ProblemDescription, device: Device, config: Config, compiler: Compiler
) -> Claims:
    """The claims of a solver's configuration, with its packed form ready to run.

    Raises:
        CompileError, LaunchError, MissingLibraryError: the packed form cannot be made ready.
    """
    packing = solver.packing(problem, device, config)
    packed = None
    if packing is not None:
        pack, run = (
            make_invoker(problem, device, solver, config, compiler, part) for part in (packing.pack, packing.run)
        )
        packed = PackedForm(pack=pack, run=run, bytes=packing.bytes)
    growth = solver.error_growth(problem, config)
    return Claims(
        growth=growth,
        exact=solver.is_exact(config) and growth <= 1,  # wider bounds come with transforms in the tensors' own type
        spreads_nonfinite=solver.spreads_nonfinite(problem, config),
        rounds_twice=bool(problem.epilogue) and solver.rounds_twice(problem, config),
        packed=packed,
    )
