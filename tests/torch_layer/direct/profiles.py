"""What calls do inside PyTorch, by its profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def profiled(call: Callable[[], Any]) -> list[tuple[str, int]]:
    """The steps of a call in order, each with the bytes that it allocates; what gives some back, with less than 0."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    del kept
    steps = []

    def add(event: Any) -> None:
        steps.append((event.name, int(getattr(event.extra_fields, "alloc_size", 0))))
        for each in event.children:
            add(each)

    for event in profile.profiler.kineto_results.experimental_event_tree():
        add(event)
    return steps
