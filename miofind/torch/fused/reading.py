"""What code has of the modules that it holds, beside calling them: the parts of these are to stay as they are.

Code that calls `self.encoder.stem(x)` is to have the stem's own result, though the encoder's code has an activation
behind it. Told by what Python has compiled: the attributes that `forward`, and what that calls, asks for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from miofind.torch.fused.bytecode import instructions
from miofind.torch.fused.watch import is_torchs

_ASKS = ("LOAD_ATTR", "LOAD_METHOD")
_BY_NAME = ("getattr", "attrgetter", "__getattr__", "__getattribute__")
_ALL = frozenset(
    (
        *("__dict__", "_modules", "children", "get_submodule", "modules", "named_children", "named_modules"),
        *("apply", "get_buffer", "get_parameter", "named_buffers", "named_parameters", "state_dict"),
    )
)
"""Attributes of modules by which code has any of their parts."""
_TENSORS = ("buffers", "parameters")
"""The same of tensors, as those that name them, but where the first one alone is taken."""
_HIDES = frozenset((*_BY_NAME, "eval", "exec", "vars"))
"""Functions by which code has what is not read here."""
_WITHOUT_BEING_NAMED = ("forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__")
"""Methods that run where code calls a module, asks it for something, or takes it apart."""
_WHOLE = frozenset((*(name for name in dir(nn.Module) if name not in _ALL), "forward", "training"))
"""Attributes of a sequence that are none of its parts."""
_OWN = (FunctionType, property, classmethod, staticmethod, functools.cached_property, functools.partial)
"""What classes have of which the functions are read, beside constants."""


@dataclass(slots=True)
class Reading:
    """What the code of one module asks for.

    Attributes:
        path: of the module.
        chains: the attributes of the module, and attributes of these, such as ("encoder", "stem").
        names: attributes of all else, which may be modules.
        called, had: those chains that are called, and those that are had otherwise than to be called or compared with
            None.
        others: names that functions of other Python modules ask for: of what they are given.
        hides: whether the code may have more: it gives its module away, or asks by names that it computes.
        sets_modes: whether it may put modules into training mode.
    """

    path: str
    chains: set[tuple[str, ...]] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    called: set[tuple[str, ...]] = field(default_factory=set)
    had: set[tuple[str, ...]] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    hides: bool = False
    sets_modes: bool = False

    @staticmethod
    def of(module: Any, path: str, methods: Iterable[FunctionType] = ()) -> Reading:
        """What the code of a module's forward asks for.

        Args:
            methods: of the module that something else calls, as hooks do.
        """
        made = Reading(path)
        begun = [each for name in _WITHOUT_BEING_NAMED for each in _functions(module, name)]
        made._read(module, [*begun, *((each, True) for each in methods)])
        return made

    def _read(self, module: Any, pending: list[tuple[FunctionType, bool]]) -> None:
        """Add what functions, and what they call, ask for.

        Args:
            module: whose functions they are.
            pending: the functions, and whether they are given the module first.
        """
        seen, files = set[Any](), {cls.__module__ for cls in type(module).__mro__}
        while pending:
            function, is_method = pending.pop()
            if (function, is_method) not in seen and not is_torchs(function.__module__):
                seen.add((function, is_method))
                if not is_method and function.__module__ not in files:
                    pending += self._read_others(function)
                    continue
                asked = self._take(function.__code__, function.__code__.co_varnames[:1] if is_method else ())
                self.hides |= any(_is_unknown(module, name) for name in asked)
                pending += [each for name in asked for each in _functions(module, name)]
                pending += [(each, is_method and _takes_self(each)) for each in _enclosed(function)]
                pending += [(each, False) for each in _named(function)]

    def _read_others(self, function: FunctionType) -> Iterator[tuple[FunctionType, bool]]:
        """Add what a function of another Python module asks for, and give the functions that it names."""
        of_function = Reading("")
        of_function._take(function.__code__, ())
        self.others |= of_function.names
        self.sets_modes |= of_function.sets_modes
        if of_function.hides:
            self.others |= _ALL
        return ((each, False) for found in (_enclosed, _named) for each in found(function))

    @staticmethod
    def of_class(cls: type) -> Reading:
        """What the methods of a class that is no module's ask for."""
        made = Reading("")
        is_written = not issubclass(cls, nn.Module) and not str(cls.__module__).startswith("torch")
        for each in vars(cls).values() if is_written else ():
            if isinstance(each, FunctionType):
                made._take(each.__code__, each.__code__.co_varnames[:1])
        return made

    def of_part(self, path: str, module: Any) -> bool:
        """Whether it asks for a part of a module below."""
        prefix = self.path and f"{self.path}."
        if not path.startswith(prefix):
            return False
        steps = tuple(path.removeprefix(prefix).split("."))
        return _has_parts(module, self._names(steps).union(chain[-1] for chain in self._behind(steps)))

    def of_others_part(self, module: Any) -> bool:
        """Whether it asks for a part of a module that it has by a way of its own."""
        return _has_parts(module, self.names.union(self.others, *(chain[1:] for chain in self.chains)))

    def has(self, path: str) -> bool:
        """Whether it may have a module otherwise than to call it."""
        name, prefix = path.rpartition(".")[2], self.path and f"{self.path}."
        steps = tuple(path.removeprefix(prefix).split("."))
        names = self._names(steps)
        is_had = any(chain[-1] == name for chain in self.had)
        is_taken_apart = any(chain[-1] not in _WHOLE for chain in self._behind(steps))
        return self.hides or is_had or is_taken_apart or name in names or not names.union(*self.chains).isdisjoint(_ALL)

    def _names(self, steps: tuple[str, ...]) -> set[str]:
        """The names that it asks what some attributes lead to for, where it has that by a variable."""
        is_given = self.hides or any(chain == steps[: len(chain)] for chain in self.had)
        return self.names | self.others if is_given else self.names

    def _behind(self, steps: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """The chains that ask what some attributes lead to for one of its own."""
        return (chain for chain in self.chains if len(chain) == len(steps) + 1 and chain[: len(steps)] == steps)

    def _take(self, code: CodeType, owner: tuple[str, ...]) -> set[str]:
        """Add what code asks for; all names that it asks anything for are returned."""
        own, chain = set[str](), tuple[str, ...]()
        before: Any = None
        steps = instructions(code)
        if any(not set(_stored(each)).isdisjoint(owner) for each in steps):
            owner = ()  # it is another one later
        for number, each in enumerate(steps):
            after = steps[number + 1 : number + 3]
            if each.opname in _ASKS and each.argval in _TENSORS and not _takes_first(steps, number):
                self.names.add(f"named_{each.argval}")
            if each.opname not in _ASKS:
                chain = ()
                self.hides |= _gives_away(each, owner, after)
            elif chain or _gives(before, owner):
                chain = (*chain, str(each.argval))
                self.chains.add(chain)
                own.add(chain[-1])
                if _is_for_a_call(each):
                    self.called.add(chain)
                elif not (after and after[0].opname in _ASKS) and not _is_compared_with_none(after):
                    self.had.add(chain)
            else:
                self.names.add(str(each.argval))
                own.add(str(each.argval))  # of `super()`, which may be its own
            before = each
        self.hides |= not _HIDES.isdisjoint(code.co_names)
        self.sets_modes |= any(_sets_mode(each) for each in steps)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                own |= self._take(constant, owner)
            elif isinstance(constant, str) and not set(_BY_NAME).isdisjoint(code.co_names):
                self.names.update(constant.split("."))
        return own


def only_called(path: str, readings: Sequence[Reading]) -> bool:
    """Whether the code of what holds a module calls it as a whole, and no code that was read has it otherwise."""
    holder, _, name = path.rpartition(".")
    is_called = any(reading.path == holder and (name,) in reading.called for reading in readings)
    return is_called and not any(reading.has(path) for reading in readings)


_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "STORE_FAST_LOAD_FAST")
_STORES = ("STORE_FAST", "STORE_DEREF")


