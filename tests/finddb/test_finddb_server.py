"""What a FindDB on a server does beside what every FindDB does: many write at once, and it may be gone."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from helpers.finddb import finddb_entries as made
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, VERSIONS, answers, at, contents, rival, row, scope, verdict
from helpers.finddb.postgres_server import PostgresServer, new_server, of_database
from helpers.processes.forks import in_a_fork
from helpers.processes.waiting import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from miofind.errors import DamagedDatabaseError, DatabaseError, SchemaVersionError
from miofind.finddb import (
    MEMORY,
    History,
    LayeredStore,
    ProblemKey,
    Prune,
    Store,
    entries,
    open_layered,
    schema,
    server,
    write_release,
)
from miofind.finddb.location import server_url, shown_url
from miofind.finddb.validation import checked_history

SECRET = "s3cret-word"
NOWHERE = f"postgresql://ann:{SECRET}@127.0.0.1:1/results"


@pytest.fixture
def store(finddb_url: str) -> Iterator[Store]:
    with Store(finddb_url) as opened:
        yield opened


@contextmanager
def running(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Another thread, whose result is there after the block."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    try:
        yield results
    finally:
        thread.join()


def wait_until_one_waits(url: str) -> None:
    """Return once a connection to the database waits for another's lock."""
    waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(url, autocommit=True) as connection:
        wait_until(lambda: connection.execute(waits).fetchone() == (1,), "a connection waits for a lock")


def exported(store: Store) -> str:
    file = io.StringIO()
    store.export_jsonl(file)
    return file.getvalue()


def test_new_entries_are_counted_and_give_an_answer(store):
    """The driver counts no rows of a statement for several: no answer was derived of them."""
    rows = tuple(row(f"Conv{number}", created_at=at(number)) for number in (1, 2))
    history = History(device=DEVICE, network_config=PROBLEM, rows=rows)
    assert store.add([history]) == 2
    assert len(store.answer(DEVICE, PROBLEM).rows) == 2
    more = History(device=DEVICE, network_config=PROBLEM, rows=(*history.rows, row("Conv3", created_at=at(3))))
    assert store.add([more]) == 1
    assert store.add([more]) == 0
    assert len(store.answer(DEVICE, PROBLEM).rows) == 3


@pytest.mark.parametrize("place", ["server", "file", "release"])
def test_histories_of_some_problems(place: str, finddb_url: str, tmp_path: Path) -> None:
    """Those that are known, each once, as they are told one by one."""
    name = finddb_url if place == "server" else tmp_path / "finddb.db"
    configs = [f"n{number}" for number in range(7)]
    with Store(name) as store:
        for number, config in enumerate(configs):
            for device in (DEVICE, "another")[: 1 + number % 2]:
                store.record(device, config, [row(time_ms=1.0 + number)], scope=scope(), environment=VERSIONS)
        if place == "release":
            write_release([store], tmp_path / "release.db")
    with Store(tmp_path / "release.db" if place == "release" else name, read_only=True) as store:
        wanted = [ProblemKey(device=DEVICE, network_config=name) for name in ("n5", "unknown", "n0", "n5", "n3")]
        wanted.append(ProblemKey(device="another", network_config="n3"))
        found = store.histories_of(wanted)
        keys = [(history.device, history.network_config) for history in found]
        assert keys == [(DEVICE, "n0"), (DEVICE, "n3"), (DEVICE, "n5"), ("another", "n3")]
        assert found == [store.history(*key) for key in keys]
        assert all(history.rows for history in found)
        assert store.histories_of([]) == []


@pytest.mark.parametrize("known", [True, False])
def test_who_adds_to_one_problem_at_once_derives_an_answer_of_all(store, finddb_url, known):
    if known:
        store.record(DEVICE, PROBLEM, [row("Old")])
    history = checked_history(History(device=DEVICE, network_config=PROBLEM, rows=(row("Slow", created_at=at(1)),)))
    with Store(finddb_url) as other, store._database.write() as connection:
        entries.add(connection, [history])
        with running(lambda: other.record(DEVICE, PROBLEM, [row("Quick")])) as results:
            wait_until_one_waits(finddb_url)
            connection.commit()
    assert {found.solver_id for found in results[0].rows} == {"Slow", "Quick"} | ({"Old"} if known else set())
    assert store.answer(DEVICE, PROBLEM) == results[0]
    assert store.check() == ()


