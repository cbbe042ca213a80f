"""The contract of a solver: it says which problems it serves, lists configurations, and emits inert `ConvSolution`s.

A solver is stateless. "Applicable" means correct.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import MAX_INT32_ELEMENTS, DataType, Direction, Layout, ProblemDescription
from miofind.device.device import INSTALL_CUDA, Device, Library, Place
from miofind.errors import InvalidConfigError
from miofind.solver.columns import ConfigTable, Integers, is_table
from miofind.solver.steps import Config, ConfigValue, ConvSolution, Packing

MAX_DEFAULT_CONFIGS = 16
"""Configurations that a find without a search measures of one solver at most."""

_MOST_KEPT = 1 << 16


class Algorithm(StrEnum):
    """Family of a solver."""

    DIRECT = "direct"
    IM2COL_GEMM = "im2col_gemm"
    GEMM = "gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    WINOGRAD = "winograd"
    FFT = "fft"
    LIBRARY = "library"


class Reach(IntEnum):
    """Which finite inputs the rounding errors of a result may follow.

    PRODUCTS: the products that it sums, as in direct summation.
    INPUTS: the pixels and the taps that it meets, whatever it multiplies them by, as in Winograd's F(2, r): a tap of 0
        does not keep a large pixel under it out of the errors, but the pixels beside the filter's window stay out.
    TILE: what lies beside these, too, as far as a tile of a transform goes: one large pixel spoils results that never
        meet it, and results of nothing but zeros are rounded as their neighbours are.
    """

    PRODUCTS = 0
    INPUTS = 1
    TILE = 2


@dataclass(frozen=True, slots=True)
class Applicability:
    """Whether a solver serves a problem; false with a reason that a user can read.

    The one way to refuse: `is_applicable` gives one, and so do functions named refuse_..., which `first_refusal` joins.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    @property
    def refused(self) -> bool:
        """Whether there is a reason. Asks refuse_...(problem), of which a bare `if` would read the other way round."""
        return bool(self.reason)


APPLICABLE = Applicability()

OF_IMAGES = frozenset({Direction.FORWARD, Direction.BACKWARD_DATA})
OF_WEIGHTS = frozenset({Direction.BACKWARD_WEIGHTS})
"""Directions that solvers compute who do not compute all."""


