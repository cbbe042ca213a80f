"""Many configurations at once: arrays that hold a number of each of them, and arithmetic that takes these or numbers.

A cost model that is written with `larger`, `smaller`, `chosen`, `divisor`, `mapped` and `made`, where it would else ask
for max, min, a condition, a common divisor, or a function of numbers that gives a number or an object, says of a table
of configurations what it says of one.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from miofind.core.cached import cached_property
from miofind.solver.steps import Config, ConfigProduct

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]
Number = TypeVar("Number", int, float)
"""Of one configuration; an array of these where a configuration is a table of many."""
Made = TypeVar("Made")
Each: TypeAlias = Any
"""A number or truth of one configuration; of a table an array of these."""


class ConfigTable(Mapping[str, Any]):
    """Configurations of the same parameters as if they were one.

    Values are arrays with a place for each, or what all have alike. A table is equal to itself alone.
    """

    def __init__(self, configs: Sequence[Config], columns: Mapping[str, Any] | None = None) -> None:
        self.configs = configs
        self._columns = columns or {name: _column([config[name] for config in configs]) for name in configs[0]}

    def at(self, places: Integers) -> ConfigTable:
        """Those at some places."""
        columns = {name: column[places] if is_table(column) else column for name, column in self._columns.items()}
        return ConfigTable(_Some(self.configs, places), columns)

    @staticmethod
    def product(rows: Mapping[str | tuple[str, ...], Sequence[Any]]) -> ConfigTable:
        """What `Config.product` gives of the same rows; a configuration of it is made when it is asked for."""
        configs = ConfigProduct(rows)
        columns: dict[str, Any] = {}
        for part, digits in zip(configs.rows, np.indices(configs.counts).reshape(len(configs.counts), -1), strict=True):
            for name in part[0]:
                columns[name] = np.array([choice[name] for choice in part])[digits]
        return ConfigTable(configs, columns)

    @staticmethod
    def joined(tables: Sequence[ConfigTable]) -> ConfigTable:
        """Those of several tables, one after the other."""
        tables = [table for table in tables if table.configs]
        columns = {name: np.concatenate([table._whole(name) for table in tables]) for name in tables[0]}
        picks = [(table.configs, place) for table in tables for place in range(len(table.configs))]
        return ConfigTable(_Picked(picks), columns)

    def _whole(self, name: str) -> NDArray[Any]:
        """A value of each, though all have it alike."""
        column = self._columns[name]
        return column if is_table(column) else np.full(len(self.configs), column)

    def places(self, holds: object) -> Integers:
        """Where something holds that is told of each, or of all alike."""
        return np.flatnonzero(np.broadcast_to(np.asarray(holds), len(self.configs)))

    def valid(self, *tests: Callable[[Config], bool]) -> ConfigTable:
        """Those for which functions hold that do arithmetic on a configuration's values.

        Each is asked of those that the ones before it hold for, and not where there are none left.
        """
        left = self
        for is_valid in tests:
            if left.configs:
                places = left.places(is_valid(left.as_config))
                left = left if len(places) == len(left.configs) else left.at(places)
        return left

    @property
    def as_config(self) -> Config:
        """The table for functions that take one configuration and do arithmetic on its values alone."""
        return cast(Config, self)

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class _Some(Sequence[Config]):
    """Configurations of another sequence, by their places there."""

    def __init__(self, configs: Sequence[Config], places: Integers) -> None:
        self._configs, self._places = configs, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        return self._configs[int(self._places[place])]


class _Picked(Sequence[Config]):
    """Configurations of other sequences, each by its sequence and its place there."""

    def __init__(self, picks: Sequence[tuple[Sequence[Config], int]]) -> None:
        self._picks = picks

    def __len__(self) -> int:
        return len(self._picks)

    def __getitem__(self, place: Any) -> Any:
        source, at = self._picks[place]
        return source[at]


class Columns:
    """A base of frozen dataclasses whose attributes are numbers of one configuration, or arrays of a table of many."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def at(self, places: Integers) -> Self:
        """Those at some places, with what is known of their columns."""
        picked = object.__new__(type(self))
        known = vars(picked)
        for name, value in vars(self).items():
            known[name] = value[places] if type(value) is np.ndarray else _at(value, places)
        return picked

    def but(self, **values: Any) -> Self:
        """The same with other values of some attributes; no columns of it are known."""
        made = object.__new__(type(self))
        vars(made).update({name: getattr(self, name) for name in self.__dataclass_fields__}, **values)
        return made

    def complete(self) -> Self:
        """The same, with all columns known."""
        for name, value in vars(type(self)).items():
            if isinstance(value, column):
                getattr(self, name)
        return self


