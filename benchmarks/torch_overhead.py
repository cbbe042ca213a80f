"""What a convolution of PyTorch costs the host with miofind in front of it, and without.

    python benchmarks/torch_overhead.py --json benchmarks/results/torch_overhead_h200.json
    python benchmarks/torch_overhead.py --device cpu

A 1x1 convolution of one small image, so that the host is what is waited for; microseconds a call, the least of several
rounds that take turns. A hit is launched by miofind, through Python or by the direct path, "beside" on another stream
than the default one; a fallback is left to PyTorch's own kernel; a miss is the first call of a new shape that no FindDB
answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import script
from commit import commit

import miofind
from miofind.device.device import Device
from miofind.device.environment import versions
from miofind.errors import MiofindError

ROUNDS = 7
WAYS = ("pytorch", "direct hit", "direct hit beside", "python hit", "direct fallback", "python fallback")


@contextlib.contextmanager
def way_of(name: str, handle: miofind.Handle, device: str) -> Iterator[None]:
    """PyTorch's convolutions run in one of WAYS."""
    import torch

    import miofind.torch

    if name == "pytorch":
        yield
        return
    path, what, *beside = name.split()
    os.environ["MIOFIND_TORCH_DIRECT"] = "1" if path == "direct" else "0"
    policy = "estimate" if what == "hit" else "fallback"
    stream = torch.cuda.Stream() if beside and device == "cuda" else None  # None changes nothing
    with (
        torch.cuda.stream(stream),
        miofind.torch.use(policy, background=False, only=("plain",), handle=handle, devices=device),
    ):
        yield


def timed(call: Callable[[], object], count: int, synchronize: Callable[[], None]) -> float:
    """Microseconds a call, from the first to the return of the last."""
    for _ in range(3):
        call()
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    took = time.perf_counter() - began
    synchronize()
    return 1e6 * took / count


def calls(device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed, and how often a round calls it."""
    import torch

    dtype = torch.float16 if device == "cuda" else torch.float32
    last = {"memory_format": torch.channels_last}
    x = torch.randn(1, 64, 8, 8, dtype=dtype, device=device).to(**last)
    w = torch.randn(64, 64, 1, 1, dtype=dtype, device=device).to(**last)
    bias = torch.randn(64, dtype=dtype, device=device)
    conv2d = torch.nn.functional.conv2d
    given = (x.clone().requires_grad_(), w.clone().requires_grad_())
    dy = torch.ones_like(x)

    def without_gradients(*tensors: Any) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return conv2d(*tensors)

        return call

    return {
        "forward": (without_gradients(x, w), 500),
        "forward with bias": (without_gradients(x, w, bias), 500),
        "forward, gradients recorded": (lambda: conv2d(*given), 500),
        "forward and backward": (lambda: torch.autograd.grad(conv2d(*given), given, dy), 200),
    }


def host_costs(handle: miofind.Handle, device: str) -> dict[str, dict[str, float]]:
    """Microseconds by call and way."""
    import torch

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    samples: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS):
        for way in WAYS:
            with way_of(way, handle, device):
                for name, (call, count) in calls(device).items():
                    samples.setdefault(name, {}).setdefault(way, []).append(timed(call, count, synchronize))
    return {name: {way: round(min(found), 2) for way, found in ways.items()} for name, ways in samples.items()}


def misses(handle: miofind.Handle, device: str, count: int = 50) -> float:
    """Microseconds of the first call of a shape that no FindDB answers, by the median."""
    import torch

    import miofind.torch

    w = torch.randn(8, 8, 1, 1, device=device)
    found = []
    with miofind.torch.use("auto", background=False, handle=handle, devices=device), torch.no_grad():
        for size in range(3, 3 + count):
            x = torch.randn(1, 8, size, 7, device=device)
            began = time.perf_counter()
            torch.nn.functional.conv2d(x, w)
            found.append(1e6 * (time.perf_counter() - began))
    return round(statistics.median(found), 1)


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    parser.add_argument("--commit", default=commit(), help="of the code; by default git's")
    run(parser.parse_args())


def run(arguments: argparse.Namespace) -> None:
    """Time, print and write."""
    device = Device.cuda() if arguments.device == "cuda" else Device.cpu()  # raises where there is no GPU
    import torch

    import miofind.torch

    try:
        is_built = bool(miofind.torch.build())
    except MiofindError as error:
        print(f"no direct path: {error}")
        is_built = False
    torch.backends.cudnn.benchmark = False
    with miofind.Handle(device, database=miofind.finddb.MEMORY) as handle:
        figures = {
            "gpu": handle.device.name,
            "versions": {**versions(handle.device), "torch": torch.__version__},
            "commit": arguments.commit,
            "command": f"python benchmarks/torch_overhead.py --device {arguments.device}",
            "direct_path": is_built,
            "us": host_costs(handle, arguments.device),
            "miss_us": misses(handle, arguments.device),
        }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    script.run(main)
