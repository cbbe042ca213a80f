"""Gradients of upsamplings that are gathered: the gradients of float64, in the order of dy; others stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

aten, prims = torch.ops.aten, torch.ops.prims
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
Function = Callable[[Any], Any]


def resized(**keywords: Any) -> Function:
    return lambda x: functional.interpolate(x, **keywords)


def joint_graph(function: Function, x: Any, dy: Any, *, mode: Any = None) -> fx.GraphModule:
    """The gradient of x, of tensors like those given, as Inductor decomposes it."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradient(primals: Any, tangents: Any) -> Any:
        x = primals.detach().requires_grad_()
        with torch.enable_grad():
            y = function(x)
        return torch.autograd.grad(y, x, tangents)[0]

    with mode or FakeTensorMode(), enable_python_dispatcher():
        like = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in (x, dy)]
        graph = make_fx(gradient, decomposition_table=select_decomp_table())(*like)
    graph.graph.eliminate_dead_code()
    constant_fold_uniform_value(graph)  # as Inductor does before custom passes
    return graph


def rewritten(graph: fx.GraphModule) -> fx.GraphModule:
    from miofind.torch.inductor.upsamplings import gather_gradients

    gather_gradients(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph


def scatters(graph: fx.GraphModule) -> int:
    return sum(node.target in (aten.index_put.default, aten.scatter_add.default) for node in graph.graph.nodes)


def random(*shape: int, dtype: Any = torch.float32, last: bool = False) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return made.to(memory_format=LAST[len(shape)]) if last else made


def wanted(function: Function, x: Any, dy: Any) -> Any:
    """The gradient in float64."""
    x = x.double().requires_grad_()
    return torch.autograd.grad(function(x), x, dy.double())[0]


def check(function: Function, x: Any, dy: Any | None = None) -> fx.GraphModule:
    """That all is gathered, and right to one rounding and what places in float32 are off."""
    if dy is None:
        shape = function(torch.empty(x.shape)).shape
        dy = random(*shape, dtype=x.dtype, last=not x.is_contiguous())
    graph = joint_graph(function, x, dy)
    assert scatters(graph) > 0
    before = graph(x, dy)
    given, expected = rewritten(graph)(x, dy), wanted(function, x, dy)
    assert scatters(graph) == 0
    assert given.dtype is x.dtype
    most = expected.abs().max().item()
    noise = 16 * torch.finfo(torch.float32).eps * max(dy.shape[2:]) * most
    assert ((given.double() - expected).abs() <= torch.finfo(x.dtype).eps / 2 * expected.abs() + noise).all()
    errors = [(each.double() - expected).abs().max().item() for each in (given, before)]
    assert errors[0] <= 1.2 * errors[1] + 4 * torch.finfo(torch.float32).eps * most, "no worse than PyTorch's"
    return graph


SIZES: dict[str, dict[str, Any]] = {
    "twice": {"scale_factor": 2},
    "thrice": {"scale_factor": 3},
    "eightfold": {"scale_factor": 8},
    "twentyfold": {"scale_factor": 20},
    "1.5": {"scale_factor": 1.5},
    "1.7, as given": {"scale_factor": 1.7},
    "2.6, of sizes": {"scale_factor": 2.6, "recompute_scale_factor": True},
    "nine": {"size": 9},
    "as it is": {"size": 5},
}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
SHAPES = {1: (2, 3, 5), 2: (2, 3, 5, 5), 3: (1, 2, 5, 5, 5)}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("align_corners", [False, True], ids=["edges", "corners"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_linear_gradients(size: dict[str, Any], rank: int, align_corners: bool, dtype: Any) -> None:
    if rank == 3 and size.get("scale_factor", 1) > 3:
        size = {"scale_factor": (1, 1, size["scale_factor"])}
    check(resized(mode=LINEAR[rank], align_corners=align_corners, **size), random(*SHAPES[rank], dtype=dtype))


NEAREST: dict[str, tuple[Function, tuple[int, ...]]] = {
    "twice": (resized(scale_factor=2), (2, 3, 5, 6)),
    "twice, exact": (resized(scale_factor=2, mode="nearest-exact"), (2, 3, 5, 6)),
    "signals": (resized(scale_factor=4), (2, 3, 7)),
    "volumes": (resized(scale_factor=2), (1, 3, 3, 4, 5)),
    "eightfold": (resized(scale_factor=8), (1, 2, 3, 4)),
    "one dimension": (resized(scale_factor=(1, 3)), (2, 3, 5, 6)),
    "first and last dimension": (resized(scale_factor=(2, 1, 3)), (1, 2, 3, 4, 5)),
    "no whole factor": (resized(size=(13, 9)), (2, 3, 9, 6)),
    "two for three": (resized(size=6, mode="nearest-exact"), (2, 3, 4)),
    "an image alone": (lambda x: functional.interpolate(x[None], scale_factor=2)[0], (3, 5, 6)),
    "as it is": (resized(size=(5, 6)), (2, 3, 5, 6)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full_matrix)], ids=str)
@pytest.mark.parametrize(("function", "shape"), NEAREST.values(), ids=NEAREST)
def test_nearest_gradients(function: Function, shape: tuple[int, ...], dtype: Any) -> None:
    check(function, random(*shape, dtype=dtype))


def test_whole_factors_of_nearest_need_no_index() -> None:
    graph = check(resized(scale_factor=2), random(2, 3, 5, 6, dtype=torch.bfloat16, last=True))
    steps = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert steps == {prims.convert_element_type.default, aten.slice.Tensor, aten.add.Tensor}


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 3, 1, 4)], ids=str)
@pytest.mark.parametrize("align_corners", [False, True])
def test_one_element_sums_all(shape: tuple[int, ...], align_corners: bool) -> None:
    """As behind the pooling of images in DeepLab; with aligned corners all others have no weight, too."""
    function = resized(size=(65, 33), mode="bilinear", align_corners=align_corners)
    graph = check(function, random(*shape, dtype=torch.bfloat16))
    assert graph.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)


