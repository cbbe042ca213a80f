"""What a ranker knows of a problem and of its candidates, as numbers.

Logarithms are to base 2. A feature's name is part of a model: one that is renamed is one that old models do not find.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import DataType, Direction, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.steps import Config, ConfigValue

FEATURES_VERSION = 1
"""Raised by hand when a feature of the same name comes to mean something else: models of other versions are refused."""

_CANDIDATE = ("estimate_over_floor", "estimate_over_best", "table_over_floor", "table_over_best", "table_place")
_SOLVER, _PARAMETER = "solver ", "parameter "


class Guess(NamedTuple):
    """A candidate as a ranker sees it.

    Attributes:
        solver_id: whose it is; of a composed form that of the solver it is made of.
        config: its configuration.
        estimate_ms: the solver's estimate.
        table_ms: the estimate as the table of medians corrects it.
    """

    solver_id: str
    config: Config
    estimate_ms: float
    table_ms: float


def floor_ms(problem: ProblemDescription, device: Device) -> float:
    """Least time by the device's nominal ceilings, in milliseconds."""
    dtype = max((tensor.dtype for tensor in (problem.x, problem.w, problem.y)), key=lambda each: each.itemsize)
    arithmetic_s = problem.flops / device.peak_flops_per_s(dtype, problem.math, tensor_cores=True)
    return 1e3 * max(arithmetic_s, problem.bytes / device.bandwidth_bytes_per_s)


def problem_features(problem: ProblemDescription, device: Device) -> dict[str, float]:
    """The features that all candidates of a problem share."""
    taps, outputs = math.prod(problem.filter), math.prod(problem.out_spatial)
    group_c, group_k = problem.c // problem.groups, problem.k // problem.groups
    images = problem.n * outputs
    m, n, k = {
        Direction.FORWARD: (images, group_k, group_c * taps),
        Direction.BACKWARD_DATA: (problem.n * math.prod(problem.spatial), group_c, group_k * taps),
        Direction.BACKWARD_WEIGHTS: (group_k, group_c * taps, images),
    }[problem.direction]
    tiles = problem.groups * math.ceil(m / 128) * math.ceil(n / 128)
    waves = tiles / device.sm_count
    logs = {
        "n": problem.n,
        "group_c": group_c,
        "group_k": group_k,
        "groups": problem.groups,
        "spatial": math.prod(problem.spatial),
        "out_spatial": outputs,
        "width": problem.spatial[-1],
        "out_width": problem.out_spatial[-1],
        "taps": taps,
        "m_gemm": m,
        "n_gemm": n,
        "k_gemm": k,
        "flops": problem.flops,
        "bytes": problem.bytes,
        "intensity": problem.flops / problem.bytes,
        "tiles": tiles,
        "floor": floor_ms(problem, device),
    }
    found = {name: math.log2(max(number, 1e-30)) for name, number in logs.items()}
    found |= {
        "wave_fill": waves / math.ceil(waves),
        "c_mod_8": float(group_c % 8 == 0),
        "k_mod_8": float(group_k % 8 == 0),
        "c_mod_64": float(group_c % 64 == 0),
        "k_mod_64": float(group_k % 64 == 0),
        "pixels_mod_8": float(outputs % 8 == 0),
        "m_fill": m / (128 * math.ceil(m / 128)),
        "n_fill": n / (128 * math.ceil(n / 128)),
        "backward_data": float(problem.direction is Direction.BACKWARD_DATA),
        "backward_weights": float(problem.direction is Direction.BACKWARD_WEIGHTS),
        "x_channels_last": float(problem.x.layout.channels_last),
        "w_channels_last": float(problem.w.layout.channels_last),
        "y_channels_last": float(problem.y.layout.channels_last),
        "itemsize": float(problem.x.dtype.itemsize),
        "bfloat16": float(problem.x.dtype is DataType.BFLOAT16),
        "tf32": float(problem.math is MathMode.TF32),
        "stride": float(max(problem.conv.stride)),
        "dilation": float(max(problem.conv.dilation)),
        "padded": float(any(problem.conv.pad_before)),
        "largest_filter": float(max(problem.filter)),
        "depthwise": float(problem.groups > 1 and group_c == 1),
    }
    return found


