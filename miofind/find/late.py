"""What measures, imported when it is first asked for: most processes are answered from a FindDB, or predict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miofind.process.late_names import LateNames

if TYPE_CHECKING:
    from miofind.find.measuring import measure as measure
    from miofind.find.measuring import still_holds as still_holds
else:
    __getattr__ = LateNames(__name__, {"miofind.find.measuring": ("measure", "still_holds")})
