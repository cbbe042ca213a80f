"""From the arrays of one call to its result: the problem that they pose, its solution, and its run.

Images without a batch, empty batches and arrays that are not packed are made what solutions run with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from miofind.api.keywords import KEYWORDS
from miofind.api.repeated import MISS, Place, place_of, repeated
from miofind.api.solutions import find_solutions, run_solution
from miofind.arrays import arrays, operands
from miofind.arrays.array_problem import (
    EPILOGUE_ARGUMENTS,
    Posed,
    epilogue_arrays,
    output_views,
    posed,
    refuse_epilogue,
)
from miofind.arrays.facts import IMAGES, LIKE, user_name
from miofind.core.arguments import EPILOGUE_OF_DIRECTION
from miofind.core.epilogue import EPILOGUE_NUMBERS, EPILOGUE_VECTORS, SECOND_OUTPUTS
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidArrayError, InvalidOptionError, brief
from miofind.options import FindOptions
from miofind.runtime.handle import Handle, default_handle
from miofind.runtime.runner import EPILOGUE_NAMES, outputs_type, parameters_of
from miofind.runtime.solution import Solution

_OF_EPILOGUE = EPILOGUE_ARGUMENTS.union(EPILOGUE_NAMES)
"""Keywords of calls that say what epilogue they have, and what that is given."""


class Roles(NamedTuple):
    """What a call's arrays are, beside the two that are multiplied.

    Attributes:
        like: of the shape, dtype and memory order that the output has where it is not given; None for none.
        names: what the user calls tensors, where that is not their own name.
        place: where what runs the call is remembered; None for nowhere.
    """

    like: Any = None
    names: Mapping[str, str] = {}
    place: Place | None = None


_PLAIN = Roles()


def call(direction: Direction, first: Any, second: Any, missing_shape: Any, arguments: dict[str, Any]) -> Any:
    """The output of a direction: by what ran the last call of such arrays, else as `run_call` finds it.

    Args:
        direction: which tensor is computed.
        first, second: its inputs, as `Direction.inputs` has them.
        missing_shape: as in `run_call`.
        arguments: all keywords of the call.
    """
    result = repeated(direction, first, second, missing_shape, arguments)
    if result is not MISS:
        return result
    place = place_of(direction, first, second, missing_shape, arguments)
    given = dict(zip(direction.inputs, (first, second), strict=True))
    return run_call(direction, given, missing_shape, Roles(place=place), **arguments)


def run_call(
    direction: Direction,
    given: dict[str, Any],
    missing_shape: Sequence[int] | None = None,
    roles: Roles = _PLAIN,
    /,
    *,
    options: FindOptions | None = None,
    handle: Handle | None = None,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
    **arguments: Any,
) -> Any:
    """The output of a direction, by the fastest solution.

    Args:
        direction: which tensor is computed.
        given: the inputs by tensor name, dy as "y"; what an epilogue reads is put there, and copies that had to be
            made take the places of what they are of.
        missing_shape: of the output where nothing else gives it.
        roles: of the arrays.
        options, handle: as in `find_solutions`.
        out, workspace, stream: as in `run_solution`.
        arguments: of the problem and its epilogue.
    """
    numbers = _taken_numbers(direction, arguments)
    views = _views(direction, given, out, roles, arguments)
    posed_call = posed(direction, views, missing_shape, arguments, KEYWORDS | EPILOGUE_OF_DIRECTION[direction])
    problem = posed_call.problem
    if numbers:
        parameters_of(problem, numbers)
    views.pop(LIKE, None)
    device = device_of(views, direction, roles.names)
    if posed_call.empty:
        return _empty_outputs(problem, next(iter(given.values())), out, stream, device.index)
    solutions = find_solutions(problem, options=options, handle=default_handle(device) if handle is None else handle)
    as_given, written = dict(given), out
    if not posed_call.fits:
        written = _adapt(posed_call, given, out, stream, device.index)
        views |= {name: arrays.view(given[name], name) for name in posed_call.copied}
    solution = _placed(solutions, views, given, stream)
    if roles.place is not None and solution is solutions[0] and all(given[name] is as_given[name] for name in given):
        roles.place.keep(solution.runner, options)
    inputs = {"dy" if name == "y" else name: array for name, array in given.items()}
    result = run_solution(solution, **inputs, out=written, workspace=workspace, stream=stream, **numbers)
    if posed_call.unbatched:
        result = _without_batch(problem, result, out)
    return result if posed_call.fits or out is not None else _of_kind(next(iter(as_given.values())), result)


def _of_kind(like: Any, result: Any) -> Any:
    """The result as an array of another library's kind, where copies of its arrays in CuPy were run with."""
    if arrays.framework_of(like) is not arrays.Framework.OTHER:
        return result
    if isinstance(result, tuple):
        return type(result)(*(arrays.as_kind_of(like, array) for array in result))
    return arrays.as_kind_of(like, result)


def _views(
    direction: Direction, given: dict[str, Any], out: Any, roles: Roles, arguments: dict[str, Any]
) -> dict[str, arrays.ArrayView]:
    """Views of all arrays by tensor name; those of an epilogue are taken out of the arguments and put into `given`."""
    views = {n: arrays.view(array, roles.names.get(n) or user_name(n, direction)) for n, array in given.items()}
    views |= output_views(direction, out, arguments)
    if roles.like is not None and direction.output not in views:
        views[LIKE] = arrays.view(roles.like, direction.output)
    read = epilogue_arrays(arguments)
    given |= read
    return views | {name: arrays.view(array, name) for name, array in read.items()}


