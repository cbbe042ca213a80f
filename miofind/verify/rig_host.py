"""Trials on the CPU place: NumPy buffers between guard bands, and float64 references of an output or of parts of it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from miofind.problem import DataType, ProblemDescription
from miofind.reference import numpy_dtype, reference_on_host, round_once
from miofind.tensor import TensorDescriptor
from miofind.values import Values
from miofind.verify.accuracy import ErrorBounds, error_bounds
from miofind.verify.rig import GUARD_BYTES, POISON, Findings, Rig, WrongElement
from miofind.verify.sampling import Indices
from miofind.verify.strip_reference import Change, Tensors, Wide, strip_sums
from miofind.verify.strips import of_images, sample_images, sample_strips, strip_indices

if TYPE_CHECKING:
    from miofind.invoker import Invoker

# Products of an output that is checked whole. Measured on two cores of a Xeon: some 2e9 to 1e10 a second, a fourth of
# that where few channels make for thin matrix products; the first gate needs them once, the second three times.
_DENSE_PRODUCTS = 1 << 27
_THIN_PRODUCTS = 1 << 25
_THIN_CHANNELS = 8
_ALIGNMENT = 256


class GuardedArray:
    """Bytes at a multiple of 256 between two guard bands."""

    def __init__(self, size: int) -> None:
        raw = np.empty(size + 2 * GUARD_BYTES + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        self._whole = raw[start : start + size + 2 * GUARD_BYTES]
        self.bytes = self._whole[GUARD_BYTES : GUARD_BYTES + size]
        self._whole[:] = POISON

    def poison(self) -> None:
        """Overwrite everything, guard bands too."""
        self._whole[:] = POISON

    def damage(self, name: str) -> list[str]:
        """The guard bands that were overwritten."""
        bands = {"before": self._whole[:GUARD_BYTES], "after": self._whole[GUARD_BYTES + self.bytes.size :]}
        return [f"the guard band {side} {name}" for side, band in bands.items() if (band != POISON).any()]

    def tensor(self, descriptor: TensorDescriptor) -> NDArray[Any]:
        """The bytes as a tensor of logical shape."""
        dtype = numpy_dtype(descriptor.dtype)
        strides = tuple(stride * dtype.itemsize for stride in descriptor.strides)
        return np.ndarray(descriptor.shape, dtype, buffer=self.bytes.data, strides=strides)


def random_values(shape: tuple[int, ...], values: Values, seed: int) -> NDArray[np.float32]:
    """An array of a distribution, as float32."""
    random = np.random.default_rng(seed)
    if values is Values.NORMAL:
        return random.standard_normal(shape, np.float32)
    return random.integers(-1, 2, shape, np.int8).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """One set of inputs: their buffers by name, and the checksums of what they hold."""

    buffers: Mapping[str, GuardedArray]
    checksums: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """x * w of the elements that are checked, and for normal inputs |x| * |w| and x^2 * w^2.

    Attributes:
        indices: flat logical indices of the elements; None for the whole output.
        sums, magnitudes, squares: an element each.
    """

    indices: Indices | None
    sums: Wide
    magnitudes: Wide
    squares: Wide

    def of(self, output: NDArray[Any]) -> Wide:
        """What an output of logical shape holds where the reference does."""
        found = output.reshape(-1) if self.indices is None else output[np.unravel_index(self.indices, output.shape)]
        return found.astype(np.float64)

    def flat_index(self, place: int) -> int:
        """Flat logical index of the element at a place in the reference."""
        return place if self.indices is None else int(self.indices[place])


class HostRig(Rig):
    """Trials of one problem on the CPU place."""

    def __init__(self, problem: ProblemDescription, seed: int) -> None:
        super().__init__(problem, seed)
        self._inputs: dict[Values, _Inputs] = {}
        self._references: dict[Values, _Reference] = {}
        self._output = GuardedArray(problem.output.bytes)
        self._workspace = GuardedArray(0)

    def trial(self, invoker: Invoker, values: Values, factor: float | None) -> Findings:
        """See `Rig.trial`."""
        inputs = self._inputs.get(values) or self._fill(values)
        if values not in self._references:
            self._references[values] = self._reference(values, inputs)
        if self._workspace.bytes.size != invoker.workspace_bytes:
            self._workspace = GuardedArray(invoker.workspace_bytes)
        self._output.poison()
        self._workspace.poison()
        tensors = self._tensors(inputs)
        workspace = self._workspace.bytes if invoker.workspace_bytes else None
        invoker.run(tensors["x"], tensors["w"], tensors["y"], workspace, 0)
        return self._findings(values, inputs, factor)

    def close(self) -> None:
        """Forget all buffers."""
        self._inputs.clear()
        self._references.clear()

    def _tensors(self, inputs: _Inputs) -> dict[str, NDArray[Any]]:
        buffers = {**inputs.buffers, self.problem.direction.output: self._output}
        return {name: buffer.tensor(self.problem.tensor(name)) for name, buffer in buffers.items()}

    def _fill(self, values: Values) -> _Inputs:
        buffers, checksums = {}, {}
        for name in self.problem.direction.inputs:
            descriptor = self.problem.tensor(name)
            buffer = GuardedArray(descriptor.bytes)
            buffer.tensor(descriptor)[...] = random_values(descriptor.shape, values, self.tensor_seed(name, values))
            buffers[name] = buffer
            checksums[name] = zlib.crc32(buffer.bytes.data)
        self._inputs[values] = _Inputs(buffers=buffers, checksums=checksums)
        return self._inputs[values]

    def _reference(self, values: Values, inputs: _Inputs) -> _Reference:
        tensors = {name: buffer.tensor(self.problem.tensor(name)) for name, buffer in inputs.buffers.items()}
        indices, [sums, *scales] = self._sums(values, tensors, _CHANGES[:1] if values is Values.TERNARY else _CHANGES)
        magnitudes, squares = scales or (np.abs(sums), np.zeros_like(sums))
        return _Reference(indices=indices, sums=sums, magnitudes=magnitudes, squares=squares)

    def _sums(
        self, values: Values, tensors: Tensors, changes: Sequence[Change]
    ) -> tuple[Indices | None, Sequence[Wide]]:
        """Which elements are checked, None for all, and their sums for each change of the inputs."""
        problem = self.problem
        thin = min(problem.c, problem.k) // problem.groups < _THIN_CHANNELS
        if problem.flops // 2 <= (_THIN_PRODUCTS if thin else _DENSE_PRODUCTS):
            return None, _dense(problem, tensors, changes)
        random = self.positions(values)
        strips, images = sample_strips(problem, random), sample_images(problem, random)
        indices, sums = strip_indices(problem, strips), strip_sums(problem, tensors, strips, changes)
        if not images.size:
            return indices, sums
        others, more = _of_whole_images(problem, tensors, images, changes)
        seen = np.zeros(problem.output.size, np.bool_)
        seen[indices] = True
        new = ~seen[others]
        return np.concatenate([indices, others[new]]), [
            np.concatenate([some, rest[new]]) for some, rest in zip(sums, more, strict=True)
        ]

    def _findings(self, values: Values, inputs: _Inputs, factor: float | None) -> Findings:
        output = self._output.tensor(self.problem.output)
        empty = np.isnan(output)
        unwritten = int(np.count_nonzero(empty))
        first = self._first_in_memory(empty) if unwritten else None
        damaged = self._damaged(inputs)
        if damaged:
            del self._inputs[values]
        return self._compared(self._references[values], factor).findings(unwritten, first, damaged)

    def _compared(self, reference: _Reference, factor: float | None) -> _Comparison:
        """The output that is there against a reference."""
        dtype = self.problem.output.dtype
        got = reference.of(self._output.tensor(self.problem.output))
        wanted, bounds = _allowed(reference, factor, dtype)
        errors = np.abs(got - wanted)
        errors[np.isnan(errors)] = math.inf
        ratios = _ratios(np.maximum(errors - bounds.rounding, 0.0), bounds.arithmetic)
        wrong = ~(errors <= bounds.total)
        worst = None
        if wrong.any():
            at = int(np.argmax(np.where(wrong, ratios, -1.0)))
            index = self.output_index(reference.flat_index(at))
            worst = WrongElement(
                index=index, got=float(got[at]), wanted=float(wanted[at]), bound=float(bounds.total[at])
            )
        return _Comparison(
            checked=errors.size,
            wrong=int(np.count_nonzero(wrong)),
            worst=worst,
            max_error=float(_ratios(errors, reference.magnitudes).max()),
            bound_ratio=float(ratios.max()),
        )

    def _first_in_memory(self, empty: NDArray[np.bool_]) -> tuple[int, ...]:
        strides = self.problem.output.strides
        found = np.argwhere(empty)
        return tuple(int(i) for i in found[np.argmin(found @ np.array(strides))])

    def _damaged(self, inputs: _Inputs) -> tuple[str, ...]:
        damaged = []
        for name, buffer in inputs.buffers.items():
            damaged += buffer.damage(name)
            if zlib.crc32(buffer.bytes.data) != inputs.checksums[name]:
                damaged.append(f"input {name}")
        damaged += self._output.damage(self.problem.direction.output)
        return tuple(damaged + self._workspace.damage("the workspace"))


def _same(tensor: Wide) -> Wide:
    return tensor


_CHANGES: tuple[Change, ...] = (_same, np.abs, np.square)


def _dense(problem: ProblemDescription, tensors: Tensors, changes: Sequence[Change]) -> list[Wide]:
    """Sums of the whole output, flat, for each change of the inputs."""
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    changed = ({name: change(tensor) for name, tensor in wide.items()} for change in changes)
    return [
        reference_on_host(problem, x=each.get("x"), w=each.get("w"), y=each.get("y")).reshape(-1) for each in changed
    ]


def _of_whole_images(
    problem: ProblemDescription, tensors: Tensors, images: Indices, changes: Sequence[Change]
) -> tuple[Indices, list[Wide]]:
    """Flat logical indices of the elements of some images, and their sums."""
    each = problem.output.size // problem.n
    part = {name: tensor if name == "w" else tensor[images] for name, tensor in tensors.items()}
    indices = (images[:, None] * each + np.arange(each)).reshape(-1)
    return indices, _dense(of_images(problem, images.size), part, changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The elements that were checked against their reference."""

    checked: int
    wrong: int
    worst: WrongElement | None
    max_error: float
    bound_ratio: float

    def findings(self, unwritten: int, first: tuple[int, ...] | None, damaged: tuple[str, ...]) -> Findings:
        return Findings(
            checked=self.checked,
            wrong=self.wrong,
            worst=self.worst,
            unwritten=unwritten,
            first_unwritten=first,
            damaged=damaged,
            max_error=self.max_error,
            bound_ratio=self.bound_ratio,
        )


def _allowed(reference: _Reference, factor: float | None, dtype: DataType) -> tuple[Wide, ErrorBounds]:
    """What is wanted, and how far from it a result may be."""
    if factor is not None:
        return reference.sums, error_bounds(reference.sums, reference.squares, factor, dtype)
    nothing = np.zeros_like(reference.sums)
    return round_once(reference.sums, dtype).astype(np.float64), ErrorBounds(arithmetic=nothing, rounding=nothing)


def _ratios(errors: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.float64]:
    """errors / scale, 0 where there is no error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0.0, errors / scale)
