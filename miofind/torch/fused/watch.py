"""What a network's code does beside computing with tensors, noticed while it is traced: no graph tells it.

Blocks of autocast, random numbers, attributes and lists that it sets, and questions for the modes of PyTorch.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx.proxy import Proxy
from torch.utils._python_dispatch import TorchDispatchMode

from miofind.torch.fused.bytecode import first_variable, instructions, operands
from miofind.torch.fused.refusals import Refusal
from miofind.torch.fused.writes import storage_of, written

_ASKED = (
    "get_autocast_cpu_dtype",
    "get_autocast_dtype",
    "get_autocast_gpu_dtype",
    "is_autocast_cpu_enabled",
    "is_autocast_enabled",
    "is_grad_enabled",
    "is_inference_mode_enabled",
)
_QUESTIONS = {
    **{id(getattr(torch, name)): f"torch.{name}" for name in _ASKED if hasattr(torch, name)},
    **{id(function): f"operator.{function.__name__}" for function in (operator.is_, operator.is_not)},
}
"""By identity, since code may have functions by other names."""
_NOT_ENTERED = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
"""What has attributes of its own, which are no contents of what refers to it."""


def modes() -> tuple[Any, ...]:
    """What blocks of code may change for what is computed in them."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )


class Surroundings:
    """What code may change that stays when it has run: what the modules of a network hold, and random numbers.

    Lists, dictionaries, sets and objects are compared by what they hold, to any depth, but not by what is in tensors.

    Args:
        root: the network, whose modules' classes are looked at, too.

    Attributes:
        memory: names that of tensors which the network has.
    """

    def __init__(self, root: Any) -> None:
        self._contents = {module: _contents(module) for module in root.modules()}
        self._attributes = {owner: _plain_attributes(owner) for module in root.modules() for owner in _owners(module)}
        held = [
            *root.parameters(),
            *root.buffers(),
            *(value for module in root.modules() for value in vars(module).values()),
        ]
        held += [
            value for contents in self._contents.values() for _, _, before in contents for value in _values(before)
        ]
        self.memory = frozenset(storage_of(each) for each in held if isinstance(each, torch.Tensor)) - {0}
        self._random, self._numpys = random.getstate(), np.random.get_state()

    def changed(self, module: Any, is_memory: Callable[[Any, Any], bool]) -> str:
        """What a module's code has changed; "" for nothing.

        Args:
            is_memory: whether a key and value of a dictionary are what the code may as well make again.
        """
        if random.getstate() != self._random or not _is_same_state(np.random.get_state(), self._numpys):
            return "draws random numbers"
        for owner in _owners(module):
            if changed := _plain_attributes(owner).items() ^ self._attributes[owner].items():
                return f"sets {min(name for name, _ in changed)}"
        for name, held, before in self._contents[module]:
            now = _listed(held)
            if not _is_same(now, before):
                now = [pair for pair in now if not is_memory(*pair)] if isinstance(held, dict) else now
                if not _is_same(now, before):
                    return f"changes what is in {name}"
        return ""

    def put_back(self) -> None:
        """Undo what was changed."""
        if random.getstate() != self._random:
            random.setstate(self._random)
        if not _is_same_state(np.random.get_state(), self._numpys):
            np.random.set_state(self._numpys)
        for owner, attributes in self._attributes.items():
            now, kind = _plain_attributes(owner), type if isinstance(owner, type) else object
            for name in now.keys() - attributes.keys():
                kind.__delattr__(owner, name)
            for name, value in attributes.items():
                if name not in now or now[name] is not value:
                    kind.__setattr__(owner, name, value)
        for contents in self._contents.values():
            for _, held, before in contents:
                if not _is_same(_listed(held), before):
                    _fill(held, before)


def _fill(held: Any, content: list[Any]) -> None:
    held.clear()
    if isinstance(held, dict):
        for key, value in content:
            held[key] = value
    elif isinstance(held, set):
        held.update(content)
    else:
        held.extend(content)


def _contents(module: Any) -> list[tuple[str, Any, list[Any]]]:
    """The containers that a module refers to, by the attribute that leads there, with what they hold."""
    own = {name: value for cls in type(module).__mro__ if not is_torchs(cls.__module__) for name, value in _held(cls)}
    pending = [*own.items(), *vars(module).items()]
    found, seen = [], set[int]()
    while pending:
        name, value = pending.pop()
        if type(value) in _WITHOUT_CONTENTS or id(value) in seen or isinstance(value, _NOT_ENTERED):
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set, collections.deque)):
            found.append((name, value, _listed(value)))
        if isinstance(value, dict):
            pending += [(name, each) for each in value.values()]
        elif isinstance(value, (list, tuple, set, collections.deque)):
            pending += [(name, each) for each in value]
        elif isinstance(getattr(value, "__dict__", None), dict):
            pending.append((name, vars(value)))
    return found


