"""Trials on the CPU place: NumPy buffers between guard bands, and float64 references of an output or of parts of it."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from miofind.arrays.operands import HOST_WORKSPACE_ALIGNMENT
from miofind.core.problem import DataType, Operand, ProblemDescription
from miofind.core.tensor import TensorDescriptor
from miofind.core.values import FLOAT16_GRID, Values
from miofind.launch.invoker import bases_of
from miofind.process.threads import in_threads
from miofind.reference.convolution import numpy_dtype, reference_on_host, round_once
from miofind.verify.accuracy import ErrorBounds, error_bounds, half_ulp, overflow
from miofind.verify.channel_sums import wrong_sums
from miofind.verify.epilogue_bounds import BareSums, EpilogueStandard, fused_results
from miofind.verify.harness import (
    GUARD_BYTES,
    PACKED_WEIGHTS,
    PLACEMENT_BYTES,
    WORKSPACE,
    CheckHarness,
    CheckResult,
    PackedForm,
    Poison,
    Setting,
    WrongElement,
)
from miofind.verify.ranges import axes, exponents_along
from miofind.verify.sampling import Indices
from miofind.verify.strip_reference import Change, Tensors, Wide, strip_sums
from miofind.verify.strips import of_images, sample_images, sample_strips, strip_indices

if TYPE_CHECKING:
    from miofind.launch.invoker import Invoker

# Products of an output that is checked whole. Measured on two cores of a Xeon: some 2e9 to 1e10 a second, a fourth of
# that where few channels make for thin matrix products; the first gate needs them once, the second three times.
_DENSE_PRODUCTS = 1 << 27
_THIN_PRODUCTS = 1 << 25
_THIN_CHANNELS = 8
# And elements of one: some 300 bytes are kept of each.
_WHOLE_ELEMENTS = 1 << 21
_SUBNORMAL_PRODUCTS = 1 << 20
# How long one of two runs waits for the other to begin with it.
_PATIENCE_S = 0.5


class GuardedArray:
    """Bytes between two guard bands, at a multiple of 512 or at an offset from one.

    Attributes:
        bytes: those between the bands.
        offset: of their address from a multiple of 512.
    """

    def __init__(self, size: int, offset: int = 0) -> None:
        self._raw = np.empty(size + 2 * GUARD_BYTES + 2 * PLACEMENT_BYTES, np.uint8)
        self._size = size
        self.offset = -1
        self.move(offset)

    def move(self, offset: int) -> None:
        """Lie at `offset` bytes, below 512, from a multiple of 512; if it moves, contents are lost."""
        if offset == self.offset:
            return
        self.offset = offset
        start = -(self._raw.ctypes.data + GUARD_BYTES) % PLACEMENT_BYTES + offset
        self._whole = self._raw[start : start + self._size + 2 * GUARD_BYTES]
        self.bytes = self._whole[GUARD_BYTES : GUARD_BYTES + self._size]
        self.poison()

    def poison(self, poison: Poison = Poison.NAN) -> None:
        """Fill the bytes and the guard bands."""
        self._poison = poison
        self._whole[:] = poison

    def poison_guards(self, poison: Poison) -> None:
        """Fill the guard bands alone."""
        self._poison = poison
        for band in self._bands().values():
            band[:] = poison

    def damage(self, name: str) -> list[str]:
        """The guard bands that were overwritten."""
        return [f"the guard band {side} {name}" for side, band in self._bands().items() if (band != self._poison).any()]

    def _bands(self) -> dict[str, NDArray[np.uint8]]:
        return {"before": self._whole[:GUARD_BYTES], "after": self._whole[GUARD_BYTES + self._size :]}

    def tensor(self, descriptor: TensorDescriptor) -> NDArray[Any]:
        """The bytes as a tensor of logical shape."""
        dtype = numpy_dtype(descriptor.dtype)
        strides = tuple(stride * dtype.itemsize for stride in descriptor.strides)
        return np.ndarray(descriptor.shape, dtype, buffer=self.bytes.data, strides=strides)

    @property
    def checksum(self) -> int:
        """Of the bytes between the guard bands."""
        return zlib.crc32(self.bytes.data)


def random_values(descriptor: TensorDescriptor, values: Values, seed: int) -> NDArray[Any]:
    """Values of a distribution for a tensor, of its logical shape: float64 for float64, float32 for all others."""
    random = np.random.default_rng(seed)
    wide = np.float64 if descriptor.dtype is DataType.FLOAT64 else np.float32
    if values is Values.TERNARY:
        small: NDArray[Any] = random.integers(-1, 2, descriptor.shape, np.int8).astype(wide)
        small *= random.integers(0, 2, descriptor.shape, np.int8) * 2 - 1  # some zeros are negative
        return small
    if values is Values.EDGES:
        quarters: NDArray[Any] = np.ldexp(random.integers(-16, 17, descriptor.shape).astype(wide), -2)
        return np.where(quarters == 0, np.copysign(quarters, random.integers(0, 2, descriptor.shape) - 0.5), quarters)
    if values is not Values.NORMAL:
        numerators = random.integers(1, 129, descriptor.shape)
        if values is Values.DYADIC:
            numerators *= random.integers(0, 2, descriptor.shape) * 2 - 1
        dyadic: NDArray[Any] = np.ldexp(numerators.astype(wide), -6)
        return dyadic
    normal: NDArray[Any] = random.standard_normal(descriptor.shape, wide)
    if descriptor.dtype is DataType.FLOAT16:
        normal = np.rint(normal / np.float32(FLOAT16_GRID)) * np.float32(FLOAT16_GRID)
    return normal


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

    def of(self, output: NDArray[Any]) -> NDArray[Any]:
        """What an array of the output's logical shape holds where the reference does."""
        return output.reshape(-1) if self.indices is None else output[np.unravel_index(self.indices, output.shape)]

    def flat_index(self, place: int) -> int:
        """Flat logical index of the element at a place in the reference."""
        return place if self.indices is None else int(self.indices[place])

    def scaled(self, exponents: NDArray[np.int32]) -> _Reference:
        """The same where the inputs' powers of two have these sums, given in the output's logical shape."""
        along = self.of(exponents)
        return replace(
            self,
            sums=np.ldexp(self.sums, along),
            magnitudes=np.ldexp(self.magnitudes, along),
            squares=np.ldexp(self.squares, 2 * along),
        )


