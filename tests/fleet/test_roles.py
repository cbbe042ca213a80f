"""The roles of docs/fleet.md suffice for agents and for who submits, and for no more."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from helpers.commands.fleet_jobs import KIND, done, holds, submitted

from miofind.errors import DatabaseError
from miofind.finddb import Store
from miofind.fleet import health
from miofind.fleet.campaigns import retry, set_paused
from miofind.fleet.database import FleetDatabase
from miofind.fleet.queue import Queue
from miofind.fleet.status import status
from miofind.fleet.values import Agent, GpuState

DOCUMENT = Path(__file__).parents[2] / "docs" / "fleet.md"
ROLES = ("read", "write", "worker", "submit")


@pytest.fixture
def url_of(postgres_url: str) -> Iterator[dict[str, str]]:
    """URLs of a fleet's database by role, made as the document says."""
    with closing(FleetDatabase(postgres_url)) as owner:
        owner.create()
    statements = "\n".join(re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL))
    names = {role: f"miofind_{os.getpid()}_fleet_{role}" for role in ROLES}
    for role, name in names.items():
        statements = statements.replace(f"miofind_{role}", name)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        try:
            connection.execute(statements)
            for name in names.values():
                connection.execute(f"ALTER ROLE {name} LOGIN")
            yield {role: postgres_url.replace("postgres@", f"{name}@") for role, name in names.items()}
        finally:
            connection.execute(f"DROP OWNED BY {', '.join(names.values())}")
            connection.execute(f"DROP ROLE {', '.join(names.values())}")


def test_the_roles_of_the_documents_suffice(url_of: dict[str, str]) -> None:
    with closing(FleetDatabase(url_of["submit"])) as submitting, closing(FleetDatabase(url_of["worker"])) as working:
        submitted(submitting, 3)
        set_paused(submitting, "nightly", paused=True)
        set_paused(submitting, "nightly", paused=False)
        working.require()
        queue, agent = Queue(working), Agent(id=uuid4(), host="h")
        queue.register(agent, "1")
        health.register(working, "GPU-1", KIND, agent)
        health.set_state(working, ["GPU-1"], GpuState.SUSPECT, "slow")
        first, second, third = holds(queue, agent.id, 3)
        queue.begin([first])
        queue.lose(first, "gone")
        queue.release([second])
        assert queue.finish([done(third)]) == {third}
        queue.beat(agent, state="ready", problems=0, age_s=0.0)
        queue.reap()
        queue.lose_worker(agent.id)
        assert retry(submitting, "nightly") == 0
        with pytest.raises(DatabaseError, match=r"rights that docs/fleet\.md lists"):
            set_paused(working, "nightly", paused=True)
        with Store(url_of["worker"]) as store:
            store.open()
    with closing(FleetDatabase(url_of["read"])) as reading:
        assert len(status(reading).campaigns) == 1
        with pytest.raises(DatabaseError, match=r"rights that docs/fleet\.md lists"):
            Queue(reading).claim(uuid4(), KIND, 1)
