"""Which commit a benchmark's figures are of."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The checkout's commit, marked where files differ from it; "" without git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return told.stdout.strip()
