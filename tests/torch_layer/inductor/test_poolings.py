"""Maximum poolings of large windows, along one dimension after another: the same numbers; others stay."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch


def windows(compiled: Compiled) -> list[list[int]]:
    """Of the poolings of all graphs."""
    from torch._inductor.inductor_prims import _low_memory_max_pool_with_offsets as pooling

    return [node.args[1] for graph in compiled.graphs for node in graph.graph.nodes if node.target is pooling]


def with_extremes(*shape: int, dtype: Any = torch.float32) -> Any:
    """Random numbers, some of them infinite or none."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    for extreme in (math.nan, math.inf, -math.inf):
        x.view(-1)[torch.randint(x.numel(), (x.numel() // 40,))] = extreme
    return x.to(dtype)


CASES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any], list[list[int]]]] = {
    "5x5": ((2, 3, 11, 12), lambda x: functional.max_pool2d(x, 5, 1, 2), [[1, 5], [5, 1]]),
    "steps": ((2, 3, 23, 20), lambda x: functional.max_pool2d(x, (7, 5), (2, 3), (3, 1)), [[1, 5], [7, 1]]),
    "rows first": ((2, 3, 23, 20), lambda x: functional.max_pool2d(x, 6, (3, 1)), [[6, 1], [1, 6]]),
    "rounded up": (
        (1, 2, 22, 23),
        lambda x: functional.max_pool2d(x, (6, 5), (4, 3), (2, 1), ceil_mode=True),
        [[6, 1], [1, 5]],
    ),
    "dilated": ((1, 2, 25, 23), lambda x: functional.max_pool2d(x, 5, 1, 2, 3), [[1, 5], [5, 1]]),
    "13x13": ((1, 2, 20, 20), lambda x: functional.max_pool2d(x, 13, 1, 6), [[1, 13], [13, 1]]),
    "volumes": ((1, 2, 9, 10, 11), lambda x: functional.max_pool3d(x, 3, 2, 1), [[1, 1, 3], [1, 3, 1], [3, 1, 1]]),
    "frames": (
        (1, 2, 9, 10, 11),
        lambda x: functional.max_pool3d(x, (1, 5, 5), (2, 1, 1), (0, 2, 2)),
        [[1, 1, 1], [1, 1, 5], [1, 5, 1]],
    ),
    "an image alone": ((3, 11, 12), lambda x: functional.max_pool2d(x, 5, 1, 2), [[1, 5], [5, 1]]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "pool", "split"), CASES.values(), ids=CASES)
def test_the_numbers_are_the_same(
    shape: tuple[int, ...], pool: Callable[[Any], Any], split: list[list[int]], dtype: Any
) -> None:
    x = with_extremes(*shape, dtype=dtype)
    compiled = Compiled(pool)
    torch.testing.assert_close(compiled(x), pool(x), rtol=0, atol=0, equal_nan=True)
    assert windows(compiled) == split


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
def test_the_memory_format_is_kept(order: Any) -> None:
    x = torch.randn(2, 8, 11, 12).to(memory_format=order)
    compiled = Compiled(lambda x: functional.max_pool2d(x, 5, 1, 2))
    assert compiled(x).stride() == functional.max_pool2d(x, 5, 1, 2).stride()


@pytest.mark.parametrize(
    ("pool", "window"),
    [
        (lambda x: functional.max_pool2d(x, 3, 2, 1), [3, 3]),
        (lambda x: functional.max_pool2d(x, 4), [4, 4]),
        (lambda x: functional.max_pool2d(x, (1, 25)), [1, 25]),
    ],
    ids=["3x3", "4x4", "one dimension"],
)
def test_others_stay(pool: Callable[[Any], Any], window: list[int]) -> None:
    x = torch.randn(1, 2, 30, 31)
    compiled = Compiled(pool)
    torch.testing.assert_close(compiled(x), pool(x), rtol=0, atol=0)
    assert windows(compiled) == [window]


def test_indices_that_a_user_asks_for_are_pytorch_s() -> None:
    x = torch.randn(1, 2, 12, 13)
    compiled = Compiled(lambda x: functional.max_pool2d(x, 5, 1, 2, return_indices=True))
    for given, wanted in zip(compiled(x), functional.max_pool2d(x, 5, 1, 2, return_indices=True), strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=0)