def test_bicubic_gradients() -> None:
    check(resized(scale_factor=2, mode="bicubic"), random(1, 2, 5, 6))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [{"scale_factor": 2}, {"size": (13, 9)}, {"scale_factor": 8}], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_gradients_lie_as_those_of_results(mode: str, size: dict[str, Any]) -> None:
    for last in (True, False):
        x = random(2, 4, 9, 6)
        dy = random(*resized(mode=mode, **size)(x).shape, last=last)
        graph = check(resized(mode=mode, **size), x, dy)
        given = graph(x, dy)
        assert given.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        assert graph.graph.output_node().args[0].meta["val"].stride() == given.stride()


def test_volumes_lie_channels_last() -> None:
    x = random(1, 4, 3, 4, 5, last=True)
    graph = check(resized(scale_factor=2, mode="trilinear"), x)
    dy = random(1, 4, 6, 8, 10, last=True)
    assert graph(x, dy).is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_gradients_may_lie_anyhow(mode: str) -> None:
    x, function = random(2, 3, 5, 6), resized(scale_factor=2, mode=mode)
    spread = random(2, 3, 20, 24)[:, :, ::2, ::2]
    for dy in (
        spread,
        random(2, 3, 12, 10).mT,
        random(1).expand(2, 3, 10, 12),
        random(2, 3, 1, 1).expand(2, 3, 10, 12),
    ):
        assert check(function, x, dy)(x, dy).is_contiguous()


@pytest.mark.parametrize("size", [(9, 13), (10, 14), (11, 15)], ids=str)
def test_what_has_no_weight_spreads_nothing(size: tuple[int, int]) -> None:
    """Infinities and what is no number, beyond the pixels that they were computed from."""
    function, x = resized(size=size, mode="bilinear", align_corners=True), random(1, 1, 5, 7)
    dy = random(1, 1, *size)
    graph = check(function, x, dy)
    for y in range(size[0]):
        for extreme in (torch.inf, torch.nan):
            ones, spoilt = torch.zeros_like(dy), dy.clone()
            ones[0, 0, y, 4], spoilt[0, 0, y, 4] = 1, extreme
            assert torch.equal(graph(x, spoilt).isfinite(), wanted(function, x, ones).abs() < 1e-6)


@pytest.mark.parametrize("factor", [3, 5])
def test_no_weight_within_windows_spreads_nothing(factor: int) -> None:
    """Of cubic windows at odd factors, which are centred upon pixels."""
    function, x = resized(scale_factor=factor, mode="bicubic"), random(1, 1, 5, 5)
    dy = random(1, 1, 5 * factor, 5 * factor)
    graph = check(function, x, dy)
    for y in range(5 * factor):
        ones, spoilt = torch.zeros_like(dy), dy.clone()
        ones[0, 0, y, 4], spoilt[0, 0, y, 4] = 1, torch.inf
        assert torch.equal(graph(x, spoilt).isfinite(), wanted(function, x, ones).abs() < 1e-6)