def first_refusal(*answers: Applicability) -> Applicability:
    """The first of the answers that is a refusal; APPLICABLE where none is."""
    return next((answer for answer in answers if answer.refused), APPLICABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKey:
    """One combination a solver serves: place and architectures, library, data types and layouts.

    Attributes:
        place: CUDA or CPU.
        library: who supplies the code.
        dtypes: element types of the operands; x, w and y must each have one of them.
        layouts: memory orders; x, w and y must each have one of them.
        min_sm: least compute capability, as an int; 0 on the CPU place.
        archs: exact architectures such as ("90a",), or empty for any from `min_sm` on.
        operand_dtypes: by name, element types of operands that have others than `dtypes`: {"y": frozenset({...})}.
        accumulator: element type that products are summed in; None for float32, and float64 where operands have it.
    """

    place: Place
    library: Library
    dtypes: frozenset[DataType]
    layouts: frozenset[Layout]
    min_sm: int = 0
    archs: tuple[str, ...] = ()
    operand_dtypes: Mapping[str, frozenset[DataType]] = field(default_factory=dict, hash=False)
    accumulator: DataType | None = None

    @property
    def every_dtype(self) -> frozenset[DataType]:
        """The element types that any operand may have."""
        return self.dtypes.union(*self.operand_dtypes.values())

    def applicability(self, problem: ProblemDescription, device: Device) -> Applicability:
        """Whether the key matches."""
        if device.place is not self.place:
            return Applicability(f"runs on {self.place}, not on {device.place}")
        if device.sm < self.min_sm:
            return Applicability(
                f"needs compute capability {self.min_sm / 10:.1f}, {device.name} has {device.sm / 10:.1f}"
            )
        if self.archs and device.arch not in self.archs:
            return Applicability(f"runs on {', '.join(self.archs)} only, {device.name} is {device.arch}")
        for operand in problem.bare.operands:
            name, tensor, dtypes = operand.name, operand.tensor, self.operand_dtypes.get(operand.name, self.dtypes)
            if tensor.dtype not in dtypes:
                return Applicability(f"{name} is {tensor.dtype}, served are {', '.join(sorted(dtypes))}")
            if tensor.layout not in self.layouts:
                return Applicability(f"{name} is {tensor.layout}, served are {', '.join(sorted(self.layouts))}")
        if self.accumulator not in (None, problem.accumulator):
            return Applicability(f"accumulates in {self.accumulator}, the problem in {problem.accumulator}")
        return APPLICABLE


@dataclass(frozen=True, slots=True)
class Combination:
    """What of a problem decides which keys match, and whether its direction and its size are served at all.

    Attributes:
        text: the direction, element types and memory orders of x, w and y, and whether it is large.
        problem: any of the combination.
    """

    text: str
    problem: ProblemDescription = field(compare=False)

    @staticmethod
    @functools.lru_cache(maxsize=64)  # all solvers ask
    def of(problem: ProblemDescription) -> Combination:
        tensors = (f"{tensor.dtype} {tensor.layout}" for tensor in (problem.x, problem.w, problem.y))
        size = "large" if problem.is_large else ""
        return Combination(" ".join((problem.direction, *tensors, size)), problem)


class Served(Protocol):
    """What says which combinations a solver serves: the solver, or its facts."""

    @property
    def keys(self) -> Sequence[KernelKey]: ...

    @property
    def directions(self) -> frozenset[Direction]: ...

    @property
    def is_for_large(self) -> bool: ...


def refuse_combination(solver: Served, problem: ProblemDescription, device: Device) -> Applicability:
    """Why a solver serves no problem of a `Combination` here.

    By the first of the keys where none matches, else for the library of the one that does, the direction or the size.
    """
    answers = [key.applicability(problem, device) for key in solver.keys]
    if APPLICABLE not in answers:
        return answers[0]
    library = solver.keys[answers.index(APPLICABLE)].library
    if device.library_version(library) is None:
        return Applicability(f"{library} is not installed: {INSTALL_CUDA}")
    if problem.direction not in solver.directions:
        served = " and ".join(sorted(solver.directions, reverse=True))
        return Applicability(f"computes {served}, not {problem.direction}")
    if solver.is_for_large and not problem.is_large:
        return Applicability(f"serves tensors of more than {MAX_INT32_ELEMENTS} elements")
    return APPLICABLE


@functools.lru_cache(maxsize=1 << 12)  # a find asks all solvers, and most refuse by their keys
def _refuse_combination(solver: Solver, combination: Combination, device: Device) -> Applicability:
    return refuse_combination(solver, combination.problem, device)


def is_own_module(name: str) -> bool:
    """Whether a module is one of miofind's solvers, by its name."""
    return name.startswith("miofind.solvers.")


@functools.lru_cache(maxsize=64)  # steps may be thousands, by the batch
def _own_solution(solver: Solver, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
    return solver.solution(problem, device, config)


class EstimatedConfig(NamedTuple):
    """A configuration and the solver's estimate of it."""

    config: Config
    estimate_ms: float


class RankedTable(Sequence[EstimatedConfig]):
    """A table's configurations with their estimates, the least first; each is made when it is asked for.

    Args:
        table: the configurations.
        times: their estimates, or the one of all.
        places: of those that count; None for all.
    """

    __slots__ = ("_order", "_table", "_times")

    def __init__(self, table: ConfigTable, times: NDArray[np.float64] | float, places: Integers | None = None) -> None:
        self._table, self._times = table, np.broadcast_to(times, len(table.configs))
        counted = np.arange(len(table.configs)) if places is None else places
        self._order = counted[self._times[counted].argsort(kind="stable")]

    def values(self, name: str) -> list[Any]:
        """A parameter's values in order, without the configurations that have them."""
        return self.in_order(self._table[name])

    def in_order(self, column: Any) -> list[Any]:
        """What a column of the table has of each, or all have alike, in order."""
        return column[self._order].tolist() if is_table(column) else [column] * len(self)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, at: int) -> EstimatedConfig: ...
    @overload
    def __getitem__(self, at: slice) -> list[EstimatedConfig]: ...
    def __getitem__(self, at: int | slice) -> EstimatedConfig | list[EstimatedConfig]:
        if isinstance(at, slice):
            return [self._made(place) for place in self._order[at].tolist()]
        return self._made(int(self._order[at]))

    def __iter__(self) -> Iterator[EstimatedConfig]:
        return map(self._made, self._order.tolist())

    def _made(self, place: int) -> EstimatedConfig:
        return EstimatedConfig(self._table.configs[place], float(self._times[place]))


Ranked = TypeVar("Ranked", Config, EstimatedConfig)


def first_of_kinds(ranked: Iterable[Ranked], kind: Callable[[Ranked], Hashable], most: int) -> tuple[Ranked, ...]:
    """The first of each kind, in order, of so many kinds at most; no more is looked at than that takes."""
    found: dict[Hashable, Ranked] = {}
    for each in ranked:
        found.setdefault(kind(each), each)
        if len(found) == most:
            break
    return tuple(found.values())


class Solver(ABC):
    """One way to compute convolutions.

    Class attributes:
        id: stable name, stored in databases; solvers of other packages write "vendor/Name".
        version: raised by hand when results or configurations change; voids stored rows.
        algorithm: family.
        keys: what it serves; a problem must match one of them.
        directions: that it computes.
        alignment_bytes: alignment that every tensor's address needs, besides that of its elements.
        is_dynamic: sizes are arguments of its kernels, so that a new shape compiles nothing.
        is_last_resort: timed only where nothing else applies.
        least_reach: how far errors reach of each configuration at least: who allows less need not ask for any.
        is_for_large: serves problems that are large (`ProblemDescription.is_large`) alone: no find asks it of others.
        applies_epilogues: its kernels apply any epilogue to what they write, forward and of backward data; further
            outputs are for `fuses_training` to claim.
        parameters: allowed values of each configuration parameter; the space is their product, thinned by
            `is_valid_config`.
        sources: files that its steps reach, before includes.
        source_package: package that holds `sources`; solvers of other packages name their own.
    """

    id: ClassVar[str]
    version: ClassVar[int] = 1
    algorithm: ClassVar[Algorithm]
    keys: ClassVar[tuple[KernelKey, ...]]
    directions: ClassVar[frozenset[Direction]] = frozenset(Direction)
    alignment_bytes: ClassVar[int] = 1
    is_dynamic: ClassVar[bool] = False
    is_last_resort: ClassVar[bool] = False
    least_reach: ClassVar[Reach] = Reach.PRODUCTS
    is_for_large: ClassVar[bool] = False
    applies_epilogues: ClassVar[bool] = False
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {}
    sources: ClassVar[tuple[str, ...]] = ()
    source_package: ClassVar[str] = "miofind.kernels_src"

    @property
    def library(self) -> Library:
        """Who supplies the code: the heaviest library of its keys."""
        return self.keys[0].library

    @property
    def is_own(self) -> bool:
        """Whether it is miofind's, so that its answers are sound and the same each time."""
        return is_own_module(type(self).__module__)

    @property
    def names(self) -> frozenset[str]:
        """What `only` and `exclude` know it by, in lower case: its id, its algorithm and its library."""
        return frozenset({self.id.lower(), self.algorithm.value, self.library.value})

    def tensor_alignment(self, problem: ProblemDescription) -> int:
        """Bytes that the addresses of a problem's operands must be multiples of."""
        return max(self.alignment_bytes, *(operand.tensor.dtype.itemsize for operand in problem.operands))

    @abstractmethod
    def examples(self) -> tuple[ProblemDescription, ...]:
        """Problems it must accept, so that the shared contract test never passes on nothing."""

    @abstractmethod
    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        """Whether it serves a problem that matches keys, directions and size; asks no library and compiles nothing."""

    @abstractmethod
    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        """One to MAX_DEFAULT_CONFIGS configurations that are always valid, the likely best first; constant time."""

    @abstractmethod
    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        """Analytic time in milliseconds; orders candidates, never recorded as a measurement."""

    @abstractmethod
    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        """The steps that compute an applicable problem with a valid configuration."""

    def kept_solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        """What `solution` gives, kept of our own solvers: who answers or compiles makes it, who runs it asks again."""
        if self.is_own:
            return _own_solution(self, problem, device, config)
        return self.solution(problem, device, config)

    def least_ms(self, problem: ProblemDescription, device: Device) -> float:
        """A time that its estimates of an applicable problem all reach, known without its configurations; 0 for none.

        Who wants the fastest need not ask it for its configurations where others are far below.
        """
        return 0.0

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        """The default configurations with their estimates: who ranks by estimates has both at once."""
        configs = self.default_configs(problem, device)
        return tuple(EstimatedConfig(config, self.estimate_ms(problem, device, config)) for config in configs)

    def applicability(self, problem: ProblemDescription, device: Device) -> Applicability:
        """Whether it serves a problem here: its keys, its epilogue, its library's presence, then `is_applicable`."""
        if problem.epilogue:
            if problem.trains and (answer := self.fuses_training(problem)).refused:
                return answer
            if problem.direction is Direction.FORWARD and (answer := self.fuses(problem)).refused:
                return answer
        if (answer := self.refuse_combination(problem, device)).refused:
            return answer
        return self.is_applicable(problem, device)

    def refuse_combination(self, problem: ProblemDescription, device: Device) -> Applicability:
        """Why it serves no problem of such a `Combination` here: keys, library's presence, directions, size."""
        return _refuse_combination(self, Combination.of(problem), device)

    def fuses(self, problem: ProblemDescription) -> Applicability:
        """Whether its kernels apply a forward problem's epilogue; asked of no other, and no unless it says so."""
        if self.applies_epilogues:
            return APPLICABLE
        return Applicability(f"its kernels apply no epilogue {problem.epilogue.text}")

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        """Whether its kernels compute an epilogue of training: a gradient's, and outputs besides the convolution's own.

        Asked of problems that have one alone (`ProblemDescription.trains`), and no unless it says so. Forward, `fuses`
        is asked, too.
        """
        if self.applies_epilogues and problem.direction is Direction.BACKWARD_DATA:
            return APPLICABLE
        return Applicability(f"its kernels compute no epilogue {problem.epilogue.text} of {problem.direction}")

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        """Whether a point of the parameters' product can run."""
        return True

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        """Every valid configuration."""
        is_small = math.prod(map(len, self.parameters.values())) <= _MOST_KEPT
        for config in _kept_product(self) if is_small else _product(self):
            if self.is_valid_config(problem, device, config):
                yield config

    def drawn_configs(
        self, problem: ProblemDescription, device: Device, points: int, seed: int | str = 0
    ) -> Iterator[Config]:
        """The valid ones of so many random points of the parameters' product, each once; equal for equal seeds.

        Nothing is listed, unless the space is a list and no product: its first `points` are given.
        """
        size = math.prod(map(len, self.parameters.values()))
        if not self.parameters:
            yield from itertools.islice(self.configs(problem, device), points)
            return
        for number in random.Random(seed).sample(range(size), min(points, size)):
            config = self._point(number)
            if self.is_valid_config(problem, device, config):
                yield config

    def _point(self, number: int) -> Config:
        """A point of the parameters' product by its number, the first parameter's values side by side."""
        values = {}
        for name, choices in self.parameters.items():
            number, at = divmod(number, len(choices))
            values[name] = choices[at]
        return Config(values)

    def ranked(self, problem: ProblemDescription, device: Device, configs: Iterable[Config]) -> list[Config]:
        """Those of `configs` that are valid, each once, the least estimate first."""
        return [each.config for each in self.ranked_estimates(problem, device, configs)]

    def ranked_estimates(
        self, problem: ProblemDescription, device: Device, configs: Iterable[Config]
    ) -> list[EstimatedConfig]:
        """What `ranked` gives, with the estimates."""
        valid = dict.fromkeys(config for config in configs if self.is_valid_config(problem, device, config))
        estimated = (EstimatedConfig(config, self.estimate_ms(problem, device, config)) for config in valid)
        return sorted(estimated, key=operator.attrgetter("estimate_ms"))

    def ranked_table(self, problem: ProblemDescription, device: Device, table: ConfigTable) -> RankedTable:
        """What `ranked` gives of a table of valid configurations, all different, with the estimates.

        For solvers whose `estimate_ms` takes a table for a configuration.
        """
        return RankedTable(
            table, np.broadcast_to(self.estimate_ms(problem, device, table.as_config), len(table.configs))
        )

    def ranked_valid(self, problem: ProblemDescription, device: Device, table: ConfigTable) -> RankedTable:
        """What `ranked` gives of a table of configurations, all different, with the estimates.

        For solvers whose `is_valid_config` and `estimate_ms` take a table for a configuration.
        """
        valid = table.valid(functools.partial(self.is_valid_config, problem, device))
        return self.ranked_table(problem, device, valid) if valid.configs else RankedTable(valid, np.empty(0))

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        """Do nothing for a configuration of the schema.

        Raises:
            InvalidConfigError: a parameter is missing, unknown or out of its values, or the point cannot run.
        """
        if set(config) != set(self.parameters):
            names = sorted(self.parameters)
            raise InvalidConfigError(f"{self.id}: config {config.json} must have the parameters {names}")
        for name, allowed in self.parameters.items():
            value = config[name]
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                raise InvalidConfigError(f"{self.id}: {name}={value!r} must be one of {list(allowed)}")
        if not self.is_valid_config(problem, device, config):
            raise InvalidConfigError(f"{self.id}: config {config.json} cannot run {problem} on {device.name}")

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        """Bytes of workspace the solution needs."""
        return self.solution(problem, device, config).workspace.bytes

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        """The solution in two parts, for weights that stay the same; None where nothing depends on them alone."""
        return None

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        """How much wider the error bound is than direct summation's in the problem's math mode; 1 unless documented."""
        return 1.0

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        """Which finite inputs the errors of a result may follow; its own products alone unless documented."""
        return self.least_reach

    def keeps_bound(self, problem: ProblemDescription, config: Config) -> bool:
        """Whether errors are bounded as direct summation's, by what a result meets, whatever finite values that has.

        Finds take others only with `FindOptions.max_error`.
        """
        return self.error_reach(problem, config) <= Reach.INPUTS and self.error_growth(problem, config) <= 1

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        """Whether an infinity or NaN of an input may reach results that do not sum it, or an infinity come out as NaN.

        Padding is zeros that are summed. False unless documented.
        """
        return False

    def is_exact(self, config: Config) -> bool:
        """Whether small integers give exact results; false for F(4,3) and wider Winograd and for FFT."""
        return True

    def rounds_twice(self, problem: ProblemDescription, config: Config) -> bool:
        """Whether the sums are rounded to the output's dtype before the epilogue, whose results are rounded again.

        So where a pass over the written output applies the epilogue. Asked of problems with an epilogue alone.
        """
        return False

    def __repr__(self) -> str:
        return f"<{self.id} v{self.version}>"


def _product(solver: Solver) -> Iterable[Config]:
    """The product of a solver's parameters."""
    names = list(solver.parameters)
    return (Config(dict(zip(names, values, strict=True))) for values in itertools.product(*solver.parameters.values()))


@functools.lru_cache(maxsize=64)  # a tuning asks for every problem, and to write configurations as JSON takes longest
def _kept_product(solver: Solver) -> tuple[Config, ...]:
    return tuple(_product(solver))
