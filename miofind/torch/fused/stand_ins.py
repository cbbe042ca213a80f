"""What a network's code is given in place of tensors while torch.fx traces it.

A stand-in says what it stands for where that is known. Questions to which it has no answer make the code untraceable:
whatever it answered would decide which of the code's branches are in the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from torch import fx

from miofind.torch.fused.bytecode import instructions, opname_at
from miofind.torch.fused.kinds import Kind, kind_of_attribute
from miofind.torch.fused.refusals import Refusal
from miofind.torch.fused.watch import called_by
from miofind.torch.fused.writes import IN_PLACE_OPERATORS

_ASK_FOR_OTHERS = ("abc", "typing", "torch", "torch.nn.parameter")
"""Python modules of `isinstance` of abstract classes and parameters, and of `torch.is_tensor`."""
_ASK_FOR_CODE = (f"{__package__}.extremes",)
"""Python modules whose functions stand in the places of Python's, which have no frames of their own."""
_MAY_BE_NONE = ("grad", "grad_fn", "_grad", "_grad_fn", "_base", "_backward_hooks")
"""Attributes of tensors."""
_GIVES_A_DEFAULT = ("get", "pop", "popitem", "setdefault")
"""Methods of dictionaries, of which code may ask whether they gave None."""


class StandIn(fx.Proxy):
    """A stand-in of which `a += b` is a step in place, as it is of tensors: torch.fx takes it for `a = a + b`."""

    @property
    def stands_for(self) -> Kind:
        """The class of what it stands for; None where that is not known."""
        kind: Kind = self.tracer.kinds.get(self.node)
        return kind

    @property
    def is_given(self) -> bool:
        """Whether it stands for an argument or a parameter, which may have attributes that other tensors lack."""
        return bool(self.node.op in ("placeholder", "get_attr"))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        asker, kind = sys._getframe(1), self.stands_for
        if _asks_for_network(asker):
            return kind if kind is not None else _unknown()
        if _is_asked_by_torch(asker):
            return type(self)
        abstract: Any = asker.f_locals.get("cls") if asker.f_globals.get("__name__") == "abc" else None
        is_misleading = isinstance(abstract, type) and issubclass(type(self), abstract)  # which counts for those, too
        if kind is None or (is_misleading and not issubclass(kind, abstract)):
            _unknown()
        if not _asks_for_class(asker):
            raise Refusal("its code gives a tensor to code of C or TorchScript, which reads its memory")
        return kind

    def __getattr__(self, name: str) -> Any:
        asker = sys._getframe(1)
        if name == "_is_param":  # by which PyTorch asks tensors of other classes whether they are parameters
            raise AttributeError(name)
        if _is_asked_by_torch(asker):
            return Attribute(self, name)
        kind = self.stands_for
        if kind is not None and hasattr(kind, name):
            if name in _MAY_BE_NONE:
                raise Refusal(f"its code asks for {name} of a tensor")
            return Attribute(self, name)
        if kind is not None and not self.is_given:
            raise AttributeError(f"a {kind.__name__} has no {name}")
        if not _is_written(asker):
            raise Refusal(f"its code asks whether something has {name}")
        return self.tracer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not _is_asked_by_torch(sys._getframe(1)):
            raise Refusal(f"its code sets {name}")
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        if not _is_asked_by_torch(sys._getframe(1)):
            raise Refusal("its code looks up what it computes")
        return object.__hash__(self)

    def __len__(self) -> int:
        count: int | None = self.tracer.number_of_parts(self)
        if count is None:
            raise Refusal("its code asks how many there are of something that is not known")
        return count

    def __repr__(self) -> str:
        text: str = super().__repr__()
        if not _is_asked_by_torch(sys._getframe(1)):
            self.tracer.texts.add(text)
        return text


