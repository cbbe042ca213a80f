"""Brings what a host has measured to the server's FindDB, by content: to bring it twice changes nothing."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from miofind.errors import DatabaseError
from miofind.finddb import History, ProblemKey, RefusedEntryError
from miofind.fleet.holdings import Holdings, Stage, key_of
from miofind.fleet.outbox import ORPHANED, Outbox
from miofind.fleet.values import Claimed, Hold

logger = logging.getLogger(__name__)

MERGE_S = 2.0
LONGEST_MERGE_S = 60.0
MOST_AT_ONCE = 200
_BATCH = 20

MOST_UNMERGED = 5000
"""Problems, of some 50,000 rows, that a host measures ahead of the server."""
OLDEST_UNMERGED_S = 600.0


class Facts(Protocol):
    """A FindDB, as far as histories come and go: a `Store`."""

    def history(self, device: str, network_config: str) -> History | None:
        """All that is stored of a problem; None if nothing is."""

    def histories_of(self, keys: Iterable[ProblemKey]) -> list[History]:
        """What is stored of some problems, of those that anything is."""

    def add(self, histories: Iterable[History]) -> int:
        """Store histories, each entry once however often it comes; returns how many were new."""


class Courier(threading.Thread):
    """Merges measured problems every few seconds; where the server is away it tries again, ever more rarely.

    Args:
        local: the FindDB of this host.
        server: the fleet's.
    """

    def __init__(self, holdings: Holdings, outbox: Outbox, local: Facts, server: Facts) -> None:
        super().__init__(name="miofind-courier", daemon=True)
        self._holdings = holdings
        self._outbox = outbox
        self._local = local
        self._server = server
        self._others: deque[tuple[ProblemKey, Hold]] = deque((key, ORPHANED) for key in outbox.orphans())
        self._wake = threading.Event()
        self._is_over = False
        self._interval_s = MERGE_S

    @property
    def unmerged(self) -> int:
        """Problems that the server may lack."""
        return len(self._holdings.at(Stage.MEASURED)) + len(self._others)

    def run(self) -> None:
        """Merge until it is over."""
        while not self._is_over:
            self._wake.wait(self._interval_s * random.uniform(0.8, 1.2))
            self._wake.clear()
            try:
                self.merge()
                self._interval_s = MERGE_S
            except DatabaseError as error:
                self._interval_s = min(2 * self._interval_s, LONGEST_MERGE_S)
                logger.warning("what was measured waits for the server: %s", error)
            late = self._holdings.unmerged_s > OLDEST_UNMERGED_S
            self._holdings.is_behind = late or self.unmerged > MOST_UNMERGED

    def also(self, jobs: Iterable[Claimed]) -> None:
        """Merge problems, too, that were given up: what was found out before is true."""
        self._others.extend((key_of(each), each.hold) for each in jobs if each.task is not None)

    def hurry(self) -> None:
        """Merge now, where much waits or no more comes."""
        measured = len(self._holdings.at(Stage.MEASURED))
        if measured >= MOST_AT_ONCE or (measured and self._interval_s == MERGE_S and self._holdings.is_idle):
            self._wake.set()

    def finish_by(self, deadline: float) -> bool:
        """Merge all, until a time of `time.monotonic`; whether the server has everything. Ends the thread."""
        self._is_over = True
        self._wake.set()
        self.join(max(0.0, deadline - time.monotonic()))
        while self.unmerged and time.monotonic() < deadline and not self.is_alive():
            try:
                self.merge()
            except DatabaseError as error:
                logger.debug("not merged yet: %s", error)
                time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        return not self.unmerged

    def merge(self) -> None:
        """Bring the server all that is measured and not merged.

        Raises:
            DatabaseError: it cannot be reached, or the local FindDB cannot be read.
        """
        while self._others:
            batch = list(itertools.islice(self._others, _BATCH))
            self._bring([key for key, _ in batch])
            self._outbox.forget(batch)
            for _ in batch:
                self._others.popleft()
        measured = self._holdings.at(Stage.MEASURED)
        for start in range(0, len(measured), _BATCH):
            self._merge_jobs(measured[start : start + _BATCH])

    def _merge_jobs(self, batch: Sequence[Claimed]) -> None:
        refused = self._bring([key_of(each) for each in batch])
        self._outbox.forget((key_of(each), each.hold) for each in batch)
        for each in batch:
            if key_of(each) in refused:
                self._holdings.refused(each.hold.job, refused[key_of(each)])
        self._holdings.merged(each.hold.job for each in batch)

    def _bring(self, keys: Sequence[ProblemKey]) -> dict[ProblemKey, str]:
        """Merge problems; those that the server refuses, and why."""
        histories = self._local.histories_of(keys)
        try:
            self._server.add(histories)
            return {}
        except RefusedEntryError:
            return self._bring_one_by_one(histories)

    def _bring_one_by_one(self, histories: Sequence[History]) -> dict[ProblemKey, str]:
        refused = {}
        for history in histories:
            try:
                self._server.add([history])
            except RefusedEntryError as error:
                logger.error("the server does not take %s of %s: %s", history.network_config, history.device, error)
                refused[ProblemKey(device=history.device, network_config=history.network_config)] = str(error)
        return refused
