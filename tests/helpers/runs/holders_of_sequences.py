"""Networks of one sequence, whose code torch.fx cannot trace: they call it as a whole, or have its parts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from helpers.runs import takers_of_parts
from helpers.runs.takers_of_parts import first_step
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


class AsksItsBase(Indexes):
    def run(self, x: Any) -> Any:
        return self.steps(x) + super().run(x)


class AsksAnotherOfItsBase(Holder):
    """Below, the base's method is another one than that of its name."""

    def first(self, x: Any) -> Any:
        return self.steps[0](x)


class AsksItsBaseForAnother(AsksAnotherOfItsBase):
    def run(self, x: Any) -> Any:
        return self.steps(x) + super().first(x)


class Described:
    def __init__(self, function: Any) -> None:
        self.made = function

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return self.made(owner)


class HasADescriptor(Holder):
    first = Described(lambda self: self.steps[0])

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.first(x)


class Caller:
    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __call__(self, x: Any) -> Any:
        return self.owner.steps[0](x)


class KeepsACaller(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.caller = Caller(self)

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.caller(x)


class KeepsWithSlots(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = Caller(self.steps)

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.keeper.owner[0](x)


class KeepsAMethod(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.methods = {"first": self.first}
        self.item = self.steps.__getitem__

    def first(self, x: Any) -> Any:
        return self.steps[0](x)

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.methods["first"](x) + self.item(0)(x)


class KeepsAPartial(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.item = functools.partial(operator.getitem, self.steps)

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.item(0)(x)


class IsCalledByAHook(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.ReLU()
        self.last.register_forward_hook(self.first)

    def first(self, _: Any, given: Any, result: Any) -> Any:
        return result + self.steps[0](given[0])

    def run(self, x: Any) -> Any:
        return self.last(self.steps(x))


class AsksForAMethod(Holder):
    def run(self, x: Any) -> Any:
        return self.steps(x) + self.steps.__getitem__(0)(x)


class StepsWithAMethod(Steps):
    def first(self, x: Any) -> Any:
        return self[0](x)


class CallsAMethod(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.steps = StepsWithAMethod(*self.steps)

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.steps.first(x)


class HasAClassInIt(Holder):
    def run(self, x: Any) -> Any:
        class Kept:
            me = self

        return self.steps(x) + operator_of(Kept.me, "steps")[0](x)


class AsksByACode(Holder):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("steps")[0] if name == "first" else super().__getattr__(name)

    def run(self, x: Any) -> Any:
        return self.steps(x) + self.first(x)


class IsCalledOtherwise(Holder):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x) + self.steps[0](x)

    def run(self, x: Any) -> Any:
        return self.steps(x)


class TracedCalls(nn.Module):
    """Is traced; has methods that take its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def first(self, x: Any) -> Any:
        return self.steps[0](x)

    def __getitem__(self, index: int) -> Any:
        return self.steps[index]

    def forward(self, x: Any) -> Any:
        return self.steps(x)


class OfAnother(nn.Module):
    """Has the parts of another network otherwise than as its attributes; `part` is calls or traced calls."""

    traced = False

    def __init__(self) -> None:
        super().__init__()
        self.part = TracedCalls() if self.traced else Calls()
        self.prepare()

    def prepare(self) -> None:
        pass

    def forward(self, x: Any) -> Any:
        return self.run(self.part(2 * x if x.shape[0] > 1 else x))

    def run(self, x: Any) -> Any:
        raise NotImplementedError


class Rebinds(OfAnother):
    def run(self, x: Any) -> Any:
        self = self.part  # type: ignore[assignment]
        return self.steps[0](x)  # type: ignore[operator, index]


class HasAStaticMethod(OfAnother):
    @staticmethod
    def first(part: Any, x: Any) -> Any:
        return part.steps[0](x)

    def run(self, x: Any) -> Any:
        return self.first(self.part, x)


class HasAStaticMethodOfTraced(HasAStaticMethod):
    traced = True


class KeepsAFunction(OfAnother):
    def prepare(self) -> None:
        self.first = first_of_part

    def run(self, x: Any) -> Any:
        return self.first(self.part, x)


class NamesAFunction(OfAnother):
    def run(self, x: Any) -> Any:
        return takers_of_parts.first_step(self.part, x)


class NamesAFunctionOfTraced(NamesAFunction):
    traced = True


class NamesAFunctionInAComprehension(OfAnother):
    traced = True

    def run(self, x: Any) -> Any:
        return [first_step(part, x) for part in (self.part, self.part)][0]  # noqa: RUF015


class NamesAnImportedFunction(OfAnother):
    def run(self, x: Any) -> Any:
        return first_step(self.part, x)


class Taker(nn.Module):
    def __init__(self, others: Any) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: Any) -> Any:
        return self.others[0].steps[0](2 * x if x.shape[0] > 1 else x)


class SharesInAList(OfAnother):
    def prepare(self) -> None:
        self.taker = Taker([self.part])

    def run(self, x: Any) -> Any:
        return self.taker(x)


class SharesTracedInAList(SharesInAList):
    traced = True


class Shares(OfAnother):
    def prepare(self) -> None:
        self.taker = Taker(nn.ModuleList([self.part]))

    def run(self, x: Any) -> Any:
        return self.taker(x)


class SharesTraced(Shares):
    traced = True


class SharesTracedWithAnObject(OfAnother):
    traced = True

    def prepare(self) -> None:
        self.caller = Caller(self.part)

    def run(self, x: Any) -> Any:
        return self.caller(x)


class CallsAMethodOfTraced(OfAnother):
    traced = True

    def run(self, x: Any) -> Any:
        return self.part.first(x)  # type: ignore[operator]


class IndexesTraced(OfAnother):
    traced = True

    def run(self, x: Any) -> Any:
        return self.part[0](x)  # type: ignore[operator, index]


class HasAHookOfTraced(OfAnother):
    traced = True

    def prepare(self) -> None:
        self.last = nn.ReLU()
        self.last.register_forward_hook(self.first)

    def first(self, _: Any, given: Any, result: Any) -> Any:
        return result + self.part.steps[0](given[0])  # type: ignore[operator, index]

    def run(self, x: Any) -> Any:
        return self.last(x)


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
    AsksItsBase,
    AsksItsBaseForAnother,
    HasADescriptor,
    KeepsACaller,
    KeepsWithSlots,
    KeepsAMethod,
    KeepsAPartial,
    IsCalledByAHook,
    AsksForAMethod,
    CallsAMethod,
    HasAClassInIt,
    AsksByACode,
    IsCalledOtherwise,
    Rebinds,
    HasAStaticMethod,
    HasAStaticMethodOfTraced,
    KeepsAFunction,
    NamesAFunction,
    NamesAFunctionOfTraced,
    NamesAFunctionInAComprehension,
    NamesAnImportedFunction,
    SharesInAList,
    SharesTracedInAList,
    Shares,
    SharesTraced,
    SharesTracedWithAnObject,
    CallsAMethodOfTraced,
    IndexesTraced,
    HasAHookOfTraced,
)


class Keeper:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


def first_of(steps: Any, _: Any) -> Any:
    return steps[0]


def first_of_part(part: Any, x: Any) -> Any:
    return part.steps[0](x)


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
