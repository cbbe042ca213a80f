"""Tables of configurations: what they have alike, which are picked, and what is made once for equal numbers."""

from __future__ import annotations

import numpy as np

from miofind.solver.columns import ConfigTable, is_config, made
from miofind.solver.steps import Config

ROWS = {"rows": (1, 2, 4), ("columns", "images"): ((8, 1), (16, 2)), "stages": (3,)}


def test_a_table_of_a_product_is_that_of_its_configurations() -> None:
    configs = Config.product(ROWS)
    lazy, plain = ConfigTable.product(ROWS), ConfigTable(configs)
    assert tuple(lazy.configs) == configs
    for name in ("rows", "columns", "images", "stages"):
        column = np.broadcast_to(lazy[name], len(configs))
        assert column.tolist() == np.broadcast_to(plain[name], len(configs)).tolist()
        assert column.tolist() == [config[name] for config in configs]


def test_configurations_of_a_product_are_made_when_they_are_asked_for() -> None:
    table = ConfigTable.product(ROWS)
    picked = table.valid(lambda config: config["rows"] == 4)
    assert table.configs._made == {}  # type: ignore[attr-defined]
    assert picked.configs[1] == Config.of(rows=4, columns=16, images=2, stages=3)
    assert len(table.configs._made) == 1  # type: ignore[attr-defined]


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
