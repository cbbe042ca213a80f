"""A CUDA graph outlives what ran when it was captured: solutions, handles, threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gone", ["thread", "handle"])
def test_a_captured_run_can_be_replayed_after_what_ran_is_gone(gone: str) -> None:
    script = Path(__file__).with_name("captured_runs.py")
    command = [sys.executable, "-X", "faulthandler", str(script), gone]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
