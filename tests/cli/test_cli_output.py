"""Numbers and tables as they are printed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from helpers.commands.cli_runner import use_own_folders

from miofind.cli.output import (
    Sheet,
    bytes_text,
    print_json,
    ratio_text,
    seconds_text,
    tflops_text,
    time_text,
)
from miofind.device.device import device_text
from miofind.driver.line import parse_driver_line
from miofind.solver.steps import config_text
from miofind.suites.short_text import short_problem

RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [(0.0, "0"), (0.0012345, "0.001234"), (0.12345, "0.1235"), (1.2345, "1.234"), (123.45, "123.5"), (math.inf, "-")],
)
def test_times(time_ms: float, text: str) -> None:
    assert time_text(time_ms) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (512, "512 B"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (1023 << 10, "1023 KiB"), (80 << 30, "80 GiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (12.4, "12 s"), (185.0, "3 min 05 s"), (7320.0, "2 h 02 min")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_rates_and_ratios() -> None:
    assert tflops_text(2 * 10**12, 4.0) == "500"
    assert tflops_text(10**9, 1.0) == "1"
    assert ratio_text(1.2345) == "1.23x"
    assert ratio_text(1234.5) == "1234x"


def test_configurations() -> None:
    config = {"tile": 128, "split": True, "algorithm": {"1": 2}}
    assert config_text(config) == "tile=128 split=true algorithm={1=2}"
    assert config_text({"tile": 1, "knobs": {}, "notes": "", "stages": 0}) == "tile=1 stages=0"
    assert config_text(config, 12) == "tile=128 ..."


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("conv -n 2 -c 8 -H 9 -W 7 -k 4 -y 3 -x 3 -F 1", "8x9x7 > 4, 3x3"),
        ("conv -c 8 -H 9 -W 7 -k 4 -y 3 -x 1 -p 1 -u 2 -v 2 -g 4 -F 1", "8x9x7 > 4, 3x1 s2 p1x0 g4"),
        ("conv -c 8 -H 9 -W 9 -k 4 -l 2 -j 2 -p 1 -q 1 --pad_after_h 0 --pad_after_w 0 -F 1", "8x9x9 > 4, 3x3 p1_0 d2"),
    ],
)
def test_problems(line: str, text: str) -> None:
    assert short_problem(parse_driver_line(line)[0]) == text


def test_infinite_numbers_are_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.inf, "b": [math.nan, 1.5], "c": ("x",)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": ["x"]}


@pytest.mark.parametrize(
    ("width", "header"),
    [(40, ["name", "detail", "note"]), (20, ["name", "detail"]), (10, ["name"]), (1, ["name"])],
)
def test_a_sheet_gives_up_what_it_can_spare(
    width: int, header: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    sheet = Sheet("", ("name", "detail", "note"), spare=("note", "detail"))
    sheet.add("ConvA", "tile=128", "fast")
    sheet.print()
    if width > 1:
        assert capsys.readouterr().out.splitlines()[0].split() == header


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (60, ["problem  solver  config", RULE * 36, "conv2d   ConvA   tile=128 split=true"]),
        (31, ["problem  solver", RULE * 15, "conv2d   ConvA", "    config: tile=128 split=true"]),
        (14, ["  solver", RULE * 8, "conv2d", "  ConvA", "    config:", "    tile=128", "    split=true"]),
    ],
)
def test_a_sheet_folds_long_cells_to_lines_of_their_own(
    width: int, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    sheet = Sheet("", ("problem", "solver", "config"), fold=("config", "problem"))
    sheet.add("conv2d", "ConvA", "tile=128 split=true")
    sheet.print()
    assert capsys.readouterr().out.splitlines() == lines


def test_a_sheet_breaks_what_is_too_wide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "14")
    sheet = Sheet("", ("name", "ms"), right=("ms",))
    sheet.add("one two three", "0.5")
    sheet.print()
    assert capsys.readouterr().out.splitlines()[2:] == ["one two    0.5", "three"]


def test_a_sheet_breaks_words_last(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A long name was broken where a list beside it could have been."""
    monkeypatch.setenv("COLUMNS", "30")
    sheet = Sheet("", ("suite", "types"))
    sheet.add("convnext_tiny_fused", "bfloat16, float16")
    sheet.print()
    assert capsys.readouterr().out.splitlines()[2:] == ["convnext_tiny_fused  bfloat16,", f"{'float16':>28}"]


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        ("NVIDIA H200|132|9.0|", "NVIDIA H200, 132 SMs, sm_90"),
        ("NVIDIA B200|148|10.0|", "NVIDIA B200, 148 SMs, sm_100"),
        ("NVIDIA H200 MIG 1g.18gb|16|9.0|1g.18gb", "NVIDIA H200 MIG 1g.18gb, 16 SMs, sm_90"),
        ("NVIDIA H200|16|9.0|1g.18gb", "NVIDIA H200 MIG 1g.18gb, 16 SMs, sm_90"),
        ("AMD EPYC|2|0.0|", "AMD EPYC, 2 cores"),
        ("what|ever", "what|ever"),
    ],
)
def test_devices(identity: str, text: str) -> None:
    assert device_text(identity) == text


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    sheet = Sheet("title", ("name", "detail"))
    sheet.add("a" * 110, "[bold]b[/bold]")
    sheet.print()
    assert f"{'a' * 110}  [bold]b[/bold]" in capsys.readouterr().out
