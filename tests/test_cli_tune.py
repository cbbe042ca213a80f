"""`miofind tune`: what it takes, prints, exits with, and how it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runner import FORWARD, TINY, run, run_json, use_own_folders
from rich.console import Console

from miofind.candidate import Outcome
from miofind.errors import LaunchError
from miofind.finddb import Store
from miofind.sandbox import InProcess

HERE = ("--device", "cpu", "--in-process", "--exclude", "ConvCpuDirect")
SMALL_TABLE = """suite,layer,n,c,h,w,k,fy,fx,pad_h,pad_w
small,first,1,4,6,5,2,3,3,1,1
small,second,1,4,6,5,3,1,1,0,0
small,third,1,4,6,5,4,3,3,1,1
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def table(tmp_path: Path) -> str:
    file = tmp_path / "small.csv"
    file.write_text(SMALL_TABLE, encoding="utf-8")
    return str(file)


def test_the_table_names_winners_and_seconds(table: str) -> None:
    result = run("tune", "--csv", table, *HERE)
    lines = result.stdout.splitlines()
    assert lines[0].endswith("batch 1, float32, NCHW")
    assert lines[1].split()[:4] == ["layer", "problem", "dir", "solver"]
    assert [line.split()[0] for line in lines[3:6]] == ["first", "second", "third"]
    assert "4x6x5 > 3, 1x1" in lines[4]
    assert "ConvCpuGemm1x1" in lines[4]
    assert "ConvCpuIm2colGemm" in lines[4]
    assert lines[6].startswith("3 problems, 3 measured in ")
    assert [line.split("]")[0] for line in result.stderr.splitlines()] == ["[1/3", "[2/3", "[3/3"]


def test_a_second_tuning_says_that_all_is_known(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("tune", "--csv", table, *HERE)
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    result = run("tune", "--csv", table, *HERE)
    assert "3 problems, 3 known already in 0." in result.stdout
    assert result.stdout.count("finddb") >= 3


def test_json(table: str) -> None:
    printed = run_json("tune", "--csv", table, *HERE, "--limit", "2")
    assert printed["counts"] == {"tuned": 2, "known": 0, "failed": 0, "left": 0}
    assert printed["end"] == "complete"
    second = printed["results"][1]
    assert (second["layer"], second["status"]) == ("second", "tuned")
    assert {second["best"]["solver"], second["second_best"]["solver"]} == {"ConvCpuGemm1x1", "ConvCpuIm2colGemm"}


@pytest.mark.parametrize(
    ("arguments", "directions"),
    [
        ((*TINY, "-F", "0"), ["forward", "backward_data", "backward_weights"]),
        ((*TINY, "--direction", "backward_weights", "--direction", "forward"), ["forward", "backward_weights"]),
        ((*TINY, "--direction", "all"), ["forward", "backward_data", "backward_weights"]),
    ],
    ids=["-F 0", "two", "all"],
)
def test_directions(arguments: tuple[str, ...], directions: list[str]) -> None:
    assert [result["direction"] for result in run_json("tune", *arguments, *HERE)["results"]] == directions


def test_options_hold_for_suites_and_driver_lines_alike(table: str) -> None:
    asked = ("--dtype", "float16", "--layout", "NHWC", *HERE)
    printed = run_json("tune", *FORWARD, "--csv", table, *asked)["results"]
    assert len(printed) == 3, "the driver line names the table's first problem"
    assert all(result["network_config"].endswith("-float16-NHWC") for result in printed)
    assert "is given twice" in run("tune", *FORWARD, "--batch", "2", *HERE, code=2).stderr


def test_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text(f"# what the model runs\n{' '.join(FORWARD)}\n", encoding="utf-8")
    assert [r["layer"] for r in run_json("tune", "--lines", str(file), *HERE)["results"]] == ["line 2"]
    file.write_text("conv -n 0\n", encoding="utf-8")
    assert "lines.txt, line 1: --batchsize (-n) 0" in run("tune", "--lines", str(file), *HERE, code=2).stderr


def test_shipped_suites_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Iterator[Outcome]:
        raise LaunchError("nothing is measured here")

    monkeypatch.setattr(InProcess, "run", fail)
    printed = run_json("tune", "--suite", "ResNet50", "--limit", "2", *HERE, code=1)["results"]
    assert [(result["suite"], result["layer"]) for result in printed] == [
        ("resnet50", "conv1"),
        ("resnet50", "layer1.0.conv1"),
    ]


def test_a_terminal_gets_a_bar_with_failures_above_it(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "miofind.cli.tune_progress.stderr", lambda: Console(stderr=True, force_terminal=True, width=150)
    )
    result = run("tune", "--csv", table, *HERE, "--only", "ConvCpuGemm1x1", code=1)
    assert "3/3" in result.stderr
    assert "1 tuned, 2 failed" in result.stderr or "2 failed, 1 tuned" in result.stderr
    assert "[1/3] failed first" in result.stderr
    assert "3/3" not in result.stdout


def test_isolated_by_default() -> None:
    assert run_json("tune", *FORWARD, "--device", "cpu", "--only", "ConvCpuDirect")["counts"]["tuned"] == 1


def test_search_times_more_configurations() -> None:
    asked = ("tune", *FORWARD, *HERE)
    assert run_json(*asked, "--search")["results"][0]["status"] == "tuned"
    assert run_json(*asked)["results"][0]["status"] == "known"
    rows = run_json("db", "show", *FORWARD, "--all")["problems"][0]["rows"]
    assert len({json.dumps(row["config"]) for row in rows}) > 2


def test_failures_are_listed_and_end_with_1(table: str) -> None:
    result = run("tune", "--csv", table, *HERE, "--only", "ConvCpuGemm1x1", code=1)
    assert "failed: first no solution of conv2d" in result.stdout
    assert "serves unpadded filters of one tap" in result.stdout
    assert "3 problems, 1 measured, 2 failed in " in result.stdout


@pytest.mark.parametrize("content", [b"no database" * 1000, None], ids=["damaged", "folder"])
def test_an_unusable_finddb_is_refused(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    if content is None:
        (tmp_path / "finddb.db").mkdir()
    else:
        (tmp_path / "finddb.db").write_bytes(content)
    result = run("tune", *FORWARD, *HERE, code=4)
    assert "finddb.db" in result.stderr
    assert result.stderr.startswith("error: ")


def test_ctrl_c_ends_with_a_summary(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring, jobs = InProcess.run, 0

    def interrupted(self: InProcess, job: Any) -> Iterator[Outcome]:
        nonlocal jobs
        jobs += 1
        if jobs > 1:
            raise KeyboardInterrupt
        yield from measuring(self, job)

    monkeypatch.setattr(InProcess, "run", interrupted)
    result = run("tune", "--csv", table, *HERE, code=130)
    assert "interrupted: 3 problems, 1 measured, 2 left in " in result.stdout
    monkeypatch.setattr(InProcess, "run", measuring)
    assert run_json("tune", "--csv", table, *HERE)["counts"] == {"tuned": 2, "known": 1, "failed": 0, "left": 0}


@pytest.mark.parametrize("where", ["child", "--in-process"])
def test_a_real_sigint_stops_within_seconds(where: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "miofind", "tune", "--suite", "vgg16", "--device", "cpu", "--json"]
    process = subprocess.Popen(
        command + ([where] if where.startswith("--") else []),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore SIGINT, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("[1/")
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    stdout, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 130
    assert "Traceback" not in stderr
    summary = json.loads(stdout)
    assert summary["end"] == "interrupted"
    assert summary["counts"]["tuned"] >= 1
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        assert store.stats().problems >= 1
