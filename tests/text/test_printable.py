"""Names of other people on a terminal: nothing that steers it, hides or turns round what follows, or fills it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sqlite3
import traceback
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from helpers.commands.cli_runner import FORWARD, TINY, run, use_own_folders

import miofind
from miofind.cli.output import Sheet, print_error, print_note, print_text
from miofind.driver.line import driver_line
from miofind.errors import CompileError, DatabaseError, InvalidOptionError, NoSolutionError
from miofind.finddb import Row, Store
from miofind.process import child_logs
from miofind.text.printable import LINE_CHARS, NAME_CHARS, printable, printable_lines, printable_name

STEERING = "\x1b]0;t\x07\x1b[2J\r\x08\x9b31m\x7f"
TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
UNSEEN = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u034f\u115f\u3164\ufe0f\U000e0041\U000e0100"
BREAKING = "\nerror: forged\x0b\x0c\x85\u2028\u2029"
EVIL = STEERING + TURNING + UNSEEN + BREAKING
LONG = "n" * 3000
ENDLESS = "a" * 100_000
ROW = Row(solver_id="ConvA", solver_version=1, config="{}", status="ok", time_ms=0.5)
PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3), padding=1)
DEVICE = "NVIDIA H200|132|9.0|"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def check(result: Result) -> str:
    """What was printed for people, where nothing of it is harmful."""
    for stream in (result.stdout, result.stderr):
        check_text(stream)
    return f"{result.stdout}{result.stderr}"


def check_text(text: str, limit: int = LINE_CHARS + 200) -> None:
    for line in text.split("\n"):
        assert line.isprintable(), [c for c in line if not c.isprintable()]
        assert not any(c in UNSEEN for c in line)
        assert len(line) <= limit
        assert not re.match("error: forged", line)


@pytest.mark.parametrize(
    "character", [*(c for c in EVIL if not c.isascii() or not c.isprintable()), "\t", "\0", "\udcff", "\ue000"]
)
def test_what_is_not_seen_is_escaped(character: str) -> None:
    shown = printable(f"a{character}b")
    assert shown.isascii()
    assert shown.isprintable()
    assert shown[0] + shown[-1] == "ab"
    assert shown[1] == "\\"
    assert shown[1:-1].encode().decode("unicode_escape") == character


@pytest.mark.parametrize("text", ["", "conv -n 1", "Grüße, 世界, Ελλάδα, \N{SNOWMAN} é", "a\\x1b", "[bold]", "e\u0301"])
def test_what_is_seen_stays_as_it_is(text: str) -> None:
    assert printable(text) == text
    assert printable(printable(f"{text}\x1b")) == printable(f"{text}\x1b")


def test_every_character_is_seen_or_escaped() -> None:
    for number in range(0x30000):
        shown = printable(chr(number))
        assert shown == chr(number) or shown.startswith("\\")
        if unicodedata.category(chr(number)) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert shown.startswith("\\"), hex(number)


@pytest.mark.parametrize("unit", ["n", "n n", "\x1b", "\N{SNOWMAN}", "\u202e "])
def test_what_is_long_is_cut_in_the_middle(unit: str) -> None:
    text = "begin" + unit * 100_000 + "end"
    for shown, limit in ((printable(text), LINE_CHARS), (printable_name(text), NAME_CHARS)):
        assert len(shown) <= limit
        assert shown.startswith("begin")
        assert shown.endswith("end")
        assert "characters more)..." in shown
    assert len(printable("word " * 10 + LONG)) < 600
    assert len(printable_lines("\n".join([text, "second"])).split("\n")[0]) <= LINE_CHARS
    assert printable_lines("a\tb\nc\rd") == "a       b\nc\\rd"


def test_the_longest_problems_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    problem = miofind.ProblemDescription.convolution(
        x=(1024, 48, 1023, 1023, 15),
        w=(1024, 3, 127, 127, 13),
        padding=(126, 126, 11),
        stride=(101, 103, 10),
        dilation=(7, 7, 1),
        groups=16,
        direction="backward_weights",
        dtype="bfloat16",
    )
    long_path = "/" + "/".join(["folder" * 40] * 16)
    sheet = Sheet("", ("problem", "name"), fold=("problem",))
    sheet.add(problem.network_config, "n")
    sheet.print()
    print_text(driver_line(problem), f"error: {problem.network_config}")
    printed = capsys.readouterr().out
    assert printed.count(problem.network_config) == 2
    assert driver_line(problem) in printed
    assert run("db", "path", "--db", long_path).stdout.splitlines()[0] == long_path


@pytest.mark.parametrize(
    "value", [f"x{EVIL}y", f"x{LONG}y", f"x{ENDLESS}y", "x " * 50_000], ids=["evil", "long", "endless", "words"]
)
@pytest.mark.parametrize(
    "command",
    [
        ("VALUE",),
        ("--VALUE",),
        ("find", "VALUE"),
        ("find", "conv", "-n", "VALUE"),
        ("find", "conv", "--VALUE", "1"),
        ("find", *TINY, "-F", "1", "--only", "VALUE"),
        ("find", *FORWARD, "--device", "VALUE"),
        ("find", *FORWARD, "--workspace-limit", "VALUE"),
        ("find", *FORWARD, "--top", "VALUE"),
        ("find", *FORWARD, "--find-mode", "VALUE"),
        ("tune", "--suite", "VALUE"),
        ("tune", "--csv", "VALUE"),
        ("tune", *FORWARD, "--batch", "VALUE"),
        ("compile", *FORWARD, "--arch", "VALUE"),
        ("run", "--solution", "VALUE"),
        ("bench", "--suite", "VALUE"),
        ("solvers", "VALUE"),
        ("db", "VALUE"),
        ("db", "show", "VALUE"),
        ("db", "stats", "--db", "VALUE"),
        ("db", "import", "VALUE"),
        ("db", "merge", "VALUE"),
        ("db", "diff", "VALUE", "VALUE"),
        ("db", "check", "VALUE"),
    ],
    ids=" ".join,
)
def test_what_was_typed_is_told_in_a_line(command: tuple[str, ...], value: str) -> None:
    result = run(*(word.replace("VALUE", value) for word in command), code=None)
    assert result.exit_code in (1, 2, 3, 4)
    assert len(check(result)) < 5000
    assert len(result.stderr.splitlines()) < 12


@pytest.mark.parametrize(
    "name", ["MIOFIND_LOG", "MIOFIND_FIND_MODE", "MIOFIND_DB", "MIOFIND_SYSTEM_DB", "MIOFIND_CACHE_DIR"]
)
@pytest.mark.parametrize("value", [EVIL, ENDLESS], ids=["evil", "endless"])
def test_variables_are_told_in_a_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    for command in (("doctor",), ("find", *FORWARD, "--device", "cpu"), ("db", "stats")):
        check(run(*command, code=None))
    check_text(run("db", "path", code=None).stdout, limit=4200)


def crafted(path: Path, name: str, time_ms: float) -> None:
    """A FindDB whose names, messages and configurations all have `name` in them, past what a store takes in."""
    row = replace(ROW, solver_id="ConvMARKER", message="failed MARKER", config='{"knobMARKER":1}', time_ms=time_ms)
    with Store(path) as store:
        store.record("GPU MARKER|132|9.0|", PROBLEM.network_config, [row, replace(row, solver_id="ConvB")])
        store.record("MARKER", "conv-MARKER", [row])
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for column in [row[1] for row in database.execute(f"PRAGMA table_info({table})")]:
                with contextlib.suppress(sqlite3.IntegrityError):
                    database.execute(f"UPDATE {table} SET {column} = replace({column}, 'MARKER', ?)", (name,))


@pytest.mark.parametrize("evil", [EVIL, LONG, f"{EVIL}{LONG}"], ids=["evil", "long", "both"])
def test_a_findb_of_other_people_is_shown(evil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And told in JSON as it is."""
    before, after = tmp_path / "before.db", tmp_path / "after.db"
    crafted(before, evil, 0.5)
    crafted(after, evil, 0.4)
    for command in (
        ("show",),
        ("show", "--all", PROBLEM.network_config),
        ("stats",),
        ("check",),
        ("diff", str(before), str(after)),
        ("release", str(before), str(tmp_path / "release.db")),
        ("export", str(tmp_path / "export.jsonl")),
        ("merge", str(after)),
    ):
        monkeypatch.setenv("MIOFIND_DB", str(tmp_path / "own.db" if command[0] == "merge" else before))
        for line in check(run("db", *command, code=None)).split("\n"):
            assert "n" * (NAME_CHARS * 5) not in line
    monkeypatch.setenv("MIOFIND_DB", str(before))
    check(run("doctor", code=None))
    shown = run("db", "show", "--json", code=None)
    if shown.exit_code == 0:
        assert shown.stdout.isascii()
        assert evil in {problem["device"] for problem in json.loads(shown.stdout)["problems"]}


