"""The problems of a network that is not run are those of one that is."""

from __future__ import annotations

import contextlib
import gc
import random
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.problems.small_networks import Mixed, OneAndThree, mixed_input
from torch import nn

import miofind.torch
from miofind.core.tensor import DataType
from miofind.errors import InvalidOptionError
from miofind.torch.recording.recording import Recording


def counts(recording: Recording) -> dict[tuple[str, str, str], int]:
    calls = recording.calls
    return {(c.layer, c.computed, c.problem.network_config if c.problem else c.reason): c.count for c in calls}


def real_step(model: Any, *inputs: Any, amp: Any, training: bool, **named: Any) -> Recording:
    with miofind.torch.record() as recording:
        with torch.autocast("cpu", dtype=amp, enabled=amp is not None), torch.set_grad_enabled(training):
            outputs = model.train(training)(*inputs, **named)
        if training:
            outputs = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
            sum(output.float().sum() for output in outputs).backward()
    return recording


@pytest.mark.sampled(3)
@pytest.mark.parametrize("memory_format", [None, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_network_s_problems_are_those_of_a_real_step(training: bool, amp: Any, memory_format: Any) -> None:
    model, x = Mixed(), mixed_input()
    asked = {"training": training, "amp": amp, "memory_format": memory_format}
    found = miofind.torch.problems(model, x, device="cpu", **asked)
    on_gpu = miofind.torch.problems(model, x, **asked)
    if memory_format is not None:
        model, x = model.to(memory_format=memory_format), x.to(memory_format=memory_format)
    assert counts(found) == counts(real_step(model, x, amp=amp, training=training))
    assert len(found.calls) == (13 if training else 5)
    # cuDNN takes as many layers in the same formats; only float32 is computed otherwise.
    assert {(*key[:2], key[2].replace("-tf32", "")): count for key, count in counts(on_gpu).items()} == counts(found)
    assert all(("-tf32" in key[2]) == (amp is None) for key in counts(on_gpu))


def test_other_dimensions_and_inputs_by_name() -> None:
    model, sound, video = OneAndThree(), torch.randn(2, 4, 9), torch.randn(1, 2, 2, 7, 7)
    found = miofind.torch.problems(
        model, sound, keywords={"video": (1, 2, 2, 7, 7)}, training=True, amp=torch.bfloat16, device="cpu"
    )
    assert counts(found) == counts(real_step(model, sound, video=video, amp=torch.bfloat16, training=True))
    assert found.name == "oneandthree"


def test_a_network_without_memory_is_followed() -> None:
    with torch.device("meta"):
        model = Mixed()
    real = miofind.torch.problems(Mixed(), mixed_input(), training=True)
    assert counts(miofind.torch.problems(model, (2, 3, 8, 10), training=True)) == counts(real)
    with torch.device("meta"):
        vast = nn.Conv2d(4096, 4096, 33, bias=False)
    (call,) = miofind.torch.problems(vast.half(), (64, 4096, 256, 256)).calls
    assert call.problem.network_config == "conv2d-forward-n64-c4096-i256x256-k4096-f33x33-float16-NCHW"


def test_nothing_of_the_model_changes() -> None:
    model = Mixed()
    model.stem[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    miofind.torch.problems(model, mixed_input(), training=True)
    assert (model.training, model.stem[1].training, model.stem.training) == (True, False, True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Remembering(nn.Module):
    """What it computes it keeps: a table of places, what it saw, averages, how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.utils.spectral_norm(nn.Conv2d(3, 4, 3))
        self.register_buffer("average", torch.zeros(4))
        self.places: Any = None
        self.seen: dict[Any, Any] = {}
        self.steps, self.calls = torch.tensor(0), 0
        self.error: BaseException | None = None

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.steps += 1
        self.drawn = random.random() + np.random.rand()
        if self.places is None:
            self.places = torch.arange(x.shape[-1] - 2.0)
        y = self.convolution(x) + self.places
        self.seen[tuple(x.shape)] = y
        self.average = 0.9 * self.average + 0.1 * y.detach().mean((0, 2, 3))
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_what_code_keeps_is_as_it_was(error: BaseException | None) -> None:
    """Fake tensors that were left in the network met real ones in its next call."""
    model = Remembering()
    model.error = error
    attributes, draws = dict(vars(model)), (random.getstate(), np.random.get_state()[2])
    of_norm = dict(vars(model.convolution))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    caught = (InvalidOptionError, KeyboardInterrupt)
    with contextlib.nullcontext() if error is None else pytest.raises(caught):
        miofind.torch.problems(model, (2, 3, 8, 8), training=True, device="cpu")
    assert vars(model) == attributes
    assert all(value is of_norm[name] for name, value in vars(model.convolution).items())
    assert (model.steps.item(), model.seen) == (0, {})
    assert draws == (random.getstate(), np.random.get_state()[2])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.error = None
    model(torch.randn(2, 3, 8, 8)).sum().backward()


def test_a_fused_network_is_followed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    fused = miofind.torch.fuse(model)
    (call,) = miofind.torch.problems(fused, (2, 3, 8, 8), memory_format=torch.channels_last).calls
    assert call.problem.network_config.endswith("-float32-NHWC-tf32-e.bias.relu")
    with miofind.torch.record() as recording:
        fused(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    on_cpu = miofind.torch.problems(fused, (2, 3, 8, 8), memory_format=torch.channels_last, device="cpu")
    assert counts(on_cpu) == counts(recording)


@dataclass
class Outputs:
    logits: Any
    loss: float = 0.0


class ReturnsDataClass(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 1, 1)

    def forward(self, x: Any) -> Outputs:
        return Outputs(logits=self.inner(x))


def test_wrapped_modules_data_classes_and_inference_mode_are_seen_through() -> None:
    model = torch.nn.DataParallel(torch.compile(ReturnsDataClass(), backend="eager"))
    with torch.inference_mode():
        found = miofind.torch.problems(model, (2, 3, 8, 8), training=True)
    assert [(call.layer, call.computed) for call in found.calls] == [("inner", "y"), ("inner", "dw")]


@pytest.mark.parametrize("amp", ["bfloat16", "bf16", torch.bfloat16, ml_dtypes.bfloat16, DataType.BFLOAT16], ids=str)
def test_the_type_of_autocast_is_spelt_as_anywhere(amp: Any) -> None:
    """PyTorch's two dtypes were taken alone."""
    found = miofind.torch.problems(nn.Conv2d(3, 1, 1), (2, 3, 8, 8), amp=amp)
    assert [call.problem.x.dtype for call in found.calls] == [DataType.BFLOAT16]


class DependsOnValues(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x if x.sum().item() > 0 else -x


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (lambda x: x, {}, ["torch.nn.Module"]),
        (nn.Conv2d(3, 1, 1), {"amp": torch.float32}, ["amp=torch.float32 must be float16, bfloat16 or None"]),
        (nn.Conv2d(3, 1, 1), {"amp": "float17"}, ["amp='float17' must be float16, bfloat16 or None"]),
        (nn.Conv2d(3, 1, 1), {"amp": torch.HalfTensor}, ["HalfTensor", "must be float16, bfloat16 or None"]),
        (nn.Conv2d(3, 1, 1), {"amp": True}, ["amp=True must be float16, bfloat16 or None"]),
        (nn.Conv2d(3, 1, 1), {"memory_format": "NHWC"}, ["memory_format='NHWC'", "channels_last"]),
        (nn.Conv2d(3, 1, 1), {"device": "tpu"}, ["device='tpu'"]),
        (nn.Conv2d(4, 1, 1), {}, ["Conv2d does not run with such inputs, or", "channels", "miofind.torch.record"]),
        (nn.LazyConv2d(4, 1), {}, ["lazy modules", "run it once"]),
        (
            DependsOnValues(),
            {},
            ["DependsOnValues does not run", "not without values", "miofind.torch.record"],
        ),
        (nn.Conv2d(3, 1, 1).requires_grad_(False), {"training": True}, ["no output", "training=True"]),
    ],
)
def test_what_cannot_be_followed_is_one_error(model: Any, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        miofind.torch.problems(model, (2, 3, 8, 8), **arguments)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("numbers", [[2, 3, 8, 8], (8,)], ids=repr)
@pytest.mark.parametrize("is_named", [False, True])
def test_numbers_in_the_place_of_a_tensor_are_told_in_a_line(numbers: Any, is_named: bool) -> None:
    """The message was that of PyTorch's operator, with all its signatures."""
    given = ((), {"input": numbers}) if is_named else ((numbers,), {})
    with pytest.raises(InvalidOptionError) as caught:
        miofind.torch.problems(nn.Conv2d(3, 1, 1), *given[0], keywords=given[1])
    told = f"Conv2d cannot be followed with {numbers}: where that stands for a tensor, give one, such as torch.empty"
    assert str(caught.value).startswith(told)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_cannot_be_followed_is_told_and_left_as_it_is() -> None:
    """TorchScript was left in evaluation mode; a module of an export raised PyTorch's NotImplementedError."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    scripted = torch.jit.script(model)
    exported = torch.export.export(model.eval(), (torch.randn(1, 3, 5, 5),)).module()
    scripted.train()
    with pytest.raises(InvalidOptionError, match=r"miofind\.torch\.record"):
        miofind.torch.problems(scripted, (1, 3, 5, 5), device="cpu")
    assert scripted.training
    with pytest.raises(InvalidOptionError, match="exported_problems"):
        miofind.torch.problems(exported, (1, 3, 5, 5), device="cpu")
    with pytest.raises(InvalidOptionError, match="training='yes' must be True or False"):
        miofind.torch.problems(model, (1, 3, 5, 5), training="yes", device="cpu")


def test_a_network_is_followed_with_few_searches_for_garbage() -> None:
    """One among all objects that PyTorch has made takes 0.2 s."""
    usual, seen = gc.get_threshold()[0], list[int]()

    class Network(nn.Conv2d):
        def forward(self, x: Any) -> Any:
            seen.append(gc.get_threshold()[0])
            return super().forward(x)

    miofind.torch.problems(Network(3, 4, 3), (1, 3, 5, 5), device="cpu")
    assert seen
    assert min(seen) > usual
    assert gc.get_threshold()[0] == usual
