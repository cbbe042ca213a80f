"""`python -m miofind.torch`: a script runs as it would alone, and what it convolves is computed or recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes.waiting import LIMIT_S

from miofind.suites import load
from miofind.torch import __main__ as program
from miofind.torch import disable
from miofind.torch.override.dispatcher import current

INTERRUPTED = """
import os, signal, sys, torch
import beside                           # lies in the script's folder
assert os.path.samefile(sys.modules["__main__"].__file__, sys.argv[0]) and sys.argv[1:] == ["--lr", "1", "-m"]
model = torch.nn.Conv2d(3, 4, 3)
for _ in range(3):
    model(torch.randn(2, 3, 6, 6)).sum().backward()
if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGINT)
"""
FAILS = """
import sys
def step():
    raise ValueError("of the script")
try:
    sys.exit(int(sys.argv[1]))
except ValueError:
    step()
"""

RECORDS_ONTO_A_FULL_DISK = """
import os, torch, miofind.torch
model = torch.nn.Conv2d(3, 4, 3)
model(torch.ones(1, 3, 5, 5))
os.symlink("/dev/full", "step.csv")
try:
    with miofind.torch.record("step.csv"):
        model(torch.ones(2, 3, 5, 5))
except miofind.errors.InvalidOptionError as error:
    assert "step.csv cannot be written: No space left" in str(error) and "another path" in str(error)
os.unlink("step.csv")                   # there is space again
"""


ENABLES = """
import torch, miofind.torch
model = torch.nn.Conv2d(3, 4, 3)
miofind.torch.enable(devices=("cuda", "cpu"), dtypes="half")
model(torch.ones(1, 3, 5, 5))
with miofind.torch.use("fallback", devices="cpu"):
    model(torch.ones(2, 3, 5, 5))
miofind.torch.disable()
model(torch.ones(3, 3, 5, 5))
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MIOFIND_TORCH")}
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "miofind.torch", *arguments],
        env=kept | {"PYTHONPATH": root, "HOME": str(folder)} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        # A shell has what it starts in the background ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_a_run_that_ctrl_c_ends_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(INTERRUPTED)
    (tmp_path / "scripts" / "beside.py").write_text("")
    ended = run(tmp_path, "scripts/train.py", "--lr", "1", "-m", MIOFIND_TORCH="record", RANK="1")
    assert ended.returncode == -signal.SIGINT, ended.stderr
    path = tmp_path / "miofind_problems.rank1.csv"
    assert [(each.problem.network_config, each.count) for each in load(str(path)).problems()] == [
        ("conv2d-forward-n2-c3-i6x6-k4-f3x3-float32-NCHW-e.bias", 3),
        ("conv2d-backward_weights-n2-c3-i6x6-k4-f3x3-float32-NCHW-e.bias_gradient", 3),
    ]
    assert f"miofind tune --suite {path}" in ended.stderr
    assert "Error" not in ended.stderr
    assert ended.stdout == ""
    kept = path.read_text()
    misspelt = run(tmp_path, "scripts/trian.py", MIOFIND_TORCH="record", RANK="1")
    assert misspelt.returncode == 2
    assert f"nothing was written to {path}" in misspelt.stderr
    assert path.read_text() == kept


def test_a_run_that_a_launcher_ends_is_recorded(tmp_path: Path) -> None:
    """By SIGTERM, after which Python does nothing at exit."""
    script = "import os, signal, torch\ntorch.nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 5, 5))\n"
    (tmp_path / "train.py").write_text(script + "os.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()\n")
    ended = run(tmp_path, "train.py", MIOFIND_TORCH="record")
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    (found,) = load(str(tmp_path / "miofind_problems.csv")).problems()
    assert found.problem.network_config == "conv2d-forward-n1-c3-i5x5-k4-f3x3-float32-NCHW-e.bias"


def test_what_a_script_enables_itself_is_recorded_as_well(tmp_path: Path) -> None:
    """With the README's `enable()` in it nothing was."""
    (tmp_path / "train.py").write_text(ENABLES)
    ended = run(tmp_path, "train.py", MIOFIND_TORCH="record")
    found = load(str(tmp_path / "miofind_problems.csv")).problems()
    assert (ended.returncode, [each.problem.n for each in found]) == (0, [1, 2, 3]), ended.stderr
    assert ended.stderr.count("MIOFIND_TORCH=record is set: miofind.torch.enable() leaves") == 2


