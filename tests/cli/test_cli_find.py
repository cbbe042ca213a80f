"""`miofind find` and `miofind run` on the CPU place."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.cli_runner import FORWARD, TINY, run, run_json, use_own_folders

import miofind
from miofind.driver.line import parse_driver_line
from miofind.finddb import Store
from miofind.runtime.solution import SolutionList, Source
from miofind.solver.registry import Registry
from miofind.verify.verifier import Verification, Verifier

pytestmark = pytest.mark.sampled(2)

LONG_FLAGS = "conv --in_channels=4 --in_h=6 --in_w 5 -n 1 -k 2 -y 3 -x 3 --pad_h 1 --pad_w 1 -F 1"
PROBLEM = parse_driver_line(" ".join(FORWARD))[0]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def cpu(command: str, *arguments: str, **settings: Any) -> dict[str, Any]:
    return run_json(command, *arguments, "--device", "cpu", **settings)


def test_three_directions_give_three_tables() -> None:
    result = run("find", *TINY, "-F", "0", "--device", "cpu")
    for direction in miofind.Direction:
        assert f"\n{direction.value}  conv -n 1 -c 4" in result.stdout
    assert result.stdout.count("TFLOP/s") == 3
    assert result.stdout.count("measured") >= 6
    assert result.stderr == ""


def test_json_has_the_solutions_and_nothing_else() -> None:
    printed = cpu("find", *FORWARD)
    problem = printed["problems"][0]
    assert problem["network_config"] == PROBLEM.network_config
    assert problem["driver_line"].startswith("conv -n 1 -c 4 ")
    best = problem["solutions"][0]
    assert best["time_ms"] > 0
    assert best["tflops"] == pytest.approx(PROBLEM.flops / best["time_ms"] / 1e9)
    assert best["source"] == "measured"
    assert isinstance(best["config"], dict)
    assert cpu("find", *FORWARD)["problems"][0]["solutions"][0]["source"] == "finddb"


@pytest.mark.parametrize(
    "words",
    [
        (PROBLEM.network_config,),
        (" ".join(FORWARD),),
        ("4-6-5-3x3-2-6-5-1-1x1-1x1-1x1-0-NCHW-FP32-F",),
        ("./bin/MIOpenDriver", *FORWARD, "-V", "0", "-i", "10", "-t", "1"),
        tuple(LONG_FLAGS.split()),
        ("--x", "1,4,6,5", "--w", "2,4,3,3", "--padding", "1", "--direction", "forward"),
    ],
    ids=["network_config", "one word", "as MIOpen's find-db has it", "as MIOpen logs it", "long flags", "shapes"],
)
def test_forms_of_a_problem(words: tuple[str, ...]) -> None:
    printed = cpu("find", *words, "--only", "ConvCpuDirect")
    assert [problem["network_config"] for problem in printed["problems"]] == [PROBLEM.network_config]


def test_filters_and_top() -> None:
    everything = cpu("find", *FORWARD)["problems"][0]["solutions"]
    assert len(everything) > 1
    assert len(cpu("find", *FORWARD, "--top", "1")["problems"][0]["solutions"]) == 1
    assert f"{len(everything) - 1} more" in run("find", *FORWARD, "--device", "cpu", "--top", "1").stdout
    excluded = cpu("find", *FORWARD, "--exclude", "direct,gemm,fft,winograd")["problems"][0]["solutions"]
    assert {solution["algorithm"] for solution in excluded} == {"im2col_gemm"}
    limited = cpu("find", *FORWARD, "--workspace-limit", "0K")["problems"][0]["solutions"]
    assert {solution["workspace_bytes"] for solution in limited} == {0}
    ordered = cpu("find", *FORWARD, "--order", "workspace")["problems"][0]["solutions"]
    assert [s["workspace_bytes"] for s in ordered] == sorted(s["workspace_bytes"] for s in ordered)


@pytest.mark.parametrize(
    "command",
    [
        ("find", *FORWARD, "--find-mode", "fast", "--device", "cpu"),
        ("solvers", *FORWARD, "--device", "cpu"),
        ("tune", *FORWARD, "--dry-run", "--device", "cpu"),
        ("compile", *FORWARD, "--arch", "90a", "--only", "ConvDirectNaive"),
        ("doctor",),
        ("db", "path"),
        ("db", "stats"),
        ("db", "show"),
        ("db", "check"),
        ("db", "export", "-"),
    ],
    ids=lambda command: " ".join(word for word in command if word not in FORWARD),
)
def test_what_only_reads_makes_no_finddb(tmp_path: Path, command: tuple[str, ...]) -> None:
    run(*command, code=4 if command[0] == "db" and command[1] != "path" else 0)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("finddb")]


def test_what_was_measured_and_is_not_shown_is_told(tmp_path: Path) -> None:
    run("tune", *FORWARD, "--search", "--device", "cpu", "--in-process")
    (found,) = cpu("find", *FORWARD)["problems"]
    (kept,) = run_json("db", "show", "--all", PROBLEM.network_config)["problems"]
    assert found["measured"] == len({json.dumps([row["solver_id"], row["config"]]) for row in kept["rows"]})
    assert found["measured"] > len(found["solutions"])
    line = run("find", *FORWARD, "--device", "cpu").stdout.splitlines()[-1]
    assert line.startswith(f"the FindDB has times of {found['measured']} in all: ")
    assert f"`miofind db show --all {PROBLEM.network_config}`" in line
    elsewhere = ("--device", "cpu", "--db", str(tmp_path / "other.db"))
    assert "measured:" not in run("find", *FORWARD, *elsewhere).stdout, "nothing is left out"
    run("tune", *FORWARD, "--search", "--in-process", *elsewhere)
    assert f"`miofind db show --all --db {tmp_path / 'other.db'} " in run("find", *FORWARD, *elsewhere).stdout


def test_a_find_in_memory_tells_of_no_file() -> None:
    result = run("find", *FORWARD, "--device", "cpu", "--db", ":memory:")
    assert "db show" not in result.stdout
    assert result.stderr == ""


def test_a_new_finddb_is_told_of(tmp_path: Path) -> None:
    command = ("find", *FORWARD, "--device", "cpu", "--db", str(tmp_path / "new.db"))
    assert run(*command).stderr == f"there is no FindDB at {command[-1]} yet: a new one begins there\n"
    assert run(*command).stderr == ""


def test_configurations_of_wider_bounds_are_told_of() -> None:
    wide = ("conv", "-n", "2", "-c", "32", "-H", "9", "-W", "9", "-k", "4", "-y", "3", "-x", "3", "-F", "1")
    assert cpu("find", *wide)["problems"][0]["wider_bounds"] == {"ConvCpuFft": 2, "ConvCpuWinograd": 2}
    told = (
        "configurations left out for wider error bounds, unless --max-error lets them in: "
        "2 of ConvCpuFft, 2 of ConvCpuWinograd"
    )
    assert told in run("find", *wide, "--device", "cpu").stdout.splitlines()
    allowed = cpu("find", *wide, "--max-error", "1e-3", "--find-mode", "normal")["problems"][0]
    assert allowed["wider_bounds"] == {}
    assert len([s for s in allowed["solutions"] if s["solver"] == "ConvCpuWinograd"]) == 3
    assert cpu("find", *wide, "--only", "direct")["problems"][0]["wider_bounds"] == {}


@pytest.mark.parametrize("columns", [None, 120, 80, 60, 40])
def test_notes_on_times_are_shown_at_every_width(monkeypatch: pytest.MonkeyPatch, columns: int | None) -> None:
    """Rows looked alike, whether raced or cut off after one sample; at 80 columns predictions looked measured."""
    marks: list[dict[str, Any]] = [{}, {"cut_off": True}, {"contended": True}, {"source": Source.PREDICTED}]

    def found(*arguments: Any, **settings: Any) -> list[miofind.Solution]:
        first = miofind.find_solutions(*arguments, **settings)[0]
        made = [replace(first, **mark) for mark in marks]
        monkeypatch.setattr(SolutionList, "ties", frozenset({first.id}))
        return made

    monkeypatch.setattr("miofind.cli.find.find_solutions", found)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    text = run("find", *FORWARD, "--device", "cpu").stdout
    table, *explained = text.partition("\npredicted: ")
    for note in ("predicted", "cut off", "contended", "tie"):
        assert note.split()[0] in table
        assert f"\n{note}: " in text
    assert len("".join(explained).splitlines()) >= 4
    if columns is not None:
        assert max(map(len, table.splitlines()[3:])) <= columns
    notes = [solution["notes"] for solution in cpu("find", *FORWARD)["problems"][0]["solutions"]]
    assert notes == [["tie"], ["cut off", "tie"], ["contended", "tie"], ["predicted", "tie"]]


def test_what_decides_between_ties_is_shown_at_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes took the place of the error, by which the line below orders ties."""
    monkeypatch.setattr(SolutionList, "ties", frozenset({"ConvCpuDirect:{}"}))
    monkeypatch.setenv("COLUMNS", "80")
    text = run("find", *FORWARD, "--device", "cpu").stdout
    header = next(line for line in text.splitlines() if "solver" in line).split()
    assert {"ms", "notes", "workspace", "error"} <= set(header)
    assert "the smaller workspace comes first, then the smaller error" in text