def progressive(x: Any) -> Any:
    return functional.interpolate(functional.interpolate(x, scale_factor=2, mode="bilinear"), scale_factor=3)


def pyramid(x: Any) -> Any:
    """The same three times, of several sizes, and another use."""
    small, large = (functional.interpolate(x, scale_factor=s, mode="bilinear") for s in (2, 4))
    again = functional.interpolate(x, scale_factor=2, mode="bilinear").sin() + functional.interpolate(x, size=(10, 12))
    return (functional.avg_pool2d(large, 2) * small + again) * x.mean()


SEVERAL: dict[str, Function] = {
    "one behind the other": progressive,
    "of one tensor": pyramid,
    "twice the same": lambda x: resized(scale_factor=2)(x) * resized(scale_factor=2)(x),
    "the result twice": lambda x: (y := resized(scale_factor=2, mode="bilinear")(x)) * y + y.exp(),
    "a sum with itself": lambda x: resized(scale_factor=2, mode="bilinear")(x + x) + resized(scale_factor=2)(x),
    "weighed": lambda x: resized(scale_factor=2, mode="bilinear")(x) * -0.5,
    "weighed along a dimension": lambda x: resized(scale_factor=2, mode="bilinear")(x) * torch.arange(12.0),
    "weighed by channel": lambda x: resized(scale_factor=2, mode="bilinear")(x) * torch.arange(3.0)[:, None, None],
    "of a view": lambda x: resized(scale_factor=2, mode="bilinear")(x[:, 1:].mT).flatten(1),
    "of what is a view of it": lambda x: resized(scale_factor=2)(x.reshape(1, 6, 5, 6)),
}


@pytest.mark.parametrize("function", SEVERAL.values(), ids=SEVERAL)
def test_several_uses(function: Function) -> None:
    x = random(2, 3, 5, 6).requires_grad_()
    dy = random(*function(x).shape)
    graph = joint_graph(function, x, dy)
    assert scatters(graph) > 0
    expected = wanted(lambda x: function(x.double()), x.detach(), dy)
    torch.testing.assert_close(rewritten(graph)(x, dy).double(), expected, rtol=1e-4, atol=1e-4)
    assert scatters(graph) == 0


def test_a_gradient_that_follows_from_another_lies_channels_last_too() -> None:
    x = random(2, 3, 5, 6, last=True)
    graph = check(progressive, x)
    assert graph(x, random(2, 3, 30, 36, last=True)).is_contiguous(memory_format=torch.channels_last)
    added = graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert all(not node.meta["val"].is_contiguous() for node in added)


