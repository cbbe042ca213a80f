"""miofind at the dispatcher beside what else users do with PyTorch: each agrees with PyTorch's own kernels."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes.waiting import LIMIT_S
from torch.func import functional_call, hessian, vjp, vmap
from torch.nn.functional import conv1d, conv2d
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from miofind import Handle
from miofind.runtime import handle
from miofind.torch import Override, fuse, use
from miofind.torch.override import dispatcher


class _Net(torch.nn.Module):
    """A strided, a depthwise and a transposed convolution; float64, so that algorithms agree."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.depthwise = torch.nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.up = torch.nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.up(torch.nn.functional.silu(self.depthwise(self.down(x).relu())))


def _net_and_images(batch: int = 2) -> tuple[_Net, Any]:
    torch.manual_seed(5)
    return _Net(), torch.randn(batch, 3, 8, 8, dtype=torch.float64)


def _step(model: Any, x: Any) -> list[Any]:
    """The output and all gradients of a step."""
    x = x.detach().requires_grad_()
    y = model(x)
    inputs = [x, *model.parameters()]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]


def _native(compute: Callable[[], Any]) -> Any:
    """What PyTorch's own kernels give."""
    with use("record", devices="cpu"):
        return compute()


def _agree(ours: Any, native: Any) -> None:
    torch.testing.assert_close(ours, native)


def _is_ours(made: Override) -> bool:
    return 0 < made.report().calls == made.report().own_calls


def test_dynamo_traces_and_runs(override_on_cpu: Override) -> None:
    model, x = _net_and_images()
    want = _native(lambda: _step(model, x))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _agree(_step(compiled, x), want)
    assert _is_ours(override_on_cpu)
    assert len(override_on_cpu.plans) == 6


def test_one_graph_of_many_sizes(override_on_cpu: Override) -> None:
    model, x = _net_and_images(4)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for batch in (2, 3, 4):
        part = x[:batch, :, : 2 + 2 * (batch - 1), :]
        _agree(_step(compiled, part), _native(lambda part=part: _step(model, part)))
    assert _is_ours(override_on_cpu)


def test_an_exported_program_runs(override_on_cpu: Override) -> None:
    model, x = _net_and_images()
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    module = torch.export.load(kept).module()
    larger = torch.cat([x, x, x])
    ours = module(larger)
    assert _is_ours(override_on_cpu)
    _agree(ours, _native(lambda: model(larger)))


