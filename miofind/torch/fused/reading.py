"""What code reads of the modules that it holds, beside calling them: the parts of these are to stay as they are.

Code that calls `self.encoder.stem(x)` is to have the stem's own result, though the encoder's code has an activation
behind it. Told by what Python has compiled: the attributes that `forward`, and what that calls, asks for.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

_ASKS = ("LOAD_ATTR", "LOAD_METHOD")
_BY_NAME = ("getattr", "attrgetter")
_ALL = frozenset(("_modules", "children", "get_submodule", "modules", "named_children", "named_modules"))
"""Attributes of modules by which code has any of their parts."""


@dataclass(slots=True)
class Reading:
    """What the code of one module asks for.

    Attributes:
        path: of the module.
        chains: the attributes of the module, and attributes of these, such as ("encoder", "stem").
        names: attributes of all else, which may be modules.
    """

    path: str
    chains: set[tuple[str, ...]] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

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

    def _take(self, code: CodeType, owner: tuple[str, ...]) -> set[str]:
        """Add what code asks for; what it asks its owner for is returned."""
        own, chain = set[str](), tuple[str, ...]()
        before: Any = None
        for each in dis.get_instructions(code):
            if each.opname == "EXTENDED_ARG":
                continue
            if each.opname not in _ASKS:
                chain = ()
            elif chain or _gives(before, owner):
                chain = (*chain, str(each.argval))
                self.chains.add(chain)
                own.add(chain[0])
            else:
                self.names.add(str(each.argval))
            before = each
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                own |= self._take(constant, owner)
            elif isinstance(constant, str) and not set(_BY_NAME).isdisjoint(code.co_names):
                self.names.update(constant.split("."))
        return own


def _gives(instruction: Any, owner: Iterable[str]) -> bool:
    """Whether an instruction gives the owner, last where it gives several."""
    if instruction is None or not instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return False
    given = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
    return given in owner


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
