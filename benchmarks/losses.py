"""Whether networks learn with miofind as with PyTorch's own kernels: the losses of many steps from one start.

    python benchmarks/losses.py --json benchmarks/results/losses_h200.json
    python benchmarks/losses.py --device cpu --networks tiny --steps 20

Every run trains a network from the same weights on the same images, under autocast to bfloat16 by SGD. PyTorch's own
runs differ by rounding alone: eager and the same again, in which cuDNN may add in another order, channels last, and
under torch.compile. miofind's are eager after a tuning, and under torch.compile with its pass. Of each run the losses
are averaged over stretches of steps; how far a run is from the median of PyTorch's other runs, at most, is its
distance, and the largest of PyTorch's own is the band that miofind's runs are to stay in.

Beside them are the errors of a trained network's outputs by either side against float32, relative by the Euclidean
norm. The file is written anew after each run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import script
import torch
import torch.nn.functional as functional
from commit import commit
from torch import nn
from torch_forms import without_chance
from torch_networks import NETWORKS

import miofind
import miofind.torch
from miofind.device.device import Device
from miofind.device.environment import versions
from miofind.finddb import MEMORY

NETWORKS_OF_CLASSES = ("resnet50", "resnext50", "regnety_032", "efficientnet_b0", "mobilenetv3_l", "convnext_t", "tiny")
MOST_CLASSES = 10
STRETCH = 20
"""Steps whose losses are averaged: single ones are as far apart as images are."""


Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A way to train.

    Attributes:
        prepare: makes the callable of a network.
        scope: what is in force meanwhile.
    """

    name: str
    prepare: Callable[[nn.Module], Callable[[Any], Any]] = lambda model: model
    channels_last: bool = False
    scope: Scope = contextlib.nullcontext


class Images:
    """Batches of noisy pictures of classes, a fifth of them under a wrong name, so that a loss does not end at 0."""

    def __init__(self, shape: Sequence[int], classes: int, device: str) -> None:
        self._shape, self._device = shape, device
        generator = torch.Generator().manual_seed(1)
        small = torch.randn(classes, shape[1], *(4 for _ in shape[2:]), generator=generator)
        self._pictures = functional.interpolate(small, tuple(shape[2:])).to(device)

    def batch(self, step: int) -> tuple[Any, Any]:
        """Images and their classes, the same for a step in every run."""
        drawn: dict[str, Any] = {
            "generator": torch.Generator(self._device).manual_seed(1000 + step),
            "device": self._device,
        }
        true, other = torch.randint(len(self._pictures), (2, self._shape[0]), **drawn)
        named = torch.where(torch.rand(self._shape[0], **drawn) < 0.2, other, true)
        return self._pictures[true] + torch.randn(*self._shape, **drawn), named


def losses(model: nn.Module, run: Run, images: Images, steps: int) -> list[float]:
    """The losses of a run; the network is trained in place."""
    order = torch.channels_last if run.channels_last else torch.contiguous_format
    model.to(memory_format=order)
    found = []
    with run.scope():
        network = run.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(steps):
            x, named = images.batch(step)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(x.device.type, torch.bfloat16):
                y = network(x.contiguous(memory_format=order))
            loss = functional.cross_entropy(y.float(), named)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return [float(loss) for loss in found]


def stretches(run: Sequence[float]) -> list[float]:
    """Means of each stretch of a run."""
    return [statistics.fmean(run[first : first + STRETCH]) for first in range(0, len(run), STRETCH)]