def test_predictions_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run("find", *FORWARD, "--device", "cpu", "--find-mode", "fast").stdout
    rows = [line for line in text.splitlines() if re.match(r"\d+  ConvCpu", line)]
    assert rows
    assert all(" predicted " in row for row in rows)
    assert "\npredicted: expected by a model or the solver's estimate, not measured\n" in text


def test_a_find_that_runs_out_of_time_says_so_and_its_answer_too() -> None:
    printed = cpu("find", *FORWARD, "--time-budget", "0")["problems"][0]
    assert printed["unmeasured_candidates"] == printed["candidates"] - len(printed["solutions"]) > 0
    later = cpu("find", *FORWARD)["problems"][0]
    assert (later["earlier_find_ended_early"], later["unmeasured_candidates"]) == (True, 0)
    told = "a budget ended an earlier find: --find-mode normal --time-budget 60 "
    for order in ("time", "workspace"):
        assert told in run("find", *FORWARD, "--device", "cpu", "--time-budget", "10", "--order", order).stdout
    text = run("find", *FORWARD, "--device", "cpu", "--time-budget", "0", "--find-mode", "normal").stdout
    told = r"\nstopped after 0 s: \d+ of \d+ candidates not measured; give --find-mode normal --time-budget 60\n"
    assert re.search(told, text)


