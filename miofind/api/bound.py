"""A convolution that is found once and called many times, and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, NoReturn, Self, TypeVar, Unpack, overload

from miofind.api.array_call import device_of, first_aligned
from miofind.api.directions import BACKWARD_DATA, FORWARD
from miofind.api.gradients import (
    NAMES,
    Gradients,
    Wanted,
    checked_names,
    given_outputs,
    refuse_shared_memory,
    summed_channels,
)
from miofind.api.keywords import BoundArguments
from miofind.api.solutions import find_solutions
from miofind.arrays import arrays, operands
from miofind.core.arguments import A, EpilogueArguments
from miofind.core.epilogue import Activation, Epilogue
from miofind.core.problem import Direction, ProblemDescription
from miofind.errors import InvalidProblemError
from miofind.options import FindOptions
from miofind.runtime.handle import Handle, default_handle
from miofind.runtime.runner import OutputStatistics, ParameterGradients
from miofind.runtime.solution import Solution

R = TypeVar("R")
"""What a call returns: an array, or a named tuple of several."""


class Convolution(Generic[A, R]):
    """The fastest solution of a problem, found when the object is made; a call runs it, as strictly as `run_solution`.

    Safe to share between threads, as solutions are; not pickled.

    Attributes:
        problem: what is computed; of any direction.
        solution: what runs; the next one of its find takes over where it fails.
        workspace_bytes: bytes of workspace that a call needs.

    Raises:
        NoSolutionError, NoDeviceError, MissingLibraryError: as of `find_solutions`.
    """

    def __init__(
        self: Convolution[Any, Any],
        problem: ProblemDescription,
        *,
        options: FindOptions | None = None,
        handle: Handle | None = None,
    ) -> None:
        """Finds the solution, as `find_solutions` does."""
        self._bind(find_solutions(problem, options=options, handle=handle)[0], options, {})

    def _bind(self, solution: Solution, options: FindOptions | None, kept: dict[str, Any]) -> None:
        self.problem = solution.problem
        self.solution = solution
        self.workspace_bytes = solution.workspace_bytes
        self._options = options
        self._w = kept.pop("w", None)
        self._constants = kept
        self._direction = solution.problem.direction
        self._runner = solution.runner

    @overload
    @staticmethod
    def of(
        x: A, w: A, *, statistics: Literal[False] = False, **arguments: Unpack[BoundArguments]
    ) -> Convolution[A, A]: ...
    @overload
    @staticmethod
    def of(
        x: A, w: A, *, statistics: Literal[True], **arguments: Unpack[BoundArguments]
    ) -> Convolution[A, OutputStatistics[A]]: ...
    @staticmethod
    def of(x: Any, w: Any, **arguments: Any) -> Convolution[Any, Any]:
        """The forward convolution of such arrays.

        Args:
            x: (n, c, *spatial), packed; calls take any array like it.
            w: (k, c/groups, *filter), packed. Calls that are given no w take this one, as it then is.
            arguments: as in `ProblemDescription.from_arrays`; a scale and a bias are kept as w is, a residual and a
                channel_bias are given to each call. options and handle as in `find_solutions`.

        Raises:
            InvalidArrayError, InvalidProblemError: the message names the array or field.
        """
        options, handle = arguments.pop("options", None), arguments.pop("handle", None)
        problem = ProblemDescription.from_arrays(x=x, w=w, **arguments)
        given = {"x": x, "w": w}
        views = {name: arrays.view(array, name) for name, array in given.items()}
        device = device_of(views, Direction.FORWARD)
        handle = default_handle(device) if handle is None else handle
        solutions = find_solutions(problem, options=options, handle=handle)
        kept = {"w": w, **{name: arguments[name] for name in ("scale", "bias") if arguments.get(name) is not None}}
        is_torch = {name: arrays.framework_of(array) is arrays.Framework.TORCH for name, array in kept.items()}
        made: Convolution[Any, Any] = object.__new__(Convolution)
        made._bind(
            first_aligned(solutions, [view.address for view in views.values()]),
            options,
            {name: array.detach() if is_torch[name] else array for name, array in kept.items()},
        )
        return made

    def __call__(
        self,
        first: A,
        second: A | None = None,
        *,
        out: Any = None,
        workspace: Any = None,
        stream: Any = None,
        **epilogue: Unpack[EpilogueArguments],
    ) -> R:
        """The output.

        Args:
            first: x forward, else dy.
            second: w, or x for backward weights; w may be left out where the convolution was made of arrays.
            out, workspace, stream, epilogue: as in `run_solution`; `out` and `workspace` are allocated if left out.

        Raises:
            InvalidArrayError, InvalidOptionError, WorkspaceError, LaunchError: as of `run_solution`.
        """
        direction = self._direction
        x = w = dy = None
        if direction is FORWARD:
            x, w = first, self._w if second is None else second
        elif direction is BACKWARD_DATA:
            dy, w = first, self._w if second is None else second
        else:
            dy, x = first, second
        result: R
        if self._constants or epilogue:
            result = self._runner.run_fused({**self._constants, **epilogue}, x, w, dy, out, workspace, stream)
        else:
            result = self._runner.run(x, w, dy, out, workspace, stream)
        return result

    def prepare(self) -> Self:
        """Make everything ready that a first call would: compile, load, plan. Needed before a first call under capture.

        Raises:
            CompileError, LaunchError, MissingLibraryError: it cannot be made ready and nothing can take its place.
        """
        self._runner.prepare()
        return self

    @functools.cached_property
    def gradients(self) -> BoundGradients[A]:
        """The gradients of this forward convolution; each is found when it is asked for.

        Raises:
            InvalidProblemError: of another direction, or its epilogue has a scale or an activation, so that the
                gradients begin behind those.
        """
        problem = self.problem
        if problem.direction is not Direction.FORWARD:
            raise InvalidProblemError(f"{problem.direction} has no gradients: make them of the forward convolution")
        if problem.epilogue.scale or problem.epilogue.activation is not Activation.NONE:
            raise InvalidProblemError(
                f"epilogue={problem.epilogue.text}: gradients begin at the sums: make dy of them first, and the "
                "gradients of Convolution(problem.bare)"
            )
        return BoundGradients(problem.bare, self._options, self.solution.solution_list.handle, self._w)

    def __repr__(self) -> str:
        return f"<Convolution {self.problem} by {self.solution!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Convolution is not pickled: pickle its problem, and make it where that arrives")


class BoundGradients(Generic[A]):
    """The gradients of a convolution as objects like it: found at first use, then called many times.

    dx has the memory order of x, dw that of w, and dy is taken in that of y.
    """

    def __init__(
        self, problem: ProblemDescription, options: FindOptions | None, handle: Handle, w: A | None = None
    ) -> None:
        """See `Convolution.gradients`."""
        self._problem, self._options, self._handle, self._w = problem, options, handle, w

    @functools.cached_property
    def data(self) -> Convolution[A, A]:
        """dx of (dy, w)."""
        kept = {} if self._w is None else {"w": self._w}
        made: Convolution[A, A] = self._of(self._problem.in_direction(Direction.BACKWARD_DATA), kept)
        return made

    @functools.cached_property
    def weights(self) -> Convolution[A, A]:
        """dw of (dy, x)."""
        made: Convolution[A, A] = self._of(self._problem.in_direction(Direction.BACKWARD_WEIGHTS), {})
        return made

    @functools.cached_property
    def parameters(self) -> Convolution[A, ParameterGradients[A]]:
        """dw and the bias gradient of (dy, x)."""
        epilogue = Epilogue(bias_gradient=True)
        problem = replace(self._problem, direction=Direction.BACKWARD_WEIGHTS, epilogue=epilogue)
        made: Convolution[A, ParameterGradients[A]] = self._of(problem, {})
        return made

    def _of(self, problem: ProblemDescription, kept: dict[str, Any]) -> Convolution[Any, Any]:
        made: Convolution[Any, Any] = object.__new__(Convolution)
        made._bind(find_solutions(problem, options=self._options, handle=self._handle)[0], self._options, kept)
        return made

    def prepare(self, wanted: Wanted = NAMES) -> Self:
        """Find what is wanted, and make it ready as `Convolution.prepare` does."""
        names = checked_names(wanted)
        if "x" in names:
            self.data.prepare()
        if "w" in names:
            (self.parameters if "bias" in names else self.weights).prepare()
        return self

    @overload
    def __call__(
        self,
        dy: A,
        x: A,
        w: A | None = None,
        *,
        out: Sequence[A | None] | None = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> Gradients[A]: ...
    @overload
    def __call__(
        self,
        dy: A,
        x: A | None = None,
        w: A | None = None,
        *,
        wanted: Wanted,
        out: Sequence[A | None] | None = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> Gradients[A | None]: ...
    def __call__(
        self,
        dy: Any,
        x: Any = None,
        w: Any = None,
        *,
        wanted: Wanted = NAMES,
        out: Any = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> Gradients[Any]:
        """What is wanted of dx, dw and the bias gradient.

        Args:
            dy: (n, k, *out_spatial).
            x: (n, c, *spatial), for dw.
            w: (k, c/groups, *filter), for dx; may be left out where the convolution was made of arrays.
            wanted: which gradients: of "x", "w" and "bias".
            out: (dx, dw, bias) to write to, as in `convolution_gradients`; one that is None is allocated.
            workspace: enough for each of `data`, `weights` and `parameters` that is wanted; allocated if left out.
            stream: as in `run_solution`.

        Raises:
            InvalidArrayError, InvalidOptionError, WorkspaceError, LaunchError: as of `run_solution`.
        """
        names = checked_names(wanted)
        outs = given_outputs(out, names)
        if out is not None:
            refuse_shared_memory(names, outs, dy, x, self._w if w is None else w)
        dx = dw = bias = None
        if "x" in names:
            dx = self.data(dy, w, out=outs["x"], workspace=workspace, stream=stream)
        if "w" in names and "bias" in names:
            both = (outs["w"], outs["bias"])
            dw, bias = self.parameters(dy, x, out=both, workspace=workspace, stream=stream)
        elif "w" in names:
            dw = self.weights(dy, x, out=outs["w"], workspace=workspace, stream=stream)
        elif "bias" in names:
            operands.strict_check("dy", self._problem.y, self._handle.device.index, 1)(dy)
            bias = summed_channels(dy, "dy", self._problem.w.dtype, outs["bias"], stream)
        return Gradients(dx, dw, bias)
