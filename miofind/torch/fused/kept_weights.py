"""Copies of weights in the forms that they are used in, made once and kept while the weights live.

A form is a dtype with a memory format, or how a solution's kernels take filters that are packed. A copy is written
anew, in place, where its weight was written to: who holds its address, as a captured CUDA graph does, reads the new
values from then on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from miofind.core.tensor import Layout
from miofind.errors import LaunchError
from miofind.process.forks import ForkedLock
from miofind.torch.override.formats import dense, is_dense, layout_like
from miofind.torch.override.memory import is_capturing

_MOST_FORMS = 8
"""Of one weight: a solution may pack filters otherwise for each size of images."""


class Form(Protocol):
    """What copies of weights are like; equal ones are like each other."""

    def is_of(self, weight: Any) -> bool:
        """Whether a weight is so itself."""

    def made(self, weight: Any) -> Any:
        """The weight so: the same memory if it is, else new memory."""

    def write(self, copy: Any, weight: Any) -> None:
        """Write the weight to a copy."""


class Turned(NamedTuple):
    """A weight in a dtype and packed in a memory format."""

    dtype: Any
    channels_last: bool

    def is_of(self, weight: Any) -> bool:
        """Whether a weight is so itself."""
        return bool(weight.dtype == self.dtype and is_dense(weight, self._layout(weight)))

    def made(self, weight: Any) -> Any:
        """The weight so: the same memory if it is, else new memory."""
        return dense(weight.detach().to(self.dtype), self._layout(weight))

    def write(self, copy: Any, weight: Any) -> None:
        """Write the weight to a copy."""
        copy.copy_(weight)

    def _layout(self, weight: Any) -> Layout:
        return layout_like(weight, channels_last=self.channels_last)


class Memory:
    """Where a weight lies; another memory at the same address, once that was freed, is told from it.

    What a storage is known by is no other one's while a weak reference to it is held.
    """

    __slots__ = ("_address", "_dtype", "_shape", "_storage", "_strides")

    def __init__(self, weight: Any) -> None:
        self._address, self._dtype = weight.data_ptr(), weight.dtype
        self._shape, self._strides = weight.shape, weight.stride()
        self._storage = StorageWeakRef(weight.untyped_storage())

    def is_of(self, weight: Any) -> bool:
        """Whether a weight lies there."""
        return bool(
            weight.data_ptr() == self._address
            and weight.dtype is self._dtype
            and weight.shape == self._shape
            and weight.stride() == self._strides
            and weight.untyped_storage()._cdata == self._storage.cdata
        )


class _Copies:
    """The copies of one weight.

    Attributes:
        weight: a weak reference to it.
        memory, version: where it lay, and its version, which PyTorch counts up where a tensor is written to, when the
            copies were written.
        of_forms: by what they are like.
    """

    __slots__ = ("memory", "of_forms", "version", "weight")

    def __init__(self, weight: Any) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _copies.pop(key, None))
        self.memory, self.version = Memory(weight), weight._version
        self.of_forms: dict[Form, Any] = {}

    def are_of(self, weight: Any) -> bool:
        """Whether these are copies of a weight, written to meanwhile or not."""
        return self.weight() is weight and self.memory.is_of(weight)


_copies: dict[int, _Copies] = {}
"""By the identity of the weight."""
_turns = ForkedLock()
"""One thread at a time makes and writes copies: a weight's forms have one version together."""


def kept(weight: Any, form: Form) -> Any:
    """A weight, (k, c/groups, *filter), in a form: itself if it is so, else a copy.

    The copy of a parameter that requires no gradient is kept, and is written anew where PyTorch counts another version
    of the parameter: not after writing through `weight.data` or by torch.distributed. Others are copied in each call,
    since fused optimizers count no versions, tensors of inference mode have none, other processes write to shared
    memory, and what is no parameter may be new in each call; so are all where PyTorch swaps modules' parameters, which
    nobody may hold a weak reference to then.
    While a CUDA graph is captured, what lacks an up-to-date copy is copied by the graph, at each replay.
    """
    copies = _copies.get(id(weight))
    if copies is not None and copies.are_of(weight) and copies.version == weight._version:
        made = copies.of_forms.get(form)
        if made is not None and not weight.requires_grad:
            return made
    if form.is_of(weight) or not is_constant(weight) or is_capturing(weight.device):
        return form.made(weight)
    with _turns:
        return _copied(weight, form)


