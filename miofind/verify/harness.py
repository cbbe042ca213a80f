"""The check harness: runs a candidate once on guarded, poisoned buffers and compares with a float64 reference.

`CheckHarness` is the base of two harnesses, one for CUDA devices and one for the CPU place. `verifier.py` chooses the
inputs and the error bounds of each check, and words what failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from miofind.core.cached import cached_property
from miofind.core.epilogue import EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.verify.channel_sums import WrongSum
from miofind.verify.epilogue_trials import operand_values, trial_parameters
from miofind.verify.nonfinite import Injected, injected_values
from miofind.verify.ranges import UNSCALED, Powers, ScaledAxis, axes, exponents_along

if TYPE_CHECKING:
    from miofind.launch.invoker import Invoker

GUARD_BYTES = 4096
"""Bytes of the guard band before and after each buffer."""

PLACEMENT_BYTES = 512
"""A buffer's address is a multiple of this, plus the offset of its placement (see `CheckHarness.offset`)."""

MOST_BESIDE_BYTES = 64 << 20
"""Largest tensors and workspace for which a second run is started at the same time: larger runs fill a device alone."""

MOST_LATE_BYTES = 16 << 20
"""Largest inputs that the kernel before a run makes (see `Setting.is_late`): they are copied with few blocks."""

WORKSPACE = "the workspace"
PACKED_WEIGHTS = "the packed weights"
"""Names, in `CheckResult.damaged`, of the buffers that are not operands."""


class Poison(IntEnum):
    """The byte that fills the output before a run.

    NAN is a NaN in every dtype: an element that still is NaN was not written. FINITE is a large number in every dtype:
    it exposes kernels that add to the output, or that replace nothing but NaN.
    """

    NAN = 0xFF
    FINITE = 0x7B


