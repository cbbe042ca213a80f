"""What `fuse` reads of code that cannot be traced: sequences that it calls are fused, those that it takes apart not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from helpers.runs.holders_of_sequences import TAKEN_APART, WHOLE, Calls, prepared

from miofind.torch import fuse


@pytest.mark.parametrize("kind", WHOLE)
def test_a_sequence_that_code_calls_is_fused(kind: Any) -> None:
    network = prepared(kind)
    fused = fuse(network)
    assert [layer.parts for layer in fused.fusion_report.fused] == [("convolution", "batch_norm", "relu")]
    check_same(fused, network)
    check_same(pickle.loads(pickle.dumps(fused)), network)


@pytest.mark.parametrize("kind", TAKEN_APART)
def test_a_sequence_that_code_takes_apart_stays(kind: Any) -> None:
    network = prepared(kind)
    fused = fuse(network)
    assert fused.fusion_report.fused == ()
    check_same(fused, network)


def test_a_sequence_keeps_its_class() -> None:
    network = prepared(Calls)
    assert isinstance(fuse(network).steps, type(network.steps))


def check_same(fused: Any, network: Any) -> None:
    for batch in (1, 2):
        x = torch.randn(batch, 4, 6, 6)
        torch.testing.assert_close(fused(x), network(x), rtol=1e-4, atol=1e-5)
