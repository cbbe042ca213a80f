"""A spawned process: it is begun or not at all, and imports what its parent imports."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from helpers.commands.cli_runner import FORWARD, use_own_folders
from helpers.processes.waiting import LIMIT_S

import miofind
from miofind.process import child as child_module
from miofind.process.child import Child

pytestmark = pytest.mark.sampled(2)


def test_ctrl_c_while_a_process_is_begun_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Popen forgot a process that it had begun: it stayed a zombie as long as its parent lived."""
    begun: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            begun.append(self)
            signal.raise_signal(signal.SIGINT)
            self.is_whole = True

    monkeypatch.setattr(child_module.subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Child("import time; time.sleep(3600)", "", [])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun[0].is_whole
    assert begun[0].returncode == -signal.SIGKILL


FORKS = (
    "import os, sys, time; from multiprocessing.connection import Connection; pid = os.fork() or time.sleep(3600); "
    "Connection(int(sys.argv[1])).send(pid); os._exit(1)"
)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux alone")
def test_what_a_child_forked_ends_with_it_although_it_ended_first() -> None:
    child = Child(FORKS, "", [])
    forked = child.connection.recv()
    ends = os.pidfd_open(forked)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.kill()
    try:
        assert select.select([ends], [], [], LIMIT_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(ends, signal.SIGKILL)
        os.close(ends)


PACKAGE = Path(miofind.__file__).parent
NAMES = ("numpy", "json", "multiprocessing", "miofind", "sitecustomize", "encodings")
FOREIGN = "import os, sys\nopen(os.path.join({folder!r}, 'was-run'), 'a').write(__name__ + chr(10))\nsys.exit(1)\n"
TELL = (
    "import sys, miofind, miofind.process.child, numpy; from multiprocessing.connection import Connection; "
    "Connection(int(sys.argv[1])).send((sys.path, miofind.__file__, numpy.__file__, sys.flags.isolated))"
)
PARENT = f"""
import json, sys
from miofind.process.child import Child
{{first}}
child = Child({TELL!r}, "", [])
print(json.dumps([child.connection.recv(), sys.path]))
child.kill()
"""


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder whose modules say that they were run."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(FOREIGN.format(folder=str(folder)))
    return folder


def told_by_child(command: list[str], folder: Path, **environment: str) -> tuple[Any, list[str]]:
    """What a child of a command that is started in a folder says of its imports, and the sys.path of its parent."""
    chosen = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=folder, env=chosen, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    told, path = json.loads(done.stdout.splitlines()[-1])
    return told, path


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        pytest.param((), {}, id="script"),
        pytest.param(("-I",), {}, id="-I"),
        pytest.param((), {"PYTHONPATH": str(PACKAGE.parent)}, id="PYTHONPATH", marks=pytest.mark.full_matrix),
        pytest.param(("-P",), {}, id="-P", marks=pytest.mark.full_matrix),
        pytest.param(("-E", "-s"), {}, id="-E -s", marks=pytest.mark.full_matrix),
    ],
)
def test_a_child_runs_nothing_of_the_current_folder(
    foreign: Path, tmp_path: Path, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    """numpy.py of the folder in which `miofind tune` was started was run."""
    script = tmp_path / "program.py"
    script.write_text(PARENT.format(first=f"sys.path.append({str(tmp_path)!r})"))
    (path, package, numpy_file, isolated), parents = told_by_child(
        [sys.executable, *options, str(script)], foreign, **environment
    )
    assert not (foreign / "was-run").exists()
    assert path == parents
    assert package == miofind.__file__
    assert numpy_file == numpy.__file__
    assert isolated == ("-I" in options)


def test_a_child_has_the_folders_that_its_parent_has(tmp_path: Path) -> None:
    """A module beside a program that is typed in, or named relatively, is found by its children."""
    (tmp_path / "relative").mkdir()
    (tmp_path / "with:colon").mkdir()
    first = "sys.path.insert(1, 'relative'); sys.path.append('with:colon')"
    (path, *_), parents = told_by_child([sys.executable, "-c", PARENT.format(first=first)], tmp_path)
    assert parents[:2] == ["", "relative"]
    assert path[:2] == [str(tmp_path), str(tmp_path / "relative")]
    assert path[-1] == str(tmp_path / "with:colon")


def test_a_child_imports_the_miofind_of_its_parent(tmp_path: Path) -> None:
    """Whatever became of the path on which that was found."""
    other = tmp_path / "elsewhere" / "miofind"
    other.parent.mkdir()
    other.symlink_to(PACKAGE)
    first = f"sys.path.insert(0, {str(tmp_path / 'later')!r})"
    later = tmp_path / "later" / "miofind"
    later.mkdir(parents=True)
    (later / "__init__.py").write_text("raise ImportError('another miofind')")
    code = PARENT.format(first=first).replace(
        "from miofind", f"sys.path.insert(0, {str(other.parent)!r})\nfrom miofind"
    )
    (_, package, *_), _ = told_by_child([sys.executable, "-c", code], tmp_path)
    assert package == str(other / "__init__.py")


def test_a_child_starts_where_the_current_folder_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    (_, package, *_), parents = told_by_child(
        [sys.executable, "-c", PARENT.format(first=f"import os; os.rmdir({str(gone)!r})")], gone
    )
    assert parents[0] == ""
    assert package == miofind.__file__


@pytest.mark.parametrize("command", ["find", "tune", "compile"])
def test_a_command_runs_nothing_of_the_current_folder(
    command: str, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_own_folders(tmp_path, monkeypatch)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script = tmp_path / "bin" / "miofind"
    script.parent.mkdir()
    script.write_text("from miofind.cli import main\nmain()\n")
    more = {"find": ["--isolate"], "tune": [], "compile": ["--arch", "90a", "--only", "ConvDirectNaive"]}[command]
    place = [] if command == "compile" else ["--device", "cpu"]
    words = [sys.executable, str(script), command, *FORWARD, *place, *more]
    done = subprocess.run(words, cwd=foreign, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert not (foreign / "was-run").exists(), done.stderr
    assert done.returncode == 0, done.stderr


def test_a_child_of_a_module_and_of_a_spawned_process_imports_what_they_import(tmp_path: Path) -> None:
    """`python -m` has the current folder on its path on purpose, and so have the processes that it spawns."""
    (tmp_path / "program.py").write_text(
        "import multiprocessing\n"
        "def work():\n"
        f"    exec({PARENT.format(first='')!r}, {{}})\n"
        "if __name__ == '__main__':\n"
        "    work()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    command = [sys.executable, "-m", "program"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 2, done.stderr
    for (path, package, *_), parents in told:
        assert path[0] == parents[0] == str(tmp_path)
        assert package == miofind.__file__
