"""Many problems at once: answers in order, each problem once, what fails costs itself alone, and kernels ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import miofind
from miofind.api import many
from miofind.device.device import Device
from miofind.errors import InvalidOptionError, NoSolutionError
from miofind.evaluate.executors import InProcess
from miofind.find import likely
from miofind.runtime.solution import Source

FIRST = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
SECOND = miofind.ProblemDescription.convolution(x=(2, 4, 6, 5), w=(2, 4, 1, 1), epilogue="bias.relu")
ONLY_ONE_TAP = miofind.FindOptions(only=("ConvCpuGemm1x1",))


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[miofind.Handle]:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with miofind.Handle("cpu", database=tmp_path / "found.db", strict=True) as made:
        yield made


@pytest.mark.parametrize("problems", [FIRST, 3])
def test_problems_are_several(problems: Any) -> None:
    with pytest.raises(InvalidOptionError, match="must be a list of problems"):
        miofind.find_many(problems)


def test_each_is_found_once_and_answered_in_order(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, again = miofind.find_many([FIRST, SECOND, FIRST], handle=handle)
    assert [solutions[0].problem for solutions in (first, second, again)] == [FIRST, SECOND, FIRST]
    assert {solution.source for solution in (*first, *second)} == {Source.MEASURED}
    assert [solution.id for solution in again] == [solution.id for solution in first]
    assert again is not first
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    assert [solution.id for solution in miofind.find_solutions(SECOND, handle=handle)] == [s.id for s in second]
    known = miofind.find_many(iter([SECOND]), handle=handle)
    assert [solution.id for solution in known[0]] == [solution.id for solution in second]
    assert miofind.find_many([], handle=handle) == []


def test_a_problem_without_a_solution_costs_itself_alone(
    handle: miofind.Handle, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoSolutionError):
        miofind.find_solutions(FIRST, options=ONLY_ONE_TAP, handle=handle)
    none, some = miofind.find_many([FIRST, SECOND.bare], options=ONLY_ONE_TAP, handle=handle)
    assert none == []
    assert {solution.solver_id for solution in some} == {"ConvCpuGemm1x1"}
    assert "no solution of" in caplog.text


@pytest.mark.parametrize(
    ("options", "compiles"),
    [
        (miofind.FindOptions(), True),
        (miofind.FindOptions(likely=True), True),
        (miofind.FindOptions(find_mode="fast"), False),
        (miofind.FindOptions(on_miss="error"), False),
        (miofind.FindOptions(on_miss="error", find_mode="normal"), True),
    ],
    ids=str,
)
def test_kernels_are_compiled_ahead_where_something_may_be_measured(
    options: miofind.FindOptions, compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Any] = []
    dropped: list[Any] = []
    pools: list[Any] = []

    class Ahead:
        def __init__(self, pool: Any, tuning: Any, *, defers: bool) -> None:
            assert defers
            assert tuning.force, "whether it is known was asked by the rules of a find"
            pools.append(pool)

        def prepare(self, problems: Any, handle: Any) -> None:
            prepared.extend(problems)

        def take(self, problems: Any) -> Any:
            return problems[-1]

        def take_plan(self, problem: Any, tuning: Any) -> None:
            dropped.append(problem)

        def close(self) -> None:
            pools.append("closed")

    def found(problem: Any, options: Any, handle: Any, *, ahead: Any, likeliest: Any) -> list[Any]:
        assert (ahead is not None) == compiles
        raise NoSolutionError("nothing here")

    monkeypatch.setattr(many, "Precompiler", Ahead)
    monkeypatch.setattr(many, "find", found)
    with miofind.Handle(Device.virtual("90a"), database=tmp_path / "found.db") as virtual:
        assert miofind.find_many([FIRST, SECOND], options=options, handle=virtual) == [[], []]
    assert prepared == ([SECOND] if compiles else [])
    assert dropped == ([SECOND, FIRST] if compiles else [])
    assert pools[1:] == (["closed"] if compiles else [])


@pytest.mark.parametrize("mode", ["hybrid", "normal"])
def test_nothing_is_compiled_ahead_for_what_will_not_be_measured(
    mode: str, handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likely, "FIRST", 1)
    monkeypatch.setattr(likely, "MOST", 1)
    miofind.find_solutions(FIRST, options=miofind.FindOptions(likely=True), handle=handle)
    ahead = many._unanswered([FIRST, SECOND], miofind.FindOptions(find_mode=mode), handle)
    assert ahead == ([SECOND] if mode == "hybrid" else [FIRST, SECOND])


def test_what_is_no_problem_is_named(handle: miofind.Handle) -> None:
    with pytest.raises(InvalidOptionError, match="problem='conv' must be a ProblemDescription"):
        miofind.find_many([FIRST, "conv"], handle=handle)  # type: ignore[list-item]
    with pytest.raises(InvalidOptionError, match="must be FindOptions"):
        miofind.find_many([FIRST], options={"likely": True}, handle=handle)  # type: ignore[arg-type]
