"""The benchmark of fused networks: what it asks, the files that it goes on with, its table."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miofind import Handle, ProblemDescription
from miofind.bench.ceilings import Ceilings
from miofind.bench.comparison import BenchRow
from miofind.cli.bench import row_json
from miofind.device.device import Device
from miofind.options import FindOptions
from miofind.suites import SuiteProblem

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("fused_networks", "whole_product", "figures", "script", "commit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("fused_networks")


def arguments(fused: ModuleType, folder: Path, **changed: Any) -> argparse.Namespace:
    values = {
        "networks": fused.NETWORKS,
        "dtypes": fused.DTYPES,
        "layouts": fused.LAYOUTS,
        "batches": fused.BATCHES[:2],
        "folder": folder,
        "commit": "abc",
        "budget": 6.0,
        "search_cudnn": 3.0,
        "stop_after": 500.0,
        "gpus": 2,
        "db": None,
    }
    return argparse.Namespace(**values | changed)


def line(asked: Any, ours: float | None = 1.0, one_pass: float | None = 2.0) -> dict[str, Any]:
    row = row_json(BenchRow(entry=asked.entry, time_ms=ours, one_pass_ms=one_pass, rival_ms=4.0))
    return {"gpu": "NVIDIA H200", "versions": {"torch": "2.11"}, "row": row}


def test_the_most_telling_case_comes_first(fused: ModuleType, tmp_path: Path) -> None:
    found = fused.asked(arguments(fused, tmp_path))
    assert len({each.key for each in found}) == len(found) == 8 * 274
    assert len(fused.NETWORKS) == 10
    assert found[0].entry.problem.network_config.startswith("conv2d-forward-n32-c3-i224x224-k96-f4x4-s4x4-float16-NHWC")
    assert sum(each.entry.count for each in found if each.entry.suite == "resnet50_fused") == 8 * 53
    decoder = {each.entry.problem.n for each in found if each.entry.suite == "sd_vae_decoder_fused"}
    assert decoder == {1, 8}


def test_the_passes_of_a_training_step_are_networks_of_their_own(fused: ModuleType, tmp_path: Path) -> None:
    names = list(fused.TRAINING)
    asked = fused.asked(arguments(fused, tmp_path, networks=names, dtypes=["float16"], layouts=["NHWC"]))
    assert names == [f"resnet50_training_{direction}" for direction in ("forward", "backward_data", "backward_weights")]
    assert {each.entry.suite for each in asked} == set(names)
    assert all(each.entry.problem.epilogue for each in asked)
    assert all(each.entry.suite.endswith(each.entry.problem.direction) for each in asked)
    assert fused.merge([line(each) for each in asked], arguments(fused, tmp_path, networks=names)) > 0
    for path in tmp_path.iterdir():
        networks = json.loads(path.read_text())["networks"]
        assert [network["suite"] for network in networks] == names
        assert [network["layers"] for network in networks] == [53, 48, 53]


def test_rows_become_files_that_the_same_commit_goes_on_with(fused: ModuleType, tmp_path: Path) -> None:
    asked = fused.asked(arguments(fused, tmp_path, networks=["vgg16"], dtypes=["float16"], batches=["32"]))
    first = arguments(fused, tmp_path, networks=["vgg16"], dtypes=["float16"], layouts=["NHWC"], batches=["32"])
    assert len(asked) == 18
    assert fused.merge([line(each) for each in asked[:8]], first) == 1
    (path,) = tmp_path.iterdir()
    assert path.name == "fused_networks_float16_nhwc_b32_h200.json"
    content = json.loads(path.read_text())
    assert {"gpu", "versions", "commit", "command"} <= content.keys()
    assert content["networks"][0]["sums_ms"]["miofind"] is None, "a layer is missing"
    assert content["networks"][0]["layers"] == 13
    assert fused.merge([line(asked[8], None)], first) == 1, "what has no time is tried again"
    assert fused.merge([line(asked[8])], first) == 0
    (network,) = json.loads(path.read_text())["networks"]
    assert network["sums_ms"] == {"miofind": 13.0, "one-pass": 26.0, "torch": 52.0, "cudnn": None}
    assert network["sum_ratios"] == {"one-pass": 2.0, "torch": 4.0, "cudnn": None}
    assert network["mean_ratios"]["one-pass"] == pytest.approx(2.0)
    told = fused.table(first).splitlines()
    assert told[1] == "float16_nhwc_b32_h200"
    assert " ".join(told[2].split()) == "vgg16 13.000 26.000 2.000 (2.000) 52.000 4.000 (4.000) - - (-)"
    first.commit = "def"
    assert len(fused.table(first).splitlines()) == 1
    assert fused.merge([line(asked[0])], first) == 8


def test_rows_of_another_commit_stay_until_they_are_timed_anew(fused: ModuleType, tmp_path: Path) -> None:
    given = {"networks": ["vgg16"], "dtypes": ["float16"], "layouts": ["NHWC"], "batches": ["32"]}
    first, second = (arguments(fused, tmp_path, commit=commit, **given) for commit in ("abc", "def"))
    asked = fused.asked(first)
    fused.merge([line(each, 3.0) for each in asked], first)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    for row in content["rows"]:
        del row["commit"]  # as files were once
    path.write_text(json.dumps(content))
    second.budget = 1.0
    assert fused.merge([line(asked[0], 2.0), line(asked[1], None)], second) == len(asked) - 1
    content = json.loads(path.read_text())
    assert [row["time_ms"] for row in content["rows"]] == [2.0] + [3.0] * (len(asked) - 1), "a failure takes no place"
    assert [row["commit"] for row in content["rows"]] == ["def"] + ["abc"] * (len(asked) - 1)
    assert (content["commit"], list(content["earlier"])) == ("def", ["abc"])
    assert "--budget 1 " in content["command"]
    assert "--budget 6 " in content["earlier"]["abc"]["command"]
    for told in (first, second):
        assert len(fused.table(told).splitlines()) == 1, "no commit has the whole network"
    assert fused.merge([line(each, 1.0) for each in asked], second) == 0
    assert json.loads(path.read_text())["earlier"] == {}
    assert len(fused.table(second).splitlines()) == 3


def test_files_of_another_gpu_are_left_alone(fused: ModuleType, tmp_path: Path) -> None:
    given = arguments(fused, tmp_path, networks=["vgg16"], dtypes=["float16"], layouts=["NHWC"], batches=["32"])
    asked = fused.asked(given)
    fused.merge([line(each) | {"gpu": "NVIDIA A100"} for each in asked], given)
    assert fused.merge([line(asked[0])], given) == len(asked) - 1
    rows = {path.name: len(json.loads(path.read_text())["rows"]) for path in tmp_path.iterdir()}
    assert sorted(rows.values()) == [1, len(asked)], rows


def test_layers_are_timed_until_it_is_late(fused: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU place, with tiny problems and without PyTorch and cuDNN."""
    monkeypatch.setattr(fused, "measure_ceilings", lambda device: Ceilings(copy_bytes_per_s=1e12, flops_per_s={}))
    problems = [ProblemDescription.convolution(x=(1, c, 5, 5), w=(2, c, 1, 1), epilogue="bias.relu") for c in (1, 2, 3)]
    entries = [SuiteProblem(problem=problem, suite="a", layer="b", count=1) for problem in problems]
    rows: list[BenchRow] = []
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        timing = fused.Timing(
            handle=handle,
            options=FindOptions(),
            rival_options=FindOptions(),
            deadline=time.monotonic() + 1e6,
            workers=1,
        )
        fused.time_all(entries, timing, rows.append)
        assert [row.time_ms is not None for row in rows] == [True] * 3
        assert all("one-pass: " in row.message and "torch: " in row.message for row in rows)
        with pytest.raises(fused.Late):
            fused.time_all(entries, replace(timing, deadline=0.0), rows.append)
    assert len(rows) == 3


