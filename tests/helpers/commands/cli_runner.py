"""Runs the command line on the CPU place, with a FindDB and a binary cache of the test's own."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from miofind.cli import doctor, main, tune_display
from miofind.cli.coverage import suite_layers

TINY = ("conv", "-n", "1", "-c", "4", "-H", "6", "-W", "5", "-k", "2", "-y", "3", "-x", "3", "-p", "1", "-q", "1")
FORWARD = (*TINY, "-F", "1")

_suite_layers = functools.cache(suite_layers)
"""Of the suites that ship: `doctor` reads them each time, half of what it takes."""


def use_own_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep FindDB and binary cache in `folder`, ship nothing, and let neither terminal nor clock change the output."""
    monkeypatch.setenv("MIOFIND_DB", str(folder / "finddb.db"))
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    for name in ("COLUMNS", "FORCE_COLOR", "MIOFIND_FIND_MODE", "MIOFIND_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tune_display, "_EVERY_S", 3600.0)
    monkeypatch.setattr(doctor, "suite_layers", _suite_layers)


def run(*arguments: str, code: int | None = 0, **settings: Any) -> Result:
    """The result of a command that must end with `code` (None for any), and without a traceback."""
    result = CliRunner().invoke(main, list(arguments), **settings)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, f"{result.stdout}\n{result.stderr}"
    return result


def run_json(*arguments: str, code: int = 0, **settings: Any) -> dict[str, Any]:
    """The object that a command prints with --json."""
    printed: dict[str, Any] = json.loads(run(*arguments, "--json", code=code, **settings).stdout)
    return printed
