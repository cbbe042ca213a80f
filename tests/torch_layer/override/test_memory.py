"""Results from PyTorch's allocator, with and without its short cuts, and room for finds."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miofind.core.problem import ProblemDescription
from miofind.torch.override import memory


@pytest.mark.parametrize("short_cut", [False, True])
def test_results_have_the_form_asked_for(short_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not short_cut:
        monkeypatch.setattr(memory, "_inductor_guards", lambda: None)
    like = torch.empty(1, dtype=torch.bfloat16)
    make = memory.results((2, 3, 4, 5), (60, 1, 15, 3), like)
    first, second = make(like), make(like)
    assert (first.shape, first.stride(), first.dtype) == ((2, 3, 4, 5), (60, 1, 15, 3), torch.bfloat16)
    assert first.data_ptr() != second.data_ptr()


def test_the_short_cut_is_taken_on_the_current_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(shape: Any, strides: Any, dtype: Any) -> str:
        return "quick"

    like = SimpleNamespace(
        device=torch.device("cuda", 1),
        dtype=torch.float32,
        get_device=lambda: 1,
        new_empty_strided=lambda shape, strides: "on the tensor's device",
    )
    monkeypatch.setattr(memory, "_inductor_guards", lambda: SimpleNamespace(_empty_strided_cuda=quick))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made = []
    for index in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        made.append(memory.results((1,), (1,), like)(like))
    assert made == ["on the tensor's device", "quick"]


def test_a_workspace_is_asked_for_once_in_1024_calls_at_least() -> None:
    backoff = memory.Backoff()
    for _ in range(20):
        backoff.failed()
    skipped = 0
    while backoff.skips():
        skipped += 1
    assert skipped == 1023


@pytest.mark.parametrize(("free_bytes", "gives_back"), [(1 << 40, 0), (1 << 29, 1)])
def test_pytorch_gives_memory_back_where_a_find_might_lack_it(
    free_bytes: int, gives_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 41))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    problem = ProblemDescription.convolution(x=(1, 4, 8, 8), w=(4, 4, 3, 3))
    memory.make_room(problem, torch.device("cuda", 0))
    assert len(given_back) == gives_back
    memory.make_room(problem, torch.device("cpu"))
    assert len(given_back) == gives_back