def test_who_waits_for_each_other_both_succeed(store):
    for name in ("a", "b"):
        store.record(DEVICE, name, [row()])
    meeting = threading.Barrier(2)
    tries: list[str] = []

    def hold_both(first: str, second: str) -> Callable[[Any], bool]:
        def work(connection: Any) -> bool:
            tries.append(first)
            entries.hold(connection, DEVICE, first)
            if len(tries) <= 2:
                meeting.wait()
            entries.hold(connection, DEVICE, second)
            return True

        return work

    with running(lambda: store._database.transact(hold_both("a", "b"))) as results:
        assert store._database.transact(hold_both("b", "a"))
    assert results == [True]
    assert len(tries) >= 3


def test_who_adds_to_a_device_that_is_removed_meanwhile_tries_again(store, finddb_url):
    store.record(DEVICE, PROBLEM, [row()])
    with Store(finddb_url) as other, store._database.write() as connection:
        number = entries.find_problem(connection, DEVICE, PROBLEM)
        assert number is not None
        entries.remove_problem(connection, number)
        entries.remove_orphans(connection)
        with running(lambda: other.record(DEVICE, "new", [row()], environment=VERSIONS)) as results:
            wait_until_one_waits(finddb_url)
            connection.commit()
    assert results[0] is not None
    assert [key.network_config for key in store.problems()] == ["new"]
    assert store.check() == ()


def test_a_prune_waits_for_who_adds(store, finddb_url):
    """An environment that nothing names yet went, and the rows that name it came."""
    history = History(
        device=DEVICE,
        network_config=PROBLEM,
        rows=(row(created_at=at(1), environment=made.environment_id(VERSIONS)),),
        environments={made.environment_id(VERSIONS): VERSIONS},
    )
    with store._database.write() as connection:
        connection.execute(schema.environment.insert().values(id="unused", versions="{}"))
    with Store(finddb_url) as other, store._database.write() as connection:
        entries.add(connection, [checked_history(history)])
        with running(lambda: other.prune(Prune.SUPERSEDED)):
            wait_until_one_waits(finddb_url)
            connection.commit()
    assert store.environment("unused") is None
    assert store.environment(made.environment_id(VERSIONS)) == VERSIONS
    assert store.check() == ()


def test_texts_are_ordered_as_in_a_file(store):
    """The server orders texts as people do, unless it is told otherwise: a before B."""
    names = ["a", "B", "_", "Ä", "b", "A", "1", "é", "-", "a b", "ab"]
    with Store(MEMORY) as memory:
        for each in (store, memory):
            rows = tuple(row(name, created_at=at(1)) for name in names)
            each.add(History(device=device, network_config=name, rows=rows) for device in "aB" for name in names)
        assert contents(store) == contents(memory)
        assert answers(store) == answers(memory)
        assert exported(store) == exported(memory)


def test_an_entry_that_cannot_be_read_is_told_of_as_damage(store: Store) -> None:
    """As of a file: whoever may write to the server may have written it."""
    store.record(DEVICE, PROBLEM, [row(), rival()])
    with store._database.write() as connection:
        connection.execute(text("UPDATE answer SET payload = 'spoilt'"))
        connection.execute(text("UPDATE measurement SET created_at = 'never' WHERE status = 'rival'"))
    with pytest.raises(DamagedDatabaseError, match="holds an entry that cannot be read"):
        store.answer(DEVICE, PROBLEM)
    with pytest.raises(DamagedDatabaseError, match="holds an entry that cannot be read"):
        store.rivals(DEVICE, PROBLEM, f"{PROBLEM}~")


