"""The public API on the CPU place: find, run, remember, forget, fall back, save and load."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.processes.forks import forked_by_a_thread

import miofind
from miofind.errors import (
    InvalidArrayError,
    InvalidOptionError,
    LaunchError,
    NoSolutionError,
    SolutionFileError,
    WorkspaceError,
)
from miofind.evaluate.evaluate import Job
from miofind.evaluate.executors import InProcess
from miofind.find import measuring
from miofind.find.immediate.answer import predicted
from miofind.find.lookup import records, validity
from miofind.finddb import Row, ties_of_best, usable_rows
from miofind.measure import effort
from miofind.reference.convolution import reference_on_host
from miofind.runtime.solution import Source, reordered
from miofind.solver.candidate import Candidate, Outcome
from miofind.solver.registry import Registry

pytestmark = pytest.mark.sampled(2)

PROBLEM = miofind.ProblemDescription.convolution(x=(2, 4, 9, 7), w=(6, 2, 3, 3), padding=1, stride=2, groups=2)
OTHER = miofind.ProblemDescription.convolution(x=(1, 3, 8, 8), w=(4, 3, 3, 3))


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[miofind.Handle]:
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as made:
        yield made


def operands(problem: miofind.ProblemDescription, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(problem.tensor(name).shape).astype(np.float32) for name in ("x", "w", "y")}


def leaders(handle: miofind.Handle, problem: miofind.ProblemDescription) -> set[str]:
    """Who may come first: what nothing that is recorded tells from the best."""
    held = handle.database.user.history(handle.device.identity, problem.network_config)
    assert held is not None
    return {row.candidate for row in ties_of_best(usable_rows(held.rows), held.verdicts)}


@pytest.mark.parametrize("direction", list(miofind.Direction))
def test_find_and_run_in_every_direction(handle: miofind.Handle, direction: miofind.Direction) -> None:
    problem = miofind.ProblemDescription.convolution(
        x=(2, 4, 9, 7), w=(6, 2, 3, 3), padding=1, stride=2, groups=2, direction=direction
    )
    given = operands(problem)
    expected = reference_on_host(problem, **given)
    named = {("dy" if n == "y" else n): given[n] for n in direction.inputs}
    solutions = miofind.find_solutions(problem, handle=handle)
    assert solutions[0].id in leaders(handle, problem)
    for solution in solutions:
        result = miofind.run_solution(solution, **named)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_convolution_in_one_call(handle: miofind.Handle) -> None:
    given = operands(PROBLEM)
    y = miofind.convolution(given["x"], given["w"], padding=1, stride=2, groups=2, handle=handle)
    np.testing.assert_allclose(y, reference_on_host(PROBLEM, **given), rtol=1e-4, atol=1e-4)


def test_finddb_answers_after_a_restart(
    handle: miofind.Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = miofind.find_solutions(PROBLEM, handle=handle)
    handle.close()
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as later:
        again = miofind.find_solutions(PROBLEM, handle=later)
    assert [s.id for s in again] == [s.id for s in first]
    assert {s.source for s in first} == {Source.MEASURED}
    assert {s.source for s in again} == {Source.FINDDB}


def test_on_miss_error_and_estimate(handle: miofind.Handle) -> None:
    with pytest.raises(NoSolutionError, match="miofind tune"):
        miofind.find_solutions(PROBLEM, options=miofind.FindOptions(on_miss="error"), handle=handle)
    predicted = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(on_miss="estimate"), handle=handle)
    assert {s.source for s in predicted} == {Source.PREDICTED}
    fast = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(find_mode="fast"), handle=handle)
    assert [s.id for s in fast] == [s.id for s in predicted]
    miofind.run_solution(predicted[0], *(operands(PROBLEM)[n] for n in ("x", "w")))


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    runs: list[int] = []
    real = InProcess.run
    monkeypatch.setattr(InProcess, "run", lambda self, job: runs.append(len(job.candidates)) or real(self, job))
    return runs


@pytest.mark.parametrize(
    ("options", "runs_on_hit"),
    [
        ({}, 0),
        ({"find_mode": "normal"}, 1),
        ({"find_mode": "fast"}, 0),
        ({"find_mode": "trust_verify"}, 1),
        ({"find_enforce": "db_update"}, 1),
        ({"find_enforce": "search"}, 1),
        ({"find_enforce": "search_db_update"}, 1),
        ({"find_enforce": "db_clean"}, 1),
        ({"deterministic": True}, 0),
        ({"strict_nonfinite": True}, 0),
        ({"workspace_limit_bytes": 1 << 40}, 0),
        ({"tuning": True}, 1),
    ],
    ids=lambda value: str(value),
)
def test_which_requests_measure_on_a_hit(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], runs_on_hit: int
) -> None:
    miofind.find_solutions(PROBLEM, handle=handle)
    monkeypatch.setattr(measuring, "TRUST_TOLERANCE", math.inf)  # on a busy machine it is slower now
    runs = count_runs(monkeypatch)
    assert miofind.find_solutions(PROBLEM, options=miofind.FindOptions(**options), handle=handle)
    assert min(len(runs), 1) == runs_on_hit, "a search may take rounds"


def test_strict_requests_leave_out_what_spreads_infinities(handle: miofind.Handle) -> None:
    lax = miofind.FindOptions(max_error=1.0)
    everything = {s.solver_id for s in miofind.find_solutions(PROBLEM, options=lax, handle=handle)}
    strict = replace(lax, strict_nonfinite=True)
    of_finddb = {s.solver_id for s in miofind.find_solutions(PROBLEM, options=strict, handle=handle)}
    assert everything - of_finddb == {"ConvCpuFft"}
    anew = replace(strict, find_mode="normal")
    assert {s.solver_id for s in miofind.find_solutions(PROBLEM, options=anew, handle=handle)} == of_finddb
    with pytest.raises(NoSolutionError, match="may spread an infinity"):
        miofind.find_solutions(PROBLEM, options=replace(anew, only=("fft",)), handle=handle)


LARGE_PIXEL = miofind.ProblemDescription.convolution(x=(2, 32, 12, 11), w=(16, 32, 3, 3), padding=1)


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_weights"])
@pytest.mark.parametrize("large", [1e6, 3e35])
def test_one_large_pixel_spoils_no_result_that_does_not_meet_it(
    handle: miofind.Handle, direction: str, large: float
) -> None:
    """An FFT's errors follow the largest value of the tile, and its bound was said to be direct summation's."""
    problem = replace(LARGE_PIXEL, direction=miofind.Direction(direction))
    first, second = problem.direction.inputs
    inputs = {name: operands(problem)[name] for name in (first, second)}
    image = "y" if direction == "backward_data" else "x"
    inputs[image][0, 5, -1, -1] = large
    sums = reference_on_host(problem, **inputs)
    squares = reference_on_host(problem, **{n: a.astype(np.float64) ** 2 for n, a in inputs.items()})
    bound = 8 * 2.0**-24 * np.sqrt(problem.reduction_length * squares) + 2.0**-24 * np.abs(sums)
    meets = np.abs(sums) > large * 1e-4
    given = {("dy" if name == "y" else name): array for name, array in inputs.items()}
    solutions = miofind.find_solutions(problem, handle=handle)
    assert len({s.solver_id for s in solutions}) >= 2
    for solution in solutions:
        errors = np.abs(miofind.run_solution(solution, **given) - sums)
        assert (errors <= bound)[~meets].all(), solution.id


@pytest.mark.parametrize("anew", [False, True], ids=["stored", "measured"])
def test_what_mixes_a_tile_answers_only_where_max_error_asks_for_it(handle: miofind.Handle, anew: bool) -> None:
    """Rows that a find with max_error stored stay, and a find without it passes them over."""
    lax, mode = miofind.FindOptions(max_error=1.0), "normal" if anew else "hybrid"
    assert "ConvCpuFft" in {s.solver_id for s in miofind.find_solutions(LARGE_PIXEL, options=lax, handle=handle)}
    default = miofind.FindOptions(find_mode=mode)
    found = {s.solver_id for s in miofind.find_solutions(LARGE_PIXEL, options=default, handle=handle)}
    assert "ConvCpuFft" not in found
    assert {"ConvCpuWinograd", "ConvCpuDirect"} <= found
    estimated = miofind.FindOptions(find_mode="fast", on_miss="estimate")
    for problem in (LARGE_PIXEL, replace(LARGE_PIXEL, direction=miofind.Direction.BACKWARD_DATA)):
        solutions = miofind.find_solutions(problem, options=estimated, handle=handle)
        assert "ConvCpuFft" not in {s.solver_id for s in solutions}
    with pytest.raises(NoSolutionError, match="lets a large value spoil results that do not meet it; set max_error"):
        miofind.find_solutions(LARGE_PIXEL, options=replace(default, only=("fft",)), handle=handle)


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_weights"])
@pytest.mark.parametrize(
    "fields",
    [
        {"padding": 10**6, "stride": 10**6 - 1},
        {"padding": 10**6, "dilation": 10**6},
        {"padding": ((10**6, 10**6), (1, 1)), "stride": (10**6, 1)},
    ],
    ids=["stride", "dilation", "one axis"],
)
def test_a_find_of_a_problem_with_vast_padding_takes_no_more_than_its_tensors(
    handle: miofind.Handle, fields: dict[str, object], direction: str
) -> None:
    """Every candidate failed: the reference laid the input out among 4e12 zeros."""
    problem = miofind.ProblemDescription.convolution(x=(16, 16, 6, 5), w=(16, 16, 3, 3), direction=direction, **fields)
    solutions = miofind.find_solutions(problem, options=miofind.FindOptions(max_error=1.0), handle=handle)
    assert {s.solver_id for s in solutions} >= {"ConvCpuDirect", "ConvCpuIm2colGemm"}
    given = {name: operands(problem)[name] for name in problem.direction.inputs}
    named = {("dy" if name == "y" else name): array for name, array in given.items()}
    wanted = reference_on_host(problem, **given)
    for solution in solutions:
        np.testing.assert_allclose(miofind.run_solution(solution, **named), wanted, atol=1e-4)


def test_process_cache_answers_without_the_finddb(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    first = miofind.find_solutions(PROBLEM, handle=handle)
    monkeypatch.setattr(records, "look_up", lambda *_, **__: pytest.fail("the FindDB was asked"))
    assert miofind.find_solutions(PROBLEM, handle=handle) == first


def test_a_new_measurement_voids_what_this_process_remembers(handle: miofind.Handle) -> None:
    """Answers cached under other options stayed, however old, after the problem was measured anew or cleaned."""
    fast = miofind.FindOptions(find_mode="fast")
    assert miofind.find_solutions(PROBLEM, options=fast, handle=handle)[0].source is Source.PREDICTED
    miofind.find_solutions(PROBLEM, handle=handle)
    assert miofind.find_solutions(PROBLEM, options=fast, handle=handle)[0].source is Source.FINDDB


def test_trust_verify_measures_the_answer_again_where_it_no_longer_holds(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded time that cannot be reached stayed in the FindDB, where the find planned other configurations."""
    monkeypatch.setattr(effort, "SHORT_MS", math.inf)  # a stall of the machine would have a candidate cut off
    miofind.find_solutions(PROBLEM, handle=handle)
    first, second = ('{"chunk_mib":128,"pixels_inner":true}', '{"chunk_mib":128,"pixels_inner":false}')
    rows = handle.database.answer(handle.device.identity, PROBLEM.network_config).rows  # type: ignore[union-attr]
    row = next(row for row in rows if row.solver_id == "ConvCpuIm2colGemm")
    unreachable = [
        replace(row, config=config, time_ms=time_ms, id="", created_at="")
        for config, time_ms in ((first, 1e-6), (second, 2e-6))
    ]
    handle.database.record(handle.device.identity, PROBLEM.network_config, unreachable)
    handle.forget()
    assert miofind.find_solutions(PROBLEM, handle=handle)[0].time_ms == 1e-6
    trusting = miofind.FindOptions(find_mode="trust_verify")
    solutions = miofind.find_solutions(PROBLEM, options=trusting, handle=handle)
    assert min(s.time_ms for s in solutions) > 2e-6, "what was behind it is measured, too"
    assert f"ConvCpuIm2colGemm:{first}" in {s.id for s in solutions}


