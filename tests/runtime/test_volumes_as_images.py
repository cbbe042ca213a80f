"""Volumes that are images: found, recorded and measured as those, run on arrays of volumes."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands.cli_runner import run, run_json

import miofind
from miofind.cli.coverage import _is_answered
from miofind.device.device import Device
from miofind.driver.line import driver_line
from miofind.errors import InvalidArrayError, LaunchError, NoSolutionError
from miofind.evaluate.executors import InProcess
from miofind.find.measuring import measure
from miofind.find.pipeline import looked_up
from miofind.launch.invoker import Invoker
from miofind.options import FindEnforce, FindMode, OnMiss
from miofind.reference.convolution import reference_on_host
from miofind.runtime.solution import Source
from miofind.solver.solver import Solver
from miofind.suites import SuiteProblem
from miofind.tune.forecast import forecast
from miofind.tune.service import tune
from miofind.tune.values import TuneOptions, TuneStatus

VOLUME = miofind.ProblemDescription.convolution(x=(2, 4, 3, 6, 5), w=(6, 4, 3, 1, 1), padding=(1, 0, 0))
SLICES = miofind.ProblemDescription.convolution(x=(2, 4, 3, 6, 5), w=(6, 4, 1, 3, 3), padding=(0, 1, 1), layout="NDHWC")
ONE_TAP_ALONE = miofind.FindOptions(only=("ConvCpuGemm1x1",))


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[miofind.Handle]:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with miofind.Handle("cpu", database=tmp_path / "found.db", strict=True) as made:
        yield made


@pytest.fixture
def images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No solver may be asked of volumes: many with kernels serve images alone."""
    checked = Solver.check_config

    def check_config(solver: Solver, problem: miofind.ProblemDescription, *given: Any) -> None:
        assert problem.flattened is problem
        checked(solver, problem, *given)

    monkeypatch.setattr(Solver, "check_config", check_config)


def array_of(problem: miofind.ProblemDescription, name: str, seed: int = 0) -> np.ndarray:
    """Random values, in the memory order of a problem's operand."""
    operand = next(each for each in problem.operands if each.name == name)
    values = np.random.default_rng([seed, *name.encode()]).standard_normal(operand.array.shape).astype(np.float32)
    if values.ndim < 3 or not operand.tensor.layout.channels_last:
        return values
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)


def given_for(problem: miofind.ProblemDescription) -> dict[str, np.ndarray]:
    """What a run reads, by the names of its arguments."""
    names = ((operand.name, array_of(problem, operand.name)) for operand in problem.inputs)
    backward = problem.direction is not miofind.Direction.FORWARD
    return {"dy" if name == "y" and backward else name: array for name, array in names}


