"""A program's first result does without Python's searches for garbage among all that PyTorch has made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from miofind import Handle
from miofind.process import garbage
from miofind.torch import fuse, use
from miofind.torch.fused import fuse as fusing
from miofind.torch.fused import plans as fused_plans
from miofind.torch.override import plans


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """After how many new objects Python searches where a network is traced and a plan is made."""
    noted: list[int] = []

    def noting(place: Any, name: str) -> None:
        real = getattr(place, name)

        def noted_and_called(*arguments: Any, **named: Any) -> Any:
            noted.append(gc.get_threshold()[0])
            return real(*arguments, **named)

        monkeypatch.setattr(place, name, noted_and_called)

    noting(plans.Planner, "solutions")
    noting(fusing, "_copied")
    fused_plans.forget()
    yield noted
    fused_plans.forget()


def _block() -> Any:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


def test_plans_are_made_with_few(thresholds: list[int], cpu_handle: Handle) -> None:
    usual = gc.get_threshold()
    with use("estimate", handle=cpu_handle, devices="cpu"), torch.inference_mode():
        _block()(torch.randn(1, 4, 6, 6))
    assert set(thresholds) == {garbage._RARE}
    assert gc.get_threshold() == usual


def test_networks_are_fused_and_fused_layers_planned_with_few(thresholds: list[int], cpu_handle: Handle) -> None:
    usual, block = gc.get_threshold(), fuse(_block())
    assert thresholds == [garbage._RARE]
    with use("estimate", handle=cpu_handle, devices="cpu"), torch.inference_mode():
        block(torch.randn(1, 4, 6, 6))
    assert len(thresholds) > 1
    assert set(thresholds) == {garbage._RARE}
    assert gc.get_threshold() == usual
