"""FindDBs of every kind, for tests of what they have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from miofind.finddb import MEMORY, Store

KINDS = ("file", "memory", "server")


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What names an empty FindDB: a new file, memory, or a server's."""
    if request.param == "server":
        return str(request.getfixturevalue("finddb_url"))
    return MEMORY if request.param == "memory" else str(tmp_path / "new" / "folder" / "finddb.db")


@pytest.fixture
def any_store(address: str) -> Iterator[Store]:
    """An empty FindDB of each kind."""
    with Store(address) as opened:
        yield opened
