"""torch.compile in its modes, and what it compiles to code that runs without Python, beside miofind's override."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes.waiting import LIMIT_S
from helpers.runs.fused_answers import answers_of

from miofind import Handle
from miofind.torch import Override, inductor_options, use

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*treespec:FutureWarning"),
]
_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "dynamic": {"dynamic": True},
}


class _Net(torch.nn.Module):
    """A strided, a depthwise and a transposed convolution; float64, so that algorithms agree."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.down = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.depthwise = torch.nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.up = torch.nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.up(torch.nn.functional.silu(self.depthwise(self.down(x).relu())))


def _images(batch: int) -> Any:
    return torch.randn(batch, 3, 8, 8, dtype=torch.float64)


def _step(model: Any, x: Any) -> list[Any]:
    """The output and all gradients of a step."""
    x = x.detach().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def _compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, **options)


@pytest.mark.parametrize("mode", _MODES)
def test_a_compiled_convolution_reaches_the_override(override_on_cpu: Override, mode: str) -> None:
    layer, x = torch.nn.Conv2d(3, 4, 3).double(), _images(2)
    with torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad():
        y = _compiled(layer, **_MODES[mode])(x)
    assert override_on_cpu.report().calls == override_on_cpu.report().own_calls == 1
    with use("record", devices="cpu"), torch.no_grad():
        torch.testing.assert_close(y, layer(x))


@pytest.mark.full_matrix
@pytest.mark.parametrize("mode", _MODES)
def test_a_compiled_step_reaches_the_override(override_on_cpu: Override, mode: str) -> None:
    """Of three batch sizes, which are one graph where shapes are dynamic."""
    model = _Net()
    with torch._inductor.config.patch(fx_graph_cache=False):
        compiled = _compiled(model, **_MODES[mode])
        for batch in (4, 3, 2):
            x = _images(batch)
            with torch._dynamo.config.patch(error_on_recompile=mode == "dynamic"):
                ours = _step(compiled, x)
            with use("record", devices="cpu"):
                torch.testing.assert_close(ours, _step(model, x))
    assert override_on_cpu.report().calls == override_on_cpu.report().own_calls == 3 * 9


@pytest.mark.full_matrix
def test_code_of_the_cpp_wrapper_is_right_and_does_not_reach_the_override(override_on_cpu: Override) -> None:
    """As docs/pytorch.md says."""
    model, x = _Net(), _images(2)
    ours = _step(_compiled(model, options={"cpp_wrapper": True, "fx_graph_cache": False}), x)
    assert str(override_on_cpu.report()) == "miofind computed 0 of 0 results of convolutions"
    with use("record", devices="cpu"):
        torch.testing.assert_close(ours, _step(model, x))


@pytest.mark.full_matrix
def test_code_of_aot_inductor_is_right_and_does_not_reach_the_override(
    override_on_cpu: Override, tmp_path: Path
) -> None:
    """As docs/pytorch.md says."""
    model, x = _Net(), _images(2)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
        y = torch._inductor.aoti_load_package(package)(x)
    assert str(override_on_cpu.report()) == "miofind computed 0 of 0 results of convolutions"
    with use("record", devices="cpu"), torch.no_grad():
        torch.testing.assert_close(y, model(x))


@pytest.mark.full_matrix
@pytest.mark.parametrize("is_trained", [False, True], ids=["inference", "training"])
def test_code_of_the_cpp_wrapper_calls_fused_operators(is_trained: bool, cpu_handle: Handle) -> None:
    """Of texts with quotation marks the compiler made nothing."""
    model, x = _Net().requires_grad_(is_trained), _images(2)
    options = {**inductor_options(), "cpp_wrapper": True, "fx_graph_cache": False}
    run = (lambda model: _step(model, x)) if is_trained else (lambda model: model(x))
    with answers_of(cpu_handle) as ran:
        ours = run(_compiled(model, options=options))
    assert ran
    torch.testing.assert_close(ours, run(model))


_CACHED = """
import contextlib, json, sys
import torch
from torch._dynamo.utils import counters
import miofind.torch
from miofind import Handle
from miofind.torch.fused import plans

way, database = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 1)).double()
x = torch.randn(2, 3, 6, 6).double()
with torch.no_grad(), Handle("cpu", database=database) as handle:
    wanted = model(x)
    finds = miofind.torch.use("find", handle=handle, devices="cpu", only="ConvCpuDirect")
    with finds if way != "plain" else contextlib.nullcontext() as made:
        y = torch.compile(model, options=miofind.torch.inductor_options() if way == "fused" else {})(x)
    torch.testing.assert_close(y, wanted)
told = {"hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"]}
told |= {"own": made.report().own_calls if made else 0, "fused": sum(plan.calls for plan in plans.plans())}
print(json.dumps(told))
"""
_RUNS_IT = {
    "plain": {"own": 0, "fused": 0},
    "override": {"own": 2, "fused": 0},
    "fused": {"own": 1, "fused": 1},  # the first with its ReLU; nothing follows the second
}


@pytest.mark.full_matrix
@pytest.mark.parametrize("order", ["override plain fused fused fused plain", "fused plain override"])
def test_processes_share_the_cache_of_graphs_and_not_each_other_s_kernels(tmp_path: Path, order: str) -> None:
    """Graphs are the same with the override and without it, so that either hits the other's; who runs them is decided
    in each process. Those of the pass are its own, and of one state of the FindDB: the first process adds to that.
    """
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    kept: set[str] = set()
    for way in order.split():
        command = [sys.executable, "-c", _CACHED, way, str(tmp_path / "finddb.db")]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert ended.returncode == 0, ended.stderr
        graph = "plain" if way != "fused" else "answered" if "missing" in kept else "missing"
        found = {"hits": int(graph in kept), "misses": int(graph not in kept)}
        assert json.loads(ended.stdout.splitlines()[-1]) == _RUNS_IT[way] | found, way
        kept.add(graph)
