"""The form of a call: all of its arguments but tensors, as one text.

Python hands an operator's lists and numbers to PyTorch one by one, each checked against the schema: for a convolution's
that takes three times as long as the launch. Compiled graphs, whose calls never change, name a form instead. Forms are
kept in PyTorch's cache of graphs, and read by other processes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import torch

from miofind.torch.fused.calls import BackwardData, BackwardWeights, Call, Forward, Statistics

TENSORS: dict[type[Call], tuple[str, ...]] = {
    Forward: ("x", "w", "bias", "scale", "residual", "channel_bias"),
    Statistics: ("x", "w", "bias"),
    BackwardData: ("dy", "x", "w", "residual", "saved"),
    BackwardWeights: ("dy", "x", "w"),
}
"""A call's tensors, in the order in which operators that take a form have them before it."""

_DTYPE = "torch."


def form_of(call: Call) -> str | None:
    """All of a call but its tensors, whatever stands for those; None where a size depends on a call's inputs."""
    given = {name: value for name, value in call._asdict().items() if name not in TENSORS[type(call)]}
    plain = {name: _plain(value) for name, value in given.items()}
    return None if Ellipsis in plain.values() else json.dumps(plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """A value as JSON has it; the ellipsis for one that it has not."""
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (list, tuple)):
        numbers = [_plain(each) for each in value]
        return ... if ... in numbers else numbers
    return value if value is None or type(value) in (bool, int, float, str) else ...


def call_of(kind: type[Call], tensors: Sequence[Any], form: str) -> Call:
    """The call of tensors, in the order of TENSORS, and a form."""
    return kind(**dict(zip(TENSORS[kind], tensors, strict=True)), **_read(form))


@functools.lru_cache(maxsize=4096)
def _read(form: str) -> dict[str, Any]:
    named: dict[str, Any] = json.loads(form)
    for name, value in named.items():
        if isinstance(value, str) and value.startswith(_DTYPE):
            named[name] = getattr(torch, value.removeprefix(_DTYPE))
    return named
