"""The FindDB: what was measured, for which problem on which device, and the answers that follow.

A leaf of the package: strings and numbers in and out, nothing of problems, solvers or devices.
"""

from miofind.finddb.layered import Layered, open_layered
from miofind.finddb.location import MEMORY, network_file_system, shipped_paths, user_path
from miofind.finddb.schema import SCHEMA_VERSION
from miofind.finddb.shippable import write_shippable
from miofind.finddb.store import Store
from miofind.finddb.validation import RefusedEntryError
from miofind.finddb.values import (
    Answer,
    History,
    ProblemKey,
    Prune,
    RankedRows,
    Recheck,
    Row,
    Scope,
    Stats,
    environment_id,
)

__all__ = [
    "MEMORY",
    "SCHEMA_VERSION",
    "Answer",
    "History",
    "Layered",
    "ProblemKey",
    "Prune",
    "RankedRows",
    "Recheck",
    "RefusedEntryError",
    "Row",
    "Scope",
    "Stats",
    "Store",
    "environment_id",
    "network_file_system",
    "open_layered",
    "shipped_paths",
    "user_path",
    "write_shippable",
]