def may_keep(weight: Any, form: Form) -> bool:
    """Whether `kept` gives a copy that stays, and a weight has not come to have too many."""
    copies = _copies.get(id(weight))
    known = () if copies is None or not copies.are_of(weight) else copies.of_forms
    is_one_of_few = form in known or len(known) < _MOST_FORMS
    return is_one_of_few and is_constant(weight) and not is_capturing(weight.device)


def is_constant(weight: Any) -> bool:
    """Whether a weight stays, and PyTorch tells where it is written to nevertheless."""
    if not isinstance(weight, torch.nn.Parameter) or weight.requires_grad or weight.is_inference():
        return False
    if is_of_processes(weight):
        return False
    return not torch.__future__.get_swap_module_params_on_conversion()


def is_of_processes(weight: Any) -> bool:
    """Whether other processes may write to a weight, of which nobody tells; of one on a GPU that is not known."""
    return bool(weight.is_cpu and weight.is_shared())


def _copied(weight: Any, form: Form) -> Any:
    """A new copy, or one that was written anew, for all threads and streams once it is written.

    Other forms that cannot be written now, for want of memory, are tried again at the next use of any.
    """
    version, are_written = weight._version, True
    copies = _copies.get(id(weight))
    if copies is None or not copies.are_of(weight):
        copies = _Copies(weight)
        _count_steps()
    with torch.inference_mode(mode=False), torch.no_grad():  # a copy made in inference mode could not be written to
        for each, copy in copies.of_forms.items() if copies.version != version else ():
            try:
                each.write(copy, weight)
            except (LaunchError, torch.OutOfMemoryError):
                if each == form:
                    raise
                are_written = False
        made = copies.of_forms.get(form)
        if made is None:
            made = form.made(weight)
    if weight.is_cuda:
        torch.cuda.current_stream(weight.device).synchronize()
    if type(made) is torch.Tensor:  # no fake one, which stands for it while a model is traced
        copies.of_forms[form], _copies[id(weight)] = made, copies
        copies.version = version if are_written else copies.version
    return made


@functools.cache
def _count_steps() -> None:
    """Have PyTorch count a version where an optimizer writes to a weight that has copies; fused ones count none.

    A weight may have copies while an optimizer trains it: of a time when it required no gradient, as those of a
    network that is frozen and trained by turns.
    """
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Any, *_: Any) -> None:
    if torch.compiler.is_compiling() or not _copies:  # compiled steps count versions
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            copies = _copies.get(id(parameter))
            if copies is not None and copies.weight() is parameter:
                torch.autograd.graph.increment_version(parameter)


def renew(weight: Any) -> None:
    """Write the copies of a weight anew now, rather than at its next use, or forget them where it has other memory."""
    copies = _copies.get(id(weight))
    if copies is not None and not copies.are_of(weight):
        _copies.pop(id(weight), None)
    elif copies is not None:
        for form in [*copies.of_forms]:
            kept(weight, form)


def forget_if_swapped(weight: Any) -> None:
    """Forget the copies of a weight, and refer to it no more, where PyTorch swaps modules' parameters."""
    if torch.__future__.get_swap_module_params_on_conversion():
        _copies.pop(id(weight), None)


def kept_weights(weights: Sequence[Any], dtype: Any, channels_last: bool) -> list[Any]:
    """`kept` of several weights: the operator `miofind::kept_weights`, for compiled graphs."""
    return [kept(weight, Turned(dtype, channels_last)) for weight in weights]
