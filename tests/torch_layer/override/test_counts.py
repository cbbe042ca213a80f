"""Reports of what ran calls: each call of a plan counts once, with the reason that PyTorch ran it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from miofind.errors import LaunchError
from miofind.torch.override.counts import CallReport
from miofind.torch.override.plans import Part


@dataclass
class Counted:
    """Stands for a plan that ten calls came to, in one of which without Python there was no memory."""

    parts: tuple[Part, ...]
    calls: int = 10

    def direct_without_memory(self, computed: str) -> int:
        return 1 if computed == "dw" else 0


def part(computed: str, **named: Any) -> Part:
    solution: Any = SimpleNamespace(solver_id="Solver")
    return Part(computed, solution=solution, launch=lambda *_: None, **named)


def failed(part: Part, *calls: int) -> Part:
    for before in calls:
        part.fail(LaunchError("gone"), before)
    return part


@pytest.mark.parametrize(
    ("counted", "own", "reasons"),
    [
        (part("y"), 10, {}),
        (part("y", declined=3), 7, {"its tensors begin at other addresses": 3}),
        (part("dx", without_memory=2), 8, {"there was no memory for its workspace": 2}),
        (part("dw", without_memory=2), 7, {"there was no memory for its workspace": 3}),
        (failed(part("y", declined=1), 4), 3, {"it failed: gone": 6, "its tensors begin at other addresses": 1}),
        (failed(part("y"), 0), 0, {"it failed: gone": 10}),
        (failed(part("y"), 4, 4, 5), 2, {"it failed: gone": 8}),
        (
            failed(part("dw", without_memory=2), 1),
            0,
            {"it failed: gone": 7, "there was no memory for its workspace": 3},
        ),
        (Part("dw", reason="no FindDB has an answer to it"), 0, {"no FindDB has an answer to it": 10}),
    ],
    ids=[
        "own",
        "declined",
        "without memory",
        "without memory, directly",
        "failed later",
        "failed at once",
        "failed in three threads at once",
        "failed, without memory before and directly since",
        "PyTorch's",
    ],
)
def test_calls_count_once(counted: Part, own: int, reasons: dict[str, int]) -> None:
    report = CallReport.of([Counted((counted,))])
    assert report.calls == 10
    assert report.own_calls == own
    assert report.reasons == reasons
    assert {count.solver_id for count in report.counts if not count.reason} == ({"Solver"} if own else set())