def test_a_window_too_long_for_one_dimension_stays() -> None:
    x = torch.randn(1, 2, 30, 31)
    compiled = Compiled(lambda x: functional.max_pool2d(x, (2, 30)))
    torch.testing.assert_close(compiled(x), functional.max_pool2d(x, (2, 30)), rtol=0, atol=0)
    assert not windows(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "pool",
    [
        lambda x: functional.max_pool2d(x, 5, 1, 2),
        lambda x: functional.max_pool2d(x, 5, (2, 3), (1, 2), ceil_mode=True),
        lambda x: functional.max_pool2d(x, 5, 2, 2, 2),
    ],
    ids=["5x5", "rounded up", "dilated"],
)
@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
def test_gradients_go_to_the_first_of_equal_maxima(pool: Callable[[Any], Any], order: Any) -> None:
    torch.manual_seed(0)
    x = torch.randint(3, (2, 3, 13, 14)).float().to(memory_format=order)
    x[0, 0, :6, :6] = -math.inf  # what lies outside is no greater
    x[0, 0, 2, 2] = -1.0
    x.requires_grad_()
    compiled = Compiled(pool)
    wanted = pool(x)
    given = compiled(x)
    torch.testing.assert_close(given, wanted, rtol=0, atol=0)
    factors = torch.rand_like(wanted).masked_fill(wanted.isinf(), 0)
    gradients = [torch.autograd.grad((y.nan_to_num() * factors).sum(), x)[0] for y in (given, wanted)]
    torch.testing.assert_close(*gradients)
    assert windows(compiled) == [[1, 5]]


@pytest.mark.parametrize("shape", [(2, 3, 11, 12), (3, 11, 12)], ids=str)
def test_places_are_inductor_s(shape: tuple[int, ...]) -> None:
    """Of windows with infinities and what is no number, too."""

    def places(x: Any) -> Any:
        from torch._inductor.inductor_prims import _low_memory_max_pool_with_offsets as pooling

        return pooling(x, [5, 5], [1, 1], [2, 2], [1, 1], False)

    compiled = Compiled(places, fullgraph=True)
    values, given = compiled(with_extremes(*shape))
    assert given.dtype is torch.int8
    assert windows(compiled) == [[1, 5]]
    x = functional.pad(with_extremes(*shape), (2, 2, 2, 2), value=-math.inf)
    unfolded = x.unfold(-2, 5, 1).unfold(-2, 5, 1).flatten(-2)
    is_none = unfolded.isnan()
    first = torch.where(
        is_none.any(-1), is_none.int().argmax(-1), (unfolded == unfolded.amax(-1, True)).int().argmax(-1)
    )
    torch.testing.assert_close(values, unfolded.gather(-1, first[..., None])[..., 0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(given.long(), first)


def test_places_of_whole_numbers_stay() -> None:
    """Minus infinity, which lies outside, is none of them: such a graph could not be compiled."""

    def pool(x: Any) -> Any:
        return functional.max_pool2d(x, 5, 1, 2, return_indices=True)

    torch.manual_seed(0)
    x = torch.randint(-9, 9, (2, 3, 11, 12))
    compiled = Compiled(pool)
    torch.testing.assert_close(compiled(x), pool(x), rtol=0, atol=0)
    assert windows(compiled) == [[5, 5]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's code for the CPU is compiled by g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_computes_the_same() -> None:
    """With the places of maxima and without; no vectors, and no backward graph, which take g++ half a minute."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 13, 14).to(memory_format=torch.channels_last).requires_grad_()

    def pyramid(x: Any) -> Any:
        return torch.cat([x, functional.max_pool2d(x, 5, 1, 2)], 1)

    torch._dynamo.reset()
    compiled = torch.compile(
        pyramid, options=miofind.torch.inductor_options(fx_graph_cache=False, **{"cpp.simdlen": 1})
    )
    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients), torch._functorch.config.patch(enable_autograd_cache=False):
            given, wanted = compiled(x), pyramid(x)
        torch.testing.assert_close(given, wanted, rtol=0, atol=0)
        assert given.stride() == wanted.stride()


def test_any_number_of_images_is_split_as_well() -> None:
    compiled = Compiled(lambda x: functional.max_pool2d(x, 5, 1, 2), dynamic=True)
    for count in (2, 3, 5):
        x = torch.randn(count, 3, 9 + count, 10)
        torch.testing.assert_close(compiled(x), functional.max_pool2d(x, 5, 1, 2), rtol=0, atol=0)
    assert [5, 1] in windows(compiled)
    assert [5, 5] not in windows(compiled)
