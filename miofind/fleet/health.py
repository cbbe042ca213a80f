"""Which GPUs are believed: each is known by its UUID, whichever agent has it, and judged by its canaries."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, inspect, select, text

from miofind.errors import DatabaseError, brief
from miofind.fleet import schema
from miofind.fleet.canary import TOLERANCE, Times, factor
from miofind.fleet.database import FleetDatabase
from miofind.fleet.queue import note
from miofind.fleet.values import Agent, GpuState, Kind
from miofind.text.printable import printable, printable_name

_REASON_CHARS = 500
SUSPECT_AT, QUARANTINED_AT = 2, 3
MOST_LOST_AN_HOUR = 2
GPU_LOST = "gpu lost"

_LOCKED = text("SELECT device, stack, state, strikes FROM gpu WHERE name = :name FOR UPDATE")
_OTHERS = text(
    "SELECT canaries FROM gpu WHERE device = :device AND stack = :stack AND name <> :name AND state <> 'quarantined'"
)
_LOSSES = text(
    "SELECT count(*) FROM event WHERE kind = :kind AND at > now() - interval '1 hour' "
    "AND detail -> 'gpus' = CAST(:gpus AS jsonb)"
)

_REGISTER = text("""
INSERT INTO gpu (name, host, device, stack, worker_id, state)
VALUES (:name, :host, :device, :stack, :worker, 'ready')
ON CONFLICT (name) DO UPDATE SET host = excluded.host, device = excluded.device, stack = excluded.stack,
    worker_id = excluded.worker_id
RETURNING state
""")
_STATES = text(
    "SELECT gpu.name, gpu.state FROM gpu LEFT JOIN worker ON worker.id = gpu.worker_id "
    "WHERE gpu.name = ANY(CAST(:names AS text[])) AND worker.state IS DISTINCT FROM 'gone'"
)
_SET = text(
    "UPDATE gpu SET state = :state, reason = :reason, since = now(), strikes = 0 "
    "WHERE name = ANY(CAST(:names AS text[])) RETURNING name"
)


def register(database: FleetDatabase, name: str, kind: Kind, agent: Agent) -> GpuState:
    """Make a GPU known as an agent's; what state it is in."""
    values = {"name": name, "host": printable_name(agent.host), "device": kind.device, "stack": kind.stack}
    with database.transaction() as connection:
        return _checked_state(connection.execute(_REGISTER, values | {"worker": agent.id}).scalar_one())


def set_state(database: FleetDatabase, names: Sequence[str], state: GpuState, reason: str = "") -> None:
    """Put GPUs into a state, and say why.

    Raises:
        DatabaseError: a GPU is not known.
    """
    values = {"names": list(names), "state": state.value, "reason": printable(reason, _REASON_CHARS)}
    with database.transaction() as connection:
        found = set(connection.execute(_SET, values).scalars())
        if unknown := [name for name in names if name not in found]:
            raise DatabaseError(f"no agent has told of the GPU {brief(unknown[0])}: `miofind fleet status` lists them")
        note(connection, f"gpu {state.value}", {"gpus": sorted(found), "reason": values["reason"]})


@dataclass(frozen=True, slots=True)
class Judgement:
    """What canaries say of a GPU: its state now, and whether they were as they should be."""

    state: GpuState
    is_good: bool


def report_canaries(database: FleetDatabase, name: str, times: Times) -> Judgement:
    """Note what a GPU's canaries took now, and judge it by the others of its kind.

    The second time in a row that it is off by more than TOLERANCE makes it suspect, the third quarantines it, and one
    time that it is not makes a suspect one ready again.
    """
    with database.transaction() as connection:
        gpu = connection.execute(_LOCKED, {"name": name}).one_or_none()
        if gpu is None:
            raise DatabaseError(f"{database.where} knows no GPU {name}: start the agent of its host again")
        others = connection.execute(_OTHERS, {"name": name, "device": gpu.device, "stack": gpu.stack}).scalars().all()
        found = factor(times, [times, *map(_checked_times, others)])
        is_off = found is not None and abs(found - 1.0) > TOLERANCE
        strikes = gpu.strikes + 1 if is_off else 0
        before = _checked_state(gpu.state)
        state = _judged(before, strikes)
        reason = f"its canaries take {found:.3f} of the others' times" if is_off else ""
        change = {"state": state.value, "factor": found, "strikes": strikes, "canaries": dict(times)}
        if state is not before:
            change |= {"reason": reason, "since": func.now()}
            note(connection, f"gpu {state.value}", {"gpus": [name], "reason": reason})
        connection.execute(schema.gpu.update().where(schema.gpu.c.name == name).values(change))
        return Judgement(state, not is_off)


def doubt(database: FleetDatabase, name: str, row_ids: Collection[str]) -> None:
    """Note that rows were measured by a GPU that is not believed: they never ship."""
    statement = text(
        "INSERT INTO doubt (row_id, gpu, reason) SELECT row_id, :name, coalesce((SELECT reason FROM gpu WHERE name = "
        ":name), '') FROM unnest(CAST(:rows AS text[])) AS row_id ORDER BY row_id ON CONFLICT DO NOTHING"
    )
    with database.transaction() as connection:
        connection.execute(statement, {"name": name, "rows": list(row_ids)})


def doubted(database: FleetDatabase) -> frozenset[str]:
    """Ids of the rows that are not believed."""
    with database.transaction() as connection:
        if not inspect(connection).has_table(schema.doubt.name):
            return frozenset()
        return frozenset(connection.execute(select(schema.doubt.c.row_id)).scalars())


def note_lost(database: FleetDatabase, name: str, message: str) -> GpuState:
    """Note that a GPU's context was lost; the second time within an hour quarantines it."""
    with database.transaction() as connection:
        note(connection, GPU_LOST, {"gpus": [name], "reason": printable(message, _REASON_CHARS)})
        count = connection.execute(_LOSSES, {"kind": GPU_LOST, "gpus": json.dumps([name])}).scalar_one()
    if count < MOST_LOST_AN_HOUR:
        return GpuState.READY
    set_state(database, [name], GpuState.QUARANTINED, f"its context was lost {count} times in an hour: {message}")
    return GpuState.QUARANTINED


def _judged(before: GpuState, strikes: int) -> GpuState:
    if before is GpuState.QUARANTINED or strikes >= QUARANTINED_AT:
        return GpuState.QUARANTINED
    return GpuState.SUSPECT if strikes >= SUSPECT_AT else GpuState.READY


def _checked_times(values: object) -> Times:
    """What the server has of another GPU's canaries, as far as it is times."""
    if not isinstance(values, Mapping):
        return {}
    most_ms = sys.float_info.max  # JSON has whole numbers beyond it
    return {str(name): float(ms) for name, ms in values.items() if isinstance(ms, int | float) and 0 < ms <= most_ms}


def _checked_state(told: str) -> GpuState:
    try:
        return GpuState(told)
    except ValueError:
        raise DatabaseError(
            f"the server has a GPU in the state {brief(told)}, which this release of miofind does not know: upgrade it"
        ) from None


def states(database: FleetDatabase, names: Sequence[str]) -> dict[str, GpuState]:
    """The states of those of the GPUs that are known, as an agent's that is not gone.

    Raises:
        DatabaseError: one is of a later release.
    """
    with database.statement() as connection:
        found = connection.execute(_STATES, {"names": list(names)}).all()
        return {name: _checked_state(state) for name, state in found}
