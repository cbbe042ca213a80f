"""A network is tuned as a whole: every convolution of its step, once each, and the override runs what was found."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.immediate_models import H200
from torch import nn

import miofind.torch
from miofind import FindOptions, Handle, ProblemDescription, Solution, find_solutions
from miofind.bench.comparison import BenchRow
from miofind.bench.rivals import Rival
from miofind.compiler import BinaryCache, CompilePool, Compiler
from miofind.errors import InvalidOptionError
from miofind.find import likely
from miofind.find.immediate.devices import described
from miofind.finddb import MEMORY
from miofind.suites import SuiteProblem
from miofind.torch.override import comparisons
from miofind.torch.override.dispatcher import native_kernels
from miofind.torch.override.flags import Flags, state
from miofind.torch.recording.recording import Recording
from miofind.torch.tuning import tuning
from miofind.torch.tuning.report import TunedProblem, TuningReport
from miofind.torch.tuning.tuning import _switches_kept
from miofind.tune.service import TuneOptions, TuneStatus
from miofind.tune.service import tune as tune_problems


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with Handle("cpu", database=tmp_path_factory.mktemp("tuning") / "finddb.db") as made:
        yield made


def _gain(solution: Solution, handle: Handle) -> float | None:
    known = comparisons.compared(solution, handle, Flags.of(state(), on_gpu=False), FindOptions())
    return None if known is None else known.gain(solution)


@pytest.fixture(scope="module")
def model() -> Any:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1, bias=False), nn.Conv2d(2, 3, 1))


@pytest.fixture(scope="module")
def tuned(model: Any, handle: Handle) -> TuningReport:
    return miofind.torch.tune(model, (1, 2, 3, 3), training=True, handle=handle, options=FindOptions())


def test_every_problem_of_a_step_is_found_once(tuned: TuningReport, model: Any, handle: Handle) -> None:
    rows = [(row.layers, row.problem.direction, row.count) for row in tuned.rows]
    assert rows == [
        (("0", "2"), "forward", 2),
        (("1",), "forward", 1),
        (("2",), "backward_data", 1),
        (("2", "0"), "backward_weights", 2),
        (("1",), "backward_data", 1),
        (("1",), "backward_weights", 1),
    ]
    assert {row.source for row in tuned.rows} == {"tuned"}
    assert tuned.is_complete
    again = miofind.torch.tune(model, (1, 2, 3, 3), training=True, handle=handle, options=FindOptions())
    assert {row.source for row in again.rows} == {"known"}
    assert [row.solver_id for row in again.rows] == [row.solver_id for row in tuned.rows]


def test_the_override_runs_what_was_found(tuned: TuningReport, model: Any, handle: Handle) -> None:
    with miofind.torch.use("fallback", handle=handle, devices="cpu") as override:
        model(torch.randn(1, 2, 3, 3)).sum().backward()
        counts = {(count.problem, count.solver_id) for count in override.report().counts}
    model.zero_grad()
    assert counts == {(row.problem, row.solver_id) for row in tuned.rows}


def test_the_report_on_the_cpu_place_has_no_comparison(tuned: TuningReport) -> None:
    text = str(tuned)
    assert "miofind ms" in text
    assert "PyTorch ms" not in text
    assert "0 (+1)" in text
    read = json.loads(json.dumps(tuned.to_json()))
    assert read["gain"] is None
    assert [ProblemDescription.from_network_config(row["problem"]) for row in read["problems"]] == [
        row.problem for row in tuned.rows
    ]


def test_a_step_gains_where_the_faster_side_runs_each_layer() -> None:
    problem = ProblemDescription.convolution(x=(1, 2, 3, 3), w=(3, 2, 1, 1))
    common = {"problem": problem, "solver_id": "ConvX", "source": "tuned"}
    rows = (
        TunedProblem(layers=("fast",), count=3, own_ms=1.0, torch_ms=2.0, **common),
        TunedProblem(layers=("slow",), count=1, own_ms=4.0, torch_ms=2.0, **common),
        TunedProblem(layers=("none",), count=1, problem=problem, torch_ms=1.0, source="failed", message="no\nway"),
    )
    report = TuningReport(network="net", device="GPU", rows=rows, left_out=(), seconds=1.0)
    assert (report.torch_ms, report.own_ms, report.gain) == (9.0, 6.0, 1.5)
    assert "1.50 times as fast" in str(report)
    assert "failed: none: no" in str(report)
    assert "2.00x" in str(report)


def test_a_report_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 140 columns wide whatever COLUMNS said."""
    problem = ProblemDescription.convolution(x=(32, 256, 56, 56), w=(256, 256, 3, 3), padding=1, dtype="float16")
    solver = {"solver_id": "ConvImplicitGemmWgmma+Pointwise", "source": "tuned", "own_ms": 1.0, "torch_ms": 2.0}
    row = TunedProblem(layers=("backbone.layer1.0.conv1", "other"), problem=problem, count=3, **solver)
    report = TuningReport(network="net", device="GPU", rows=(row,), left_out=(), seconds=1.0)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(report).splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "160")
    assert "backbone.layer1.0.conv1 (+1)  n32 256x56x56 > 256, 3x3 p1 float16 NCHW  fwd" in str(report)