@pytest.mark.usefixtures("images_alone")
@pytest.mark.parametrize("problem", [VOLUME, SLICES], ids=["temporal", "slices"])
@pytest.mark.parametrize("direction", list(miofind.Direction))
def test_each_solution_runs_on_arrays_of_volumes(
    problem: miofind.ProblemDescription, direction: miofind.Direction, handle: miofind.Handle
) -> None:
    problem = problem.in_direction(direction)
    given = given_for(problem)
    expected = reference_on_host(problem, **{name.removeprefix("d"): array for name, array in given.items()})
    solutions = miofind.find_solutions(problem, handle=handle)
    assert {solution.problem for solution in solutions} == {problem}
    for solution in solutions:
        result = miofind.run_solution(solution, **given)
        assert result.shape == problem.output.shape
        assert [each // 4 for each in result.strides] == list(problem.output.strides)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
        written = miofind.run_solution(solution, **given, out=np.full_like(result, np.nan))
        np.testing.assert_array_equal(written, result)


def test_what_is_measured_is_recorded_of_images_and_answers_for_them(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = miofind.find_solutions(VOLUME, handle=handle)
    assert found[0].solution_list.gaps.candidates >= len(found)
    assert {key.network_config for key in handle.database.user.problems()} == {VOLUME.flattened.network_config}
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    of_images = miofind.find_solutions(VOLUME.flattened, handle=handle)
    assert [each.id for each in of_images] == [each.id for each in found]
    assert {each.problem for each in of_images} == {VOLUME.flattened}
    with pytest.raises(InvalidArrayError, match="x has shape"):
        miofind.run_solution(of_images[0], **given_for(VOLUME))


def test_solutions_of_images_answer_for_volumes(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    of_images = miofind.find_solutions(SLICES.flattened, handle=handle)
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    found = miofind.find_solutions(SLICES, handle=handle)
    assert [each.id for each in found] == [each.id for each in of_images]
    assert {each.source for each in found} == {Source.FINDDB}
    assert found[0].ties_with_best == of_images[0].ties_with_best


def test_one_find_answers_volumes_and_their_images(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    measured_by = InProcess.run
    monkeypatch.setattr(InProcess, "run", lambda self, job: measured.append(job) or measured_by(self, job))
    problems = [VOLUME, VOLUME.flattened, SLICES, VOLUME]
    answers = miofind.find_many(problems, handle=handle)
    assert [{each.problem for each in answer} for answer in answers] == [{problem} for problem in problems]
    assert {job.network_config for job in measured} == {each.flattened.network_config for each in (VOLUME, SLICES)}
    kept = miofind.find_solutions(VOLUME, handle=handle)
    assert [each is other for each, other in zip(kept, answers[0], strict=True)] == [True] * len(kept)
    again = miofind.find_many(problems, handle=handle)
    assert again[0][0] is kept[0]


def test_volumes_and_their_images_are_measured_once(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    measured_by = InProcess.run
    monkeypatch.setattr(InProcess, "run", lambda self, job: measured.append(job) or measured_by(self, job))
    options = miofind.FindOptions(find_mode=FindMode.NORMAL, only=("ConvCpuDirect",))
    miofind.find_many([VOLUME, VOLUME.flattened], options=options, handle=handle)
    assert len(measured) == 1


def test_what_is_looked_up_and_what_ties_are_of_images(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    of_images = miofind.find_solutions(VOLUME.flattened, handle=handle)
    found = looked_up(VOLUME, miofind.FindOptions(), handle, queue=False)
    assert found is not None
    assert [each.id for each in found] == [each.id for each in of_images]
    asked: list[str] = []
    monkeypatch.setattr(type(handle.database), "histories", lambda *given: asked.append(given[-1]) or ())
    assert not found[0].ties_with_best
    assert asked == [VOLUME.flattened.network_config]


def test_many_are_answered_from_memory_whatever_becomes_of_the_rows(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = miofind.find_solutions(VOLUME, handle=handle)
    handle.database.clean(handle.device.identity, VOLUME.flattened.network_config)
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    assert miofind.find_many([VOLUME], handle=handle)[0][0] is found[0]


def test_rows_of_volumes_from_before_are_not_taken_for_answers(handle: miofind.Handle, tmp_path: Path) -> None:
    """A release that measured them as volumes left them, under keys that finds do not ask for."""
    measure(VOLUME, miofind.FindOptions(), handle)
    handle.database.queue_recheck(handle.device.identity, VOLUME.network_config, "stale")
    assert {key.network_config for key in handle.database.user.problems()} == {VOLUME.network_config}
    assert not is_answered(VOLUME, handle)
    here = ("--device", "cpu", "--db", str(tmp_path / "found.db"))
    for flag in ("--stored", "--recheck"):
        told = run("tune", flag, *here)
        assert f"what the FindDB has of {VOLUME} is left out: it is found as {VOLUME.flattened}" in told.stderr
    assert miofind.find_solutions(VOLUME, handle=handle)[0].source is Source.MEASURED
    assert is_answered(VOLUME, handle)


def is_answered(problem: miofind.ProblemDescription, handle: miofind.Handle) -> bool:
    return _is_answered(problem.network_config, handle)


def test_a_volume_without_a_solution_costs_itself_alone(handle: miofind.Handle) -> None:
    one_tap = miofind.ProblemDescription.convolution(x=(2, 4, 3, 6, 5), w=(6, 4, 1, 1, 1))
    none, some = miofind.find_many([VOLUME, one_tap], options=ONE_TAP_ALONE, handle=handle)
    assert none == []
    assert {each.problem for each in some} == {one_tap}
    with pytest.raises(NoSolutionError):
        miofind.find_solutions(VOLUME, options=ONE_TAP_ALONE, handle=handle)


def test_what_is_measured_of_images_is_new_to_their_volumes(handle: miofind.Handle) -> None:
    kept = miofind.find_solutions(VOLUME, handle=handle)[0]
    assert miofind.find_solutions(VOLUME, handle=handle)[0] is kept
    options = miofind.FindOptions(find_enforce=FindEnforce.DB_CLEAN)
    miofind.find_solutions(VOLUME.flattened, options=options, handle=handle)
    assert miofind.find_solutions(VOLUME, handle=handle)[0] is not kept


def test_a_call_with_an_epilogue(handle: miofind.Handle) -> None:
    random = np.random.default_rng(3)
    x, w = array_of(SLICES, "x"), array_of(SLICES, "w")
    bias = random.standard_normal(6).astype(np.float32)
    residual = array_of(SLICES, "y")
    plain = reference_on_host(SLICES, x=x, w=w)
    y = miofind.convolution(x, w, padding=(0, 1, 1), bias=bias, residual=residual, activation="relu", handle=handle)
    expected = np.maximum(plain + bias[:, None, None, None] + residual, 0)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    channel_bias = random.standard_normal((2, 6)).astype(np.float32)
    y = miofind.convolution(x, w, padding=(0, 1, 1), channel_bias=channel_bias, handle=handle)
    np.testing.assert_allclose(y, plain + channel_bias[:, :, None, None, None], rtol=1e-4, atol=1e-4)
    told = miofind.convolution(x, w, padding=(0, 1, 1), statistics=True, handle=handle)
    np.testing.assert_allclose(told.sum, plain.sum((0, 2, 3, 4)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("images_alone")
def test_it_is_packed_saved_and_loaded(handle: miofind.Handle, tmp_path: Path) -> None:
    problem = miofind.ProblemDescription.convolution(x=(2, 16, 1, 6, 5), w=(6, 16, 1, 3, 3), padding=(0, 1, 1))
    x, w = array_of(problem, "x"), array_of(problem, "w")
    packed_bytes = 0
    for place, solution in enumerate(miofind.find_solutions(problem, handle=handle)):
        expected = miofind.run_solution(solution, x, w)
        packed = solution.pack(w)
        packed_bytes += packed.packed_bytes
        np.testing.assert_array_equal(packed.run(x), expected)
        solution.save(tmp_path / f"{place}.json")
        loaded = miofind.Solution.load(tmp_path / f"{place}.json", handle)
        assert loaded.problem == problem
        np.testing.assert_array_equal(miofind.run_solution(loaded, x, w), expected)
    assert packed_bytes > 0


def test_solvers_are_asked_of_images_for_the_alignment(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """No solver of miofind has another for volumes; those of other packages may, and need not know volumes."""
    runner = miofind.find_solutions(VOLUME, handle=handle)[0].runner
    monkeypatch.setattr(Solver, "tensor_alignment", lambda _, problem: 16 if problem == VOLUME.flattened else 64)
    assert runner.alignment_bytes == 16


def test_it_falls_back_to_the_next(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = miofind.FindOptions(only=("ConvCpuIm2colGemm",))  # none of which needs more workspace than another
    first, second, *_ = miofind.find_solutions(VOLUME, options=options, handle=handle)
    launched = type(first.prepare().runner.prepare()).run

    def failing(self: Invoker, *given: Any) -> None:
        if (self.solver_id, self.config) == (first.solver_id, first.config):
            raise LaunchError("out of order")
        launched(self, *given)

    monkeypatch.setattr(type(first.runner.prepare()), "run", failing)
    given = given_for(VOLUME)
    with caplog.at_level(logging.WARNING):
        result = miofind.run_solution(first, **given)
    np.testing.assert_array_equal(result, miofind.run_solution(second, **given))
    assert str(VOLUME) in caplog.text


def test_a_prediction_knows_its_workspace_when_it_is_asked() -> None:
    with miofind.Handle(Device.virtual("90a"), database=":memory:") as handle:
        options = miofind.FindOptions(find_mode=FindMode.FAST)
        problem = miofind.ProblemDescription.convolution(
            x=(8, 64, 16, 56, 56), w=(64, 64, 1, 3, 3), padding=(0, 1, 1), dtype="float16", layout="NDHWC"
        )
        found = miofind.find_solutions(problem, options=options, handle=handle)
        of_images = miofind.find_solutions(problem.flattened, options=options, handle=handle)
        assert [each.id for each in found] == [each.id for each in of_images]
        assert [each.workspace_bytes for each in found] == [each.workspace_bytes for each in of_images]
        assert {each.confidence for each in found} == {each.confidence for each in of_images}
        assert found[0].problem == problem


def test_what_fails_on_a_miss_names_what_is_looked_up(handle: miofind.Handle) -> None:
    with pytest.raises(NoSolutionError, match=f"^{VOLUME} is found as images: .*{VOLUME.flattened}"):
        miofind.find_solutions(VOLUME, options=miofind.FindOptions(on_miss=OnMiss.ERROR), handle=handle)


def test_a_tuning_reports_of_volumes_and_records_images(handle: miofind.Handle) -> None:
    requests = [SuiteProblem(problem=each, suite="", layer=str(i), count=1) for i, each in enumerate((VOLUME, SLICES))]
    summary = tune(requests, [handle], TuneOptions())
    assert [result.request for result in summary.results] == requests
    assert {result.status for result in summary.results} == {TuneStatus.TUNED}
    recorded = {key.network_config for key in handle.database.user.problems()}
    assert recorded == {VOLUME.flattened.network_config, SLICES.flattened.network_config}
    again = tune(requests, [handle], TuneOptions())
    assert {result.status for result in again.results} == {TuneStatus.KNOWN}
    assert forecast(requests, [handle], TuneOptions()).known == 2


def test_volumes_are_rechecked_where_rows_of_their_images_are_stale(handle: miofind.Handle) -> None:
    request = SuiteProblem(problem=VOLUME, suite="", layer="", count=1)
    tune([request], [handle], TuneOptions())
    key = handle.device.identity, VOLUME.flattened.network_config
    history = handle.database.user.history(*key)
    assert history is not None
    stale = [replace(row, environment="", created_at="", id="") for row in history.rows]
    handle.database.record(*key, stale, environment={"driver": "an older one"})
    assert [result.request for result in tune([request], [handle], TuneOptions(recheck=True)).results] == [request]


@pytest.mark.usefixtures("images_alone")
def test_commands_tell_of_what_is_recorded_of_images(tmp_path: Path) -> None:
    line, here = driver_line(VOLUME), ("--db", str(tmp_path / "found.db"))
    run("run", line, "--verify", "--device", "cpu", *here)
    one = ("find", line, "--device", "cpu", "--only", "ConvCpuDirect", *here)
    (found,) = run_json(*one)["problems"]
    assert found["measured"] > len(found["solutions"]) == 1
    assert run(*one).stdout.endswith(f" {VOLUME.flattened.network_config}` lists them\n")
    (shown,) = run_json("db", "show", line, *here)["problems"]
    assert shown["network_config"] == VOLUME.flattened.network_config
    asked = ("--arch", "90a", "--only", "ConvDirectTiled")
    (of_volume,), (of_images,) = (
        run_json("solvers", driver_line(problem), *asked)["problems"] for problem in (VOLUME, VOLUME.flattened)
    )
    assert of_volume["solvers"] == of_images["solvers"]


@pytest.mark.parametrize(
    ("module", "name", "command"),
    [
        ("run", "failed_outcomes", ("run",)),
        ("run", "Timer", ("run",)),
        ("null_test", "null_test", ("db", "null-test", "--pairs", "1")),
    ],
)
def test_commands_compute_images(
    module: str, name: str, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIOFIND_DB", str(tmp_path / "found.db"))
    place = importlib.import_module(f"miofind.cli.{module}")
    asked: list[miofind.ProblemDescription] = []
    function = getattr(place, name)
    monkeypatch.setattr(place, name, lambda problem, *given: asked.append(problem) or function(problem, *given))
    run(*command, driver_line(VOLUME), "--device", "cpu", code=None)
    assert asked == [VOLUME.flattened]
