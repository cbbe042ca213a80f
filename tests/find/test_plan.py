"""What a search may measure: spaces, their limits and what they begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library
from miofind.find import plan as plan_module
from miofind.find.lookup.validity import solver_hash
from miofind.find.plan import SEARCH_LIMIT, estimated_configs, make_plan
from miofind.find.search import EXHAUSTIVE, Space
from miofind.finddb import Row
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry
from miofind.solver.solver import APPLICABLE, Applicability, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution
from miofind.solvers.direct.tiled import ConvDirectTiled
from miofind.solvers.fft.tiles import ConvFft

DEVICE = Device.virtual("90a")
PROBLEM = ProblemDescription.convolution(x=(8, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC")
HANDLE = Handle(DEVICE)
TILED = FindOptions(tuning=True, only=("ConvDirectTiled",))


@pytest.fixture(autouse=True)
def every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "library_version", lambda self, library: 1)


def space_of(options: FindOptions, handle: Handle = HANDLE, **arguments: object) -> Space:
    (space,) = make_plan(PROBLEM, options, handle, **arguments).spaces  # type: ignore[arg-type]
    return space


def test_without_a_search_there_are_no_spaces() -> None:
    planned = make_plan(PROBLEM, FindOptions(only=("ConvDirectTiled",)), HANDLE)
    assert planned.spaces == ()
    defaults = Registry.default()["ConvDirectTiled"].default_configs(PROBLEM, DEVICE)
    assert {p.candidate.config for p in planned.candidates} == set(defaults)


def test_a_large_space_begins_with_defaults_and_lists_the_best_estimates() -> None:
    solver = Registry.default()["ConvDirectTiled"]
    space = space_of(TILED)
    assert not space.is_whole
    assert space.seeds == solver.default_configs(PROBLEM, DEVICE)
    estimates = sorted(solver.estimate_ms(PROBLEM, DEVICE, c) for c in solver.configs(PROBLEM, DEVICE))
    assert [space.estimate_ms(config) for config in space.listed] == estimates[: len(space.listed)]
    assert len(space.listed) > EXHAUSTIVE


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("epilogue", ["", "bias.sigmoid"])
def test_others_are_measured_before_cudnns_plans(epilogue: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take all of a budget to be built."""
    problem = ProblemDescription.convolution(
        x=(32, 4, 1, 1), w=(96, 4, 1, 1), dtype=dtype, layout="NHWC", epilogue=epilogue
    )
    first, planned = plan_module._BEFORE_CUDNN, make_plan(problem, FindOptions(), HANDLE).candidates
    is_cudnn = [each.solver.library is Library.CUDNN for each in planned]
    assert any(is_cudnn)
    assert not any(is_cudnn[:first])
    monkeypatch.setattr(plan_module, "_BEFORE_CUDNN", 0)
    by_estimate = make_plan(problem, FindOptions(), HANDLE).candidates
    assert [each.estimate_ms for each in by_estimate] == sorted(each.estimate_ms for each in by_estimate)
    others = [each for each in by_estimate if each.solver.library is not Library.CUDNN]
    assert list(planned) == [*others[:first], *(each for each in by_estimate if each not in others[:first])]


def test_what_is_composed_does_not_depend_on_cudnns_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ProblemDescription.convolution(
        x=(8, 512, 14), w=(256, 16, 5), padding=2, stride=2, groups=32, dtype="float16", epilogue="scale.bias.silu"
    )
    planned = make_plan(problem, FindOptions(), HANDLE).candidates
    monkeypatch.setattr(plan_module, "_BEFORE_CUDNN", 0)
    assert {each.candidate for each in planned} == {
        each.candidate for each in make_plan(problem, FindOptions(), HANDLE).candidates
    }
    assert "ConvCudnn+Pointwise" in {each.solver.id for each in planned}


def test_cudnns_plans_are_all_where_nothing_else_serves() -> None:
    planned = make_plan(PROBLEM, FindOptions(only=("ConvCudnn",)), HANDLE).candidates
    assert planned
    assert all(each.solver.library is Library.CUDNN for each in planned)


def test_a_small_space_is_whole() -> None:
    space = space_of(FindOptions(tuning=True, only=("ConvIm2colGemm",)))
    assert space.is_whole
    every = set(Registry.default()["ConvIm2colGemm"].configs(PROBLEM, DEVICE))
    assert {*space.seeds, *space.listed} == every


def test_a_space_is_small_where_limits_leave_few() -> None:
    """The limits count first: what they leave is covered, however large the product is."""
    options = FindOptions(tuning=True, only=("ConvIm2colGemm",), workspace_limit_bytes=8 << 20)
    space = space_of(options)
    solver = Registry.default()["ConvIm2colGemm"]
    within = [c for c in solver.configs(PROBLEM, DEVICE) if solver.workspace_bytes(PROBLEM, DEVICE, c) <= 8 << 20]
    assert 0 < len(within) < len(list(solver.configs(PROBLEM, DEVICE)))
    assert {*space.seeds, *space.listed} == set(within)
    assert [space.admits(config) for config in solver.configs(PROBLEM, DEVICE)].count(True) == len(within)


