"""A problem's tensors in device memory, between guard bands, for tests on a GPU. Imports CuPy when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.reference.convolution import numpy_dtype

GUARD = 1024
POISON = 0xFF


class Buffer:
    """Device memory between guard bands, filled with 0xFF."""

    def __init__(self, size: int) -> None:
        import cupy

        self.size = size
        self.memory = cupy.full(size + 2 * GUARD, POISON, cupy.uint8)

    @property
    def address(self) -> int:
        return int(self.memory.data.ptr) + GUARD

    def write(self, values: np.ndarray) -> None:
        import cupy

        flat = np.frombuffer(values.tobytes(), np.uint8)
        self.memory[GUARD : GUARD + self.size] = cupy.asarray(flat)

    def read(self, dtype: np.dtype[Any]) -> np.ndarray:
        whole = self.memory.get()
        assert (whole[:GUARD] == POISON).all()
        assert (whole[GUARD + self.size :] == POISON).all()
        return whole[GUARD : GUARD + self.size].view(dtype)


def memory_order(problem: ProblemDescription, name: str) -> tuple[int, ...]:
    """The tensor's logical dimensions, outermost in memory first."""
    last = problem.tensor(name).layout.channels_last
    rank = len(problem.tensor(name).shape)
    return (0, *range(2, rank), 1) if last else tuple(range(rank))


def integers(problem: ProblemDescription, seed: int) -> dict[str, np.ndarray]:
    """The direction's inputs from {-1, 0, 1}: sums are exact in float32."""
    generator = np.random.default_rng(seed)
    return {
        name: generator.integers(-1, 2, problem.tensor(name).shape).astype(np.float64)
        for name in problem.direction.inputs
    }


def upload(problem: ProblemDescription, inputs: Mapping[str, np.ndarray]) -> dict[str, Buffer]:
    """Buffers of the operands; what is no input stays poisoned."""
    buffers = {operand.name: Buffer(operand.tensor.bytes) for operand in problem.operands}
    for name, values in inputs.items():
        tensor = problem.tensor(name)
        logical = values.reshape(tensor.shape)  # bias and scale are given as (k,)
        packed = logical.transpose(memory_order(problem, name)).astype(numpy_dtype(tensor.dtype))
        buffers[name].write(np.ascontiguousarray(packed))
    return buffers


def addresses(buffers: Mapping[str, Buffer]) -> dict[str, int]:
    """Where the buffers are, in their order."""
    return {name: buffer.address for name, buffer in buffers.items()}


def download(problem: ProblemDescription, buffers: Mapping[str, Buffer]) -> np.ndarray:
    """The output in logical order, float64; its guard bands are checked."""
    name = problem.direction.output
    order = memory_order(problem, name)
    flat = buffers[name].read(numpy_dtype(problem.output.dtype))
    shape = [problem.output.shape[i] for i in order]
    return flat.reshape(shape).transpose(np.argsort(order)).astype(np.float64)
