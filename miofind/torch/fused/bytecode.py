"""What Python has compiled code to, and where in it something was raised."""

from __future__ import annotations

import dis
import functools
from types import CodeType, TracebackType


@functools.lru_cache(maxsize=4096)
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of code, without those that only prepare the next one."""
    return tuple(each for each in dis.get_instructions(code) if each.opname not in ("EXTENDED_ARG", "PRECALL"))


def opname_at(code: CodeType, offset: int) -> str:
    """The name of the instruction at a place, such as that of a frame or a traceback."""
    return dis.opname[code.co_code[offset]]


def raised_at(error: BaseException) -> TracebackType | None:
    """The innermost frame that an exception came from, with the place there; None where it was not raised."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at