def judged(means: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Distances of runs, PyTorch's band, and whether all are within it; by the means of their stretches."""
    apart = {run: round(distance, 5) for run, distance in distances(means).items()}
    band = max(distance for run, distance in apart.items() if run.startswith("torch"))
    return {"distances": apart, "band": band, "is_within": all(distance <= band for distance in apart.values())}


def distances(means: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How far each run is from the median of PyTorch's other runs, at most over the stretches."""
    found = {}
    for name, own in means.items():
        others = [each for other, each in means.items() if other != name and other.startswith("torch")]
        medians = [statistics.median(each) for each in zip(*others, strict=True)]
        found[name] = max(abs(mine - median) for mine, median in zip(own, medians, strict=True))
    return found


def output_errors(model: nn.Module, images: Images, ours: Scope) -> dict[str, float]:
    """Errors of a trained network's outputs against float32's: by autocast of both sides, and by `fuse` in float16."""
    x, _ = images.batch(-1)
    model.eval()

    def cast(network: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return network(x)

    half = torch.float16 if x.is_cuda else torch.float32
    with torch.inference_mode():
        wide = model(x).double()
        made = {"torch autocast": cast(model), "torch half": copy.deepcopy(model).to(half)(x.to(half))}
        with ours():
            made["miofind autocast"] = cast(model)
            made["miofind half"] = miofind.torch.fuse(copy.deepcopy(model).to(half))(x.to(half))
    return {name: float((y.double() - wide).norm() / wide.norm()) for name, y in made.items()}


def rows_of(name: str, arguments: argparse.Namespace, handle: miofind.Handle) -> Iterator[dict[str, Any]]:
    """The row of one network, as far as its runs are done, after each."""
    network = NETWORKS[name]
    shape = (arguments.batch, *network.shape)
    torch.manual_seed(0)
    start = without_chance(network.build()).to(arguments.device).train()
    with torch.no_grad():
        width = int(copy.deepcopy(start)(torch.zeros(shape, device=arguments.device)).shape[1])
    images = Images(shape, min(width, MOST_CLASSES), arguments.device)

    def ours() -> AbstractContextManager[Any]:
        return miofind.torch.use("find", background=False, handle=handle, devices=arguments.device)

    runs = [Run(name="torch eager"), Run(name="torch eager again"), Run(name="torch channels last", channels_last=True)]
    runs += [Run(name="miofind eager", scope=ours)]
    if arguments.compile:
        options = miofind.torch.inductor_options()
        runs += [Run(name="torch compile", prepare=torch.compile)]
        runs += [Run(name="miofind compile", prepare=lambda model: torch.compile(model, options=options), scope=ours)]
    row: dict[str, Any] = {"network": name, "batch": arguments.batch, "steps": arguments.steps, "means": {}}
    for run in runs:
        torch._dynamo.reset()
        model = copy.deepcopy(start)
        if run.name == "miofind eager":
            x, amp = images.batch(0)[0], torch.bfloat16
            miofind.torch.tune(model, x, training=True, amp=amp, handle=handle, on_event=lambda event: None)
        means = stretches(losses(model, run, images, arguments.steps))
        row["means"][run.name] = [round(mean, 5) for mean in means]
        print(f"{name}, {run.name}: {' '.join(f'{mean:.3f}' for mean in means)}", flush=True)
        if run.name == "torch eager":
            trained = copy.deepcopy(model)
        yield row
    row |= judged(row["means"])
    yield row
    errors = output_errors(trained, images, ours)
    yield row | {"output_errors": {side: round(error, 6) for side, error in errors.items()}}


def main() -> None:
    arguments = parsed()
    device = Device.cuda() if arguments.device == "cuda" else Device.cpu()
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0
    torch.backends.cudnn.allow_tf32 = False
    report: dict[str, Any] = {
        "gpu": device.name,
        "commit": arguments.commit,
        "command": shlex.join(["python", "benchmarks/losses.py", *sys.argv[1:]]),
        "versions": {**versions(device), "torch": torch.__version__},
        "stretch": STRETCH,
        "rows": [],
    }
    done: list[dict[str, Any]] = []
    for name in arguments.networks:
        with miofind.Handle(device, database=MEMORY) as handle:
            for row in rows_of(name, arguments, handle):
                report["rows"] = [*done, row]
                if arguments.json:
                    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        done = report["rows"]
    for line in summary(report["rows"]):
        print(line)


def summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each network."""
    for row in rows:
        ours = {run: distance for run, distance in row["distances"].items() if run.startswith("miofind")}
        told = ", ".join(f"{run} {distance:.4f}" for run, distance in ours.items())
        errors = ", ".join(f"{side} {error:.2g}" for side, error in row["output_errors"].items())
        where = "within" if row["is_within"] else "OUTSIDE"
        yield f"{row['network']}: {where} PyTorch's band of {row['band']:.4f}: {told}; errors of outputs: {errors}"


def parsed() -> argparse.Namespace:
    parser = script.parser(__doc__)
    known = script.several(NETWORKS_OF_CLASSES)
    parser.add_argument("--networks", type=known, default=known("resnet50,efficientnet_b0"))
    parser.add_argument("--steps", type=script.count, default=200)
    parser.add_argument("--batch", type=script.count, default=32)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU is for trials")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="runs under torch.compile, too"
    )
    parser.add_argument("--commit", default=commit(), help="of the code; by default git's")
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    script.run(main)