class HostHarness(CheckHarness):
    """Trials of one problem on the CPU place."""

    def __init__(self, problem: ProblemDescription, seed: int) -> None:
        super().__init__(problem, seed)
        self._buffers = {operand.name: GuardedArray(operand.tensor.bytes) for operand in problem.operands}
        self._workspace = GuardedArray(0, HOST_WORKSPACE_ALIGNMENT)
        self._second: dict[str, GuardedArray] = {}
        self._packed: dict[int, GuardedArray] = {}
        self._random: dict[tuple[str, Values], NDArray[Any]] = {}
        self._references: dict[Setting, _Reference] = {}
        self._allowances: dict[Hashable, _Allowance] = {}

    @property
    def takes_subnormals(self) -> bool:
        """See `CheckHarness.takes_subnormals`: processors take some 100 times as long for each product of them."""
        return self.problem.flops // 2 <= _SUBNORMAL_PRODUCTS

    def check(self, invoker: Invoker, setting: Setting, factor: float | None) -> CheckResult:
        """See `CheckHarness.check`."""
        allowed, checksums = self._begin(invoker, setting, factor)
        run = self._ready(invoker, setting)
        if setting.beside is None or not self.runs_beside(invoker, setting):
            run()
            return self._result(setting, allowed, checksums)
        with self._others():
            others_allowed, others_checksums = self._begin(invoker, setting.beside, factor)
            _at_once(run, self._ready(invoker, setting.beside))
            result = self._result(setting.beside, others_allowed, others_checksums)
        return self._result(setting, allowed, checksums) if result.is_right else result

    def pack(self, packed: PackedForm, setting: Setting, buffer: int) -> tuple[str, ...]:
        """See `CheckHarness.pack`."""
        self._place(packed.pack.alignment_bytes)
        into = self._packed.get(buffer)
        if into is None or into.bytes.size != packed.bytes:
            into = self._packed[buffer] = GuardedArray(packed.bytes)
        into.poison(setting.poison)
        checksum = self._fill("w", setting)
        self._clear_workspace(packed.pack, setting)
        others = {name: None for name in self._buffers if name != "w"}
        self._ready(packed.pack, setting, written="y", **(others | {"y": into.bytes}))()
        damaged = [*into.damage(PACKED_WEIGHTS), *self._workspace.damage(WORKSPACE)]
        return (*damaged, *([] if self._buffers["w"].checksum == checksum else ["input w"]))

    def check_packed(self, packed: PackedForm, setting: Setting, factor: float | None, buffer: int) -> CheckResult:
        """See `CheckHarness.check_packed`."""
        allowed, checksums = self._begin(packed.run, replace(setting, is_aligned=False), factor)
        self._buffers["w"].poison()
        weights = self._packed[buffer]
        weights.poison_guards(setting.poison)
        before = weights.checksum
        self._ready(packed.run, setting, w=weights.bytes)()
        result = self._result(setting, allowed, {name: checksums[name] for name in checksums if name != "w"})
        extra = [*weights.damage(PACKED_WEIGHTS), *([] if weights.checksum == before else [PACKED_WEIGHTS])]
        return replace(result, damaged=(*result.damaged, *extra))

    def close(self) -> None:
        """Forget all buffers."""
        self._buffers.clear()
        self._second.clear()
        self._packed.clear()
        self._random.clear()
        self._references.clear()
        self._allowances.clear()

    def _place(self, alignment: int) -> None:
        """Move the tensors to addresses that are multiples of what the candidate asks for, and of no more."""
        for name, buffer in self._buffers.items():
            buffer.move(self.offset(name, alignment))

    def _tensor(self, name: str) -> NDArray[Any]:
        return self._buffers[name].tensor(self.problem.tensor(name))

    def _fill(self, name: str, setting: Setting) -> int:
        """Fill an input; the checksum of what it holds."""
        descriptor, buffer = self.problem.tensor(name), self._buffers[name]
        buffer.poison(setting.poison)
        tensor, exponents = buffer.tensor(descriptor), self._exponents(name, setting)
        values = self._values(name, self.values_of(name, setting))
        tensor[...] = values if exponents is None else np.ldexp(values, exponents)
        self._inject(tensor, name, setting)
        return buffer.checksum

    def _values(self, name: str, values: Values) -> NDArray[Any]:
        """Unscaled values of an input, drawn once."""
        known = self._random.get((name, values))
        if known is None:
            known = random_values(self.problem.tensor(name), values, self.tensor_seed(name, values))
            self._random[name, values] = known
        return known

    def _inject(self, tensor: NDArray[Any], name: str, setting: Setting) -> None:
        if setting.nonfinite and name in self.injected:
            tensor[self.injected[name].index] = self.injected[name].values

    def _exponents(self, name: str, setting: Setting) -> NDArray[np.int32] | None:
        """The powers of two of an input's elements, in a shape that extends to its own; None for none."""
        pair, axis = self.powers_of(name, setting)
        if not any(pair):
            return None
        shape = self.problem.tensor(name).shape
        along = exponents_along(pair, axis, np.arange(shape[axis.dimension], dtype=np.int64))
        return along.reshape([-1 if i == axis.dimension else 1 for i in range(len(shape))])

    def _begin(self, invoker: Invoker, setting: Setting, factor: float | None) -> tuple[_Allowance, Mapping[str, int]]:
        """Place and fill the tensors, poison what is no input; what is allowed, and the checksums of the inputs."""
        self._place(0 if setting.is_aligned else invoker.alignment_bytes)
        checksums = {name: self._fill(name, setting) for name in self.inputs}
        allowed = self._allowed(setting, factor)
        for name in self.outputs:
            self._buffers[name].poison(setting.poison)
        self._clear_workspace(invoker, setting)
        return allowed, checksums

    def _clear_workspace(self, invoker: Invoker, setting: Setting) -> None:
        """Make the workspace as large as a candidate asks for, poisoned unless the setting keeps it."""
        if self._workspace.bytes.size != invoker.workspace_bytes:
            self._workspace = GuardedArray(invoker.workspace_bytes, HOST_WORKSPACE_ALIGNMENT)
        elif not setting.keeps_workspace:
            self._workspace.poison(setting.poison)
        self._workspace.poison_guards(setting.poison)

    def _ready(self, invoker: Invoker, setting: Setting, *, written: str = "", **others: Any) -> Callable[[], None]:
        """A run in the present buffers; after the first run inputs are read-only, so that whoever mends one raises.

        Args:
            written: the tensor that is no input; the problem's outputs by default.
            others: what stands for a tensor.
        """
        given = {operand.name: self._given(operand) for operand in self.problem.operands} | others
        if setting.poison is Poison.FINITE:
            kept = (written,) if written else self.outputs
            given |= {name: _read_only(array) for name, array in given.items() if name not in kept}
        workspace = self._workspace.bytes if invoker.workspace_bytes else None
        bases = bases_of(self.problem, given, workspace, self.parameters_of(setting))
        return functools.partial(invoker.run, bases, 0)

    def _given(self, operand: Operand) -> NDArray[Any]:
        """What a run is given of an operand: an array of the shape that users' have."""
        return self._tensor(operand.name).reshape(operand.shape)

    @contextlib.contextmanager
    def _others(self) -> Iterator[None]:
        """The buffers are those of a second run meanwhile."""
        mine = self._buffers, self._workspace
        if not self._second:
            self._second = {name: GuardedArray(buffer.bytes.size) for name, buffer in self._buffers.items()}
        self._buffers, self._workspace = self._second, GuardedArray(0, HOST_WORKSPACE_ALIGNMENT)
        try:
            yield
        finally:
            self._buffers, self._workspace = mine

    def _allowed(self, setting: Setting, factor: float | None) -> _Allowance:
        """What a check may find; computed once for all candidates of one growth."""
        pairs = setting.powers.pairs
        scaled = tuple(a + b for a in pairs[0] for b in pairs[1])
        key = (setting.unscaled, scaled, factor, setting.shifted, setting.rounds_twice)
        if key not in self._allowances:
            unscaled = self._reference(setting)
            reference = unscaled.scaled(self._output_exponents(setting)) if setting.powers else unscaled
            if self.problem.epilogue.changes_results:
                self._allowances[key] = self._fused_allowance(reference, factor, setting)
            else:
                self._allowances[key] = _allowance(reference, factor, self.problem.output.dtype)
        return self._allowances[key]

    def _fused_allowance(self, reference: _Reference, factor: float | None, setting: Setting) -> _Allowance:
        """What a check may find of a fused problem: the epilogue of a reference's sums."""
        problem = self.problem
        standard = EpilogueStandard.of(problem, factor, rounds_twice=setting.rounds_twice)
        bare = BareSums(sums=reference.sums, magnitudes=reference.magnitudes, squares=reference.squares)
        operands = {
            operand.name: self._unscaled(operand.name, setting).reshape(operand.shape)
            for operand in problem.operands
            if operand.name in problem.epilogue.operands
        }
        fused = fused_results(problem, bare, operands, self.parameters_of(setting), standard, reference.indices)
        made = replace(reference, sums=fused.wanted, magnitudes=fused.magnitudes)
        if standard.bitwise:
            return _allowance(made, None, problem.output.dtype)
        return _Allowance.within(made, fused.arithmetic, problem.output.dtype)

    def _reference(self, setting: Setting) -> _Reference:
        """The reference of a setting's unscaled inputs, computed once."""
        known = self._references.get(setting.unscaled)
        if known is None:
            known = self._references[setting.unscaled] = self._computed(setting.unscaled)
        return known

    def _output_exponents(self, setting: Setting) -> NDArray[np.int32]:
        """The powers of two of the output's elements."""
        shape = self.problem.output.shape
        pairs = zip(setting.powers.pairs, axes(self.problem), shape, strict=False)
        rows, columns = (exponents_along(pair, axis, np.arange(size)) for pair, axis, size in pairs)
        both = (rows[:, None] + columns).reshape(*shape[:2], *[1] * self.problem.spatial_dims)
        return np.broadcast_to(both, shape)

    def _computed(self, setting: Setting) -> _Reference:
        tensors = {name: self._unscaled(name, setting) for name in self.problem.direction.inputs}
        exact = setting.values is Values.TERNARY
        indices, [sums, *scales] = self._sums(setting, tensors, _CHANGES[:1] if exact else _CHANGES)
        magnitudes, squares = scales or (np.abs(sums), np.zeros_like(sums))
        return _Reference(indices=indices, sums=sums, magnitudes=magnitudes, squares=squares)

    def _unscaled(self, name: str, setting: Setting) -> NDArray[Any]:
        """An input without powers of two."""
        tensor = self._values(name, self.values_of(name, setting)).astype(numpy_dtype(self.problem.tensor(name).dtype))
        self._inject(tensor, name, setting)
        return tensor

    def _sums(
        self, setting: Setting, tensors: Tensors, changes: Sequence[Change]
    ) -> tuple[Indices | None, Sequence[Wide]]:
        """Which elements are checked, None for all, and their sums for each change of the inputs."""
        problem = self.problem
        thin = min(problem.c, problem.k) // problem.groups < _THIN_CHANNELS
        is_cheap = problem.flops // 2 <= (_THIN_PRODUCTS if thin else _DENSE_PRODUCTS)
        if is_cheap and problem.output.size <= _WHOLE_ELEMENTS:
            return None, _dense(problem, tensors, changes)
        random = self.positions(setting)
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

    def _result(self, setting: Setting, allowed: _Allowance, checksums: Mapping[str, int]) -> CheckResult:
        output = self._tensor(self.output)
        empty = np.zeros(0, np.bool_) if setting.nonfinite else np.isnan(output)
        unwritten = int(np.count_nonzero(empty))
        comparison = self._compared(allowed)
        worst = comparison.worst
        if worst is not None:
            worst = replace(worst, exponent=self.exponent_at(worst.index, setting))
        return CheckResult(
            checked=allowed.wanted.size,
            wrong=comparison.wrong,
            worst=worst,
            unwritten=unwritten,
            first_unwritten=self._first_in_memory(empty) if unwritten else None,
            damaged=self._damaged(checksums),
            max_error=comparison.max_error,
            bound_ratio=comparison.bound_ratio,
            fingerprint=self._fingerprint(),
            sums=wrong_sums(self.problem, {name: self._tensor(name) for name in self._buffers}),
        )

    def _fingerprint(self) -> int:
        """Of all bits of the outputs."""
        found = 0
        for name in self.outputs:
            found = zlib.crc32(self._buffers[name].bytes.data, found)
        return found

    def _compared(self, allowed: _Allowance) -> _Comparison:
        """The output that is there against what is allowed."""
        reference, wanted, arithmetic = allowed.reference, allowed.wanted, allowed.bounds.arithmetic
        got = _wide(reference.of(self._tensor(self.output)))
        errors = np.abs(got - wanted)
        if not (is_finite := np.isfinite(errors)).all():
            errors[~is_finite] = math.inf
            errors[(got == wanted) | (np.isnan(got) & np.isnan(wanted))] = 0.0
            errors[_overflows(got, wanted, arithmetic, self.problem.output.dtype)] = 0.0
        ratios = _ratios(np.maximum(errors - allowed.bounds.rounding, 0.0), arithmetic)
        wrong = ~(errors <= allowed.total)
        worst = None
        if wrong.any():
            at = int(np.argmax(np.where(wrong, ratios, -1.0)))
            index = self.output_index(reference.flat_index(at))
            worst = WrongElement(
                index=index, got=float(got[at]), wanted=float(wanted[at]), bound=float(allowed.total[at])
            )
        return _Comparison(
            wrong=int(np.count_nonzero(wrong)),
            worst=worst,
            max_error=float(_ratios(errors, reference.magnitudes).max()),
            bound_ratio=float(ratios.max()),
        )

    def _first_in_memory(self, empty: NDArray[np.bool_]) -> tuple[int, ...]:
        strides = self.problem.output.strides
        found = np.argwhere(empty)
        return tuple(int(i) for i in found[np.argmin(found @ np.array(strides))])

    def _damaged(self, checksums: Mapping[str, int]) -> tuple[str, ...]:
        damaged = []
        for name, buffer in self._buffers.items():
            damaged += buffer.damage(name)
            if name in checksums and buffer.checksum != checksums[name]:
                damaged.append(f"input {name}")
        return tuple(damaged + self._workspace.damage(WORKSPACE))