def test_a_find_with_time_enough_closes_the_gap() -> None:
    cpu("find", *FORWARD, "--time-budget", "0")
    text = run("find", *FORWARD, "--device", "cpu", "--find-mode", "normal", "--time-budget", "600").stdout
    text += run("find", *FORWARD, "--device", "cpu").stdout
    assert "budget" not in text
    assert "stopped after" not in text
    printed = cpu("find", *FORWARD)["problems"][0]
    assert not printed["earlier_find_ended_early"]


def test_a_later_solver_that_an_answer_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not measured yet" not in run("find", *FORWARD, "--device", "cpu").stdout
    default = Registry.default()
    later = type("Later", (type(default["ConvCpuDirect"]),), {"id": "vendor/Later"})
    monkeypatch.setattr(Registry, "_default", default.with_solvers(later))
    told = "\nnot measured yet: vendor/Later; --find-mode normal measures it\n"
    assert told in run("find", *FORWARD, "--device", "cpu").stdout
    assert cpu("find", *FORWARD)["problems"][0]["unmeasured_solvers"] == ["vendor/Later"]
    run("find", *FORWARD, "--device", "cpu", "--find-mode", "normal")
    assert told not in run("find", *FORWARD, "--device", "cpu").stdout
    assert cpu("find", *FORWARD)["problems"][0]["unmeasured_solvers"] == []


@pytest.mark.parametrize(("times", "is_told"), [((1.02, 1.0, 3.0), True), ((1.0, 1.02, 3.0), False)])
def test_an_order_that_times_contradict_is_explained(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], is_told: bool
) -> None:
    def found(*arguments: Any, **settings: Any) -> list[miofind.Solution]:
        first = miofind.find_solutions(*arguments, **settings)[0]
        return [replace(first, time_ms=time_ms) for time_ms in times]

    monkeypatch.setattr("miofind.cli.find.find_solutions", found)
    monkeypatch.setattr(SolutionList, "ties", frozenset())
    told = "a slower one above a faster one is its tie"
    assert (told in run("find", *FORWARD, "--device", "cpu").stdout) == is_told
    assert told not in run("find", *FORWARD, "--device", "cpu", "--order", "workspace").stdout


def test_an_unsolvable_problem_fails_with_each_reason() -> None:
    result = run("find", *TINY, "-F", "0", "--device", "cpu", "--only", "ConvCpuGemm1x1", "--json", code=1)
    assert result.stderr.count("\n  ConvCpuGemm1x1: ") == 3
    assert result.stderr.count("others: left out by only, exclude or the find mode") == 3
    assert [problem["solutions"] for problem in json.loads(result.stdout)["problems"]] == [[], [], []]


@pytest.mark.parametrize("command", ["find", "run"])
@pytest.mark.parametrize("only", ["ConvDirectNaive", "cudnn,fft"])
def test_what_runs_elsewhere_alone_is_missing_here(command: str, only: str) -> None:
    """The place's refusal comes first, and the exit code is that of a machine that lacks something."""
    wanted = ("--only", only, "--exclude", "ConvCpuFft", "--device", "cpu")
    told = run(command, *FORWARD, *wanted, code=3).stderr.splitlines()
    reasons = [line for line in told if line.startswith("  ")]
    assert all(line.endswith("runs on cuda, not on cpu") for line in reasons[:-1])
    assert "others: left out by only, exclude or the find mode" in reasons[-1]


