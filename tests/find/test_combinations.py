"""Which solvers are refused for all problems of a combination of types and layouts, and which are asked."""

from __future__ import annotations

import pytest

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.find import plan as plans
from miofind.find.combinations import AnswersOfCombination, is_possible
from miofind.find.lookup.scopes import accepted_scope, requested_scope
from miofind.find.plan import make_plan
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solvers.cpu.direct import ConvCpuDirect

HALF = ProblemDescription.convolution(x=(4, 16, 64, 64), w=(16, 16, 3, 3), padding=1, dtype="float16")
DEVICE = Device.virtual("90a")


def test_it_says_what_solvers_say_of_a_combination() -> None:
    registry = Registry.default()
    answers = AnswersOfCombination.of(registry, HALF, DEVICE)
    for solver_id, solver in registry.items():
        told = answers[solver_id]
        assert told.is_possible is is_possible(solver, DEVICE)
        assert told.answer == solver.refuse_combination(HALF, DEVICE)
        assert not told.answer.refused or solver.applicability(HALF, DEVICE) == told.answer
    assert AnswersOfCombination.of(registry, HALF.in_direction(HALF.direction), DEVICE) is answers


LARGE = ProblemDescription.convolution(x=(4, 16, 1 << 13, 1 << 12), w=(16, 16, 3, 3), padding=1, dtype="float16")


def test_what_is_for_large_tensors_is_asked_of_these_alone() -> None:
    """Answers that were found before it came are whole: shipped ones of small tensors would all lack it."""
    registry, options = Registry.default(), FindOptions()
    assert LARGE.is_large
    assert not HALF.is_large
    for problem, is_asked in ((HALF, False), (LARGE, True)):
        assert AnswersOfCombination.of(registry, problem, DEVICE)["ConvInParts"].answer.refused is not is_asked
        assert ("ConvInParts" in requested_scope(problem, options, DEVICE, registry).solvers) is is_asked
        assert ("ConvInParts" in accepted_scope(problem, options, DEVICE, registry).solvers) is is_asked


def test_of_another_package_s_solver_nothing_is_known_before_it_is_asked() -> None:
    later = type("Later", (ConvCpuDirect,), {"id": "vendor/Later"})()
    assert not AnswersOfCombination.of(Registry.default().with_solvers(later), HALF, DEVICE)[
        "vendor/Later"
    ].answer.refused


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The solvers that are asked whether they serve a problem, in order."""
    told: list[str] = []
    real = Solver.applicability
    monkeypatch.setattr(Solver, "applicability", lambda self, *args: told.append(self.id) or real(self, *args))
    return told


def test_a_plan_asks_no_solver_that_its_combination_refuses_and_counts_it_all_the_same(asked: list[str]) -> None:
    with Handle(DEVICE, database=":memory:") as handle:
        answers = AnswersOfCombination.of(handle.registry, HALF, DEVICE)
        plan = make_plan(HALF, FindOptions(), handle)
    refused = {name for name in handle.registry if answers[name].answer.refused}
    assert len(refused) > 10
    assert refused.isdisjoint(asked)
    assert {name: plan.refusals[name] for name in refused} == {name: answers[name].answer.reason for name in refused}
    assert {name for name in refused if answers[name].is_possible} <= plan.considered.keys()
    assert {name for name in refused if not answers[name].is_possible} <= plan.absent


def test_in_haste_none_is_asked_whether_it_serves_that_the_options_leave_nothing_of(asked: list[str]) -> None:
    with Handle(DEVICE, database=":memory:") as handle:
        unhurried = make_plan(HALF, FindOptions(), handle)
        assert "ConvFftTiles" in asked
        asked.clear()
        plan = make_plan(HALF, FindOptions(), handle, in_haste=True)
    assert "ConvFftTiles" not in asked
    assert plan.refusals["ConvFftTiles"] == plans._SPOILS.reason
    assert "ConvFftTiles" in plan.considered.keys() & unhurried.considered.keys()
