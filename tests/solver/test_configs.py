"""Configurations from tables: every combination, in order, with parameters that vary together."""

from __future__ import annotations

import pytest

from miofind.solver.steps import Config


def test_a_product_has_every_combination_the_last_row_s_values_side_by_side() -> None:
    made = Config.product({"rows": (1, 2), "direct": (False, True)})
    assert made == (
        Config.of(rows=1, direct=False),
        Config.of(rows=1, direct=True),
        Config.of(rows=2, direct=False),
        Config.of(rows=2, direct=True),
    )


def test_parameters_of_one_row_vary_together() -> None:
    made = Config.product({("warps_m", "warps_n"): ((4, 1), (2, 2)), "stages": (3,)})
    assert made == (Config.of(warps_m=4, warps_n=1, stages=3), Config.of(warps_m=2, warps_n=2, stages=3))


def test_a_row_without_values_leaves_no_combination() -> None:
    assert Config.product({"rows": (1, 2), "stages": ()}) == ()
    assert Config.product({}) == (Config(),)


def test_a_row_with_too_few_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        Config.product({("warps_m", "warps_n"): ((4,),)})
