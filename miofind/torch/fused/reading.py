"""What code has of the modules that it holds, beside calling them: the parts of these are to stay as they are.

Code that calls `self.encoder.stem(x)` is to have the stem's own result, though the encoder's code has an activation
behind it. Told by what Python has compiled: the attributes that `forward`, and what that calls, asks for.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

_ASKS = ("LOAD_ATTR", "LOAD_METHOD")
_BY_NAME = ("getattr", "attrgetter")
_ALL = frozenset(("__dict__", "_modules", "children", "get_submodule", "modules", "named_children", "named_modules"))
"""Attributes of modules by which code has any of their parts."""
_HIDES = frozenset((*_BY_NAME, "eval", "exec", "vars"))
"""Functions by which code has what is not read here."""


@dataclass(slots=True)
class Reading:
    """What the code of one module asks for.

    Attributes:
        path: of the module.
        chains: the attributes of the module, and attributes of these, such as ("encoder", "stem").
        names: attributes of all else, which may be modules.
        called, had: those chains that are called, and those that are had otherwise than to be called or compared with
            None.
        hides: whether the code may have more: it gives its module away, or asks by names that it computes.
    """

    path: str
    chains: set[tuple[str, ...]] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    called: set[tuple[str, ...]] = field(default_factory=set)
    had: set[tuple[str, ...]] = field(default_factory=set)
    hides: bool = False

    @staticmethod
    def of(module: Any, path: str) -> Reading:
        """What the code of a module's forward asks for."""
        made, seen = Reading(path), set[Any]()
        pending = [(function, True) for function in _functions(module, "forward")]
        while pending:
            function, is_method = pending.pop()
            if function not in seen and not function.__module__.startswith("torch."):
                seen.add(function)
                own = made._take(function.__code__, function.__code__.co_varnames[:1] if is_method else ())
                pending += [(each, True) for name in own for each in _functions(module, name)]
                pending += [(each, is_method) for each in _enclosed(function)]
                pending += [(each, False) for each in _named(function)]
        return made

    def of_part(self, path: str, module: Any) -> bool:
        """Whether it asks for a part of a module below."""
        prefix = self.path and f"{self.path}."
        if not path.startswith(prefix):
            return False
        steps = tuple(path.removeprefix(prefix).split("."))
        asked = self.names | {
            chain[len(steps)] for chain in self.chains if len(chain) > len(steps) and chain[: len(steps)] == steps
        }
        parts = (*module._modules, *module._parameters, *module._buffers)
        return not asked.isdisjoint(_ALL) or not asked.isdisjoint(parts)

    def has(self, path: str) -> bool:
        """Whether it may have a module otherwise than to call it."""
        name, prefix = path.rpartition(".")[2], self.path and f"{self.path}."
        asked = self.names.union(*self.chains)
        is_had = any(f"{prefix}{'.'.join(chain)}" == path for chain in self.had)
        return self.hides or is_had or name in self.names or not asked.isdisjoint(_ALL)

    def _take(self, code: CodeType, owner: tuple[str, ...]) -> set[str]:
        """Add what code asks for; what it asks its owner for is returned."""
        own, chain = set[str](), tuple[str, ...]()
        before: Any = None
        steps = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
        for number, each in enumerate(steps):
            after = steps[number + 1 : number + 3]
            if each.opname not in _ASKS:
                chain = ()
                self.hides |= _gives_away(each, owner, after)
            elif chain or _gives(before, owner):
                chain = (*chain, str(each.argval))
                self.chains.add(chain)
                own.add(chain[0])
                if _is_for_a_call(each):
                    self.called.add(chain)
                elif not (after and after[0].opname in _ASKS) and not _is_compared_with_none(after):
                    self.had.add(chain)
            else:
                self.names.add(str(each.argval))
            before = each
        self.hides |= not _HIDES.isdisjoint(code.co_names)
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


def _given(instruction: Any) -> tuple[Any, ...]:
    """The names of the variables that an instruction gives."""
    loads = ("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")
    if instruction is None or not instruction.opname.startswith(loads):
        return ()
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def _gives(instruction: Any, owner: Iterable[str]) -> bool:
    """Whether an instruction gives the owner, last where it gives several."""
    return not set(_given(instruction)[-1:]).isdisjoint(owner)


def _gives_away(instruction: Any, owner: Iterable[str], after: Sequence[Any]) -> bool:
    """Whether an instruction gives the owner for anything but an attribute of it."""
    is_last = _gives(instruction, owner) and not (after and after[0].opname in (*_ASKS, "STORE_ATTR"))
    return is_last or not set(_given(instruction)[:-1]).isdisjoint(owner)


def _is_for_a_call(instruction: Any) -> bool:
    """Whether an instruction asks for an attribute that is called next."""
    return instruction.opname == "LOAD_METHOD" or bool(sys.version_info >= (3, 12) and instruction.arg & 1)


def _is_compared_with_none(after: Sequence[Any]) -> bool:
    """Whether the next instructions ask whether what they are given is None."""
    names = [each.opname for each in after]
    is_none = names[:1] == ["LOAD_CONST"] and after[0].argval is None
    return (is_none and names[1:] == ["IS_OP"]) or any(name.endswith(("IF_NONE", "IF_NOT_NONE")) for name in names[:1])


def _functions(module: Any, name: str) -> Iterator[FunctionType]:
    """The functions that a module, or a class of it, has by a name; those of properties, too."""
    for held in (vars(module), *map(vars, type(module).__mro__)):
        value = held.get(name)
        for each in (value, *(getattr(value, wrapped, None) for wrapped in ("__func__", "fget", "func"))):
            if isinstance(each, FunctionType):
                yield each


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
    """The functions of a function's own module that its code names."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield value
