"""Code that asks what something is by its identity, which no stand-in has."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import operator
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from miofind.torch import fuse
from miofind.torch.fused.watch import asks_what_is, modes

ASK: dict[str, Callable[..., Any]] = {
    "a dtype": lambda x: x.dtype is torch.float16,
    "a dtype by another name": lambda x: x.dtype is not torch.half,
    "a dtype on the right": lambda x: torch.float16 is x.dtype,
    "a dtype that is kept": lambda x, dtype: dtype is torch.float16,
    "two dtypes": lambda x, other: x.dtype is other.dtype,
    "a device": lambda self, x: x.device is self.device,
    "a layout": lambda x: x.layout is torch.strided,
    "a class": lambda x: type(x) is torch.Tensor,
    "equal classes": lambda x: type(x) == torch.Tensor,  # noqa: E721
    "a parameter": lambda x: type(x) is nn.Parameter,
    "a flag": lambda x, flag: 2 * x if flag is True else x,
    "no flag": lambda x, flag: x if flag is not False else -x,
}
DO_NOT: dict[str, Callable[..., Any]] = {
    "None": lambda x, mask: x if mask is None else mask,
    "not None": lambda self, x: x is not None and self.part is None,
    "a class of a norm": lambda self: self.norm is nn.BatchNorm2d,
    "the last block": lambda self, block: block is self.blocks[-1],
    "a flag of a module": lambda self: self.flag is True,
    "equal dtypes": lambda x: x.dtype == torch.float16,
    "sizes": lambda self, x: x.shape[0] == self.size and x.dim() == 4,
    "a text": lambda self: self.kind == "Tensor",
    "isinstance": lambda x: isinstance(x, torch.Tensor),
}


@pytest.mark.parametrize("name", ASK)
def test_code_that_asks_what_something_is_is_told(name: str) -> None:
    assert asks_what_is(ASK[name].__code__)


@pytest.mark.parametrize("name", DO_NOT)
def test_other_code_is_not(name: str) -> None:
    assert not asks_what_is(DO_NOT[name].__code__)


class Asks(nn.Module):
    """Computes something else of what is in float64, or has a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any, flag: bool = False) -> Any:
        y = self.conv(x.float())
        y = 3 * y if flag is True else y
        return 2 * y if x.dtype is torch.float64 else y


def test_both_answers_are_computed() -> None:
    """The one that stand-ins gave was in the graph."""
    network = Asks().eval()
    fused = fuse(network)
    assert "by `is` or `type`" in fused.fusion_report.untraced[""]
    for dtype in (torch.float32, torch.float64):
        for flag in (False, True):
            x = torch.randn(2, 3, 5, 5, dtype=dtype)
            torch.testing.assert_close(fused(x, flag), network(x, flag))


