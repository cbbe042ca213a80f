"""Solutions of a problem, and the run of one."""

from __future__ import annotations

from typing import Any, Unpack

from miofind.core.arguments import EpilogueArguments
from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidOptionError, brief
from miofind.find.pipeline import find, find_mode
from miofind.options import FindEnforce, FindMode, FindOptions
from miofind.runtime.handle import Handle, default_handle, no_handle
from miofind.runtime.solution import Solution

_DEFAULT_OPTIONS = FindOptions()

_NEVER_CACHED = (FindEnforce.DB_UPDATE, FindEnforce.SEARCH_DB_UPDATE, FindEnforce.DB_CLEAN)


def find_solutions(
    problem: ProblemDescription, *, options: FindOptions | None = None, handle: Handle | None = None
) -> list[Solution]:
    """Solutions of a problem, fastest first.

    The answer comes from this process's cache, else from the FindDB, else from measuring, as `options.find_mode` says.
    All are verified but those whose `source` is "predicted", which FAST and on_miss="estimate" give.

    Args:
        problem: what to solve.
        options: limits, filters and effort; the defaults if left out.
        handle: device, caches and FindDB; the current GPU's default one if left out, else the CPU place's.

    Raises:
        NoSolutionError: nothing usable; the message lists each solver's reason.
        NoDeviceError, MissingLibraryError: the handle's device cannot be used.
        LaunchError: called while a CUDA graph is being captured and something would have to be measured.
    """
    if options is None:
        options = _DEFAULT_OPTIONS
    if handle is None:
        handle = default_handle()
    if not (
        isinstance(problem, ProblemDescription) and isinstance(options, FindOptions) and isinstance(handle, Handle)
    ):
        raise wrong_argument(problem, options, handle)
    key = (problem.network_config, options)
    cached = handle.answers.get(key)
    if cached is not None and not measures_always(options):
        return cached.copy()
    solutions = find(problem, options, handle)
    handle.remember(key, solutions)
    return solutions.copy()


def wrong_argument(problem: object, options: object, handle: object) -> InvalidOptionError:
    """The error that says which of a find's arguments is none."""
    if not isinstance(problem, ProblemDescription):
        return InvalidOptionError(f"problem={brief(problem)} must be a ProblemDescription")
    if not isinstance(options, FindOptions):
        return InvalidOptionError(f"options={brief(options)} must be FindOptions")
    return no_handle(handle)


def measures_always(options: FindOptions | None) -> bool:
    """Whether a request must reach the pipeline even where this process knows an answer; None for the defaults."""
    options = _DEFAULT_OPTIONS if options is None else options
    return options.find_enforce in _NEVER_CACHED or find_mode(options) in (FindMode.NORMAL, FindMode.TRUST_VERIFY)


def run_solution(
    solution: Solution,
    x: Any = None,
    w: Any = None,
    *,
    dy: Any = None,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """The problem's output: y forward, dx for backward data, dw for backward weights.

    Where the problem's epilogue has more outputs, a named tuple: `OutputStatistics` (y, sum, sum_of_squares) or
    `ParameterGradients` (dw, bias_gradient).

    Strict about shape, strides, dtype, device and alignment. Asynchronous; with `out` and `workspace` nothing is
    allocated, so that a run can be captured in a CUDA graph (`solution.prepare()` first).

    Args:
        solution: one that `find_solutions` returned or `Solution.load` read.
        x: (n, c, *spatial), for forward and backward weights.
        w: (k, c/groups, *filter), for forward and backward data.
        dy: (n, k, *out_spatial), for both backward directions.
        out: the output, allocated like the first input if left out; it shares no memory with an input. A tuple of them
            where there are several, such as what an earlier run returned; one that is None is allocated.
        workspace: at least `solution.workspace_bytes` bytes that are no other array's, on a GPU at a multiple of 256;
            allocated if left out, not looked at where they are 0.
        stream: a CuPy or PyTorch stream or its address; the current stream of the first input's library if left out.
        epilogue: what the problem's epilogue reads, and no more (see `miofind.Epilogue`): scale and bias, (k,), of its
            `parameter_dtype`; channel_bias, (n, k), and residual, (n, k, *out_spatial), of y's dtype, the residual in
            y's layout; for backward data residual and saved, (n, c, *spatial), of dx's dtype and layout. Its numbers:
            alpha, the factor of the convolution, 1 if left out; beta, that of the residual, 1 if left out; low and
            high, clamp's bounds, 0 and 6 if left out; slope, leaky_relu's (0.01 if left out) or elu's alpha (1). A CUDA
            graph keeps the numbers that it was captured with.

    Raises:
        InvalidArrayError: what was given and what the problem wants.
        InvalidOptionError: a number that is none, or of which the epilogue has no use.
        WorkspaceError: the workspace is too small, not aligned, or shares memory with another array.
        LaunchError: the launch failed and no other solution of the same find could take over.
    """
    if not isinstance(solution, Solution):
        raise InvalidOptionError(
            f"solution={brief(solution)} must be a Solution: one of those that find_solutions returns"
        )
    try:
        runner = solution.solution_list.runners[solution.position]
    except KeyError:
        runner = solution.runner
    if epilogue:
        return runner.run_fused(epilogue, x, w, dy, out, workspace, stream)
    return runner.run(x, w, dy, out, workspace, stream)