@pytest.mark.parametrize("is_fused", [False, True], ids=["", "fused"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript_traces(override_on_cpu: Override, is_fused: bool) -> None:
    """It has tensors in place of sizes meanwhile, and wants the same graph of a second trace."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.SiLU(), torch.nn.Conv2d(4, 4, 1)).eval()
    model.requires_grad_(False)
    given, x = fuse(model) if is_fused else model, torch.randn(2, 3, 6, 5)
    traced = torch.jit.trace(given, x)
    torch.testing.assert_close(traced(x), model(x), rtol=1e-4, atol=1e-5)
    if not is_fused:
        x.requires_grad_()
        torch.jit.trace(model, x)(x).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_again(override_on_cpu: Override, reentrant: bool) -> None:
    model, x = _net_and_images()
    want = _native(lambda: _step(model, x))
    x.requires_grad_()
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.square().sum().backward()
    _agree([y.detach(), x.grad, *(each.grad for each in model.parameters())], want)
    assert _is_ours(override_on_cpu)
    forward = [count.calls for count in override_on_cpu.report().counts if count.direction == "forward"]
    assert sum(forward) == 5 or sum(forward) == 6, "all again, or up to the last that is needed"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str)
def test_a_scaler_s_step(override_on_cpu: Override, dtype: Any, tolerance: float) -> None:
    """Under autocast, whose type miofind is asked for."""

    def train() -> list[Any]:
        model, x = _net_and_images()
        model, x = model.float(), x.float()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(x).float().square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0, "the infinite step is left out"
        return [each.detach() for each in model.parameters()]

    ours = train()
    assert _is_ours(override_on_cpu)
    assert {str(count.problem.x.dtype) for count in override_on_cpu.report().counts} == {str(dtype)[len("torch.") :]}
    torch.testing.assert_close(ours, _native(train), rtol=tolerance, atol=tolerance)


_WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "no_grad": lambda model, x: torch.no_grad()(model)(x),
    "functional_call": lambda model, x: functional_call(model, {k: 2 * v for k, v in model.state_dict().items()}, x),
    "vmap over images": lambda model, x: vmap(model)(x[:, None]),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(2, 2, 8, 8, dtype=x.dtype)),
    "hessian": lambda model, x: hessian(lambda x: model(x).square().sum())(x[:1, :, :2, :2]),
    "forward AD": lambda model, x: _forward_ad(model, x),
    "saved tensors packed": lambda model, x: _packed(model, x),
    "backward twice": lambda model, x: _twice(model, x),
    "channels_last": lambda model, x: _step(
        copy.deepcopy(model).to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    ),
    "gradients not dense": lambda model, x: torch.autograd.grad(model(x.requires_grad_())[:, :, ::2, 1:].sum(), x),
    "meta": lambda model, x: copy.deepcopy(model).to("meta")(x.to("meta")).shape,
}


def _forward_ad(model: Any, x: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent


def _packed(model: Any, x: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(force=True).copy(), torch.from_numpy):
        return _step(model, x)


def _twice(model: Any, x: Any) -> Any:
    y = model(x.requires_grad_()).sum()
    return [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by PyTorch's own jvp
@pytest.mark.parametrize("name", _WAYS)
def test_ways_of_calling_a_model(override_on_cpu: Override, name: str) -> None:
    model, x = _net_and_images()
    ours = _WAYS[name](model, x.clone())
    assert name == "meta" or _is_ours(override_on_cpu)
    _agree(ours, _native(lambda: _WAYS[name](model, x.clone())))


def test_hooks_and_parametrizations(override_on_cpu: Override) -> None:
    model, x = _net_and_images()
    parametrizations.weight_norm(model.down)
    parametrizations.spectral_norm(model.depthwise).eval()
    seen: list[Any] = []
    model.down.register_full_backward_hook(lambda module, given, got: seen.append(got[0].shape))
    model.up.register_forward_hook(lambda module, given, y: 2 * y)
    _agree(_step(model, x), _native(lambda: _step(model, x)))
    assert _is_ours(override_on_cpu)
    assert seen == [torch.Size([2, 4, 4, 4])] * 2


def test_pickles_and_state_dicts(override_on_cpu: Override) -> None:
    model, x = _net_and_images()
    before = copy.deepcopy(model.state_dict())
    y = model(x)
    twin = pickle.loads(pickle.dumps(model))
    assert list(twin.state_dict()) == list(before)
    assert all(torch.equal(one, before[name]) for name, one in twin.state_dict().items())
    assert torch.equal(twin(x), y)


def test_threads_get_the_same_bits(override_on_cpu: Override) -> None:
    """Where PyTorch is to be deterministic: in float32, of sums whose last places tell one algorithm from another."""
    torch.manual_seed(0)
    model, x = torch.nn.Conv2d(16, 24, 3), torch.randn(8, 16, 12, 12)
    runs: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: runs.append(_step(model, x))) for _ in range(4)]
    torch.use_deterministic_algorithms(True)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        runs.append(_step(model, x))
        assert _is_ours(override_on_cpu)
        with use("estimate", devices="cpu", handle=override_on_cpu.settings.handle, only="ConvCpuDirect"):
            other = _step(model, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(runs) == 5
    for later in runs[1:]:
        assert all(map(torch.equal, later, runs[0]))
    assert not all(map(torch.equal, other, runs[0])), "another solver's bits are others"


_DETERMINISTIC = """
import hashlib, sys, threading, torch
from miofind import Handle
from miofind.torch import use

torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
layers = torch.nn.Conv2d(16, 24, 3), torch.nn.Conv2d(24, 24, 5, groups=4), torch.nn.ConvTranspose2d(24, 8, 2, 2)
model, x = torch.nn.Sequential(*layers), torch.randn(8, 16, 20, 20, requires_grad=True)

def step():
    y = model(x)
    made = y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    sums.append(hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in made)).hexdigest())

