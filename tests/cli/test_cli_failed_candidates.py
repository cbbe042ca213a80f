"""Commands that find tell of solvers that are wrong or fail, though others answer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from helpers.commands.cli_runner import FORWARD, run, run_json, use_own_folders
from helpers.runs import wrong_cpu_solvers

import miofind
from miofind.cli.failed_candidates import failed_counts, left_out_lines
from miofind.driver.line import parse_driver_line
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.steps import Config

HERE = ("--device", "cpu")
(PROBLEM,) = parse_driver_line(" ".join(FORWARD))
STATUSES = {"vendor/Wrong": "wrong_result", "vendor/Refusing": "launch_failed"}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)
    wrong_cpu_solvers.register(monkeypatch)


def outcome(solver_id: str, status: Status, message: str = "", **values: int) -> Outcome:
    candidate = Candidate(network_config="any", solver_id=solver_id, config=Config.of(**values))
    return Outcome(candidate=candidate, status=status, message=message)


def test_a_find_and_the_finds_that_the_finddb_answers_name_them() -> None:
    for _ in range(2):
        lines = run("find", *FORWARD, *HERE).stdout.splitlines()
        (line,) = [line for line in lines if line.startswith("left out: ")]
        assert line.startswith("left out: vendor/Wrong (wrong result: ")
        assert ", vendor/Refusing (launch failed: " in line
        assert "the launch was refused" in line
        assert line.endswith(f"; `miofind db show --all {PROBLEM.network_config}` tells more")
    shown = run("db", "show", "--all", PROBLEM.network_config).stdout
    assert "vendor/Refusing  " in shown
    assert "the launch was refused" in shown


@pytest.mark.parametrize("command", ["find", "run"])
def test_json_has_each_with_status_and_message(command: str) -> None:
    printed = run_json(command, *FORWARD, *HERE)
    failed = printed["problems" if command == "find" else "runs"][0]["failed"]
    assert {each["solver"]: each["status"] for each in failed} == STATUSES
    assert [each["config"] for each in failed] == [{}, {}]
    assert all(each["message"] for each in failed)
    assert run_json("find", *FORWARD, *HERE, "--exclude", "vendor/Wrong,vendor/Refusing")["problems"][0]["failed"] == []


def test_the_finddb_that_knows_more_is_named(tmp_path: Path) -> None:
    other = str(tmp_path / "other.db")
    assert f"`miofind db show --all --db {other} conv2d-" in run("find", *FORWARD, *HERE, "--db", other).stdout
    assert "); --verbose tells more\n" in run("find", *FORWARD, *HERE, "--db", ":memory:").stdout


def test_the_finddb_that_has_the_failure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped one had the answer and the failure, and the user's was named, which was not there."""
    shipped, own = str(tmp_path / "shipped.db"), str(tmp_path / "own.db")
    run("find", *FORWARD, *HERE, "--db", shipped)
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", shipped)
    assert f"`miofind db show --all --db {shipped} conv2d-" in run("find", *FORWARD, *HERE, "--db", own).stdout


def test_a_run_names_them_below_the_solution() -> None:
    assert "\nleft out: vendor/Wrong (wrong result: " in run("run", *FORWARD, *HERE).stdout


def test_a_find_without_a_solution_has_them_in_its_json() -> None:
    printed = run_json("find", *FORWARD, *HERE, "--only", "vendor/Wrong", code=1)
    assert [each["solver"] for each in printed["problems"][0]["failed"]] == ["vendor/Wrong"]


def test_a_tuning_counts_them() -> None:
    result = run("tune", *FORWARD, *HERE, "--in-process")
    assert "1 problem, 1 measured (1 candidate wrong, 1 failed) in " in result.stdout
    assert "left out: vendor/Wrong (wrong result: " in result.stdout
    assert ", 1 candidate wrong, 1 failed (" in result.stderr
    (tuned,) = run_json("tune", *FORWARD, *HERE, "--in-process", "--force")["results"]
    assert {each["solver"]: each["status"] for each in tuned["failed"]} == STATUSES


def test_what_is_not_tried_again_says_what_was_wrong() -> None:
    only = (*HERE, "--only", "vendor/Wrong")
    first = run("find", *FORWARD, *only, code=1).stderr
    said = first.partition("wrong_result ")[2].splitlines()[0]
    assert "elements" in said
    again = run("find", *FORWARD, *only, code=1).stderr
    assert f"failed here before (wrong_result: {said[:100]}" in again


def test_a_wrong_result_is_logged_and_other_failures_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), miofind.Handle("cpu", database=":memory:") as handle:
        miofind.find_solutions(PROBLEM, handle=handle)
    (told,) = [record.message for record in caplog.records]
    assert told.startswith("solver vendor/Wrong is wrong for ")
    assert "elements" in told


def test_one_line_for_any_number() -> None:
    many = [outcome("A", Status.CRASHED, f"first {n}\nsecond", tile=n) for n in range(4)]
    others = [outcome(name, Status.LAUNCH_FAILED, "x" * 300) for name in "BCDE"]
    with miofind.Handle("cpu", database=":memory:") as handle:
        assert left_out_lines([], handle) == []
        (line,) = left_out_lines([*others, *many, outcome("F", Status.WRONG_RESULT)], handle)
    assert line.startswith("left out: F (wrong result), A (4 configurations, crashed: first 0), B (launch failed: xxx")
    assert f"{'x' * 200}...), and 3 more; " in line
    assert failed_counts([*others, *many]) == "8 candidates failed"
    assert failed_counts([outcome("F", Status.WRONG_RESULT)] * 2) == "2 candidates wrong"
    assert failed_counts([]) == ""
