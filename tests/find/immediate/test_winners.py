"""Of a problem whose like a model knows, those solvers are asked that were the fastest there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.runs.immediate_models import H200, NEAR, small_model

import miofind
from miofind import FindOptions
from miofind.core.problem import ProblemDescription
from miofind.find.immediate import answer
from miofind.find.immediate.kinds import AXES, Kind, position
from miofind.find.immediate.ranker import Ranker
from miofind.find.immediate.winners import LEAST, NEIGHBOURS, Winners, Won, fastest
from miofind.solver.registry import Registry, inner_id

KIND = Kind.of(NEAR)
FAST = FindOptions(find_mode="fast")
SOLVERS = ("ConvDirectTiled", "ConvImplicitGemmMma", "ConvWinogradMma")
FAR = ProblemDescription.convolution(x=(4, 4096, 280, 280), w=(4096, 4096, 3, 3), padding=1, dtype="float16")
OTHER_KIND = replace(NEAR, direction="backward_data")


def won(bits: Sequence[int], at: Sequence[float] = position(NEAR), step: float = 0.01) -> Winners:
    """Winners of problems in a row, the first at a place."""
    axes = np.array([np.add(at, step * place) for place in range(len(bits))], np.float32).T
    return Winners(SOLVERS, {KIND.levels[0]: Won(axes, np.array(bits, np.uint64))})


def near(winners: Winners, problem: ProblemDescription = NEAR, reach: float = 1.0) -> frozenset[str] | None:
    return winners.near(Kind.of(problem), position(problem), reach)


def test_the_winners_of_all_near_problems_count() -> None:
    assert near(won([1] * LEAST)) == {"ConvDirectTiled"}
    assert near(won([1] * LEAST + [4])) == {"ConvDirectTiled", "ConvWinogradMma"}
    assert near(won([1] * NEIGHBOURS + [4])) == {"ConvDirectTiled"}, "the last is not among the nearest"
    assert near(won([4] + [1] * NEIGHBOURS)) == {"ConvDirectTiled", "ConvWinogradMma"}


def test_few_or_far_problems_and_other_kinds_say_nothing() -> None:
    assert near(won([1] * (LEAST - 1))) is None
    assert near(won([1] * LEAST), FAR) is None
    assert near(won([1] * LEAST), OTHER_KIND) is None
    assert near(Winners()) is None


def test_who_is_about_as_fast_has_won_too() -> None:
    times = [("A", 2.0), ("A", 1.0), ("B", 1.05), ("C", 1.06), ("D", 9.0)]
    assert fastest(times) == {"A", "B"}


def test_solvers_that_the_model_does_not_know_as_they_are_are_asked(
    gpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(won([2] * LEAST))
    facts = Registry.default().facts
    versions = {name: version for name, version in model.solvers.items() if name != "ConvIm2colGemm"}
    versions["ConvGemm1x1"] += 1
    monkeypatch.setattr(answer, "ranker_of", lambda device: Ranker(replace(model, solvers=versions)))
    asked = answer._worth_asking(NEAR, FAST, gpu)
    assert asked is not None
    assert asked & facts.keys() == {"ConvImplicitGemmMma", "ConvIm2colGemm", "ConvGemm1x1"}


def test_a_model_of_another_kind_of_gpu_has_no_winners() -> None:
    model = small_model(won([2] * LEAST))
    assert Ranker(model).winners_near(NEAR) == {"ConvImplicitGemmMma"}
    assert Ranker(model, is_of_kind=False).winners_near(NEAR) is None
    assert Ranker(small_model()).winners_near(NEAR) is None
    assert Ranker(None).winners_near(NEAR) is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[miofind.Handle]:
    """A GPU without a FindDB whose model has ConvDirectTiled alone among the winners."""
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    known_winners(monkeypatch, [1] * LEAST)
    with miofind.Handle(H200, database=":memory:") as handle:
        yield handle


def known_winners(monkeypatch: pytest.MonkeyPatch, bits: Sequence[int]) -> None:
    ranker = Ranker(small_model(won(bits)))
    monkeypatch.setattr(answer, "ranker_of", lambda device: ranker)


def answered(handle: miofind.Handle, problem: ProblemDescription = NEAR, **options: Any) -> set[str]:
    """The solvers of an answer."""
    found = miofind.find_solutions(problem, options=replace(FAST, **options), handle=handle)
    return {inner_id(solution.solver_id) for solution in found}


def test_an_answer_is_of_near_winners(gpu: miofind.Handle) -> None:
    assert answered(gpu) == {"ConvDirectTiled"}
    assert len(answered(gpu, OTHER_KIND)) > 1
    assert len(answered(gpu, FAR)) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"only": ("ConvImplicitGemmMma",)},
        {"exclude": ("ConvDirectTiled",)},
        {"deterministic": True},
        {"strict_nonfinite": True},
        {"max_error": 1e-3},
        {"order": "workspace"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_request_with_limits_is_answered_by_all(gpu: miofind.Handle, options: dict[str, Any]) -> None:
    assert "ConvImplicitGemmMma" in answered(gpu, **options)


def test_filters_that_leave_the_winners_change_nothing(gpu: miofind.Handle) -> None:
    assert answered(gpu, exclude=("cudnn", "ConvWinogradMma")) == {"ConvDirectTiled"}
    assert answered(gpu, only="plain") == {"ConvDirectTiled"}


def test_all_are_asked_where_no_winner_serves(gpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    known_winners(monkeypatch, [0] * LEAST)
    assert len(answered(gpu)) > 1


def test_positions_have_as_many_numbers_as_a_model_keeps() -> None:
    assert len(position(NEAR)) == AXES


@pytest.mark.parametrize(
    ("other", "problem"), [("ConvDirectTiled", NEAR), ("ConvImplicitGemmMma", replace(NEAR, epilogue="bias.relu"))]
)
def test_a_limit_of_workspace_matters_where_it_leaves_near_winners_out(
    other: str, problem: ProblemDescription, gpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's calls have one of 2 GiB, and had all solvers asked for each of them; also what is composed."""
    assert answered(gpu, workspace_limit_bytes=0) == {"ConvDirectTiled"}
    winners = {"ConvIm2colGemm", other}
    near_winners = replace(won([3] * LEAST), solvers=tuple(sorted(winners)))
    monkeypatch.setattr(answer, "ranker_of", lambda device: Ranker(small_model(near_winners)))
    planned: list[Set[str]] = []
    real = answer._plan
    monkeypatch.setattr(answer, "_plan", lambda *given, **how: planned.append(given[3]) or real(*given, **how))
    assert answered(gpu, problem, workspace_limit_bytes=2 << 30) == winners
    assert planned == [winners]
    assert answered(gpu, problem, workspace_limit_bytes=1)
    assert planned[1:] == [winners, gpu.registry.facts.keys()]


def test_a_bound_on_errors_that_leaves_candidates_out_has_nobody_else_asked(
    gpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = miofind.Handle(H200).registry["ConvDirectTiled"]
    configs = wide.default_configs(NEAR, H200)
    monkeypatch.setattr(type(wide), "error_growth", lambda self, problem, config: 2.0 if config == configs[0] else 1.0)
    assert answered(gpu) == {"ConvDirectTiled"}