def _owners(module: Any) -> list[Any]:
    """A module and its classes that are none of PyTorch's."""
    return [module, *(cls for cls in type(module).__mro__ if cls is not object and not is_torchs(cls.__module__))]


def _plain_attributes(owner: Any) -> dict[str, Any]:
    """The numbers and texts that a module or class has, but for whether it is in training mode."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN) and name != "training"}


_PLAIN = (bool, int, float, complex, str, bytes)
_WITHOUT_CONTENTS = frozenset((*_PLAIN, type(None)))


def _held(cls: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(cls).items() if isinstance(value, (dict, list, set))]


def _listed(held: Any) -> list[Any]:
    return list(held.items()) if isinstance(held, dict) else list(held)


def _values(listed: list[Any]) -> list[Any]:
    """What is in a list, and in pairs of a dictionary."""
    return [value for each in listed for value in (each if isinstance(each, tuple) else (each,))]


def _is_same(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the same things; pairs of a dictionary are made anew each time."""
    return len(now) == len(before) and all(map(_is_same_thing, now, before))


def _is_same_thing(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) is tuple and len(a) == 2 and a[0] is b[0] and a[1] is b[1])


def _is_same_state(now: Any, before: Any) -> bool:
    """Whether NumPy's generator has not moved: a name, its words, and numbers."""
    return bool(now[2:] == before[2:] and np.array_equal(now[1], before[1]))


class _NothingUntold(TorchDispatchMode):
    """Refuses what is computed while code is traced and is to be computed in each call.

    That is random numbers, which would be constants of the graph, and writing to tensors that the network has.
    """

    def __init__(self, memory: frozenset[int]) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_imported(sys._getframe(1)):
            raise Refusal("its code draws random numbers")
        if not self._memory.isdisjoint(map(storage_of, written(func, args, kwargs or {}))):
            raise Refusal("its code writes to a tensor that it has")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched(memory: frozenset[int]) -> Iterator[None]:
    """Refuse what this thread's code does beside computing, while it is traced; see `questions_refused`, too.

    Args:
        memory: of tensors that the code is not to write to; see `Surroundings`.
    """
    autocast, thread = torch.amp.autocast_mode.autocast, threading.get_ident()
    enter, set_attribute = autocast.__enter__, nn.Module.__setattr__

    def entered(self: Any) -> Any:
        if threading.get_ident() == thread:  # also a block that switches off what is off now
            raise Refusal("its code has a block of autocast")
        return enter(self)

    def set_to(self: Any, name: str, value: Any) -> None:
        setter = sys._getframe(1)
        is_of_torch = is_torchs(setter.f_globals.get("__name__", ""))
        if threading.get_ident() == thread and not is_of_torch and not _is_imported(setter):
            raise Refusal(f"its code sets {name}")
        set_attribute(self, name, value)

    autocast.__enter__, nn.Module.__setattr__ = entered, set_to
    try:
        with _NothingUntold(memory):
            yield
    finally:
        autocast.__enter__, nn.Module.__setattr__ = enter, set_attribute


@contextlib.contextmanager
def questions_refused() -> Iterator[None]:
    """Refuse what this thread's code asks that stand-ins cannot answer.

    All calls take longer meanwhile. So what torch.fx asks PyTorch of functions is asked once before: for its first
    answer PyTorch looks at all that it has.
    """
    torch.overrides.is_tensor_method_or_property(torch.add)
    with _profiled(_refuse_questions):
        yield


def is_torchs(module: object) -> bool:
    """Whether the Python module that code or a class names as its own is PyTorch's."""
    return str(module).startswith("torch.")


_called: dict[Any, Any] = {}
"""Of frames that are traced, but for those of PyTorch's code, the function of C that each calls now."""
_globals_of_torch: dict[int, Any] = {}
"""Those of PyTorch's Python modules that were called meanwhile, by identity; held so that no others have it."""


def called_by(frame: Any) -> Any:
    """The function of C that a frame of traced code calls now; None where it calls none, or an object of C's.

    None, too, for the code of PyTorch's modules, which knows stand-ins for what they are.
    """
    return _called.get(frame)


