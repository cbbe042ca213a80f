"""Launches: functions of two tensors that allocate a result of a call and run a bound solution.

This is the hot path: the addresses of tensors go straight to the invoker. What the tensors are like was checked when
their plan was made, by whose key calls find it.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from miofind.core.epilogue import DEFAULT_PARAMETERS
from miofind.errors import CompileError, InvalidConfigError, LaunchError, MissingLibraryError
from miofind.launch.invoker import Invoker
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.torch.direct import DirectLaunch, MadeTensor
from miofind.torch.override import formats
from miofind.torch.override.calls import ConvolutionCall, Unserved
from miofind.torch.override.memory import host_array, is_capturing, results, stream_reader

logger = logging.getLogger(__name__)

Launch = Callable[..., Any]
"""Computes a result of a call from two of its tensors: y from (x, w), dx from (grad, w), dw from (x, grad).

A launch with a bias makes y from (x, w, bias), or a pair of dw and the gradient of the bias from (x, grad). Each
returns None where a tensor's address has the alignment of no solution."""

INPUTS = {"y": ("x", "w"), "dx": ("grad", "w"), "dw": ("x", "grad")}
"""What a launch of each result is given, in order."""

_BIAS = {"y": "given", "dw": "made"}
_LONGEST_REASON = 300
_NOT_READY = (CompileError, LaunchError, InvalidConfigError, MissingLibraryError)


class Arguments(NamedTuple):
    """A call's tensors and numbers.

    Attributes:
        x, w: input and weights.
        grad: gradient of the output, None in a forward call.
        bias: a tensor, its sizes in a backward call, or None.
        geometry: stride, padding, dilation, transposed, output_padding and groups.
    """

    x: Any
    w: Any
    grad: Any
    bias: Any
    geometry: tuple[Any, ...]


class Made(NamedTuple):
    """A launch, and the solution that it runs.

    Attributes:
        direct: gives the same launch without Python; None where there is none.
    """

    launch: Launch
    solution: Solution
    direct: Callable[[], DirectLaunch | None]


class ReadySolutions:
    """Solutions in order, made ready one after another; those that cannot be are left out."""

    def __init__(self, solutions: Sequence[Solution], handle: Handle) -> None:
        self._left = list(solutions)
        self._handle = handle

    def next(self, below_bytes: int | None = None) -> tuple[Solution, Invoker]:
        """The next solution that can be made ready, and what runs it.

        Args:
            below_bytes: an alignment; only solutions whose tensors need less.

        Raises:
            Unserved: there is none.
        """
        told: list[str] = []
        while self._left:
            solution = self._left.pop(0)
            try:
                invoker = self._handle.invoker(
                    solution.problem.flattened, solution.solver_id, solution.config, solution.kernel_hash
                )
            except _NOT_READY as error:
                logger.warning("%s cannot run %s: %s", solution.id, solution.problem, error)
                told.append(f"{solution.solver_id}: {first_line(error)}")
                continue
            if below_bytes is None or invoker.alignment_bytes < below_bytes:
                return solution, invoker
        raise Unserved("; ".join(told) or "no solution is left")


def first_line(error: BaseException) -> str:
    """What an error says, as long as a reason may be."""
    return str(error).partition("\n")[0][:_LONGEST_REASON]


class _Form(NamedTuple):
    """How a launch makes its result and reads its tensors.

    Attributes:
        make: allocates the result, given one of the tensors.
        layout: memory order of all tensors.
        copies: whether each of the two tensors has to be packed first.
        pick: puts the two tensors, the result and what else there is in an invoker's order.
        bias: "given" where a bias is added, "made" where its gradient is a second result, "" where there is neither.
    """

    make: Callable[[Any], Any]
    layout: Any
    copies: tuple[bool, bool]
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    bias: str


