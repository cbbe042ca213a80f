"""Filters packed for a solution: once for all calls, anew where weights change, and gone with them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_layer.withheld_kernels import Withheld

import miofind.torch
from miofind import Handle, ProblemDescription
from miofind.errors import LaunchError
from miofind.solver.solver import Solver
from miofind.solvers.cpu import winograd
from miofind.torch.fused import kept_weights, module, packed_filters
from miofind.torch.fused import plans as fused_plans
from miofind.torch.fused.calls import Forward
from miofind.torch.fused.kept_weights import Turned
from miofind.torch.override import plans

PACKS, PACKED, WHOLE = "pack", "convolve_packed", "convolve"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often filters were packed, and how often convolutions ran with them and without."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., None]:
        function = getattr(winograd, name)

        def run(*arguments: Any) -> None:
            counted[name] += 1
            function(*arguments)

        return run

    for name in (PACKS, PACKED, WHOLE):
        monkeypatch.setattr(winograd, name, counting(name))
    return counted


@pytest.fixture
def handle(runs: Counter[str], tmp_path: Path) -> Iterator[Handle]:
    """One of its own, since invokers keep the functions that they run."""
    with Handle("cpu", database=tmp_path / "finddb.db") as made:
        yield made


@pytest.fixture
def served(handle: Handle) -> Iterator[None]:
    fused_plans.forget()
    with miofind.torch.use("estimate", handle=handle, devices="cpu", only="ConvCpuWinograd"):
        yield
    fused_plans.forget()


@pytest.fixture
def fused() -> Any:
    torch.manual_seed(0)
    return miofind.torch.fuse(nn.Sequential(nn.Conv2d(16, 20, 3, padding=1), nn.ReLU()).eval())


def images(n: int = 2, size: int = 7) -> Any:
    return torch.randn(n, 16, size, size)


def right(fused: Any, x: Any) -> Any:
    """What it computes, without a convolution."""
    weight, bias = (fused.get_parameter(name).detach().to(x.dtype) for name in ("0.weight", "0.bias"))
    sums = weight.flatten(1) @ nn.functional.unfold(x, 3, padding=1)
    return torch.relu(sums.unflatten(2, x.shape[2:]) + bias[:, None, None])


def check(fused: Any, x: Any) -> Any:
    with torch.no_grad():
        y = fused(x)
    torch.testing.assert_close(y, right(fused, x), rtol=1e-4, atol=1e-4)
    return y


def packed_of(fused: Any) -> list[Any]:
    """The packed filters of a network's weight."""
    copies = kept_weights._copies.get(id(fused.get_parameter("0.weight")))
    return [] if copies is None else [copy for copy in copies.of_forms.values() if copy.dtype == torch.uint8]


