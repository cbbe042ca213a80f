"""The graph of a network for inference, by torch.fx; nothing where the graph would compute something else.

torch.fx runs a network's code with stand-ins for tensors. What code does beside computing with them is in no graph:
that of blocks that change autocast or the recording of gradients, of autograd.Functions with a backward of their own,
of random numbers and of attributes that it sets. Such code cannot be traced.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.utils._python_dispatch import TorchDispatchMode

from miofind.torch.fused.graph_steps import IN_PLACE_OPERATORS, has_hooks, is_convolution
from miofind.torch.fused.module import FusedConvolution


class DependsOnNone(Exception):
    """A module's graph is another one where an argument is left out."""


def traced(module: Any) -> fx.Graph:
    """The graph of a module, in which submodules that cannot be traced are single operations.

    An argument in it stands for a tensor. Where code asks whether one `is None`, the graph would only be right for
    calls that give it, or only for those that do not.

    Raises:
        Exception: whatever the module's own code raises when it is given no tensors.
    """
    opaque: set[Any] = set()
    graph = _traced_around(module, opaque)
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.default is None:
            try:
                with _watched():
                    without = Tracer(opaque).trace(module, {name: None})
            except TraceError:
                same = False
            except Exception:  # it cannot do without
                continue
            else:
                same = _steps_without(graph, name) == _steps_without(without, name)
            if not same:
                raise DependsOnNone(f"its code asks whether {name} is None")
    return graph


def _traced_around(module: Any, opaque: set[Any]) -> fx.Graph:
    """The graph of a module; the submodules that cannot be traced are added to `opaque`."""
    while True:
        tracer = Tracer(opaque)
        try:
            with _watched():
                return tracer.trace(module)
        except Exception:
            if tracer.failed is None or tracer.failed in opaque:
                raise
            opaque.add(tracer.failed)


def _steps_without(graph: fx.Graph, name: str) -> list[str]:
    """What a graph computes where an argument is None, as texts."""

    def seen(node: fx.Node) -> fx.Node | None:
        return None if node.op == "placeholder" and node.target == name else node

    return [
        f"{node.name} {node.op} {node.target} {fx.map_arg((node.args, node.kwargs), seen)}"
        for node in graph.nodes
        if node.op != "placeholder" and getattr(node.target, "__name__", "") != "_assert_is_none"
    ]


class Tracer(fx.Tracer):
    """Takes modules with hooks for single operations: inlined they would lose them.

    Attributes:
        opaque: further modules that are single operations, since they cannot be traced.
        failed: the innermost submodule whose code raised; None where that was the network's own.
    """

    def __init__(self, opaque: Collection[Any] = ()) -> None:  # a GraphModule that is unpickled makes one without
        super().__init__()
        self.opaque = opaque
        self.failed: Any = None
        self._modes = _modes()

    def create_node(self, *arguments: Any, **named: Any) -> fx.Node:
        """A step; none where code has changed a mode for it, which a graph does not tell."""
        if _modes() != self._modes:
            raise TraceError("its code changes autocast or the recording of gradients, or has a backward of its own")
        return super().create_node(*arguments, **named)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the result of a step."""
        return _Proxy(node, self)

    def is_leaf_module(self, m: Any, module_qualified_name: str) -> bool:
        is_single = isinstance(m, FusedConvolution) or is_convolution(m) or has_hooks(m) or m in self.opaque
        return is_single or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            is_part = any(each is m for each in self.root.modules())  # else code made it just now, and will make others
            self.failed = m if self.failed is None and is_part else self.failed
            raise


class _Proxy(fx.Proxy):
    """A stand-in of which `a += b` is a step in place, as it is of tensors: torch.fx takes it for `a = a + b`.

    A network's code that asks whether an argument of its is a tensor is told so.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        is_argument = self.node.op == "placeholder" and not asks.startswith("torch.")
        return torch.Tensor if is_argument else _Proxy


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _operator in IN_PLACE_OPERATORS:
    setattr(_Proxy, f"__{_operator.__name__}__", _in_place(_operator))


def _modes() -> tuple[Any, ...]:
    """What blocks of code may change for what is computed in them."""
    kinds = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts)


class _NoRandomNumbers(TorchDispatchMode):
    """Refuses random numbers: they are drawn while code is traced, and would be constants of the graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError("its code draws random numbers")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Refuse what this thread's code does beside computing, while it is traced."""
    autocast, thread = torch.amp.autocast_mode.autocast, threading.get_ident()
    enter, set_attribute = autocast.__enter__, nn.Module.__setattr__

    def entered(self: Any) -> Any:
        if threading.get_ident() == thread:  # also a block that switches off what is off now
            raise TraceError("its code has a block of autocast")
        return enter(self)

    def set_to(self: Any, name: str, value: Any) -> None:
        is_of_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        if threading.get_ident() == thread and not is_of_torch:
            raise TraceError(f"its code sets {name}")
        set_attribute(self, name, value)

    autocast.__enter__, nn.Module.__setattr__ = entered, set_to
    try:
        with _NoRandomNumbers():
            yield
    finally:
        autocast.__enter__, nn.Module.__setattr__ = enter, set_attribute
