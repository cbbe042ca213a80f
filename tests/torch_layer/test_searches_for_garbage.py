"""A program's first result does without Python's searches for garbage among all that PyTorch has made."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from miofind import Handle
from miofind.evaluate.executors import InProcess
from miofind.process import garbage
from miofind.torch import fuse, use
from miofind.torch.fused import fuse as fusing
from miofind.torch.fused import plans as fused_plans
from miofind.torch.override import plans

Noting = Callable[[Any, str], list[int]]


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noting]:
    """Notes after how many new objects Python searches whenever a function is called."""

    def noting_calls(place: Any, name: str) -> list[int]:
        noted: list[int] = []
        real = getattr(place, name)

        def noted_and_called(*arguments: Any, **named: Any) -> Any:
            noted.append(gc.get_threshold()[0])
            return real(*arguments, **named)

        monkeypatch.setattr(place, name, noted_and_called)
        return noted

    usual = gc.get_threshold()
    fused_plans.forget()
    yield noting_calls
    fused_plans.forget()
    assert gc.get_threshold() == usual


def _block() -> Any:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


@pytest.mark.parametrize("is_fused", [False, True])
def test_answers_that_nothing_is_measured_for_are_made_with_few(
    is_fused: bool, noting: Noting, cpu_handle: Handle
) -> None:
    block = fuse(_block()) if is_fused else _block()
    looked_up, found = noting(plans, "looked_up"), noting(plans, "find_solutions")
    with use("estimate", handle=cpu_handle, devices="cpu"), torch.inference_mode():
        block(torch.randn(1, 4, 6, 6))
    assert (looked_up[0], found) == (garbage._RARE, [garbage._RARE])


def test_networks_are_fused_with_few(noting: Noting) -> None:
    copied = noting(fusing, "_copied")
    fuse(_block())
    assert copied == [garbage._RARE]


def test_what_is_measured_is_measured_with_as_many_as_ever(noting: Noting, cpu_handle: Handle) -> None:
    """It takes seconds, in which other threads leave garbage."""
    usual, measured = gc.get_threshold()[0], noting(InProcess, "run")
    with use("find", handle=cpu_handle, devices="cpu"), torch.inference_mode():
        _block()(torch.randn(1, 4, 6, 6))
    assert measured
    assert set(measured) == {usual}
