"""The shares of the whole product's benchmark become files, which the same command goes on with."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miofind import ProblemDescription
from miofind.bench.ceilings import Ceilings
from miofind.bench.comparison import BenchRow, bench_row
from miofind.bench.rivals import Rival
from miofind.device.device import Device
from miofind.suites import SuiteProblem

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("whole_product", "figures", "script", "commit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("whole_product")


def line(network_config: str, ratio: float | None = 2.0) -> dict[str, Any]:
    row = {
        "suite": "resnet50",
        "layer": "conv1",
        "network_config": network_config,
        "class": "1x1",
        "solution": "ConvCudnn:{}",
        "time_ms": 1.0,
        "torch_ms": ratio,
        "ratio": ratio,
        "floor_ms": 0.5,
        "message": "",
    }
    return {"gpu": "NVIDIA H200", "versions": {"torch": "2.11"}, "row": row}


def test_all_1146_problems_are_asked(whole: ModuleType) -> None:
    found = whole.entries()
    assert len({entry.problem for entry in found}) == len(found) == 191 * 2 * 3


def test_shares_become_a_file_a_layout_and_direction(whole: ModuleType, tmp_path: Path) -> None:
    names = [entry.problem.network_config for entry in whole.entries()]
    assert whole.merge([line(names[1]), line(names[-1]), line(names[0], 8.0)], tmp_path, "abc") == 1143
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(written) == [
        "whole_product_float16_nchw_backward_weights_h200.json",
        "whole_product_float16_nhwc_forward_h200.json",
    ]
    first = written["whole_product_float16_nhwc_forward_h200.json"]
    assert {"gpu", "versions", "commit", "command"} <= first.keys()
    assert [row["network_config"] for row in first["rows"]] == names[:2]
    assert first["means"][-1]["ratio"] == pytest.approx(4.0)
    assert len(whole.figures.kept(tmp_path)) == 3


def test_the_same_commit_goes_on_and_another_begins_anew(whole: ModuleType, tmp_path: Path) -> None:
    first, second, third, *_ = (entry.problem.network_config for entry in whole.entries())
    whole.merge([line(first), line(second, None)], tmp_path, "abc")
    assert list(whole.kept_rows(tmp_path, "abc")) == [first], "what failed is tried again"
    assert whole.merge([line(second, 3.0)], tmp_path, "abc") == 1144
    assert list(whole.kept_rows(tmp_path, "abc")) == [first, second]
    assert whole.merge([line(third)], tmp_path, "def") == 1145
    assert list(whole.kept_rows(tmp_path, "def")) == [third]


def test_a_share_is_written_row_by_row(whole: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU place, with tiny problems and without PyTorch."""
    problems = [ProblemDescription.convolution(x=(1, c, 5, 5), w=(2, c, 1, 1)) for c in (1, 2, 3)]
    small = [SuiteProblem(problem=problem, suite="a", layer="b", count=1) for problem in problems]
    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float32": 1e12})
    monkeypatch.setattr(whole, "entries", lambda: small)
    monkeypatch.setattr(whole, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(whole.Device, "cuda", Device.cpu)

    def without_torch(*told: Any, against: list[Rival]) -> BenchRow:
        assert against == [Rival.TORCH]
        return bench_row(*told)

    monkeypatch.setattr(whole, "bench_row", without_torch)
    arguments = argparse.Namespace(
        stop_after=1e6, share=(1, 2), folder=tmp_path, commit="abc", rows=tmp_path / "rows.jsonl"
    )
    whole.time_share(arguments)
    (told,) = whole.whole_lines(arguments.rows)
    assert told["row"]["network_config"] == problems[1].network_config
    assert told["row"]["time_ms"] > 0
    arguments.stop_after = 0.0
    whole.time_share(arguments)
    assert whole.whole_lines(arguments.rows) == []


def test_what_a_killed_process_wrote_counts_but_for_its_last_line(whole: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert whole.whole_lines(file) == []
    file.write_text('{"a": 1}\n{"a": 2}\n{"a":', encoding="utf-8")
    assert whole.whole_lines(file) == [{"a": 1}, {"a": 2}]


def test_a_late_process_is_stopped(whole: ModuleType) -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ended.wait()
    assert whole.awaited([ended, sleeping], time.monotonic()) == [3, 0]
    assert sleeping.poll() is not None


def test_it_needs_gpus_a_folder_and_a_commit(
    whole: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("miofind.device.device.has_cupy", lambda: False)
    monkeypatch.setattr("miofind.device.device.has_driver", lambda: True)
    for words, code, told in (
        (["--commit", "abc"], 3, "CuPy is not installed"),
        (["--commit", ""], 2, "--commit: this checkout has no git"),
        (["--commit", "abc", "--folder", str(tmp_path / "none")], 2, "is no folder"),
    ):
        monkeypatch.setattr(sys, "argv", ["whole_product.py", *words])
        with pytest.raises(SystemExit) as ended:
            whole.script.run(whole.main)
        assert ended.value.code == code
        assert told in capsys.readouterr().err
