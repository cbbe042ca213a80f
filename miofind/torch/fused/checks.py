"""Checks in a network's code, such as `if size % 4: raise ValueError(...)` and `assert size % 4 == 0`.

torch.fx cannot tell whether what it computes holds. Where one answer has the code raise at once, the graph is that of
the other one, and asks again when it runs.
"""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Collection
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import fx

from miofind.torch.fused.bytecode import opname_at, raised_at


@dataclass(frozen=True, slots=True)
class Check:
    """A question of a network's code, and what it raises where the answer is another one than it needs.

    Attributes:
        answer: that it needs.
        kind: of the exception, the names of its class and of those above it, such as "nets.SizeError ValueError".
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
        kind: of the exception that it raises otherwise; see `Check`.
        message: of that exception.

    Raises:
        Exception: of the first of those classes that is to be had.
    """
    if isinstance(condition, fx.Proxy):  # a graph is traced again where it is unpickled, and where other tools read it
        condition.tracer.create_proxy("call_function", must_be, (condition, answer, kind, message), {})
        return
    is_met = answer if condition else not answer  # of a size that is a symbol torch.compile takes no `bool`
    if not is_met:
        raise next(found for found in map(_found, kind.split()) if found is not None)(message)


@fx.has_side_effect
def must_have(parts: Any, count: int) -> None:
    """A step of a graph: that a tensor is cut into as many parts as its network's code was given.

    Raises:
        ValueError: it is not, since it is too small.
    """
    if isinstance(parts, fx.Proxy):  # as above
        parts.tracer.create_proxy("call_function", must_have, (parts, count), {})
    elif len(parts) != count:
        raise ValueError(f"a tensor is cut into {len(parts)} parts, {count} were told when the network was fused")


def check_of(
    error: Exception, asker: FrameType | None, place: int, given: bool, stand_ins: Collection[str]
) -> Check | None:
    """The check that a network's code made with its last question; None where it raised for another reason.

    Args:
        error: what the code raised.
        asker: that which asked last.
        place: of its question, in its instructions.
        given: the answer that it was given.
        stand_ins: names of stand-ins in texts that the code made: a message of such says nothing of a call.
    """
    raised = raised_at(error)
    if raised is None or raised.tb_frame is not asker or opname_at(asker.f_code, raised.tb_lasti) != "RAISE_VARARGS":
        return None
    if not _leads_to(asker.f_code, place, raised.tb_lasti):  # something else decided, such as the class of a stand-in
        return None
    message = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
    if not message or any(name in message for name in stand_ins):
        code = raised.tb_frame.f_code
        line = linecache.getline(code.co_filename, raised.tb_lineno).strip()
        message = f"{code.co_qualname}: {line}" if line else f"{code.co_qualname} raised {type(error).__name__}"
    kinds = [_name(kind) for kind in type(error).__mro__ if issubclass(kind, Exception) and _is_made_of(kind, message)]
    return Check(not given, " ".join(kinds), message)


def _leads_to(code: CodeType, question: int, end: int) -> bool:
    """Whether an answer to a question alone leads to an instruction: nothing else decides on the way."""
    steps = [*dis.get_instructions(code)]  # all, since others lead to each
    numbers = {each.offset: number for number, each in enumerate(steps)}
    at = next((number for number in reversed(range(len(steps))) if steps[number].offset <= question), len(steps))
    while at < len(steps) and not _is_branch(steps[at]):
        at += 1
    if at == len(steps):
        return False
    for begin in (at + 1, numbers[steps[at].argval]):
        number, seen = begin, set[int]()
        while number < len(steps) and number not in seen and not _is_branch(steps[number]):
            seen.add(number)
            if steps[number].offset == end:
                return True
            name = steps[number].opname
            if name.startswith(("RETURN", "RAISE", "RERAISE")):
                break
            number = numbers[steps[number].argval] if name.startswith("JUMP_") else number + 1
    return False


def _is_branch(step: dis.Instruction) -> bool:
    return ("JUMP" in step.opname and "IF" in step.opname) or step.opname in ("FOR_ITER", "SEND")


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _found(name: str) -> Any:
    """A class by its name; None where this program has none."""
    module, _, last = name.rpartition(".")
    return getattr(sys.modules.get(module or "builtins"), last, None)


def _is_made_of(kind: type, message: str) -> bool:
    """Whether an exception can be had by its name, and made of a message alone."""
    try:
        return _found(_name(kind)) is kind and kind(message).args == (message,)
    except Exception:  # whatever a class of a network's raises
        return False