def _at_once(*runs: Callable[[], None]) -> None:
    """Carry runs out at the same time, and wait for all; one after the other where no threads can be had."""
    begin = threading.Barrier(len(runs))

    def carry_out(run: Callable[[], None]) -> BaseException | None:
        with contextlib.suppress(threading.BrokenBarrierError):
            begin.wait(_PATIENCE_S)
        try:
            run()
        except BaseException as error:  # raised once none of them runs any more
            return error
        return None

    for error in list(in_threads(carry_out, runs, len(runs), "miofind-verify")):
        if error is not None:
            raise error


def _read_only(array: NDArray[Any] | None) -> NDArray[Any] | None:
    """A view that raises where it is written."""
    if array is None:
        return None
    view = array.view()
    view.flags.writeable = False
    return view


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

    wrong: int
    worst: WrongElement | None
    max_error: float
    bound_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowance:
    """What a result must be, and how far from it it may be.

    Attributes:
        reference: of the inputs with their powers of two.
        wanted: an element each: the sums, rounded where nothing else will do.
        bounds: of what is finite; nothing else than itself will do for what is not.
        total: the sum of the bounds.
    """

    reference: _Reference
    wanted: Wide
    bounds: ErrorBounds
    total: Wide

    @staticmethod
    def within(reference: _Reference, arithmetic: Wide, dtype: DataType) -> _Allowance:
        """Results that are the reference's sums, each within a bound before it is rounded."""
        finite = np.isfinite(reference.sums)
        arithmetic = np.where(finite, arithmetic, 0.0)
        rounding = half_ulp(np.where(finite, np.abs(reference.sums), 0.0) + arithmetic, dtype)
        bounds = ErrorBounds(arithmetic=arithmetic, rounding=rounding)
        return _Allowance(reference=reference, wanted=reference.sums, bounds=bounds, total=bounds.total)