def _has_parts(module: Any, asked: Iterable[str]) -> bool:
    """Whether names are of any parts of a module, or of methods of its that have such."""
    names = {*asked} - {"forward"}
    made = Reading("")
    made._read(module, [each for name in (*names, "__getitem__", "__iter__") for each in _functions(module, name)])
    parts = _ALL.union(module._modules, module._parameters, module._buffers)
    return made.hides or not parts.isdisjoint(names.union(made.names, *made.chains))


def _given(instruction: Any) -> tuple[Any, ...]:
    """The names of the variables that an instruction gives."""
    return () if instruction is None or not instruction.opname.startswith(_LOADS) else _names(instruction)


def _stored(instruction: Any) -> tuple[Any, ...]:
    """The names of the variables that an instruction sets; of Python 3.13 on it may give one besides."""
    if not instruction.opname.startswith(_STORES):
        return ()
    return _names(instruction)[: instruction.opname.count("STORE_")]


def _names(instruction: Any) -> tuple[Any, ...]:
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def _gives(instruction: Any, owner: Iterable[str]) -> bool:
    """Whether an instruction gives the owner, last where it gives several."""
    return not set(_given(instruction)[-1:]).isdisjoint(owner)


def _gives_away(instruction: Any, owner: Iterable[str], after: Sequence[Any]) -> bool:
    """Whether an instruction gives the owner for anything but an attribute of it."""
    is_last = _gives(instruction, owner) and not (after and after[0].opname in (*_ASKS, "STORE_ATTR"))
    return is_last or not set(_given(instruction)[:-1]).isdisjoint(owner)