def test_numbers_of_problems_have_64_bits(store):
    with store._database.write() as connection:
        for table in ("device", "problem"):
            connection.execute(text(f"SELECT setval('{table}_id_seq', 1099511627776)"))
    store.record(DEVICE, PROBLEM, [row()], scope=scope(), verdict=verdict())
    assert [found.solver_id for found in store.answer(DEVICE, PROBLEM).rows] == ["ConvA"]
    assert store.check() == ()


def test_the_servers_clock_says_what_is_newer(store, monkeypatch):
    """Clocks of hosts differ, and the newest row is in force."""
    for clock, name in (("2190-01-01T00:00:00.000000Z", "First"), ("2001-01-01T00:00:00.000000Z", "Second")):
        monkeypatch.setattr("miofind.finddb.stamps.now", lambda clock=clock: clock)
        store.record(DEVICE, PROBLEM, [row(name)], scope=scope(name))
        assert store.queue_recheck(DEVICE, PROBLEM, name)
    stamps = {found.solver_id: datetime.fromisoformat(found.created_at) for found in store.answer(DEVICE, PROBLEM).rows}
    assert stamps["First"] < stamps["Second"]
    assert all(abs(datetime.now(UTC) - stamp) < timedelta(days=1) for stamp in stamps.values())
    assert [note.reason for note in store.rechecks()] == ["First", "Second"]


def test_a_history_of_all_is_of_one_instant(store, finddb_url, monkeypatch):
    monkeypatch.setattr(server, "BATCH", 1)
    for name in ("a", "b", "c"):
        store.record(DEVICE, name, [row("Old")])
    with Store(finddb_url) as other:
        reading = store.histories()
        found = [next(reading)]
        other.clean(DEVICE, "b")
        other.record(DEVICE, "c", [row("New")])
        found += reading
    assert [(each.network_config, len(each.rows)) for each in found] == [("a", 1), ("b", 1), ("c", 1)]
    assert [each.network_config for each in store.histories()] == ["a", "c"]


def test_all_that_a_block_reads_is_of_one_instant(store, finddb_url):
    store.record(DEVICE, PROBLEM, [row("Old")])
    with Store(finddb_url) as other, store.one_instant():
        before = (contents(store), answers(store), store.stats(), exported(store))
        other.record(DEVICE, PROBLEM, [row("New")])
        other.record(DEVICE, "another", [row("New")])
        with store.one_instant():
            assert (contents(store), answers(store), store.stats(), exported(store)) == before
    assert store.stats().rows == 3
    with pytest.raises(FileNotFoundError, match="mine"), store.one_instant():
        raise FileNotFoundError("mine")
    assert store.stats().rows == 3


def test_a_forked_child_has_connections_of_its_own(store):
    store.record(DEVICE, PROBLEM, [row("Parent")])
    with store._database.read():  # one is in use, and one lies idle

        def work() -> None:
            store.record(DEVICE, PROBLEM, [row("Child")])
            assert len(store.answer(DEVICE, PROBLEM).rows) == 2

        assert in_a_fork(work) == 0
    assert len(store.answer(DEVICE, PROBLEM).rows) == 2
    assert len(store.record(DEVICE, PROBLEM, [row("Again")]).rows) == 3


def test_a_connection_that_the_server_ended_is_made_anew(store, finddb_url):
    store.record(DEVICE, PROBLEM, [row()])
    with psycopg.connect(finddb_url, autocommit=True) as connection:
        for _ in range(2):
            ended = connection.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = current_database() AND "
                "pid <> pg_backend_pid() AND application_name = 'miofind'"
            ).fetchall()
            assert ended
            assert store.answer(DEVICE, PROBLEM) is not None
    assert store.record(DEVICE, PROBLEM, [row("ConvB")]) is not None


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A shell has what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_it_waits_for_another_leaves_it_usable(store, finddb_url):
    store.record(DEVICE, PROBLEM, [row()])

    def interrupt() -> None:
        wait_until_one_waits(finddb_url)
        signal.raise_signal(signal.SIGINT)

    with Store(finddb_url) as other:
        with other._database.write() as connection:
            entries.hold(connection, DEVICE, PROBLEM)
            with running(interrupt), pytest.raises(KeyboardInterrupt):
                store.record(DEVICE, PROBLEM, [row("ConvB")])
        assert len(store.record(DEVICE, PROBLEM, [row("ConvC")]).rows) == 2
        assert store.answer(DEVICE, PROBLEM) == other.answer(DEVICE, PROBLEM)