def test_trust_verify_keeps_what_it_measured(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of another driver or library stays stale unless the verification counts."""
    best = miofind.find_solutions(PROBLEM, handle=handle)[0]
    handle.forget()
    monkeypatch.setattr(measuring, "TRUST_TOLERANCE", 1e9)
    miofind.find_solutions(PROBLEM, options=miofind.FindOptions(find_mode="trust_verify"), handle=handle)
    held = handle.database.user.history(handle.device.identity, PROBLEM.network_config)
    assert held is not None
    assert len([row for row in held.rows if row.candidate == best.id]) == 2


def test_threads_that_miss_measure_one_after_another_and_once(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two measurements at a time slow each other, and their times are remembered."""
    running, most, jobs = 0, 0, 0
    real = InProcess.run

    def run(self: InProcess, job: Job) -> Iterator[Outcome]:
        nonlocal running, most, jobs
        running, jobs = running + 1, jobs + 1
        most = max(most, running)
        yield from real(self, job)
        running -= 1

    monkeypatch.setattr(InProcess, "run", run)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: miofind.find_solutions(PROBLEM, handle=handle)[0].id, range(8)))
    assert (most, jobs) == (1, 1)
    assert len(set(found)) == 1


def test_a_forked_process_does_not_wait_for_its_parents_threads(handle: miofind.Handle) -> None:
    miofind.find_solutions(PROBLEM, handle=handle)

    with handle.measuring, handle.lock:
        assert forked_by_a_thread(lambda: miofind.find_solutions(OTHER, handle=handle)) == 0


