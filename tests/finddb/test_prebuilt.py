"""The FindDBs that ship with the package: every row holds against the code, and their content is proved."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.find.lookup.stored import admits
from miofind.find.row_check import RowCheck, Shipping
from miofind.finddb import MEMORY, ReleaseRules, Store, shipped_paths, write_release
from miofind.finddb.open_files import acquired
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry
from miofind.solver.solver import Algorithm

PREBUILT = shipped_paths({})
MOST_BYTES_A_PROBLEM = 6 << 10
MOST_BYTES_A_PROBLEM_OF_A_WHEEL = 640
"""A release is plain, so that git keeps it as a difference to the one before; a wheel compresses it."""


def test_something_ships() -> None:
    assert PREBUILT


@pytest.mark.full_matrix
@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.name)
def test_every_shipped_row_is_what_its_solver_does_today(path: Path) -> None:
    """The solver serves the problem with that configuration, workspace and kernels, asked today."""
    rows = RowCheck(Registry.default())
    with Store(path, read_only=True) as store:
        assert store.check(rows) == ()
        assert (rows.checked, rows.void) == (store.stats().rows, 0)


@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.name)
def test_shipped_rows_are_undisturbed_and_some_are_what_their_solvers_do_today(path: Path) -> None:
    """Those of every 288th problem, the same ones each time."""
    check = RowCheck(Registry.default())
    with Store(path, read_only=True) as store:
        rows = list(store.rows())
    assert {row.status for _, row in rows} <= {"ok", "cut_off"}
    assert not any(row.contended or row.message for _, row in rows)
    chosen = [(key, row) for key, row in rows if zlib.crc32(key.network_config.encode()) % 288 == 0]
    assert [finding for key, row in chosen if (finding := check(key, row))] == []
    assert check.checked == len(chosen) > len(rows) // 576


@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.name)
def test_a_shipped_file_is_small_and_of_one_kind_of_device(path: Path) -> None:
    with acquired(path) as file:
        assert file.is_portable
    with Store(path, read_only=True) as store:
        stats = store.stats()
        assert len(stats.by_device) == 1
        assert stats.rechecks == 0
        assert stats.file_bytes <= MOST_BYTES_A_PROBLEM * stats.problems
        assert len(zlib.compress(path.read_bytes())) <= MOST_BYTES_A_PROBLEM_OF_A_WHEEL * stats.problems


@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.name)
def test_a_default_request_finds_a_shipped_row_that_mixes_no_tiles(path: Path, tmp_path: Path) -> None:
    """Of problems that an FFT or Winograd leads, another row stays, and max_error still takes the leader."""
    led = 0
    with Store(path, read_only=True) as store, Handle(Device.virtual("90a"), database=tmp_path / "finddb.db") as handle:
        for key in store.problems():
            answer = store.answer(key.device, key.network_config)
            assert answer is not None
            if answer.rows[0].algorithm not in (Algorithm.FFT, Algorithm.WINOGRAD):
                continue
            led += 1
            problem = ProblemDescription.from_network_config(key.network_config)
            taken = [row for row in answer.rows if admits(row, problem, FindOptions(), handle)]
            assert taken, key.network_config
            assert not any(row.algorithm == Algorithm.FFT for row in taken)
            if problem.direction is Direction.BACKWARD_WEIGHTS:
                assert not any(row.algorithm == Algorithm.WINOGRAD for row in taken)
            assert admits(answer.rows[0], problem, FindOptions(max_error=1.0), handle)
    assert led


@pytest.mark.parametrize("one_in", [384, pytest.param(1, marks=pytest.mark.full_matrix)])
@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.name)
def test_a_release_of_a_shipped_file_is_sound(path: Path, one_in: int, tmp_path: Path) -> None:
    """Of every 384th problem, the same ones each time: all of them take minutes."""
    keep = Shipping(Registry.default())
    with Store(path, read_only=True) as store, Store(MEMORY) as part:
        chosen = [key for key in store.problems() if zlib.crc32(key.network_config.encode()) % one_in == 0]
        part.add(store.histories_of(chosen))
        made = write_release([part], tmp_path / path.name, ReleaseRules(keep=keep))
        rows = part.stats().rows
    assert 0 < sum(made.rows.values()) <= rows - keep.void
    assert keep.findings == []
    with Store(tmp_path / path.name, read_only=True) as store:
        assert store.release() == made
        assert store.check() == ()
