"""Scripts of benchmarks: --help without a GPU, arguments checked before the work begins, and exit codes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.device.device.has_cupy", lambda: False)
    monkeypatch.setattr("miofind.device.device.has_driver", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.syspath_prepend(FOLDER)


def ended_with(name: str, *arguments: str) -> object:
    """The exit code of a script."""
    sys.argv[:] = [name, *arguments]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_no_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_with(name, "--help") == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bound_ratio.py", "overhead.py", "transforms.py", "wild.py"])
def test_what_needs_a_gpu_ends_with_3(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_with(name) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: CuPy is not installed")
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("wild.py", "--share 0/0", "--share: '0/0' is no share: write 1/2"),
        ("wild.py", "--share 1/-1", "is no share"),
        ("wild.py", "--share 3/2", "is no share"),
        ("wild.py", "--only Nope --configs 1", "--only: solver 'Nope' is not registered"),
        ("wild.py", "--only ConvFft --configs -1", "--configs: '-1' is no whole number from 0 up"),
        ("wild.py", "--only ConvFft", "go together"),
        ("wild.py", "--layout QQQQ", "--layout: invalid choice: 'QQQQ'"),
        ("wild.py", "--math ieeee", "--math: invalid choice"),
        ("wild.py", "--limit -5", "--limit: '-5' is no whole number from 1 up"),
        ("wild.py", "--stop-after nan", "--stop-after: 'nan' is no number from 0.0 up"),
        ("wild.py", "--json /dev/null/a.json", "--json: '/dev/null/a.json' cannot be written"),
        ("transforms.py", "--share 5/2", "is no share"),
        ("transforms.py", "--problems nope", "--problems: 'nope' is unknown: choose from dense,lines,winograd"),
        ("transforms.py", "--problems ,", "'' is unknown"),
        ("transforms.py", "--layouts NCHW,NCHW", "--layouts: 'NCHW' is named twice"),
        ("transforms.py", "--directions up", "choose from forward,backward_data,backward_weights"),
        ("transforms.py", "--dtype q", "--dtype: invalid choice"),
        ("transforms.py", "--seconds -1", "--seconds: '-1' is no number from 0.0 up"),
        ("numerics.py", "--place moon", "--place: 'moon' is unknown: choose from cuda,cpu"),
        ("bound_ratio.py", "moon", "invalid choice: 'moon'"),
        ("search_quality.py", "x.db q", "arch='q' is not an architecture"),
        ("tune_kill.py", "--json .", "--json: '.' cannot be written"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(
    name: str, line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some ended in tracebacks, some of them after the whole run; of others nothing was said."""
    assert ended_with(name, *line.split()) == 2
    assert told in capsys.readouterr().err


def test_a_database_that_is_not_there_ends_with_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_with("search_quality.py", "missing.db") == 4
    assert "missing.db does not exist" in capsys.readouterr().err


def test_shares_make_up_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    listed = []
    for part in ("1/1", "1/2", "2/2"):
        sys.argv[:] = ["transforms.py", "--problems", "lines", "--layouts", "NCHW", "--list", "--share", part]
        runpy.run_path(str(FOLDER / "transforms.py"), run_name="__main__")
        listed.append(capsys.readouterr().out.splitlines())
    whole, first, second = listed
    assert len(first) == len(second)
    assert sorted(first + second) == sorted(whole)
