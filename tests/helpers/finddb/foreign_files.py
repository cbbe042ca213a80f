"""Files of another user, for tests that may not be run by root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

STRANGER = 12345


def disown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a file, folder or link to another user; where this one may not, let it look so."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
        return
    theirs = os.lstat(path).st_ino
    for name in ("stat", "fstat"):
        monkeypatch.setattr(os, name, _with_owner(getattr(os, name), theirs))


def _with_owner(function: Any, theirs: int) -> Any:
    def asked(*arguments: Any, **named: Any) -> os.stat_result:
        status: os.stat_result = function(*arguments, **named)
        if status.st_ino != theirs:
            return status
        return os.stat_result((*status[:4], STRANGER, *status[5:]))

    return asked
