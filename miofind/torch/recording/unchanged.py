"""A network as it was, after its code ran on fake tensors: what it set then holds such tensors, or counts too much."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from miofind.torch.fused.watch import Surroundings
from miofind.torch.fused.writes import written


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """A block after which a network is as it was before.

    That is: attributes of its modules, what is in their lists, dictionaries, sets and objects, the tensors among all
    these that are no parameters, and the random numbers of Python and NumPy, which its code may draw.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    surroundings, tensors = Surroundings(model), RealTensors()
    try:
        with tensors:
            yield
    finally:
        tensors.put_back()
        surroundings.put_back()
        for held, before in attributes:
            held.clear()
            held.update(before)


class RealTensors(TorchDispatchMode):
    """Notes what tensors hold that an operator is about to write to.

    PyTorch's fake tensors stand for real ones that operators are given beside them, but what has no other tensors than
    real ones and numbers, such as `self.steps += 1`, is computed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written(func, args, kwargs):
            if not isinstance(tensor, FakeTensor):
                self._note(tensor)
        return func(*args, **kwargs)

    def _note(self, tensor: Any) -> None:
        if id(tensor) not in self._before:
            with _disable_current_modes():
                self._before[id(tensor)] = tensor, tensor.detach().clone()

    def put_back(self) -> None:
        """Have them hold it again."""
        with _disable_current_modes(), torch.inference_mode():  # which takes tensors of both modes
            for tensor, before in self._before.values():
                tensor.detach().copy_(before)
