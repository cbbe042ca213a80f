"""Kept copies of weights: up to date, at the same place, and gone with their weights."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from helpers.processes.waiting import LIMIT_S
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from miofind.process.forks import ForkedLock
from miofind.torch import fuse
from miofind.torch.fused import kept_weights
from miofind.torch.fused.kept_weights import Turned, kept


def weight_of(*shape: int) -> Any:
    return nn.Parameter(torch.randn(shape or (4, 3, 3, 3)), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_is_written_anew_in_place(dtype: Any) -> None:
    weight = weight_of()
    with torch.inference_mode():
        made = kept(weight, Turned(dtype, channels_last=True))
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert kept(weight, Turned(dtype, channels_last=True)) is made
    for write in (lambda: weight.mul_(2), lambda: weight.detach().copy_(torch.randn(4, 3, 3, 3))):
        write()
        assert not made.equal(weight.to(dtype))
        assert kept(weight, Turned(dtype, channels_last=True)) is made
        assert made.equal(weight.to(dtype))


def test_what_a_run_under_autocast_needed_serves_none_without_it(fused: Any) -> None:
    x = torch.randn(2, 3, 6, 5).bfloat16()
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            fused(x)
        with pytest.raises(RuntimeError, match=r"x has torch\.bfloat16 and the weights have torch\.float32"):
            fused(x)


def test_a_module_remembers_some_forms_of_inputs(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.torch.fused.module._MAX_INPUTS", 2)
    with torch.inference_mode():
        for size in (5, 6, 7, 8):
            fused(torch.randn(1, 3, size, size))
    assert 0 < len(getattr(fused, "0")._ready.of_inputs) <= 2


def test_a_weight_that_is_trained_again_is_copied_in_each_call() -> None:
    weight = weight_of()
    made = kept(weight, Turned(torch.bfloat16, channels_last=True))
    weight.requires_grad_()
    assert kept(weight, Turned(torch.bfloat16, channels_last=True)).data_ptr() != made.data_ptr()


def test_other_memory_has_other_copies() -> None:
    weight = weight_of()
    made = kept(weight, Turned(torch.float32, channels_last=True))
    weight.data = torch.randn(4, 3, 3, 3)
    again = kept(weight, Turned(torch.float32, channels_last=True))
    assert again is not made
    assert again.equal(weight)


@pytest.mark.parametrize("is_fused", [False, True], ids=["a parameter", "a fused module's"])
def test_other_memory_at_the_same_address_has_other_copies(is_fused: bool, fused: Any) -> None:
    """Where a parameter is moved twice, its third memory often is its first one, and PyTorch counts no version."""
    weight = getattr(fused, "0").weight if is_fused else weight_of()
    x = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    run = fused if is_fused else lambda _: kept(weight, Turned(torch.float32, channels_last=True))
    for _ in range(20):
        run(x)
        address = weight.data_ptr()
        for _ in range(2):
            weight.data = weight.data * 2
        if weight.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator gives no memory back")
    expected = copy.deepcopy(fused)(x) if is_fused else weight
    torch.testing.assert_close(run(x), expected.detach())


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (4, 1, 3, 3), (4, 3, 1, 1)], ids=str)
def test_weights_that_lie_as_they_are_used_are_not_copied(shape: tuple[int, ...]) -> None:
    weight = weight_of(*shape)
    for last in (False, True) if 1 in shape else (False,):
        assert kept(weight, Turned(torch.float32, channels_last=last)).data_ptr() == weight.data_ptr()
    assert id(weight) not in kept_weights._copies


def test_copies_go_with_their_weights() -> None:
    weight = weight_of()
    key, made = id(weight), weakref.ref(kept(weight, Turned(torch.float32, channels_last=True)))
    assert key in kept_weights._copies
    del weight
    gc.collect()
    assert key not in kept_weights._copies
    assert made() is None


def test_a_fake_copy_is_not_kept() -> None:
    """It stands for one while a model is traced."""
    weight = weight_of()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(kept(weight, Turned(torch.bfloat16, channels_last=True)), FakeTensor)
    assert id(weight) not in kept_weights._copies
    assert kept(weight, Turned(torch.bfloat16, channels_last=True)).equal(weight.bfloat16())


@pytest.mark.parametrize("kind", ["a tensor", "of inference mode", "trained"])
def test_what_may_not_stay_is_copied_in_each_call(kind: str) -> None:
    """A fused optimizer writes to what is trained, and PyTorch counts no version of it."""
    with torch.inference_mode(mode=kind == "of inference mode"), torch.no_grad():
        weight = torch.randn(4, 3, 3, 3) if kind == "a tensor" else weight_of().requires_grad_(kind == "trained")
        assert kept(weight, Turned(torch.float32, channels_last=True)).equal(weight)
        weight.mul_(2)
        assert kept(weight, Turned(torch.float32, channels_last=True)).equal(weight)
    assert id(weight) not in kept_weights._copies


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_a_fused_step_between_two_uses_of_a_frozen_weight_is_seen(kind: Any) -> None:
    """As of a network that is frozen and trained by turns; PyTorch counts no version for the step."""
    weight = weight_of()
    made = kept(weight, Turned(torch.float32, channels_last=True))
    optimizer = kind([weight.requires_grad_()], lr=0.1, fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.requires_grad_(False)
    assert not made.equal(weight)
    assert kept(weight, Turned(torch.float32, channels_last=True)) is made
    assert made.equal(weight)


def test_what_another_process_writes_to_shared_weights_is_seen(fused: Any) -> None:
    x, weight = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last), getattr(fused, "0").weight
    fused(x)
    fused.share_memory()
    fused(x)
    weight.data.zero_()  # as another process does: this one counts no version
    assert kept(weight, Turned(torch.float32, channels_last=True)).count_nonzero() == 0
    torch.testing.assert_close(fused(x), fused.get_parameter("0.bias").relu()[:, None, None].expand(2, 4, 4, 3))


def test_gradients_go_through_copies_that_inference_mode_made() -> None:
    fused = fuse(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval())
    x = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        fused(x)
    fused(x.requires_grad_()).sum().backward()
    assert x.grad.any()


def test_a_captured_copy_is_the_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written by replays: what runs beside them must not read it. What is up to date is read while capturing."""
    old, new = weight_of(), weight_of()
    made = kept(old, Turned(torch.float32, channels_last=True))
    monkeypatch.setattr(kept_weights, "is_capturing", lambda _: True)
    assert kept(old, Turned(torch.float32, channels_last=True)) is made
    assert kept(new, Turned(torch.float32, channels_last=True)).equal(new)
    assert id(new) not in kept_weights._copies
    old.mul_(2)
    captured = kept(old, Turned(torch.float32, channels_last=True))
    assert captured is not made
    assert captured.equal(old)
    monkeypatch.undo()
    assert kept(old, Turned(torch.float32, channels_last=True)) is made
    assert made.equal(old)