def scattered(rows: Any, *, base: Any = None, accumulate: bool = True) -> Function:
    """Has a scatter of a user's own as its gradient."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x[:, :, rows(x)]

        @staticmethod
        def backward(_: Any, dy: Any) -> Any:
            zeros = dy.new_zeros(2, 3, 5, dy.shape[3]) if base is None else base(dy)
            return aten.index_put(zeros, [None, None, rows(dy)], dy, accumulate)

    return lambda x: Own.apply(x)


LEFT: dict[str, Function] = {
    "smaller": resized(scale_factor=0.5, mode="bilinear"),
    "much smaller": resized(size=(2, 1)),
    "antialiased": resized(scale_factor=2, mode="bilinear", antialias=True),
    "replicated borders": lambda x: functional.pad(x, (2, 2, 1, 1), mode="replicate"),
    "reflected borders": lambda x: functional.pad(x, (2, 2, 1, 1), mode="reflect"),
    "computed places": scattered(lambda x: (x[0, 0, :, 0] > 0).long()),
    "places along the diagonal": lambda x: x[:, :, torch.arange(5), torch.arange(5)],
    "no sum": scattered(lambda _: torch.arange(10) // 2, accumulate=False),
    "onto others": scattered(lambda _: torch.arange(10) // 2, base=lambda dy: dy[:, :, :5].clone()),
    "onto ones": scattered(lambda _: torch.arange(10) // 2, base=lambda dy: dy.new_ones(2, 3, 5, 6)),
    "from the end": scattered(lambda _: -1 - torch.arange(10) // 2),
    "far apart": scattered(lambda _: torch.arange(10) % 5),
    "computed places of another kind": lambda x: x.gather(2, (x > 0).long()),
}


@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_others_are_left(function: Function) -> None:
    x = random(2, 3, 5, 6)
    graph = joint_graph(function, x, random(*function(x).shape))
    before = str(graph.graph)
    assert str(rewritten(graph).graph) == before


def test_places_of_a_division_by_0_are_left() -> None:
    """The host raises where a GPU has a quotient that is not read."""

    def repeated(x: Any) -> Any:
        i = torch.arange(10)
        return x[:, :, torch.where(i < 5, i // 2, i // 2 // (i // 5))]

    assert scatters(rewritten(joint_graph(repeated, random(2, 3, 5, 6), random(2, 3, 10, 6)))) == 1


@pytest.mark.parametrize("divisor", [2, 3, 5])
def test_a_scatter_that_looks_alike_is_right(divisor: int) -> None:
    function = scattered(lambda _: torch.arange(5 * divisor) // divisor)
    x = random(2, 3, 5, 6, dtype=torch.bfloat16)
    dy = random(2, 3, 5 * divisor, 6, dtype=torch.bfloat16)
    graph = rewritten(joint_graph(function, x, dy))
    expected = dy.double().unflatten(2, (5, divisor)).sum(3)
    torch.testing.assert_close(graph(x, dy).double(), expected, rtol=2**-8, atol=1e-30)
    assert scatters(graph) == 0


@pytest.mark.parametrize("shape", [(5,), (4, 5), (4, 3, 5), (1, 2, 1, 2, 3, 5)], ids=str)
def test_tensors_of_any_rank(shape: tuple[int, ...]) -> None:
    """Rows of a table that are repeated, say; of these alone that images have it can be told where channels lie."""
    x, dy = random(*shape), random(*shape[:-1], 13)
    graph = rewritten(joint_graph(lambda x: x[..., torch.arange(13) * 5 // 13], x, dy))
    torch.testing.assert_close(graph(x, dy), joint_graph(lambda x: x[..., torch.arange(13) * 5 // 13], x, dy)(x, dy))
    assert scatters(graph) == 0


def test_strides_that_are_read_are_those_traced() -> None:
    def function(x: Any) -> Any:
        return functional.interpolate(x.as_strided((2, 3, 5, 6), (90, 30, 6, 1)) * 2, scale_factor=2, mode="bilinear")

    x, dy = random(2, 3, 5, 6), random(2, 3, 10, 12, last=True)
    graph = joint_graph(function, x, dy)
    torch.testing.assert_close(rewritten(graph)(x, dy).double(), wanted(function, x, dy), rtol=1e-4, atol=1e-5)
    assert scatters(graph) == 0


def test_strides_that_are_read_of_others_change_nothing() -> None:
    def function(x: Any) -> Any:
        return functional.interpolate(x, scale_factor=2, mode="bilinear") * x.detach().as_strided((), ())

    x, dy = random(2, 3, 5, 6), random(2, 3, 10, 12, last=True)
    graph = check(function, x, dy)
    assert graph.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert graph(x, dy).is_contiguous(memory_format=torch.channels_last)


def test_sizes_that_are_no_numbers_are_left() -> None:
    def grown(x: Any) -> Any:
        return functional.interpolate(x, scale_factor=2, mode="bilinear")

    compiled = Compiled(grown, dynamic=True)
    for size in (5, 7):
        x, dy = random(2, 3, size, 6).requires_grad_(), random(2, 3, 2 * size, 12)
        given, expected = (torch.autograd.grad(run(x), x, dy)[0] for run in (compiled, grown))
        torch.testing.assert_close(given, expected)
    assert compiled.count(aten.index_put.default) == 4


class Decoder(nn.Module):
    """Upsamplings between convolutions and activations.

    Args:
        is_checkpointed: whether what is between them is computed once more for gradients.
    """

    def __init__(self, *, is_checkpointed: bool = False, **keywords: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self._resize, self._is_checkpointed = resized(**keywords), is_checkpointed

    def forward(self, x: Any) -> Any:
        for convolution in (self.first, self.second):
            if self._is_checkpointed:
                x = torch.utils.checkpoint.checkpoint(self._grown, convolution, x, use_reentrant=False)
            else:
                x = self._grown(convolution, x)
        return self.third(x)

    def _grown(self, convolution: Any, x: Any) -> Any:
        return self._resize(torch.relu(convolution(x)))


def gradients(run: Any, network: nn.Module, x: Any, *, is_cast: bool = False) -> list[Any]:
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        y = run(x)
    y.float().square().sum().backward()
    return [each.grad.clone() for each in network.parameters()]


@pytest.mark.parametrize(("recomputes", "is_checkpointed"), [(True, True), (True, False), (False, False)])
def test_networks_have_the_same_gradients(recomputes: bool, is_checkpointed: bool) -> None:
    network = Decoder(is_checkpointed=is_checkpointed, scale_factor=1.5, mode="bilinear").to(memory_format=LAST[4])
    compiled, x = Compiled(network, recomputes=recomputes), random(2, 4, 8, 8, last=True)
    given, expected = (gradients(run, network, x) for run in (compiled, network))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    assert not compiled.count(aten.index_put.default)


def test_convolutions_before_upsamplings_have_gradients_channels_last() -> None:
    """In bfloat16 by autocast, as in decoders of images: PyTorch's gradients of upsamplings are channels first."""
    network = Decoder(scale_factor=2, mode="nearest").to(memory_format=LAST[4])
    compiled, x = Compiled(network), random(2, 4, 4, 4, last=True)
    gradients(compiled, network, x, is_cast=True)
    backward = compiled.graphs[-1].graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    values = [node.args[0].meta["val"] for node in backward]
    assert [value.dtype for value in values] == [torch.bfloat16] * 3
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in values)


