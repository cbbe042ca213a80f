"""By how many ways code can have the modules of a network: in each other, in lists and objects, by methods."""

from __future__ import annotations

import collections
import gc
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from miofind.torch.fused.watch import is_torchs

_NOT_ENTERED = (type, ModuleType, FunctionType)
"""What no copy of a network has copies of."""
_OF_STATES = ("_load_state_dict_post_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
"""Hooks of modules that no call runs."""


class References:
    """What refers to the modules of a network.

    Args:
        root: the network.

    Attributes:
        shared: the modules, by identity, that code may have by another way than from the network's code down.
        methods: by the identity of a module, functions of it that something holds as its methods, such as hooks.
        classes: those of objects that the network has.
    """

    def __init__(self, root: Any) -> None:
        self.shared = set[int]()
        self.methods: dict[int, list[FunctionType]] = collections.defaultdict(list)
        self.classes = set[type]()
        times = self._times_held(root)
        if times[id(root)]:
            self.shared.add(id(root))
        for path, module in root.named_modules():
            above = root.get_submodule(path.rpartition(".")[0])
            if path and (times[id(module)] != 1 or id(above) in self.shared):
                self.shared.add(id(module))

    def _times_held(self, root: Any) -> collections.Counter[int]:
        times = collections.Counter[int]()
        pending, seen = [root], {id(root)}
        seen |= {id(vars(module).get(name)) for module in root.modules() for name in _OF_STATES}
        while pending:
            held: Any = pending.pop()
            if type(held) is MethodType and self._is_read(held):
                function: Any = held.__func__
                self.methods[id(held.__self__)].append(function)
                referents = [each for each in gc.get_referents(held) if each is not held.__self__]
            else:
                referents = gc.get_referents(held)
            for each in referents:
                if issubclass(type(each), nn.Module):
                    times[id(each)] += 1
                if id(each) not in seen and not issubclass(type(each), _NOT_ENTERED):
                    seen.add(id(each))
                    pending.append(each)
                    self.classes.add(type(each))
        return times

    @staticmethod
    def _is_read(method: MethodType) -> bool:
        """Whether a method is a module's, and its code is known."""
        function: Any = method.__func__
        is_own = isinstance(function, FunctionType) and not is_torchs(function.__module__)
        return issubclass(type(method.__self__), nn.Module) and is_own