def test_a_share_is_written_row_by_row(fused: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU place, with tiny problems."""
    problems = [ProblemDescription.convolution(x=(1, c, 5, 5), w=(2, c, 1, 1), epilogue="relu") for c in (1, 2, 3)]
    case = fused.Case(dtype=fused.DTYPES[0], layout=fused.LAYOUTS[0], batch=1)
    small = [
        fused.Asked(case=case, entry=SuiteProblem(problem=problem, suite="a", layer="b", count=2))
        for problem in problems
    ]
    monkeypatch.setattr(fused, "asked", lambda arguments: small)
    monkeypatch.setattr(fused, "measure_ceilings", lambda device: Ceilings(copy_bytes_per_s=1e12, flops_per_s={}))
    monkeypatch.setattr(fused.Device, "cuda", Device.cpu)
    asked = arguments(fused, tmp_path, share=(1, 2), rows=tmp_path / "rows.jsonl", db=tmp_path / "finddb.db")
    fused.time_share(asked)
    (told,) = [json.loads(line) for line in asked.rows.read_text().splitlines()]
    assert told["row"]["network_config"] == problems[1].network_config
    assert (told["row"]["count"], told["row"]["time_ms"] > 0) == (2, True)
    assert {"gpu", "versions"} <= told.keys()


def test_a_share_is_asked_for_what_the_whole_was(
    fused: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = arguments(fused, tmp_path, networks=["vgg16"], db=tmp_path / "a.db")
    words = fused.share_command(whole, 1, tmp_path / "rows.jsonl")[2:]
    shares: list[argparse.Namespace] = []
    monkeypatch.setattr(fused, "time_share", shares.append)
    monkeypatch.setattr(sys, "argv", ["fused_networks.py", *words])
    fused.main()
    (share,) = shares
    for name in (
        "dtypes",
        "layouts",
        "batches",
        "networks",
        "folder",
        "commit",
        "budget",
        "search_cudnn",
        "stop_after",
        "db",
    ):
        assert [*map(str, [getattr(share, name)])] == [*map(str, [_listed(getattr(whole, name))])], name
    assert share.share == (1, 2)


def test_cudnns_engines_are_searched_where_time_is_given(fused: ModuleType) -> None:
    assert not fused.rival_options(0.0).searches
    assert fused.rival_options(3.0) == FindOptions(time_budget_s=3.0, tuning=True)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