def test_a_problem_of_another_type_is_refused(handle: miofind.Handle) -> None:
    with pytest.raises(InvalidOptionError, match="must be a ProblemDescription"):
        miofind.find_solutions("conv -n 1", handle=handle)  # type: ignore[arg-type]


def test_filtered_find_does_not_answer_for_all_solvers(handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    only = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(only="ConvCpuDirect"), handle=handle)
    assert {s.solver_id for s in only} == {"ConvCpuDirect"}
    runs = count_runs(monkeypatch)
    assert len({s.solver_id for s in miofind.find_solutions(PROBLEM, handle=handle)}) > 0
    assert len(runs) == 1


def test_workspace_limit_and_order(handle: miofind.Handle) -> None:
    every = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(order="workspace"), handle=handle)
    assert [s.workspace_bytes for s in every] == sorted(s.workspace_bytes for s in every)
    none = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(workspace_limit_bytes=0), handle=handle)
    assert {s.workspace_bytes for s in none} == {0}


def test_nothing_left_names_every_reason(handle: miofind.Handle) -> None:
    options = miofind.FindOptions(only="ConvCpuGemm1x1")
    with pytest.raises(NoSolutionError, match=r"ConvCpuGemm1x1: .*"):
        miofind.find_solutions(PROBLEM, options=options, handle=handle)


