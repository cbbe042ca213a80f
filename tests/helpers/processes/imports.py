"""What is true of this process while something is imported."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType

import pytest


def searches_noted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether Python may look for garbage, at each call of `importlib.import_module` from now on."""
    enabled: list[bool] = []
    real = importlib.import_module

    def noted(name: str) -> ModuleType:
        enabled.append(gc.isenabled())
        return real(name)

    monkeypatch.setattr(importlib, "import_module", noted)
    return enabled
