"""Settings of the whole process that are others for a while, such as how often threads take turns.

No lock guards them: one that Ctrl-C leaves held would stop every thread that asks for the setting. What is interrupted
in here the next holder to end puts right; of threads that meet one may go on with the usual value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from miofind.process.forks import follow_forks

Value = TypeVar("Value")


class Holder:
    """Who holds a setting: for as long as it lives, though its end may be interrupted."""


class HeldSetting(Generic[Value]):
    """A setting that has a value of ours while anybody holds it, and then the one it had before.

    Args:
        read, write: the setting.
        held: its value meanwhile: one that no program sets by itself.
        gives_way: whether a usual value is to be replaced; a program's own choice may stay.
    """

    def __init__(
        self,
        read: Callable[[], Value],
        write: Callable[[Value], object],
        *,
        held: Value,
        gives_way: Callable[[Value], bool],
    ) -> None:
        self._read, self._write = read, write
        self._held, self._gives_way = held, gives_way
        self._holders: dict[int, weakref.ref[Holder]] = {}
        self._usual: Value | None = None
        follow_forks(self)

    def leave_parent(self) -> None:
        """Be as before in a forked child, which has not the threads that hold it; who forked it ends once more."""
        self._holders.clear()
        self._restore()

    def begin(self, holder: Holder) -> None:
        """Have it held by one more."""
        self._holders[id(holder)] = weakref.ref(holder)
        usual = self._read()
        if len(self._holders) == 1 and usual != self._held and self._gives_way(usual):
            self._usual = usual
            self._write(self._held)

    def end(self, holder: Holder) -> None:
        """Have it held by one less, and be as before with the last one; harmless when repeated."""
        self._holders.pop(id(holder), None)
        for name, each in list(self._holders.items()):
            if each() is None:  # its end was interrupted
                self._holders.pop(name, None)
        if not self._holders:
            self._restore()

    def _restore(self) -> None:
        if self._usual is not None and self._read() == self._held:  # else the program has set another one meanwhile
            self._write(self._usual)
