"""The convolutions of a network without running it: one step over fake tensors, which have no memory and no values.

PyTorch's fake tensors have everything else: shapes, strides, element types, autograd, autocast. Where there is a GPU
they are of it; else they are the CPU's, and convolutions see and give what they would on one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from miofind.core.tensor import DataType, data_type
from miofind.errors import InvalidOptionError, InvalidProblemError, brief, described
from miofind.process.garbage import with_rare_garbage_collection
from miofind.torch.fused.compiled import is_compiled, is_exported
from miofind.torch.override.dtypes import torch_dtype
from miofind.torch.recording.layers import LayerNames
from miofind.torch.recording.recorder import Recorder, StandInRecorder
from miofind.torch.recording.recording import Recording
from miofind.torch.recording.unchanged import unchanged

_RANK = {torch.channels_last: 4, torch.channels_last_3d: 5}
_INSTEAD = "Record a real step instead: `with miofind.torch.record('problems.csv'): step()`"
_MEMORY_FORMATS = (torch.contiguous_format, *_RANK, None)


def problems(
    model: Any,
    *inputs: Any,
    training: bool = False,
    amp: Any = None,
    memory_format: Any = None,
    device: str = "cuda",
    keywords: Mapping[str, Any] | None = None,
) -> Recording:
    """The convolutions of one step of a network, forward and, in training, backward: nothing is computed.

    Needs no GPU and no memory. What depends on values cannot be followed: record such a step with
    `miofind.torch.record`. What a block of no_grad computes has no gradients; the loss is the sum of all outputs.

    Args:
        model: a module on any device, "meta" included. Nothing of it is changed in the end; meanwhile its tensors are
            fake ones, so that no other thread may run it.
        inputs: tensors on any device, whose values are not looked at, or shapes such as (32, 3, 224, 224), which stand
            for tensors of the element type of the model's weights; in lists and dictionaries, too.
        training: whether gradients are computed, with the model in training mode; else it is in evaluation mode.
        amp: the element type of autocast, float16 or bfloat16, as in torch.bfloat16 or "bf16"; None for none.
        memory_format: torch.channels_last for model and inputs, or torch.channels_last_3d; as they are if left out.
        device: "cuda" or "cpu".
        keywords: inputs by name.

    Raises:
        InvalidOptionError: an argument is none of these, or the model cannot run on fake tensors.
    """
    model = _unwrapped(model)
    _check(model, training, memory_format, device)
    amp = _autocast_dtype(amp)
    recording = Recording(type(model).__name__.lower())
    is_stand_in = device == "cuda" and not torch.cuda.is_available()
    place = torch.device("cpu" if is_stand_in else device)
    kind = StandInRecorder if is_stand_in else Recorder
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with with_rare_garbage_collection(), torch.inference_mode(False), fakes, unchanged(model):
        model.train(training)
        fake = _Fakes(place, memory_format, dtype_of(model))
        weights = {name: fake.tensor(tensor) for name, tensor in _tensors_of(model)}
        given, named = fake.of(inputs), fake.of(dict(keywords or {}))
        with LayerNames() as layers, kind(recording, layers), torch.set_grad_enabled(training):
            try:
                with _autocast(place, amp):
                    outputs = torch.func.functional_call(model, weights, given, named)
                if training:
                    _backward(outputs)
            except InvalidOptionError:
                raise
            except Exception as error:  # of the model's code, of PyTorch's operators: there is no common base
                raise _unfollowed(model, error, (inputs, dict(keywords or {}))) from error
    return recording


def refuse_inputs(inputs: Sequence[Any], keywords: Mapping[str, Any] | None, **asked: Any) -> None:
    """Do nothing where nothing is given that a network would be followed with.

    Raises:
        InvalidOptionError: it names what is.
    """
    given = [
        *map(brief, inputs),
        *(keywords or {}),
        *(f"{name}={brief(value)}" for name, value in asked.items() if value),
    ]
    if given:
        raise InvalidOptionError(f"a Recording has its problems already, and takes no {', '.join(given)}")


def _check(model: Any, training: Any, memory_format: Any, device: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidOptionError(f"model={brief(model)} must be a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidOptionError(f"the model is TorchScript, which cannot be followed. {_INSTEAD}")
    if is_exported(model):
        program = "give the ExportedProgram to miofind.torch.exported_problems"
        raise InvalidOptionError(f"the model is a module of torch.export: {program}")
    if not isinstance(training, bool):
        raise InvalidOptionError(f"training={brief(training)} must be True or False")
    if memory_format not in _MEMORY_FORMATS:
        raise InvalidOptionError(
            f"memory_format={brief(memory_format)} must be torch.channels_last, torch.channels_last_3d or None"
        )
    if device not in ("cuda", "cpu"):
        raise InvalidOptionError(f"device={brief(device)} must be 'cuda' or 'cpu'")


def _autocast_dtype(amp: Any) -> Any:
    """The torch.dtype of autocast that a value names; None for None.

    Raises:
        InvalidOptionError: it names none of autocast's.
    """
    if amp is None:
        return None
    with contextlib.suppress(InvalidProblemError):
        named = data_type(amp, "amp")
        if named in (DataType.FLOAT16, DataType.BFLOAT16):
            return torch_dtype(named)
    raise InvalidOptionError(f"amp={brief(amp)} must be float16, bfloat16 or None")


def _unwrapped(model: Any) -> Any:
    """The module in what torch.compile, DistributedDataParallel and DataParallel put around one."""
    while True:
        if is_compiled(model):
            model = model._orig_mod
        elif isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            model = model.module
        else:
            return model


def _unfollowed(model: Any, error: Exception, given: Any) -> InvalidOptionError:
    numbers = next(filter(_is_numbers, pytree.tree_leaves(given, is_leaf=_is_numbers)), None)
    if numbers is not None and isinstance(error, (TypeError, AttributeError)):
        return InvalidOptionError(
            f"{type(model).__name__} cannot be followed with {brief(numbers)}: where that stands for a tensor, give "
            'one, such as torch.empty(shape, device="cuda"), or its shape as a tuple of two sizes or more'
        )
    return InvalidOptionError(
        f"{type(model).__name__} does not run with such inputs, or not without values and memory: {described(error)}. "
        f"{_INSTEAD}, where the network itself runs with them"
    )


def _tensors_of(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def dtype_of(model: Any) -> Any:
    """The element type of a model's weights, by the first that is of floating point."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


