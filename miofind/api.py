"""The public functions: find solutions, run one, or do both at once with the answer cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

from miofind.arrays import arrays, operands
from miofind.arrays.array_problem import (
    EPILOGUE_ARGUMENTS,
    epilogue_arrays,
    output_views,
    problem_from_views,
    refuse_epilogue,
)
from miofind.core.arguments import EPILOGUE_OF_DIRECTION, EpilogueArguments
from miofind.core.epilogue import EPILOGUE_NUMBERS, EPILOGUE_VECTORS, SECOND_OUTPUTS
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidArrayError, InvalidOptionError, brief
from miofind.find.pipeline import find, find_mode
from miofind.options import FindEnforce, FindMode, FindOptions
from miofind.runtime.handle import Handle, default_handle
from miofind.runtime.runner import EPILOGUE_NAMES, parameters_of
from miofind.runtime.solution import Solution

_DEFAULT_OPTIONS = FindOptions()
_KEYWORDS = frozenset({"options", "handle", "out", "workspace", "stream"})
"""Of `convolution` and its gradients, beside the problem's own."""

_OF_EPILOGUE = EPILOGUE_ARGUMENTS.union(EPILOGUE_NAMES)
"""Keywords of `convolution` that say what epilogue it has, and what that is given."""

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
        raise _wrong_argument(problem, options, handle)
    key = (problem.network_config, options)
    cached = handle.answers.get(key)
    if cached is not None and not _measures_always(options):
        return cached.copy()
    solutions = find(problem, options, handle)
    handle.remember(key, solutions)
    return solutions.copy()


def _wrong_argument(problem: object, options: object, handle: object) -> InvalidOptionError:
    if not isinstance(problem, ProblemDescription):
        return InvalidOptionError(f"problem={brief(problem)} must be a ProblemDescription")
    if not isinstance(options, FindOptions):
        return InvalidOptionError(f"options={brief(options)} must be FindOptions")
    return InvalidOptionError(f"handle={brief(handle)} must be a Handle, such as miofind.Handle('cpu')")


def _measures_always(options: FindOptions) -> bool:
    """Whether a request must reach the pipeline even where this process knows an answer."""
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


def convolution(x: Any, w: Any, **arguments: Any) -> Any:
    """y = x * w, with an epilogue where one is asked for: the fastest solution, found once for each problem.

    An epilogue computes activation(alpha * (x * w) * scale + bias + channel_bias + beta * residual) in the type that
    products are summed in; with residual_position="after" the residual is added to what the activation gives. What is
    left out is not computed.

    Args:
        x: (n, c, *spatial), 1 to 3 spatial dimensions; packed channels first or last.
        w: (k, c/groups, *filter).
        arguments: padding, stride, dilation, groups, math as in `ProblemDescription.convolution`; options, handle as in
            `find_solutions`; out, workspace, stream as in `run_solution`. Of the epilogue: scale, bias, channel_bias,
            residual, alpha, beta, low, high and slope as in `run_solution`, with scale and bias both of y's dtype or
            both float32; residual_position, "before" (if left out) or "after" the activation; activation, a name of
            `miofind.Activation`, or "relu6", which is clamp with its bounds of 0 and 6; statistics=True for the sum and
            sum of squares of each channel of y.

    Returns:
        (n, k, *out_spatial), of the kind of x; its layout follows `out` if given, else x. With statistics an
        `OutputStatistics`: y, and sum and sum_of_squares, (k,), float32 (float64 for float64), of y as it is stored.
    """
    return _call(Direction.FORWARD, {"x": x, "w": w}, None, **arguments)


def convolution_backward_data(dy: Any, w: Any, x_shape: Sequence[int], **arguments: Any) -> Any:
    """dx: the gradient of a convolution's input.

    Args:
        dy: (n, k, *out_spatial).
        w: (k, c/groups, *filter).
        x_shape: (n, c, *spatial) of the forward convolution.
        arguments: as in `convolution`, but of the epilogue these: residual, (n, c, *spatial), a gradient that is added;
            derivative, the activation that made the forward x, one of `miofind.Activation` or "relu6", by whose
            derivative the sum is multiplied; saved, (n, c, *spatial), at what: for relu, clamp and leaky_relu what the
            activation gave or was given, for silu, gelu, gelu_tanh and hardswish what it was given; alpha, beta, low,
            high and slope. dx = (alpha * gradient + beta * residual) * derivative(saved).

    Returns:
        (n, c, *spatial), of the kind of dy.
    """
    return _call(Direction.BACKWARD_DATA, {"y": dy, "w": w}, x_shape, **arguments)