def test_a_solution_that_fails_falls_back_with_one_warning(
    handle: miofind.Handle, caplog: pytest.LogCaptureFixture
) -> None:
    given = operands(PROBLEM)
    options = miofind.FindOptions(only=("ConvCpuIm2colGemm", "ConvCpuDirect"), order="workspace")
    found = miofind.find_solutions(PROBLEM, options=options, handle=handle)
    solutions = reordered(found[::-1], handle)
    assert len(solutions) > 1
    invoker = solutions[0].runner.prepare()

    def fail(*_: object) -> None:
        raise LaunchError("broken for this test")

    invoker.run = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            y = miofind.run_solution(solutions[0], given["x"], given["w"])
    np.testing.assert_allclose(y, reference_on_host(PROBLEM, **given), rtol=1e-4, atol=1e-4)
    assert sum("broken for this test" in record.getMessage() for record in caplog.records) == 1


def test_run_refuses_wrong_operands(handle: miofind.Handle) -> None:
    solution = miofind.find_solutions(PROBLEM, handle=handle)[0]
    given = operands(PROBLEM)
    with pytest.raises(InvalidArrayError, match="a forward solution takes x and w; given: x"):
        miofind.run_solution(solution, given["x"])
    with pytest.raises(InvalidArrayError, match="given: x, w, dy"):
        miofind.run_solution(solution, given["x"], given["w"], dy=given["y"])
    with pytest.raises(InvalidArrayError, match="w has shape"):
        miofind.run_solution(solution, given["x"], given["x"])
    with pytest.raises(InvalidArrayError, match="out has dtype float64"):
        miofind.run_solution(solution, given["x"], given["w"], out=np.zeros(PROBLEM.y.shape))


