"""What solvers share whose kernels load each pixel once for all taps: tiles of pixels with their halo."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from miofind.core.cached import cached_property
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import Each
from miofind.solver.solver import APPLICABLE, Applicability, EstimatedConfig
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import Axis, backward_axes, ceil_div, forward_axis
from miofind.solvers.implicit_gemm.wgmma_shared import TiledSolver, Tiling

MAX_BOX = 256
"""Elements of a copy's box, in each dimension."""


def without_taps(size: int) -> Axis:
    """An axis along which nothing is summed."""
    return Axis(size=size, outputs=size, taps=1, pad=0, stride=1, dilation=1)


def halo(axis: Axis) -> int:
    """The inputs that a row of outputs meets beyond one for each."""
    return (axis.taps - 1) * axis.dilation


def correlation_axes(problem: ProblemDescription) -> list[Axis]:
    """The spatial dimensions of a problem of stride 1: forward, or of backward data as a correlation of dy."""
    dims = range(len(problem.spatial))
    if problem.direction is Direction.BACKWARD_DATA:
        return [backward_axes(problem, dim)[0] for dim in dims]
    return [forward_axis(problem, dim) for dim in dims]


def even_tile(axis: Axis, limit: Each) -> Each:
    """The outputs of a tile, at most a limit, where an axis is cut into as equal ones as may be."""
    return ceil_div(axis.outputs, ceil_div(axis.outputs, limit))


def least_limits(axis: Axis, limits: Sequence[int], likely: Sequence[int]) -> tuple[int, ...]:
    """The limits that cut an axis as the likely ones do, each once."""
    return tuple(dict.fromkeys(least_limit(axis, limits, limit) for limit in likely))


def least_limit(axis: Axis, limits: Sequence[int], limit: int) -> int:
    """The least limit that cuts an axis into as many tiles as this one does."""
    tiles = ceil_div(axis.outputs, limit)
    return next(least for least in limits if ceil_div(axis.outputs, least) == tiles)


@dataclass(frozen=True, kw_only=True)
class HaloTile:
    """Pixels of outputs that a block computes together, as equal for all blocks as may be.

    Attributes:
        height, width: the axes that are cut.
        tile_h, tile_w: rows and columns of a tile.
    """

    height: Axis
    width: Axis
    tile_h: int
    tile_w: int

    @cached_property
    def row_pixels(self) -> int:
        """Pixels of a row, with its halo."""
        return self.tile_w + halo(self.width)

    @cached_property
    def rows(self) -> int:
        """Rows, with the halo."""
        return self.tile_h + halo(self.height)

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Of rows and of columns."""
        return ceil_div(self.height.outputs, self.tile_h), ceil_div(self.width.outputs, self.tile_w)


class CutTiling(Tiling, Protocol):
    """A tiling that cuts the output's rows and columns."""

    @property
    def height(self) -> Axis: ...
    @property
    def width(self) -> Axis: ...
    @property
    def tile_h(self) -> int: ...
    @property
    def tile_w(self) -> int: ...


class HaloSolver(TiledSolver):
    """A solver of stride 1 whose configurations are tiles with a halo: few of equal tiles are defaults.

    Class attributes:
        limits: of the rows and columns of a tile that configurations name, the least first.
        most_alike: how many defaults have equal tiles, whose estimates err alike.
    """

    limits: ClassVar[tuple[Sequence[int], Sequence[int]]]
    most_alike: ClassVar[int]
    none_valid = "has filters or a halo too large for a block's shared memory"

    @abstractmethod
    def tiling(self, problem: ProblemDescription, device: Device, config: Config) -> CutTiling: ...

    def refuse(self, problem: ProblemDescription) -> Applicability:
        if any(stride != 1 for stride in problem.conv.stride):
            return Applicability(f"needs stride 1, not {problem.conv.stride}")
        if math.prod(problem.filter) == 1:
            return Applicability("has no halo where filters have one tap")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        """Whether it can run, and no smaller limit of rows or of columns cuts the output into as many tiles."""
        tiling, (heights, widths) = self.tiling(problem, device, config), self.limits
        limits = config["tile_h"], config["tile_w"]
        least = least_limit(tiling.height, heights, limits[0]), least_limit(tiling.width, widths, limits[1])
        return limits == least and bool(tiling.is_valid(device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        ranked, tiling = self._ranked(problem, device), self._likely(problem, device).tiling
        chosen: list[EstimatedConfig] = []
        alike: Counter[tuple[int, int]] = Counter()
        for place, tile in enumerate(zip(*map(ranked.in_order, (tiling.tile_h, tiling.tile_w)), strict=True)):
            alike[tile] += 1
            if alike[tile] <= self.most_alike:
                chosen.append(ranked[place])
            if len(chosen) == self.defaults:
                break
        return tuple(chosen)
