"""Which GPUs are believed: each is known by its UUID, whichever agent has it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text

from miofind.errors import DatabaseError, brief
from miofind.fleet.database import FleetDatabase
from miofind.fleet.queue import note
from miofind.fleet.values import Agent, GpuState, Kind
from miofind.printable import printable, printable_name

_REASON_CHARS = 500

_REGISTER = text("""
INSERT INTO gpu (name, host, device, stack, worker_id, state)
VALUES (:name, :host, :device, :stack, :worker, 'ready')
ON CONFLICT (name) DO UPDATE SET host = excluded.host, device = excluded.device, stack = excluded.stack,
    worker_id = excluded.worker_id
RETURNING state
""")
_SET = text(
    "UPDATE gpu SET state = :state, reason = :reason, since = now(), strikes = 0 "
    "WHERE name = ANY(CAST(:names AS text[])) RETURNING name"
)


def register(database: FleetDatabase, name: str, kind: Kind, agent: Agent) -> GpuState:
    """Make a GPU known as an agent's; what state it is in."""
    values = {"name": name, "host": printable_name(agent.host), "device": kind.device, "stack": kind.stack}
    with database.transaction() as connection:
        return GpuState(connection.execute(_REGISTER, values | {"worker": agent.id}).scalar_one())


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


def states(database: FleetDatabase, names: Sequence[str]) -> dict[str, GpuState]:
    """The states of GPUs."""
    statement = text("SELECT name, state FROM gpu WHERE name = ANY(CAST(:names AS text[]))")
    with database.transaction() as connection:
        return {name: GpuState(state) for name, state in connection.execute(statement, {"names": list(names)}).all()}