@pytest.mark.parametrize("options", [(), ("--exclude", "ConvCpuDirect")])
def test_what_nothing_is_allowed_for_is_no_lack(options: tuple[str, ...]) -> None:
    told = run("find", *FORWARD, "--device", "cpu", "--only", "ConvCpuDirect", "--exclude", "direct", *options, code=1)
    assert "  all " in told.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--only", "ConvCdnn"),
        ("--exclude", "cpu"),
        ("--max-error", "nan"),
        ("--time-budget", "nan"),
        ("--workspace-limit", "99999999999G"),
    ],
)
def test_impossible_options_are_named_as_they_were_given(option: str, value: str) -> None:
    told = run("find", *FORWARD, "--device", "cpu", option, value, code=2).stderr
    assert f"'{option}'" in told
    assert value in told


def test_an_unusable_finddb_costs_a_warning(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database" * 1000)
    result = run("find", *FORWARD, "--device", "cpu", "--db", str(damaged), "--json")
    assert json.loads(result.stdout)["problems"][0]["solutions"]
    assert result.stderr.count("warning:") == 1


def test_db_names_the_finddb(tmp_path: Path) -> None:
    cpu("find", *FORWARD, "--db", str(tmp_path / "other.db"))
    assert not (tmp_path / "finddb.db").exists()
    with Store(tmp_path / "other.db", read_only=True) as store:
        assert [key.network_config for key in store.problems()] == [PROBLEM.network_config]


def test_isolated_find() -> None:
    assert cpu("find", *FORWARD, "--isolate", "--only", "ConvCpuDirect")["problems"][0]["solutions"]


def test_a_narrow_terminal_keeps_solver_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    text = run("find", *FORWARD, "--device", "cpu").stdout
    header = next(line for line in text.splitlines() if "solver" in line)
    assert "ms" in header.split()
    assert "source" not in header
    assert "ConvCpuDirect" in text


def test_run_the_best() -> None:
    text = run("run", *FORWARD, "--device", "cpu", "--verify").stdout
    assert "TFLOP/s" in text
    assert "passed" in text
    printed = cpu("run", *TINY, "-F", "3", "--verify")["runs"]
    assert [item["direction"] for item in printed] == ["forward", "backward_data"]
    for item in printed:
        assert item["verification"]["ok"]
        assert item["timing"]["min_ms"] <= item["timing"]["time_ms"]


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run("run", *FORWARD, "--device", "cpu")
    wrong = Verification(ok=False, message="exact gate, seed 1: 1 of 60 elements of y are wrong")
    monkeypatch.setattr(Verifier, "verify", lambda *_, **__: wrong)
    result = run("run", *FORWARD, "--device", "cpu", "--verify", code=1)
    assert "FAILED" in result.stdout
    assert "1 of 60 elements of y are wrong" in result.stderr


def test_a_saved_solution_runs(tmp_path: Path) -> None:
    file = str(tmp_path / "best.json")
    assert "saved" in run("find", *FORWARD, "--device", "cpu", "--save", file).stderr
    printed = cpu("run", "--solution", file, "--verify")["runs"][0]
    assert printed["network_config"] == PROBLEM.network_config
    assert printed["verification"]["ok"]
    other = ("conv", "-n", "2", "-F", "1")
    assert "leave the problem out" in run("run", *other, "--solution", file, "--device", "cpu", code=2).stderr


def test_save_takes_one_direction(tmp_path: Path) -> None:
    result = run("find", *TINY, "--save", str(tmp_path / "best.json"), "--device", "cpu", code=2)
    assert "--save takes one direction" in result.stderr


def test_a_damaged_solution_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    file.write_text("{}", encoding="utf-8")
    assert "best.json" in run("run", "--solution", str(file), "--device", "cpu", code=2).stderr


def test_what_was_found_is_shown_where_it_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All was measured, and then an error printed alone."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    result = run("find", *FORWARD, "--device", "cpu", "--save", str(tmp_path / "best.json"), code=2)
    assert "ConvCpuDirect" in result.stdout
    assert "best.json' cannot be written: No space left on device" in result.stderr


def test_a_finddb_of_the_environment_that_can_be_none_stops_no_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only commands about databases need it."""
    monkeypatch.setenv("MIOFIND_DB", "file:///x.db")
    for command in ("find", "run"):
        result = run(command, *FORWARD, "--device", "cpu")
        assert "ConvCpu" in result.stdout
        assert result.stderr.count("warning: MIOFIND_DB: a FindDB named by file://... cannot be used") == 1
    run("tune", *FORWARD, "--device", "cpu", code=4)
