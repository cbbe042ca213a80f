"""Which layer of a network runs: the path of the innermost module whose forward is under way in this thread."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from miofind.torch.fused.compiled import path_without


class LayerNames:
    """Follows all modules' forwards while it is entered.

    A path is that of `named_modules` of the outermost module; that module itself has the name of its class.
    """

    def __init__(self) -> None:
        self._running = threading.local()
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerNames:
        self._hooks = [
            register_module_forward_pre_hook(self._began),
            register_module_forward_hook(self._ended, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def current(self) -> str:
        """The path of the module that runs, "" outside of all."""
        modules = self._modules
        return self._names.get(modules[-1], "") if modules else ""

    @property
    def _modules(self) -> list[Any]:
        """The modules under way in this thread, outermost first."""
        if not hasattr(self._running, "modules"):
            self._running.modules = []
        found: list[Any] = self._running.modules
        return found

    def _began(self, module: Any, arguments: Any) -> None:
        modules = self._modules
        if not modules and module not in self._names:
            self._names.update(
                {each: path_without(name) or type(each).__name__ for name, each in module.named_modules()}
            )
        modules.append(module)

    def _ended(self, module: Any, arguments: Any, result: Any) -> None:
        modules = self._modules
        if modules and modules[-1] is module:
            modules.pop()
