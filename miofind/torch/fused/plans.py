"""Plans of fused calls: what runs calls of `miofind::convolution...` that look alike, decided once.

A call that has a plan costs a look-up, its outputs, and the launch.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.tensor import Layout
from miofind.errors import LaunchError
from miofind.process.forks import ForkedLock
from miofind.torch import direct
from miofind.torch.direct import DirectCalls, DirectLaunch, MadeTensor
from miofind.torch.fused import unfused
from miofind.torch.fused.answers import Answer, answer, override_of, planner_of
from miofind.torch.fused.calls import (
    COMPUTED_BY,
    BackwardData,
    BackwardWeights,
    Call,
    Forward,
    Statistics,
    of_one_dtype,
    place,
    problem_of,
)
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.packed_filters import PackedFilters, packed_filters
from miofind.torch.fused.window import Window
from miofind.torch.override import formats
from miofind.torch.override.calls import Unserved
from miofind.torch.override.dispatcher import Override
from miofind.torch.override.dtypes import torch_dtype
from miofind.torch.override.flags import Flags, state
from miofind.torch.override.plans import Part, parts_of_a_fused_call

MAX_PLANS = 4096

_READ = {
    "x": "x",
    "w": "w",
    "dy": "y",
    "bias": "bias",
    "scale": "scale",
    "residual": "residual",
    "saved": "saved",
    "channel_bias": "channel_bias",
}
"""Operands by the names of a call's tensors."""
_READ_PACKED = {"filters" if field == "w" else field: name for field, name in _READ.items()}
"""The same where filters are packed."""


class Unfused(NamedTuple):
    """What PyTorch's own operations are told of forward calls that look alike.

    Attributes:
        layout: of y.
        is_empty: y has no elements.
    """

    layout: Layout
    window: Window
    nonlinearity: Nonlinearity
    is_empty: bool

    def computed(self, call: Forward) -> Any:
        """y of such a call, by PyTorch's own operations."""
        call = of_one_dtype(call)
        vectors = (call.bias, call.scale, call.residual, call.channel_bias)
        y = unfused.convolution(call.x, call.w, vectors, self.window, self.nonlinearity)
        return formats.dense(y, self.layout)

    @staticmethod
    def of(call: Forward) -> Unfused:
        """What calls like one have in common.

        Raises:
            RuntimeError: its tensors do not go together.
        """
        call.check()
        window = call.window
        is_empty = not all(window.output_shape(call.x.shape, call.w.shape))
        return Unfused(call.layout(), window, call.nonlinearity, is_empty)


