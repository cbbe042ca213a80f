"""How commands show that they go on where stderr is no terminal, and where it is one."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

import pytest
from helpers.commands.cli_runner import run, use_own_folders
from rich.console import Console

from miofind.cli import progress
from miofind.cli.progress import counted


def count(total: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts to `total`, each step so many seconds long."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with counted("work", total) as advance:
        for _ in range(total):
            advance()


def test_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    count(12, 2.0, monkeypatch)
    assert capsys.readouterr().err.splitlines() == [
        "work: 3/12 in 6.0 s, about 18 s left",
        "work: 6/12 in 12 s, about 12 s left",
        "work: 9/12 in 18 s, about 6.0 s left",
    ]


def test_what_is_over_soon_prints_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    count(40, 0.1, monkeypatch)
    count(1, 60.0, monkeypatch)
    captured = capsys.readouterr()
    assert captured.err + captured.out == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "stderr", lambda: terminal)
    with counted("work", 3) as advance:
        advance()
    assert isinstance(terminal.file, io.StringIO)
    assert "1/3" in terminal.file.getvalue()


@pytest.mark.parametrize(
    "command",
    [
        ("db", "null-test", "--pairs", "2", "--device", "cpu", "conv2d-forward-n1-c4-i6x6-k4-f1x1-float32-NCHW"),
        ("compile", "--arch", "80", "--only", "fft", "conv2d-forward-n1-c4-i30x30-k4-f11x11-float32-NCHW"),
    ],
    ids=["null-test", "compile"],
)
def test_long_commands_tell_it(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    use_own_folders(tmp_path_factory.mktemp("own"), monkeypatch)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    told = run(*command, code=None).stderr
    assert "/" in told.splitlines()[0]
    assert " left" in told.splitlines()[0]
