"""Fused convolutions in PyTorch on a GPU: the operators, networks that were fused, and torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as functional

import miofind.torch
from miofind import Handle
from miofind.torch.fused import plans as fused_plans

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with Handle(0, database=tmp_path_factory.mktemp("fusion") / "finddb.db") as made:
        yield made


@pytest.fixture
def served(handle: Handle) -> Iterator[None]:
    """What no FindDB answers is run by what estimates choose; all of it by kernels that are verified elsewhere."""
    with miofind.torch.use("estimate", background=False, handle=handle):
        fused_plans.forget()
        yield
    fused_plans.forget()


def drawn(*shapes: tuple[int, ...], dtype: Any, channels_last: bool = True) -> list[Any]:
    torch.manual_seed(0)
    made = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
    return [t.to(memory_format=torch.channels_last) if channels_last and t.dim() == 4 else t for t in made]


def ran() -> list[str]:
    """The epilogues of the problems that solutions ran, each once."""
    parts = [part for plan in fused_plans.plans() for part in plan.parts if part.launch is not None]
    return list(dict.fromkeys(str(part.problem.epilogue) for part in parts if part.problem is not None))


X, W, Y, K = (4, 32, 14, 15), (64, 32, 3, 3), (4, 64, 14, 15), (64,)


@pytest.mark.parametrize("channels_last", [True, False], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.usefixtures("served")
def test_forward(dtype: Any, channels_last: bool) -> None:
    x, w, bias, residual = drawn(X, W, K, Y, dtype=dtype, channels_last=channels_last)
    y = miofind.torch.convolution(x, w, bias, residual=residual, padding=1, activation="silu")
    wide = [each.double().cpu() for each in (x, w, bias, residual)]
    expected = functional.silu(functional.conv2d(*wide[:3], padding=1) + wide[3])
    assert ran() == ["bias.residual.silu"]
    assert y.stride() == functional.conv2d(x, w, bias, padding=1).stride()
    tolerance = 2e-2 if dtype.itemsize == 2 else 5e-2  # TF32 is PyTorch's default
    torch.testing.assert_close(y.double().cpu(), expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.usefixtures("served")
def test_gradients() -> None:
    inputs = drawn(X, W, K, Y, dtype=torch.float16)
    mine, pytorchs = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    x, w, bias, residual = mine
    dy = drawn(Y, dtype=torch.float16)[0]
    y = miofind.torch.convolution(x, w, bias, residual=residual, padding=1, activation="relu")
    y.backward(dy)
    mask = (y > 0).double().cpu()
    x, w, bias, residual = (each.double().cpu() for each in pytorchs)
    ((functional.conv2d(x, w, bias, padding=1) + residual) * mask).backward(dy.double().cpu())
    assert ran() == ["bias.residual.relu", "", "bias_gradient"]
    for ours, theirs in zip(mine, pytorchs, strict=True):
        scale = theirs.grad.abs().max()
        torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("served")
def test_an_unaligned_input_and_a_side_stream() -> None:
    memory = torch.randn(4 * 32 * 14 * 15 + 1, device="cuda", dtype=torch.float16)
    x = memory[1:].view(4, 14, 15, 32).permute(0, 3, 1, 2)
    w, bias = drawn(W, K, dtype=torch.float16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = miofind.torch.convolution(x, w, bias, padding=1, activation="relu")
    torch.cuda.current_stream().wait_stream(stream)
    expected = functional.relu(functional.conv2d(x, w, bias, padding=1))
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-1)


class Net(torch.nn.Module):
    """Two residual blocks; the second is grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(32), torch.nn.SiLU()
        )
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(32, 32, 3, padding=1, groups=g) for g in (1, 4))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(32) for _ in range(2))
        self.head = torch.nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)) + x)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(0)
    return Net().cuda().half().eval().to(memory_format=torch.channels_last)


def images() -> Any:
    return torch.randn(4, 3, 32, 32, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)


@pytest.mark.usefixtures("served")
def test_a_fused_network(net: Any) -> None:
    fused, x = miofind.torch.fuse(net), images()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), net(x), rtol=2e-2, atol=2e-2)
    assert set(ran()) == {"bias.silu", "bias.residual.relu"}