for only in ((), "ConvCpuDirect", "ConvCpuIm2colGemm"):
    sums = []
    with Handle("cpu", database=":memory:") as handle:
        with use("estimate", handle=handle, devices="cpu", only=only) as made:
            threads = [threading.Thread(target=step) for _ in range(int(sys.argv[1]))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            step()
            assert made.report().own_calls == made.report().calls == 9 * len(sums), made.report()
    print(*sorted({*sums}))
"""


@pytest.mark.full_matrix
def test_processes_get_the_same_bits() -> None:
    """Where PyTorch is to be deterministic: in float32, of sums whose last places tell one algorithm from another."""
    told = []
    for threads in ("0", "4"):
        command = [sys.executable, "-c", _DETERMINISTIC, threads]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert ended.returncode == 0, ended.stderr
        told.append(ended.stdout.split())
    assert told[0] == told[1], "one sum of each choice of solvers, whoever computes beside"
    assert len({*told[0]}) == 3, "solvers differ, so that bits do tell"


def test_switches_of_gpus_change_nothing_here(override_on_cpu: Override) -> None:
    x, w = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    want, conv = conv2d(x, w), torch.backends.cudnn.conv
    old, new = torch.backends.cudnn.allow_tf32, conv.fp32_precision
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for allowed in (False, True):
                torch.backends.cudnn.allow_tf32 = allowed
                assert torch.equal(conv2d(x, w), want)
        for precision in ("ieee", "tf32"):
            conv.fp32_precision = precision
            assert torch.equal(conv2d(x, w), want)
    finally:
        torch.backends.cudnn.allow_tf32, conv.fp32_precision = old, new
    assert _is_ours(override_on_cpu)


def _losses(steps: int, algorithm: str | None) -> Any:
    """The losses of a training from the same start, by PyTorch's kernels or by one solver's."""
    torch.manual_seed(3)
    model, x = _Net().float(), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    target, losses = torch.randn(2, 2, 8, 8), []
    with use("estimate" if algorithm else "record", devices="cpu", only=algorithm or ()) as made:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert made.report().own_calls == (8 * steps if algorithm else 0)
    return torch.stack(losses)


@pytest.mark.parametrize(("steps", "learnt"), [(50, 0.997), pytest.param(200, 0.99, marks=pytest.mark.full_matrix)])
def test_losses_of_many_steps_agree(steps: int, learnt: float) -> None:
    """Roundings differ from algorithm to algorithm; what they grow to is far below what is learnt."""
    native = _losses(steps, None)
    assert native[-1] < learnt * native[0]
    torch.testing.assert_close(_losses(steps, "ConvCpuDirect"), native, rtol=1e-4, atol=0)


def test_threads_train_side_by_side(override_on_cpu: Override) -> None:
    def train(images: Any) -> None:
        ready.wait(LIMIT_S)
        results.append((images, [_step(model, images) for _ in range(4)]))

    model, x = _net_and_images(4)
    results: list[Any] = []
    ready = threading.Barrier(4)
    threads = [threading.Thread(target=train, args=(x[: 1 + i],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(results) == 4
    assert _is_ours(override_on_cpu)
    for images, steps in results:
        want = _native(lambda images=images: _step(model, images))
        for step in steps:
            _agree(step, want)


class _Filtered(Dataset[Any]):
    """Images that go through a convolution in the worker that loads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        x = torch.full((1, 1, 5, 5), float(index), requires_grad=True)
        y = conv2d(x, torch.ones(1, 1, 3, 3))
        y.sum().backward()
        own = dispatcher.current("cpu")
        return y.detach(), x.grad, 0 if own is None else own.report().own_calls


def test_workers_that_load_images_are_forked(override_on_cpu: Override) -> None:
    conv2d(torch.ones(1, 1, 5, 5), torch.ones(1, 1, 3, 3))
    loader = DataLoader(_Filtered(), num_workers=2, multiprocessing_context="fork", timeout=LIMIT_S)
    batches = [*loader]
    assert [float(y[0, 0, 0, 0, 0]) for y, _, _ in batches] == [0.0, 9.0, 18.0, 27.0]
    assert all(int(own) >= 2 for _, _, own in batches), "miofind ran them in the workers, too"


@pytest.mark.parametrize("lengths", [100, pytest.param(1000, marks=pytest.mark.full_matrix)])
def test_memory_of_many_shapes_is_bounded(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch, lengths: int) -> None:
    monkeypatch.setattr(dispatcher, "MAX_PLANS", 16)
    monkeypatch.setattr(handle, "MAX_ANSWERS", 16)
    cpu_handle.forget()
    w = torch.ones(1, 1, 1)
    with use("estimate", handle=cpu_handle, devices="cpu") as made:
        for length in range(1, lengths + 1):
            conv1d(torch.ones(1, 1, length), w)
        assert len(made.plans) == 16
    assert len(cpu_handle.answers) == 16


_RANKS = """
import copy, sys, warnings
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from miofind import Handle
from miofind.torch import use

store, rank = sys.argv[1], int(sys.argv[2])
warnings.filterwarnings("error", message=".*Grad strides.*")
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
layers = torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 4, 3, groups=4)
model = torch.nn.Sequential(*layers).double().to(memory_format=torch.channels_last)
x = torch.randn(4, 3, 6, 6).double().to(memory_format=torch.channels_last)
alone = copy.deepcopy(model)
alone(x).square().mean().backward()
sharded = copy.deepcopy(model)
for module in (*sharded, sharded):
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
with Handle("cpu") as handle, use("estimate", handle=handle, devices="cpu") as made:
    for parallel in (DistributedDataParallel(model), sharded):
        parallel(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        for got, wanted in zip(parallel.parameters(), alone.parameters(), strict=True):
            grad = got.grad if parallel is not sharded else got.grad.full_tensor()
            torch.testing.assert_close(grad, wanted.grad)
    assert made.report().own_calls == made.report().calls == 10, made.report()
torch.distributed.destroy_process_group()
"""


@pytest.mark.full_matrix
def test_two_ranks_that_replicate_and_shard(tmp_path: Path) -> None:
    """By DDP and by FSDP2, channels_last, 1x1 and depthwise: gradients have the strides that DDP's buckets expect."""
    command = [sys.executable, "-c", _RANKS, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(2)]
    told = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told


_FINDS_IN_BACKWARD = """
import sys, threading, torch
from miofind import Handle, torch as override

handle, wanted = Handle("cpu", database=sys.argv[1]), ("backward_data", "backward_weights")
solvers = "ConvCpuDirect", "ConvCpuIm2colGemm", "ConvCpuGemm1x1", "ConvCpuWinograd"
made = override.enable("find", devices="cpu", handle=handle, only=solvers, directions=wanted, time_budget_s=0.05)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in (2, 2, 3):  # the last of another size is found in its step
    loss = model(torch.ones(batch, 3, 6, 6, requires_grad=True)).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    optimizer.step()
    optimizer.zero_grad()
report = made.report()
found = [count for count in report.counts if count.direction in wanted]
assert (len(found), report.own_calls) == (8, 12), report
assert all(count.solver_id and not count.is_missing for count in found), report
"""


@pytest.mark.parametrize("processes", [1, pytest.param(20, marks=pytest.mark.full_matrix)])
def test_processes_that_measure_in_a_thread_s_backward_end_cleanly(tmp_path: Path, processes: int) -> None:
    """Data and weights of two convolutions, over the steps of a training."""

    def run(number: int) -> tuple[int, str]:
        command = [sys.executable, "-W", "error", "-c", _FINDS_IN_BACKWARD, str(tmp_path / f"{number}.db")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        return ended.returncode, ended.stderr

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, range(processes))] == [(0, "")] * processes