def user_sum(x: Any) -> Any:
    """A user's own scatter forward, to where a gradient would go."""
    return torch.zeros(x.shape).index_add(2, torch.arange(x.shape[2]), x)


def test_results_of_forward_passes_lie_as_traced_and_alone() -> None:
    x = random(2, 3, 5, 6, last=True).requires_grad_()
    assert Compiled(user_sum)(x).stride() == user_sum(x).stride()
    x = x.detach().contiguous().requires_grad_()
    assert Compiled(user_sum)(x).data_ptr() != x.data_ptr()


def test_graphs_without_gradients_are_left() -> None:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(user_sum, decomposition_table=select_decomp_table(), tracing_mode="fake")
    assert scatters(rewritten(traced(random(2, 3, 5, 6)))) == 1


def test_without_gradients_nothing_is_done() -> None:
    compiled = Compiled(resized(scale_factor=2, mode="bilinear"))
    x = random(2, 3, 5, 6)
    torch.testing.assert_close(compiled(x), resized(scale_factor=2, mode="bilinear")(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_graphs_within_graphs_take_no_constants() -> None:
    """Of nested regions and of branches, whose constants PyTorch's generated code does not define."""
    region = torch.compiler.nested_compile_region(resized(size=(13, 9), mode="bilinear"))

    def grown(x: Any) -> Any:
        branch = torch.cond(x.sum() > 0, resized(size=(13, 9), mode="bilinear"), resized(size=(13, 9)), (x,))
        return region(x) + region(x.cos()) * branch

    x, dy = random(2, 3, 5, 6).requires_grad_(), random(2, 3, 13, 9)
    options = miofind.torch.inductor_options(fx_graph_cache=False, **{"cpp.simdlen": 1})
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        given = torch.autograd.grad(torch.compile(grown, options=options)(x), x, dy)
    torch.testing.assert_close(given, torch.autograd.grad(grown(x), x, dy), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_takes_the_pass() -> None:
    """Strided and indexed windows, and a view of a gradient that lies channels last."""
    from torch._inductor.utils import run_and_get_code

    def grown(x: Any) -> Any:
        x = functional.interpolate(x.reshape(2, 8, 4, 4), scale_factor=2)
        return functional.interpolate(x, size=(13, 9), mode="bilinear")

    x = random(2, 8, 16, dtype=torch.bfloat16).requires_grad_()
    dy = random(2, 8, 13, 9, dtype=torch.bfloat16, last=True)
    options = miofind.torch.inductor_options(fx_graph_cache=False, **{"cpp.simdlen": 1})
    torch._dynamo.reset()
    compiled = torch.compile(grown, options=options)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        given, codes = run_and_get_code(lambda: torch.autograd.grad(compiled(x), x, dy)[0])
    expected = wanted(grown, x.detach(), dy)
    torch.testing.assert_close(given.double(), expected, rtol=2**-7, atol=2**-7)
    assert not any(word in codes[-1] for word in ("index_put", "atomic_add"))


def test_random_numbers_are_no_constants() -> None:
    from miofind.torch.inductor.constants import Constants

    def given(step: Any, **named: Any) -> Any:
        graph = fx.Graph()
        node = graph.call_function(step, (graph.call_function(aten.full.default, ([4], -1.0)),), named)
        for each in graph.nodes:
            each.meta["val"] = torch.empty(4)
        return Constants().value(node)

    assert torch.equal(given(aten.relu.default), torch.zeros(4))
    assert given(aten.rrelu.default, training=True) is None
