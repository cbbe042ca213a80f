"""What norms do to each element: one factor and one sum for each channel, the same numbers, and others as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from miofind.torch.inductor import norms

aten, prims = torch.ops.aten, torch.ops.prims
STEPS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)
SHAPE = (2, 16, 8, 12)


@pytest.fixture(autouse=True)
def small_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_LEAST_SIZE", 2 * 16 * 8 * 8)


def traced(function: Callable[..., Any], *arguments: Any, mode: str = "fake") -> fx.GraphModule:
    """A function as Inductor's graphs have it."""
    from torch._inductor.decomposition import select_decomp_table

    made: fx.GraphModule = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode=mode)(*arguments)
    return made


def combined(function: Callable[..., Any], *arguments: Any, mode: str = "fake") -> tuple[int, fx.GraphModule]:
    """How many norms were replaced, and the graph."""
    made = traced(function, *arguments, mode=mode)
    count = norms.combine_vectors(made.graph)
    made.graph.lint()
    made.recompile()
    assert not any(node.target in STEPS and {*node.args} & {0, 1} for node in made.graph.nodes)
    return count, made


def images(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    """Random numbers far from 0, channels last where there is such an order."""
    torch.manual_seed(sum(shape))
    made = (torch.randn(shape) * 3 + 5).to(dtype)
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    return made.to(memory_format=orders[len(shape)]) if len(shape) in orders else made


def vector(size: int = 16, seed: int = 0) -> Any:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) + 2


def over_places(numbers: Any, x: Any) -> Any:
    return numbers.reshape(1, -1, *(1,) * (x.dim() - 2))


