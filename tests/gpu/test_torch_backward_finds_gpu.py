"""Processes that find all of a training's problems on a GPU, those of the gradients in autograd's thread."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.processes.waiting import LIMIT_S

pytestmark = pytest.mark.gpu

_AT_ONCE = 4
_TRAINS = """
import sys, torch
from miofind import Handle, torch as override

handle = Handle(0, database=sys.argv[1])
made = override.enable("find", handle=handle, background=False, time_budget_s=2.0)
model = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        y = model(torch.ones(4, 16, 20, 20, device="cuda", requires_grad=True))
    y.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
report = made.report()
assert report.calls == 3 * 6, str(report)
assert not any(count.is_missing for count in report.counts), str(report)
"""


def _run(database: Path) -> tuple[int, str]:
    """The status and the last words of a process that finds into a FindDB of its own."""
    command = [sys.executable, "-c", _TRAINS, str(database)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return ended.returncode, "" if ended.returncode == 0 else ended.stderr[-2000:]


def test_20_processes_that_find_in_a_training_loop_end_cleanly(tmp_path: Path) -> None:
    """The first compiles what all of them measure."""
    assert _run(tmp_path / "first.db") == (0, "")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        assert [*pool.map(_run, (tmp_path / f"{number}.db" for number in range(19)))] == [(0, "")] * 19
