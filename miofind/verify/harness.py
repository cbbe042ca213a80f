"""What a trial of a candidate finds: one run on guarded, poisoned buffers, compared with a float64 reference.

The contract of the two harnesses, for CUDA devices and for the CPU place. Bounds and messages belong to `verify`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.verify.plants import Plants, plants_of
from miofind.verify.ranges import UNSCALED, Powers, ScaledAxis, axes

if TYPE_CHECKING:
    from miofind.launch.invoker import Invoker

GUARD_BYTES = 4096
PLACEMENT_BYTES = 512
"""Addresses are multiples of this and an offset."""

MOST_BESIDE_BYTES = 64 << 20
"""Of the tensors and the workspace of a second run at the same time: larger ones fill a device by themselves."""

WORKSPACE = "the workspace"
PACKED_WEIGHTS = "the packed weights"
"""What `CheckResult.damaged` calls the buffers that are no tensors."""


class Poison(IntEnum):
    """What a run finds in its output: the byte that fills it.

    NAN is a NaN in every dtype, so that what is left of it was not written. FINITE is a large number in every dtype,
    for whoever adds to an output, or leaves elements as they are, unless they are NaN.
    """

    NAN = 0xFF
    FINITE = 0x7B


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one run is given.

    Attributes:
        values: distribution of both inputs.
        powers: of two, that the inputs are multiplied by.
        planted: the inputs hold infinities and NaN at a few places, and zeros that meet them.
        poison: what the output and the guard bands hold before the run.
        keeps_workspace: the workspace is left as the run before left it; poisoned with NaN otherwise.
        is_aligned: tensors lie at multiples of PLACEMENT_BYTES, else where no more is true of their addresses than
            what the candidate asks for.
        beside: what another run at the same time is given, in tensors and a workspace of its own, where these take no
            more than MOST_BESIDE_BYTES and there is room for them; None for no such run.
    """

    values: Values
    powers: Powers = UNSCALED
    planted: bool = False
    poison: Poison = Poison.NAN
    keeps_workspace: bool = False
    is_aligned: bool = False
    beside: Setting | None = None

    @property
    def contents(self) -> Setting:
        """What of it decides the inputs."""
        return Setting(values=self.values, powers=self.powers, planted=self.planted)

    @property
    def unscaled(self) -> Setting:
        """The inputs without powers of two, whose results are the reference but for those."""
        return Setting(values=self.values, planted=self.planted)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongElement:
    """One element that is off.

    Attributes:
        index: logical index in the output.
        got, wanted: what the candidate wrote, and the reference (rounded, in the exact gate).
        bound: largest |got - wanted| allowed.
    """

    index: tuple[int, ...]
    got: float
    wanted: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What one trial found.

    Attributes:
        checked, wrong: elements compared with the reference, and those beyond the bound.
        worst: the element furthest beyond it.
        unwritten: elements of the whole output that are NaN, which no correct run leaves; 0 where inputs hold NaN.
        first_unwritten: logical index of the first of them in memory.
        damaged: what was overwritten that the run may not touch, such as "the guard band after y" or "input x".
        max_error: largest |error| / (|x| * |w|) of the checked elements.
        bound_ratio: largest share of the arithmetic's bound that an error takes beyond the output's rounding.
        fingerprint: a checksum of all bits of the output.
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

    @property
    def is_right(self) -> bool:
        """Whether there is nothing to complain of."""
        return self.worst is None and not self.unwritten and not self.damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """A candidate in two parts: `pack` reads w and writes `bytes` bytes, `run` reads those in place of w."""

    pack: Invoker
    run: Invoker
    bytes: int


class CheckHarness(ABC):
    """Buffers, inputs and references of one problem, made once and used for every candidate.

    The operands and the workspace lie between guard bands of 4096 bytes, each operand at one address for all runs of a
    placement: what a candidate keeps by address is stale once it meets other inputs there.

    Attributes:
        inputs: names of the operands that are read.
        output: name of the one that is written.
    """

    def __init__(self, problem: ProblemDescription, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.inputs = tuple(operand.name for operand in problem.inputs)
        self.output = problem.direction.output
        self._positions = {operand.name: i for i, operand in enumerate(problem.operands)}
        self.plants: Mapping[str, Plants] = plants_of(problem, np.random.default_rng([seed, 1]))

    @property
    def takes_subnormals(self) -> bool:
        """Whether subnormal inputs cost no more than others."""
        return True

    @abstractmethod
    def check(self, invoker: Invoker, setting: Setting, factor: float | None) -> CheckResult:
        """Run a candidate once.

        Args:
            invoker: the candidate.
            setting: what it is given.
            factor: bound of |error| in units of sqrt(x^2 * w^2), before rounding; None where the output must equal
                the rounded reference.
        """

    @abstractmethod
    def pack(self, packed: PackedForm, setting: Setting, buffer: int) -> tuple[str, ...]:
        """Pack the weights of a setting into the buffer of that number; what was overwritten that may not be."""

    @abstractmethod
    def check_packed(self, packed: PackedForm, setting: Setting, factor: float | None, buffer: int) -> CheckResult:
        """Run a candidate with the weights of a setting, packed into that buffer, and nothing but NaN for w itself."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    def tensor_seed(self, name: str, values: Values) -> int:
        """Seed of one input's values, 64 bits."""
        entropy = np.random.SeedSequence([self.seed, int(values), self._positions[name]])
        return int(entropy.generate_state(1, np.uint64)[0])

    def positions(self, setting: Setting) -> np.random.Generator:
        """What draws the elements to check with one set of inputs: others for each set and each seed."""
        return np.random.default_rng([self.seed, int(setting.values), int(setting.planted)])

    def powers_of(self, name: str, setting: Setting) -> tuple[tuple[int, int], ScaledAxis]:
        """The powers of two that an input is multiplied by, and along which axis; only what is multiplied has any."""
        factors = self.problem.direction.inputs
        if name not in factors:
            return (0, 0), ScaledAxis(dimension=0, size=1)
        at = factors.index(name)
        return setting.powers.pairs[at], axes(self.problem)[at]

    def runs_beside(self, invoker: Invoker, setting: Setting) -> bool:
        """Whether a trial has a second run."""
        size = self.problem.bytes + invoker.workspace_bytes
        return setting.beside is not None and size <= MOST_BESIDE_BYTES

    def offset(self, name: str, alignment: int) -> int:
        """Where an operand lies behind a multiple of PLACEMENT_BYTES: at a multiple of an alignment, and of no more.

        The operands lie at different ones, so that their addresses are no more aligned to each other.
        """
        return alignment * (2 * self._positions[name] + 1) % PLACEMENT_BYTES

    def output_index(self, flat: int) -> tuple[int, ...]:
        """Logical index of the output element with that flat logical index."""
        return tuple(int(i) for i in np.unravel_index(flat, self.problem.output.shape))

    def index_in_memory(self, place: int) -> tuple[int, ...]:
        """Logical index of the output element with that place in memory."""
        output = self.problem.output
        index = [0] * len(output.shape)
        for dimension in sorted(range(len(index)), key=lambda d: (-output.strides[d], -output.shape[d])):
            stride = output.strides[dimension]
            index[dimension] = place // stride % output.shape[dimension]
        return tuple(index)
