"""Answers to fused problems: which solution takes a call's addresses, with several threads about."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from waiting import LIMIT_S

from miofind.core.problem import ProblemDescription
from miofind.torch.answers import Answer
from miofind.torch.calls import Unserved
from miofind.torch.plans import Part

PROBLEM = ProblemDescription.convolution(x=(1, 2, 3, 3), w=(2, 2, 1, 1), epilogue="relu")


@dataclass
class _Invoker:
    """Stands for a bound solution of a GPU."""

    alignment_bytes: int


class _Ready:
    """Stands for solutions that are made ready, which takes until two threads want the next."""

    def __init__(self, *invokers: _Invoker) -> None:
        self._left = list(invokers)
        self.goes_on = threading.Event()

    def next(self, below_bytes: int | None = None) -> tuple[str, _Invoker]:
        assert self.goes_on.wait(LIMIT_S)
        if not self._left:
            raise Unserved("none is left")
        return "solution", self._left.pop(0)


@pytest.mark.parametrize("more", [(), (_Invoker(4),), (_Invoker(4), _Invoker(2))], ids=len)
def test_threads_that_need_the_next_solution_share_it(more: tuple[_Invoker, ...]) -> None:
    """The one that came second took the one after it, or failed where there was none."""
    ready = _Ready(*more)
    made: Any = Answer(Part("y", problem=PROBLEM), ready, _Invoker(16))  # type: ignore[arg-type]
    arrived = []

    def fitting(address: int) -> Any:
        arrived.append(address)
        if len(arrived) == 4:
            ready.goes_on.set()
        return made._fitting(address, torch.device("cpu"))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fitting, [4, 4, 4, 4]))
    assert found == [more[0] if more else None] * 4
    assert made._fitting(16, torch.device("cpu")).alignment_bytes == 16
    last = made._fitting(2, torch.device("cpu"))
    assert last == (more[1] if len(more) > 1 else None)
