"""Solvers of other packages that raise: they are left out, and the find goes on with the others."""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import re
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.errors import NoSolutionError
from miofind.find import plan, recording, row_check
from miofind.finddb import ReleaseRules, Store, write_release
from miofind.finddb.validation import MAX_NAME_CHARS
from miofind.solver import registry as registry_module
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, ConvSolution
from miofind.suites import SuiteProblem
from miofind.tune.forecast import forecast
from miofind.tune.values import TuneOptions

pytestmark = pytest.mark.sampled(3)

PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
OTHER = miofind.ProblemDescription.convolution(x=(1, 4, 5, 6), w=(2, 4, 3, 3))
DIRECT = type(Registry.default()["ConvCpuDirect"])


def fails(*_: Any) -> Any:
    raise ValueError("told by the solver")


class _FailsWhenRun(DIRECT):  # type: ignore[valid-type, misc]
    def solution(self, *arguments: Any) -> ConvSolution:
        made = super().solution(*arguments)
        return replace(made, steps=tuple(replace(step, module=__name__, function="fails") for step in made.steps))


def broken(method: str) -> Solver:
    if method == "run":
        return type("Broken", (_FailsWhenRun,), {"id": "vendor/Broken"})()  # type: ignore[no-any-return]
    if method == "config":
        body = {"id": "vendor/Broken", "default_configs": lambda *_: [{"not": "a Config"}]}
        return type("Broken", (DIRECT,), body)()  # type: ignore[no-any-return]
    return type("Broken", (DIRECT,), {"id": "vendor/Broken", method: fails})()  # type: ignore[no-any-return]


def exits(*_: Any) -> Any:
    sys.exit("told by the solver")


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("told by nobody")

    __repr__ = __str__


class _Verbose(Exception):
    def __str__(self) -> str:
        return "told by the solver" * 5_000_000

    __repr__ = __str__


def _own_cause() -> Exception:
    """Two exceptions, each the other's cause and context."""
    first, second = ValueError("told by the solver"), ValueError("told before")
    first.__cause__ = first.__context__ = second
    second.__cause__ = second.__context__ = first
    return first


RAISED: dict[str, Callable[[], BaseException]] = {
    "exit": lambda: SystemExit(0),
    "generator exit": GeneratorExit,
    "a cancelled task": asyncio.CancelledError,
    "group": lambda: ExceptionGroup("told by the solver", [ValueError("one")]),
    "group of exits": lambda: BaseExceptionGroup("told by the solver", [SystemExit(3)]),
    "recursion": RecursionError,
    "memory": MemoryError,
    "its own cause": _own_cause,
    "cannot be shown": _Unspeakable,
    "a hundred megabytes": _Verbose,
}

METHODS = ("is_applicable", "default_configs", "solution", "estimate_ms", "is_exact", "check_config", "run", "config")


def before_ours(solver: Solver) -> Registry:
    """All solvers, that one asked first."""
    return Registry([solver, *Registry.default().values()])


@pytest.mark.parametrize("method", METHODS)
def test_others_are_found(tmp_path: Path, method: str) -> None:
    registry = before_ours(broken(method))
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as handle:
        found = miofind.find_solutions(PROBLEM, handle=handle)
    assert "ConvCpuDirect" in [solution.solver_id for solution in found]
    assert "vendor/Broken" not in [solution.solver_id for solution in found]


@pytest.mark.parametrize("method", METHODS)
def test_the_reason_is_told(tmp_path: Path, method: str) -> None:
    registry = Registry([broken(method)])
    with (
        miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as handle,
        pytest.raises(NoSolutionError, match=r"vendor/Broken.*(told by the solver|must be a Config)"),
    ):
        miofind.find_solutions(PROBLEM, handle=handle)


def raising(method: str, raised: Callable[[], BaseException]) -> Solver:
    """A solver of which a method, or a step, raises."""

    def fail(*_: Any) -> Any:
        raise raised()

    if method != "run":
        return type("Broken", (DIRECT,), {"id": "vendor/Broken", method: fail})()  # type: ignore[no-any-return]
    sys.modules["vendor_steps"] = module = types.ModuleType("vendor_steps")
    module.fail = fail  # type: ignore[attr-defined]

    def solution(self: Solver, *arguments: Any) -> ConvSolution:
        made = DIRECT.solution(self, *arguments)
        return replace(made, steps=tuple(replace(step, module="vendor_steps", function="fail") for step in made.steps))

    return type("Broken", (DIRECT,), {"id": "vendor/Broken", "solution": solution})()  # type: ignore[no-any-return]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED.keys())
