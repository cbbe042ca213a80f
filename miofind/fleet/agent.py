"""The agent of a host: a member for each of its devices, which measure what the fleet's queue has for them.

Rows go into the host's FindDB as in any tuning, and from there to the server's. While the server is away the members go
on with what was claimed.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import uuid4

from miofind.device.device import Place
from miofind.errors import InvalidOptionError
from miofind.finddb import ProblemKey
from miofind.fleet import health
from miofind.fleet.canary import EVERY_PROBLEMS, EVERY_S, SUSPECT_EVERY_S, canary_tasks, time_of
from miofind.fleet.courier import Courier, Facts
from miofind.fleet.database import FleetDatabase
from miofind.fleet.holdings import GpuTasks, Holdings, Stage
from miofind.fleet.link import Link, Stores
from miofind.fleet.metrics import Metric
from miofind.fleet.outbox import Outbox
from miofind.fleet.queue import Queue
from miofind.fleet.stack import kind_of
from miofind.fleet.values import Agent, GpuState, Kind
from miofind.runtime.handle import Handle
from miofind.tune.device_processes import DeviceProcesses
from miofind.tune.values import TuneFinished, TuneLost, TuneOptions, TuneStarted, WorkerEvent

logger = logging.getLogger(__name__)

MEMBERS_DRAIN_S = 12.0
"""How long a member may take for the problem that it is at; then it gives it back."""
DRAIN_S = 30.0
_LOOK_S = 0.5
_HEALTH_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """How an agent ended.

    Attributes:
        done: problems that were measured, or were known.
        failed: problems without a solution.
        lost: what became of the devices that no longer answer.
        is_merged: whether the server has all that was measured; else the next agent here brings it.
        was_interrupted: whether a signal ended it.
    """

    done: int
    failed: int
    lost: tuple[str, ...]
    is_merged: bool
    was_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """A problem that a device has measured, and when it began, in the form of a row's `created_at`."""

    key: ProblemKey
    begun_at: str

    def rows(self, local: Facts) -> list[str]:
        """Ids of the rows that came of it."""
        history = local.history(self.key.device, self.key.network_config)
        return [row.id for row in history.rows if row.created_at >= self.begun_at] if history is not None else []


class Member(threading.Thread):
    """One device's process, and the thread that serves it.

    Args:
        members: of the agent, which share the host's processors.

    Attributes:
        device_name: its UUID, or that of the place on this host.
        lost: why it no longer answers, "" while it does.
        unproven: what it has measured since its canaries were right.
        error: what would fail every problem.
    """

    def __init__(self, handle: Handle, holdings: Holdings, *, members: int) -> None:
        device = handle.device
        super().__init__(name=f"miofind-member-{device.index}", daemon=True)
        self.device_name = device.uuid or f"{device.place}:{socket.gethostname()}:{max(device.index, 0)}"
        self.kind = kind_of(device, handle.registry)
        self.tasks = GpuTasks(holdings, device.identity)
        self.done = self.failed = 0
        self.lost = ""
        self.error: Exception | None = None
        self.told_lost = False
        self.canary_times: dict[str, float] = {}
        on_cuda = device.place is Place.CUDA
        self._canaries = canary_tasks(handle) if on_cuda else ()
        self._canaries_left = 0
        self._canaries_at = -math.inf
        self._done_before = 0
        self.unproven: list[Measured] = []
        self._begun_at = ""
        self._holdings = holdings
        self._processes = DeviceProcesses([handle], TuneOptions(), self.tasks, compiles=on_cuda, share=members)

    def run(self) -> None:
        """Measure until nothing more is given out."""
        try:
            for event in self._processes.events():
                self._take(event)
        except Exception as error:  # the agent's thread raises it
            self.error = error

    def stop(self) -> None:
        """End its process, by force where it must be; what it was at is given back."""
        for event in self._processes.stop():
            self._take(event)

    @property
    def follows_canaries(self) -> bool:
        """Whether its device has any; there are none on the CPU place, whose times vary."""
        return bool(self._canaries)

    def ask_canaries(self) -> None:
        """Have its device measure its canaries where it is time."""
        every_s = SUSPECT_EVERY_S if self.tasks.is_held else EVERY_S
        is_due = time.monotonic() - self._canaries_at >= every_s or self.done - self._done_before >= EVERY_PROBLEMS
        if self._canaries and is_due and not self._canaries_left:
            self._canaries_at, self._done_before = time.monotonic(), self.done
            self._canaries_left, self.canary_times = len(self._canaries), {}
            self.tasks.ask(self._canaries)

    @property
    def measured_canaries(self) -> dict[str, float]:
        """What its canaries took; nothing until all are measured."""
        return {} if self._canaries_left else self.canary_times

    def _take(self, event: WorkerEvent) -> None:
        match event:
            case TuneStarted():
                self._begun_at = datetime.now(UTC).isoformat()
            case TuneFinished():
                if event.task.ticket < 0:
                    self._take_canary(event)
                    return
                if self.follows_canaries:
                    config = event.task.problem.network_config
                    key = ProblemKey(device=event.task.kind, network_config=config)
                    self.unproven.append(Measured(key, self._begun_at))
                self.done += bool(event.result.solutions)
                self.failed += not event.result.solutions
                self._holdings.measured(event.task, event.result)
            case TuneLost():
                self.lost = event.message

    def _take_canary(self, event: TuneFinished) -> None:
        time_ms = time_of(event.result)
        if time_ms is not None:
            self.canary_times[event.task.problem.network_config] = time_ms
        self._canaries_left -= 1