def test_the_folder_of_a_recording_is_made(tmp_path: Path) -> None:
    """A run of hours was recorded, and its problems could not be written."""
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 5, 5))")
    ended = run(tmp_path, "train.py", MIOFIND_TORCH="record", MIOFIND_TORCH_RECORD="a/b/net.csv")
    assert (ended.returncode, len(load(str(tmp_path / "a" / "b" / "net.csv")).problems())) == (0, 1), ended.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_what_a_full_disk_has_no_space_for_is_not_lost(tmp_path: Path) -> None:
    """The problems of a run of hours were dropped, with a line that said why."""
    (tmp_path / "train.py").write_text(RECORDS_ONTO_A_FULL_DISK)
    (tmp_path / "full.csv").symlink_to("/dev/full")
    ended = run(tmp_path, "train.py", MIOFIND_TORCH="record", MIOFIND_TORCH_RECORD="full.csv", TMPDIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert len(load(str(tmp_path / "step.csv")).problems()) == 1
    (elsewhere,) = tmp_path.glob("miofind_*/recorded.csv")
    assert len(load(str(elsewhere)).problems()) == 2
    (told,) = (line for line in ended.stderr.splitlines() if "full.csv" in line)
    assert "No space left" in told
    assert "choose another path" in told
    assert f"miofind tune --suite {elsewhere}" in told


@pytest.mark.parametrize("script", [FAILS, "def step(:"], ids=["raises", "bad syntax"])
def test_the_traceback_is_the_script_s(script: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(script)
    ended = run(tmp_path, "fails.py", "none", MIOFIND_TORCH="0")
    assert ended.returncode == 1
    alone = subprocess.run(
        [sys.executable, "fails.py", "none"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.stderr == alone.stderr


@pytest.fixture
def end_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code and stderr of the program when a script that does nothing is its only argument, or no script is."""

    def end(*arguments: str, **environment: str) -> tuple[Any, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["-m", *arguments])
        with pytest.raises(SystemExit) as caught:
            program.main()
        return caught.value.code, capsys.readouterr().err

    return end


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("way", ["1", "tune"])
def test_a_module_runs_with_the_override_and_ends_with_its_own_code(
    end_of: Any, gpus: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU nothing is miofind's to run, and nothing said so."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    (tmp_path / "ends.py").write_text(
        "import sys, miofind.torch.override.dispatcher as o\nassert __name__ == '__main__'\n"
        "sys.exit(int(sys.argv[1]) if o.current() else 'not enabled')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    try:
        told = "" if gpus else "miofind: PyTorch sees no CUDA device, so its own kernels run all convolutions\n"
        assert end_of("-m", "ends", "7", MIOFIND_TORCH=way) == (7, told)
    finally:
        disable()


@pytest.mark.parametrize("name", ["nope", "nope.mod", "package.nope", "package.nope.mod"])
def test_a_module_that_there_is_not_is_said(
    end_of: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback through runpy told of it."""
    (tmp_path / "package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert end_of("-m", name, MIOFIND_TORCH="0") == (2, f"miofind: there is no module {name}\n")


@pytest.mark.parametrize("name", ["folder", "packed.zip"])
def test_what_has_nothing_to_run_is_said(
    end_of: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (tmp_path / "folder").mkdir()
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as file:
        file.writestr("other.py", "")
    path = str(tmp_path / name)
    assert end_of(path, MIOFIND_TORCH="0") == (2, f"miofind: {path} has no __main__.py to run\n")


def test_what_a_package_lacks_is_its_own_to_tell(end_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "__init__.py").write_text("import a_library_that_there_is_not")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_there_is_not"):
        end_of("-m", "lacking.train", MIOFIND_TORCH="0")


def test_what_cannot_be_run_is_said(end_of: Any, tmp_path: Path) -> None:
    assert end_of() == (2, f"miofind: {program._USAGE}\n")
    assert "--fast is no option" in end_of("--fast")[1]
    told = "miofind: MIOFIND_TORCH='yes' must be one of 0, 1, record, tune\n"
    assert end_of("x.py", MIOFIND_TORCH="yes") == (2, told)
    code, text = end_of("x.py", MIOFIND_TORCH="record", MIOFIND_TORCH_RECORD=str(tmp_path / "x.json"))
    assert (code, ".csv" in text) == (2, True)
    (tmp_path / "file").touch()
    code, text = end_of("x.py", MIOFIND_TORCH="record", MIOFIND_TORCH_RECORD=str(tmp_path / "file" / "x.csv"))
    assert (code, "x.csv cannot be written, as its folder cannot be made" in text) == (2, True)
    assert current() is None
