"""How close to their error bounds right results come, for the first configuration of every solver.

Run: python benchmarks/bound_ratio.py [cuda|cpu]. The ratio is the share of the arithmetic's bound that the
worst error takes beyond the rounding of the output: near 1 the bound is too tight for that solver.
"""

from __future__ import annotations

from collections.abc import Iterator

import script

from miofind.compiler import Compiler
from miofind.core.problem import Direction, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.errors import MiofindError
from miofind.launch.invoker import make_invoker
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

ARITHMETIC = (("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "tf32"), ("float32", "ieee"), ("float64", "ieee"))


def problems() -> Iterator[ProblemDescription]:
    """A short, a usual and a long reduction in each direction and arithmetic."""
    for direction in Direction:
        for dtype, math in ARITHMETIC:
            for x, w in (((4, 64, 28, 28), (64, 64, 1, 1)), ((8, 128, 28, 28), (128, 128, 3, 3))):
                yield ProblemDescription.convolution(
                    x=x,
                    w=w,
                    padding=w[2] // 2,
                    dtype=dtype,
                    math=MathMode(math),
                    layout="NHWC",
                    direction=direction,
                )


def line(verifier: Verifier, problem: ProblemDescription, solver: Solver, device: Device, compiler: Compiler) -> str:
    """One solver's result on one problem."""
    config = solver.default_configs(problem, device)[0]
    try:
        invoker = make_invoker(problem, device, solver, config, compiler)
        claims = claims_of(solver, problem, device, config, compiler)
        verdict = verifier.verify(invoker, claims)
    except MiofindError as error:
        return f"  {solver.id:28} {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    if verdict.bound_ratio is None:
        return f"  {solver.id:28} {verdict.message[:140]}"
    return (
        f"  {solver.id:28} ratio {verdict.bound_ratio:.3f}  growth {claims.growth:<8.3g} error {verdict.max_error:.2g}"
    )


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("place", nargs="?", choices=["cuda", "cpu"], default="cuda")
    device = Device.named(parser.parse_args().place)
    compiler = Compiler()
    for problem in problems():
        print(problem)
        with Verifier(problem, device, compiler) as verifier:
            for solver in Registry.default().values():
                if solver.applicability(problem, device):
                    print(line(verifier, problem, solver, device, compiler))


if __name__ == "__main__":
    script.run(main)