def _adapt(posed_call: Posed, given: dict[str, Any], out: Any, stream: Any, index: int) -> Any:
    """Put into `given` what a solution runs with; returns the outputs as it takes them."""
    if posed_call.unbatched:
        given |= {name: arrays.with_batch(array, name) for name, array in given.items() if name in IMAGES}
        out = _with_batch(posed_call.problem, out)
    if posed_call.copied:
        wanted = {operand.name: operand.array for operand in posed_call.problem.operands}
        with operands.allocating_on(next(iter(given.values())), stream, index):
            given |= {name: arrays.packed_copy(given[name], wanted[name], index) for name in posed_call.copied}
    return out


def _with_batch(problem: ProblemDescription, out: Any) -> Any:
    """Outputs of an image without a batch, as those of a batch of one."""
    if out is None or problem.direction is Direction.BACKWARD_WEIGHTS:
        return out
    if outputs_type(problem) is None:
        return arrays.with_batch(out, "out")
    first, *others = out
    return (None if first is None else arrays.with_batch(first, "out"), *others)


def _without_batch(problem: ProblemDescription, result: Any, out: Any) -> Any:
    """The outputs of a batch of one as those of an image without a batch; those that were given as they were given."""
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        return result
    kind = outputs_type(problem)
    if kind is None:
        return result[0] if out is None else out
    first, *others = result
    given = None if out is None else out[0]
    return kind(first[0] if given is None else given, *others)


def _empty_outputs(problem: ProblemDescription, like: Any, out: Any, stream: Any, index: int) -> Any:
    """The outputs of a batch without images: no image, and zeros where images are summed."""
    kind = outputs_type(problem)
    outs = (out,) if kind is None else operands.several_outputs(out, kind._fields)
    made = []
    with operands.allocating_on(like, stream, index):
        for operand, given in zip(problem.outputs, outs, strict=True):
            array = arrays.allocate(like, operand.array, index) if given is None else given
            if operand.name not in IMAGES:
                arrays.fill_with_zeros(array, index)
            elif given is None:
                array = array[:0]
            made.append(array)
    return made[0] if kind is None else kind(*made)


def _placed(
    solutions: Sequence[Solution], views: Mapping[str, arrays.ArrayView], given: dict[str, Any], stream: Any
) -> Solution:
    """The first solution whose alignment the tensors have, else the first of all, with copies put into `given`.

    The vectors of an epilogue are small, and copied rather than that another solution runs. Second outputs may begin
    anywhere.
    """
    addresses = [v.address for name, v in views.items() if name not in (*EPILOGUE_VECTORS, *SECOND_OUTPUTS)]
    solution = first_aligned(solutions, addresses)
    alignment, index = solution.runner.alignment_bytes, solution.solution_list.handle.device.index
    misplaced = [name for name in given if views[name].address % alignment]
    if misplaced:
        wanted = {operand.name: operand.array for operand in solution.problem.operands}
        with operands.allocating_on(next(iter(given.values())), stream, index):
            given |= {name: arrays.packed_copy(given[name], wanted[name], index, alignment) for name in misplaced}
    return solution


def first_aligned(solutions: Sequence[Solution], addresses: Sequence[int]) -> Solution:
    """The first solution whose alignment the addresses have, else the first of all."""
    # A generator: runners behind the first that fits are not made on every call.
    fitting = (s for s in solutions if not any(a % s.runner.alignment_bytes for a in addresses))
    return next(fitting, solutions[0])


def _taken_numbers(direction: Direction, arguments: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an epilogue that are there, taken out of the arguments.

    Raises:
        InvalidProblemError: an argument is of the epilogues of other directions.
        InvalidOptionError: bounds of an activation whose name has them.
    """
    if _OF_EPILOGUE.isdisjoint(arguments):
        return {}
    refuse_epilogue(direction, _OF_EPILOGUE & arguments.keys())
    taken = {name: arguments.pop(name) for name in EPILOGUE_NUMBERS if name in arguments}
    numbers = {name: value for name, value in taken.items() if value is not None}
    bounds = [f"{name}={brief(numbers[name])}" for name in ("low", "high") if name in numbers]
    if bounds and "relu6" in (str(arguments.get(name)).lower() for name in ("activation", "derivative")):
        raise InvalidOptionError(f"{', '.join(bounds)}: relu6 has the bounds 0 and 6, clamp has others")
    return numbers


def device_of(
    views: Mapping[str, arrays.ArrayView], direction: Direction, names: Mapping[str, str] | None = None
) -> Device:
    """The device that all arrays are on.

    Raises:
        InvalidArrayError: they are on several.
    """
    indices = {name: v.device_index for name, v in views.items()}
    if len(set(indices.values())) > 1:
        told = {(names or {}).get(name) or user_name(name, direction): i for name, i in indices.items()}
        places = ", ".join(f"{name} on {'the host' if i < 0 else f'cuda:{i}'}" for name, i in told.items())
        raise InvalidArrayError(f"the arrays are on different devices ({places}): move them to one")
    index = next(iter(indices.values()))
    return Device.cpu() if index < 0 else Device.cuda(index)
