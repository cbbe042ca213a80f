"""Trainings of a network from one start, by PyTorch's kernels and by miofind's, for benchmarks/losses.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch_forms import without_chance
from torch_networks import NETWORKS

import miofind
import miofind.torch

MOST_CLASSES = 10
ORDER_SEEDS = (0, 1)
"""Runs with the images of each batch in these other orders differ from others by rounding alone."""
Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A way to train.

    Attributes:
        prepare: makes the callable of a network.
        order: seed of the order in which a step's images stand in their batch; None for that which they are drawn in.
            Sums over a batch are added up in that order, so that it changes nothing but their rounding.
        scope: what is in force meanwhile.
    """

    name: str
    prepare: Callable[[nn.Module], Callable[[Any], Any]] = lambda model: model
    channels_last: bool = False
    order: int | None = None
    scope: Scope = contextlib.nullcontext


class Images:
    """Batches of noisy pictures of classes, a fifth of them under a wrong name, so that a loss does not end at 0."""

    def __init__(self, shape: Sequence[int], classes: int, device: str) -> None:
        self._shape, self._device = shape, device
        generator = torch.Generator().manual_seed(1)
        small = torch.randn(classes, shape[1], *(4 for _ in shape[2:]), generator=generator)
        self._pictures = functional.interpolate(small, tuple(shape[2:])).to(device)

    def batch(self, step: int, order: int | None = None) -> tuple[Any, Any]:
        """Images and their classes, the same for a step in every run, but for their order in the batch."""
        drawn: dict[str, Any] = {
            "generator": torch.Generator(self._device).manual_seed(1000 + step),
            "device": self._device,
        }
        true, other = torch.randint(len(self._pictures), (2, self._shape[0]), **drawn)
        named = torch.where(torch.rand(self._shape[0], **drawn) < 0.2, other, true)
        images = self._pictures[true] + torch.randn(*self._shape, **drawn)
        if order is None:
            return images, named
        generator = torch.Generator().manual_seed(10_000 * (1 + order) + step)
        places = torch.randperm(self._shape[0], generator=generator).to(self._device)
        return images[places], named[places]


class Trainings:
    """All runs of one network.

    Args:
        name: of NETWORKS, of a network that tells classes.
        batch, steps: images a step, and steps a run.
        device: "cuda" or "cpu".
        is_compiled: whether there are runs under torch.compile, too.
        handle: of miofind, which is tuned before its first run.
    """

    def __init__(
        self, name: str, *, batch: int, steps: int, device: str, is_compiled: bool, handle: miofind.Handle
    ) -> None:
        self._steps, self._device, self._is_compiled, self._handle = steps, device, is_compiled, handle
        network = NETWORKS[name]
        shape = (batch, *network.shape)
        torch.manual_seed(0)
        self._start = without_chance(network.build()).to(device).train()
        with torch.no_grad():
            width = int(copy.deepcopy(self._start)(torch.zeros(shape, device=device)).shape[1])
        self._images = Images(shape, min(width, MOST_CLASSES), device)
        self._trained = self._start

    def losses(self) -> Iterator[tuple[str, list[float]]]:
        """The name and the losses of each run, as it is done."""
        runs = [Run(name="torch eager"), *(Run(name=f"torch in order {seed}", order=seed) for seed in ORDER_SEEDS)]
        runs += [Run(name="torch channels last", channels_last=True), Run(name="miofind eager", scope=self._ours)]
        runs += [Run(name=f"miofind in order {seed}", order=seed, scope=self._ours) for seed in ORDER_SEEDS]
        if self._is_compiled:
            options = miofind.torch.inductor_options()
            runs += [Run(name="torch compile", prepare=torch.compile)]
            compiled = Run(
                name="miofind compile", prepare=lambda model: torch.compile(model, options=options), scope=self._ours
            )
            runs += [compiled]
        for run in runs:
            torch._dynamo.reset()
            model = copy.deepcopy(self._start)
            if run.name == "miofind eager":
                x, amp = self._images.batch(0)[0], torch.bfloat16
                miofind.torch.tune(model, x, training=True, amp=amp, handle=self._handle, on_event=lambda event: None)
            yield run.name, self._losses(model, run)
            if run.name == "torch eager":
                self._trained = model

    def _ours(self) -> AbstractContextManager[Any]:
        return miofind.torch.use("find", background=False, handle=self._handle, devices=self._device)

    def _losses(self, model: nn.Module, run: Run) -> list[float]:
        """The losses of a run; the network is trained in place."""
        layout = torch.channels_last if run.channels_last else torch.contiguous_format
        model.to(memory_format=layout)
        found = []
        with run.scope():
            network = run.prepare(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for step in range(self._steps):
                x, named = self._images.batch(step, run.order)
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(x.device.type, torch.bfloat16):
                    y = network(x.contiguous(memory_format=layout))
                loss = functional.cross_entropy(y.float(), named)
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
            return [float(loss) for loss in found]

    def output_errors(self) -> dict[str, float]:
        """Errors of a trained network's outputs against float32's: under autocast, and in float16, ours fused."""
        x, _ = self._images.batch(-1)
        model = copy.deepcopy(self._trained)
        model.eval()

        def cast(network: Any) -> Any:
            with torch.autocast(x.device.type, torch.bfloat16):
                return network(x)

        half = torch.float16 if x.is_cuda else torch.float32
        with torch.inference_mode():
            wide = model(x).double()
            made = {"torch autocast": cast(model), "torch half": copy.deepcopy(model).to(half)(x.to(half))}
            with self._ours():
                made["miofind autocast"] = cast(model)
                made["miofind half"] = miofind.torch.fuse(copy.deepcopy(model).to(half))(x.to(half))
        return {name: float((y.double() - wide).norm() / wide.norm()) for name, y in made.items()}