@pytest.fixture
def power() -> Iterator[PostgresServer]:
    """A server that may be killed."""
    with new_server() as server:
        yield server


def test_a_server_that_is_gone_is_told_once_and_done_without(power, caplog):
    with Store(power.url) as store, LayeredStore(Store(power.url)) as layered:
        store.record(DEVICE, PROBLEM, [row()])
        assert layered.answer(DEVICE, PROBLEM) is not None
        power.kill()
        for use in (lambda: store.answer(DEVICE, PROBLEM), lambda: store.record(DEVICE, PROBLEM, [row()])):
            with pytest.raises(DatabaseError, match="see that the server runs"):
                use()
        with caplog.at_level(logging.WARNING):
            for number in range(3):
                assert layered.record(DEVICE, f"new-{number}", [row()]) is not None
        assert len([entry for entry in caplog.records if "Going on in memory" in entry.message]) == 1
        assert layered.answer(DEVICE, "new-0") is not None
        power.start()
        assert store.answer(DEVICE, PROBLEM) is not None


def test_a_server_that_goes_while_it_is_written_stores_nothing(power):
    def lose(connection: Any) -> None:
        entries.hold(connection, DEVICE, "new")
        power.kill()
        entries.hold(connection, DEVICE, "newer")

    with Store(power.url) as store:
        store.record(DEVICE, PROBLEM, [row()])
        with pytest.raises(DatabaseError, match=r"try again when it runs|see that the server runs"):
            store._database.transact(lose)
        power.start()
        assert [key.network_config for key in store.problems()] == [PROBLEM]


@pytest.fixture
def reader_url(postgres_server: str, postgres_url: str) -> Iterator[str]:
    """The URL of a filled FindDB, as a role that may only read."""
    with Store(postgres_url) as store:
        store.record(DEVICE, PROBLEM, [row()], scope=scope())
    role = f"miofind_reader_{os.getpid()}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{SECRET}'")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        try:
            yield postgres_url.replace("postgres@", f"{role}:{SECRET}@")
        finally:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


def test_a_role_that_only_reads(reader_url, caplog, monkeypatch):
    with Store(reader_url) as store:
        assert store.answer(DEVICE, PROBLEM) is not None
        assert store.check() == ()
        for use in (store.open, lambda: store.record(DEVICE, PROBLEM, [row()])):
            with pytest.raises(DatabaseError, match=r"rights that docs/fleet\.md lists"):
                use()
    monkeypatch.setenv("MIOFIND_DB", reader_url)
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with open_layered() as layered, caplog.at_level(logging.WARNING):
        for number in range(2):
            assert layered.record(DEVICE, f"new-{number}", [row()]) is not None
            assert layered.answer(DEVICE, f"new-{number}") is not None
        assert len(layered.record(DEVICE, PROBLEM, [row("ConvB")]).rows) == 2
    assert len([entry for entry in caplog.records if "Going on in memory" in entry.message]) == 1
    assert SECRET not in caplog.text
    with open_layered(strict=True) as strict, pytest.raises(DatabaseError):
        strict.record(DEVICE, PROBLEM, [row()])


