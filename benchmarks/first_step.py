"""How long a network of new shapes waits for its first result, and how fast it is from then on.

    python benchmarks/first_step.py --json benchmarks/results/first_step_h200.json
    python benchmarks/first_step.py --device cpu --networks tiny

Each way has a process of its own, without a FindDB of the user's, a binary cache or caches of CUDA's and PyTorch's
compilers (NVRTC compiles what it has compiled before in half the time), and images of a size that no FindDB answers.
The clock starts where PyTorch has the network and its input on the GPU, and stops when the first forward pass, or
training step, is done: `import miofind`, tuning and compiling are in it. Behind it is the time of a step in a CUDA
graph, torch.compile's as it comes.

Ways: PyTorch's own kernels as its heuristics choose them, and with `torch.backends.cudnn.benchmark`; torch.compile; and
miofind after `miofind.torch.tune`, which measures the likeliest candidates of each problem and compares with PyTorch,
does not compare (`compare=False`), or measures all default candidates and compares; and after `enable("estimate")`,
which measures nothing, with no kernel compiled, so that PyTorch's run meanwhile, and with those of
`miofind compile --likely` at hand, compiled before the clock starts and loaded within it.
Inference is in float16, of a network whose layers were fused; training under autocast to bfloat16.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import script
from commit import commit

WAYS = (
    "torch",
    "torch benchmark",
    "torch compile",
    "miofind predicted",
    "miofind predicted compiled",
    "miofind uncompared",
    "miofind",
    "miofind defaults",
)
KINDS = ("inference", "training")
SIZE = 208
"""Pixels of an image's sides: suites and FindDBs have those of 224 and their halves."""


def timed(way: str, network: str, kind: str, device: str, batch: int) -> dict[str, Any]:
    """Seconds until the first step of a network is done in this process, and milliseconds of the next ones."""
    import torch

    backends = torch.backends.cudnn
    backends.benchmark, backends.benchmark_limit = way == "torch benchmark", 0
    model, x = network_of(network, kind, device, batch)
    if way == "miofind predicted compiled" and device == "cuda":
        _compile_likely(network, kind, device, batch)
    _wait(device)
    began = time.perf_counter()
    told: dict[str, Any] = {}
    if way.startswith("miofind predicted"):
        model = _predicted(model, kind, device)
    elif way.startswith("miofind"):
        model, told = _prepared(way, model, x, kind)
    elif way == "torch compile":
        model = torch.compile(model)
    step = _step(model, x, kind)
    step()
    _wait(device)
    first_s = time.perf_counter() - began
    if way.startswith("miofind predicted"):
        told = _compiled(began)
        step()
    if device == "cuda" and way != "torch compile":
        step = _in_a_graph(step)
    return {"first_s": round(first_s, 2), "step_ms": round(_step_ms(step, device), 4), **told}


def network_of(network: str, kind: str, device: str, batch: int) -> tuple[Any, Any]:
    """A network on a device, and its input."""
    import torch
    from torch_networks import NETWORKS

    torch.manual_seed(0)
    shape = (batch, *(SIZE if size == 224 else size for size in NETWORKS[network].shape))
    order = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    dtype = torch.float16 if kind == "inference" and device == "cuda" else torch.float32
    model = NETWORKS[network].build().to(device, dtype, memory_format=order)
    model.train(kind == "training")
    return model, torch.randn(*shape).to(device, dtype, memory_format=order)


def _compile_likely(network: str, kind: str, device: str, batch: int) -> None:
    """Compile the likely kernels of a network in processes of their own, so that nothing of it is loaded here."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--device", device, "--batch", str(batch)]
        subprocess.run([*words, "--record", network, kind, f"{folder}/network.csv"], check=True)
        script.compile_likely(Path(folder) / "network.csv").check_returncode()


def record(network: str, kind: str, path: str, device: str, batch: int) -> None:
    """Write the problems of a network's first step as a suite."""
    import torch

    import miofind.torch

    model, x = network_of(network, kind, device, batch)
    training = kind == "training"
    model = model if training else miofind.torch.fuse(model)
    miofind.torch.problems(model, x, training=training, amp=torch.bfloat16 if training else None).save(path)


def _predicted(model: Any, kind: str, device: str) -> Any:
    """A network with miofind in force, which measures nothing."""
    import miofind.torch

    model = miofind.torch.fuse(model) if kind == "inference" else model
    miofind.torch.enable("estimate", devices=device)
    return model


def _compiled(began: float) -> dict[str, Any]:
    """Wait for what is compiled while PyTorch's own kernels run, and tell when it was there."""
    import miofind.torch

    miofind.torch.wait_until_compiled()
    return {"compiled_s": round(time.perf_counter() - began, 2)}


