"""The short list of ConvImplicitGemmMma: the configurations that its defaults are chosen among, as a table.

Values of the table have a row a tile and, of numbers of splits, a column a number: what is the same with each number is
reckoned once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable
from miofind.solver.solver import EstimatedConfig
from miofind.solver.steps import Config
from miofind.solvers.implicit_gemm.mma_cost import estimate_ms
from miofind.solvers.implicit_gemm.mma_limits import K_BYTES, is_valid

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHORT_LIST = Config.product(
    {
        ("tile_m", "tile_n", "warps_m", "warps_n"): (
            (128, 128, 2, 2),
            (128, 256, 2, 4),
            (256, 128, 4, 2),
            (128, 64, 2, 2),
            (64, 128, 2, 2),
            (256, 64, 4, 1),
            (64, 256, 1, 4),
            (64, 64, 2, 2),
            (128, 32, 4, 1),
            (32, 128, 1, 4),
            (64, 32, 2, 2),
            (32, 64, 2, 2),
            (256, 32, 4, 1),
            (32, 256, 1, 4),
            (128, 16, 4, 1),
            (16, 128, 1, 4),
            (64, 16, 4, 1),
            (16, 64, 1, 4),
            (32, 32, 2, 2),
            (16, 16, 1, 1),
        ),
        ("tile_k", "stages"): ((16, 4), (32, 4), (64, 3)),
        "splits": SPLITS,
        "band": (8,),
    }
)


@functools.cache
def short_list(itemsize: int) -> ConfigTable:
    """Those that tile sums of such elements: a tile with each number of splits, then the next tile."""
    configs = [config for config in _SHORT_LIST if config["tile_k"] * itemsize in K_BYTES]
    names = ("tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages")
    of_tiles = {name: np.array([[config[name]] for config in configs[:: len(SPLITS)]]) for name in names}
    return ConfigTable(configs, {**of_tiles, "splits": np.array(SPLITS), "band": configs[0]["band"]})


def short_listed(problem: ProblemDescription, device: Device) -> Iterator[EstimatedConfig]:
    """What `Solver.ranked` gives of the short list, sooner, with the estimates."""
    table = short_list(problem.x.dtype.itemsize)
    places = np.flatnonzero(is_valid(problem, device, table.as_config))
    times = np.ravel(estimate_ms(problem, device, table.as_config))[places]
    order = np.argsort(times, kind="stable")
    for place, ms in zip(places[order].tolist(), times[order].tolist(), strict=True):
        yield EstimatedConfig(table.configs[place], ms)
