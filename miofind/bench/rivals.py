"""What miofind's best is compared with: PyTorch, cuDNN with one pass over its result, cuDNN's fused engines.

Each has the form of an invoker, so that one protocol times all. PyTorch is eager: a convolution, then a pass for each
part of an epilogue. One pass is what compilers of networks make of a fused convolution: cuDNN's best bare convolution,
then one element-wise kernel (here miofind's own) that applies the whole epilogue. PyTorch computes volumes as volumes;
cuDNN's sides compute as images those that are (`ProblemDescription.flattened`), as miofind has it do: 0.96 of its time
as volumes in the geometric mean of 68, 3.3 times in the worst of them (an H200).
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from miofind.bench.torch_rival import TorchRival
from miofind.core.problem import ProblemDescription
from miofind.errors import NoSolutionError
from miofind.find.lookup import records
from miofind.find.lookup.scopes import Coverage
from miofind.find.measuring import measure
from miofind.measure.backend import Runnable
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import composed_id

LIBRARY_SOLVER = "ConvCudnn"


class Rival(StrEnum):
    """A side of a comparison beside miofind's."""

    TORCH = "torch"
    ONE_PASS = "one-pass"
    CUDNN = "cudnn"


def find_rival(rival: Rival, problem: ProblemDescription, options: FindOptions, handle: Handle) -> None:
    """Measure what a rival's solution is chosen by, where the FindDB does not answer it; `options` limit effort."""
    if rival is Rival.TORCH:
        return
    wanted, own = _library_problem(rival, problem), _of_library(options)
    if records.look_up(wanted, own, handle, coverage=Coverage.ALL) is None:
        measure(wanted, own, handle)


def runnable(rival: Rival, problem: ProblemDescription, options: FindOptions, handle: Handle) -> Runnable:
    """What runs a rival's side of a problem.

    Raises:
        MissingLibraryError, LaunchError: PyTorch is not there, or does not compute the problem.
        NoSolutionError: cuDNN does not.
    """
    if rival is Rival.TORCH:
        return TorchRival(problem, handle.device.index)
    wanted, own = _library_problem(rival, problem), _of_library(options)
    found = records.look_up(wanted, own, handle) or measure(wanted, own, handle)
    best = next((solution for solution in found if solution.solver_id == LIBRARY_SOLVER), None)
    if best is None:
        raise NoSolutionError(f"{LIBRARY_SOLVER} has no kernel that applies epilogue {problem.epilogue}")
    if rival is Rival.ONE_PASS and problem.epilogue:
        return handle.invoker(problem.flattened, composed_id(LIBRARY_SOLVER), best.config)
    return best.runner.prepare()


def _library_problem(rival: Rival, problem: ProblemDescription) -> ProblemDescription:
    # Flattened first: a bare volume may be images where the fused one is not, whose configurations are others.
    return problem.flattened.bare if rival is Rival.ONE_PASS else problem.flattened


def _of_library(options: FindOptions) -> FindOptions:
    return replace(options, only=(LIBRARY_SOLVER,), exclude=())
