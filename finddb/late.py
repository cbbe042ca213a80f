"""The modules that speak SQLAlchemy, each imported when it is first asked for: look-ups of answers do without.

They are asked for while a database is in use, for the end of which forks wait: none comes amid such an import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miofind.finddb import entries as entries
    from miofind.finddb import schema as schema
    from miofind.finddb import soundness as soundness
    from miofind.finddb import sqlite_core as sqlite_core
else:
    _MODULES = ("entries", "schema", "soundness", "sqlite_core")

    def __getattr__(name: str) -> Any:
        """One of the modules."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = globals()[name] = importlib.import_module(f"miofind.finddb.{name}")
        return module