class Turns(ForkedLock):
    """Tells when a second thread has come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.is_waited_for = 0, threading.Event()

    def __enter__(self) -> None:
        self.entered += 1
        if self.entered > 1:
            self.is_waited_for.set()
        super().__enter__()


def test_a_form_that_a_thread_makes_while_another_writes_the_others_is_up_to_date(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new form is of the weight as it was, which the other thread's version must not be said of."""
    weight, make, write = weight_of(), Turned.made, torch.Tensor.copy_
    kept(weight, Turned(torch.float32, channels_last=True))
    is_made, goes_on, told = threading.Event(), threading.Event(), []

    def made(*arguments: Any) -> Any:
        new = make(*arguments)
        is_made.set()
        goes_on.wait(LIMIT_S)
        return new

    def written(self: Any, *arguments: Any) -> Any:
        goes_on.set()
        maker.join(LIMIT_S)
        return write(self, *arguments)

    maker = threading.Thread(target=kept, args=(weight, Turned(torch.bfloat16, channels_last=True)))
    writer = threading.Thread(target=lambda: told.append(kept(weight, Turned(torch.float32, channels_last=True))))
    monkeypatch.setattr(Turned, "made", made)
    turns = Turns()
    monkeypatch.setattr(kept_weights, "_turns", turns)
    maker.start()
    assert is_made.wait(LIMIT_S)
    weight.mul_(2)
    monkeypatch.setattr(torch.Tensor, "copy_", written)
    writer.start()
    assert turns.is_waited_for.wait(LIMIT_S), "the writer waits its turn, and writes nothing meanwhile"
    goes_on.set()
    writer.join(LIMIT_S)
    assert told[0].equal(weight)
    monkeypatch.undo()
    assert kept(weight, Turned(torch.bfloat16, channels_last=True)).equal(weight.to(torch.bfloat16))


@pytest.fixture
def fused() -> Any:
    return fuse(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval())


def test_loading_a_state_dict_writes_the_copies_of_fused_modules(fused: Any) -> None:
    """Without a run, for CUDA graphs that were captured with them."""
    x, weight = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last), getattr(fused, "0").weight
    fused(x)
    made = kept(weight, Turned(torch.float32, channels_last=True))
    fused.load_state_dict({name: torch.ones_like(tensor) for name, tensor in fused.state_dict().items()})
    assert made.eq(1).all()
    torch.testing.assert_close(copy.deepcopy(fused)(x), fused(x))
    weight.data.fill_(2)
    fused.load_state_dict(fused.state_dict())
    assert made.eq(2).all()


def test_parameters_can_be_swapped(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which PyTorch refuses of those that somebody has a weak reference to."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    x = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    before = fused(x)
    fused.load_state_dict({name: tensor * 2 for name, tensor in fused.state_dict().items()})
    torch.testing.assert_close(fused(x), 2 * before)
    torch.testing.assert_close(fused.to(torch.float64)(x.double()).float(), 2 * before)


def test_parameters_that_have_copies_can_be_swapped(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    before = fused(x)
    assert id(getattr(fused, "0").weight) in kept_weights._copies
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    fused.load_state_dict({name: tensor * 2 for name, tensor in fused.state_dict().items()})
    torch.testing.assert_close(fused(x), 2 * before)
    monkeypatch.undo()
    for each in fused.parameters():
        each.mul_(2)
    torch.testing.assert_close(fused(x), 4 * before)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    torch.testing.assert_close(fused.to(torch.float64)(x.double()).float(), 4 * before)


@pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"memory_format": torch.channels_last}], ids=str)
def test_a_module_that_is_moved_leaves_no_copies_where_it_was(fused: Any, change: Any) -> None:
    x = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    fused(x)
    weight = getattr(fused, "0").weight
    assert id(weight) in kept_weights._copies
    fused.to(**change)
    assert id(weight) not in kept_weights._copies
    fused(x.to(weight.dtype))
