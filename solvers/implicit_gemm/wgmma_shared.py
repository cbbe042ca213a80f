"""What solvers share that multiply tiles of 16 bits from shared memory by wgmma: spans, products, short lists."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from miofind.core.cached import cached_property
from miofind.core.epilogue import EPILOGUE_TENSORS
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, Integers
from miofind.solver.epilogue import epilogue_arguments
from miofind.solver.solver import APPLICABLE, Applicability, EstimatedConfig, RankedTable, Solver, first_refusal
from miofind.solver.steps import Config, EpilogueArgument, TensorMap
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.limits import refuse_mixed_dtypes, refuse_sizes
from miofind.solvers.common.wgmma_product import NchwTensors

PATTERN = 1024
"""Bytes at which swizzles repeat."""

BARRIER_BYTES = 8
"""Of an mbarrier."""

FILTER_BLOCK = 64
"""Filters that an instruction multiplies where they are its operand A."""

_SERVED = {
    NchwTensors.NONE: "channels last",
    NchwTensors.OUTPUT: "an output alone with channels first",
    NchwTensors.ALL: "one tap with channels first",
}

_SPANS = (16, 32, 64)  # channels of 16 bits that a swizzle of 32, 64 or 128 bytes spans


def span_of(channels: int) -> int:
    """The channels of 16 bits of the least swizzle that has so many, or of the widest."""
    return next((span for span in _SPANS if channels <= span), _SPANS[-1])


@dataclass(frozen=True, kw_only=True)
class FiltersAsA:
    """A problem of one group whose operand A is filters, 64 to an instruction, and B is pixels.

    Attributes:
        problem: forward, or backward data as a correlation of dy.
        taps: of a filter.
    """

    problem: ProblemDescription
    taps: int

    @cached_property
    def is_data(self) -> bool:
        return self.problem.direction is Direction.BACKWARD_DATA

    @cached_property
    def has_nchw_output(self) -> bool:
        """Whether results are channels first."""
        return not self.problem.output.layout.channels_last

    @cached_property
    def sums(self) -> int:
        """Channels that are summed over."""
        return self.problem.k if self.is_data else self.problem.c

    @cached_property
    def results(self) -> int:
        """Channels of the output."""
        return self.problem.c if self.is_data else self.problem.k

    @cached_property
    def channels(self) -> int:
        """Of a pixel that are loaded together, a chunk, zeros beyond those that there are."""
        return span_of(self.sums)

    @cached_property
    def chunks(self) -> int:
        """Of a pixel."""
        return ceil_div(self.sums, self.channels)

    @cached_property
    def last_k_steps(self) -> int:
        """Steps of 16 channels of the last chunk."""
        return ceil_div(self.sums - (self.chunks - 1) * self.channels, 16)

    @cached_property
    def k_steps(self) -> int:
        """Of 16 channels, over all taps."""
        return self.taps * ((self.chunks - 1) * self.channels // 16 + self.last_k_steps)

    @cached_property
    def filter_blocks(self) -> int:
        """Of 64 filters."""
        return ceil_div(self.results, FILTER_BLOCK)

    @cached_property
    def filter_bytes(self) -> int:
        """Shared memory of a block of filters of a tap of a chunk."""
        return 2 * FILTER_BLOCK * self.channels

    @cached_property
    def out_channels(self) -> int:
        """Of a pixel of results that are staged together."""
        return span_of(self.results)

    @cached_property
    def out_buffers(self) -> int:
        """For results that are staged: one takes what is read with them, two where that is two tensors."""
        epilogue = self.problem.epilogue
        return 2 if epilogue.has_residual and "saved" in epilogue.operands else 1


def epilogue_maps(
    problem: ProblemDescription, results: Callable[[str], Sequence[TensorMap]]
) -> tuple[TensorMap | EpilogueArgument, ...]:
    """Maps of the two tensors that may be read with the output, and the epilogue; nothing for a bare problem.

    The output's map takes the places of tensors that are not there.

    Args:
        results: the maps of a tensor that is laid out as the output.
    """
    if not problem.epilogue:
        return ()
    read = [results(name) for name in EPILOGUE_TENSORS if name in problem.epilogue.operands]
    output = results(problem.direction.output)
    first, second, *_ = (*read, output, output)
    return *first, *second, *epilogue_arguments(problem)


class Tiling(Protocol):
    """A configuration applied to a problem, or a table of many."""

    @property
    def static_bytes(self) -> int:
        """Shared memory that the kernel itself declares."""

    def is_valid(self, device: Device) -> bool:
        """Whether a block can run."""

    def estimate_ms(self, device: Device) -> float:
        """Milliseconds of a run."""


class TiledTable(NamedTuple):
    """Configurations of a problem as tilings.

    Attributes:
        table: the configurations.
        tiling: of each of them.
        places: of those that can run.
    """

    table: ConfigTable
    tiling: Any
    places: Integers


class TiledSolver(Solver):
    """A solver of problems of one group whose configurations are ranked as a table of tilings.

    Class attributes:
        defaults: how many there are.
        none_valid: why a problem is not served that has no valid configuration.
        nchw: which tensors may have their channels first.
    """

    defaults: ClassVar[int]
    none_valid: ClassVar[str]
    nchw: ClassVar[Set[NchwTensors]] = frozenset({NchwTensors.NONE})

    @abstractmethod
    def refuse(self, problem: ProblemDescription) -> Applicability:
        """Why it does not serve a problem of one group whose channels fill 16 bytes."""

    @abstractmethod
    def tiling(self, problem: ProblemDescription, device: Device, config: Config) -> Tiling:
        """A configuration applied to a problem that is not refused."""

    @abstractmethod
    def short_list(self, problem: ProblemDescription) -> ConfigTable:
        """The configurations worth an estimate."""

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if problem.groups != 1:
            return Applicability(f"serves one group, not {problem.groups}")
        if problem.c % 8 or problem.k % 8:
            return Applicability(f"copies 16 bytes: {problem.c} channels or {problem.k} filters are no multiple of 8")
        if (answer := first_refusal(refuse_mixed_dtypes(problem), self._refuse_layouts(problem))).refused:
            return answer
        if (answer := first_refusal(self.refuse(problem), refuse_sizes(problem))).refused:
            return answer
        if problem.output.size == 0 or problem.flops == 0:
            return Applicability("has no empty products")
        return APPLICABLE if len(self._likely(problem, device).places) else Applicability(self.none_valid)

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return bool(self.tiling(problem, device, config).is_valid(device))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return tuple(self._ranked(problem, device)[: self.defaults])

    def _refuse_layouts(self, problem: ProblemDescription) -> Applicability:
        if NchwTensors.of(problem) in self.nchw:
            return APPLICABLE
        served = " or ".join(words for which, words in _SERVED.items() if which in self.nchw)
        found = ", ".join(f"{name} {problem.tensor(name).layout}" for name in ("x", "w", "y"))
        return Applicability(f"serves {served}, not {found}")

    def _ranked(self, problem: ProblemDescription, device: Device) -> RankedTable:
        """The likely ones as far as they are valid, the least estimate first."""
        table, tiling, places = self._likely(problem, device)
        return RankedTable(table, tiling.estimate_ms(device), places)

    def _likely(self, problem: ProblemDescription, device: Device) -> TiledTable:
        """The short list as tilings."""
        return _likely(self, problem, device)

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        return 0  # one kernel computes all

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return self.tiling(problem, device, config).estimate_ms(device)


@functools.lru_cache(maxsize=16)  # whether there are any that can run is asked before which
def _likely(solver: TiledSolver, problem: ProblemDescription, device: Device) -> TiledTable:
    table = solver.short_list(problem)
    tiling = solver.tiling(problem, device, table.as_config)
    return TiledTable(table, tiling, table.places(tiling.is_valid(device)))