@dataclass(frozen=True, kw_only=True)  # with a `__dict__`, for what follows from it
class Setting:
    """Inputs and memory of one run.

    Attributes:
        values: distribution of the convolution's inputs; an epilogue's operands follow it (`operand_values`).
        powers: powers of two that the inputs are multiplied by.
        nonfinite: a few infinities and NaN are injected into the inputs, and zeros that they are multiplied with.
        shifted: an epilogue's operands are positive, and its other numbers are those of `trial_parameters` for that.
        rounds_twice: results are held to an epilogue of sums that were rounded to the output's dtype.
        poison: what fills the output and the guard bands before the run.
        keeps_workspace: the workspace still holds what the previous run wrote; otherwise it is filled with NaN.
        is_aligned: tensors lie at multiples of PLACEMENT_BYTES; otherwise their addresses have the alignment that the
            candidate asks for, and no more.
        is_late: the run is captured in a CUDA graph, where a kernel before it makes the inputs and lets the next one
            begin long before it ends (programmatic dependent launch): what does not wait for its end reads NaN. For
            inputs of MOST_LATE_BYTES at most, and where there is memory for them twice; not captured where it cannot.
        beside: inputs and memory of a second run at the same time, with tensors and a workspace of its own; None for
            one run alone. The second run is left out where it takes more than MOST_BESIDE_BYTES or does not fit.
    """

    values: Values
    powers: Powers = UNSCALED
    nonfinite: bool = False
    shifted: bool = False
    rounds_twice: bool = False
    poison: Poison = Poison.NAN
    keeps_workspace: bool = False
    is_aligned: bool = False
    is_late: bool = False
    beside: Setting | None = None

    @cached_property
    def contents(self) -> Setting:
        """The fields that decide the values of the inputs."""
        return Setting(values=self.values, powers=self.powers, nonfinite=self.nonfinite, shifted=self.shifted)

    @cached_property
    def unscaled(self) -> Setting:
        """The same convolution's inputs without powers of two; their sums times the powers are those of the scaled."""
        return Setting(values=self.values, nonfinite=self.nonfinite)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongElement:
    """One output element beyond its bound.

    Attributes:
        index: logical index in the output.
        got, wanted: what the candidate wrote, and the reference (rounded, in the exact gate).
        bound: largest |got - wanted| allowed.
        exponent: of the power of two that the scaling of the inputs multiplies all three by.
    """

    index: tuple[int, ...]
    got: float
    wanted: float
    bound: float
    exponent: int = 0

    @property
    def unscaled(self) -> WrongElement:
        """The element as inputs without scaling would give it: whole numbers in the exact gate."""
        with np.errstate(over="ignore"):
            got, wanted, bound = np.ldexp([self.got, self.wanted, self.bound], -self.exponent).tolist()
        return WrongElement(index=self.index, got=got, wanted=wanted, bound=bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check.

    Attributes:
        checked, wrong: number of elements compared with the reference, and of those beyond their bound.
        worst: the element furthest beyond its bound; None if none is.
        unwritten: number of NaN in the whole output; a correct run leaves none. 0 where NaN were injected.
        first_unwritten: logical index of the first of them in memory.
        damaged: buffers overwritten that a run must not touch, such as "the guard band after y" or "input x".
        max_error: largest |error| / (|x| * |w|) of the checked elements; with an epilogue over the sum of the
            magnitudes of all that it makes them of.
        bound_ratio: largest error, less the output's rounding, over the bound of the arithmetic; at most 1 if correct.
        fingerprint: checksum of all bits of the outputs.
        sums: second outputs that are wrong; all of their channels are compared.
    """

    checked: int
    wrong: int
    worst: WrongElement | None
    unwritten: int
    first_unwritten: tuple[int, ...] | None
    damaged: tuple[str, ...]
    max_error: float
    bound_ratio: float
    fingerprint: int
    sums: tuple[WrongSum, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the check found no fault."""
        return self.worst is None and not self.unwritten and not self.damaged and not self.sums


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """A candidate in two parts: `pack` reads w and writes `bytes` bytes, `run` reads those in place of w."""

    pack: Invoker
    run: Invoker
    bytes: int


class CheckHarness(ABC):
    """Buffers, inputs and references of one problem, made once and used for every candidate.

    The operands and the workspace lie between guard bands of GUARD_BYTES. For one alignment an operand has the same
    address in all runs, with other values in it: a candidate that caches results by address is caught.

    Attributes:
        inputs: names of the operands that are read.
        output: name of the one that is written, the main one where there are several.
        outputs: names of all that are.
        second_outputs: the operands that are written besides the main one.
    """

    def __init__(self, problem: ProblemDescription, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.inputs = tuple(operand.name for operand in problem.inputs)
        self.output = problem.direction.output
        self.outputs = tuple(operand.name for operand in problem.outputs)
        self.second_outputs = problem.second_outputs
        self._positions = {operand.name: i for i, operand in enumerate(problem.operands)}
        self._seeds: dict[tuple[str, Values], int] = {}
        self.injected: Mapping[str, Injected] = injected_values(problem, np.random.default_rng([seed, 1]))

    @property
    def has_late_inputs(self) -> bool:
        """Whether a kernel can make the inputs right before a run, and let that begin early; see `Setting.is_late`."""
        return False

    @property
    def takes_subnormals(self) -> bool:
        """Whether subnormal inputs cost no more than others."""
        return True

    @abstractmethod
    def check(self, invoker: Invoker, setting: Setting, factor: float | None) -> CheckResult:
        """Run a candidate once and compare its output.

        Args:
            invoker: the candidate.
            setting: inputs and memory of the run.
            factor: bound of the sums' |error| in units of sqrt(x^2 * w^2), before rounding; None where the sums are
                exact, and the output must equal the rounded reference unless its activation is inexact.
        """

    @abstractmethod
    def pack(self, packed: PackedForm, setting: Setting, buffer: int) -> tuple[str, ...]:
        """Pack the weights of a setting into the numbered buffer; gives what it damaged, as in `CheckResult`."""

    @abstractmethod
    def check_packed(self, packed: PackedForm, setting: Setting, factor: float | None, buffer: int) -> CheckResult:
        """Check a run that reads the packed weights from the numbered buffer; w itself holds nothing but NaN."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    def tensor_seed(self, name: str, values: Values) -> int:
        """Seed of one input's values, 64 bits."""
        seed = self._seeds.get((name, values))
        if seed is None:
            entropy = np.random.SeedSequence([self.seed, int(values), self._positions[name]])
            seed = self._seeds[name, values] = int(entropy.generate_state(1, np.uint64)[0])
        return seed

    def positions(self, setting: Setting) -> np.random.Generator:
        """The generator that draws the elements to check; each set of inputs and each seed has its own."""
        return np.random.default_rng([self.seed, int(setting.values), int(setting.nonfinite)])

    def values_of(self, name: str, setting: Setting) -> Values:
        """The distribution of an input."""
        if name in self.problem.direction.inputs:
            return setting.values
        return operand_values(name, setting.values, shifted=setting.shifted)

    def parameters_of(self, setting: Setting) -> EpilogueParameters:
        """The numbers that the epilogue of a run is given; they mean nothing without one."""
        return trial_parameters(self.problem, setting.values, shifted=setting.shifted)

    def powers_of(self, name: str, setting: Setting) -> tuple[tuple[int, int], ScaledAxis]:
        """The powers of two (even, odd) of an input and the axis they go along; (0, 0) for an operand without any."""
        factors = self.problem.direction.inputs
        if name not in factors:
            return (0, 0), ScaledAxis(dimension=0, size=1)
        at = factors.index(name)
        return setting.powers.pairs[at], axes(self.problem)[at]

    def exponent_at(self, index: tuple[int, ...], setting: Setting) -> int:
        """Exponent of the power of two that a setting's scaling multiplies an output element by; 0 where none does."""
        if self.problem.epilogue.changes_results:
            return 0
        along = zip(setting.powers.pairs, axes(self.problem), index, strict=False)
        return sum(int(exponents_along(pair, axis, np.array([at]))[0]) for pair, axis, at in along)

    def runs_beside(self, invoker: Invoker, setting: Setting) -> bool:
        """Whether a check starts a second run at the same time."""
        size = self.problem.bytes + invoker.workspace_bytes
        return setting.beside is not None and size <= MOST_BESIDE_BYTES

    def offset(self, name: str, alignment: int) -> int:
        """Bytes of an operand's address beyond a multiple of PLACEMENT_BYTES: an odd multiple of the alignment.

        The address has the alignment and no larger one. Operands differ in it, so that neither do their distances.
        """
        return alignment * (2 * self._positions[name] + 1) % PLACEMENT_BYTES

    def output_index(self, flat: int) -> tuple[int, ...]:
        """Logical index of the output element with a given flat logical index."""
        return tuple(int(i) for i in np.unravel_index(flat, self.problem.output.shape))

    def index_in_memory(self, place: int) -> tuple[int, ...]:
        """Logical index of the output element at a given offset in memory, in elements."""
        output = self.problem.output
        index = [0] * len(output.shape)
        for dimension in sorted(range(len(index)), key=lambda d: (-output.strides[d], -output.shape[d])):
            stride = output.strides[dimension]
            index[dimension] = place // stride % output.shape[dimension]
        return tuple(index)
