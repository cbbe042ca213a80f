"""Statistics of group norms: in two steps where channels lie last, the same numbers, and as they were elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from miofind.torch.inductor import group_statistics
from miofind.torch.inductor.graphs import VIEWS

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def small_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_statistics, "_LEAST_SIZE", 2 * 16 * 48)


def traced(function: Callable[[Any], Any], x: Any) -> fx.GraphModule:
    """A function as Inductor's graphs have it."""
    from torch._inductor.decomposition import select_decomp_table

    made: fx.GraphModule = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(x)
    return made


def split(function: Callable[[Any], Any], x: Any) -> tuple[int, fx.GraphModule]:
    """How many statistics are computed in two steps, and the graph."""
    made = traced(function, x)
    count = group_statistics.split_group_statistics(made.graph)
    made.graph.lint()
    made.recompile()
    return count, made


def last(*shape: int, dtype: Any = torch.float32) -> Any:
    """Random numbers far from 0, channels last."""
    torch.manual_seed(0)
    order = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return (torch.randn(shape) * 3 + 5).to(dtype).to(memory_format=order)


def norm(groups: int) -> Callable[[Any], Any]:
    """A group norm."""
    return lambda x: functional.group_norm(x, groups, x.new_full((x.shape[1],), 0.5), x.new_full((x.shape[1],), 2.0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 16, 16, 12), 4), ((3, 64, 5, 7), 4), ((2, 16, 4, 8, 6), 8), ((1, 32, 64, 64), 2), ((2, 96, 1, 9), 32)],
    ids=str,
)
def test_the_numbers_are_the_same(shape: tuple[int, ...], groups: int, dtype: Any) -> None:
    x = last(*shape, dtype=dtype)
    count, made = split(norm(groups), x)
    assert count == 1
    wanted = norm(groups)(x.double())
    wide = torch.promote_types(dtype, torch.float32)
    bound = torch.finfo(dtype).eps + 32 * torch.finfo(wide).eps  # x times a factor cancels the mean times it
    assert (made(x).double() - wanted).abs().max() <= bound * wanted.abs().max()


def test_copies_and_conversions_before_it_are_left_out() -> None:
    """A GPU's group norm is traced on a copy in another memory order; copied, channels would lie apart again."""
    x = last(2, 16, 16, 12, dtype=torch.float16)
    count, made = split(lambda v: norm(4)(v.clone(memory_format=torch.contiguous_format).float()), x)
    assert count == 1
    (statistics,) = (node for node in made.graph.nodes if node.target is aten.var_mean.correction)
    assert statistics.args[0].args[0].args[0].op == "placeholder"
    torch.testing.assert_close(made(x), norm(4)(x.float()), rtol=1e-5, atol=1e-5)


def test_what_rounds_is_no_copy() -> None:
    x = last(2, 16, 16, 12)
    count, made = split(lambda v: norm(4)(v.half().float()), x)
    assert count == 1
    torch.testing.assert_close(made(x), norm(4)(x.half().float()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (norm(4), last(2, 16, 16, 12).contiguous()),
        (norm(16), last(2, 16, 16, 12)),  # each channel by itself
        (norm(1), last(2, 64, 16, 12)),  # a group as wide as what is read at once
        (norm(4), last(1, 16, 8, 8)),  # too small
        (norm(4), last(2, 16, 16, 12)[:, :, ::2]),
        (lambda v: torch.var_mean(v.reshape(2, 4, 4, -1), (2, 3), correction=1, keepdim=True), last(2, 16, 16, 12)),
        (lambda v: torch.var_mean(v.reshape(2, 4, 4, -1), (2, 3), correction=0), last(2, 16, 16, 12)),
        (lambda v: torch.var_mean(v.reshape(2, 4, 4, -1), (1, 3), correction=0, keepdim=True), last(2, 16, 16, 12)),
        (lambda v: torch.var_mean(v.reshape(4, 8, 4, -1), (2, 3), correction=0, keepdim=True), last(2, 16, 16, 12)),
        (lambda v: torch.var_mean(v, (2, 3), correction=0, keepdim=True), last(2, 16, 16, 12)),
        (norm(4), torch.randn(128, 16)),  # no channels of an image
        (norm(4), torch.randn(2, 16, 2, 3, 4, 5)),
        (lambda v: torch.var_mean(v.view(2, 3, 4, 8, 9), (2, 3), correction=0, keepdim=True), last(6, 4, 8, 9)),
        (
            lambda v: torch.var_mean(v.reshape(2, 4, 4, -1), (2, 3), correction=0, keepdim=True),
            last(2, 16, 16, 12).bfloat16(),
        ),
        (
            lambda v: torch.var_mean(v.reshape(2, 4, 4, -1), (2, 3), correction=0, keepdim=True),
            last(2, 16, 16, 12) + 1j,
        ),
    ],
)
def test_others_stay(function: Callable[[Any], Any], x: Any) -> None:
    count, made = split(function, x)
    assert count == 0
    torch.testing.assert_close(made(x), function(x))


def test_what_rounds_whole_numbers_is_no_copy() -> None:
    x = (last(2, 16, 16, 12) * 300).to(torch.int32)
    count, made = split(lambda v: norm(4)(v.bfloat16().float()), x)
    assert count == 1
    torch.testing.assert_close(made(x), norm(4)(x.bfloat16().float()), rtol=1e-5, atol=1e-5)


def test_steps_of_other_passes_may_say_nothing_of_themselves() -> None:
    made = traced(norm(4), last(2, 16, 16, 12))
    for node in made.graph.nodes:
        if node.target in VIEWS:
            node.meta.clear()
    assert group_statistics.split_group_statistics(made.graph) == 0


@pytest.mark.parametrize(
    ("channels", "places", "parts"), [(2, 4096, 4), (4, 64 * 65, 2), (3, 1 << 12, 4), (5, 75 * 75, 1), (8, 1 << 12, 1)]
)
def test_enough_is_combined(channels: int, places: int, parts: int) -> None:
    assert group_statistics._parts(channels, places) == parts
