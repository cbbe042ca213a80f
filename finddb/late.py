"""The modules that speak SQLAlchemy, each imported when it is first asked for: look-ups of answers do without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miofind.process.late_names import LateNames

if TYPE_CHECKING:
    from miofind.finddb import entries as entries
    from miofind.finddb import schema as schema
    from miofind.finddb import soundness as soundness
    from miofind.finddb import sqlite_engine as sqlite_engine
else:
    __getattr__ = LateNames(__name__, {"miofind.finddb": ("entries", "schema", "soundness", "sqlite_engine")})