def _refuse_questions(frame: Any, event: str, called: Any) -> None:
    """Refuse questions for modes: the answers of now would be constants of the graph; and `is`, which asks nobody."""
    names = frame.f_globals
    if id(names) in _globals_of_torch:  # most of all calls, and none of the network's
        return
    module = names.get("__name__", "")
    if is_torchs(module):
        _globals_of_torch[id(names)] = names
        return
    if event == "c_call":
        _called[frame] = called
    elif event in ("c_return", "c_exception"):
        _called.pop(frame, None)
    is_asked = event == "c_call" and id(called) in _QUESTIONS
    if not (is_asked or event in ("call", "return")) or _package(module) in _NO_NETWORKS:
        return
    is_refused = is_asked or (asks_what_is(frame.f_code) if event == "call" else _asked_of_stand_ins(frame))
    if not is_refused or _is_imported(frame):
        return
    if is_asked:
        raise Refusal(f"its code asks for {_QUESTIONS[id(called)]}")
    name = frame.f_code.co_qualname
    raise Refusal(f"{name} asks what something is by `is` or `type`, not by == or isinstance")


def _asked_of_stand_ins(frame: Any) -> bool:
    """Whether code that ran asked what its variables are, and has a stand-in, or what has one elsewhere, in one."""
    kinds = (Proxy, torch.Tensor)
    return any(issubclass(type(frame.f_locals.get(name)), kinds) for name in asked_variables(frame.f_code))


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def _is_imported(frame: Any) -> bool:
    """Whether code runs as a module is imported, as PyTorch imports its own when they are first needed.

    It is given no stand-ins, and an error would leave the module half imported for the whole process.
    """
    while frame is not None:
        package = _package(frame.f_globals.get("__name__", ""))
        if package == "miofind" or package in _IMPORTING:
            return package != "miofind"
        frame = frame.f_back
    return False


_IMPORTING = ("importlib", "_frozen_importlib")
"""Names of the package that imports: before its own import it has the second."""
_NO_NETWORKS = sys.stdlib_module_names | {"miofind", "numpy", "torch"}
"""Packages whose code is no network's."""
_KINDS = (torch.dtype, torch.layout, torch.memory_format, torch.device)
_OF_KINDS = ("device", "dtype", "layout")
"""Attributes of tensors that give such."""
_CLASSES = ("Parameter", "Tensor")


@functools.lru_cache(maxsize=4096)
def asks_what_is(code: CodeType) -> bool:
    """Whether code compares a dtype, a class or an argument by its identity: stand-ins are other things.

    Such as `x.dtype is torch.half`, `type(x) == torch.Tensor` and `flag is True`; `x is None` is asked for elsewhere.
    Patterns of sequences and dictionaries ask likewise.
    """
    steps = instructions(code)
    return any(
        each.opname in _PATTERNS or (each.opname in ("IS_OP", "COMPARE_OP") and _compares_what_is(steps, place))
        for place, each in enumerate(steps)
    )


_PATTERNS = ("MATCH_SEQUENCE", "MATCH_MAPPING")


def _compares_what_is(steps: Sequence[Any], place: int) -> bool:
    right, left = itertools.islice(operands(steps, place), 2)
    last = right.last
    if last.opname != "LOAD_CONST" and last.argval in _CLASSES:
        return True
    if steps[place].opname != "IS_OP":
        return False
    if last.opname == "LOAD_CONST":
        return last.argval is not None and bool(left.variable)
    if any(each.last.opname == "LOAD_ATTR" and each.last.argval in _OF_KINDS for each in (left, right)):
        return True
    if isinstance(last.argval, str) and isinstance(getattr(torch, last.argval, None), _KINDS):
        return True
    is_kept = all(each.root and not each.variable for each in (left, right))  # in what variables refer to
    return is_kept and {left.root, right.root} != {"self"}


@functools.lru_cache(maxsize=4096)
def asked_variables(code: CodeType) -> frozenset[str]:
    """The variables of which code asks what they are, or what is in them, as `height is width` and `type(x)` do."""
    found, steps = set[str](), instructions(code)
    for place, each in enumerate(steps):
        if each.opname == "IS_OP" and steps[place - 1].opname != "LOAD_CONST":
            found |= {each.root for each in itertools.islice(operands(steps, place), 2)}
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval in _ASK_WHAT_IS:
            found.add(first_variable(steps[place + 1]))
    return frozenset(found - {""})


_ASK_WHAT_IS = ("type", "id", "callable")
"""Functions that ask nobody."""


@contextlib.contextmanager
def _profiled(function: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Have a function see this thread's calls, in place of a profiler, which goes on afterwards."""
    before = sys.getprofile()
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(before if callable(before) else None)
        _called.clear()
        _globals_of_torch.clear()
        if before is not None and hasattr(before, "enable"):  # cProfile's, before Python 3.12
            before.enable()