def _takes_first(steps: Sequence[Any], number: int) -> bool:
    """Whether what an attribute gives that is called is handed to `next`, as in `next(self.parameters()).dtype`."""
    start = number - 1
    while start > 0 and steps[start].opname in _ASKS:
        start -= 1
    is_next = start > 0 and steps[start - 1].opname == "LOAD_GLOBAL" and steps[start - 1].argval == "next"
    return is_next and [each.opname for each in steps[number + 1 : number + 3]] == ["CALL", "CALL"]


def _sets_mode(instruction: Any) -> bool:
    """Whether an instruction asks for a method `train`, or sets a mode."""
    if instruction.opname in _ASKS:
        return bool(instruction.argval == "train")
    return bool(instruction.opname == "STORE_ATTR" and instruction.argval == "training")


def _is_for_a_call(instruction: Any) -> bool:
    """Whether an instruction asks for an attribute that is called next."""
    return instruction.opname == "LOAD_METHOD" or bool(sys.version_info >= (3, 12) and instruction.arg & 1)


def _is_compared_with_none(after: Sequence[Any]) -> bool:
    """Whether the next instructions ask whether what they are given is None."""
    names = [each.opname for each in after]
    is_none = names[:1] == ["LOAD_CONST"] and after[0].argval is None
    return (is_none and names[1:] == ["IS_OP"]) or any(name.endswith(("IF_NONE", "IF_NOT_NONE")) for name in names[:1])


def _functions(module: Any, name: str) -> Iterator[tuple[FunctionType, bool]]:
    """The functions that a module, or a class of it, has by a name, and whether they are given the module first."""
    for held in (vars(module), *map(vars, type(module).__mro__)):
        value = held.get(name)
        is_given = held is not vars(module) and not isinstance(value, (staticmethod, classmethod))
        for each in (value, *(getattr(value, wrapped, None) for wrapped in ("__func__", "fget", "func"))):
            if isinstance(each, FunctionType):
                yield each, is_given


def _is_unknown(module: Any, name: str) -> bool:
    """Whether a class of a module has something by a name that may run code which is not read."""
    held = [vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls) and cls not in nn.Module.__mro__]
    return any(hasattr(type(each), "__get__") and not isinstance(each, _OWN) for each in held)


def _takes_self(function: FunctionType) -> bool:
    return function.__code__.co_varnames[:1] == ("self",)


def _enclosed(function: FunctionType) -> Iterator[FunctionType]:
    """The functions that one has in its closure, as decorated ones."""
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty yet
            continue
        value = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, FunctionType):
            yield value


def _named(function: FunctionType) -> Iterator[FunctionType]:
    """The functions that a function's code names: of its own module, and of others."""
    at: Any = None
    for each in (step for code in _codes(function.__code__) for step in instructions(code)):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            at = function.__globals__.get(each.argval)
        elif each.opname in _ASKS and isinstance(at, (ModuleType, type)):
            at = vars(at).get(each.argval)
        else:
            at = None
        if isinstance(at, FunctionType):
            yield at


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