@pytest.mark.parametrize(
    "method", ["is_applicable", "default_configs", "solution", "estimate_ms", "is_exact", "error_growth", "run"]
)
def test_whatever_a_solver_raises_is_its_own_failing(
    tmp_path: Path, method: str, raised: Callable[[], BaseException]
) -> None:
    """SystemExit ended the program; an exception that is its own cause kept it busy for good."""
    registry = before_ours(raising(method, raised))
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as handle:
        found = miofind.find_solutions(PROBLEM, handle=handle)
        assert "ConvCpuDirect" in [solution.solver_id for solution in found]
        assert "vendor/Broken" not in [solution.solver_id for solution in found]
        history = handle.database.user.history(handle.device.identity, PROBLEM.network_config)
        assert history is not None
        told = [row for row in history.rows if row.solver_id == "vendor/Broken"]
        assert all(not row.usable and 0 < len(row.message) <= 2000 for row in told)
        if method == "run":
            memory = isinstance(raised(), MemoryError)
            assert [row.status for row in told] == ["out_of_memory" if memory else "launch_failed"]


@pytest.mark.parametrize("method", ["estimate_ms", "is_valid_config", "solution"])
def test_a_solver_that_exits_in_a_search_ends_no_search(tmp_path: Path, method: str) -> None:
    registry = before_ours(raising(method, lambda: SystemExit(0)))
    asked = miofind.FindOptions(tuning=True, only=("vendor/Broken", "ConvCpuDirect"), trials=4)
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as handle:
        found = miofind.find_solutions(PROBLEM, options=asked, handle=handle)
    assert "ConvCpuDirect" in [solution.solver_id for solution in found]


