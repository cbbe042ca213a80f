"""The command line in bad surroundings: closed or full streams, missing CuPy, Ctrl-C. Never a traceback."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.cli_runner import FORWARD, TINY, run, use_own_folders
from helpers.processes.waiting import LIMIT_S, read_until, wait_until

from miofind.cli import db as db_commands
from miofind.cli.output import Sheet, print_note
from miofind.text.printable import printable

pytestmark = pytest.mark.sampled(2)

ROOT = Path(__file__).resolve().parents[2]
needs_full = pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def shell(line: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `line` does, where "$@" stands for miofind and its arguments; streams are buffered, as Python has them."""
    command = ["bash", "-c", line, "bash", sys.executable, "-m", "miofind", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=LIMIT_S,
        env=environment,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


@needs_full
@pytest.mark.parametrize(
    "arguments", [("solvers", "--json"), ("doctor",), ("--help",), ("find", *FORWARD)], ids=lambda words: words[0]
)
def test_a_full_disk_under_stdout_is_told(arguments: tuple[str, ...]) -> None:
    done = shell('"$@" > /dev/full', *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: the output: No space left on device"


@needs_full
def test_a_full_disk_under_stderr_stops_nothing() -> None:
    assert shell('"$@" 2> /dev/full', "tune", *FORWARD, "--in-process").returncode == 0


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "2>&- <&-"])
def test_closed_streams_stop_nothing(closed: str) -> None:
    assert shell(f'"$@" {closed}', "find", *FORWARD).returncode == 0


HIDE = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "cupy":
            raise {error}