def test_winners_elsewhere_are_seeds_where_they_are_valid_here() -> None:
    solver = Registry.default()["ConvDirectTiled"]
    valid = list(solver.configs(PROBLEM, DEVICE))[123]
    for_float32 = Config({**valid, "stages": 2})
    unknown = Config.of(no_such_parameter=1)
    space = space_of(TILED, winners={"ConvDirectTiled": (unknown, valid, for_float32), "Other": (unknown,)})
    assert space.seeds == (*solver.default_configs(PROBLEM, DEVICE), valid)


@pytest.mark.parametrize("tuning", [False, True])
def test_configurations_of_earlier_code_are_measured_with_the_defaults(tmp_path: Path, tuning: bool) -> None:
    """What a search had found was forgotten as soon as a kernel's text changed."""
    solver = Registry.default()["ConvDirectTiled"]
    options = FindOptions(only=("ConvDirectTiled",), tuning=tuning)
    valid, present, failed = list(solver.configs(PROBLEM, DEVICE))[123:126]
    gone = Config.of(no_such_parameter=1)

    def row(config: Config, sources: str = "ab", status: str = "ok") -> Row:
        return Row(
            solver_id=solver.id,
            solver_version=solver.version,
            source_hash=sources,
            config=config.json,
            status=status,
            time_ms=1.0 if status == "ok" else None,
        )

    with Handle(DEVICE, database=tmp_path / "finddb.db", strict=True) as handle:
        without = [p.candidate.config for p in make_plan(PROBLEM, options, handle).candidates]
        rows = [row(valid), row(gone), row(failed, status="wrong_result")]
        handle.database.record(DEVICE.identity, PROBLEM.network_config, rows)
        planned = make_plan(PROBLEM, options, handle)
        assert planned.refusals == {}
        assert {p.candidate.config for p in planned.candidates} - {*without} == {valid}
        handle.database.record(DEVICE.identity, PROBLEM.network_config, [row(present, solver_hash(solver))])
        afterwards = make_plan(PROBLEM, options, handle)
        assert [p.candidate.config for p in afterwards.candidates] == without, "the answer has newer measurements"


def test_candidates_are_what_a_search_is_likely_to_begin_with() -> None:
    planned = make_plan(PROBLEM, TILED, HANDLE)
    (space,) = planned.spaces
    configs = [p.candidate.config for p in planned.candidates]
    assert len(configs) == len(set(configs)) == SEARCH_LIMIT
    assert set(space.seeds) <= set(configs)


def test_what_is_left_out_has_a_reason() -> None:
    planned = make_plan(PROBLEM, TILED, HANDLE)
    gone = planned.candidates[0].candidate.id
    less = planned.without({gone: "for this test", "Other:{}": "unknown"})
    assert gone not in {p.candidate.id for p in less.candidates}
    assert len(less.candidates) == len(planned.candidates) - 1
    assert less.refusals == {**planned.refusals, gone: "for this test"}


class _Vast(ConvDirectTiled):
    """A solver with more points than are estimated."""

    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        name: tuple(range(20)) for name in ("a", "b", "c", "d", "e")
    }

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return bool(config["a"] != 0)


def test_solvers_whose_every_configuration_spoils_a_tile_are_not_asked_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ProblemDescription.convolution(x=(4, 16, 64, 64), w=(16, 16, 21, 21), padding=10)
    with Handle(Device.virtual("90a"), database=":memory:") as handle:
        allowed = make_plan(problem, FindOptions(max_error=1e-3, only=("fft",)), handle)
        assert "ConvFft" in {planned.solver.id for planned in allowed.candidates}
        monkeypatch.setattr(ConvFft, "default_configs", lambda *_: pytest.fail("it was asked"))
        plan = make_plan(problem, FindOptions(), handle)
        assert "ConvFft" not in {planned.solver.id for planned in plan.candidates}
        assert plan.refusals["ConvFft"].startswith("lets a large value spoil results")
        assert "ConvFft" in plan.considered


def test_of_a_vast_product_an_even_part_is_estimated_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MAX_ESTIMATED", 2000)
    configs = list(estimated_configs(PROBLEM, DEVICE, _Vast()))
    assert configs == list(estimated_configs(PROBLEM, DEVICE, _Vast()))
    assert len(configs) == len(set(configs))
    assert math.isclose(len(configs), 1900, rel_tol=0.05)
    for name in "abcde":
        values = {config[name] for config in configs}
        assert values == set(range(1 if name == "a" else 0, 20))


class _Sparse(_Vast):
    """One of which few points are valid."""

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return len({config[name] for name in "abcde"}) == 1

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return (Config(dict.fromkeys("abcde", 7)),)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return 1.0

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=())


class _Listed(_Sparse):
    """One whose configurations come from a list."""

    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {}

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        return (Config(dict.fromkeys("abcde", number)) for number in range(20))

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        """All are valid."""


@pytest.mark.parametrize(
    ("kind", "limit", "is_whole"), [(_Sparse, 2000, False), (_Listed, 10, False), (_Listed, 2000, True)]
)
def test_a_space_that_was_cut_is_not_whole_however_few_are_listed(
    monkeypatch: pytest.MonkeyPatch, kind: type[Solver], limit: int, is_whole: bool
) -> None:
    """What the random part of a vast product left valid was taken for all there is, and nothing was bred from it."""
    monkeypatch.setattr(plan_module, "MAX_ESTIMATED", limit)
    space = space_of(FindOptions(tuning=True), Handle(DEVICE, registry=Registry([kind()])))
    assert len(space.listed) <= EXHAUSTIVE
    assert space.is_whole is is_whole
