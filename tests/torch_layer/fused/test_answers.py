"""Answers to fused problems: which solution takes a call's addresses, with several threads about."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.processes.waiting import LIMIT_S
from torch_layer.ready_solutions import FakeInvoker, FakeSolutions

from miofind import Handle
from miofind.core.problem import ProblemDescription
from miofind.torch.fused.answers import Answer, answer, planner_of
from miofind.torch.override import plans
from miofind.torch.override.flags import Flags, state
from miofind.torch.override.plans import Part, Planner
from miofind.torch.override.settings import CPU_IS_PYTORCHS, Settings

PROBLEM = ProblemDescription.convolution(x=(1, 2, 3, 3), w=(2, 2, 1, 1), epilogue="relu")


class _Waiting(FakeSolutions):
    """Makes the next one ready once it is told to go on."""

    def __init__(self, *invokers: FakeInvoker) -> None:
        super().__init__(*invokers)
        self.goes_on = threading.Event()

    def next(self, below_bytes: int | None = None) -> tuple[str, FakeInvoker]:
        assert self.goes_on.wait(LIMIT_S)
        return super().next(below_bytes)


@pytest.mark.parametrize("more", [(), (FakeInvoker(4),), (FakeInvoker(4), FakeInvoker(2))], ids=len)
def test_threads_that_need_the_next_solution_share_it(more: tuple[FakeInvoker, ...]) -> None:
    """The one that came second took the one after it, or failed where there was none."""
    ready = _Waiting(*more)
    made: Any = Answer(Part("y", problem=PROBLEM), ready, FakeInvoker(16))  # type: ignore[arg-type]
    arrived = []

    def fitting(address: int) -> Any:
        arrived.append(address)
        if len(arrived) == 4:
            ready.goes_on.set()
        return made._fitting(address, torch.device("cpu"))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fitting, [4, 4, 4, 4]))
    assert found == [more[0] if more else None] * 4
    assert len(made._invokers) == 1 + len(more[:1]), "what nobody needs yet is not made ready"
    assert made._fitting(16, torch.device("cpu")).alignment_bytes == 16
    last = made._fitting(2, torch.device("cpu"))
    assert last == (more[1] if len(more) > 1 else None)


def test_cpu_tensors_are_pytorchs_unless_settings_take_them(
    cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused network became slower on a CPU once it was tuned, which nothing had asked for."""
    monkeypatch.setattr(plans, "default_handle", lambda device: cpu_handle)
    flags = Flags.of(state(), on_gpu=False)
    left, taken = (
        answer(PROBLEM, torch.device("cpu"), flags, planner)
        for planner in (planner_of(None), Planner(Settings(on_miss="estimate")))  # type: ignore[arg-type]
    )
    assert (left.is_served, left.part.reason) == (False, CPU_IS_PYTORCHS)
    assert taken.is_served