@pytest.mark.usefixtures("served")
def test_filters_are_packed_once_and_calls_do_without(fused: Any, runs: Counter[str]) -> None:
    x = images()
    results = [check(fused, x) for _ in range(4)]
    assert runs == {WHOLE: 1, PACKS: 1, PACKED: 3}
    for each in results[1:]:
        assert torch.equal(each, results[0])


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["NCDHW", "NDHWC"])
def test_those_of_volumes_are_packed_as_their_images_are(
    layout: Any, runs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a solver that serves images alone, as many with kernels do."""
    checked = Solver.check_config

    def check_config(solver: Solver, problem: ProblemDescription, *given: Any) -> None:
        assert problem.spatial_dims == 2
        checked(solver, problem, *given)

    monkeypatch.setattr(Solver, "check_config", check_config)
    net = nn.Sequential(nn.Conv3d(16, 20, (1, 3, 3), padding=(0, 1, 1)), nn.ReLU()).eval()
    x, fused = images().unsqueeze(2).contiguous(memory_format=layout), miofind.torch.fuse(net)
    with torch.no_grad():
        results = [fused(x) for _ in range(4)]
    for each in results:
        torch.testing.assert_close(each.squeeze(2), right(fused, x.squeeze(2)), rtol=1e-4, atol=1e-4)
    assert runs == {WHOLE: 1, PACKS: 1, PACKED: 3}


@pytest.mark.usefixtures("served")
def test_all_sizes_of_images_share_them(fused: Any, runs: Counter[str]) -> None:
    xs = images(), images(3), images(size=9), images().contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        for x in xs:
            check(fused, x)
    assert runs == {WHOLE: 4, PACKS: 1, PACKED: 4}
    assert len(packed_of(fused)) == 1


@pytest.mark.usefixtures("served")
def test_a_solution_that_packs_otherwise_for_each_size_is_given_few(
    fused: Any, runs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = winograd.ConvCpuWinograd.packing

    def of_this_size(*arguments: Any) -> Any:
        made = packing(*arguments)
        assert made is not None
        object.__setattr__(made, "form", "")
        return made

    monkeypatch.setattr(winograd.ConvCpuWinograd, "packing", of_this_size)
    monkeypatch.setattr(kept_weights, "_MOST_FORMS", 2)
    for _ in range(2):
        for size in (5, 6, 7, 8):
            check(fused, images(size=size))
    assert len(packed_of(fused)) == 2
    assert runs == {WHOLE: 4 + 2, PACKS: 2, PACKED: 2}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "written in place": lambda fused: fused.get_parameter("0.weight").detach().mul_(2),
    "loaded": lambda fused: fused.load_state_dict({k: v + 0.1 for k, v in fused.state_dict().items()}),
    "assigned": lambda fused: fused.load_state_dict({k: v + 0.1 for k, v in fused.state_dict().items()}, assign=True),
    "other memory": lambda fused: setattr(fused.get_parameter("0.weight"), "data", torch.randn(20, 16, 3, 3)),
    "another parameter": lambda fused: setattr(
        fused.get_submodule("0"), "weight", nn.Parameter(torch.randn(20, 16, 3, 3), requires_grad=False)
    ),
    "another memory format": lambda fused: fused.to(memory_format=torch.channels_last),
    "another dtype": lambda fused: fused.double(),
    "there and back": lambda fused: fused.double().float().get_parameter("0.weight").detach().mul_(2),
    "trained": lambda fused: fused.requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("served")
def test_what_is_done_to_weights_is_seen(fused: Any, change: str, runs: Counter[str]) -> None:
    x = images()
    for _ in range(2):
        check(fused, x)
    CHANGES[change](fused)
    x = x.to(fused.get_parameter("0.weight").dtype)
    for _ in range(3):
        check(fused, x)
    assert runs[PACKS] == (1 if change == "trained" else 2)
    assert len(packed_of(fused)) == 1


@pytest.mark.usefixtures("served")
def test_loading_a_state_dict_packs_anew_where_they_are(fused: Any, runs: Counter[str]) -> None:
    """Without a run, for CUDA graphs that were captured with them."""
    x = images()
    check(fused, x)
    (before,) = packed_of(fused)
    kept = before.clone()
    fused.load_state_dict({name: 2 * tensor for name, tensor in fused.state_dict().items()})
    (after,) = packed_of(fused)
    assert after is before
    assert runs[PACKS] == 2
    floats = [np.frombuffer(each.numpy(), np.float32) for each in (kept, after)]
    np.testing.assert_array_equal(floats[1], 2 * floats[0])


@pytest.mark.usefixtures("served")
def test_they_go_with_their_module(fused: Any) -> None:
    other = copy.deepcopy(fused)
    check(other, images())
    gone = weakref.ref(packed_of(other)[0])
    del other
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda fused: pickle.loads(pickle.dumps(fused))])
@pytest.mark.usefixtures("served")
def test_copies_and_pickles_have_none(fused: Any, copied: Any, runs: Counter[str]) -> None:
    x, keys = images(), [*fused.state_dict()]
    for _ in range(2):
        check(fused, x)
    other = copied(fused)
    assert [*fused.state_dict()] == [*other.state_dict()] == keys
    assert packed_of(other) == []
    other.get_parameter("0.weight").mul_(2)
    for _ in range(2):
        check(other, x)
        check(fused, x)
    assert runs[PACKS] == 2


@pytest.mark.usefixtures("served")
def test_nothing_is_packed_while_a_graph_is_captured(
    fused: Any, runs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = images()
    check(copy.deepcopy(fused), x)  # has the plans made
    runs.clear()

    def capture() -> None:
        with monkeypatch.context() as patch:
            for each in (kept_weights, module, plans):
                patch.setattr(each, "is_capturing", lambda _: True)
            check(fused, x)

    capture()
    assert runs == {WHOLE: 1}, "the graph transforms filters at each replay"
    check(fused, x)
    capture()
    assert runs == {WHOLE: 2, PACKS: 1, PACKED: 1}
    with torch.no_grad():
        fused.get_parameter("0.weight").mul_(2)
    capture()
    check(fused, x)
    assert runs == {WHOLE: 4, PACKS: 2, PACKED: 1}
    check(fused, x)
    assert runs[PACKED] == 2
    fused_plans.forget()
    capture()
    for _ in range(2):
        check(fused, x)
    assert runs[PACKED] == 3, "a later run asks what the capture did not"


@pytest.mark.usefixtures("served")
def test_a_run_before_a_capture_makes_the_plan_of_packed_filters(fused: Any) -> None:
    check(fused, images())
    assert [(plan.answer.takes_packed, plan.calls) for plan in fused_plans.plans() if plan.answer is not None] == [
        (False, 1),
        (True, 0),
    ]


def test_another_answer_is_not_given_them(fused: Any, handle: Handle, runs: Counter[str]) -> None:
    """The operator names how they were packed: what packs them otherwise, or not at all, reads the weight."""
    x, (weight, bias) = images(), fused.parameters()
    filters = torch.zeros(10_000, dtype=torch.uint8)
    for only, packing in (("ConvCpuWinograd", "otherwise"), ("ConvCpuDirect", "float32 numpy winograd 2 forward")):
        fused_plans.forget()
        with miofind.torch.use("estimate", handle=handle, devices="cpu", only=only), torch.no_grad():
            y = torch.ops.miofind.convolution(
                x, weight, bias, None, None, "relu", [1, 1], [1, 1], [1, 1], 1, filters=filters, packing=packing
            )
        torch.testing.assert_close(y, right(fused, x), rtol=1e-4, atol=1e-4)
    assert not runs[PACKED]
    fused_plans.forget()


def test_they_are_packed_anew_for_the_solution_of_a_later_answer(fused: Any, handle: Handle) -> None:
    x = images()
    for only in ("ConvCpuWinograd", "ConvCpuDirect", "ConvCpuWinograd"):
        fused_plans.forget()
        with miofind.torch.use("estimate", handle=handle, devices="cpu", only=only):
            for _ in range(2):
                check(fused, x)
    assert len(packed_of(fused)) == 1
    fused_plans.forget()


@pytest.mark.usefixtures("served")
def test_where_they_cannot_run_the_whole_solution_does(
    fused: Any, runs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise LaunchError("no launch")

    monkeypatch.setattr(winograd, PACKED, failing)
    for _ in range(3):
        check(fused, images())
    assert runs == {WHOLE: 3, PACKS: 1}
    assert [plan.calls for plan in fused_plans.plans() if plan.answer is not None] == [3, 2]


@pytest.mark.usefixtures("served")
def test_where_they_cannot_be_packed_the_whole_solution_runs(
    fused: Any, runs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(packed_filters.PackedFilters, "made", failing)
    for _ in range(3):
        check(fused, images())
    assert runs == {WHOLE: 3}
    assert packed_of(fused) == []


@pytest.mark.usefixtures("served")
def test_where_they_cannot_be_packed_anew_other_forms_are_written(
    fused: Any, runs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = images(), images().contiguous(memory_format=torch.channels_last)
    for x in (first, last, first, last):
        check(fused, x)
    with torch.no_grad():
        fused.get_parameter("0.weight").mul_(2)
    before = runs.copy()
    with monkeypatch.context() as patch:

        def failing(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        patch.setattr(packed_filters.PackedFilters, "write", failing)
        for x in (last, first, last):
            check(fused, x)
        assert runs - before == {WHOLE: 3}
        with pytest.raises(torch.OutOfMemoryError):
            fused.load_state_dict(fused.state_dict())
    for x in (first, last, first, last):
        check(fused, x)
    assert len(packed_of(fused)) == 1


def test_nobody_waits_for_their_kernels(fused: Any, handle: Handle, runs: Counter[str]) -> None:
    x, kernels = images(), Withheld()
    fused_plans.forget()
    with miofind.torch.use("estimate", handle=handle, devices="cpu", only="ConvCpuWinograd"):
        for _ in range(2):
            check(copy.deepcopy(fused), x)  # has the plans made
        packed_filters._known.clear()
        runs.clear()
        handle._background = kernels  # type: ignore[assignment]
        for _ in range(3):
            check(fused, x)
        assert kernels.asked == 1
        assert runs == {WHOLE: 3}
        kernels.finish()
        for _ in range(2):
            check(fused, x)
        assert runs[PACKED] == 1
    fused_plans.forget()


@pytest.mark.usefixtures("served")
def test_a_module_asks_once(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(module, "decided", lambda call: asked.append(call) or fused_plans.decided(call))
    for _ in range(3):
        check(fused, images())
    assert len(asked) == 1


@pytest.mark.usefixtures("served")
def test_what_looks_for_the_operator_finds_it_with_the_weight(fused: Any) -> None:
    x, seen = images(), []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.miofind.convolution.default:
                seen.append((len(args), kwargs))
            return function(*args, **(kwargs or {}))

    for _ in range(2):
        check(fused, x)
    with Looking(), torch.no_grad():
        fused(x)
    ((count, named),) = seen
    assert count <= Forward._fields.index("filters")
    assert not named


@pytest.mark.usefixtures("served")
def test_weights_in_both_forms_are_written_together(fused: Any) -> None:
    """A weight that is turned as well as packed has one version of both."""
    x = images().contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        check(fused, x)
    weight = fused.get_parameter("0.weight")
    turned = kept_weights._copies[id(weight)].of_forms[Turned(torch.float32, channels_last=True)]
    with torch.no_grad():
        weight.mul_(2)
    check(fused, x)
    assert turned.equal(weight)
    for _ in range(2):
        check(fused, x)


@pytest.mark.usefixtures("served")
def test_a_residual_and_numbers_of_channels_are_added_with_them(runs: Counter[str]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.first(x) + x)
            return torch.relu(self.second(y) + x.mean((2, 3), keepdim=True))

    torch.manual_seed(0)
    model, x = Block().eval(), images()
    fused = miofind.torch.fuse(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert runs[PACKS] == 2
    assert runs[PACKED] == 4


@pytest.mark.parametrize("kind", ["autocast", "inference mode"])
@pytest.mark.usefixtures("served")
def test_modes(fused: Any, kind: str) -> None:
    x = images()
    for _ in range(2):
        check(fused, x)
    if kind == "inference mode":
        with torch.inference_mode():
            for _ in range(2):
                torch.testing.assert_close(fused(x), right(fused, x), rtol=1e-4, atol=1e-4)
        return
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = fused(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), right(fused, x), rtol=3e-2, atol=3e-2)
