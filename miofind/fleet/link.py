"""An agent's line to the queue: a thread that claims, renews, finishes and reaps, and outlives outages."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from miofind import __version__
from miofind.errors import DatabaseError, described
from miofind.finddb import ProblemKey, RefusedEntryError
from miofind.fleet.campaign_options import options_of
from miofind.fleet.courier import Courier, Facts
from miofind.fleet.database import UnreachableError
from miofind.fleet.holdings import Holdings, Stage, key_of
from miofind.fleet.outbox import Outbox
from miofind.fleet.queue import REAP_S, RENEW_S, Queue
from miofind.fleet.values import Agent, Claimed, Kind
from miofind.tune.values import TuneOptions

logger = logging.getLogger(__name__)

BATCH_S = 25.0
MOST_JOBS = 64
"""Of a device, claimed ahead."""
MOST_A_CLAIM = 128
"""By one claim, which others that claim wait for: an agent of many devices takes several."""

_LOOK_S = 1.0
_LEAST_PAUSE_S = 0.2  # a thousand GPUs that tell of every problem by itself would be all that the server does
_IDLE_S = (0.5, 2.0)
_BEGUN_S = 1.0
_CAMPAIGNS_S = 5.0
_RETRY_S = (0.5, 10.0)


@dataclass(slots=True)
class Duty:
    """Something done every so often; `due` at a time of `time.monotonic`."""

    every_s: float
    work: Callable[[], object]
    due: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Where what is measured is kept.

    Attributes:
        local: the host's FindDB.
        server: the fleet's.
        courier: from the one to the other.
    """

    local: Facts
    server: Facts
    outbox: Outbox
    courier: Courier


