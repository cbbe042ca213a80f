"""What tests of benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def pytorchs_switches() -> Iterator[None]:
    """PyTorch's switches as they were afterwards: a benchmark sets them for its process, here that of other tests."""
    import torch

    cudnn = torch.backends.cudnn
    names = ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32")
    before = {name: getattr(cudnn, name) for name in names}
    yield
    for name, value in before.items():
        setattr(cudnn, name, value)