def convolution_backward_weights(dy: Any, x: Any, w_shape: Sequence[int], **arguments: Any) -> Any:
    """dw: the gradient of a convolution's filter.

    Args:
        dy: (n, k, *out_spatial).
        x: (n, c, *spatial).
        w_shape: (k, c/groups, *filter).
        arguments: as in `convolution`, without those of an epilogue; bias_gradient=True for the sum of dy of each
            channel.

    Returns:
        (k, c/groups, *filter), of the kind of dy. With bias_gradient a `ParameterGradients`: dw, and bias_gradient,
        (k,), of dw's dtype, or of the dtype that it has in `out`.
    """
    return _call(Direction.BACKWARD_WEIGHTS, {"y": dy, "x": x}, w_shape, **arguments)


def _call(
    direction: Direction,
    given: dict[str, Any],
    missing_shape: Sequence[int] | None,
    *,
    options: FindOptions | None = None,
    handle: Handle | None = None,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
    **arguments: Any,
) -> Any:
    given, numbers = dict(given), {}
    views = {name: arrays.view(array, _user_name(name, direction)) for name, array in given.items()}
    views |= output_views(direction, out, arguments)
    if not _OF_EPILOGUE.isdisjoint(arguments):
        refuse_epilogue(direction, _OF_EPILOGUE & arguments.keys())
        numbers = _taken_numbers(arguments)
        read = epilogue_arrays(arguments)
        given |= read
        views |= {name: arrays.view(array, name) for name, array in read.items()}
    keywords = _KEYWORDS | EPILOGUE_OF_DIRECTION[direction]
    problem = problem_from_views(direction, views, missing_shape, arguments, keywords)
    if numbers:
        parameters_of(problem, numbers)
    if handle is None:
        handle = default_handle(_device_of(views))
    solutions = find_solutions(problem, options=options, handle=handle)
    placed = _placed(solutions, views, given, stream)
    given = placed.given
    x, w, dy = given.pop("x", None), given.pop("w", None), given.pop("y", None)
    return run_solution(placed.solution, x, w, dy=dy, out=out, workspace=workspace, stream=stream, **given, **numbers)


class _Placed(NamedTuple):
    """A solution, and arrays whose addresses have the alignment that it needs."""

    solution: Solution
    given: dict[str, Any]


def _placed(
    solutions: Sequence[Solution], views: Mapping[str, arrays.ArrayView], given: dict[str, Any], stream: Any
) -> _Placed:
    """The first solution whose alignment the tensors have, else the first of all with copies of those that lack it.

    The vectors of an epilogue are small, and copied rather than that another solution runs. Second outputs may begin
    anywhere.
    """
    addresses = [v.address for name, v in views.items() if name not in (*EPILOGUE_VECTORS, *SECOND_OUTPUTS)]
    # A generator: runners behind the first that fits are not made on every call.
    fitting = (s for s in solutions if not any(a % s.runner.alignment_bytes for a in addresses))
    solution = next(fitting, solutions[0])
    alignment, index = solution.runner.alignment_bytes, solution.solution_list.handle.device.index
    if any(views[name].address % alignment for name in given):
        wanted = {operand.name: operand.array for operand in solution.problem.operands}
        with operands.allocating_on(next(iter(given.values())), stream, index):
            given = {n: arrays.aligned_copy(array, wanted[n], index, alignment) for n, array in given.items()}
    return _Placed(solution, given)


def _taken_numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an epilogue that are there, taken out of the arguments.

    Raises:
        InvalidOptionError: bounds of an activation whose name has them.
    """
    taken = {name: arguments.pop(name) for name in EPILOGUE_NUMBERS if name in arguments}
    numbers = {name: value for name, value in taken.items() if value is not None}
    bounds = [f"{name}={brief(numbers[name])}" for name in ("low", "high") if name in numbers]
    if bounds and "relu6" in (str(arguments.get(name)).lower() for name in ("activation", "derivative")):
        raise InvalidOptionError(f"{', '.join(bounds)}: relu6 has the bounds 0 and 6, clamp has others")
    return numbers


def _user_name(tensor: str, direction: Direction) -> str:
    return "dy" if tensor == "y" and direction is not Direction.FORWARD else tensor


def _device_of(views: dict[str, arrays.ArrayView]) -> Device:
    """The device all arrays are on.

    Raises:
        InvalidArrayError: they are on several.
    """
    indices = {name: v.device_index for name, v in views.items()}
    if len(set(indices.values())) > 1:
        places = ", ".join(f"{name} on {'the host' if i < 0 else f'cuda:{i}'}" for name, i in indices.items())
        raise InvalidArrayError(f"the arrays are on different devices ({places}): move them to one")
    index = next(iter(indices.values()))
    return Device.cpu() if index < 0 else Device.cuda(index)