@pytest.mark.usefixtures("served")
def test_a_fused_network_in_a_cuda_graph(net: Any) -> None:
    fused, x = miofind.torch.fuse(net), images()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fused(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        x.copy_(images() * 0.5)
        graph.replay()
        torch.testing.assert_close(y, net(x), rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own doings, such as forks beside threads
@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.usefixtures("served")
def test_a_cuda_graph_reads_weights_that_were_written_to(net: Any, form: str) -> None:
    """The weights are contiguous, and are read channels last: an eager network by its input, a compiled one anyway."""
    torch._dynamo.reset()
    fused = run = miofind.torch.fuse(copy.deepcopy(net).to(memory_format=torch.contiguous_format))
    x = images()
    if form == "compiled":
        x = x.contiguous()
        run = torch.compile(fused, options=miofind.torch.inductor_options(force_layout_optimization=True))
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        fused.load_state_dict({name: tensor * 0.5 for name, tensor in fused.state_dict().items()})
        graph.replay()
        torch.testing.assert_close(y, fused(x), rtol=2e-2, atol=2e-2)
        for parameter in fused.parameters():
            parameter.mul_(3)
        again = run(x)
        graph.replay()
        torch.testing.assert_close(y, again, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(y, fused(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("channels_last", [True, False], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("solver", ["ConvWinogradFused", "ConvWinogradMma"])
def test_packed_filters(solver: str, channels_last: bool, handle: Handle) -> None:
    """The same bits as whole solutions give: on other streams, in a captured graph, and where weights change."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU()).cuda().eval()
    fused, (x,) = miofind.torch.fuse(model), drawn(X, dtype=torch.float32, channels_last=channels_last)
    with torch.no_grad():
        expected = torch.relu(model[0].double()(x.double())).float()
    with miofind.torch.use("estimate", background=False, handle=handle, only=solver), torch.no_grad():
        fused_plans.forget()
        whole = fused(x)
        torch.testing.assert_close(whole, expected, rtol=1e-2, atol=1e-2)  # TF32 is PyTorch's default
        for _ in range(3):
            assert torch.equal(fused(x), whole)
        (plan,) = (each for each in fused_plans.plans() if each.answer is not None and each.answer.takes_packed)
        assert plan.calls == 3
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = fused(x)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(beside, whole)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        assert plan.calls == 5
        graph.replay()
        assert torch.equal(y, whole)
        fused.load_state_dict({name: tensor * 0.5 for name, tensor in fused.state_dict().items()})
        graph.replay()
        assert torch.equal(y, fused(x))
        for parameter in fused.parameters():
            parameter.mul_(3)
        again = fused(x)
        graph.replay()
        assert torch.equal(y, again)
        assert torch.equal(y, fused(x))
        torch.testing.assert_close(y, 1.5 * expected, rtol=1e-2, atol=1e-2)
    fused_plans.forget()


@pytest.mark.usefixtures("served")
def test_weights_that_are_turned_while_a_graph_is_captured_are_turned_by_its_replays(net: Any) -> None:
    fused, x = miofind.torch.fuse(copy.deepcopy(net).to(memory_format=torch.contiguous_format)), images()
    with torch.no_grad():
        expected = net(x)
        copy.deepcopy(fused)(x)  # has what it runs loaded, and copies of weights of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        torch.testing.assert_close(fused(x), expected, rtol=2e-2, atol=2e-2)  # before the first replay
        for parameter in fused.parameters():
            parameter.mul_(0.5)
        graph.replay()
        torch.testing.assert_close(y, fused(x), rtol=2e-2, atol=2e-2)


def test_a_capture_before_the_first_run_is_pytorchs(net: Any, handle: Handle) -> None:
    """Nothing is measured or loaded while a graph is captured; a later run takes the solutions."""
    fused, x = miofind.torch.fuse(net), images()
    with torch.no_grad():
        expected = net(x)  # has PyTorch's libraries loaded
        fused(x)
        with miofind.torch.use("find", handle=handle):
            fused_plans.forget()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = fused(x)
            graph.replay()
            assert ran() == []
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    fused_plans.forget()


def test_misses_are_pytorchs(net: Any, handle: Handle) -> None:
    fused, x = miofind.torch.fuse(net), images()
    with torch.no_grad(), miofind.torch.use("fallback", background=False, handle=handle, only="ConvDirectNaive"):
        fused_plans.forget()
        torch.testing.assert_close(fused(x), net(x), rtol=2e-2, atol=2e-2)
    fused_plans.forget()


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own doings, such as forks beside threads
@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=str)
@pytest.mark.usefixtures("served")
def test_torch_compile(net: Any, options: dict[str, Any], freezing: bool) -> None:
    torch._dynamo.reset()
    chosen = miofind.torch.inductor_options(**options)
    model, x = copy.deepcopy(net), images()
    compiled = torch.compile(model, options=chosen)
    with torch.no_grad(), torch._inductor.config.patch(freezing=freezing):
        for _ in range(3):
            y = compiled(x).clone()
        torch.testing.assert_close(y, net(x), rtol=2e-2, atol=2e-2)
    replaced = [str(problem.epilogue) for problem in chosen["post_grad_custom_pre_pass"].replaced]
    assert len(replaced) == 3
    assert sum("residual.relu" in text for text in replaced) == 2
    assert freezing or all("scale" in text for text in replaced)


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own doings, such as forks beside threads
@pytest.mark.usefixtures("served")
def test_torch_compile_of_a_fused_network(net: Any) -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(miofind.torch.fuse(net), fullgraph=True), images()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=2e-2, atol=2e-2)
    assert set(ran()) == {"bias.silu", "bias.residual.relu"}


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own doings, such as forks beside threads
@pytest.mark.usefixtures("served")
def test_torch_compile_in_training() -> None:
    """On small integers, whose sums are exact in TF32, so that no relu's mask depends on the order of a sum."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 16, 3, padding=1), torch.nn.ReLU()
    ).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    eager, x = copy.deepcopy(model), torch.randint(-2, 3, (4, 16, 12, 12), device="cuda").float()
    chosen = miofind.torch.inductor_options()
    compiled = torch.compile(model, options=chosen)
    losses = [run(x).square().mean() for run in (compiled, eager)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-3)
    for mine, pytorchs in zip(model.parameters(), eager.parameters(), strict=True):
        scale = pytorchs.grad.abs().max()
        torch.testing.assert_close(mine.grad / scale, pytorchs.grad / scale, rtol=2e-2, atol=2e-2)
    replaced = [str(problem.epilogue) for problem in chosen["post_grad_custom_pre_pass"].replaced]
    assert replaced.count("bias.relu") == 2
    assert {"drelu", "bias_gradient"} <= set(replaced)


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own doings, such as forks beside threads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("served")
def test_torch_compile_of_batch_norms_in_training(dtype: Any) -> None:
    """Statistics are of small integers, so exact in both; so is what is normed but for its last rounding."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 1, bias=False), torch.nn.BatchNorm2d(64),
        torch.nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), torch.nn.BatchNorm2d(64),
    ).cuda()  # fmt: skip
    with torch.no_grad():
        for convolution in (model[0], model[3], model[5]):
            for parameter in convolution.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))
    eager, x = copy.deepcopy(model), torch.randint(-2, 3, (4, 3, 20, 24), device="cuda").float()
    target = torch.randn(4, 64, 20, 24, device="cuda")  # of the squares' sum a batch norm leaves no gradient
    chosen = miofind.torch.inductor_options()
    compiled = torch.compile(model, options=chosen)
    with torch._functorch.config.patch(enable_autograd_cache=False):  # PyTorch 2.11's takes no note of autocast's dtype
        for run in (compiled, eager):
            with torch.autocast("cuda", dtype):
                y = run(x)
            (y.float() * target).sum().backward()
    assert [str(problem.epilogue) for problem in chosen["post_grad_custom_pre_pass"].replaced][:3] == [
        "bias.statistics", "statistics", "statistics",
    ]  # fmt: skip
    assert {"bias.statistics", "statistics"} <= set(ran())
    torch.testing.assert_close(model[1].running_mean, eager[1].running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model[1].running_var, eager[1].running_var, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    scale = max(each.grad.abs().max() for each in eager.parameters())  # some have none but rounding's
    for mine, pytorchs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad / scale, pytorchs.grad / scale, rtol=2e-2, atol=2e-2)


LAYERS = {
    1: (torch.nn.Conv1d, torch.nn.ConvTranspose1d, torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d),
    3: (torch.nn.Conv3d, torch.nn.ConvTranspose3d, torch.nn.BatchNorm3d, torch.nn.InstanceNorm3d),
}


class Unturned(torch.nn.Module):
    """Batch and instance norms, a branch, and a transposed convolution, of signals or volumes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        convolution, transposed, batch_norm, instance_norm = LAYERS[rank]
        self.first, self.norm = convolution(3, 16, 3, padding=1, bias=False), batch_norm(16)
        self.down, self.instances = convolution(16, 32, 3, stride=2, padding=1), instance_norm(32, affine=True)
        self.deep = convolution(32, 32, 3, padding=1, bias=False)
        self.up = transposed(32, 16, 2, stride=2)
        self.last = convolution(32, 8, 3, padding=1)

    def forward(self, x: Any) -> Any:
        whole = functional.relu(self.norm(self.first(x)))
        half = functional.leaky_relu(self.instances(self.down(whole)), 0.1)
        return self.last(torch.cat([self.up(half + self.deep(half)), whole], 1))


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own doings, such as forks beside threads
@pytest.mark.parametrize(("rank", "layout"), [(1, "NWC"), (3, "NDHWC")])
@pytest.mark.usefixtures("served")
def test_torch_compile_of_signals_and_volumes_in_training(rank: int, layout: str) -> None:
    """Channels first to the user, channels last within: no more off than PyTorch's own bfloat16."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    space = (8, 12, 16)[-rank:]
    model, x = Unturned(rank).cuda(), torch.randn(2, 3, *space, device="cuda")
    eager, exact, target = copy.deepcopy(model), copy.deepcopy(model).double(), torch.randn(2, 8, *space).cuda()
    chosen = miofind.torch.inductor_options()
    compiled = torch.compile(model, options=chosen)
    given, theirs = [], []
    with torch._functorch.config.patch(enable_autograd_cache=False):  # PyTorch 2.11's takes no note of autocast's dtype
        for run, made in ((compiled, given), (eager, theirs)):
            with torch.autocast("cuda", torch.bfloat16):
                y = run(x)
            made.append(y)
            (y.float() * target).sum().backward()
    right = exact(x.double())
    (right * target).sum().backward()
    replaced = chosen["post_grad_custom_pre_pass"].replaced
    assert len(replaced) > 3
    assert {str(problem.x.layout) for problem in replaced} == {layout}
    assert given[0].stride() == theirs[0].stride()
    for made, network in ((given, model), (theirs, eager)):
        made += [parameter.grad for parameter in network.parameters()]
        assert [each.is_contiguous() for each in made] == [True] * len(made)
    wanted = [right, *(parameter.grad for parameter in exact.parameters())]
    whole = torch.cat([each.flatten() for each in wanted[1:]]).norm()  # the bias before a norm has no gradient
    for ours, pytorchs, each in zip(given, theirs, wanted, strict=True):
        error, allowed = ((made.double() - each).norm() for made in (ours, pytorchs))
        assert error <= 2 * allowed + 1e-3 * whole


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own doings, such as forks beside threads
def test_lists_that_are_longer_than_a_kernels_parameters_are_cast() -> None:
    from miofind.torch.inductor import gathered

    torch._dynamo.reset()
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.float16, torch.float64)
    tensors = [torch.randn(i % 7 + 1, 5 + i % 3, device="cuda").to(dtypes[i % 3]) for i in range(260)]
    counts = [torch.tensor(i, device="cuda") for i in range(260)]
    assert gathered._is_lowered()

    def run(tensors: Any, counts: Any) -> Any:
        torch._foreach_add_(counts, 1)
        return torch.ops.miofind.cast(tensors, torch.bfloat16)

    made = torch.compile(run)(tensors, counts)
    for one, given in zip(made, tensors, strict=True):
        assert torch.equal(one, given.to(torch.bfloat16))
    assert [int(count) for count in counts] == [i + 1 for i in range(260)]
