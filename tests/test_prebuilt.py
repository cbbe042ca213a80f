"""The FindDBs that ship with the package: every row holds against the code, and their content is proved."""

from __future__ import annotations

from pathlib import Path

import pytest

from miofind.finddb import ReleaseRules, Store, shipped_paths, write_release
from miofind.finddb.open_files import acquired
from miofind.row_check import RowCheck, Shipping

PREBUILT = shipped_paths({})
MOST_BYTES_A_PROBLEM = 1 << 10


def test_something_ships() -> None:
    assert PREBUILT


@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.name)
def test_every_shipped_row_holds(path: Path) -> None:
    rows = RowCheck()
    with Store(path, read_only=True) as store:
        assert store.check(rows) == ()
        assert rows.checked > 0
        assert {row.status for _, row in store.rows()} <= {"ok", "cut_off"}
        assert not any(row.contended or row.message for _, row in store.rows())
        assert store.stats().rechecks == 0


@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.name)
def test_a_shipped_file_is_small_and_of_one_kind_of_device(path: Path) -> None:
    with acquired(path) as file:
        assert file.is_portable
    with Store(path, read_only=True) as store:
        stats = store.stats()
        assert len(stats.by_device) == 1
        assert stats.file_bytes <= MOST_BYTES_A_PROBLEM * stats.problems


@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.name)
def test_a_release_of_a_shipped_file_is_sound(path: Path, tmp_path: Path) -> None:
    keep = Shipping()
    with Store(path, read_only=True) as store:
        made = write_release([store], tmp_path / path.name, ReleaseRules(keep=keep))
        rows = store.stats().rows
    assert 0 < sum(made.rows.values()) <= rows - keep.void
    assert keep.findings == []
    with Store(tmp_path / path.name, read_only=True) as store:
        assert store.release() == made
        assert store.check() == ()