class Link(threading.Thread):
    """Keeps an agent's holdings and the server's queue in step.

    Args:
        predecessors: dead agents whose FindDB this one has: what they held is free at once.

    Attributes:
        devices: how many members each kind has.
        idle_since: since when, of `time.monotonic`, there was nothing to do; None while there is.
        error: what the server refuses for good, or what went wrong here; it does nothing more then.
    """

    def __init__(
        self, agent: Agent, queue: Queue, holdings: Holdings, stores: Stores, *, predecessors: Iterable[UUID] = ()
    ) -> None:
        super().__init__(name="miofind-link", daemon=True)
        self.devices: dict[Kind, int] = {}
        self.idle_since: float | None = None
        self.error: Exception | None = None
        self._agent = agent
        self._queue = queue
        self._holdings = holdings
        self._stores = stores
        self._predecessors = list(predecessors)
        self._options: dict[int, TuneOptions | DatabaseError] = {}
        self._duties: list[Duty] = [
            Duty(RENEW_S, self._renew),
            Duty(_BEGUN_S, self._tell_begun),
            Duty(_CAMPAIGNS_S, self._follow_campaigns),
            Duty(REAP_S, self._reap_and_beat),
        ]
        self._claim_at: dict[Kind, float] = {}
        self._wake = threading.Event()
        self._over = threading.Event()
        self._is_draining = False
        self._is_in_doubt = True
        self._failures = 0

    @property
    def is_connected(self) -> bool:
        """Whether the server answered the last time."""
        return self.error is None and not self._is_in_doubt

    def add_duty(self, every_s: float, work: Callable[[], object]) -> None:
        """Have something else done on the server every so often, in this thread; it may raise UnreachableError."""
        self._duties.append(Duty(every_s, work))

    def wake(self) -> None:
        """Look now: there is something to tell, or a member has nothing to do."""
        self._wake.set()

    def run(self) -> None:
        """Keep in step until it is over."""
        while not self._over.is_set():
            try:
                self._step()
            except UnreachableError as error:
                self._wait_for_server(error)
            except Exception as error:  # the agent's thread raises it
                logger.error("the fleet's queue cannot be used: %s", described(error))
                self.error = error
                return
            else:
                self._failures = 0
                self._wake.wait(_LOOK_S)
                self._over.wait(_LEAST_PAUSE_S)
                self._wake.clear()

    def drain(self) -> None:
        """Claim nothing more, and give back what waits."""
        self._is_draining = True
        self._holdings.close()
        self.wake()

    def finish_by(self, deadline: float) -> bool:
        """Tell all that is to tell, until a time of `time.monotonic`; whether it was. Ends the thread."""
        self._over.set()
        self.wake()
        self.join(max(0.0, deadline - time.monotonic()))
        while not self.is_alive() and self.error is None:
            try:
                self._tell()
                self._beat("gone")
                return not self._holdings.holds
            except DatabaseError as error:
                logger.debug("not told yet: %s", error)
                if time.monotonic() >= deadline:
                    return False
                time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        return False

    def _wait_for_server(self, error: UnreachableError) -> None:
        if self._failures == 0:
            logger.warning("%s; the work goes on without it", error)
        least_s, most_s = _RETRY_S
        self._is_in_doubt = True
        pause_s = min(most_s, least_s * 2.0**self._failures) * random.uniform(0.5, 1.5)
        self._failures += 1
        self._over.wait(pause_s)

    def _step(self) -> None:
        if self._is_in_doubt:
            self._agree()
        self._tell()
        for duty in self._duties:
            if time.monotonic() >= duty.due:
                duty.work()
                duty.due = time.monotonic() + duty.every_s
        if not self._is_draining:
            for kind, count in tuple(self.devices.items()):
                self._claim(kind, count)
            self._note_idleness()

    def _agree(self) -> None:
        """Come to one mind with the server: answers to claims and renewals may have been lost."""
        self._queue.register(self._agent, __version__)
        while self._predecessors:
            self._queue.lose_worker(self._predecessors[-1])
            self._stores.outbox.buried(self._predecessors.pop())
        self._renew()
        self._queue.release_unknown(self._agent.id, self._holdings.holds)
        self._follow_campaigns()
        self._is_in_doubt = False

    def _tell_begun(self) -> None:
        """Tell the server what is being measured, what was measured in between left out."""
        begun = self._holdings.untold
        self._queue.begin(begun)
        self._holdings.told_begun(begun)

    def _tell(self) -> None:
        """Tell the server what has become of jobs."""
        finishes = self._holdings.finishes
        finished = self._queue.finish(finishes)
        if len(finished) < len(finishes):
            logger.info("%d jobs were finished that are no longer held here", len(finishes) - len(finished))
        self._holdings.forget(each.hold for each in finishes)
        for each in self._holdings.at(Stage.LOST):
            self._queue.lose(each.hold, f"a device's process was lost over it on {self._agent.host}")
            self._give_up([each])
        given_back = self._holdings.at(Stage.GIVEN_BACK)
        self._queue.release([each.hold for each in given_back])
        self._give_up(given_back)

    def _give_up(self, jobs: Sequence[Claimed]) -> None:
        self._stores.courier.also(jobs)
        self._holdings.forget(each.hold for each in jobs)

    def _renew(self) -> None:
        holds = self._holdings.holds
        renewed = self._queue.renew(holds)
        self._holdings.drop(set(holds) - renewed)

    def _follow_campaigns(self) -> None:
        paused = self._queue.paused(self._holdings.campaigns)
        if paused:
            self._holdings.give_back_waiting(paused)
        for kind in tuple(self.devices):
            self._queue.enrol(kind)

    def _reap_and_beat(self) -> None:
        self._beat("draining" if self._is_draining else "ready")
        lost = self._queue.reap(pause_s=REAP_S / 2)
        if lost:
            logger.info("%d jobs of workers that are gone are free again", lost)

    def _beat(self, state: str) -> None:
        holdings = self._holdings
        self._queue.beat(self._agent, state=state, problems=len(holdings.at(Stage.MEASURED)), age_s=holdings.unmerged_s)

    def _claim(self, kind: Kind, count: int) -> None:
        """Claim what the members of a kind measure in BATCH_S, where they have less than half of it."""
        load = self._holdings.load(kind.device)
        each = 2 if load.mean_s is None else min(MOST_JOBS, math.ceil(BATCH_S / max(load.mean_s, 1e-3)))
        wanted = count * each
        if 2 * load.waiting > wanted or time.monotonic() < self._claim_at.get(kind, 0.0):
            return
        if self._holdings.is_behind:
            logger.warning("the server is behind what was measured here: nothing is claimed until it has that")
            self._claim_at[kind] = time.monotonic() + _CAMPAIGNS_S
            return
        most = min(MOST_A_CLAIM, wanted - load.waiting)
        claimed = self._queue.claim(self._agent.id, kind, most, devices=count, waiting=load.waiting)
        if not claimed:
            self._claim_at[kind] = time.monotonic() + (_LOOK_S if load.waiting else random.uniform(*_IDLE_S))
            return
        self._take_in(claimed)

    def _take_in(self, claimed: Sequence[Claimed]) -> None:
        """Have jobs measured: note them where a successor would look, and have here what the server knows of them."""
        read = [self._with_options(each) for each in claimed]
        legible = [each for each in read if each.task is not None]
        try:
            self._stores.outbox.expect((key_of(each), each.hold) for each in legible)
        except DatabaseError:
            self._queue.release([each.hold for each in claimed])
            raise
        self._fetch(legible)
        self._holdings.add(read)

    def _with_options(self, claimed: Claimed) -> Claimed:
        if claimed.task is None:
            return claimed
        options = self._options_of(claimed.campaign)
        if isinstance(options, DatabaseError):
            return replace(claimed, task=None, refusal=str(options))
        return replace(claimed, task=replace(claimed.task, options=options))

    def _options_of(self, campaign: int) -> TuneOptions | DatabaseError:
        if campaign not in self._options:
            told = self._queue.options(campaign)
            try:
                self._options[campaign] = options_of(told)
            except DatabaseError as error:
                self._options[campaign] = error
        return self._options[campaign]

    def _fetch(self, claimed: Sequence[Claimed]) -> None:
        """Copy what the server knows: what others measured is not measured again, nor what killed their GPUs' children.

        A server that is away now, or a history that is refused or not legible, costs a measurement and no more.
        """
        keys = [key_of(each) for each in claimed]
        if len(keys) > 1 and self._is_fetched(keys):
            return
        is_away = False
        for key in keys:
            if self._is_fetched([key]):
                is_away = False
            elif is_away:
                return
            else:  # what is stored of it, or the server
                is_away = True

    def _is_fetched(self, keys: Sequence[ProblemKey]) -> bool:
        """Copy what the server knows of some problems; False, and nothing copied, where that cannot be done.

        What is refused of a single one is told of, and left there.
        """
        try:
            self._stores.local.add(self._stores.server.histories_of(keys))
        except RefusedEntryError as error:
            if len(keys) > 1:
                return False
            logger.warning("what the server knows of %s is not believed: %s", keys[0].network_config, error)
        except DatabaseError as error:
            logger.debug("what the server knows of %d problems is not fetched: %s", len(keys), error)
            return False
        return True

    def _note_idleness(self) -> None:
        if self._holdings.holds or any(time.monotonic() >= self._claim_at.get(kind, 0.0) for kind in self.devices):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = time.monotonic()
