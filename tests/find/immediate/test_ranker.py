"""Where trees, the table and plain estimates speak, and what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.runs.immediate_models import H200, NEAR, small_model

from miofind.core.epilogue import Epilogue
from miofind.core.problem import ProblemDescription
from miofind.find.immediate.features import Columns, Guess, feature_names, parameters, problem_features
from miofind.find.immediate.kinds import Kind
from miofind.find.immediate.model import Model, Trees
from miofind.find.immediate.ranker import Estimated, Prediction, Ranker
from miofind.find.immediate.table import LEAST_PROBLEMS, Ratio, Table
from miofind.solver.registry import Registry, composed
from miofind.solver.steps import Config

TILED, MMA = (Registry.default()[name] for name in ("ConvDirectTiled", "ConvImplicitGemmMma"))
CANDIDATES = (Estimated(MMA, Config.of(stages=1), 1.0), Estimated(TILED, Config.of(stages=2), 4.0))
FAR = ProblemDescription.convolution(x=(64, 64, 56, 56), w=(64, 64, 3, 3), padding=1, dtype="float16")
OTHER_KIND = ProblemDescription.convolution(x=(4, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="bfloat16")


def predicted(model: Model | None, problem: ProblemDescription = NEAR) -> list[Prediction]:
    return Ranker(model).predictions(problem, H200, CANDIDATES)


def test_without_a_model_estimates_stand_and_nothing_is_known_of_them() -> None:
    assert predicted(None) == [Prediction(1.0, None), Prediction(4.0, None)]
    assert Ranker(small_model()).predictions(NEAR, H200, []) == []


def test_trees_speak_of_problems_like_those_they_know() -> None:
    """The table has 2 and 4 * sqrt(2); the trees make the second 64 times faster, and so the first of both."""
    mma, tiled = predicted(small_model())
    assert (mma.time_ms, tiled.time_ms) == pytest.approx((2.0, 4 * 2**0.5 / 64), rel=1e-4)
    assert (mma.confidence, tiled.confidence) == (0.2, 0.9)


@pytest.mark.parametrize("problem", [FAR, OTHER_KIND], ids=["far", "other-kind"])
def test_the_table_speaks_of_other_problems(problem: ProblemDescription) -> None:
    factor = 2**0.5 if problem is FAR else 1.0  # the table knows ConvDirectTiled in float16 alone
    found = predicted(small_model(), problem)
    assert [each.time_ms for each in found] == pytest.approx([2.0, 4 * factor])
    assert {each.confidence for each in found} == {0.5}


def test_estimates_of_a_solver_that_changed_are_not_corrected() -> None:
    model = small_model()
    changed = replace(model, solvers={**model.solvers, TILED.id: TILED.version + 1})
    assert Ranker(changed).is_stale(TILED)
    assert [each.time_ms for each in predicted(changed)] == pytest.approx([2.0, 4.0])
    unknown = replace(model, solvers={MMA.id: MMA.version})
    assert not Ranker(unknown).is_stale(TILED)
    assert [each.time_ms for each in predicted(unknown)] == pytest.approx([2.0, 4.0])


def test_a_composed_form_is_known_by_the_solver_it_is_made_of() -> None:
    """The table corrects it alike, and beside that solver's columns it has one of its own."""
    model = replace(small_model(), trees=None)
    fused = replace(NEAR, epilogue=Epilogue.of("bias.residual.silu"))
    form = composed(TILED)
    found = Ranker(model).predictions(fused, H200, [CANDIDATES[1], Estimated(form, CANDIDATES[1].config, 4.0)])
    assert found[0].time_ms == found[1].time_ms == pytest.approx(4 * 2**0.5)
    assert Ranker(model).knows(form)
    guesses = [Guess(each.id, CANDIDATES[1].config, 4.0, 4.0) for each in (TILED, form)]
    names = feature_names(problem_features(fused, H200), guesses)
    own, of_form = Columns(names).matrix(fused, H200, guesses)
    assert [name for name, a, b in zip(names, own, of_form, strict=True) if a != b] == ["composed"]


def test_an_epilogue_is_told_by_its_operands_and_activation() -> None:
    plain, fused = (problem_features(replace(NEAR, epilogue=Epilogue.of(e)), H200) for e in ("", "bias.residual.silu"))
    names = ("epilogue", "epilogue_tensors", "inexact_activation")
    assert [plain[name] for name in names] == [0, 0, 0]
    assert [fused[name] for name in names] == [2, 1, 1]
    assert fused["bytes"] > plain["bytes"], "a residual is read"


def test_more_candidates_than_trees_are_asked_of_keep_an_order() -> None:
    many = [Estimated(MMA, Config.of(stages=place), 1.0 + place) for place in range(40)]
    found = Ranker(small_model()).predictions(NEAR, H200, many)
    times = [each.time_ms for each in found]
    assert times == sorted(times)
    assert all(math.isfinite(time_ms) and time_ms > 0 for time_ms in times)


def test_candidates_that_trees_are_not_asked_of_come_behind_the_others_by_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trees, "sums", lambda _, rows: (np.full(len(rows), 6.0), np.zeros(len(rows))))
    many = [Estimated(MMA, Config.of(stages=place), 1.0 + place / 100) for place in reversed(range(40))]
    found = Ranker(small_model()).predictions(NEAR, H200, many)
    times = [each.time_ms for each in reversed(found)]
    assert times == sorted(set(times))


def test_a_table_is_of_medians_drawn_to_wider_kinds() -> None:
    kind, other = Kind.of(NEAR), Kind.of(OTHER_KIND)
    ratios = [Ratio("ConvA", kind, f"{place}", 1.0) for place in range(100)]
    ratios += [Ratio("ConvA", kind, "0", 9.0), Ratio("ConvA", other, "odd", -5.0)]
    table = Table.of(ratios)
    assert table.log2("ConvA", kind) == pytest.approx(1.0, abs=0.1)
    assert table.log2("ConvA", other) == table.corrections[("ConvA",)]  # one problem is no kind
    assert table.log2("ConvB", kind) == 0
    assert Table.of(ratios[: LEAST_PROBLEMS - 1]).corrections == {}


def test_parameters_are_numbers_by_name() -> None:
    config = Config({"cluster": "2x1x2", "whole": True, "engine": {"a": 3}, "type": "float32", "splits": 2})
    assert parameters(config) == {"cluster": 4.0, "whole": 1.0, "engine.a": 3.0, "splits": 2.0}
    names = feature_names(problem_features(NEAR, H200), [Guess("ConvA", config, 1.0, 1.0)])
    assert len(set(names)) == len(names)
    assert {"solver ConvA", "parameter cluster", "k_gemm"} < set(names)
