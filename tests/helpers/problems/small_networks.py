"""Small networks that have every kind of convolution between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Mixed(nn.Module):  # type: ignore[misc]
    """Two dimensions: plain, grouped, shared by two calls, transposed, one that is frozen, one called by function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8, bias=False)
        self.frozen = nn.Conv2d(8, 8, 1, stride=2).requires_grad_(False)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1)
        self.weight = nn.Parameter(torch.randn(2, 4, 2, 3))
        self.head = nn.Linear(2, 5)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        x = self.frozen(self.depthwise(x) + self.depthwise(x))
        x = torch.nn.functional.conv2d(self.up(x), self.weight, dilation=2)
        return self.head(x.mean((2, 3)))


class OneAndThree(nn.Module):  # type: ignore[misc]
    """One and three dimensions, and inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Conv1d(4, 4, 4, padding=3, groups=4)
        self.video = nn.Conv3d(2, 4, (1, 3, 3), stride=(1, 2, 2))
        self.video_up = nn.ConvTranspose3d(4, 2, 2)

    def forward(self, sound: Any, *, video: Any) -> dict[str, Any]:
        return {"sound": self.short(sound), "video": self.video_up(self.video(video))}


def mixed_input() -> Any:
    return torch.randn(2, 3, 8, 10)
