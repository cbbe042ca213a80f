"""Records the convolutions of PyTorch programs: every call that reaches the dispatcher, forward and backward.

A TorchDispatchMode sees calls below autograd and autocast, so with the element types that are computed with, and with
the results that a backward pass asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from miofind.core.tensor import Layout, MathMode
from miofind.errors import InvalidOptionError
from miofind.torch.fused.calls import (
    COMPUTED_BY,
    Call,
    of_one_dtype,
    problem_of,
)
from miofind.torch.fused.ops import ARGUMENTS
from miofind.torch.fused.writes import storage_of
from miofind.torch.override import formats
from miofind.torch.override.calls import ConvolutionCall, Unserved
from miofind.torch.override.flags import Flags, state
from miofind.torch.recording.layers import LayerNames
from miofind.torch.recording.recording import RecordedCall, Recording, prepare_folder

_CONVOLUTION = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_COMPOSED = ("aten::conv", "aten::_convolution")


@contextlib.contextmanager
def record(path: str | Path | None = None) -> Iterator[Recording]:
    """A recording of the convolutions that this thread runs in the block, on any device, in backward passes, too.

    Compiled functions run uncompiled meanwhile. Nothing is seen of threads that the block starts.

    Args:
        path: where the problems are saved when the block ends, also where it raises; see `Recording.save`.

    Raises:
        InvalidOptionError: the path has another ending than .csv or .txt, or cannot be written. What the block raises
            it raises in any case. Nothing is lost: the problems are saved when the process ends, and by
            `Recording.save` of another path before.
    """
    recording = Recording()
    if path is not None:
        prepare_folder(path)
        path = Path(path).absolute()  # the block may change the directory
        recording.name = path.stem
    try:
        with LayerNames() as layers, Recorder(recording, layers):
            yield recording
    except BaseException as error:
        if path is not None:
            try:
                recording.save_or_keep(path)
            except InvalidOptionError as unsaved:  # what ended the block is what its caller is to see
                error.add_note(str(unsaved))
        raise
    if path is not None:
        recording.save_or_keep(path)


class Recorder(TorchDispatchMode):
    """Notes convolutions, and has them computed as ever."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording, layers: LayerNames) -> None:
        super().__init__()
        self._recording = recording
        self._layers = layers
        self._layer_of_weights: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _CONVOLUTION:
            return self._forward(func, args, kwargs)
        if func is _BACKWARD:
            return self._backward(func, args, kwargs)
        if func in ARGUMENTS:
            return self._fused(ARGUMENTS[func], func, args, kwargs)
        if isinstance(func, torch._ops.OpOverload) and func._schema.name.startswith(
            _COMPOSED
        ):  # not taken apart yet in inference mode
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        return func(*args, **kwargs)

    def _forward(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        x, w, bias, *geometry = _all_arguments(func, args, kwargs)
        layer = self._layers.current
        self._layer_of_weights[storage_of(w)] = layer
        call = self._note(layer, (x, w, bias, *geometry), ("y",), has_bias=bias is not None)
        return self._computed(call, func, args, kwargs, ("y",))[0]

    def _backward(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        _, x, w, bias_sizes, *geometry, mask = _all_arguments(func, args, kwargs)
        wanted = tuple(name for name, is_wanted in zip(("dx", "dw"), mask, strict=False) if is_wanted)
        layer = self._layer_of_weights.get(storage_of(w)) or self._layers.current
        call = self._note(layer, (x, w, bias_sizes, *geometry), wanted, has_bias=mask[2])
        return self._computed(call, func, args, kwargs, wanted)

    def _note(
        self, layer: str, arguments: Sequence[Any], computed: Sequence[str], *, has_bias: bool
    ) -> ConvolutionCall | None:
        """Note a call; what it is, None where miofind cannot describe it."""
        call = None
        try:
            call = self._described(arguments)
        except Unserved as reason:
            for name in computed:
                self._recording.note(RecordedCall(layer=layer, computed=name, reason=str(reason)))
            return None
        math = self._math(arguments[0])
        for name in computed:
            self._recording.note(recorded_call(call, layer, name, math, has_bias=has_bias))
        return call

    def _fused(self, kind: type[Call], func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Note a call of one of miofind's own operators."""
        call = kind(*args, **kwargs)
        layer, computed = self._layers.current, COMPUTED_BY[kind]
        if computed == "y":
            self._layer_of_weights[storage_of(call.w)] = layer
        else:
            layer = self._layer_of_weights.get(storage_of(call.w)) or layer
        try:
            layout = self._layout(call)
            problem = problem_of(of_one_dtype(call), layout, self._math(call.x))
        except Unserved as reason:
            self._recording.note(RecordedCall(layer=layer, computed=computed, reason=str(reason)))
            return func(*args, **kwargs)
        self._recording.note(RecordedCall(layer=layer, computed=computed, problem=problem))
        return self._formed(func(*args, **kwargs), layout)

    def _math(self, x: Any) -> MathMode:
        return Flags.of(state(), on_gpu=self._is_on_gpu(x)).math

    def _layout(self, call: Call) -> Layout:
        return call.layout()

    def _formed(self, made: Any, layout: Layout) -> Any:
        """What an operator gave, in the memory order that it has where the program is to run."""
        return made

    def _described(self, arguments: Sequence[Any]) -> ConvolutionCall:
        return ConvolutionCall.of(*arguments)

    def _is_on_gpu(self, x: Any) -> bool:
        return bool(x.device.type == "cuda")

    def _computed(
        self, call: ConvolutionCall | None, func: Any, args: Sequence[Any], kwargs: Any, computed: Sequence[str]
    ) -> Any:
        """What the call gives: a tuple, of one tensor forward."""
        result = func(*args, **kwargs)
        return (result,) if computed == ("y",) else result


def recorded_call(call: ConvolutionCall, layer: str, computed: str, math: MathMode, *, has_bias: bool) -> RecordedCall:
    """One result of a call as it is noted: with the bias, or its gradient, where miofind's kernels take that along."""
    try:
        problem = call.problem(computed, math, with_bias=has_bias and call.takes_bias(computed))
        return RecordedCall(layer=layer, computed=computed, call=call, problem=problem)
    except Unserved as reason:
        return RecordedCall(layer=layer, computed=computed, call=call, reason=str(reason))


class StandInRecorder(Recorder):
    """Notes the convolutions of fake tensors on the CPU as if they were on a GPU; their results look as there."""

    def _described(self, arguments: Sequence[Any]) -> ConvolutionCall:
        x, w, bias, *geometry = arguments
        bias = list(bias.shape) if isinstance(bias, torch.Tensor) else bias
        with as_on("cuda") as device:
            moved = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in (x, w))
            return ConvolutionCall.of(*moved, bias, *geometry)

    def _is_on_gpu(self, x: Any) -> bool:
        return True

    def _layout(self, call: Call) -> Layout:
        with as_on("cuda") as device:
            x, w = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in (call.x, call.w))
            return call._replace(x=x, w=w).layout()

    def _formed(self, made: Any, layout: Layout) -> Any:
        if isinstance(made, tuple):
            return tuple(self._formed(each, layout) for each in made)
        shape = tuple(made.shape)
        return made if made.dim() < 3 else made.new_empty_strided(shape, formats.strides(shape, layout))

    def _computed(
        self, call: ConvolutionCall | None, func: Any, args: Sequence[Any], kwargs: Any, computed: Sequence[str]
    ) -> Any:
        given = super()._computed(call, func, args, kwargs, computed)  # PyTorch checks the arguments
        if call is None:
            return given
        x, w = args[:2] if computed == ("y",) else args[1:3]

        def empty(shape: Any) -> Any:
            shape = tuple(shape)
            return x.new_empty_strided(shape, formats.strides(shape, call.backend_format))

        if computed == ("y",):
            return (empty(call.output_shape),)
        mask = _all_arguments(func, args, kwargs)[-1]
        shapes = (x.shape, w.shape, (call.output_shape[1],))
        made = (empty, empty, x.new_empty)
        return tuple(make(shape) if wanted else None for make, shape, wanted in zip(made, shapes, mask, strict=True))


@contextlib.contextmanager
def as_on(device: str) -> Iterator[str]:
    """A device for tensors that have no memory and are taken for such of "cuda" or "cpu", whatever there is here."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        if device == "cuda" and not torch.backends.cuda.is_built():
            yield "meta"
            return
        stack.enter_context(FakeTensorMode())
        yield device


def _all_arguments(func: Any, args: Sequence[Any], kwargs: Any) -> list[Any]:
    """The arguments of an operator in the order of its schema, whichever were given by name."""
    names = [argument.name for argument in func._schema.arguments]
    return [*args, *(kwargs[name] for name in names[len(args) :])]
