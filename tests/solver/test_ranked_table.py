"""Configurations of a table with their estimates, the least first."""

from __future__ import annotations

import numpy as np

from miofind.solver.columns import ConfigTable
from miofind.solver.solver import EstimatedConfig, RankedTable
from miofind.solver.steps import Config

ROWS = {"rows": (1, 2), "columns": (8, 16), "stages": (3,)}


def test_values_come_in_the_order_of_estimates_without_their_configurations() -> None:
    table = ConfigTable.product(ROWS)
    ranked = RankedTable(table, np.array([4.0, 2.0, 4.0, 1.0]))
    assert ranked.values("rows") == [2, 1, 1, 2]
    assert ranked.values("stages") == [3] * 4
    assert table.configs._made == {}  # type: ignore[attr-defined]
    assert ranked[0] == EstimatedConfig(Config.of(rows=2, columns=16, stages=3), 1.0)
    assert [each.config["rows"] for each in ranked] == ranked.values("rows")
    assert [each.estimate_ms for each in ranked[1:]] == [2.0, 4.0, 4.0]


def test_of_no_configurations_there_are_no_values() -> None:
    nothing = ConfigTable.product(ROWS).valid(lambda config: config["rows"] > 9)
    assert RankedTable(nothing, np.empty(0)).values("rows") == []


def test_the_configurations_that_count_are_ranked_alone() -> None:
    table = ConfigTable.product(ROWS)
    ranked = RankedTable(table, np.array([4.0, 2.0, 4.0, 1.0]), np.array([0, 2, 3]))
    assert [each.estimate_ms for each in ranked] == [1.0, 4.0, 4.0]
    assert ranked.values("rows") == [2, 1, 2]
    assert ranked.in_order(np.array([10, 11, 12, 13])) == [13, 10, 12]
    assert ranked.in_order(7) == [7] * 3


def test_what_all_have_alike_is_of_each() -> None:
    table = ConfigTable.product(ROWS)
    ranked = RankedTable(table, 2.0, table.places(True))
    assert [each.estimate_ms for each in ranked] == [2.0] * 4
    assert [each.config for each in ranked] == list(table.configs)
    assert list(table.places(False)) == []
    assert list(table.places(np.array([False, True, False, True]))) == [1, 3]