def test_a_role_of_the_documents_adds_and_removes_nothing(postgres_url):
    with Store(postgres_url) as store:
        store.record(DEVICE, PROBLEM, [row()])
    document = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")
    statements, *_ = re.findall(r"```sql\n(.*?)```", document, re.DOTALL)
    reading, writing = (f"miofind_{os.getpid()}_{name}" for name in ("read", "write"))
    statements = statements.replace("miofind_read", reading).replace("miofind_write", writing)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        try:
            connection.execute(statements)
            connection.execute(f"ALTER ROLE {writing} LOGIN")
            with Store(postgres_url.replace("postgres@", f"{writing}@")) as store, Store(MEMORY) as other:
                store.open()
                found = store.record(DEVICE, PROBLEM, [row("ConvB")], scope=scope(), environment=VERSIONS)
                assert len(found.rows) == 2
                other.record("cpu|2||", "new", [row()], verdict=verdict())
                assert store.merge(other) == 2
                assert store.record(DEVICE, "another", [rival()]) is None
                assert store.revision()
                assert store.queue_recheck(DEVICE, PROBLEM, "driver")
                store.record(DEVICE, PROBLEM, notes=())
                assert store.rechecks() == ()
                for use in (lambda: store.clean(DEVICE, PROBLEM), lambda: store.prune(Prune.FAILED)):
                    with pytest.raises(DatabaseError, match=r"rights that docs/fleet\.md lists"):
                        use()
                assert store.check() == ()
        finally:
            connection.execute(f"DROP OWNED BY {reading}, {writing}")
            connection.execute(f"DROP ROLE {reading}, {writing}")


def test_a_server_below_a_file_is_only_read(store, finddb_url, tmp_path, monkeypatch):
    store.record(DEVICE, PROBLEM, [row()], scope=scope())
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", finddb_url)
    with open_layered(tmp_path / "own.db", strict=True) as layered:
        assert layered.answer(DEVICE, PROBLEM) is not None
        assert not (tmp_path / "own.db").exists()
        assert len(layered.record(DEVICE, PROBLEM, [row("ConvB")]).rows) == 2
    assert store.stats().rows == 1
    with Store(tmp_path / "own.db") as own:
        assert len(own.answer(DEVICE, PROBLEM).rows) == 2


def test_a_lookup_makes_no_tables(postgres_url):
    with LayeredStore(Store(postgres_url), strict=True) as layered:
        assert layered.answer(DEVICE, PROBLEM) is None
        assert not layered.is_recorded
        with Store(postgres_url, read_only=True) as reading, pytest.raises(DatabaseError, match="empty database"):
            reading.stats()
        layered.record(DEVICE, PROBLEM, [row()])
        assert layered.is_recorded
    with Store(postgres_url, read_only=True) as reading:
        assert reading.answer(DEVICE, PROBLEM) is not None
        with pytest.raises(DatabaseError, match="read only"):
            reading.record(DEVICE, PROBLEM, [row()])


def test_a_database_of_something_else_is_left_alone(postgres_url):
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE device (serial text)")
    with Store(postgres_url) as store, pytest.raises(DatabaseError, match="tables of something else"):
        store.record(DEVICE, PROBLEM, [row()])
    with Store(f"{postgres_url}&options=-csearch_path%3Dmine") as store:
        with psycopg.connect(postgres_url) as connection:
            connection.execute("CREATE SCHEMA mine")
        assert store.record(DEVICE, PROBLEM, [row()]) is not None
        assert store.check() == ()


def test_a_database_of_another_encoding_is_refused(postgres_server):
    name = f"miofind_latin_{os.getpid()}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        provider = "LOCALE_PROVIDER libc" if connection.info.server_version >= 150000 else ""
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING LATIN1 LOCALE 'C' {provider}")
        try:
            with Store(of_database(postgres_server, name)) as store, pytest.raises(DatabaseError, match="in LATIN1"):
                store.record(DEVICE, PROBLEM, [row()])
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_tables_of_a_newer_release_are_refused(postgres_url):
    with Store(postgres_url) as store:
        store.open()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("UPDATE miofind_alembic SET version_num = '9999_future'")
    with Store(postgres_url) as store, pytest.raises(SchemaVersionError, match=r"9999_future.*upgrade miofind"):
        store.answer(DEVICE, PROBLEM)


