"""What an answer without measuring asks of solvers, whatever the machine: few questions about one configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import miofind
from miofind import FindOptions
from miofind.core.epilogue import Epilogue
from miofind.core.problem import ProblemDescription
from miofind.find.immediate.devices import described
from miofind.find.plan import own_applicability, own_defaults
from miofind.solver.registry import Registry, composed_id
from miofind.solver.solver import _own_solution
from miofind.solver.steps import Config

H200 = described("NVIDIA H200|132|9.0|")
FAST = FindOptions(find_mode="fast")
MOST_PRICED = 120
"""Estimates of one configuration, and questions whether it is valid, that an answer asks of all solvers together: the
short lists of kernels for depthwise filters and without tensor cores, which are no tables."""

CONV = ProblemDescription.convolution
HALF = {"dtype": "float16", "layout": "NHWC"}
FIRST = {"dtype": "float16", "layout": "NCHW"}
PROBLEMS = {
    "1x1": CONV(x=(32, 256, 28, 28), w=(512, 256, 1, 1), **HALF),
    "3x3": CONV(x=(32, 128, 28, 28), w=(128, 128, 3, 3), padding=1, **HALF),
    "channels first": CONV(x=(8, 128, 28, 28), w=(128, 128, 3, 3), padding=1, dtype="bfloat16"),
    "strided data": CONV(
        x=(8, 128, 28, 28), w=(128, 128, 3, 3), padding=1, stride=2, direction="backward_data", **HALF
    ),
    "first layer": CONV(x=(32, 3, 224, 224), w=(64, 3, 7, 7), padding=3, stride=2, **HALF),
    "first layer data": CONV(
        x=(8, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2, direction="backward_data", **FIRST
    ),
    "first layer weights": CONV(x=(8, 3, 64, 64), w=(64, 3, 3, 3), padding=1, direction="backward_weights", **FIRST),
    "first layer tf32": CONV(x=(8, 3, 64, 64), w=(64, 3, 3, 3), padding=1, math="tf32", direction="backward_data"),
    "grouped": CONV(x=(32, 256, 14, 14), w=(256, 8, 3, 3), padding=1, groups=32, dtype="float16"),
    "grouped weights": CONV(
        x=(32, 256, 14, 14), w=(256, 8, 3, 3), padding=1, groups=32, dtype="float16", direction="backward_weights"
    ),
    "depthwise": CONV(x=(32, 96, 56, 56), w=(96, 1, 3, 3), padding=1, groups=96, dtype="float16"),
    "depthwise weights": CONV(
        x=(32, 96, 56, 56), w=(96, 1, 3, 3), padding=1, groups=96, dtype="float16", direction="backward_weights"
    ),
}


@pytest.mark.parametrize("only", [(), ("ConvImplicitGemmMma", "ConvImplicitGemmMma+Pointwise")], ids=["all", "named"])
def test_what_fuses_is_not_composed_unless_it_is_named(only: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    problem = replace(PROBLEMS["3x3"], epilogue=Epilogue.of("bias.relu"))
    with miofind.Handle(H200, database=":memory:") as handle:
        found = miofind.find_solutions(problem, options=replace(FAST, only=only), handle=handle)
    ids = {solution.solver_id for solution in found}
    assert "ConvImplicitGemmMma" in ids
    assert ("ConvImplicitGemmMma+Pointwise" in ids) == bool(only)
    assert not any(composed_id(name) in ids for name in ids) or only


def test_a_problem_that_no_finddb_knows_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    asked: list[str] = []
    with miofind.Handle(H200, database=":memory:") as handle:
        real = handle.database.answers
        monkeypatch.setattr(handle.database, "answers", lambda *key: asked.append(key[1]) or real(*key))
        monkeypatch.setattr(handle.database, "histories", lambda *key: pytest.fail("rows were read"))
        assert miofind.find_solutions(PROBLEMS["3x3"], options=FAST, handle=handle)
    assert asked == [PROBLEMS["3x3"].network_config]


def test_the_first_one_s_workspace_is_told_by_the_steps_that_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with miofind.Handle(H200, database=":memory:") as handle:
        first, *_ = miofind.find_solutions(PROBLEMS["1x1"], options=FAST, handle=handle)
        solver = handle.registry[first.solver_id]
        expected = solver.solution(first.problem, first.device, first.config).workspace.bytes
        monkeypatch.setattr(type(solver), "solution", lambda *given: pytest.fail("steps were made again"))
        assert first.workspace_bytes == expected


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_answer_prices_few_configurations_one_by_one_and_makes_the_first_one_s_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()

    def counted(solver: type, method: str) -> None:
        real = getattr(solver, method)

        def count(self: object, problem: object, device: object, config: object) -> object:
            asked[method] += isinstance(config, Config)
            return real(self, problem, device, config)

        monkeypatch.setattr(solver, method, count)

    for solver in {type(each) for each in Registry.default().values()}:
        for method in ("estimate_ms", "is_valid_config", "solution"):
            if method in vars(solver):
                counted(solver, method)
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    for kept in (own_defaults, own_applicability, _own_solution):
        kept.cache_clear()
    with miofind.Handle(H200, database=":memory:") as handle:
        assert miofind.find_solutions(PROBLEMS[name], options=FAST, handle=handle)
    assert asked["estimate_ms"] + asked["is_valid_config"] <= MOST_PRICED, asked
    assert asked["solution"] <= 2, asked  # of a composed solver, and of the one inside it