_GROWTH = """
import gc, os, sys
import torch
from torch.nn.functional import conv2d
from miofind import Handle
from miofind.torch import use

def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

trains, stops, w, done = sys.argv[1] == "train", [*map(int, sys.argv[2:])], torch.ones(2, 2, 3, 3), 0
w.requires_grad_(trains)
with Handle("cpu", database=":memory:") as handle, use("estimate", handle=handle, devices="cpu") as made:
    for stop in stops:
        for number in range(done, stop):
            y = conv2d(torch.ones(1, 2, 4 + number % 50, 4 + number // 50), w)
            if trains:
                y.sum().backward()
        assert made.report().calls == made.report().own_calls > 0
        done = stop
        print(resident_bytes())
"""


def _growth_bytes(kind: str, *shapes: int) -> list[float]:
    """What each more of the shapes adds to a process's memory, from each number of them to the next."""
    command = [sys.executable, "-c", _GROWTH, kind, *map(str, shapes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    pairs = zip(itertools.pairwise(map(int, ended.stdout.split())), itertools.pairwise(shapes), strict=True)
    return [(after - before) / (more - fewer) for (before, after), (fewer, more) in pairs]


@pytest.mark.full_matrix
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a process's memory is read as Linux tells it")
def test_a_shape_takes_little_memory() -> None:
    """A training step of each of 2,000 shapes: 17.4 KiB were measured for its two plans and answers."""
    assert max(_growth_bytes("train", 500, 1000, 2000)) < 35 << 10


@pytest.mark.full_matrix
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a process's memory is read as Linux tells it")
def test_shapes_beyond_the_limits_take_no_memory() -> None:
    """Plans and answers of old ones go: 0.6 KiB a shape were measured behind the limits, 9 KiB before them."""
    shapes = handle.MAX_ANSWERS + 3000
    (growth,) = _growth_bytes("infer", shapes, shapes + 3000)
    assert growth < 4 << 10
