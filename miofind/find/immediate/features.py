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

from miofind.core.epilogue import EPILOGUE_TENSORS
from miofind.core.problem import DataType, Direction, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import inner_id, is_composed
from miofind.solver.steps import Config, ConfigValue

FEATURES_VERSION = 1
"""Raised by hand when a feature of the same name comes to mean something else: models of other versions are refused."""

_CANDIDATE = (
    "estimate_over_floor",
    "estimate_over_best",
    "table_over_floor",
    "table_over_best",
    "table_place",
    "estimate_over_own_best",
    "own_candidates",
    "own_place",
)
"""Of its times, and of those beside it: all candidates', then those of the same solver."""

_TILING = (
    "m_of_tiles",
    "n_of_tiles",
    "rows_of_tiles",
    "columns_of_tiles",
    "channels_of_tiles",
    "images_of_tiles",
    "blocks",
    "waves",
    "blocks_of_waves",
    "steps",
)
"""Of its tiles: what share of them the problem fills, how many there are, and how many steps along K one takes."""

_SOLVER, _PARAMETER, _COMPOSED = "solver ", "parameter ", "composed"
_MOST_WAVES = 64.0
_MOST_SIDE = 1e9  # of a tile: whatever else solvers call so is none


class Guess(NamedTuple):
    """A candidate as a ranker sees it.

    Attributes:
        solver_id: whose it is.
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


def _product(problem: ProblemDescription) -> tuple[int, int, int]:
    """M, N and K of the product of one group."""
    taps, images = math.prod(problem.filter), problem.n * math.prod(problem.out_spatial)
    group_c, group_k = problem.c // problem.groups, problem.k // problem.groups
    if problem.direction is Direction.FORWARD:
        return images, group_k, group_c * taps
    if problem.direction is Direction.BACKWARD_DATA:
        return problem.n * math.prod(problem.spatial), group_c, group_k * taps
    return group_k, group_c * taps, images


def problem_features(problem: ProblemDescription, device: Device) -> dict[str, float]:
    """The features that all candidates of a problem share."""
    taps, outputs = math.prod(problem.filter), math.prod(problem.out_spatial)
    group_c, group_k = problem.c // problem.groups, problem.k // problem.groups
    m, n, k = _product(problem)
    flops, moved, operands = problem.flops, problem.bytes, problem.epilogue.operands
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
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
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
        "epilogue": float(len(operands)),
        "epilogue_tensors": float(sum(name in EPILOGUE_TENSORS for name in operands)),
        "inexact_activation": float(not problem.epilogue.activation.is_exact),
    }
    return found


def parameters(config: Mapping[str, ConfigValue]) -> dict[str, float]:
    """A configuration's parameters as numbers, those of a configuration inside it by both names.

    A text such as "2x1" counts as its product; what is no number is left out.
    """
    found: dict[str, float] = {}
    for name, value in config.items():
        if isinstance(value, (int, float)):  # most are
            found[name] = float(value)
        elif isinstance(value, Mapping):
            found |= {f"{name}.{inner}": number for inner, number in parameters(value).items()}
        elif (number := _number(value)) is not None:
            found[name] = number
    return found


def _number(value: ConfigValue) -> float | None:
    parts = str(value).split("x") if isinstance(value, str) else [""]
    if all(part.isascii() and part.isdecimal() and len(part) < 7 for part in parts):
        return float(math.prod(map(int, parts)))
    return None


class _Tile(NamedTuple):
    """The tile of a configuration, by the names that solvers give to its sides; 1 where it has no such side.

    Attributes:
        m, n: of a product's tile; 0 of what is tiled by places and channels.
        k_bytes, k: of a step, in bytes or elements; 0 where it does not say so.
        is_swapped: M and N are.
        rows, columns, channels, images: of a tile of places.
    """

    m: float
    n: float
    k_bytes: float
    k: float
    splits: float
    is_swapped: bool
    rows: float
    columns: float
    channels: float
    images: float


def _tile(numbers: Mapping[str, float]) -> _Tile:
    """The tile of a configuration of such `parameters`."""
    sides = {name.rpartition(".")[2]: number for name, number in numbers.items()}

    def side(*names: str, otherwise: float = 1.0) -> float:
        for name in names:
            if 1 <= sides.get(name, 0) < _MOST_SIDE:
                return sides[name]
        return otherwise

    n = side("tile_n", otherwise=0.0)
    return _Tile(
        m=side("tile_m", otherwise=64 * side("consumers") * side("rows")) if n else 0.0,
        n=n,
        k_bytes=side("depth_bytes", otherwise=0.0),
        k=side("tile_k", otherwise=0.0),
        splits=side("splits"),
        is_swapped=bool(sides.get("swapped")),
        rows=side("rows", "tile_h"),
        columns=side("columns", "tile_w", "tile"),
        channels=side("channels", "filters", "tile_k"),
        images=side("images", "planes"),
    )


class _Tiled:
    """What the tiles of candidates are laid over, of one problem."""

    def __init__(self, problem: ProblemDescription, device: Device) -> None:
        self._product = _product(problem)
        is_data = problem.direction is Direction.BACKWARD_DATA
        places = problem.spatial if is_data else problem.out_spatial
        self._rows, self._columns = (1, *places)[-2:]
        group_c, group_k = problem.c // problem.groups, problem.k // problem.groups
        self._channels = problem.c if group_c == 1 else group_c if is_data else group_k
        self._images, self._groups, self._itemsize = problem.n, problem.groups, problem.x.dtype.itemsize
        self._processors = max(1, device.sm_count)

    def features(self, tile: _Tile) -> tuple[float, ...]:
        """Those of `_TILING`."""
        filled, blocks, steps = [1.0] * 6, 1.0, 1.0
        if tile.n:
            m, n, k = self._product
            sides = [(n, tile.m), (m, tile.n)] if tile.is_swapped else [(m, tile.m), (n, tile.n)]
            blocks = self._groups * tile.splits
            steps = k / tile.splits / (tile.k or (tile.k_bytes or 64) / self._itemsize)
            first = 0
        else:
            sides = [
                (self._rows, tile.rows),
                (self._columns, tile.columns),
                (self._channels, tile.channels),
                (self._images, tile.images),
            ]
            first = 2
        for place, (size, step) in enumerate(sides, first):
            count = math.ceil(size / step)
            filled[place] = size / (step * count)
            blocks *= count
        waves = blocks / self._processors
        return (*filled, _log(blocks), min(waves, _MOST_WAVES), waves / math.ceil(waves), _log(steps))


def feature_names(problem: Mapping[str, float], guesses: Sequence[Guess]) -> tuple[str, ...]:
    """The names of all features of these candidates of any problems, in order."""
    solvers = sorted({inner_id(guess.solver_id) for guess in guesses})
    named = sorted({name for config in {guess.config for guess in guesses} for name in parameters(config)})
    own = (*(_SOLVER + solver for solver in solvers), *(_PARAMETER + name for name in named))
    return (*sorted(problem), *_CANDIDATE, *_TILING, _COMPOSED, *own)


class _Known(NamedTuple):
    """What is known of a candidate, whatever the problem.

    Attributes:
        row: its features, 0 where others stand.
        tile: of its configuration.
    """

    row: NDArray[np.float32]
    tile: _Tile


class Columns:
    """The features of a model by name.

    Args:
        names: in the order of the model's columns; those that nothing has are 0.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._width = len(names)
        self._places = {name: place for place, name in enumerate(names)}
        own = [(self._places[name], at) for at, name in enumerate((*_CANDIDATE, *_TILING)) if name in self._places]
        self._own_places, self._own = np.array(own, np.intp).reshape(-1, 2).T
        # Of all problems together: near ones have near candidates.
        self._known = functools.lru_cache(maxsize=1 << 12)(self._known_of)

    def _known_of(self, solver_id: str, config: Config) -> _Known:
        own = {_SOLVER + inner_id(solver_id): 1.0, _COMPOSED: float(is_composed(solver_id))}
        numbers = parameters(config)
        own |= {_PARAMETER + name: number for name, number in numbers.items()}
        return _Known(self._row(own), _tile(numbers))

    def _row(self, features: Mapping[str, float]) -> NDArray[np.float32]:
        """A row with these features where the model has them, and nothing else."""
        found = np.zeros(self._width, np.float32)
        for name, value in features.items():
            if (place := self._places.get(name)) is not None:
                found[place] = value
        return found

    def matrix(self, problem: ProblemDescription, device: Device, guesses: Sequence[Guess]) -> NDArray[np.float32]:
        """Features of candidates of one problem: a row a candidate, a column a feature."""
        shared, tiled = problem_features(problem, device), _Tiled(problem, device)
        known = [self._known(guess.solver_id, guess.config) for guess in guesses]
        found = np.array([each.row for each in known])
        found += self._row(shared)
        times = _time_features(shared["floor"], guesses)
        own = np.array([*times, *zip(*(tiled.features(each.tile) for each in known), strict=True)], np.float32)
        found[:, self._own_places] = own.take(self._own, axis=0).T
        return found


def _time_features(floor: float, guesses: Sequence[Guess]) -> tuple[list[float], ...]:
    """Those of `_CANDIDATE`, each of all candidates."""
    estimates, tables = [_log(guess.estimate_ms) for guess in guesses], [_log(guess.table_ms) for guess in guesses]
    least_estimate, least = min(estimates), min(tables)
    by_table = sorted(guess.table_ms for guess in guesses)
    own: dict[str, list[float]] = {}
    for guess, estimate in zip(guesses, estimates, strict=True):
        own.setdefault(guess.solver_id, []).append(estimate)
    for of_solver in own.values():
        of_solver.sort()
    beside = [own[guess.solver_id] for guess in guesses]
    return (
        [each - floor for each in estimates],
        [each - least_estimate for each in estimates],
        [each - floor for each in tables],
        [each - least for each in tables],
        [float(by_table.index(guess.table_ms)) for guess in guesses],
        [each - of_solver[0] for each, of_solver in zip(estimates, beside, strict=True)],
        [float(len(of_solver)) for of_solver in beside],
        [float(of_solver.index(each)) for each, of_solver in zip(estimates, beside, strict=True)],
    )


def _log(time_ms: float) -> float:
    return math.log2(max(time_ms, 1e-30))
