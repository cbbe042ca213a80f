"""The operands of a problem: tensors by name, each read or written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from miofind.core.tensor import DataType, TensorDescriptor

WORKSPACE_ALIGNMENT = 256
"""A workspace on a GPU begins at a multiple of this, as do its regions: cuBLASLt asks for no less."""


class Role(StrEnum):
    """What a run does with an operand: it reads inputs and writes outputs."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTensor:
    """A packed tensor without spatial dimensions: (k,) or (n, k), the last dimension innermost."""

    shape: tuple[int, ...]
    dtype: DataType

    @property
    def bytes(self) -> int:
        """Bytes of the packed tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each dimension."""
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One tensor that a run is given.

    Attributes:
        name: what steps call its buffer; unique in its problem.
        tensor: shape, element type and memory order, in as many dimensions as the output has: (1, k, 1, 1) for a bias.
        role: whether a run reads it or writes it.
        shape: that arrays of it have: (k,) for a bias; the tensor's own if left out.
    """

    name: str
    tensor: TensorDescriptor
    role: Role
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.shape or self.tensor.shape)

    @property
    def array(self) -> TensorDescriptor | FlatTensor:
        """What a user's array of it has: its tensor, without dimensions of size 1 where `shape` has none."""
        if self.shape == self.tensor.shape:
            return self.tensor
        return FlatTensor(shape=self.shape, dtype=self.tensor.dtype)

    @property
    def is_input(self) -> bool:
        """Whether a run reads it, and must leave it as it is."""
        return self.role is Role.INPUT