class Asked(nn.Module):
    """Ends as a function has it, which is given the network, x, and what convolutions made of it."""

    total = 0

    def __init__(self, ends: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.drop, self.part, self.calls = nn.Conv2d(3, 4, 3), nn.Identity(), Counts(), 0
        self.ends = ends

    def forward(self, x: Any) -> Any:
        return self.ends(self, x, torch.relu(self.conv(x)))


def compares_sizes(self: Any, x: Any, y: Any) -> Any:
    height, width = y.shape[2], y.shape[3]
    return y if height is width else -y


def compares_sizes_at_once(self: Any, x: Any, y: Any) -> Any:
    return y if y.shape[2] is y.shape[3] else -y


def compares_in_a_function_of_its_own(self: Any, x: Any, y: Any) -> Any:
    size = y.shape[3]
    return y if (lambda: y.shape[2] is size)() else -y


def compares_in_a_loop(self: Any, x: Any, y: Any) -> Any:
    first = y.shape[2]
    for size in y.shape[2:]:
        y = y if size is first else -y
    return y


def compares_tensors(self: Any, x: Any, y: Any) -> Any:
    z = self.drop(y)
    if z is not y:
        z = z * 2
    return z


def compares_a_result(self: Any, x: Any, y: Any) -> Any:
    return y if self.drop(y) is y else -y


def compares_what_is_kept(self: Any, x: Any, y: Any) -> Any:
    kept = {"a": self.drop(y), "b": y}
    return y if kept["a"] is kept["b"] else -y


def compares_by_a_function(self: Any, x: Any, y: Any) -> Any:
    return y if operator.is_(self.drop(y), y) else -y


def compares_parameters(self: Any, x: Any, y: Any) -> Any:
    return y if any(each is self.conv.weight for each in self.parameters()) else -y


def counts_tensors(self: Any, x: Any, y: Any) -> Any:
    return y * len({y, self.drop(y)})


def compares_addresses(self: Any, x: Any, y: Any) -> Any:
    z = self.drop(y)
    return y if id(z) == id(y) else -y


def asks_for_the_class_of_a_number(self: Any, x: Any, y: Any) -> Any:
    size = y.shape[2]
    return y if type(size) in (int, float) else -y


def asks_for_the_name_of_a_class(self: Any, x: Any, y: Any) -> Any:
    return y if type(x).__name__ == "Tensor" else -y


def asks_whether_a_number_is_called(self: Any, x: Any, y: Any) -> Any:
    size = y.shape[2]
    return -y if callable(size) else y


def matches_sizes(self: Any, x: Any, y: Any) -> Any:
    match y.shape:
        case [_, _, height, _]:
            return y * height
        case _:
            return y


def sets_a_number(self: Any, x: Any, y: Any) -> Any:
    object.__setattr__(self, "calls", self.calls + 1)
    return y * self.calls


def sets_a_number_in_its_attributes(self: Any, x: Any, y: Any) -> Any:
    self.__dict__["calls"] += 1
    return y * self.calls


def sets_a_number_of_its_class(self: Any, x: Any, y: Any) -> Any:
    type(self).total += 1
    return y * type(self).total


def does_without_a_number(self: Any, x: Any, y: Any) -> Any:
    try:
        return y * float(x.shape[2])
    except TypeError:
        return y


def does_without_a_loop(self: Any, x: Any, y: Any) -> Any:
    with contextlib.suppress(TypeError):
        for _ in range(x.shape[2]):
            y = y + 1
    return y


def does_without_random_numbers(self: Any, x: Any, y: Any) -> Any:
    try:
        return y + 0 * torch.rand(1)
    except Exception:
        return -y


def does_without_autocast(self: Any, x: Any, y: Any) -> Any:
    try:
        with torch.autocast("cpu", enabled=False):
            return self.conv(x)
    except Exception:
        return y


class Counts(nn.Module):
    """Sets a number around PyTorch, in code that another module's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, y: Any) -> Any:
        object.__setattr__(self, "calls", self.calls + 1)
        return y * self.calls


def does_without_a_part(self: Any, x: Any, y: Any) -> Any:
    try:
        return self.part(y)
    except Exception:
        return -y


def does_without_a_loop_over_images(self: Any, x: Any, y: Any) -> Any:
    try:
        return torch.stack([image * 2 for image in y])
    except Exception:
        return -y


UNTRACED = [
    does_without_a_loop_over_images,
    *(compares_sizes, compares_sizes_at_once, compares_in_a_function_of_its_own, compares_in_a_loop, compares_tensors),
    *(
        compares_parameters,
        counts_tensors,
        compares_a_result,
        compares_what_is_kept,
        compares_by_a_function,
        compares_addresses,
        matches_sizes,
    ),
    *(asks_for_the_class_of_a_number, asks_for_the_name_of_a_class, asks_whether_a_number_is_called),
    *(sets_a_number, sets_a_number_in_its_attributes, sets_a_number_of_its_class),
    *(does_without_a_number, does_without_a_loop, does_without_random_numbers, does_without_autocast),
]


@pytest.mark.parametrize("ends", UNTRACED)
def test_code_that_a_stand_in_would_answer_wrongly_is_not_traced(ends: Callable[..., Any]) -> None:
    """Nobody is asked, or code goes on where it was refused."""
    network = Asked(ends).eval()
    fused = fuse(network)
    assert "" in fused.fusion_report.untraced
    for size in ((5, 5), (5, 6)):
        x = torch.randn(2, 3, *size)
        Asked.total = 0
        found, Asked.total = fused(x), 0
        torch.testing.assert_close(found, network(x))


def test_a_part_that_is_refused_is_so_whatever_its_caller_catches() -> None:
    """It is a single operation of the graph, which the handler was in place of."""
    network, x = Asked(does_without_a_part).eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert len(fused.fusion_report.fused) == 1
    for _ in range(2):
        torch.testing.assert_close(fused(x), network(x))


def compares_modules(self: Any, x: Any, y: Any) -> Any:
    last = self.drop
    for each in (self.conv, self.drop):
        if each is last and self.drop is not self.conv and type(each) is nn.Identity and callable(each):
            y = each(y)
    return y


def catches_an_error_of_its_own(self: Any, x: Any, y: Any) -> Any:
    try:
        return y * {"a": 2}["b"]
    except KeyError:
        return y


@pytest.mark.parametrize("ends", [compares_modules, catches_an_error_of_its_own])
def test_other_code_is_traced(ends: Callable[..., Any]) -> None:
    network, x = Asked(ends).eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert fused.fusion_report.untraced == {}
    torch.testing.assert_close(fused(x), network(x))


class Output(dict[str, Any]):
    """Has attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Gives(nn.Module):
    """Gives tensors in a container."""

    def __init__(self, container: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv, self.container = nn.Conv2d(3, 4, 3), container

    def forward(self, x: Any) -> Any:
        return self.container(torch.relu(self.conv(x)))


def test_a_container_with_more_to_it_stays_what_it_is() -> None:
    network, x = Gives(lambda y: Output(y=y)).eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert "Output" in fused.fusion_report.untraced[""]
    assert type(fused(x)) is Output


def test_ordered_dictionaries_are_made_in_each_call() -> None:
    network, x = Gives(lambda y: OrderedDict(b=y, a=[y * 2])).eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert len(fused.fusion_report.fused) == 1
    del fused.container
    for each in (fused, pickle.loads(pickle.dumps(fused))):
        found = each(x)
        assert type(found) is OrderedDict
        assert [*found] == ["b", "a"]
        torch.testing.assert_close(found, network(x))


def test_other_threads_go_on_while_a_network_is_traced() -> None:
    """torch.fx took their modules for the network's, and what two traces had patched stayed so."""
    others, x, failed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), torch.randn(2, 3), []
    expected, patched = others(x), (nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__, builtins.max)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            try:
                assert torch.equal(others(x), expected)
                nn.Linear(1, 1).extra = 1
            except BaseException as error:
                failed.append(error)
                return

    def trace() -> None:
        try:
            for _ in range(5):
                assert fuse(Asked(compares_modules).eval()).fusion_report.untraced == {}
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        server, tracers = threading.Thread(target=serve), [threading.Thread(target=trace) for _ in range(3)]
        for thread in (server, *tracers):
            thread.start()
        for thread in tracers:
            thread.join()
        is_over.set()
        server.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    assert (nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__, builtins.max) == patched


class Imports(nn.Module):
    """Imports a module when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        return self.conv(x) * importlib.import_module("asks_when_imported").FACTOR


IMPORTED = """
import torch

def is_true(flag):
    return flag is True

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 3.0 + torch.rand(())

FACTOR = Table().factor if is_true(True) and torch.is_grad_enabled() else 0
"""


def test_what_is_imported_while_code_is_traced_may_do_what_it_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpmath does: torch.compile failed in the whole process where PyTorch first imported SymPy in a trace."""
    Path(tmp_path, "asks_when_imported.py").write_text(IMPORTED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "asks_when_imported", raising=False)
    network, x = Imports().eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert not fused.fusion_report.untraced
    torch.testing.assert_close(fused(x), network(x))


@pytest.mark.parametrize(
    "block",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cuda", torch.float16),
    ],
    ids=["gradients", "inference", "autocast", "autocast of a GPU"],
)
def test_modes_tell_blocks_apart(block: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    with torch.set_grad_enabled(block is torch.no_grad):  # inference mode has none anyway
        before = modes()
        with block():
            assert modes() != before
        assert modes() == before


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_modes_tell_dtypes_of_autocast_apart(kind: str) -> None:
    before, dtype = modes(), torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, torch.bfloat16 if dtype == torch.float16 else torch.float16)
    try:
        assert modes() != before
    finally:
        torch.set_autocast_dtype(kind, dtype)


class Renames(nn.Module):
    """Puts what it has by one key under another one in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.known = nn.Conv2d(3, 4, 3), {"first": (1, 2)}

    def forward(self, x: Any) -> Any:
        name, value = self.known.popitem()
        self.known["second" if name == "first" else "first"] = value
        return self.conv(x) + 1 if name == "first" else self.conv(x)


def test_what_changes_its_key_alone_has_changed() -> None:
    network, x = Renames().eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert "" in fused.fusion_report.untraced
    assert network.known == fused.known == {"first": (1, 2)}
    for _ in range(2):
        torch.testing.assert_close(fused(x), network(x))