def test_both_sides_have_the_times_of_the_comparison(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU: each problem's solution beside PyTorch, whose failure leaves the find's time."""
    with miofind.torch.record() as recording:
        nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 1, 1))(torch.randn(1, 2, 3, 3))
    timed = iter([(0.5, 2.0, ""), (None, None, "torch: out of memory")])
    limits = []

    def row(entry: SuiteProblem, handle: Handle, options: FindOptions, *given: Any, against: Any) -> BenchRow:
        assert against == (Rival.TORCH,)
        limits.append(options.workspace_limit_bytes)
        time_ms, rival_ms, message = next(timed)
        solution = find_solutions(entry.problem, options=options, handle=handle)[-1]
        return BenchRow(entry=entry, solution=solution, time_ms=time_ms, rival_ms=rival_ms, message=message)

    monkeypatch.setattr(tuning, "bench_row", row)
    options = FindOptions()
    summary = tune_problems(recording.problems, [handle], TuneOptions(find=options))
    found = tuning._rows(recording, summary)
    with miofind.torch.use("fallback", handle=handle, devices="cpu", workspace_limit_bytes=1 << 20):
        runnable = tuning._as_it_runs(options, handle.device.place)
    first, second = tuning._compared(found, summary, handle, runnable)
    assert limits == [1 << 20] * 2, "what the override may run"
    assert tuning._as_it_runs(replace(options, workspace_limit_bytes=7), handle.device.place).workspace_limit_bytes == 7
    with miofind.torch.use("fallback", handle=handle, devices="cpu", exclude="direct", only="ConvCpuFft"):
        limited = tuning._as_it_runs(replace(options, exclude="winograd"), handle.device.place)
    assert (limited.only, limited.exclude) == (("convcpufft",), ("direct", "winograd"))
    assert (first.own_ms, first.torch_ms, first.gain) == (0.5, 2.0, 4.0)
    ran, fastest = (summary.results[0].solutions[i] for i in (-1, 0))
    assert (first.solver_id, found[0].solver_id) == (ran.solver_id, fastest.solver_id)
    assert _gain(ran, handle) == pytest.approx(4.0)
    assert (second.own_ms, second.torch_ms, second.message) == (found[1].own_ms, None, "torch: out of memory")
    assert _gain(summary.results[1].solutions[0], handle) is None
    handle.database.clean(handle.device.identity, first.problem.network_config)


def test_pytorch_runs_what_it_was_measured_to_be_faster_at(tuned: TuningReport, model: Any, handle: Handle) -> None:
    def reasons(**settings: Any) -> dict[str, int]:
        with miofind.torch.use("fallback", handle=handle, devices="cpu", **settings) as override:
            model(torch.randn(1, 2, 3, 3))
            return override.report().reasons

    first, second = [row for row in tuned.rows if row.problem.direction == "forward"]
    for row, gain in ((first, 0.5), (second, 1.2)):  # the first with its bias: of two layers
        found = find_solutions(row.problem, options=FindOptions(), handle=handle)[0]
        comparisons.note(found, handle, Flags.of(state(), on_gpu=False), 1.0, gain)
    (told,) = reasons().items()
    assert told[0].startswith(
        f"PyTorch's own kernel is 2.00 times as fast as {first.solver_id.partition('+')[0]}, measured 20"
    )
    assert told[1] == 2
    behind = reasons(min_gain=1.5)
    assert sum(behind.values()) == 3
    assert {reason.partition("; ")[2] for reason in behind} == {"min_gain is 1.5"}
    assert reasons(min_gain=0.4) == {}


def test_volumes_are_recorded_as_images_and_compared_as_volumes(tmp_path: Path) -> None:
    """PyTorch runs another kernel for images: whether it is faster at volumes says nothing of them."""
    network, images = nn.Conv3d(2, 3, (3, 1, 1), bias=False), nn.Conv2d(2, 3, (3, 1), bias=False)
    volumes = torch.randn(1, 2, 5, 3, 4)
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        report = miofind.torch.tune(network, volumes, training=True, handle=handle, options=FindOptions())
        assert {row.problem.spatial_dims for row in report.rows} == {3}
        recorded = {key.network_config for key in handle.database.user.problems()}
        assert recorded == {row.problem.flattened.network_config for row in report.rows}
        forward = next(row.problem for row in report.rows if row.problem.direction == "forward")
        with miofind.torch.use("fallback", handle=handle, devices="cpu") as override, torch.no_grad():
            y = network(volumes)
            torch.testing.assert_close(y, network.cpu().double()(volumes.double()).float())
            network.float()
            assert [count.problem for count in override.report().counts if count.solver_id] == [forward]
        best = find_solutions(forward, options=FindOptions(), handle=handle)[0]
        comparisons.note(best, handle, Flags.of(state(), on_gpu=False), 1.0, 0.5)
        assert _gain(best, handle) == pytest.approx(0.5)
        with miofind.torch.use("fallback", handle=handle, devices="cpu") as override, torch.no_grad():
            network(volumes)
            (reason,) = override.report().reasons
            assert reason.startswith("PyTorch's own kernel is 2.00 times as fast")
            images(volumes.reshape(1, 2, 5, 12))
            assert override.report().own_calls == 1
        again = FindOptions(find_enforce="db_clean")
        assert _gain(find_solutions(forward, options=again, handle=handle)[0], handle) is None
        comparisons.note(best, handle, Flags.of(state(), on_gpu=False), 1.0, 0.5)
        assert _gain(miofind.find_many([forward], options=again, handle=handle)[0][0], handle) is None


def test_a_recording_is_tuned_and_takes_no_inputs(handle: Handle) -> None:
    with miofind.torch.record() as recording:
        nn.Conv1d(2, 2, 1)(torch.randn(1, 2, 4))
    report = miofind.torch.tune(recording, handle=handle, options=FindOptions())
    assert [row.layers for row in report.rows] == [("Conv1d",)]
    with pytest.raises(InvalidOptionError, match="training=True"):
        miofind.torch.tune(recording, training=True, handle=handle)


def test_progress_is_told(model: Any, handle: Handle, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    told: list[Any] = []
    miofind.torch.tune(model[:1], (1, 2, 3, 3), handle=handle, options=FindOptions(), on_event=told.append)
    assert [type(event).__name__ for event in told] == ["TuneBegan", "TuneStarted", "TuneFinished"]
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    miofind.torch.tune(model[:1], (1, 2, 3, 3), handle=handle, options=FindOptions())
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "100%" in printed.err


def test_the_comparison_leaves_pytorch_s_switches() -> None:
    backends = torch.backends

    def switches() -> list[Any]:
        places = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)
        return [backends.cudnn.benchmark, backends.cudnn.benchmark_limit, *(place.fp32_precision for place in places)]

    before = switches()
    with _switches_kept():
        backends.cudnn.benchmark, backends.cudnn.benchmark_limit = True, 0
        backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = False
    assert switches() == before
    backends.cudnn.conv.fp32_precision = "ieee"  # by itself: the old interface cannot be read any more
    try:
        changed = switches()
        with _switches_kept():
            backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = True
        assert switches() == changed
    finally:
        backends.cudnn.conv.fp32_precision = before[2]


def test_the_override_stands_back_for_the_comparison(handle: Handle, tmp_path: Path) -> None:
    x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as override:
        with native_kernels():
            torch.conv2d(x, w)
        assert override.plans == ()
        torch.conv2d(x, w)
        assert override.report().own_calls == 1


def test_the_likeliest_are_measured_unless_more_is_asked_for(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likely, "FIRST", 1)
    monkeypatch.setattr(likely, "MOST", 1)
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        report = miofind.torch.tune(model[:1], (1, 2, 5, 3), handle=handle)
        assert {row.source for row in report.rows} == {"tuned"}
        (history,) = handle.database.histories(handle.device.identity, report.rows[0].problem.network_config)
        assert {scope.effort for scope in history.scopes} == {"likely"}
        with miofind.torch.use("fallback", handle=handle, devices="cpu") as override:
            model[:1](torch.randn(1, 2, 5, 3))
            assert override.report().own_calls == 1
        assert {row.source for row in miofind.torch.tune(model[:1], (1, 2, 5, 3), handle=handle).rows} == {"known"}
        errors = FindOptions(on_miss="error")
        assert find_solutions(report.rows[0].problem, options=errors, handle=handle), "one without a limit, too"
        whole = miofind.torch.tune(model[:1], (1, 2, 5, 3), handle=handle, options=FindOptions())
        assert {row.source for row in whole.rows} == {"tuned"}


def test_what_pytorch_was_faster_at_is_found_among_all(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likely, "FIRST", 1)
    monkeypatch.setattr(likely, "MOST", 1)
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        recording = miofind.torch.problems(model, (1, 2, 5, 3), device="cpu")
        options, told = FindOptions(likely=True), []
        summary = tune_problems(recording.problems, [handle], TuneOptions(find=options))
        rows = [replace(row, torch_ms=2 * row.own_ms) for row in tuning._rows(recording, summary) if row.own_ms]
        assert tuning._found_again(rows, recording, handle, options, None, None) is None, "it is faster at all"
        rows[1] = replace(rows[1], torch_ms=rows[1].own_ms / 2)
        assert tuning._found_again(rows, recording, handle, FindOptions(), None, None) is None, "all were measured"
        again = tuning._found_again(rows, recording, handle, options, told.append, None)
        assert again is not None
        assert told
        assert [result.request.problem for result in again.results] == [rows[1].problem]
        for row, effort in zip(rows, ("likely", "defaults"), strict=True):
            (history,) = handle.database.histories(handle.device.identity, row.problem.network_config)
            assert effort in {scope.effort for scope in history.scopes}

        asked: list[Any] = []

        def compared(some: Any, summary: Any, handle: Handle, options: FindOptions) -> list[Any]:
            asked.append(options.likely)
            return [replace(row, torch_ms=7.0) for row in some]

        monkeypatch.setattr(tuning, "_compared", compared)
        found = tuning._replaced(rows, recording, again, handle, options)
        assert [row.torch_ms == 7.0 for row in found] == [False, True]
        assert found[0] is rows[0]
        failed = replace(again, results=tuple(replace(result, solutions=()) for result in again.results))
        assert tuning._replaced(rows, recording, failed, handle, options) == rows, "the answer of before stands"
    assert asked == [False, False]


def test_what_was_known_is_compiled_for_the_step_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(tmp_path))
    problem = ProblemDescription.convolution(
        x=(1, 144, 56, 56),
        w=(144, 1, 3, 3),
        padding=1,
        groups=144,
        dtype="float16",
        layout="NHWC",
        epilogue="bias.clamp",
    )
    request = SuiteProblem(problem=problem, suite="one", layer="layer", count=1)
    with Handle(described(H200.identity), database=MEMORY) as handle, CompilePool() as pool:
        summary = tuning._found([request], handle, FindOptions(likely=True), None, pool)
        (result,) = summary.results
        steps = tuning._kernels(result, handle)
        assert result.status is TuneStatus.KNOWN, "it is shipped"
        assert steps
        assert all(Compiler(BinaryCache()).is_at_hand(step, handle.device) for step in steps)
        solver = type(handle.registry.named(result.solutions[0].solver_id))
        monkeypatch.setattr(solver, "kept_solution", lambda *_: pytest.fail("a solver's own failure"))
        assert tuning._kernels(result, handle) == (), "the step that needs it says so"


def test_the_direct_path_is_built_by_a_process_that_may_outlive_the_tuning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[Any] = []

    def popen(command: list[str], **keywords: Any) -> Any:
        if begun:
            raise OSError("no process can be had")
        begun.append((command, keywords["start_new_session"]))
        return command

    monkeypatch.delenv("MIOFIND_TORCH_DIRECT", raising=False)
    monkeypatch.setattr(tuning, "direct_path", lambda: None)
    monkeypatch.setattr(tuning, "_building", [])
    monkeypatch.setattr(tuning.subprocess, "Popen", popen)
    tuning._begin_to_build()
    assert begun == [([sys.executable, "-c", "import miofind.torch; miofind.torch.build()"], True)]
    with caplog.at_level("INFO"):
        tuning._begin_to_build()
    assert "will go through Python: no process can be had" in caplog.text
    monkeypatch.setenv("MIOFIND_TORCH_DIRECT", "0")
    tuning._begin_to_build()
    monkeypatch.setattr(tuning, "direct_path", lambda: object())
    tuning._begin_to_build()
    assert len(begun) == 1


def test_what_takes_long_to_start_is_started_first_and_ends_with_the_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Executor:
        def prepare(self) -> None:
            told.append("measuring starts")

        def close(self) -> None:
            told.append("measuring ends")

    class Pool(CompilePool):
        def start(self, most: int) -> None:
            told.append("compiling starts")

        def submit(self, steps: Any, arch: str) -> int:
            told.append(f"{sum('backward' in step.entry for step in steps) > 0} gradients are to be checked")
            return 0

        def close(self) -> None:
            super().close()
            told.append("compiling ends")

    monkeypatch.setattr(Handle, "executor", lambda self, *, isolate: Executor())
    monkeypatch.setattr(tuning, "CompilePool", Pool)
    monkeypatch.setattr(tuning, "_begin_to_build", lambda: None)

    def recorded(*_: object, **__: object) -> Any:
        told.append("the network is followed")
        assert gc.get_freeze_count() > 10_000
        raise KeyError("whatever a tuning meets")

    monkeypatch.setattr(tuning, "problems", recorded)
    with Handle(described(H200.identity), database=MEMORY) as handle, pytest.raises(KeyError):
        tuning.tune(nn.Linear(1, 1), (1, 1), handle=handle)
    began = ["compiling starts", "measuring starts", "False gradients are to be checked", "the network is followed"]
    assert told == [*began, "measuring ends", "compiling ends"]
    told.clear()
    with Handle(described(H200.identity), database=MEMORY) as handle, pytest.raises(KeyError):
        tuning.tune(nn.Linear(1, 1), (1, 1), handle=handle, training=True)
    assert "True gradients are to be checked" in told
    told.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "has_cupy", lambda: True)
    monkeypatch.setattr(tuning, "default_handle", lambda: told.append("the device is looked at") or Handle("cpu"))
    with pytest.raises(KeyError):
        tuning.tune(nn.Linear(1, 1), (1, 1))
    assert told[:2] == ["compiling starts", "the device is looked at"]
    told.clear()
    with Handle("cpu", database=MEMORY) as handle, pytest.raises(KeyError):
        tuning.tune(nn.Linear(1, 1), (1, 1), handle=handle)
    assert told == ["the network is followed"]


def test_what_following_a_network_loads_is_left_out_of_searches_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch imports half of itself for it: a search among that took 0.2 s of the finds."""

    class Loaded:
        """Garbage is looked for among its like."""

    loaded = list[Loaded]()

    def recorded(*_: object, **__: object) -> Recording:
        loaded.append(Loaded())
        assert any(each is loaded[0] for each in gc.get_objects())
        return Recording("network")

    def found(*_: object) -> Any:
        assert not any(each is loaded[0] for each in gc.get_objects())
        raise KeyError("whatever a tuning meets")

    monkeypatch.setattr(tuning, "problems", recorded)
    monkeypatch.setattr(tuning, "_found", found)
    gc.unfreeze()  # what another test froze
    with Handle("cpu", database=MEMORY) as handle, pytest.raises(KeyError):
        tuning.tune(nn.Linear(1, 1), (1, 1), handle=handle)
    assert any(each is loaded[0] for each in gc.get_objects())


@pytest.mark.parametrize(
    ("dtype", "amp", "wanted"),
    [
        (torch.float16, None, "float16"),
        (torch.float32, None, "float32"),
        (torch.float32, "bf16", "bfloat16"),
        (torch.float32, 3, ""),
    ],
    ids=str,
)
def test_what_checks_any_convolution_is_compiled_before_there_is_one(dtype: Any, amp: Any, wanted: str) -> None:
    """It is of the element type that they will have."""
    with Handle(described(H200.identity), database=MEMORY) as handle:
        steps = tuning._usual_steps(nn.Linear(1, 1, dtype=dtype), amp, handle, trains=False)
    checks = [dict(step.defines)["T"] for step in steps if step.source == "harness/verify.cu"]
    assert checks == [wanted] * bool(wanted)


def test_options_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="options=3 must be a FindOptions"):
        miofind.torch.tune(torch.nn.Conv2d(3, 4, 3), (1, 3, 5, 5), options=3)  # type: ignore[arg-type]
