"""The FindDB: what was measured, for which problem on which device, and the answers that follow.

A leaf of the package: strings and numbers in and out, nothing of problems, solvers or devices. What speaks SQLAlchemy
is imported when it is first asked for: look-ups in files do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miofind.finddb.answers import Answer, RankedRows
from miofind.finddb.differences import Change, ChangeKind, differences
from miofind.finddb.layered import LayeredStore, open_layered
from miofind.finddb.location import (
    MEMORY,
    network_file_system,
    server_url,
    shipped_paths,
    system_addresses,
    told_address,
    user_path,
)
from miofind.finddb.open_files import is_database, is_of_database
from miofind.finddb.ranking import BEST_PER_SOLVER, ties_of_best, usable_rows, without_solvers
from miofind.finddb.schema_versions import SCHEMA_VERSION
from miofind.finddb.store import Store
from miofind.finddb.validation import MAX_INT, MAX_JSON_CHARS, RefusedEntryError, refusal
from miofind.finddb.values import (
    ANY_EFFORT,
    LIKELY,
    RIVAL,
    Comparison,
    History,
    ProblemKey,
    Prune,
    Recheck,
    Release,
    Row,
    Scope,
    Stats,
    Verdict,
    environment_id,
    failed_code,
)
from miofind.process.late_names import LateNames as _LateNames

if TYPE_CHECKING:
    from miofind.finddb.migration import Upgrade, upgrade
    from miofind.finddb.mirroring import Mirrored, mirror
    from miofind.finddb.release import ReleaseRules, write_release

__all__ = [
    "ANY_EFFORT",
    "BEST_PER_SOLVER",
    "LIKELY",
    "MAX_INT",
    "MAX_JSON_CHARS",
    "MEMORY",
    "RIVAL",
    "SCHEMA_VERSION",
    "Answer",
    "Change",
    "ChangeKind",
    "Comparison",
    "History",
    "LayeredStore",
    "Mirrored",
    "ProblemKey",
    "Prune",
    "RankedRows",
    "Recheck",
    "RefusedEntryError",
    "Release",
    "ReleaseRules",
    "Row",
    "Scope",
    "Stats",
    "Store",
    "Upgrade",
    "Verdict",
    "differences",
    "environment_id",
    "failed_code",
    "is_database",
    "is_of_database",
    "mirror",
    "network_file_system",
    "open_layered",
    "refusal",
    "server_url",
    "shipped_paths",
    "system_addresses",
    "ties_of_best",
    "told_address",
    "upgrade",
    "usable_rows",
    "user_path",
    "without_solvers",
    "write_release",
]

_late = _LateNames(
    __name__,
    {
        "miofind.finddb.migration": ("Upgrade", "upgrade"),
        "miofind.finddb.mirroring": ("Mirrored", "mirror"),
        "miofind.finddb.release": ("ReleaseRules", "write_release"),
    },
)

__dir__ = _late.listed
if not TYPE_CHECKING:  # type checkers know what there is, and tell of anything else
    __getattr__ = _late
