"""What Python has compiled code to, and where in it something was raised."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Iterator, Sequence
from types import CodeType, TracebackType
from typing import NamedTuple


@functools.lru_cache(maxsize=4096)
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of code, without those that only prepare the next one."""
    return tuple(each for each in dis.get_instructions(code) if each.opname not in ("EXTENDED_ARG", "PRECALL"))


class Operand(NamedTuple):
    """What computes an operand of an instruction.

    Attributes:
        last: the last instruction.
        root: the variable that it begins with; "" for none.
        variable: that variable, where the operand is nothing else; "" otherwise.
    """

    last: dis.Instruction
    root: str
    variable: str


def operands(steps: Sequence[dis.Instruction], place: int) -> Iterator[Operand]:
    """The operands of the instruction at a place of code without branches there, the last one first."""
    end = place
    while end > 0:
        begin, pushed = end, 0
        while begin > 0 and pushed < 1:
            begin -= 1
            pushed += _pushed(steps[begin])
        variables = _variables(steps[begin])[-pushed:] if pushed > 0 else ()
        *others, root = variables or ("",)  # an instruction may load operands of their own before this one
        yield Operand(steps[end - 1], root, root if begin == end - 1 else "")
        for name in reversed(others):
            yield Operand(steps[begin], name, name)
        end = begin
    yield from itertools.repeat(Operand(steps[0], "", ""))


def first_variable(step: dis.Instruction) -> str:
    """The first variable that an instruction loads; "" where it loads none."""
    return next(iter(_variables(step)), "")


def _variables(step: dis.Instruction) -> tuple[str, ...]:
    """The variables that an instruction loads; of Python 3.13 on it may load two."""
    if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
        return ()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return names[-step.opname.count("LOAD_") :]


def _pushed(step: dis.Instruction) -> int:
    """By how much an instruction makes the stack longer, with the one that only prepares a call."""
    if step.opname == "CALL":
        return -1 - (step.arg or 0)
    if step.opname == "STORE_FAST_LOAD_FAST":
        return 1  # what it stores is no operand's
    return dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None)


def opname_at(code: CodeType, offset: int) -> str:
    """The name of the instruction at a place, such as that of a frame or a traceback."""
    return dis.opname[code.co_code[offset]]


def raised_at(error: BaseException) -> TracebackType | None:
    """The innermost frame that an exception came from, with the place there; None where it was not raised."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at
