"""Checks in a network's code, such as `if size % 4: raise ValueError(...)` and `assert size % 4 == 0`.

torch.fx cannot tell whether what it computes holds. Where one answer has the code raise at once, the graph is that of
the other one, and asks again when it runs.
"""

from __future__ import annotations

import builtins
import dis
import linecache
from collections.abc import Collection
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from torch import fx


@dataclass(frozen=True, slots=True)
class Check:
    """A question of a network's code, and what it raises where the answer is another one than it needs.

    Attributes:
        answer: that it needs.
        kind: the name of an exception of Python's.
        message: of the exception.
    """

    answer: bool
    kind: str
    message: str


@fx.has_side_effect
def must_be(condition: Any, answer: bool, kind: str, message: str) -> None:
    """A step of a graph: what its network's code checks.

    Args:
        condition: what the code asks of a tensor or a size, truthy or falsy.
        answer: that it needs.
        kind: the name of the exception of Python's that it raises otherwise.
        message: of that exception.

    Raises:
        Exception: of that kind.
    """
    if isinstance(condition, fx.Proxy):  # a graph is traced again where it is unpickled, and where other tools read it
        condition.tracer.create_proxy("call_function", must_be, (condition, answer, kind, message), {})
        return
    is_met = answer if condition else not answer  # of a size that is a symbol torch.compile takes no `bool`
    if not is_met:
        raise getattr(builtins, kind)(message)


def check_of(error: Exception, asker: FrameType | None, given: bool, stand_ins: Collection[str]) -> Check | None:
    """The check that a network's code made with its last question; None where it raised for another reason.

    Args:
        error: what the code raised.
        asker: that which asked last.
        given: the answer that it was given.
        stand_ins: names of stand-ins in texts that the code made: a message of such says nothing of a call.
    """
    raised = _last(error.__traceback__)
    if raised is None or raised.tb_frame is not asker or _instruction(raised) != "RAISE_VARARGS":
        return None
    kinds = (kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    message = str(error)
    if not message or any(name in message for name in stand_ins):
        code = raised.tb_frame.f_code
        line = linecache.getline(code.co_filename, raised.tb_lineno).strip()
        message = f"{code.co_qualname}: {line}" if line else f"{code.co_qualname} raised {type(error).__name__}"
    return Check(not given, _with_a_message(next(kinds, "RuntimeError")), message)


def _with_a_message(kind: str) -> str:
    """The name of an exception that is made of a message alone."""
    return "ValueError" if kind.startswith("Unicode") else kind


def _last(at: TracebackType | None) -> TracebackType | None:
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at


def _instruction(at: TracebackType) -> str:
    return dis.opname[at.tb_frame.f_code.co_code[at.tb_lasti]]