def _prepared(way: str, model: Any, x: Any, kind: str) -> tuple[Any, dict[str, Any]]:
    """A network after a tuning of its problems, with miofind in force, and what the tuning told."""
    began = time.perf_counter()
    import miofind
    import miofind.torch

    options = None
    if way == "miofind defaults":
        options = miofind.FindOptions(isolate=x.is_cuda, time_budget_s=math.inf)
    training = kind == "training"
    import_torch = time.perf_counter()
    if not training:
        model = miofind.torch.fuse(model)
    import torch

    report = miofind.torch.tune(
        model,
        x,
        training=training,
        amp=torch.bfloat16 if training else None,
        options=options,
        compare=way != "miofind uncompared",
        on_event=lambda _: None,
    )
    miofind.torch.enable("fallback", devices=x.device.type)
    known = [row for row in report.rows if row.own_ms is not None]
    return model, {
        "problems": len(report.rows),
        "solved": len(known),
        "import_s": round(import_torch - began, 2),
        "find_s": round(report.seconds, 2),
        "tune_s": round(time.perf_counter() - import_torch, 2),
        "convolutions_ms": round(sum(row.count * (row.least_ms or 0.0) for row in report.rows), 4),
    }


def _step(model: Any, x: Any, kind: str) -> Any:
    import torch

    if kind == "inference":
        return torch.inference_mode()(lambda: model(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()

    return run


def _in_a_graph(step: Any) -> Any:
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _step_ms(step: Any, device: str, rounds: int = 7, least_s: float = 0.1) -> float:
    """The median over rounds of a step's milliseconds."""
    found = []
    for _ in range(rounds):
        step()
        _wait(device)
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < least_s:
            for _ in range(5):
                step()
            _wait(device)
            calls += 5
        found.append(1e3 * (time.perf_counter() - began) / calls)
    return sorted(found)[rounds // 2]


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def by_child(words: list[str], limit_s: float) -> dict[str, Any]:
    """What a process with empty caches told of one way."""
    with tempfile.TemporaryDirectory() as folder:
        empty = {
            "MIOFIND_CACHE_DIR": f"{folder}/cache",
            "MIOFIND_DB": f"{folder}/finddb.db",
            "CUDA_CACHE_PATH": f"{folder}/cuda",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "PYTHONDONTWRITEBYTECODE": "",  # an installation keeps bytecode, and the index of solvers beside it
        }
        try:
            run = subprocess.run(words, env=os.environ | empty, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"failure": f"stopped after {limit_s:.0f} s"}
    try:
        found: dict[str, Any] = json.loads(run.stdout.strip().split("\n")[-1])
        return found
    except ValueError:
        return {"failure": (run.stderr.strip().split("\n") or [""])[-1][:300]}


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--networks", type=lambda text: text.split(","), default=["resnet50", "efficientnet_b0"])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help="inference,training")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help=",".join(WAYS))
    parser.add_argument("--batch", type=int, default=32, help="images")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU is for trials")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one way of one network may take")
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    parser.add_argument("--commit", default=commit(), help="of the code; by default git's")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "NETWORK", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--record", nargs=3, metavar=("NETWORK", "KIND", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        network, kind, path = arguments.record
        record(network, kind, path, arguments.device, arguments.batch)
        return
    if arguments.one:
        way, network, kind = arguments.one
        print(json.dumps(timed(way, network, kind, arguments.device, arguments.batch)))
        return
    from miofind.device.device import Device
    from miofind.device.environment import versions

    for package in ("miofind", "solvers", "finddb"):  # an installation has their bytecode
        compileall.compile_dir(Path(__file__).parents[1] / package, quiet=2)
    device = Device.cuda() if arguments.device == "cuda" else Device.cpu()
    figures = {
        "gpu": device.name,
        "commit": arguments.commit,
        "command": " ".join(["python", "benchmarks/first_step.py", *sys.argv[1:]]),
        "versions": versions(device),
        "batch": arguments.batch,
        "processors": len(os.sched_getaffinity(0)),
        "rows": [],
    }
    common = ["--device", arguments.device, "--batch", str(arguments.batch)]
    for kind in arguments.kinds:
        for network in arguments.networks:
            for way in arguments.ways:
                words = [sys.executable, str(Path(__file__)), *common, "--one", way, network, kind]
                found = by_child(words, arguments.limit)
                figures["rows"].append({"network": network, "kind": kind, "way": way, **found})
                print(f"{network:16} {kind:10} {way:18} {json.dumps(found)}", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    script.run(main)
