"""The tables on a server: made once, by whoever comes first, as the code describes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from helpers.commands.fleet_jobs import done, holds, states, submitted
from sqlalchemy import Engine, MetaData, create_engine, inspect, text
from sqlalchemy.pool import NullPool

from miofind.errors import DatabaseError, SchemaVersionError
from miofind.finddb import migrations, schema
from miofind.fleet import database as fleet_database
from miofind.fleet import schema as fleet_schema
from miofind.fleet.queue import Queue


def described() -> list[MetaData]:
    """The tables that the revisions make, as queries know them."""
    return [schema.metadata, schema.server_metadata, fleet_schema.metadata]


@pytest.fixture
def engine(postgres_url: str) -> Iterator[Engine]:
    made = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(postgres_url), poolclass=NullPool)
    yield made
    made.dispose()


def test_the_revisions_make_what_is_described(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no alembic.ini lies there
    with engine.begin() as connection:
        assert migrations.bring_up(connection, "here") is None
        assert migrations.bring_up(connection, "here") == migrations.REVISIONS[-1]
        settings = {"version_table": migrations.VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=settings)
        assert compare_metadata(context, described()) == []  # type: ignore[arg-type]


def test_all_texts_are_ordered_byte_by_byte(engine):
    with engine.begin() as connection:
        migrations.bring_up(connection, "here")
        names = [table.name for metadata in described() for table in metadata.sorted_tables]
        others = connection.execute(
            text(
                "SELECT table_name, column_name FROM information_schema.columns WHERE table_name = ANY(:names) AND "
                "data_type IN ('text', 'character varying') AND collation_name IS DISTINCT FROM 'C'"
            ),
            {"names": names},
        ).all()
        assert others == []


def test_the_revisions_are_one_line_that_the_code_knows():
    folder = Path(migrations.__file__).parent
    config = Config()
    config.set_main_option("script_location", str(folder))
    script = ScriptDirectory.from_config(config)
    assert tuple(item.revision for item in reversed(list(script.walk_revisions()))) == migrations.REVISIONS
    assert script.get_heads() == [migrations.REVISIONS[-1]]
    assert migrations.FINDDB in migrations.REVISIONS


def test_each_revision_goes_down_again(engine):
    with engine.begin() as connection:
        migrations.bring_up(connection, "here")
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        assert inspect(connection).get_table_names() == [migrations.VERSION_TABLE]


def test_who_comes_at_once_makes_them_once(engine):
    found: list[str | None] = []
    meeting = threading.Barrier(4)

    def come() -> None:
        with engine.connect() as connection:
            meeting.wait()
            with connection.begin():
                found.append(migrations.bring_up(connection, "here"))

    threads = [threading.Thread(target=come) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [*[migrations.REVISIONS[-1]] * 3, None]


def test_a_newer_schema_is_left_alone(engine):
    with engine.begin() as connection:
        migrations.bring_up(connection, "here")
        connection.execute(text(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '9999_future'"))
        with pytest.raises(SchemaVersionError, match="9999_future"):
            migrations.bring_up(connection, "here")
        with pytest.raises(SchemaVersionError, match="upgrade miofind"):
            migrations.require(migrations.revision(connection), "here")


def test_what_is_lacking_is_named():
    migrations.require(migrations.REVISIONS[-1], "here")
    with pytest.raises(DatabaseError, match="empty database"):
        migrations.require(None, "here")


def test_claims_of_an_older_server_go_on_and_its_jobs_stay_when_it_is_brought_up(engine, postgres_url):
    """Its jobs are found again by the new index: no enrolment doubles one."""
    with engine.begin() as connection:
        migrations.bring_up(connection, "here")
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.downgrade(config, fleet_database.FLEET)
    with closing(fleet_database.FleetDatabase(postgres_url)) as database:
        database.require()
        submitted(database, 3)
        queue, worker = Queue(database), uuid4()
        (hold,) = holds(queue, worker)
        database.create()
        with engine.connect() as connection:
            assert migrations.revision(connection) == migrations.REVISIONS[-1]
        assert queue.finish([done(hold)]) == {hold}
        assert submitted(database, 4).added == 1
        assert states(database) == {"done": 1, "new": 3}
