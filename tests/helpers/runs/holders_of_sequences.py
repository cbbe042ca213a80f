"""Networks of one sequence, whose code torch.fx cannot trace: they call it as a whole, or have its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Steps(nn.Sequential):
    """A class of its own without a forward of its own, as networks have them for a convolution and what follows it."""


class Holder(nn.Module):
    """Decides by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Any = Steps(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return self.run(2 * x if x.shape[0] > 1 else x)

    def run(self, x: Any) -> Any:
        raise NotImplementedError


class Calls(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + self.steps(x)


class AsksForNone(Holder):
    def run(self, x: Any) -> Any:
        has_steps = self.steps is not None
        if self.steps is not None and has_steps:
            x = self.steps(x)
        return x if self.steps is None else -x


class CallsInAFunction(Holder):
    def run(self, x: Any) -> Any:
        self.count = x.dim()  # what is set is none of its modules
        return [self.steps(each) for each in (x, x)][1]


class OfPart(nn.Module):
    """Another network calls a sequence of one below."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Calls()

    def forward(self, x: Any) -> Any:
        return self.part.steps(2 * x if x.shape[0] > 1 else x)


WHOLE = (Calls, AsksForNone, CallsInAFunction, OfPart)


class Indexes(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + self.steps[0](x)


class Walks(Holder):
    def run(self, x: Any) -> Any:
        y = self.steps(x)
        for step in self.steps:
            x = 1 - step(x)
        return x + y


class Slices(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + self.steps[:2](x)


class Names(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + getattr(self, "".join(reversed("spets")))[0](x)


class Passes(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + first_of(self.steps, None)(x)


class PassesItself(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + first_of_holder(x, self)(x)


class PassesItselfFirst(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + holders_first(self, x.shape)(x)


class KeepsAList(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.all = [self.steps]

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.all[0][0](x)


class KeepsAnObject(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.other = Keeper(self.steps)

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.other.kept[0](x)


class HasItTwice(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.steps])

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.layers[0][0](x)


class HasChildren(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + next(self.children())[0](x)  # type: ignore[index]


class HasAll(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + next(each for each in self.modules() if isinstance(each, nn.Conv2d))(x)


class Encloses(Holder):
    def run(self, x: Any) -> Any:
        def first() -> Any:
            return self.steps[0]

        return self.steps(x) + first()(x)


class Renames(Holder):
    def run(self, x: Any) -> Any:
        me = self
        return self.steps(x) + me.steps[0](x)


class HasAProperty(Holder):
    @property
    def first(self) -> Any:
        return self.steps[0]

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.first(x)


class PacksInATuple(Holder):
    def run(self, x: Any) -> Any:
        (pair,) = ((self.steps, None),)
        return self.steps(x) + pair[0][0](x)


class OfAPart(nn.Module):
    """Another network takes a sequence of one below apart."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Calls()

    def forward(self, x: Any) -> Any:
        y = self.part(2 * x if x.shape[0] > 1 else x)
        return y + self.part.steps[0](x)


class OfAPartByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Calls()

    def forward(self, x: Any) -> Any:
        y = self.part(2 * x if x.shape[0] > 1 else x)
        return y + getattr(self.part, "".join(reversed("spets")))[0](x)  # type: ignore[operator, index]


class OfEach(nn.Module):
    """Another network takes the sequences of those in a list apart."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Calls()])

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(2 * x if x.shape[0] > 1 else x) + part.steps[0](x)  # type: ignore[operator, index]
        return x


class HasAHook(Calls):
    """Its hook has what the holder has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, result: result + module.steps[0](given[0]))


TAKEN_APART = (
    Indexes,
    Walks,
    Slices,
    Names,
    Passes,
    PassesItself,
    PassesItselfFirst,
    KeepsAList,
    KeepsAnObject,
    HasItTwice,
    HasChildren,
    HasAll,
    Encloses,
    Renames,
    HasAProperty,
    PacksInATuple,
    OfAPart,
    OfAPartByName,
    OfEach,
    HasAHook,
)


class Keeper:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


def first_of(steps: Any, _: Any) -> Any:
    return steps[0]


def first_of_holder(_: Any, holder: Any) -> Any:
    name = "steps"
    return operator_of(holder, name)[0]


def holders_first(holder: Any, _: Any) -> Any:
    return operator_of(holder, "steps")[0]


operator_of: Callable[[Any, str], Any] = nn.Module.__getattr__


def sequences(network: Any) -> Iterator[Any]:
    return (module for module in network.modules() if isinstance(module, Steps))


def prepared(kind: Any) -> Any:
    torch.manual_seed(0)
    network = kind()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return network.eval()
