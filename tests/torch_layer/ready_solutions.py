"""Stand-ins for solutions that PyTorch's calls are run by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miofind.torch.override.calls import Unserved


@dataclass
class FakeInvoker:
    """Stands for a bound solution of a GPU; notes what it is run with."""

    alignment_bytes: int
    workspace_bytes: int = 0
    problem: Any = None
    runs: list[Any] = field(default_factory=list)

    def run(self, bases: tuple[Any, ...], stream: int) -> None:
        self.runs.append((*bases, stream))


class FakeSolutions:
    """Stands for solutions that can be made ready, one after another."""

    def __init__(self, *invokers: FakeInvoker) -> None:
        self._left = list(invokers)

    def next(self, below_bytes: int | None = None) -> tuple[str, FakeInvoker]:
        while self._left:
            invoker = self._left.pop(0)
            if below_bytes is None or invoker.alignment_bytes < below_bytes:
                return "solution", invoker
        raise Unserved("none is left")