def test_a_solution_whose_solver_exits_ends_no_program(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = type("Sound", (DIRECT,), {"id": "vendor/Broken"})()
    with miofind.Handle("cpu", database=known, strict=True, registry=before_ours(sound)) as handle:
        found = miofind.find_solutions(PROBLEM, handle=handle)
        assert found[0].solver_id == "vendor/Broken"
        monkeypatch.setattr(type(sound), "solution", exits, raising=False)
        x, w = np.ones(PROBLEM.x.shape, np.float32), np.ones(PROBLEM.w.shape, np.float32)
        assert (miofind.run_solution(found[0], x, w) == 36).all()


class _Stopped(Exception):
    """What a program's own handler of a signal raises."""


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise _Stopped


SIGNALS = {
    "Ctrl-C": (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
    "a handler that exits": (signal.SIGTERM, lambda *_: sys.exit(7), SystemExit),
    "a handler that raises": (signal.SIGUSR1, _stop, _Stopped),
}


@pytest.mark.parametrize(("number", "handler", "raised"), SIGNALS.values(), ids=SIGNALS.keys())
def test_what_a_signal_brings_is_no_failing_of_the_solver_it_meets(
    tmp_path: Path, number: int, handler: Any, raised: type[BaseException]
) -> None:
    def interrupted() -> BaseException:
        signal.raise_signal(number)
        return AssertionError("the signal did not come")

    registry = Registry.default().with_solvers(raising("run", interrupted))
    before = signal.signal(number, handler)
    try:
        with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as handle:
            with pytest.raises(raised):
                miofind.find_solutions(PROBLEM, handle=handle)
            history = handle.database.user.history(handle.device.identity, PROBLEM.network_config)
            assert history is None or "vendor/Broken" not in {row.solver_id for row in history.rows}
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("value", [None, "soon", math.nan, math.inf, -1.0, 1j], ids=repr)
@pytest.mark.parametrize("tuning", [False, True], ids=["defaults", "search"])
def test_an_estimate_is_a_time(value: Any, tuning: bool) -> None:
    body = {"id": "vendor/Broken", "estimate_ms": lambda *_: value}
    registry = before_ours(type("Broken", (DIRECT,), body)())
    asked = miofind.FindOptions(tuning=tuning, only=("vendor/Broken", "ConvCpuIm2colGemm"))
    made = plan.make_plan(PROBLEM, asked, miofind.Handle("cpu", registry=registry))
    assert {planned.solver.id for planned in made.candidates} == {"ConvCpuIm2colGemm"}
    assert f"estimate_ms={value!r} must be a finite number" in made.refusals["vendor/Broken"]


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A FindDB in which a sound vendor/Broken is the best."""
    sound = type("Sound", (DIRECT,), {"id": "vendor/Broken"})()
    registry = before_ours(sound)
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as handle:
        miofind.find_solutions(PROBLEM, handle=handle)
        key = handle.database.user.problems()[0]
        history = handle.database.user.history(key.device, key.network_config)
        assert history is not None
        best = next(row for row in history.rows if row.solver_id == "vendor/Broken")
        fast = replace(best, time_ms=1e-6, min_ms=None, p20_ms=None, p80_ms=None, created_at="", id="")
        handle.database.user.record(key.device, key.network_config, [fast])
    return tmp_path / "finddb.db"


def broken_later(method: str) -> Registry:
    return before_ours(type("Broken", (DIRECT,), {"id": "vendor/Broken", method: fails})())


LATER = (
    "is_applicable",
    "default_configs",
    "solution",
    "estimate_ms",
    "check_config",
    "workspace_bytes",
    "error_growth",
    "error_reach",
)


@pytest.mark.parametrize("method", LATER)
def test_what_is_known_is_used(known: Path, method: str) -> None:
    with miofind.Handle("cpu", database=known, strict=True, registry=broken_later(method)) as handle:
        asked = SuiteProblem(problem=PROBLEM, suite="", layer="", count=1)
        assert forecast([asked], [handle], TuneOptions()).known == 1
        found = miofind.find_solutions(PROBLEM, handle=handle)
    assert "ConvCpuDirect" in [solution.solver_id for solution in found]


@pytest.mark.parametrize("method", LATER)
def test_a_check_and_a_release_go_on(known: Path, method: str) -> None:
    registry = broken_later(method)
    fails_a_check = method in ("is_applicable", "solution", "check_config")
    shipping = row_check.Shipping(registry)
    with Store(known, read_only=True) as store:
        findings = store.check(row_check.RowCheck(registry))
        write_release([store], known.with_name("out.db"), ReleaseRules(keep=shipping, widen=shipping.with_refusals))
    assert bool(findings) is bool(shipping.findings) is fails_a_check
    assert all("vendor/Broken fails over it: ValueError('told by the solver')" in line for line in findings)
    with Store(known.with_name("out.db"), read_only=True) as shipped:
        assert "ConvCpuDirect" in {row.solver_id for _, row in shipped.rows()}


def with_workspace(size: Any) -> Solver:
    """A sound solver but for what it says of its workspace."""

    class Plan:
        bytes, regions, offsets = size, (), {}

    body = {"id": "vendor/Broken", "solution": lambda *a: replace(DIRECT.solution(*a), workspace=Plan())}
    return type("Broken", (DIRECT,), body)()  # type: ignore[no-any-return]


def with_configs(*configs: Config) -> Solver:
    body = {"id": "vendor/Broken", "default_configs": lambda *_: configs, "check_config": lambda *_: None}
    return type("Broken", (DIRECT,), body)()  # type: ignore[no-any-return]


LONG = Config.of(text="x" * 30_000)
UNRECORDABLE = {
    "workspace below zero": (with_workspace(-1), "workspace of -1 bytes"),
    "workspace beyond all memory": (with_workspace(2**70), r"workspace of 1180591620717411303424 bytes"),
    "workspace of many digits": (with_workspace(10**5000), r"workspace of 2\*\*16609 and more bytes"),
    "workspace as fraction": (with_workspace(1.5), r"workspace of 1.5 bytes \(of type float\)"),
    "workspace as text": (with_workspace("1"), "workspace of '1' bytes"),
    "no workspace": (with_workspace(None), "workspace of None bytes"),
    "long configuration": (with_configs(LONG), "takes 30011 characters of JSON"),
}


@pytest.mark.parametrize("tuning", [False, True], ids=["defaults", "search"])
@pytest.mark.parametrize(("item", "told"), UNRECORDABLE.values(), ids=UNRECORDABLE)
def test_what_cannot_be_recorded_of_one_costs_the_others_nothing(
    tmp_path: Path, caplog: Any, tuning: bool, item: Solver, told: str
) -> None:
    """It was measured, refused by the FindDB, and ended every find of the machine."""
    plan._tell_once.cache_clear()
    registry = before_ours(item)
    asked = miofind.FindOptions(tuning=tuning, trials=3 if tuning else None)
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as handle:
        for problem in (PROBLEM, OTHER):
            found = miofind.find_solutions(problem, options=asked, handle=handle)
            assert "vendor/Broken" not in [solution.solver_id for solution in found]
            assert "ConvCpu" in found[0].solver_id
            history = handle.database.user.history(handle.device.identity, problem.network_config)
            assert history is not None
            assert {row.solver_id for row in history.rows} >= {found[0].solver_id}
            assert len(history.scopes) >= 1
    assert len([record for record in caplog.records if "vendor/Broken" in record.getMessage()]) == 1
    assert re.search(told, caplog.text)


def test_of_a_solver_with_one_such_configuration_the_others_are_found(tmp_path: Path) -> None:
    registry = Registry([with_configs(LONG, Config())])
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=registry) as handle:
        assert [solution.id for solution in miofind.find_solutions(PROBLEM, handle=handle)] == ["vendor/Broken:{}"]


@pytest.mark.parametrize(
    "value", [math.nan, 10**5000, {"a": math.nan}, object(), {1: 2, "b": 3}], ids=lambda v: str(type(v))
)
def test_a_configuration_that_json_has_no_form_for_is_refused(value: Any) -> None:
    with pytest.raises(miofind.errors.InvalidConfigError, match="a config of 'tile' cannot be written as JSON"):
        Config.of(tile=value)


def test_a_configuration_without_end_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(miofind.errors.InvalidConfigError, match="cannot be written as JSON"):
        Config.of(tile=deep)


def test_an_outcome_that_cannot_be_recorded_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Whatever it is of: the last line of defence before the FindDB."""
    made = recording.row_of
    monkeypatch.setattr(
        recording,
        "row_of",
        lambda outcome, registry, fused: replace(
            made(outcome, registry, fused=fused), samples=-1 if outcome.candidate.solver_id == "ConvCpuDirect" else 1
        ),
    )
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        found = {solution.solver_id for solution in miofind.find_solutions(PROBLEM, handle=handle)}
    assert "ConvCpuIm2colGemm" in found
    assert "ConvCpuDirect" not in found
    assert "ConvCpuDirect:{} of" in caplog.text
    assert "samples=-1 cannot be stored" in caplog.text


SOUND = type("Sound", (DIRECT,), {"id": "vendor/Sound"})()


class _EntryPoint:
    def __init__(self, made: object) -> None:
        self.name, self._made = "theirs", made

    def load(self) -> object:
        return self._made


UNFIT = {
    "long": ({"id": "vendor/" + "x" * 200}, "at most 120 printable characters"),
    "line break": ({"id": "vendor/a\nb"}, "printable"),
    "surrogate": ({"id": "vendor/\ud800"}, "printable"),
    "turned": ({"id": "vendor/\u202ename"}, "printable"),
    "colon": ({"id": "vendor/a:{}"}, "colon"),
    "no vendor": ({"id": "name"}, "vendor/Name"),
    "number": ({"id": 7}, "vendor/Name"),
    "version as text": ({"id": "vendor/A", "version": "2"}, "version of vendor/A"),
    "version below zero": ({"id": "vendor/A", "version": -1}, "version of vendor/A"),
    "version without end": ({"id": "vendor/A", "version": 2**70}, "version of vendor/A"),
    "algorithm": ({"id": "vendor/A", "algorithm": "magic"}, "algorithm of vendor/A"),
    "no keys": ({"id": "vendor/A", "keys": ()}, "keys of vendor/A"),
    "other keys": ({"id": "vendor/A", "keys": ("cuda",)}, "keys of vendor/A"),
    "reach": ({"id": "vendor/A", "least_reach": "tile"}, "least_reach of vendor/A"),
    "failing reach": ({"id": "vendor/A", "least_reach": property(fails)}, "told by the solver"),
    "failing": ({"id": property(fails)}, "told by the solver"),
}


@pytest.mark.parametrize(("body", "told"), UNFIT.values(), ids=UNFIT)
def test_what_no_find_could_name_is_not_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, body: dict[str, Any], told: str
) -> None:
    entry = _EntryPoint(type("Unfit", (DIRECT,), body)())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry, _EntryPoint(SOUND)])
    assert list(registry_module._from_entry_points()) == [SOUND]
    (record,) = caplog.records
    assert "entry point theirs is left out" in record.getMessage()
    assert told in record.getMessage()


def test_an_id_fits_a_finddb() -> None:
    assert registry_module.MAX_ID_CHARS <= MAX_NAME_CHARS