def test_run_refuses_a_small_workspace(handle: miofind.Handle) -> None:
    options = miofind.FindOptions(only="ConvCpuIm2colGemm")
    solution = miofind.find_solutions(PROBLEM, options=options, handle=handle)[0]
    if not solution.workspace_bytes:
        pytest.fail("this test needs a solution with a workspace")
    given = operands(PROBLEM)
    with pytest.raises(WorkspaceError, match=f"the solution needs {solution.workspace_bytes}"):
        miofind.run_solution(solution, given["x"], given["w"], workspace=np.empty(1, np.uint8))


def test_save_and_load(handle: miofind.Handle, tmp_path: Path) -> None:
    solution = miofind.find_solutions(PROBLEM, handle=handle)[0]
    solution.save(tmp_path / "solution.json")
    with pytest.raises(InvalidOptionError, match="must be a Handle"):
        miofind.Solution.load(tmp_path / "solution.json", "cpu")  # type: ignore[arg-type]
    loaded = miofind.Solution.load(tmp_path / "solution.json", handle)
    given = operands(PROBLEM)
    assert loaded.id == solution.id
    expected = miofind.run_solution(solution, given["x"], given["w"])
    np.testing.assert_array_equal(miofind.run_solution(loaded, given["x"], given["w"]), expected)


def test_a_loaded_solution_says_where_its_time_comes_from(handle: miofind.Handle, tmp_path: Path) -> None:
    """It said "measured" whatever it was."""
    fast = miofind.FindOptions(find_mode="fast")
    options = (fast, miofind.FindOptions(), miofind.FindOptions(find_enforce="db_update"))
    for option in options:
        solution = miofind.find_solutions(PROBLEM, options=option, handle=handle)[0]
        replace(solution, contended=True, cut_off=True).save(tmp_path / "solution.json")
        loaded = miofind.Solution.load(tmp_path / "solution.json", handle)
        assert (loaded.source, loaded.samples) == (solution.source, solution.samples)
        assert loaded.contended
        assert loaded.cut_off
    assert miofind.find_solutions(PROBLEM, options=options[-1], handle=handle)[0].source is Source.MEASURED


