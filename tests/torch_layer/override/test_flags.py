"""PyTorch's switches in miofind's terms, however they were set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from miofind.core.tensor import MathMode
from miofind.torch.override.flags import Flags, state


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True):
        before = torch.backends.cudnn.conv.fp32_precision
        yield
        torch.backends.cudnn.conv.fp32_precision = before


def _math() -> MathMode:
    return Flags.of(state(), on_gpu=True).math


def test_tf32_by_the_old_interface() -> None:
    for allowed in (True, False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        assert (_math() is MathMode.TF32) is allowed


def test_tf32_by_the_new_interface_alone() -> None:
    for precision in ("ieee", "tf32", "none"):
        torch.backends.cudnn.conv.fp32_precision = precision
        assert (_math() is MathMode.TF32) is (precision == "tf32")


def test_the_old_interface_may_not_be_readable() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError):
        _ = torch.backends.cudnn.allow_tf32
    assert _math() is MathMode.IEEE


def test_tf32_is_of_gpus() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert Flags.of(state(), on_gpu=False).math is MathMode.IEEE


def test_a_switch_changes_the_state() -> None:
    before = state()
    with torch.backends.cudnn.flags(enabled=True, benchmark=not torch.backends.cudnn.benchmark):
        assert state() != before
    assert state() == before