@pytest.mark.parametrize("evil", [EVIL.replace("\n", ""), LONG], ids=["evil", "long"])
def test_layers_of_other_people_are_shown(evil: str, tmp_path: Path) -> None:
    table = tmp_path / "layers.csv"
    text = f"name,n,c,h,w,k,fy,fx\nlayer{evil},1,2,3,4,5,1,1\n".replace("\r", "").replace("\x0b", "")
    table.write_text(text, encoding="utf-8", newline="")
    asked = ("tune", "--csv", str(table), "--device", "cpu", "--in-process")
    check(run(*asked, code=None))
    check(run(*asked, "--dry-run", code=None))
    table.write_text(text.replace(",5,1,1", f",5,1,{evil}"), encoding="utf-8", newline="")
    check(run(*asked, code=None))


def test_a_line_break_in_a_file_name_forges_no_line(tmp_path: Path) -> None:
    name = str(tmp_path / "a\nerror: forged\n\x1b[31m")
    result = run("run", "--solution", name, *FORWARD, code=None)
    assert r"a\nerror: forged\n\x1b[31m" in check(result)
    os.makedirs(name)
    assert r"a\nerror: forged\n" in check(run("find", *FORWARD, "--db", f"{name}/finddb.db"))


def test_logs_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Of this process and of its children, with tracebacks below them."""
    run("-v", "db", "path")
    from miofind.cli.session import configure_logging, reset_logging

    configure_logging(2)
    sent: list[logging.LogRecord] = []
    try:
        logger = logging.getLogger("miofind.test")
        logger.warning("%s", EVIL)
        logger.warning(ENDLESS)
        try:
            raise DatabaseError(EVIL)
        except DatabaseError:
            logger.exception("failed: %s", EVIL)
            record = logger.makeRecord("miofind.test", logging.ERROR, "f", 1, EVIL, (), None)
            handler = child_logs._ToParent(sent.append)
            record.exc_info = (DatabaseError, DatabaseError(EVIL), None)
            handler.enqueue(handler.prepare(record))
        child_logs.show(sent[0])
    finally:
        reset_logging()
    told = capsys.readouterr().err
    check_text(told)
    assert "Traceback" in told
    assert told.count("warning: ") == 2


def test_errors_are_printable_wherever_they_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Python prints those that no program catches; `args` have the message as it is."""
    for kind in (DatabaseError, InvalidOptionError):
        error = kind(f"{EVIL}{ENDLESS}")
        check_text(str(error))
        assert "\n" not in str(error)
        assert error.args == (f"{EVIL}{ENDLESS}",)
        check_text("".join(traceback.format_exception_only(error)))
    listed = NoSolutionError(f"none:\n  ConvA: {EVIL}".replace("\nerror", "error"))
    assert str(listed).splitlines()[0] == "none:"
    compiled = CompileError(f"a{EVIL}", source=EVIL, options=(EVIL,), log="one\n  two\x1b[31m")
    assert len(str(compiled).split("\n")) == 5
    for error in (listed, compiled, ValueError(EVIL), KeyError(EVIL)):
        print_error(error)
    print_note(EVIL, LONG)
    check_text(capsys.readouterr().err)


def test_what_is_left_out_is_counted() -> None:
    assert "(2920 characters more)" in printable_name(LONG)
    assert "(2540 characters more)" in printable(f"a {LONG} b")
