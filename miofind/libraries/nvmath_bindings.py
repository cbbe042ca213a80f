"""One of nvmath's bindings, without the package around it, which nothing here needs.

`import nvmath.bindings.cublasLt` imports all other bindings, and what nvmath has above them, in 0.3 s: a quarter of a
find in a new process. A module of the bindings imports by itself what it needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from types import ModuleType
from typing import Any

from miofind.device.device import INSTALL_CUDA
from miofind.errors import MissingLibraryError

_PACKAGES = ("nvmath", "nvmath.bindings")
_lock = threading.Lock()


def binding(name: str) -> Any:
    """The module of that name in nvmath.bindings; the same that who imports nvmath later gets.

    Raises:
        MissingLibraryError: nvmath is not installed, or cannot be imported.
    """
    module = f"{_PACKAGES[-1]}.{name}"
    with _lock:
        try:
            return sys.modules.get(module) or _alone(module) or importlib.import_module(module)
        except ImportError as error:
            raise MissingLibraryError(f"nvmath-python cannot be imported ({error}): {INSTALL_CUDA}") from error


def _alone(module: str) -> Any:
    """The module, imported with empty packages above it; None where that does not do."""
    spec = importlib.util.find_spec(_PACKAGES[0])
    if spec is None or spec.submodule_search_locations is None or _PACKAGES[0] in sys.modules:
        return None
    for package in _PACKAGES:
        empty = ModuleType(package)
        below = package.split(".")[1:]
        empty.__path__ = [os.path.join(place, *below) for place in spec.submodule_search_locations]
        sys.modules[package] = empty
    try:
        return importlib.import_module(module)
    except Exception:  # a release of nvmath whose bindings need more
        return None
    finally:
        for package in _PACKAGES:
            del sys.modules[package]
