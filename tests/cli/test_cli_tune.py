"""`miofind tune`: what it takes, prints, exits with, and how it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.cli_runner import FORWARD, TINY, run, run_json, use_own_folders
from helpers.processes.waiting import LIMIT_S, read_until
from rich.console import Console

from miofind.device.device import Device
from miofind.errors import LaunchError, NoDeviceError
from miofind.evaluate.executors import InProcess
from miofind.find import likely
from miofind.finddb import Store
from miofind.solver.candidate import Outcome

pytestmark = pytest.mark.sampled(2)

HERE = ("--device", "cpu", "--in-process", "--exclude", "ConvCpuDirect")
TWO_SOLVERS = (*HERE, "--only", "ConvCpuGemm1x1,ConvCpuIm2colGemm")
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
    result = run("tune", "--csv", table, *TWO_SOLVERS)
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


def test_the_likeliest_are_tuned_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likely, "FIRST", 1)
    monkeypatch.setattr(likely, "MOST", 1)
    asked = (*TINY, "-F", "1")
    run("tune", *asked, *HERE, "--likely")
    assert "1 problem, 1 known already in 0." in run("tune", *asked, *HERE, "--likely").stdout
    told = "the likeliest candidates alone were measured: --find-mode normal measures all"
    assert told in run("find", *asked, *HERE).stdout
    assert "1 problem, 1 measured in " in run("tune", *asked, *HERE).stdout
    assert told not in run("find", *asked, *HERE).stdout


def test_json(table: str) -> None:
    printed = run_json("tune", "--csv", table, *TWO_SOLVERS, "--limit", "2")
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


def test_classes_choose_problems() -> None:
    asked = ("tune", "--suite", "yardstick", "--direction", "forward", "--device", "cpu", "--dry-run")

    def count(*classes: str) -> int:
        return int(run_json(*asked, *classes)["forecasts"][0]["problems"])

    assert count() == 191
    assert count("--class", "grouped") == 7
    assert count("--class", "Depthwise", "--class", "first layer") == 32
    assert count("--class", "1x1", "--limit", "5") == 5
    error = run("tune", *TINY, "--class", "dilated", code=2).stderr
    assert "no problem is of --class dilated; there are: first layer" in error


def test_options_hold_for_suites_and_driver_lines_alike(table: str) -> None:
    asked = ("--dtype", "float16", "--layout", "NHWC", *HERE)
    printed = run_json("tune", *FORWARD, "--csv", table, *asked)["results"]
    assert len(printed) == 3, "the driver line names the table's first problem"
    assert all(result["network_config"].endswith("-float16-NHWC") for result in printed)
    assert "is given twice" in run("tune", *FORWARD, "--batch", "2", *HERE, code=2).stderr


def test_find_db_text_of_miopen(tmp_path: Path) -> None:
    file = tmp_path / "gfx90a.fdb.txt"
    value = "ConvDirectNaiveConvFwd:0.1,0,miopenConvolutionFwdAlgoDirect"
    keys = ["4-6-5-3x3-2-6-5-1-1x1-1x1-1x1-0-NCHW-FP32-F", "2-6-5-3x3-4-6-5-1-1x1-1x1-1x1-0-NCHW-FP32-B"]
    file.write_text("\n".join(f"{key}={value}" for key in [*keys, "4-6-5-CHWN-INT8-F"]), encoding="utf-8")
    result = run("tune", "--fdb", str(file), *HERE, "--json")
    printed = json.loads(result.stdout)["results"]
    assert [(entry["suite"], entry["layer"]) for entry in printed] == [("gfx90a", "line 1"), ("gfx90a", "line 2")]
    assert result.stderr.count("warning: gfx90a: 1 of 3 keys name no problem and are left out: '4-6-5-CHWN") == 1


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
    monkeypatch.setattr("miofind.cli.tune_display.stderr", lambda: Console(stderr=True, force_terminal=True, width=150))
    result = run("tune", "--csv", table, *HERE, "--only", "ConvCpuGemm1x1", code=1)
    assert "3/3" in result.stderr
    assert "1 tuned, 2 failed" in result.stderr or "2 failed, 1 tuned" in result.stderr
    assert "[1/3] failed third" in result.stderr, "the heaviest comes first"
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


# The first is told of at once, for how often it counts; each of the others is measured for minutes.
LONG_TABLE = """suite,layer,n,c,h,w,k,fy,fx,pad_h,pad_w,count
long,first,1,4,6,5,2,3,3,1,1,1000000000
long,second,1,64,224,224,64,3,3,1,1,1
long,third,1,64,224,225,64,3,3,1,1,1
"""
_ON_TWO = """
from miofind.device import device
from miofind.cli import main, tune
cpu = device.Device.cpu()
device.Device.cuda = staticmethod(lambda index: cpu)
tune.cuda_device_count = lambda: 2
main()
"""
_ONE, _TWO = (("-m", "miofind"),), (("-c", _ON_TWO), ("--gpus", "all"))


@pytest.mark.parametrize(
    ("program", "where", "number"),
    [
        pytest.param(*_ONE, ("--device", "cpu"), signal.SIGINT, id="child", marks=pytest.mark.full_matrix),
        pytest.param(*_ONE, ("--device", "cpu", "--in-process"), signal.SIGINT, id="in process"),
        pytest.param(*_ONE, ("--device", "cpu"), signal.SIGTERM, id="SIGTERM"),
        pytest.param(*_TWO, signal.SIGINT, id="two devices"),
        pytest.param(*_TWO, signal.SIGTERM, id="two devices, SIGTERM", marks=pytest.mark.full_matrix),
    ],
)
def test_a_real_signal_stops_what_is_measured(
    program: tuple[str, ...], where: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    table = tmp_path / "long.csv"
    table.write_text(LONG_TABLE, encoding="utf-8")
    asked = ("tune", "--csv", str(table), "--exclude", "ConvCpuDirect", "--json")
    process = subprocess.Popen(
        [sys.executable, *program, *asked, *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore SIGINT, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    try:
        read_until(process.stderr, "[1/3] tuned")
        os.killpg(process.pid, number)  # as a terminal does
        stdout, stderr = process.communicate(timeout=LIMIT_S)  # until the children, which have this stderr, end too
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    summary = json.loads(stdout)
    assert summary["end"] == "interrupted"
    assert summary["counts"] == {"tuned": 1, "known": 0, "failed": 0, "left": 2}
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        assert store.stats().problems >= 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--gpus", "0;1"), "'0;1' names no GPUs"),
        (("--arch", "90a", "--device", "cpu", "--dry-run"), "exclude each other"),
        (("--arch", "90a"), "nothing can be measured: add --dry-run"),
    ],
    ids=["form", "two ways", "virtual"],
)
def test_devices_that_make_no_sense_are_refused(asked: tuple[str, ...], words: str) -> None:
    assert words in run("tune", *FORWARD, *asked, code=2).stderr


def test_gpus_of_a_machine_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.cli.tune.cuda_device_count", lambda: 0)
    assert "no GPU that CUDA sees" in run("tune", *FORWARD, "--gpus", "all", code=3).stderr


def test_a_tuning_says_why_it_uses_no_gpu(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise NoDeviceError("no driver")

    monkeypatch.setattr("miofind.cli.tune.cuda_device_count", refuse)
    monkeypatch.setattr(Device, "default", Device.cpu)
    arguments = ("tune", "--csv", table, "--only", "ConvCpuIm2colGemm", "--in-process", "--limit", "1")
    assert run(*arguments).stderr.splitlines()[0] == "tune: no GPU is used: no driver"
    assert "no GPU" not in run(*arguments, "--device", "cpu").stderr


@pytest.mark.usefixtures("forked_children")
def test_all_gpus_get_a_table_a_kind(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [replace(Device.cpu(), name=name) for name in ("kind A", "kind A", "kind B")]
    monkeypatch.setattr("miofind.cli.tune.cuda_device_count", lambda: 3)
    monkeypatch.setattr(Device, "cuda", lambda index: kinds[index])
    result = run("tune", "--csv", table, "--gpus", "all", "--exclude", "ConvCpuDirect", "--limit", "1")
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("kind")] == [
        "kind A: batch 1, float32, NCHW",
        "kind B: batch 1, float32, NCHW",
    ]
    assert lines[-1].startswith("2 problems, 2 measured in ")
    assert " on 3 devices; all their calls together take " in lines[-1]
    assert "CPU 2 kind B: first" in result.stderr
    printed = run_json("tune", "--csv", table, "--gpus", "0,2", "--exclude", "ConvCpuDirect", "--limit", "1")
    assert printed["counts"] == {"tuned": 0, "known": 2, "failed": 0, "left": 0}
    assert {result["device"] for result in printed["results"]} == {kinds[0].identity, kinds[2].identity}
    assert [device["lost"] for device in printed["devices"]] == [None, None]
    assert "in-process measures on one GPU" in run("tune", *FORWARD, "--gpus", "0,1", "--in-process", code=2).stderr


def test_recheck_measures_what_is_queued_and_nothing_else(table: str, tmp_path: Path) -> None:
    here = ("--device", "cpu", "--in-process")  # a filtered find leaves what is queued
    run("tune", "--csv", table, *here)
    assert "0 problems, nothing to measure" in run("tune", "--recheck", *here).stdout
    with Store(tmp_path / "finddb.db") as store:
        key = store.problems()[0]
        store.queue_recheck(key.device, key.network_config, "measured with other versions")
    assert run_json("tune", "--recheck", "--csv", table, *here, "--dry-run")["forecasts"][0]["problems"] == 1
    printed = run_json("tune", "--recheck", *here)
    assert [result["network_config"] for result in printed["results"]] == [key.network_config]
    assert printed["counts"]["tuned"] == 1
    assert run_json("tune", "--recheck", *here)["total"] == 0


def test_stored_measures_all_that_the_finddb_knows(table: str, tmp_path: Path) -> None:
    here = ("--device", "cpu", "--in-process")
    run("tune", "--csv", table, *here, "--only", "ConvCpuDirect")
    assert run_json("tune", "--stored", *here)["counts"]["tuned"] == 0
    with Store(tmp_path / "finddb.db") as store, Store(tmp_path / "earlier.db") as earlier:
        for key, row in store.rows():
            earlier.record(
                key.device, key.network_config, [replace(row, source_hash="ab", environment="", created_at="", id="")]
            )
    here = (*here, "--db", str(tmp_path / "earlier.db"))
    assert run_json("tune", "--stored", *here, "--dry-run")["forecasts"][0]["configurations"] == 3
    assert run_json("tune", "--stored", *here, "--limit", "2")["counts"]["tuned"] == 2
    assert run_json("tune", "--stored", *here)["counts"] == {"tuned": 1, "known": 2, "failed": 0, "left": 0}
    assert "ask for one of them" in run("tune", "--stored", "--recheck", *here, code=2).stderr


def test_what_is_queued_of_unknown_problems_is_left_out(tmp_path: Path) -> None:
    with Store(tmp_path / "finddb.db") as store:
        store.queue_recheck(Device.cpu().identity, "conv4d-sideways", "measured with other versions")
    result = run("tune", "--recheck", *HERE)
    assert "0 problems, nothing to measure" in result.stdout
    assert "left out: 'conv4d-sideways' is not a network_config" in result.stderr


def test_what_failed_is_measured_again_where_that_is_asked_for(tmp_path: Path) -> None:
    run("tune", *FORWARD, *HERE)
    with Store(tmp_path / "finddb.db") as store:
        key, row = next(store.rows())
        store.record(
            key.device, key.network_config, [replace(row, status="crashed", time_ms=None, created_at="", id="")]
        )
    assert run_json("tune", *FORWARD, *HERE)["counts"]["known"] == 1
    assert run_json("tune", *FORWARD, *HERE, "--retry-failed")["counts"]["tuned"] == 1


def test_a_dry_run_makes_no_finddb(tmp_path: Path) -> None:
    for asked in ((*FORWARD,), ("--recheck",)):
        run("tune", *asked, *HERE, "--dry-run", "--db", str(tmp_path / "new.db"))
    assert "new" not in " ".join(path.name for path in tmp_path.rglob("*"))
    assert "named by http" in run("tune", *FORWARD, *HERE, "--dry-run", "--db", "http://host/x", code=4).stderr


@pytest.mark.parametrize(
    "words", ["--batch 4", "--dtype float16", "--layout nhwc", "--direction all", "--math tf32", "--class 1x1"]
)
def test_a_recheck_of_all_that_is_queued_takes_no_variant(words: str) -> None:
    flag = words.split()[0]
    assert f"leave {flag} out" in run("tune", "--recheck", *HERE, *words.split(), code=2).stderr