class _Fakes:
    """Makes fake tensors on a device, in a memory format."""

    def __init__(self, device: Any, memory_format: Any, dtype: Any) -> None:
        self._device = device
        self._format = memory_format
        self._dtype = dtype

    def tensor(self, like: Any) -> Any:
        """A tensor that looks like another, which may be real."""
        if torch.nn.parameter.is_lazy(like):
            raise InvalidOptionError("the model has lazy modules, whose first call makes their weights: run it once")
        strides = like.stride() if like.layout is torch.strided else None
        if strides is None:
            raise InvalidOptionError(f"{brief(like)} is not dense (strided)")
        made = torch.empty_strided(like.shape, strides, dtype=like.dtype, device=self._device)
        return self._formatted(made).requires_grad_(like.requires_grad)

    def of(self, given: Any) -> Any:
        """Inputs, in which tensors and shapes have become fake tensors."""
        return pytree.tree_map(self._input, given, is_leaf=_is_shape)

    def _input(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        if _is_shape(leaf):
            return self._formatted(torch.empty(leaf, dtype=self._dtype, device=self._device))
        return leaf

    def _formatted(self, tensor: Any) -> Any:
        if self._format is None:
            return tensor
        if _RANK.get(self._format, tensor.dim()) != tensor.dim():
            return tensor
        return tensor.contiguous(memory_format=self._format)


def _is_shape(value: Any) -> bool:
    """Whether a value is a tuple of sizes, at least two: a tuple of one integer may be anything."""
    return isinstance(value, tuple) and len(value) > 1 and all(type(size) is int and size >= 0 for size in value)


def _is_numbers(value: Any) -> bool:
    """Whether a value is a list or a tuple of integers that is not taken for a shape, though it may be meant as one."""
    is_list = isinstance(value, (list, tuple)) and len(value) > 0 and not _is_shape(value)
    return is_list and all(type(number) is int for number in value)


def _autocast(device: Any, dtype: Any) -> Any:
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def _backward(outputs: Any) -> None:
    """Run the backward pass of the sum of all outputs.

    Raises:
        InvalidOptionError: no output has a gradient.
    """
    tensors = [t for t in _tensors_in(outputs) if t.requires_grad]
    if not tensors:
        raise InvalidOptionError("no output of the model depends on what wants a gradient: leave training=True out")
    torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])


def _tensors_in(outputs: Any) -> Iterator[Any]:
    """The tensors in lists, dictionaries and data classes."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from _tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
