"""What a kernel uses of a multiprocessor, as the log of `ptxas -v` reports it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STACK_FRAME = re.compile(r"(\d+) bytes stack frame")
_STACK_TOTAL = re.compile(r"(\d+) bytes cumulative stack size")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """What one entry of a binary uses.

    Attributes:
        registers: a thread.
        spill_bytes: registers spilled by the entry and the functions it calls, a thread: the larger of the code's
            stores and loads.
        stack_bytes: local memory for the call stack, a thread.
        shared_bytes: static shared memory, a block.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def parse_resources(log: str) -> Mapping[str, KernelResources]:
    """Resources by entry, from the log of a compilation with `--ptxas-options=-v`.

    Called functions that were not inlined follow their entry in the log, and their spills count as its own.
    """
    sections = _ENTRY.split(log)
    found = {name: _of_section(text) for name, text in zip(sections[1::2], sections[2::2], strict=True)}
    return MappingProxyType(found)


def _of_section(text: str) -> KernelResources:
    spills = [(int(stores), int(loads)) for stores, loads in _SPILLS.findall(text)]
    return KernelResources(
        registers=_first(_REGISTERS, text),
        spill_bytes=max(sum(stores for stores, _ in spills), sum(loads for _, loads in spills)),
        stack_bytes=max(_first(_STACK_FRAME, text), _first(_STACK_TOTAL, text)),
        shared_bytes=_first(_SHARED, text),
    )


def _first(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else 0