class FleetAgent:
    """Works for a fleet until it is told to end.

    Args:
        handles: one a device, strict ones over one FindDB in a file.
        server: the fleet's FindDB.

    Raises:
        InvalidOptionError: the handles have no FindDB in a file.
        DatabaseError: another agent uses the FindDB.
    """

    def __init__(self, handles: Sequence[Handle], database: FleetDatabase, server: Facts) -> None:
        local = handles[0].database.user
        if local.path is None:
            raise InvalidOptionError("an agent needs a FindDB in a file, by which it outlives its end: give --db FILE")
        self._database = database
        self._local = local
        self._are_registered = False
        self.agent = Agent(id=uuid4(), host=socket.gethostname())
        self.holdings = Holdings()
        self._outbox = Outbox(local.path)
        predecessors = self._outbox.succeed(self.agent.id)
        self._courier = Courier(self.holdings, self._outbox, local, server)
        stores = Stores(local=local, server=server, outbox=self._outbox, courier=self._courier)
        self.link = Link(self.agent, Queue(database), self.holdings, stores, predecessors=predecessors)
        self.link.add_duty(_HEALTH_S, self._follow_health)
        self.members = [Member(handle, self.holdings, members=len(handles)) for handle in handles]
        self.holdings.wanting = self.link.wake

    def run(self, *, until_idle_s: float | None = None, for_s: float | None = None) -> AgentEnd:
        """Work until Ctrl-C, SIGTERM under `terminable`, or an end that was asked for; then drain, within DRAIN_S.

        Args:
            until_idle_s: end after so many seconds without work.
            for_s: begin to drain after so many seconds.

        Raises:
            MiofindError: what would fail every problem: a FindDB that cannot be written, a queue that refuses.
        """
        began = time.monotonic()
        self.link.devices = self._devices()
        for thread in (self._courier, self.link, *self.members):
            thread.start()
        was_interrupted = False
        try:
            while self._is_to_go_on():
                self._courier.hurry()
                if for_s is not None and time.monotonic() - began >= for_s:
                    break
                if until_idle_s is not None and self._idle_s() >= until_idle_s:
                    break
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            was_interrupted = True
            logger.info("the agent drains")
        return replace(self._drained(), was_interrupted=was_interrupted)

    def metrics(self) -> list[Metric]:
        """What this agent has done and does, for Prometheus; asks nobody."""
        stages = {stage: len(self.holdings.at(stage)) for stage in (Stage.WAITING, Stage.IN_WORK, Stage.MEASURED)}
        members = [({"gpu": member.device_name, "device": member.kind.device}, member) for member in self.members]
        return [
            Metric(
                name="problems_total",
                kind="counter",
                about="Problems done with since the agent began.",
                values=tuple(
                    ({**labels, "outcome": outcome}, count)
                    for labels, member in members
                    for outcome, count in (("solved", member.done), ("failed", member.failed))
                ),
            ),
            Metric(
                name="gpu_measures",
                kind="gauge",
                about="1 where a device takes jobs, 0 where it is suspect, quarantined or lost.",
                values=tuple((labels, float(not (each.lost or each.tasks.is_held))) for labels, each in members),
            ),
            Metric(
                name="jobs_held",
                kind="gauge",
                about="Jobs that the agent has a lease on, by how far they are.",
                values=tuple(({"stage": stage.name.lower()}, count) for stage, count in stages.items()),
            ),
            Metric(
                name="unmerged_seconds",
                kind="gauge",
                about="Age of the oldest problem that is measured and not on the server.",
                values=(({}, self.holdings.unmerged_s),),
            ),
            Metric(
                name="server_reachable",
                kind="gauge",
                about="1 where the last call of the queue was answered.",
                values=(({}, float(self.link.is_connected)),),
            ),
        ]

    def _is_to_go_on(self) -> bool:
        """Whether anything can be done here still."""
        alive = [member for member in self.members if member.is_alive()]
        self.link.devices = self._devices()
        are_served = self.link.is_alive() and self._courier.is_alive()
        return bool(alive) and are_served and not any(member.error for member in self.members)

    def _devices(self) -> dict[Kind, int]:
        kinds = [member.kind for member in self.members if not (member.lost or member.tasks.is_held)]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def _follow_health(self) -> None:
        """Have members measure, or not, as their GPUs' states on the server say."""
        self._register()
        for member in self.members:
            self._report(member)
        states = health.states(self._database, [member.device_name for member in self.members])
        for member in self.members:
            state = states.get(member.device_name, GpuState.READY)
            if (state is not GpuState.READY) != member.tasks.is_held:
                logger.warning("%s is %s", member.device_name, state)
                member.tasks.hold(state is not GpuState.READY)
            if state is not GpuState.READY and member.unproven:
                self._doubt(member)
            if state is not GpuState.QUARANTINED:
                member.ask_canaries()
        self.link.devices = self._devices()
        for kind in {member.kind for member in self.members} - self.link.devices.keys():
            self.holdings.give_back_waiting(kind=kind.device)

    def _register(self) -> None:
        """Have the server know all members as this agent's: at first, and where it has forgotten one.

        It has where it was restored from a backup, or where another agent had a device of that name and is gone.
        """
        names = [member.device_name for member in self.members]
        known = health.states(self._database, names) if self._are_registered else {}
        for member in self.members:
            if member.device_name not in known:
                health.register(self._database, member.device_name, member.kind, self.agent)
        self._are_registered = True

    def _doubt(self, member: Member) -> None:
        """Have what a member measured since its canaries were right never ship."""
        known = len(member.unproven)
        rows = [row for measured in member.unproven[:known] for row in measured.rows(self._local)]
        health.doubt(self._database, member.device_name, rows)
        del member.unproven[:known]

    def _report(self, member: Member) -> None:
        """Tell the server of a member's canaries, and of the end of its device."""
        if times := member.measured_canaries:
            known = len(member.unproven)
            if health.report_canaries(self._database, member.device_name, times).is_good:
                del member.unproven[:known]
            member.canary_times = {}
        if member.lost and not member.told_lost:
            health.note_lost(self._database, member.device_name, member.lost)
            member.told_lost = True

    def _idle_s(self) -> float:
        since = self.link.idle_since
        return 0.0 if since is None else time.monotonic() - since

    def _drained(self) -> AgentEnd:
        """End members, bring the server what was measured, and tell it of all jobs."""
        deadline = time.monotonic() + DRAIN_S
        self.link.drain()
        for member in self.members:
            member.tasks.close()
        members_until = time.monotonic() + MEMBERS_DRAIN_S
        for member in self.members:
            member.join(max(0.0, members_until - time.monotonic()))
        stopping = [threading.Thread(target=member.stop) for member in self.members]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        self.holdings.give_back_unfinished()
        is_merged = self._courier.finish_by(deadline - 3.0)
        is_told = self.link.finish_by(deadline)
        self._outbox.close()
        self._raise_errors()
        return AgentEnd(
            done=sum(member.done for member in self.members),
            failed=sum(member.failed for member in self.members),
            lost=tuple(f"{member.device_name}: {member.lost}" for member in self.members if member.lost),
            is_merged=is_merged and is_told,
        )

    def _raise_errors(self) -> None:
        for error in (self.link.error, *(member.error for member in self.members)):
            if error is not None:
                raise error