class Plan(DirectCalls):
    """What runs calls that look alike.

    Attributes:
        answer: the solutions, or why there are none; None for calls of which miofind has no such problem.
        part: what becomes of the call.
        unfused: of forward calls alone.
    """

    __slots__ = (
        "_inputs",
        "_like",
        "_operands",
        "_outputs",
        "_packed",
        "_parameters",
        "_unmade",
        "answer",
        "layout",
        "part",
        "unfused",
    )

    def __init__(self, call: Call, override: Override | None, switches: tuple[Any, ...]) -> None:
        self.unfused = Unfused.of(call) if isinstance(call, Forward) else None
        if self.unfused is None:
            call.check()
        self.layout = call.layout() if self.unfused is None else self.unfused.layout
        self.answer: Answer | None = None
        super().__init__(needs_python=True)
        narrowed = of_one_dtype(call)
        flags = Flags.of(switches, on_gpu=call.x.is_cuda)
        try:
            problem = problem_of(narrowed, self.layout, flags.math)
        except Unserved as reason:
            self.part = Part(COMPUTED_BY[type(call)], reason=str(reason))
            return
        packing = call.packing if isinstance(call, Forward) and call.filters is not None else ""
        self.answer = answer(problem, call.x.device, flags, planner_of(override), packing=packing)
        self.part = self.answer.part
        read = {operand.name for operand in problem.inputs}
        fields = _READ_PACKED if self.answer.takes_packed else _READ
        self._like = "x" if isinstance(call, (Forward, Statistics)) else "dy"
        self._inputs = tuple(
            (field, name, getattr(narrowed, field).dtype, not self._is_packed(getattr(call, field)))
            for field, name in fields.items()
            if field in call._fields and name in read
        )
        self._outputs = tuple(
            (operand.name, operand.array.shape, self._strides(operand.array.shape), torch_dtype(operand.array.dtype))
            for operand in problem.outputs
        )
        self._operands = tuple(place(call, field) for field, *_ in self._inputs)
        self._packed = {
            place(call, field): MadeTensor(shape, self._packed_strides(shape), dtype)
            for field, _, dtype, copies in self._inputs
            if copies or getattr(call, field).dtype is not dtype
            for shape in (tuple(getattr(call, field).shape),)
        }
        self._unmade: tuple[MadeTensor, ...] = ()
        if isinstance(call, BackwardWeights) and call.bias_dtype is None:
            self._unmade = (MadeTensor((0,), (1,), call.dy.dtype),)
        self._parameters = _parameters(call, problem.epilogue.numbers)
        if self.answer.is_served and self.answer.part.is_final:
            self.generation = -1

    def direct_launches(self) -> Sequence[tuple[int, DirectLaunch]] | None:
        """The launch of the first solution, whose operands are found by the places of an operator's arguments."""
        assert self.answer is not None
        invoker = self.answer.first
        steps = None if invoker is None else invoker.flat(self._parameters)
        if invoker is None or steps is None:
            return None
        results = [*(MadeTensor(*form) for _, *form in self._outputs), *self._unmade]
        order = [name for _, name, _, _ in self._inputs] + [name for name, *_ in self._outputs]
        problem = invoker.problem
        bases = [order.index(operand.name) for operand in problem.operands] + ([-1] if problem.epilogue else [])
        launch = DirectLaunch(
            operands=self._operands,
            results=tuple(results),
            sources=(*bases, len(self._inputs) + len(results)),
            workspace_bytes=invoker.workspace_bytes,
            alignment_bytes=invoker.alignment_bytes,
            steps=steps,
            packed=self._packed,
        )
        return [(0, launch)]

    def run(self, call: Call) -> tuple[Any, ...] | None:
        """The outputs of a call, or None where PyTorch is to compute them."""
        self.python_calls += 1
        if self.answer is None or self.answer.declines(call.x.device):
            return None
        tensors = {}
        for field, name, dtype, copies in self._inputs:
            tensor = getattr(call, field)
            if tensor.dtype is not dtype:
                tensor = tensor.to(dtype)
            if copies:
                tensor = formats.dense(tensor, self.layout) if tensor.dim() > 2 else tensor.contiguous()
            tensors[name] = tensor
        like = getattr(call, self._like)
        outputs = []
        for name, shape, strides, dtype in self._outputs:
            tensors[name] = made = like.new_empty_strided(shape, strides, dtype=dtype)
            outputs.append(made)
        try:
            return tuple(outputs) if self.answer.run(tensors, self._parameters) else None
        except LaunchError as error:
            self.answer.fail(error, self.calls - 1)
            return None

    @property
    def parts(self) -> tuple[Part, ...]:
        """What became of the call."""
        return (self.part,)

    def _is_packed(self, tensor: Any) -> bool:
        return formats.is_dense(tensor, self.layout) if tensor.dim() > 2 else bool(tensor.is_contiguous())

    def _packed_strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return formats.packed_strides(shape, len(shape) > 2 and self.layout.channels_last)

    def _strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return formats.strides(shape, self.layout) if len(shape) > 1 else (1,)


def _parameters(call: Call, names: tuple[str, ...]) -> EpilogueParameters:
    """The numbers of a call, of those that its epilogue has."""
    given = {name: getattr(call, name) for name in names if name in call._fields}
    return EpilogueParameters(**given) if given else DEFAULT_PARAMETERS


_plans: dict[Any, Plan] = {}
_past: collections.deque[Plan] = collections.deque(maxlen=MAX_PLANS)
"""Plans that later calls are not answered by: these ran while kernels were compiled or CUDA graphs captured."""
_lock = ForkedLock()


def planned(call: Call) -> Plan | None:
    """The plan of a call; None for an empty one, and while TorchScript traces, for which sizes are no numbers.

    Raises:
        RuntimeError: its tensors do not go together.
    """
    if torch._C._is_tracing() or not (call.x.numel() and call.w.numel()):
        return None
    override = override_of(call.x)
    deciders = _deciders(override)
    key = (*_key(call), *deciders)
    plan = _plans.get(key)
    if plan is None:
        plan = _made(call, key, override, deciders[0])
    elif plan.generation is not None and (path := direct.loaded()) is not None and plan.generation != path.generation:
        plan.offer(path)
    return plan


