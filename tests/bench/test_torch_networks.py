"""The networks of own code that are timed in PyTorch have the shapes and sizes of those they stand for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "y_shape", "millions"),
    [
        ("replknet_31b", (2, 1000), 79.9),
        ("yolov8s", (2, 144, 8400), 11.2),
        ("sd15_unet", (2, 4, 64, 64), 857.5),  # 859.5 with the layers that embed a time step
        ("sd_vae_decoder", (2, 3, 512, 512), 49.5),
        ("unet_3d", (2, 3, 128, 128, 128), 16.5),
        ("hifi_gan", (2, 1, 65536), 13.9),
    ],
)
def test_shapes_and_weights(name: str, y_shape: tuple[int, ...], millions: float, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    network = importlib.import_module("torch_networks").NETWORKS[name]
    with FakeTensorMode():
        made = network.build()
        assert made(torch.randn(2, *network.shape)).shape == y_shape
    assert sum(each.numel() for each in made.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
