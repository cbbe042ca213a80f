"""Answers to fused convolutions on the CPU place, from a FindDB of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from miofind.runtime.handle import Handle
from miofind.torch.fused import answers
from miofind.torch.fused import plans as fused_plans
from miofind.torch.override.plans import Planner
from miofind.torch.override.settings import Settings


@contextmanager
def answers_of(handle: Handle, on_miss: str = "estimate") -> Iterator[list[str]]:
    """`miofind::convolution` asks a handle, PyTorch's own operators stay PyTorch's.

    Gives the network configs that were run by a solution, in order.
    """
    ran: list[str] = []
    run = answers.Answer.run

    def noting(self: answers.Answer, *arguments: object) -> bool:
        is_run = run(self, *arguments)  # type: ignore[arg-type]
        assert self.part.problem is not None
        ran.extend([self.part.problem.network_config] if is_run else [])
        return is_run

    planner = Planner(Settings(on_miss=on_miss, handle=handle))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_unset", planner)
        patch.setattr(answers.Answer, "run", noting)
        fused_plans.forget()
        yield ran
        fused_plans.forget()
