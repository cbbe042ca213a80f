"""Rows of FindDBs on the GPU that they speak of: its solvers, asked there, still do what they say."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

import miofind
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.finddb import Store, shipped_paths
from miofind.runtime.refusals import Measured, Refusals
from miofind.solver.registry import Registry

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

PROBLEM = ProblemDescription.convolution(x=(4, 16, 14, 14), w=(32, 16, 3, 3), padding=1, dtype="float16")


def test_shipped_rows_answer_on_the_device_that_they_were_measured_on(device: Device) -> None:
    """Those of every eighth problem; the tests without a GPU ask of a device as its identity tells it."""
    asked, refused = 0, []
    for path in shipped_paths({}):
        with Store(path, read_only=True) as store:
            chosen = [h for h in store.histories(device.identity) if zlib.crc32(h.network_config.encode()) % 8 == 0]
        for history in chosen:
            of_problem = Refusals(ProblemDescription.from_network_config(history.network_config), device)
            for row in history.rows:
                measured = Measured(row.config, row.workspace_bytes, row.deterministic, row.kernel_hash)
                reason = of_problem.of_row(Registry.default()[row.solver_id], measured).reason
                asked += 1
                refused += [f"{history.network_config} {row.candidate}: {reason}"] if reason else []
    if not asked:
        pytest.skip(f"nothing ships for {device.name}")
    assert refused == []


def test_what_a_find_measured_answers_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "finddb.db"
    with miofind.Handle("cuda:0", database=path, strict=True) as handle:
        found = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(find_mode="normal"), handle=handle)
    with miofind.Handle("cuda:0", database=path, strict=True) as handle:
        again = miofind.find_solutions(PROBLEM, options=miofind.FindOptions(on_miss="error"), handle=handle)
    assert [solution.id for solution in again] == [solution.id for solution in found]