def _allowance(reference: _Reference, factor: float | None, dtype: DataType) -> _Allowance:
    if factor is None:
        nothing = np.broadcast_to(np.float64(0), reference.sums.shape)
        wanted, bounds = _wide(round_once(reference.sums, dtype)), ErrorBounds(arithmetic=nothing, rounding=nothing)
    else:
        finite = np.isfinite(reference.sums)
        sums, squares = (np.where(finite, each, 0.0) for each in (reference.sums, reference.squares))
        wanted, bounds = reference.sums, error_bounds(sums, squares, factor, dtype)
    return _Allowance(reference=reference, wanted=wanted, bounds=bounds, total=bounds.total)


def _wide(array: NDArray[Any]) -> Wide:
    """An array as float64; by float32 where it has 16 bits, which processors convert themselves."""
    narrow = array.astype(np.float32) if array.dtype.itemsize == 2 else array
    return narrow.astype(np.float64)


def _overflows(
    got: NDArray[np.float64], wanted: NDArray[np.float64], arithmetic: NDArray[np.float64], dtype: DataType
) -> NDArray[np.bool_]:
    """Where an infinity is what a result within its bound may be rounded to."""
    infinite: NDArray[np.bool_] = np.isinf(got) & (np.sign(got) == np.sign(wanted))
    return infinite & (np.abs(wanted) + arithmetic >= overflow(dtype))


def _ratios(errors: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.float64]:
    """errors / scale, 0 where there is no error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0.0, errors / scale)