def group_norm(x: Any, w: Any, b: Any) -> Any:
    """A group norm as it is traced for GPUs."""
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    grouped = wide.reshape(x.shape[0], 4, x.shape[1] // 4, -1)
    variance, mean = torch.var_mean(grouped, (2, 3), correction=0, keepdim=True)
    normed = ((grouped - mean) * torch.rsqrt(variance + 1e-5)).reshape(x.shape)
    return (normed * over_places(w, x) + over_places(b, x)).to(x.dtype)


def batch_norm(x: Any, w: Any, b: Any) -> Any:
    return aten._native_batch_norm_legit_functional(x, w, b, b, w, True, 0.1, 1e-5)[0]


def batch_norm_gradients(dy: Any, x: Any, w: Any, b: Any) -> Any:
    return aten.native_batch_norm_backward(dy, x, w, b, w, b, w.abs(), True, 1e-5, [True, True, True])


def group_norm_gradients(dy: Any, x: Any, w: Any, b: Any) -> Any:
    n, c, groups = *x.shape[:2], 4
    mean, inverse = b[: n * groups].reshape(n, groups), w[: n * groups].reshape(n, groups).abs()
    wide = torch.promote_types(x.dtype, torch.float32)
    arguments = (n, c, math.prod(x.shape[2:]), groups, [True, True, True])
    return aten.native_group_norm_backward(dy.to(wide), x.to(wide), mean, inverse, w, *arguments)


def of_double(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*(each.double() for each in arguments))


def is_of_images(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() >= math.prod(SHAPE) and value.dim() > 2


def large_steps(made: fx.GraphModule) -> int:
    """The additions and multiplications of tensors as large as images."""
    return sum(node.target in STEPS and is_of_images(node) for node in made.graph.nodes)


CASES = {
    "group": (group_norm, 1, 2),
    "batch": (batch_norm, 1, 2),
    "instance": (lambda x, w, b: functional.instance_norm(x, None, None, w, b), 1, 2),
    "residual": (lambda x, w, b: batch_norm(x, w, b).float() + x.float(), 1, 3),
    "two": (
        lambda x, w, b: (group_norm(x, w, b).float() * over_places(w, x)).relu() + group_norm(x * 2, b, w),
        2,
        None,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SHAPE, (3, 16, 4, 4, 8), (1, 16, 256), (4, 16, 9, 11)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_the_same(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    function, count, steps = CASES[name]
    arguments = images(*shape, dtype=dtype), vector(), vector(seed=1)
    replaced, made = combined(function, *arguments)
    assert replaced == count
    if steps is not None:
        assert large_steps(made) == steps
    wanted = of_double(function, arguments)
    bound = 2 * torch.finfo(dtype).eps * wanted.abs().max()
    assert (made(*arguments).double() - wanted).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [batch_norm_gradients, group_norm_gradients])
def test_gradients_are_the_same(function: Callable[..., Any], dtype: Any) -> None:
    x = images(*SHAPE, dtype=dtype)
    arguments = (x - 5) * 0.1, x, vector(), vector(seed=1)
    replaced, made = combined(function, *arguments)
    assert replaced == 1
    before = traced(function, *arguments)
    for was, found, wanted in zip(before(*arguments), made(*arguments), of_double(function, arguments), strict=True):
        error, error_before = ((each.double() - wanted).abs().max() for each in (found, was))
        assert error <= 2 * error_before + 2e-6 * wanted.abs().max()


def test_vectors_of_16_bits_are_widened_before_anything_is_made_of_them() -> None:
    def function(x: Any, w: Any, b: Any) -> Any:
        return ((x.float() + over_places(b, x)) * over_places(w, x) + over_places(w.neg(), x)) * over_places(b.sin(), x)

    arguments = images(*SHAPE, dtype=torch.float16), vector().half() * 300, vector(seed=1).half() * 300
    _, made = combined(function, *arguments)
    wide = arguments[0], *(each.float() for each in arguments[1:])
    torch.testing.assert_close(made(*arguments), traced(function, *arguments)(*arguments), rtol=1e-5, atol=1e-5)
    assert function(*wide).abs().max() > torch.finfo(torch.float16).max


def test_what_is_copied_is_read_as_it_lies() -> None:
    """A GPU's group norm is traced on a copy channels first, of numbers that were widened."""
    x = images(*SHAPE)
    _, made = combined(group_norm, x, vector(), vector(seed=1))
    (large,) = (node for node in made.graph.nodes if node.target is aten.mul.Tensor and is_of_images(node))
    assert large.args[0].op == "placeholder"


def test_vectors_are_written_before_they_are_read() -> None:
    _, made = combined(group_norm, images(*SHAPE), vector(), vector(seed=1))
    stored = [node for node in made.graph.nodes if "force_stride_order" in str(node.target)]
    assert [tuple(node.meta["val"].shape) for node in stored] == [(2, 16, 1, 1)] * 2
    assert all(user.target in (aten.mul.Tensor, aten.add.Tensor) for node in stored for user in node.users)


def of_channels(x: Any) -> Any:
    """A vector that is written before it is read, so that it counts."""
    return x.float().mean((2, 3), keepdim=True)


def shifted(x: Any, w: Any, b: Any) -> Any:
    """What a norm does to each element, by three vectors."""
    return (x.float() - of_channels(x)) * over_places(w, x) + over_places(b, x)


def groups_of_all_images(x: Any, w: Any, b: Any) -> Any:
    grouped = x.float().reshape(2, 4, 4, -1)
    centred = (grouped - grouped.mean((0, 2, 3), keepdim=True)).reshape(x.shape)
    return centred * over_places(w, x) + over_places(b, x)


def centred_for_others(x: Any, w: Any, b: Any) -> Any:
    centred = x.float() - of_channels(x)
    return centred * over_places(w, x) + over_places(b, x), centred.exp()


AROUND: dict[str, Callable[..., Any]] = {
    "nothing": shifted,
    "vectors on the left": lambda x, w, b: over_places(b, x) + over_places(w, x) * (x.float() - of_channels(x)),
    "vectors of 16 bits": lambda x, w, b: shifted(x, w.to(x.dtype), b.to(x.dtype)) * over_places(w.to(x.dtype), x),
    "whole numbers": lambda x, w, b: shifted(x, w, (b * 9).int()) * over_places((w * 9).int(), x),
    "whole numbers of each element": lambda x, w, b: shifted(x, w, b) + x.int(),
    "numbers for all": lambda x, w, b: shifted(x, w.mean(), b) * b.mean(),
    "numbers of images": lambda x, w, b: shifted(x, w, b) * x.float().mean((1, 2, 3), keepdim=True),
    "six dimensions": lambda x, w, b: shifted(x.float().reshape(2, 16, 8, 12, 1, 1), w, b),
    "groups of all images": groups_of_all_images,
    "centred for others, too": centred_for_others,
    "another tensor in float32": lambda x, w, b: shifted(x, w, b) * over_places(w, x) + x.float().exp(),
    "a product": lambda x, w, b: shifted(x, w, b) * (x.float() + over_places(b, x)),
    "numbers of each place": lambda x, w, b: shifted(x, w, b) + x.float()[:1, :1],
    "a norm before a step that writes": lambda x, w, b: (shifted(x, w, b), w.copy_(w * 2))[0],
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_norm(name: str) -> None:
    function, arguments = AROUND[name], (images(*SHAPE), vector(), vector(seed=1))
    expected = function(*(each.clone() for each in arguments))
    count, made = combined(function, *arguments)
    assert count == 1
    torch.testing.assert_close(made(*arguments), expected, rtol=1e-5, atol=1e-4)


def test_vectors_are_no_larger_than_they_need_be() -> None:
    """The weights of all images are combined once."""
    _, made = combined(batch_norm, images(*SHAPE), vector(), vector(seed=1))
    stored = [node for node in made.graph.nodes if "force_stride_order" in str(node.target)]
    assert [tuple(node.meta["val"].shape) for node in stored] == [(1, 16, 1, 1)] * 2


def rows(x: Any, w: Any, b: Any) -> Any:
    return (x.float() - x.float().mean(3, keepdim=True)) * over_places(w, x) + over_places(b, x)


def across_channels(x: Any, w: Any, b: Any) -> Any:
    """Of parts that channels are not whole in."""
    wide = x.float().reshape(24, -1)
    return (wide - wide.mean(1, keepdim=True)).reshape(x.shape) * over_places(w, x) + over_places(b, x)


def written(x: Any, w: Any, b: Any) -> Any:
    """Of numbers that are written to before the last step."""
    y = x.float() - of_channels(x)
    x.mul_(2)
    return y * over_places(w, x) + over_places(b, x)


def taken_off_itself(x: Any, w: Any, b: Any) -> Any:
    wide = x.float()
    return ((wide + over_places(b, x)) - wide) * over_places(w, x) * of_channels(x)


def scaled(x: Any, w: Any, b: Any) -> Any:
    y = torch.add(x.float() * over_places(w, x), over_places(b, x), alpha=2)
    return torch.sub(y * of_channels(x), over_places(w + 1, x), alpha=2)


def computed_for_others(x: Any, w: Any, b: Any) -> Any:
    y = (x.float() - of_channels(x)) * over_places(w, x)
    return y + over_places(b, x), y.exp()


def difference_for_others(x: Any, w: Any, b: Any) -> Any:
    """A difference is centred only where a vector is taken off."""
    y = x.float() - x.float().exp().to(x.dtype)
    return (y - of_channels(x)) * over_places(w, x) * of_channels(x * 2) + over_places(b, x), y.exp()


def rounded(x: Any, w: Any, b: Any) -> Any:
    """Each step to 16 bits."""
    mean, w, b = (each.to(x.dtype) for each in (of_channels(x), over_places(w, x), over_places(b, x)))
    return (x - mean) * w + b


OTHERS = {
    "float32": (group_norm, images(*SHAPE, dtype=torch.float32)),
    "small": (shifted, images(1, 16, 8, 8)),
    "few places": (batch_norm, images(64, 16, 4, 4)),
    "no weights": (lambda x, w, b: functional.instance_norm(x), images(*SHAPE)),
    "no statistics": (lambda x, w, b: x.float() * over_places(w, x) + over_places(b, x), images(*SHAPE)),
    "rows": (rows, images(*SHAPE)),
    "across channels": (across_channels, images(*SHAPE)),
    "written": (written, images(*SHAPE)),
    "itself": (taken_off_itself, images(*SHAPE)),
    "factors of sums": (scaled, images(*SHAPE)),
    "computed for others, too": (computed_for_others, images(*SHAPE)),
    "a difference for others, too": (difference_for_others, images(*SHAPE)),
    "rounded": (rounded, images(*SHAPE)),
    "layer norm": (
        lambda x, w, b: functional.layer_norm(x.permute(0, 2, 3, 1), (16,), w.bfloat16(), b.bfloat16()),
        images(*SHAPE),
    ),
    "two dimensions": (lambda x, w, b: batch_norm(x, w, b), images(*SHAPE).reshape(-1, 16)),
}


SEEN: dict[str, Callable[[Any], Any]] = {
    "unsqueeze": lambda v: v.unsqueeze(0),
    "squeeze": lambda v: v.reshape(1, 16).squeeze(0),
    "squeeze of dimensions": lambda v: v.reshape(1, 16, 1).squeeze((0, 2)),
    "expand": lambda v: v.expand(1, 16),
    "permute": lambda v: v.reshape(16, 1).permute(1, 0),
    "slice": lambda v: v.expand(2, 16)[1:],
    "select": lambda v: v.reshape(1, 16)[0],
}


@pytest.mark.parametrize("name", SEEN)
def test_a_vector_that_is_seen_otherwise_is_read_once(name: str) -> None:
    """Two would be written for one."""
    seen = SEEN[name]

    def function(x: Any, w: Any) -> Any:
        return (x.float() * over_places(w, x) + over_places(seen(w), x)) * over_places(seen(w.exp()), x)

    count, _ = combined(function, images(*SHAPE), vector())
    assert count == 0


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    function, x = OTHERS[name]
    w, b = vector(), vector(seed=1)
    made = traced(function, x.clone(), w, b)
    before = str(made.graph)
    assert norms.combine_vectors(made.graph) == 0
    assert str(made.graph) == before


def test_a_number_on_another_device_stays_where_it_is() -> None:
    """Of no dimensions, which PyTorch applies to tensors of a GPU."""
    with FakeTensorMode():
        x = torch.empty(SHAPE, dtype=torch.bfloat16, device="meta")
        w, b = (torch.empty(16, device="meta") for _ in range(2))
        count, _ = combined(lambda x, w, b, one: shifted(x, w, b) * one, x, w, b, torch.empty(()), mode="real")
    assert count == 1


def test_sizes_that_are_not_numbers_stay() -> None:
    count, _ = combined(group_norm, images(*SHAPE), vector(), vector(seed=1), mode="symbolic")
    assert count == 0


def test_what_else_reads_a_step_still_does() -> None:
    def function(x: Any, w: Any, b: Any) -> Any:
        normed = (x.float() - over_places(b, x)) * over_places(w.exp(), x)
        return normed * over_places(w, x) + over_places(b.exp(), x), normed.exp()

    x, w, b = images(*SHAPE) * 0.1, vector() * 0.1, vector(seed=1) * 0.1
    made = traced(function, x, w, b)
    norms.combine_vectors(made.graph)
    made.recompile()
    for found, wanted in zip(made(x, w, b), function(x, w, b), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_infinities_and_nan_stay_what_they_are() -> None:
    x = images(*SHAPE)
    x[0, 0, 0, 0], x[1, 3, 2, 2] = math.inf, math.nan
    arguments = x, vector(), vector(seed=1)
    _, made = combined(batch_norm, *arguments)
    torch.testing.assert_close(made(*arguments), traced(batch_norm, *arguments)(*arguments), equal_nan=True)


def of_halves(x: Any, w: Any, b: Any) -> Any:
    """Vectors of 16 bits, whose products do not fit."""
    return (x.float() - x.float().mean((2, 3), keepdim=True)) * over_places(w, x) * over_places(b, x)


def twice(x: Any, w: Any, b: Any) -> Any:
    """A sum that does not fit into 16 bits."""
    return x.float() + x.float() - x.float() * over_places(w, x) * over_places(b, x)


def of_bytes(x: Any, w: Any, b: Any) -> Any:
    """Of 8 bits, which PyTorch combines with no other type."""
    return (x.to(torch.float8_e4m3fn).float() - over_places(b, x)) * over_places(w, x) + x.float() * over_places(b, x)


def long(x: Any, w: Any, b: Any) -> Any:
    y = x.float()
    for _ in range(400):
        y = y + over_places(w, x)
    return y * over_places(b, x)


@pytest.mark.parametrize("function", [of_halves, twice, of_bytes, long])
def test_steps_are_computed_in_float32(function: Callable[..., Any]) -> None:
    x, w, b = images(*SHAPE, dtype=torch.float16) * 4, vector().half() * 300, vector(seed=1).half() * 300
    arguments = (x * 1000, w * 0.003, b * 0.003) if function is twice else (x, w, b)
    _, made = combined(function, *arguments)
    torch.testing.assert_close(made(*arguments), function(*arguments), rtol=1e-5, atol=1)


def test_numbers_of_another_device_stay() -> None:
    """Steps may read one number that is a CPU's."""

    def function(x: Any, w: Any, b: Any, factor: Any) -> Any:
        return (x.float() - over_places(b, x)) * factor * over_places(w, x)

    with FakeTensorMode():
        x, w, b = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in (SHAPE, 16, 16))
        made = traced(function, x, w, b, torch.empty(()))
    assert norms.combine_vectors(made.graph) == 0


def turned_batch_norm(x: Any, w: Any, b: Any) -> Any:
    return batch_norm(x.contiguous(memory_format=torch.channels_last), w, b)


IN_ORDER = {
    "channels first": (group_norm, images(*SHAPE)),
    "channels last": (turned_batch_norm, images(*SHAPE).contiguous()),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_is_read_in_its_order_keeps_it(name: str) -> None:
    norm, x = IN_ORDER[name]

    def function(x: Any, w: Any, b: Any) -> Any:
        return torch.as_strided(norm(x, w, b).float(), (2, 8), (1536, 1))

    arguments = x, vector(), vector(seed=1)
    replaced, made = combined(function, *arguments)
    assert replaced == 1
    torch.testing.assert_close(made(*arguments), function(*arguments), rtol=0.02, atol=0.02)


def test_an_order_that_nobody_reads_is_left() -> None:
    made = traced(lambda *given: [group_norm(*given)], images(*SHAPE), vector(), vector(seed=1))
    (output,) = made.graph.find_nodes(op="output")
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in output.all_input_nodes]
    assert norms.combine_vectors(made.graph) == 1
    assert len(made.graph.find_nodes(op="call_function", target=aten.clone.default)) == 1, "the norm's own"