def test_check_tells_what_a_table_lacks(postgres_url):
    with Store(postgres_url) as store:
        store.open()
        with psycopg.connect(postgres_url) as connection:
            connection.execute("ALTER TABLE measurement DROP COLUMN protocol")
            connection.execute('ALTER TABLE verdict ALTER COLUMN winner TYPE text COLLATE "POSIX"')
        findings = store.check()
    assert findings[0] == "column measurement.protocol is missing"
    assert "column verdict.winner has texts in the order of POSIX" in findings[1]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (NOWHERE, "cannot be reached"),
        (f"postgresql://ann:{SECRET}@127.0.0.1:1/results?sslmod=require", "no setting sslmod"),
        (f"postgresql://ann:%zz{SECRET}@127.0.0.1:1/results", "malformed"),
        (f"postgresql://ann:p@{SECRET}@127.0.0.1:1/results", "write @ as %40"),
        (f"postgresql://ann:p/{SECRET}@127.0.0.1:1/results", "write @ as %40"),
        (f"postgresql://ann:p?{SECRET}@127.0.0.1:1/results", "write @ as %40"),
        (f"postgres://127.0.0.1:1/results?user=ann&password={SECRET}", "cannot be reached"),
        (f"postgressql://ann:{SECRET}@127.0.0.1:1/results", "Did you mean postgresql"),
        (f"postgresql:/ann:{SECRET}@127.0.0.1:1/results", "postgresql://user@host:5432/database"),
        (f"mysql://ann:{SECRET}@127.0.0.1:1/results", "named by mysql"),
    ],
    ids=lambda value: value.replace(SECRET, "x")[:60],
)
def test_what_cannot_be_reached_says_what_to_do_and_no_password(url, told, caplog):
    caplog.set_level(logging.DEBUG)

    def use() -> None:
        with Store(url) as store:
            assert SECRET not in f"{store!r}{store.where}{store.location}{store._database!r}"
            store.answer(DEVICE, PROBLEM)

    with pytest.raises(DatabaseError) as caught:
        use()
    assert told in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value)) + caplog.text


def test_without_the_driver_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with Store(NOWHERE) as store, pytest.raises(DatabaseError, match=r"pip install -e '\.\[server\]'"):
        store.answer(DEVICE, PROBLEM)


def test_urls_are_told_from_paths():
    assert server_url(NOWHERE) == NOWHERE
    assert server_url("some:folder/finddb.db") is server_url(MEMORY) is server_url("~/x.db") is None
    assert shown_url(NOWHERE) == "postgresql://127.0.0.1:1/results"
    assert shown_url("postgresql:///results?host=/run") == "postgresql:///results"


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(made.histories, max_size=2)),
        st.tuples(st.just("clean"), made.histories),
        st.tuples(st.just("prune"), st.sampled_from([Prune.SUPERSEDED, Prune.FAILED])),
        st.tuples(st.just("import"), st.lists(made.histories, max_size=2)),
        st.tuples(st.just("merge"), st.lists(made.histories, max_size=2)),
    ),
    max_size=5,
)


def applied(store: Store, what: str, argument: Any) -> int:
    """What an operation returns."""
    if what == "add":
        return store.add(argument)
    if what == "clean":
        return store.clean(argument.device, argument.network_config)
    if what == "prune":
        return store.prune(argument)
    with Store(MEMORY) as other:
        other.add(argument)
        return store.merge(other) if what == "merge" else store.import_jsonl(io.StringIO(exported(other)))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=operations)
def test_any_operations_leave_what_they_leave_in_a_file(finddb_url, steps):
    with Store(finddb_url) as store, Store(MEMORY) as memory:
        for key in store.problems():
            store.clean(key.device, key.network_config)
        store.prune(Prune.SUPERSEDED)
        for what, argument in steps:
            assert applied(store, what, argument) == applied(memory, what, argument)
        assert exported(store) == exported(memory)
        assert contents(store) == contents(memory)
        assert answers(store) == answers(memory)
        assert store.check() == ()


def test_what_cannot_be_reached_ends_in_one_stop():
    """libpq asks a question, and the message went on "?. Correct the URL"."""
    with (
        pytest.raises(DatabaseError, match="cannot be reached") as refused,
        Store("postgresql://127.0.0.1:1/x") as store,
    ):
        store.problems()
    assert "?. " not in str(refused.value)
    assert ". Correct the URL" in str(refused.value)
