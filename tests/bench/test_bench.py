"""What a benchmark makes of its times: ratios, fractions of the floor, geometric means by class."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.cli_runner import run, use_own_folders

import miofind
import miofind.bench.comparison as module
from miofind import Handle, ProblemDescription
from miofind.bench.ceilings import Ceilings
from miofind.bench.comparison import BenchRow, bench, class_means
from miofind.compiler import CompilePool
from miofind.errors import NoSolutionError
from miofind.options import FindMode, FindOptions
from miofind.suites import SuiteProblem
from miofind.tune.precompiler import Precompiler

DEPTHWISE = ProblemDescription.convolution(x=(4, 8, 9, 9), w=(8, 1, 3, 3), groups=8)
POINTWISE = ProblemDescription.convolution(x=(4, 8, 9, 9), w=(8, 8, 1, 1))


def row(problem: ProblemDescription, time_ms: float | None, rival_ms: float | None, floor_ms: float = 1.0) -> BenchRow:
    entry = SuiteProblem(problem=problem, suite="a", layer="b", count=1)
    return BenchRow(entry=entry, time_ms=time_ms, rival_ms=rival_ms, floor_ms=floor_ms)


def test_a_ratio_above_one_says_that_miofind_is_faster() -> None:
    assert row(POINTWISE, 2.0, 3.0).ratio == 1.5
    assert row(POINTWISE, 2.0, 3.0).floor_fraction == 0.5


def test_no_ratio_without_both_times() -> None:
    assert row(POINTWISE, None, 3.0).ratio is None
    assert row(POINTWISE, 2.0, None).ratio is None


def test_means_are_geometric_by_class_and_over_all() -> None:
    rows = [row(DEPTHWISE, 1.0, 2.0), row(DEPTHWISE, 1.0, 8.0), row(POINTWISE, 2.0, 1.0)]
    means = {mean.name: mean for mean in class_means(rows)}
    assert list(means) == ["depthwise", "1x1", "all"]
    assert means["depthwise"].ratio == pytest.approx(4.0)
    assert means["depthwise"].least_ratio == 2.0
    assert means["all"].ratio == pytest.approx(math.prod([2.0, 8.0, 0.5]) ** (1 / 3))
    assert means["1x1"].floor_fraction == 0.5


def test_rows_that_failed_count_for_nothing() -> None:
    means = class_means([row(POINTWISE, None, None), row(POINTWISE, 1.0, 2.0)])
    assert [(mean.name, mean.count) for mean in means] == [("1x1", 1), ("all", 1)]


def test_one_problem_without_a_solution_does_not_end_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unsolved(problem: ProblemDescription, **_: Any) -> None:
        raise NoSolutionError(f"nothing for {problem}")

    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float32": 1e12})
    monkeypatch.setattr(module, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(module, "find_solutions", unsolved)
    entries = [SuiteProblem(problem=p, suite="a", layer="b", count=1) for p in (DEPTHWISE, POINTWISE)]
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        rows = bench(entries, handle, FindOptions())
    assert [r.message.startswith("nothing for conv2d") for r in rows] == [True, True]
    assert all(r.floor_ms is not None and r.time_ms is None for r in rows)


def test_what_the_finddb_lacks_is_measured_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An answer that a solver of this release did not take part in is none to compare with."""
    measured: list[bool] = []

    def refused(*_: Any, **__: Any) -> None:
        measured.append(True)
        raise NoSolutionError("nothing")

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError

    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float32": 1e12})
    monkeypatch.setattr(module, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(module, "measure", refused)
    monkeypatch.setattr(module, "Timer", broken)
    entry = SuiteProblem(problem=POINTWISE, suite="a", layer="b", count=1)
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        miofind.find_solutions(POINTWISE, options=FindOptions(exclude="ConvCpuDirect"), handle=handle)
        (row,) = bench([entry], handle, FindOptions())
        assert (measured, row.message) == ([True], "nothing")
        miofind.find_solutions(POINTWISE, options=FindOptions(find_mode=FindMode.NORMAL), handle=handle)
        (row,) = bench([entry], handle, FindOptions())
    assert (measured, row.message) == ([True], "MemoryError()"), "what fails later has its message, too"


def test_all_are_found_before_one_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler works beside what is timed."""
    events: list[str] = []

    class Pool(CompilePool):
        def close(self) -> None:
            events.append("closed")
            super().close()

    def broken(*_: Any, **__: Any) -> None:
        events.append("timed")
        raise MemoryError

    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float32": 1e12})
    monkeypatch.setattr(module, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(module, "Timer", broken)
    entries = [SuiteProblem(problem=p, suite="a", layer="b", count=1) for p in (DEPTHWISE, POINTWISE)]
    with Handle("cpu", database=tmp_path / "finddb.db") as handle, Pool(workers=1) as pool:
        rows = bench(
            entries,
            handle,
            FindOptions(),
            pool=pool,
            on_found=lambda: events.append("found"),
            on_row=lambda row: events.append("row"),
        )
    assert events == ["found", "found", "closed", "timed", "row", "timed", "row", "closed"]
    assert [row.solution is not None for row in rows] == [True, True]


def test_volumes_are_measured_and_compiled_ahead_as_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    volumes = [ProblemDescription.convolution(x=(4, 8, 3, 9, 9), w=(k, 8, 3, 1, 1)) for k in (4, 8)]
    prepared: list[ProblemDescription] = []
    measured: list[ProblemDescription] = []

    def refused(problem: ProblemDescription, *_: Any, **__: Any) -> None:
        measured.append(problem)
        raise NoSolutionError("nothing")

    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float32": 1e12})
    monkeypatch.setattr(module, "measure", refused)
    monkeypatch.setattr(Precompiler, "prepare", lambda _, problems, handle: prepared.extend(problems))
    entries = [SuiteProblem(problem=volume, suite="a", layer="b", count=1) for volume in volumes]
    with Handle("cpu", database=tmp_path / "finddb.db") as handle, CompilePool(workers=1) as pool:
        bench(entries, handle, FindOptions(), pool=pool, ceilings=ceilings)
    assert measured == [volume.flattened for volume in volumes]
    assert prepared == measured[1:]


def test_the_command_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_own_folders(tmp_path, monkeypatch)
    assert "bench needs a GPU" in run("bench", "--suite", "vgg16", "--device", "cpu", code=3).stderr


def test_kept_results_name_gpu_versions_commit_and_command() -> None:
    kept = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
    assert kept
    for path in kept:
        figures = json.loads(path.read_text())
        assert {"gpu", "versions", "commit", "command"} <= figures.keys(), path.name