def test_a_solution_shows_itself_in_a_line(handle: miofind.Handle) -> None:
    solution = next(s for s in miofind.find_solutions(PROBLEM, handle=handle) if s.workspace_bytes and s.config)
    text = repr(solution)
    assert text.startswith(f"<Solution {solution.solver_id} ")
    name, value = next(iter(solution.config.items()))
    assert f" {name}={str(value).lower()}" in text
    assert f" {solution.time_ms:.4g} ms (measured), {solution.workspace_bytes} bytes of workspace>" in text
    assert len(text) < 160


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: text.replace("miofind-solution", "other"), "is no saved solution"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "has version 99"),
        (lambda text: text.replace('"time_ms": ', '"time_ms": 1'), "do not match their hash"),
        (lambda text: text.replace('"arch": ""', '"arch": 7'), "arch is 7"),
        (lambda text: "[" * 10_000, "is not JSON"),
        (lambda text: "", "is not JSON"),
    ],
    ids=["truncated", "format", "version", "changed", "type", "nested", "empty"],
)
def test_damaged_solution_files(handle: miofind.Handle, tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "solution.json"
    miofind.find_solutions(PROBLEM, handle=handle)[0].save(path)
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.raises(SolutionFileError, match=message):
        miofind.Solution.load(path, handle)


def test_solution_of_another_architecture(handle: miofind.Handle, tmp_path: Path) -> None:
    path = tmp_path / "solution.json"
    miofind.find_solutions(PROBLEM, handle=handle)[0].save(path)
    document = json.loads(path.read_text())
    document["solution"]["arch"] = "90a"
    from miofind.runtime.solution_file import _digest

    document["sha256"] = _digest(document["solution"])
    path.write_text(json.dumps(document))
    with pytest.raises(SolutionFileError, match="was saved for sm_90a"):
        miofind.Solution.load(path, handle)


def test_saving_where_nothing_can_be_written(handle: miofind.Handle, tmp_path: Path) -> None:
    with pytest.raises(SolutionFileError, match="cannot be written"):
        miofind.find_solutions(PROBLEM, handle=handle)[0].save(tmp_path / "missing" / "solution.json")


def test_threads_find_and_run_different_problems(handle: miofind.Handle) -> None:
    def work(size: int) -> bool:
        problem = miofind.ProblemDescription.convolution(x=(1, 3, size, size), w=(4, 3, 3, 3))
        given = operands(problem, size)
        y = miofind.convolution(given["x"], given["w"], handle=handle)
        return bool(np.allclose(y, reference_on_host(problem, **given), rtol=1e-4, atol=1e-4))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, [5 + i % 6 for i in range(24)]))


def test_isolated_find(handle: miofind.Handle) -> None:
    solutions = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(isolate=True), handle=handle)
    assert {s.source for s in solutions} == {Source.MEASURED}


def recorded_failure(handle: miofind.Handle, status: str) -> str:
    """The id of one of a solver's candidates, after a find and a newer measurement in which it failed."""
    miofind.find_solutions(PROBLEM, handle=handle)
    solver = Registry.default()["ConvCpuIm2colGemm"]
    config, *others = solver.default_configs(PROBLEM, handle.device)
    assert others
    candidate = Candidate(network_config=PROBLEM.network_config, solver_id=solver.id, config=config)
    failed = Row(
        solver_id=solver.id,
        solver_version=solver.version,
        config=config.json,
        status=status,
        source_hash=validity.solver_hash(solver),
    )
    handle.database.record(handle.device.identity, PROBLEM.network_config, [failed])
    handle.forget()
    return candidate.id


@pytest.mark.parametrize("status", ["wrong_result", "crashed"])
def test_estimates_leave_out_what_failed_here(handle: miofind.Handle, status: str) -> None:
    failed = recorded_failure(handle, status)
    options = miofind.FindOptions(find_mode="fast", only=failed.split(":")[0])
    assert failed not in {s.id for s in predicted(PROBLEM, options, handle)}


def test_what_crashed_before_is_not_tried_again_in_this_process(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = recorded_failure(handle, "crashed")
    tried: list[str] = []
    real = InProcess.run
    monkeypatch.setattr(
        InProcess, "run", lambda self, job: tried.extend(c.id for c in job.candidates) or real(self, job)
    )
    solutions = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(find_mode="normal"), handle=handle)
    assert tried
    assert failed not in {*tried, *(s.id for s in solutions)}


def test_a_printed_solution_says_what_matters(handle: miofind.Handle) -> None:
    printed = str(miofind.find_solutions(PROBLEM, handle=handle)[0])
    assert len(printed) < 300
    assert " ms (measured), " in printed
    assert "bytes of workspace, error " in printed