class Launches:
    """The launches of one result of calls that look alike, a solution behind the other.

    Args:
        computed: "y", "dx" or "dw".
        arguments: one such call's.
        with_bias: y with the bias, or dw with its gradient.
    """

    def __init__(
        self,
        computed: str,
        call: ConvolutionCall,
        arguments: Arguments,
        solutions: ReadySolutions,
        *,
        with_bias: bool = False,
    ) -> None:
        layout, names = call.backend_format, INPUTS[computed]
        shapes = {"y": call.output_shape, "dx": call.x.shape, "dw": call.w.shape}
        order = [(*names, computed).index(name) for name in call.operands(computed)]
        self._computed, self._order = computed, order
        self._shape, self._strides = shapes[computed], formats.strides(shapes[computed], layout)
        copies = [name != "grad" and not formats.is_dense(getattr(arguments, name), layout) for name in names]
        self._form = _Form(
            make=results(self._shape, self._strides, arguments.x),
            layout=layout,
            copies=(copies[0], copies[1]),
            pick=operator.itemgetter(*order, *range(3, 6 if with_bias else 4)),
            bias=_BIAS[computed] if with_bias else "",
        )
        self._device, self._dtype = arguments.x.device, arguments.x.dtype
        given = {name: getattr(arguments, name) for name in names}
        self._packed = {
            name: MadeTensor(tuple(tensor.shape), formats.strides(tuple(tensor.shape), layout), tensor.dtype)
            for name, tensor in given.items()
            if not formats.is_dense(tensor, layout)
        }
        self._solutions = solutions
        self._lock = threading.Lock()

    def first(self) -> Made:
        """The launch of the first solution that can be made ready.

        Raises:
            Unserved: there is none.
        """
        solution, invoker = self._solutions.next()
        return Made(self._launch(invoker), solution, functools.partial(self._direct, invoker))

    def _direct(self, invoker: Invoker) -> DirectLaunch | None:
        """What an invoker does; None where Python is needed."""
        form = self._form
        steps = invoker.flat()
        if steps is None:
            return None
        tensors = ("x", "w", "bias") if self._computed == "y" else ("grad", "x", "w")
        read = INPUTS[self._computed] + (("bias",) if form.bias == "given" else ())
        results = [MadeTensor(self._shape, self._strides, self._dtype)]
        if form.bias == "made":
            results.append(MadeTensor((invoker.problem.k,), (1,), self._dtype))
        # Of the bases: the two tensors and the result, the bias or its gradient and the numbers, the workspace.
        made, vector = len(read), 2 if form.bias == "given" else 3
        places = (0, 1, made)
        bases = (*(places[i] for i in self._order), *((vector, -1) if form.bias else ()), made + len(results))
        return DirectLaunch(
            operands=tuple(tensors.index(name) for name in read),
            results=tuple(results),
            sources=bases,
            workspace_bytes=invoker.workspace_bytes,
            alignment_bytes=invoker.alignment_bytes,
            steps=steps,
            packed={tensors.index(name): each for name, each in self._packed.items()},
        )

    @property
    def _on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    def _launch(self, invoker: Invoker) -> Launch:
        if not self._on_gpu:
            return _host_launch(self._form, invoker)
        bound = _device_launch_with_bias if self._form.bias else _device_launch
        return bound(self._form, invoker, self._device.index or 0, self._behind(invoker))

    def _behind(self, invoker: Invoker) -> Launch:
        """A launch of the next solution that needs a smaller alignment, made at its first call."""
        made: list[Launch] = []

        def launch(*tensors: Any) -> Any:
            if not made:
                if is_capturing(self._device):
                    return None
                with self._lock:
                    if not made:
                        made.append(self._made_behind(invoker))
            return made[0](*tensors)

        return launch

    def _made_behind(self, invoker: Invoker) -> Launch:
        try:
            _, following = self._solutions.next(below_bytes=invoker.alignment_bytes)
        except Unserved:
            return lambda *tensors: None
        return self._launch(following)


def _device_launch(form: _Form, invoker: Invoker, index: int, behind: Launch) -> Launch:
    """A launch on a GPU, without a bias."""
    make, layout, (copies_first, copies_second), pick, _ = form
    run, read_stream, workspace_bytes = invoker.run, stream_reader(), invoker.workspace_bytes
    misaligned = invoker.alignment_bytes - 1

    def launch(first: Any, second: Any) -> Any:
        if copies_first:
            first = formats.dense(first, layout)
        if copies_second:
            second = formats.dense(second, layout)
        first_address, second_address = first.data_ptr(), second.data_ptr()
        if (first_address | second_address) & misaligned:
            return behind(first, second)
        made = make(first)
        workspace = 0
        if workspace_bytes:
            scratch = _scratch(workspace_bytes, first)
            workspace = scratch.data_ptr()
        run(pick((first_address, second_address, made.data_ptr(), workspace)), read_stream(index))
        return made

    return launch


def _device_launch_with_bias(form: _Form, invoker: Invoker, index: int, behind: Launch) -> Launch:
    """A launch on a GPU that adds a bias, or gives its gradient, too."""
    make, layout, (copies_first, copies_second), pick, bias_is = form
    run, read_stream, workspace_bytes = invoker.run, stream_reader(), invoker.workspace_bytes
    misaligned, adds = invoker.alignment_bytes - 1, bias_is == "given"
    channels = invoker.problem.k

    def launch(first: Any, second: Any, bias: Any = None) -> Any:
        if copies_first:
            first = formats.dense(first, layout)
        if copies_second:
            second = formats.dense(second, layout)
        vector = bias.contiguous() if adds else first.new_empty(channels)
        addresses = first.data_ptr(), second.data_ptr(), vector.data_ptr()
        if (addresses[0] | addresses[1] | (addresses[2] if adds else 0)) & misaligned:
            return behind(first, second, bias) if adds else behind(first, second)
        made = make(first)
        workspace = 0
        if workspace_bytes:
            scratch = _scratch(workspace_bytes, first)
            workspace = scratch.data_ptr()
        bases = (*addresses[:2], made.data_ptr(), addresses[2], DEFAULT_PARAMETERS, workspace)
        run(pick(bases), read_stream(index))
        return made if adds else (made, vector)

    return launch


def _scratch(size: int, like: Any) -> Any:
    """A workspace on the device of a tensor."""
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def _host_launch(form: _Form, invoker: Invoker) -> Launch:
    """A launch on the CPU place, on NumPy's views of the tensors' memory."""
    make, layout, (copies_first, copies_second), pick, bias_is = form
    run, workspace_bytes = invoker.run, invoker.workspace_bytes

    def launch(first: Any, second: Any, *bias: Any) -> Any:
        if copies_first:
            first = formats.dense(first, layout)
        if copies_second:
            second = formats.dense(second, layout)
        made = make(first)
        workspace = np.empty(workspace_bytes, np.uint8) if workspace_bytes else None
        bases = (host_array(first), host_array(second), host_array(made))
        if not bias_is:
            run(pick((*bases, workspace)), 0)
            return made
        vector = bias[0].contiguous() if bias else first.new_empty(invoker.problem.k)
        run(pick((*bases, host_array(vector), DEFAULT_PARAMETERS, workspace)), 0)
        return made if bias else (made, vector)

    return launch
