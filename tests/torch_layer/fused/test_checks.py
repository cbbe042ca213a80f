"""Checks in the code of a network that `miofind.torch.fuse` traces."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from helpers.runs import networks_with_checks
from helpers.runs.networks_with_checks import (
    AsksForACount,
    AsksForADtype,
    AsksForEver,
    Block,
    Branches,
    Catches,
    CatchesAll,
    CatchesItsOwn,
    Checked,
    HasConstants,
    Indexes,
    MakesTensors,
    Many,
    RaisesElsewhere,
    Residual,
    Rewords,
    WidthError,
)
from torch import nn

from miofind.torch import FusedConvolution, fuse


def prepared(network: Any) -> Any:
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean), nn.init.uniform_(module.running_var, 0.5, 2)
    return network.eval()


def test_a_network_that_checks_its_input_is_traced() -> None:
    network = prepared(Checked())
    fused = fuse(network)
    assert fused.fusion_report.untraced == {}
    assert fused.fusion_report.kept == {}
    assert [layer.parts for layer in fused.fusion_report.fused] == [("convolution", "batch_norm", "relu")] * 2
    assert sum(isinstance(module, FusedConvolution) for module in fused.modules()) == 2
    x = torch.randn(2, 4, 8, 12)
    for each in (fused, pickle.loads(pickle.dumps(fused)), torch.compile(fused, backend="eager")):
        torch.testing.assert_close(each(x), network(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ((2, 4, 8, 6), ValueError, "the width must be a multiple of 4"),
        ((2, 4, 6, 8), AssertionError, 'Checked.forward: assert height % 4 == 0 and channels == 4, f"{height} and '),
        ((2, 3, 8, 8), AssertionError, 'Checked.forward: assert height % 4 == 0 and channels == 4, f"{height} and '),
        ((10, 4, 8, 8), NotImplementedError, "Checked.forward: raise NotImplementedError"),
        ((7, 4, 8, 8), NotImplementedError, "Checked.forward: raise NotImplementedError"),
        ((5, 4, 8, 8), WidthError, "a size must be even"),
    ],
)
def test_a_fused_network_checks_its_input_too(shape: tuple[int, ...], kind: type[Exception], message: str) -> None:
    network, x = prepared(Checked()), torch.ones(shape)
    fused = fuse(network)
    for each in (fused, pickle.loads(pickle.dumps(fused))):
        with pytest.raises(kind) as raised:
            each(x)
        assert str(raised.value).startswith(message)
        assert type(raised.value) is kind
    with pytest.raises(kind):
        network(x)


def test_what_a_part_raises_is_what_code_catches() -> None:
    network = prepared(CatchesItsOwn())
    fused = fuse(network)
    assert list(fused.fusion_report.untraced) == [""]
    for each in (fused, pickle.loads(pickle.dumps(fused))):
        for batch in (1, 2, 3):
            x = torch.randn(batch, 4, 8, 8)
            torch.testing.assert_close(each(x), network(x), rtol=1e-4, atol=1e-5)


def test_an_exception_that_a_program_has_not_is_the_one_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fuse(prepared(CatchesItsOwn()).part)
    monkeypatch.delattr(networks_with_checks, "WidthError")
    with pytest.raises(ValueError, match=r"^a size must be even$") as raised:
        fused(torch.ones(3, 4, 8, 8))
    assert type(raised.value) is ValueError


def test_values_are_checked() -> None:
    fused = fuse(prepared(Checked()))
    with pytest.raises(RuntimeError, match="no number"):
        fused(torch.full((2, 4, 8, 8), torch.nan))


@pytest.mark.parametrize(
    "kind",
    [
        *(Branches, Catches, CatchesAll, MakesTensors, RaisesElsewhere, Indexes, Rewords, HasConstants, AsksForEver),
        *(AsksForADtype, AsksForACount),
    ],
)
def test_branches_are_no_checks(kind: Any) -> None:
    network = prepared(kind(Block()))
    fused = fuse(network)
    assert list(fused.fusion_report.untraced) == [""]
    assert [layer.name for layer in fused.fusion_report.fused] == ["block.conv"]
    assert not [name for name in vars(fused) if "constant" in name]
    for batch in (1, 2):
        x = torch.randn(batch, 4, 8, 8)
        torch.testing.assert_close(fused(x), network(x), rtol=1e-4, atol=1e-5)


def test_where_code_decides_is_told() -> None:
    reason = fuse(prepared(Branches(Block()))).fusion_report.untraced[""]
    assert "Branches.forward decides by what it computes, in line " in reason


def test_a_part_that_decides_is_fused_by_itself() -> None:
    """What is around it has checks before and behind it."""

    class Around(Checked):
        def __init__(self) -> None:
            super().__init__()
            self.first = Branches(Block())

        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            if y.shape[-2] > 64:
                raise ValueError("too high")
            return y

    network = prepared(Around())
    fused = fuse(network)
    assert list(fused.fusion_report.untraced) == ["first"]
    assert {layer.name for layer in fused.fusion_report.fused} == {"first.block.conv", "second.conv"}
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(fused(x), network(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="too high"):
        fused(torch.randn(2, 4, 68, 8))


@pytest.mark.parametrize(("count", "untraced"), [(60, []), (200, [""])])
def test_tracing_ends(count: int, untraced: list[str]) -> None:
    assert list(fuse(prepared(Many(count))).fusion_report.untraced) == untraced


def test_a_check_stays_where_steps_that_nothing_reads_are_dropped() -> None:
    fused = fuse(prepared(Checked()))
    fused.graph.eliminate_dead_code()
    fused.recompile()
    with pytest.raises(ValueError, match="multiple of 4"):
        fused(torch.randn(2, 4, 8, 6))


def test_a_check_writes_to_nothing() -> None:
    (layer,) = fuse(prepared(Residual())).fusion_report.fused
    assert layer.parts == ("convolution", "bias", "residual", "relu")


def test_a_size_that_is_a_symbol_is_checked() -> None:
    """torch.compile's `bool` of one was neither True nor False."""
    network = prepared(Residual())
    compiled = torch.compile(fuse(network), backend="eager", fullgraph=True, dynamic=True)
    for size in (5, 6, 7):
        x = torch.randn(2, 4, size, size)
        torch.testing.assert_close(compiled(x), network(x), rtol=1e-4, atol=1e-5)