@functools.lru_cache(maxsize=1 << 12)
def parameters(config: Config) -> Mapping[str, float]:
    """A configuration's parameters as numbers, those of a configuration inside it by both names.

    A text such as "2x1" counts as its product; what is no number is left out.
    """
    found: dict[str, float] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": number for inner, number in parameters(Config(value)).items()}
        elif (number := _number(value)) is not None:
            found[name] = number
    return found


def _number(value: ConfigValue) -> float | None:
    if isinstance(value, (bool, int, float)):
        return float(value)
    parts = str(value).split("x") if isinstance(value, str) else [""]
    if all(part.isascii() and part.isdecimal() and len(part) < 7 for part in parts):
        return float(math.prod(map(int, parts)))
    return None


def feature_names(problem: Mapping[str, float], guesses: Sequence[Guess]) -> tuple[str, ...]:
    """The names of all features of these candidates of any problems, in order."""
    solvers = sorted({guess.solver_id for guess in guesses})
    named = sorted({name for guess in guesses for name in parameters(guess.config)})
    own = (*(_SOLVER + solver for solver in solvers), *(_PARAMETER + name for name in named))
    return (*sorted(problem), *_CANDIDATE, *own)


class Columns:
    """The features of a model by name.

    Args:
        names: in the order of the model's columns; those that nothing has are 0.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._width = len(names)
        self._places = {name: place for place, name in enumerate(names)}
        self._of_times = [self._places.get(name) for name in _CANDIDATE]
        # Of all problems together: near ones have near candidates.
        self._known = functools.lru_cache(maxsize=1 << 12)(self._known_of)

    def _known_of(self, solver_id: str, config: Config) -> dict[int, float]:
        """The features that a candidate has in all problems, by their places."""
        own = {_SOLVER + solver_id: 1.0} | {_PARAMETER + name: value for name, value in parameters(config).items()}
        return {place: value for name, value in own.items() if (place := self._places.get(name)) is not None}

    def matrix(self, problem: ProblemDescription, device: Device, guesses: Sequence[Guess]) -> NDArray[np.float32]:
        """Features of candidates of one problem: a row a candidate, a column a feature."""
        shared, columns = problem_features(problem, device), self._places
        of_problem = {columns[name]: number for name, number in shared.items() if name in columns}
        found = np.zeros((len(guesses), self._width), np.float32)
        found[:, list(of_problem)] = list(of_problem.values())
        places: list[int] = []
        values: list[float] = []
        for first, guess in zip(range(0, found.size, self._width), guesses, strict=True):
            known = self._known(guess.solver_id, guess.config)
            places += [first + place for place in known]
            values += known.values()
        found.put(places, values)
        for place, column in zip(self._of_times, _time_features(shared["floor"], guesses), strict=True):
            if place is not None:
                found[:, place] = column
        return found


def _time_features(floor: float, guesses: Sequence[Guess]) -> tuple[list[float], ...]:
    """Those of `_CANDIDATE`, each of all candidates."""
    estimates, tables = [_log(guess.estimate_ms) for guess in guesses], [_log(guess.table_ms) for guess in guesses]
    least_estimate, least = (
        _log(min(guess.estimate_ms for guess in guesses)),
        _log(min(guess.table_ms for guess in guesses)),
    )
    by_table = sorted(guess.table_ms for guess in guesses)
    return (
        [each - floor for each in estimates],
        [each - least_estimate for each in estimates],
        [each - floor for each in tables],
        [each - least for each in tables],
        [float(by_table.index(guess.table_ms)) for guess in guesses],
    )


def _log(time_ms: float) -> float:
    return math.log2(max(time_ms, 1e-30))