class Settled(NamedTuple):
    """That PyTorch's own operations compute forward calls that look alike, as long as nothing is decided anew.

    Attributes:
        plan: of the calls.
        added: what their residual and their numbers of channels look like.
        times_forgotten, deciders: what decided so.
    """

    plan: Plan
    added: tuple[Any, ...]
    times_forgotten: int
    deciders: tuple[Any, ...]

    def holds(self, call: Forward) -> bool:
        """Whether it is so yet of a call whose x and w look alike."""
        return (
            self.added == _added(call)
            and self.times_forgotten == direct.times_forgotten()
            and self.deciders == _deciders(override_of(call.x))
        )

    def run(self, call: Forward) -> Any:
        """y of such a call."""
        assert self.plan.unfused is not None
        self.plan.python_calls += 1
        return self.plan.unfused.computed(call)


def decided(call: Forward) -> Plan | None:
    """The plan of calls like one that ran, until all is decided anew; None where another may take its place."""
    plan = _plans.get((*_key(call), *_deciders(override_of(call.x))))
    return plan if plan is not None and plan.part.is_final and plan.part.pending is None else None


def settled(call: Forward, plan: Plan) -> Settled | None:
    """That PyTorch's own operations compute calls like one, by their plan; None where a solution does."""
    is_served = plan.answer is not None and plan.answer.is_served
    if is_served or plan.unfused is None or plan.unfused.is_empty:
        return None
    return Settled(plan, _added(call), direct.times_forgotten(), _deciders(override_of(call.x)))


def packing(call: Forward, plan: Plan) -> PackedFilters | None:
    """How the solution that runs calls like one, by their plan, has filters packed; None where none does.

    Raises:
        Unserved: that is not known yet: its kernels are being compiled, or a CUDA graph is being captured.
    """
    if plan.answer is None or not plan.answer.is_served or plan.part.solution is None:
        return None
    flags = Flags.of(state(), on_gpu=call.x.is_cuda)
    return packed_filters(plan.part.solution, call.x.device, flags, planner_of(override_of(call.x)))


def _deciders(override: Override | None) -> tuple[tuple[Any, ...], int]:
    """What decides who computes calls, beside what these look like: PyTorch's switches, and the override."""
    return state(), 0 if override is None else override.generation


def fallback(plan: Plan | None) -> AbstractContextManager[None]:
    """What PyTorch computes a call in that its plan gives nothing for."""
    is_pending = plan is not None and plan.part.pending is not None
    return parts_of_a_fused_call() if is_pending else contextlib.nullcontext()


def _key(call: Call) -> tuple[Any, ...]:
    """What of a call decides its plan. Written out: loops over the arguments take three times as long."""
    x, w = call.x, call.w
    form = (x.shape, x.stride(), x.dtype, x.get_device(), w.shape, w.stride(), w.dtype, w.get_device())
    ours = (type(call), *form)  # by which operator: each comes to do without Python by itself
    window = (*call.stride, None, *call.padding, None, *call.dilation, call.groups)  # of any lengths, as given
    if isinstance(call, Forward):
        packed = _form(call.filters), call.packing
        return (
            *ours,
            *window,
            *packed,
            _form(call.bias),
            _form(call.scale),
            *_added(call),
            call.activation,
            *call[10:16],
        )
    if isinstance(call, Statistics):
        return (*ours, *window, _form(call.bias), call.channels_last)
    if isinstance(call, BackwardData):
        return (*ours, *window, _form(call.dy), _form(call.residual), _form(call.saved), call.derivative, *call[10:])
    return (*ours, *window, _form(call.dy), call.bias_dtype, call.channels_last)


def _added(call: Forward) -> tuple[Any, ...]:
    return _form(call.residual), _form(call.channel_bias)


def _form(tensor: Any) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())


def _made(call: Call, key: Any, override: Override | None, switches: tuple[Any, ...]) -> Plan:
    plan = Plan(call, override, switches)
    part = plan.part
    if not part.is_kept:
        if part.is_of_capture:
            with _lock:
                _past.append(plan)
        return plan
    with _lock:
        while len(_plans) >= MAX_PLANS:
            _plans.pop(next(iter(_plans)))
        kept = _plans.setdefault(key, plan)
    if kept is plan and part.pending is not None:
        part.pending.when_done(lambda: _replace(key, plan))
    return kept


def _replace(key: Any, plan: Plan) -> None:
    """Decide anew for calls of a key, whose kernels are there by now."""
    with _lock:
        if _plans.get(key) is plan:
            _past.append(_plans.pop(key))


def plans() -> tuple[Plan, ...]:
    """The plans made so far and not forgotten."""
    with _lock:
        return (*_plans.values(), *_past)


def forget() -> None:
    """Decide anew for all calls to come, since FindDBs may have more answers now."""
    with _lock:
        _plans.clear()
        _past.clear()
    direct.forget()
