"""What the queue of a fleet gives out and takes in: inert values, checked where they come from the server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from miofind.tune.values import Task, TuneOptions


class JobState(StrEnum):
    """What has become of a job: parked is one that has cost too many devices."""

    NEW = "new"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"
    PARKED = "parked"


class GpuState(StrEnum):
    """Whether a GPU's times are believed: a suspect one's never ship, a quarantined one measures nothing."""

    READY = "ready"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Who may take a job: devices of one identity under one software stack.

    Attributes:
        device: `Device.identity`.
        stack: `stack.stack_of` the device.
    """

    device: str
    stack: str


@dataclass(frozen=True, slots=True)
class Hold:
    """One claim of a job. The fence tells it from the job's other claims."""

    job: int
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A job that is held.

    Attributes:
        campaign: its number.
        task: what is to be measured, None where this release cannot read it.
        refusal: why it cannot, "" otherwise.
    """

    hold: Hold
    campaign: int
    task: Task | None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """What became of a job.

    Attributes:
        outcome: a `TuneStatus`.
        seconds: that it took.
    """

    hold: Hold
    outcome: str
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What came of a submit.

    Attributes:
        campaign: its number.
        problems: of the campaign by now.
        added: those of them that are new.
        jobs: made for the kinds that have workers already.
    """

    campaign: int
    problems: int
    added: int
    jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRequest:
    """What a submit asks for.

    Attributes:
        name: of the campaign; a second submit of it adds what is new.
        devices, stacks: the kinds that it is for; None for all that have workers, or will.
        priority: of two campaigns the one of the higher goes first; None leaves it as it is, at first 0.
    """

    name: str
    options: TuneOptions
    devices: tuple[str, ...] | None = None
    stacks: tuple[str, ...] | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A process that works for the fleet.

    Attributes:
        id: new with each start.
        host: its name, for people.
    """

    id: UUID
    host: str