class column(cached_property[Made]):  # noqa: N801  # named as the decorators that it is one of
    """What follows from the attributes of `Columns`."""


def _at(value: Any, places: Integers) -> Any:
    """What a value of a table is at some places."""
    if is_table(value):
        return value[places]
    if isinstance(value, tuple):
        return tuple(_at(each, places) for each in value)
    return value.at(places) if isinstance(value, Columns) else value


def holds_all(conditions: Iterable[Each]) -> Each:
    """Whether all conditions hold; for one configuration those beyond the first that does not are not looked at."""
    found: Each = True
    for condition in conditions:
        found = found & condition
        if found is False:
            break
    return found


def _column(values: Sequence[Any]) -> Any:
    """Values as an array, or what they are where all are alike."""
    return values[0] if len(set(values)) == 1 else np.array(values)


def is_config(config: Config, other: Config) -> bool:
    """Whether all values of a configuration, or of one of a table, are those of another."""
    return cast(bool, functools.reduce(operator.and_, (config[name] == value for name, value in other.items())))


def is_one_of(config: Config, others: Iterable[Config]) -> bool:
    """Whether a configuration, or one of a table, `is_config` of any of others."""
    return functools.reduce(operator.or_, (is_config(config, other) for other in others))


def is_table(*values: object) -> bool:
    """Whether one of the values is of many configurations."""
    return np.ndarray in map(type, values)


def larger(a: Number, b: Number) -> Number:
    """The larger one."""
    if type(a) is np.ndarray or type(b) is np.ndarray:  # thousands of configurations ask one by one
        return cast(Number, np.maximum(a, b))
    return b if b > a else a


def smaller(a: Number, b: Number) -> Number:
    """The smaller one."""
    if type(a) is np.ndarray or type(b) is np.ndarray:
        return cast(Number, np.minimum(a, b))
    return b if b < a else a


def chosen(condition: bool, a: Number, b: Number) -> Number:
    """The first where the condition holds, else the second."""
    if type(condition) is np.ndarray or type(a) is np.ndarray or type(b) is np.ndarray:
        return cast(Number, np.where(condition, a, b))
    return a if condition else b


def divisor(*values: int) -> int:
    """The greatest common divisor."""
    return functools.reduce(np.gcd, values) if is_table(*values) else math.gcd(*values)


def mapped(function: Callable[..., Number], *values: int) -> Number:
    """What a function gives; it is asked once for equal values."""
    if not is_table(*values):
        return function(*values)
    if len(values) == 1:
        distinct, places = np.unique(values[0], return_inverse=True)
        return cast(Number, np.array([function(each) for each in distinct.tolist()])[places])
    rows = list(zip(*(column.tolist() for column in np.broadcast_arrays(*values)), strict=True))
    found = {row: function(*row) for row in set(rows)}
    return cast(Number, np.array([found[row] for row in rows]))


def made(function: Callable[[int], Made], value: int) -> Made:
    """What a function makes of a number; it is asked once for equal ones.

    Of many numbers an object whose attributes are arrays of those of what it makes of each, or what all have alike.
    """
    if not is_table(value):
        return function(value)
    distinct, places = np.unique(value, return_inverse=True)
    return cast(Made, _Many([function(each) for each in distinct.tolist()], places))


class _Many:
    """Objects of one kind as if they were one, whose attributes are arrays where they differ."""

    def __init__(self, objects: Sequence[object], places: Integers) -> None:
        self._objects, self._places = objects, places

    def __getattr__(self, name: str) -> Any:
        values = [getattr(each, name) for each in self._objects]
        found = _column(values)
        found = found[self._places] if is_table(found) else found
        setattr(self, name, found)
        return found
