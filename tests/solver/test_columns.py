"""Tables of configurations: what they have alike, which are picked, and what is made once for equal numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from miofind.solver.columns import Columns, ConfigTable, column, holds_all, is_config, larger, made, mapped, smaller
from miofind.solver.steps import Config

ROWS = {"rows": (1, 2, 4), ("columns", "images"): ((8, 1), (16, 2)), "stages": (3,)}


def test_a_table_of_a_product_is_that_of_its_configurations() -> None:
    configs = Config.product(ROWS)
    lazy, plain = ConfigTable.product(ROWS), ConfigTable(configs)
    assert tuple(lazy.configs) == configs
    for name in ("rows", "columns", "images", "stages"):
        values = np.broadcast_to(lazy[name], len(configs))
        assert values.tolist() == np.broadcast_to(plain[name], len(configs)).tolist()
        assert values.tolist() == [config[name] for config in configs]


def test_configurations_of_a_product_are_made_when_they_are_asked_for() -> None:
    table = ConfigTable.product(ROWS)
    picked = table.valid(lambda config: config["rows"] == 4)
    assert table.configs._made == {}  # type: ignore[attr-defined]
    assert picked.configs[1] == Config.of(rows=4, columns=16, images=2, stages=3)
    assert len(table.configs._made) == 1  # type: ignore[attr-defined]


def test_what_is_valid_passes_one_test_after_the_other_while_any_are_left() -> None:
    table = ConfigTable(Config.product(ROWS))
    seen: list[Config] = []

    def is_wide(config: Config) -> bool:
        seen.append(config)
        is_wide: bool = config["columns"] == 16
        return is_wide

    both = table.valid(lambda config: config["rows"] == 4, is_wide)
    assert tuple(both.configs) == tuple(c for c in table.configs if (c["rows"], c["columns"]) == (4, 16))
    assert not table.valid(lambda config: config["rows"] > 9, is_wide).configs
    assert len(seen) == 1, "of none there are none to ask"


def test_what_all_have_alike_is_a_number() -> None:
    assert ConfigTable(Config.product(ROWS))["stages"] == 3


def test_joined_tables_have_the_configurations_of_each() -> None:
    first, last = ConfigTable(Config.product(ROWS)), ConfigTable([Config.of(rows=7, columns=8, images=1, stages=1)])
    nothing = first.valid(lambda config: config["rows"] > 9)
    joined = ConfigTable.joined([nothing, first, last])
    assert tuple(joined.configs) == (*first.configs, *last.configs)
    assert joined["stages"].tolist() == [3, 3, 3, 3, 3, 3, 1]
    assert is_config(joined.as_config, last.configs[0]).tolist() == [False] * 6 + [True]  # type: ignore[attr-defined]


def test_an_object_is_made_once_for_equal_numbers_and_gives_arrays() -> None:
    asked: list[int] = []

    def fraction(value: int) -> complex:
        asked.append(value)
        return complex(value, 1)

    many = made(fraction, np.array([4, 2, 4, 4]))  # type: ignore[arg-type]
    assert asked == [2, 4]
    assert many.real.tolist() == [4.0, 2.0, 4.0, 4.0]  # type: ignore[attr-defined]
    assert many.imag == 1.0
    assert made(fraction, 3) == complex(3, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sides(Columns):
    a: Any
    b: Any

    @column
    def area(self) -> Any:
        return self.a * self.b

    @column
    def sides(self) -> tuple[Any, Any]:
        return smaller(self.a, self.b), larger(self.a, self.b)


def test_what_is_known_of_columns_goes_along_to_those_at_some_places() -> None:
    table = Sides(a=np.array([1, 5, 3]), b=4).complete()
    picked = table.at(np.array([2, 0]))
    assert picked.a.tolist() == [3, 1]
    assert picked.b == 4
    assert vars(picked)["area"].tolist() == [12, 4]
    assert [side.tolist() for side in vars(picked)["sides"]] == [[3, 1], [4, 4]]


def test_nothing_is_known_of_columns_with_another_value() -> None:
    table = Sides(a=np.array([1, 5, 3]), b=4).complete()
    assert table.but(b=2).area.tolist() == [2, 10, 6]
    assert Sides(a=5, b=4).area == 20


def test_conditions_of_one_configuration_are_looked_at_until_one_does_not_hold() -> None:
    looked = iter((True, False, True))
    assert holds_all(looked) is False
    assert list(looked) == [True]
    assert holds_all((np.array([True, True]), False, np.array([True, False]))).tolist() == [False, False]


def test_a_function_is_asked_once_for_equal_values() -> None:
    asked: list[tuple[int, ...]] = []

    def total(*values: int) -> int:
        asked.append(values)
        return sum(values)

    column, other = np.array([4, 1, 4, 1, 2]), np.array([0, 5, 0, 6, 0])
    assert mapped(total, column).tolist() == [4, 1, 4, 1, 2]  # type: ignore[arg-type]
    assert sorted(asked) == [(1,), (2,), (4,)]
    asked.clear()
    assert mapped(total, column, other, 1).tolist() == [5, 7, 5, 8, 3]  # type: ignore[arg-type]
    assert sorted(asked) == [(1, 5, 1), (1, 6, 1), (2, 0, 1), (4, 0, 1)]
    assert mapped(total, 3, 4) == 7
