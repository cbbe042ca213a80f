"""What the solvers of few channels, as in first layers, have in common.

Which kernels and configurations each has is its own.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.columns import ConfigTable, Integers
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, EstimatedConfig, KernelKey, RankedTable, Solver
from miofind.solver.steps import Config, ConfigValue
from miofind.solvers.few_channels.window_rows import refuse_windows

_DEFAULTS = 8
_KEY = KernelKey(
    place=Place.CUDA,
    library=Library.PLAIN,
    dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
    layouts=frozenset({Layout.NCHW, Layout.NHWC}),
    min_sm=80,
)
HOPPER_KEYS = (replace(_KEY, min_sm=90, archs=("90a",)),)
"""Of kernels that multiply by wgmma."""


def problem_defines(problem: ProblemDescription) -> tuple[tuple[str, str | int], ...]:
    """What each kernel has to know of a problem when it is compiled."""
    stride_y, stride_x = problem.conv.stride
    return (
        ("ELEMENT", problem.x.dtype.value),
        ("CHANNELS", problem.c),
        ("FILTER_Y", problem.filter[0]),
        ("FILTER_X", problem.filter[1]),
        ("STRIDE_Y", stride_y),
        ("STRIDE_X", stride_x),
        ("CHANNELS_LAST", int(problem.x.layout.channels_last)),
    )


def gradient_defines(problem: ProblemDescription) -> tuple[tuple[str, str | int], ...]:
    """The same of kernels of backward data, which have all filters."""
    return *problem_defines(problem), ("FILTERS", problem.k)


class FewChannelsSolver(Solver):
    """Implicit GEMM on tensor cores for one direction and up to four channels, of 16-bit types unless `keys` differ."""

    direction: ClassVar[Direction]
    kind: ClassVar[tuple[str, ...]]
    """Parameters of which few defaults share all: estimates of near configurations do not tell them apart."""
    most_alike: ClassVar[int] = 2
    """Defaults that share all of `kind`."""
    algorithm = Algorithm.IMPLICIT_GEMM
    keys = (_KEY,)
    alignment_bytes = 16

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if "direction" in vars(cls):
            cls.directions = frozenset({cls.direction})

    @abstractmethod
    def short_list(self) -> ConfigTable:
        """Configurations that the defaults are chosen among by estimate."""

    def is_of_size(self, problem: ProblemDescription, config: Config) -> bool:
        """Whether a configuration, or each of a table, is none that another does the work of; asked first."""
        return True

    @abstractmethod
    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        """Whether a block, a thread and a grid have what a configuration of the size takes; the same of a table."""

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return bool(self.is_of_size(problem, config)) and bool(self.is_valid_tiling(problem, device, config))

    def refuse_problem(self, problem: ProblemDescription) -> Applicability:
        """Why no configuration can compute a problem of its direction; APPLICABLE if one may."""
        return refuse_windows(problem)

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain, last = DataType.FLOAT16, DataType.BFLOAT16, Layout.NHWC

        def conv(**fields: object) -> ProblemDescription:
            return ProblemDescription.convolution(direction=self.direction, **fields)  # type: ignore[arg-type]

        return (
            conv(x=(2, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2, dtype=half, layout=last),
            conv(x=(2, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2, dtype=half),
            conv(x=(2, 3, 32, 40), w=(32, 3, 3, 3), padding=1, dtype=brain, layout=last),
            conv(x=(2, 3, 32, 40), w=(32, 3, 3, 3), padding=1, dtype=brain),
            conv(x=(2, 3, 32, 32), w=(96, 3, 4, 4), stride=4, dtype=half, layout=last),
            conv(x=(3, 1, 28, 28), w=(6, 1, 5, 5), padding=2, dtype=half),
            conv(x=(2, 4, 17, 23), w=(37, 4, 3, 2), padding=((4, 0), (5, 1)), stride=(1, 3), dtype=brain, layout=last),
            conv(x=(1, 2, 33, 31), w=(19, 2, 5, 11), padding=2, stride=(3, 1), dtype=half),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := self.refuse_problem(problem)).refused:
            return answer
        if not len(_likely(self, problem, device).places):
            sizes = f"k={problem.k} filter {problem.filter} stride {problem.conv.stride}"
            return Applicability(f"filters or strides are too large for a block: {sizes}")
        return APPLICABLE

    def valid_of(self, problem: ProblemDescription, device: Device, table: ConfigTable) -> ConfigTable:
        """The valid ones of a table: of those of the size."""
        is_of_size = functools.partial(self.is_of_size, problem)
        return table.valid(is_of_size, functools.partial(self.is_valid_tiling, problem, device))

    def ranked_list(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """The short list as far as it is valid, the least estimate first."""
        table, places = _likely(self, problem, device)
        with np.errstate(all="ignore"):  # what is reckoned of others means nothing
            times = np.asarray(self.estimate_ms(problem, device, table.as_config))
        return RankedTable(table, times, places)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        chosen: list[EstimatedConfig] = []
        alike: Counter[tuple[ConfigValue, ...]] = Counter()
        for each in self.ranked_list(problem, device):
            kind = tuple(each.config[name] for name in self.kind)
            alike[kind] += 1
            if alike[kind] <= self.most_alike:
                chosen.append(each)
            if len(chosen) == _DEFAULTS:
                break
        return tuple(chosen)


class _Likely(NamedTuple):
    """The configurations of a short list that are of the size.

    Attributes:
        places: of the valid ones.
    """

    table: ConfigTable
    places: Integers


@functools.lru_cache(maxsize=16)  # whether there are any valid ones is asked before which
def _likely(solver: FewChannelsSolver, problem: ProblemDescription, device: Device) -> _Likely:
    table = solver.short_list().valid(functools.partial(solver.is_of_size, problem))
    is_valid = solver.is_valid_tiling(problem, device, table.as_config) if table.configs else np.zeros(0, bool)
    return _Likely(table, table.places(is_valid))
