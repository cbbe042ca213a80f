"""A mirror holds what the server does, reads what is newer alone, and is written to by nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from helpers.finddb import finddb_entries as made
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, VERSIONS, answers, contents, row, scope, verdict
from helpers.finddb.postgres_server import new_database, new_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miofind.errors import DatabaseError
from miofind.finddb import LayeredStore, Prune, Store, entries, mirror
from miofind.finddb.validation import checked_history


@pytest.fixture(scope="module")
def own_server() -> Iterator[str]:
    """The URL of a server of one's own: a mirror reads again what changed since a transaction of others began."""
    named = os.environ.get("MIOFIND_TEST_POSTGRES")
    if named:
        yield named
        return
    with new_server() as server:
        yield server.url


@pytest.fixture
def postgres_url(own_server: str) -> Iterator[str]:
    with new_database(own_server) as url:
        yield url


@pytest.fixture
def finddb_url(own_server: str) -> Iterator[str]:
    with new_database(own_server) as url:
        with Store(url) as made_now:
            made_now.open()
        yield url


@pytest.fixture
def store(finddb_url: str) -> Iterator[Store]:
    with Store(finddb_url) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mirror.db"


def held(path: Path) -> list[object]:
    with Store(path, read_only=True) as found:
        assert found.check() == ()
        return [*contents(found), *answers(found)]


def test_a_mirror_reads_what_is_newer_alone(store, finddb_url, file):
    for name in ("a", "b", "c"):
        store.record(DEVICE, name, [row()], scope=scope(), environment=VERSIONS, verdict=verdict())
    done = mirror(finddb_url, file)
    assert (done.is_whole, done.changed, done.removed, done.problems) == (True, 3, 0, 3)
    assert held(file) == [*contents(store), *answers(store)]
    done = mirror(finddb_url, file)
    assert (done.is_whole, done.changed, done.removed) == (False, 0, 0)
    store.record(DEVICE, "b", [row("ConvB", time_ms=0.5)])
    store.record("cpu|2||", "d", [row()])
    store.clean(DEVICE, "c")
    done = mirror(finddb_url, file)
    assert (done.is_whole, done.changed, done.removed, done.problems) == (False, 2, 1, 3)
    assert held(file) == [*contents(store), *answers(store)]


def test_a_mirror_follows_a_prune(store, finddb_url, file):
    store.record(DEVICE, "a", [row()])
    store.record(DEVICE, "b", [row(status="crashed", time_ms=None)])
    assert mirror(finddb_url, file).problems == 2
    store.prune(Prune.FAILED)
    done = mirror(finddb_url, file)
    assert (done.is_whole, done.changed, done.removed, done.problems) == (False, 0, 1, 1)
    assert held(file) == [*contents(store), *answers(store)]


def test_a_mirror_misses_no_transaction_that_ends_late(store, finddb_url, file):
    """Of two transactions the one that began first ended after the mirror was made."""
    store.record(DEVICE, "old", [row()])
    with Store(finddb_url) as late, late._database.write() as connection:
        entries.hold(connection, DEVICE, "late")
        entries.add(
            connection,
            [checked_history(made.History(device=DEVICE, network_config="late", rows=(row(created_at=made.at(1)),)))],
        )
        store.record(DEVICE, "soon", [row()])
        assert mirror(finddb_url, file).problems == 2
    assert mirror(finddb_url, file).problems == 3
    assert held(file) == [*contents(store), *answers(store)]


def test_a_mirror_is_a_file_like_others_but_for_writing(store, finddb_url, file, caplog):
    store.record(DEVICE, PROBLEM, [row()])
    mirror(finddb_url, file)
    with Store(file) as found:
        assert found.answer(DEVICE, PROBLEM) == store.answer(DEVICE, PROBLEM)
        for use in (
            found.open,
            lambda: found.record(DEVICE, PROBLEM, [row()]),
            lambda: found.prune(Prune.FAILED),
            lambda: found.merge(store),
        ):
            with pytest.raises(DatabaseError, match="mirrors a server and is only read"):
                use()
    with Store(file, read_only=True) as reading, LayeredStore(None, [reading], strict=True) as layered:
        assert layered.answer(DEVICE, PROBLEM) is not None
        store.record(DEVICE, "new", [row()])
        mirror(finddb_url, file)  # while it is read
        assert layered.answer(DEVICE, "new") is not None
        assert len(layered.record(DEVICE, PROBLEM, [row("ConvB")]).rows) == 2


def test_a_mirror_of_another_or_a_restored_server_is_read_anew(store, finddb_url, postgres_url, file):
    store.record(DEVICE, "a", [row()])
    mirror(finddb_url, file)
    with Store(postgres_url) as other:
        other.record(DEVICE, "b", [row()])
        done = mirror(postgres_url, file)
        assert (done.is_whole, done.changed, done.removed, done.problems) == (True, 1, 1, 1)
        assert held(file) == [*contents(other), *answers(other)]


def test_without_the_right_to_tell_servers_apart_all_is_read(postgres_url, file):
    with Store(postgres_url) as store:
        store.record(DEVICE, "a", [row()])
    role = f"miofind_mirror_{os.getpid()}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        connection.execute(f"CREATE ROLE {role} LOGIN")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        try:
            url = postgres_url.replace("postgres@", f"{role}@")
            assert [mirror(url, file).is_whole for _ in range(2)] == [True, True]
        finally:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


def test_what_is_no_mirror_is_left_alone(store, finddb_url, file, tmp_path):
    store.open()
    with Store(file) as own:
        own.record(DEVICE, PROBLEM, [row()])
        with pytest.raises(DatabaseError, match="a FindDB of its own"):
            mirror(finddb_url, file)
        assert len(own.problems()) == 1
    with pytest.raises(DatabaseError, match="a mirror is of a server"):
        mirror(str(file), tmp_path / "copy.db")
    with pytest.raises(DatabaseError, match="a mirror is a file"):
        mirror(finddb_url, ":memory:")
    with pytest.raises(DatabaseError, match="cannot be reached"):
        mirror("postgresql://127.0.0.1:1/results", tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(made.histories, max_size=2)),
        st.tuples(st.just("clean"), made.histories),
        st.tuples(st.just("prune"), st.sampled_from([Prune.SUPERSEDED, Prune.FAILED])),
        st.tuples(st.just("mirror"), st.none()),
    ),
    max_size=6,
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=steps)
def test_after_any_operations_a_mirror_holds_what_the_server_does(store, finddb_url, file, steps):
    for what, argument in steps:
        if what == "add":
            store.add(argument)
        elif what == "clean":
            store.clean(argument.device, argument.network_config)
        elif what == "prune":
            store.prune(argument)
        else:
            mirror(finddb_url, file)
    mirror(finddb_url, file)
    assert held(file) == [*contents(store), *answers(store)]