class Attribute(StandIn, fx.proxy.Attribute):
    """A stand-in for an attribute, which is no step of the graph where it is a method that is called."""

    @property
    def stands_for(self) -> Kind:
        """What the attribute is of what its owner stands for."""
        return kind_of_attribute(self.root.stands_for, self.attr)

    @property
    def is_given(self) -> bool:
        """Whether it is an argument of the network: an attribute never is."""
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.root.stands_for
        is_known = owner is not None and hasattr(owner, self.attr)
        if self.attr in _GIVES_A_DEFAULT or (self.root.is_given and not is_known):
            raise Refusal(f"its code calls {self.attr} of something other than a tensor")
        return super().__call__(*args, **kwargs)


class NoArguments(tuple[Any, ...]):
    """Further arguments that there are none of, which code may hand on (`f(*args)`) and do nothing else with."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(range(_none_if_handed_on(sys._getframe(1))))

    def __len__(self) -> int:
        return _none_if_handed_on(sys._getframe(1))

    def _asked(self, *_: Any) -> Any:
        raise Refusal(_ASKS_FOR_MORE)

    __getitem__ = __contains__ = __eq__ = __add__ = __hash__ = _asked


class NoNames(dict[str, Any]):
    """The same by names (`f(**named)`)."""

    def _asked(self, *_: Any) -> Any:
        raise Refusal(_ASKS_FOR_MORE)

    __getitem__ = __setitem__ = __len__ = __contains__ = __eq__ = __or__ = __hash__ = _asked  # type: ignore[assignment]
    get = pop = setdefault = update = items = keys = values = copy = _asked  # type: ignore[assignment]


_ASKS_FOR_MORE = "its code asks for further arguments"


def _none_if_handed_on(asker: FrameType) -> int:
    """Of what code hands on to a call, 0.

    Raises:
        TraceError: it does something else with it.
    """
    code, at = asker.f_code, asker.f_lasti
    names = [each.opname for each in instructions(code) if each.offset >= at][:2]
    if "CALL_FUNCTION_EX" not in names[:1] and names not in (
        ["LIST_EXTEND", "LIST_TO_TUPLE"],
        ["LIST_EXTEND", "CALL_INTRINSIC_1"],
    ):
        raise Refusal(_ASKS_FOR_MORE)
    return 0


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


def _as_number(self: Any, *_: Any) -> Any:
    raise Refusal("its code makes a number of what it computes")


for _name in ("__float__", "__int__", "__index__", "__complex__", "__round__", "__divmod__", "__rdivmod__"):
    setattr(StandIn, _name, _as_number)
for _operator in IN_PLACE_OPERATORS:
    setattr(StandIn, f"__{_operator.__name__}__", _in_place(_operator))


def _is_asked_by_torch(asker: FrameType | None) -> bool:
    """Whether code of PyTorch's asks, which is to know stand-ins for what they are."""
    while asker is not None and asker.f_globals.get("__name__") in (*_ASK_FOR_OTHERS, *_ASK_FOR_CODE):
        asker = asker.f_back
    name = "" if asker is None else asker.f_globals.get("__name__", "")
    return name.startswith("torch.") or name == __name__


def _asks_for_network(asker: FrameType) -> bool:
    """Whether it is `tree_map_only` of PyTorch's that asks, by a class that the network's code has given it."""
    return asker.f_code.co_name == "pred" and asker.f_globals.get("__name__") == "torch.utils._pytree"


def _unknown() -> NoReturn:
    raise Refusal("its code asks for the class of something that is not known")


def _asks_for_class(asker: FrameType) -> bool:
    """Whether code asks for a class by `isinstance`, a pattern or `__class__`; C's does to read memory behind."""
    if asker.f_globals.get("__name__") in _ASK_FOR_OTHERS or called_by(asker) in (isinstance, issubclass):
        return True
    is_of_python = opname_at(asker.f_code, asker.f_lasti) in ("LOAD_ATTR", "LOAD_METHOD", "MATCH_CLASS")
    return called_by(asker) is None and is_of_python


def _is_written(asker: FrameType) -> bool:
    """Whether code has the attribute that it asks for after a dot; `hasattr` and `getattr` may do without it."""
    return opname_at(asker.f_code, asker.f_lasti) in ("LOAD_ATTR", "LOAD_METHOD")
