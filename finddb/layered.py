"""The user's FindDB over the shipped ones, and what happens where the user's cannot be used.

In library mode nothing that befalls a database stops a find: it goes on in memory, with one warning. In strict mode,
the mode of commands about databases, errors reach the caller.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from miofind.errors import DatabaseError
from miofind.finddb import location, ranking
from miofind.finddb.answers import Answer
from miofind.finddb.store import Store
from miofind.finddb.validation import RefusedEntryError
from miofind.finddb.values import History, Recheck, Row, Scope, Verdict

logger = logging.getLogger("miofind")

Result = TypeVar("Result")

_IN_MEMORY = "Going on in memory: what is found from now on ends with this process."


class LayeredStore:
    """FindDBs in the order they are asked: the user's, which is written to, then the shipped ones.

    Args:
        user: None for one in memory.
        shipped: only read.
        strict: raise where the user's FindDB cannot be used, instead of going on in memory.

    Methods raise DatabaseError or SchemaVersionError in strict mode where a database cannot be used; in either mode
    where what they are given cannot be stored.
    """

    def __init__(self, user: Store | None, shipped: Sequence[Store] = (), *, strict: bool = False) -> None:
        self._layers = (user or Store(location.MEMORY), *shipped)
        self._opened = list(self._layers)
        self._strict = strict
        self._closed = False
        self._warned: set[Store] = set()
        self._warned_of_rivals: set[Store] = set()
        self._lock = threading.Lock()
        _in_use.add(self)

    def leave_parent(self) -> None:
        """Make the lock anew in a forked child: a thread of the parent may have held it."""
        self._lock = threading.Lock()

    @property
    def user(self) -> Store:
        """The FindDB that is written to: the user's file, or memory where that cannot be used."""
        return self._layers[0]

    @property
    def layers(self) -> tuple[Store, ...]:
        """The FindDBs in force, in the order they are asked."""
        return self._layers

    @property
    def strict(self) -> bool:
        """Whether errors of databases reach the caller."""
        return self._strict

    def answer(self, device: str, network_config: str) -> Answer | None:
        """The answer of the first FindDB that has one, None if none has."""
        return next(self.answers(device, network_config), None)

    def answers(self, device: str, network_config: str) -> Iterator[Answer]:
        """Every FindDB's answer, the user's first, each read when it is its turn: mostly the first will do."""
        for layer in self._layers:
            found = self._read(layer, lambda store: store.answer(device, network_config))
            if found is not None:
                yield found

    def best_rows(
        self, device: str, network_config: str, *, holds: Callable[[Row], bool], admits: Callable[[Row], bool]
    ) -> list[Row]:
        """The best rows of all FindDBs, in rank order.

        An answer has few rows of each solver: they may all be of a kind that a request does not take.

        Args:
            holds: which rows count, failures too: those of other code say nothing of any.
            admits: which of those in force then to choose from.
        """
        histories = self.histories(device, network_config)
        rows = ranking.usable_rows(row for history in histories for row in history.rows if holds(row))
        verdicts = [verdict for history in histories for verdict in history.verdicts]
        return ranking.best_rows(filter(admits, rows), verdicts)

    def histories(self, device: str, network_config: str) -> tuple[History, ...]:
        """All that every FindDB holds of a problem, failures too, the user's first."""
        return self._held(self._layers, device, network_config)

    def record(
        self,
        device: str,
        network_config: str,
        rows: Iterable[Row] = (),
        *,
        scope: Scope | None = None,
        environment: Mapping[str, str] | None = None,
        verdict: Verdict | None = None,
        notes: Collection[str] | None = None,
    ) -> Answer | None:
        """Store measurements in the user's FindDB, as `Store.record` does.

        What the FindDBs below hold of the problem is copied up first, so that the user's answer alone stands for all.
        """
        rows = tuple(rows)

        def write(store: Store) -> Answer | None:
            others = [layer for layer in self._layers if layer is not store]
            self._copy_up(store, self._held(others, device, network_config))
            return store.record(
                device, network_config, rows, scope=scope, environment=environment, verdict=verdict, notes=notes
            )

        return self._write(write)

    def rivals(self, device: str, first: str, end: str) -> list[tuple[str, Row]]:
        """The times of other libraries that the FindDBs hold, as `Store.rivals` gives them.

        A FindDB whose times cannot be read goes on answering: comparisons are lost, and no solution.
        """
        found = []
        for layer in self._layers:
            try:
                if layer.read_only or layer.exists:
                    found += layer.rivals(device, first, end)
            except DatabaseError as error:
                self._do_without_rivals(layer, error)
        return found

    def record_rival(
        self, device: str, network_config: str, row: Row, *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Store a rival's time in the user's FindDB, which copies nothing up: the answers stay what they are."""
        self._write(lambda store: store.record(device, network_config, [row], environment=environment))

    def revisions(self) -> list[str]:
        """For each FindDB in force its name and its `Store.revision`, "" where it holds nothing."""
        return [f"{layer.where} {self._read(layer, Store.revision) or ''}" for layer in self._layers]

    @property
    def is_recorded(self) -> bool:
        """Whether the FindDB that is written to holds anything so far, or is in memory."""
        return self._read(self.user, lambda store: True) is not None

    def queue_recheck(self, device: str, network_config: str, reason: str) -> bool:
        """Note in the user's FindDB that a problem wants measuring again; returns whether that is news."""
        return self._write(lambda store: store.queue_recheck(device, network_config, reason))

    def rechecks(self, device: str | None = None) -> tuple[Recheck, ...]:
        """The notes in the user's FindDB, the oldest first."""
        return self._read(self.user, lambda store: store.rechecks(device)) or ()

    def clean(self, device: str, network_config: str) -> int:
        """Forget a problem in the user's FindDB; returns how many rows went. The shipped ones answer as before."""
        return self._write(lambda store: store.clean(device, network_config))

    def close(self) -> None:
        """Close all FindDBs. Harmless when repeated."""
        with self._lock:
            self._closed = True
            for store in self._opened:
                store.close()

    def __enter__(self) -> LayeredStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _copy_up(self, store: Store, histories: Sequence[History]) -> None:
        for history in histories:
            try:
                store.add([history])
            except RefusedEntryError as error:  # what was measured must not be lost for what another file holds
                logger.warning("%s %s is not copied: %s", history.device, history.network_config, error)

    def _held(self, layers: Sequence[Store], device: str, network_config: str) -> tuple[History, ...]:
        found = (self._read(layer, lambda store: store.history(device, network_config)) for layer in layers)
        return tuple(history for history in found if history is not None)

    def _read(self, layer: Store, read: Callable[[Store], Result]) -> Result | None:
        try:
            if not layer.read_only and not layer.exists:
                return None  # a look-up makes no file
            return read(layer)
        except RefusedEntryError:
            raise
        except DatabaseError as error:
            self._do_without(layer, error, is_readable=False)
            return None

    def _write(self, write: Callable[[Store], Result]) -> Result:
        layer = self.user
        try:
            return write(layer)
        except RefusedEntryError:
            raise
        except DatabaseError as error:
            self._do_without(layer, error, is_readable=True)
            return write(self.user)

    def _do_without(self, layer: Store, error: DatabaseError, *, is_readable: bool) -> None:
        """Take a FindDB out of use, or out of being written to; raise instead in strict mode."""
        with self._lock:
            if self._strict or self._closed:
                raise error
            layers = self._layers
            is_user = layer is layers[0]
            if is_user:
                layers = (Store(location.MEMORY), *layers)
                self._opened.append(layers[0])
            if not is_readable:
                layers = tuple(store for store in layers if store is not layer)
            self._layers = layers
            if layer in self._warned:
                return
            self._warned.add(layer)
        if is_user:
            logger.warning("%s. %s", error, _IN_MEMORY)
        else:
            logger.warning("%s. Going on without it.", error)

    def _do_without_rivals(self, layer: Store, error: DatabaseError) -> None:
        """Warn once that a FindDB's times of other libraries are left out; raise instead in strict mode."""
        with self._lock:
            if self._strict or self._closed:
                raise error
            if layer in self._warned_of_rivals:
                return
            self._warned_of_rivals.add(layer)
        logger.warning("%s. Going on without its times of other libraries.", error)


def open_layered(database: str | Path | None = None, *, strict: bool = False) -> LayeredStore:
    """The user's FindDB over the shipped ones; nothing is opened before its first use.

    Args:
        database: the user's FindDB, a file's path or a server's URL; None for MIOFIND_DB, else a file in the user's
            data directory.
        strict: raise where it cannot be used, instead of going on in memory with one warning.

    Raises:
        DatabaseError: `database`, or in strict mode MIOFIND_DB, cannot be the address of a FindDB; MIOFIND_SYSTEM_DB
            names nothing that exists.
    """
    try:
        user = Store(location.user_path() if database is None else database)
    except DatabaseError as error:
        if strict or database is not None:
            raise
        logger.warning("MIOFIND_DB: %s. %s", error, _IN_MEMORY)
        user = Store(location.MEMORY)
    return LayeredStore(user, [Store(each, read_only=True) for each in location.system_addresses()], strict=strict)


_in_use: weakref.WeakSet[LayeredStore] = weakref.WeakSet()


def _leave_parent() -> None:
    for layered in list(_in_use):
        layered.leave_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parent)