sys.meta_path.insert(0, Hidden())
from miofind.cli import main
from miofind.device import device
device.has_driver = lambda: True
main(sys.argv[1:], prog_name="miofind")
"""


MISSING, BROKEN = 'ModuleNotFoundError("No module named cupy")', 'ImportError("libcuda")'
ON_CUDA = ("--device", "cuda")


@pytest.mark.parametrize(
    ("error", "device", "code"),
    [
        pytest.param(MISSING, (), 0, id="missing-any"),
        pytest.param(BROKEN, ON_CUDA, 3, id="broken-cuda"),
        pytest.param(BROKEN, (), 0, id="broken-any", marks=pytest.mark.full_matrix),
        pytest.param(MISSING, ON_CUDA, 3, id="missing-cuda", marks=pytest.mark.full_matrix),
    ],
)
def test_without_cupy(error: str, device: tuple[str, ...], code: int) -> None:
    command = [sys.executable, "-c", HIDE.format(error=error), "find", *FORWARD, *device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert code == 0 or "CuPy" in done.stderr


def test_cupy_that_cannot_make_its_cache_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    on_gpu = shell('"$@"', "find", *FORWARD, "--device", "cuda")
    assert on_gpu.returncode == 3
    assert "CUPY_CACHE_DIR" in on_gpu.stderr
    anywhere = shell('"$@"', "find", *FORWARD)
    assert anywhere.returncode == 0
    assert "The CPU place is used" in anywhere.stderr


INTERRUPT = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {where!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
if {where!r} == "exit":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""


WHERES = ("miofind.api", "ml_dtypes", "sqlalchemy", "rich", "miofind.cli.find", "exit")
SAMPLED = {
    ("miofind.api", False),
    ("miofind.api", True),
    ("sqlalchemy", False),
    ("miofind.cli.find", True),
    ("exit", False),
}


@pytest.mark.parametrize(
    ("where", "installed"),
    [
        pytest.param(
            where,
            installed,
            id=f"{'script' if installed else 'module'}-{where}",
            marks=[] if (where, installed) in SAMPLED else pytest.mark.full_matrix,
        )
        for where in WHERES
        for installed in (False, True)
    ],
)
def test_ctrl_c_leaves_no_traceback_of_imports(where: str, installed: bool, tmp_path: Path) -> None:
    """It printed one in the first half second."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT.format(where=where), encoding="utf-8")
    script = tmp_path / "miofind"
    script.write_text("from miofind.cli import main\nmain()\n", encoding="utf-8")
    command = [sys.executable, str(script)] if installed else [sys.executable, "-m", "miofind"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [*command, "find", *FORWARD, "--device", "cpu"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_program_that_imports_miofind_keeps_its_ctrl_c() -> None:
    script = "import signal, miofind; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    setting = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    done = subprocess.run([sys.executable, "-c", setting + script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_ctrl_c_keeps_what_was_tuned(tmp_path: Path) -> None:
    words = ["--suite", "resnet50", "--batch", "1", "--device", "cpu"]
    arguments = ["tune", *words, "--time-budget", "0.1", "--in-process"]
    child = subprocess.Popen(
        [sys.executable, "-m", "miofind", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        cwd=tmp_path,
    )
    assert child.stderr is not None
    try:
        read_until(child.stderr, " tuned ")
        child.send_signal(signal.SIGINT)
        printed, noted = child.communicate(timeout=LIMIT_S)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode in (0, 130)  # 0 where it was done before the signal came
    assert "Traceback" not in noted
    assert "measured" in printed
    again = shell('"$@"', *arguments, "--dry-run", "--json")
    assert json.loads(again.stdout)["forecasts"][0]["known"] >= 1


def test_sqlalchemy_says_nothing_of_its_own() -> None:
    run("db", "path")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("sqlalchemy").handlers)


@pytest.mark.parametrize(("step", "more"), [("print_report", ()), ("print_forecasts", ("--dry-run",))])
def test_sigterm_outside_the_measuring_is_ctrl_c_too(
    step: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"miofind.cli.tune.{step}", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert run("tune", *FORWARD, "--in-process", *more, code=130).stderr.splitlines()[-1] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_measuring_process_ends_with_its_parent() -> None:
    child = (
        "import os, time; from miofind.process.parent import end_with_parent;"
        "end_with_parent(os.getppid()); print(flush=True); time.sleep(3600)"
    )
    parent = (
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", parent], capture_output=True, check=True, timeout=LIMIT_S).stdout)
    wait_until(lambda: not is_running(pid), "the end of the child")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_unforeseen_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(db_commands, "user_path", fails)
    told = run("db", "path", code=1).stderr
    assert told.startswith("error: ZeroDivisionError: by zero")
    assert "-vv" in told


@pytest.mark.parametrize(
    "arguments",
    [
        ("find", *FORWARD, "--only", ","),
        ("find", *FORWARD, "--workspace-limit", "999999999999999999G"),
        ("find", *TINY, "-F", "1", "--max-error", "nan"),
        ("tune", *FORWARD, "--stop-after", "nan"),
    ],
    ids=lambda words: words[-2],
)
def test_options_without_sense_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert run(*arguments, code=2).stderr


@pytest.mark.parametrize("name", ["~no_such_user/finddb.db", "a" * 300], ids=["unknown user", "too long"])
def test_databases_that_no_file_can_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_DB", name)
    assert f"{name[:60]}" in run("find", *FORWARD, "--device", "cpu").stderr
    for command in (("tune", *FORWARD), ("db", "stats")):
        assert f"{name[:60]}" in run(*command, code=4).stderr
    run("doctor")


def test_an_export_to_a_pipe_writes_to_it(tmp_path: Path) -> None:
    run("find", *FORWARD)
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    run("db", "export", str(pipe))
    reader.join(timeout=LIMIT_S)
    assert pipe.is_fifo()
    assert read[0].startswith('{"format":')


def test_names_of_other_people_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b[31mb\r\tc\n") == r"a\x1b[31mb\r\tc\n"
    sheet = Sheet("", ("layer",))
    sheet.add(":x: \x1b]0;title\x07")
    sheet.print()
    print_note("root:x:0")
    captured = capsys.readouterr()
    assert ":x:" in captured.out
    assert "\x1b" not in captured.out
    assert captured.err == "root:x:0\n"


@pytest.mark.parametrize(
    "columns",
    ["0", "\N{SUPERSCRIPT TWO}", *(pytest.param(value, marks=pytest.mark.full_matrix) for value in ("", "wide", "-1"))],
)
def test_columns_without_sense_hide_nothing(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = one_by_one(["tune", *FORWARD, "--in-process"], ["db", "upgrade", "--db", "missing.db"])
    assert "1 measured in " in done.stdout
    assert "[1/1] tuned" in done.stderr
    assert "there is no FindDB" in done.stderr


@pytest.mark.parametrize("encoding", [pytest.param("utf-8:strict", marks=pytest.mark.full_matrix), "ascii:strict"])
def test_names_that_stdout_cannot_say_are_escaped(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    database = os.fsdecode(os.fsencode(tmp_path) + b"/b\xffd\xc3\xa9.db")
    commands = [["db", name, "--db", database] for name in ("stats", "show", "check", "path", "upgrade")]
    commands.insert(0, ["tune", *FORWARD, "--in-process", "--db", database])
    done = one_by_one(*commands, ["db", "release", database, f"{database}2"])
    assert done.returncode == 0, done.stderr
    begun, *notes, tuned = done.stderr.splitlines()
    assert begun.startswith("there is no FindDB at ")
    assert r"b\udcffd" in begun
    assert all(note.startswith("tune: no GPU is used") for note in notes)
    assert tuned.startswith("[1/1] tuned")
    *told, _ = done.stdout.split("\f\n")[:-1]
    assert [r"b\udcffd" in each for each in told] == [True] * len(commands)


def one_by_one(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Commands in one process, which must all end well, each with a form feed after what it prints."""
    script = (
        "import json, sys; from miofind.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    code = main(words, standalone_mode=False)\n"
        "    assert not code, words\n"
        "    print('\\f')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
