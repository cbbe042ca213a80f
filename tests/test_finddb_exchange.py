"""Merging, exporting, importing and shipping move measurements without losing or doubling one."""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing

import finddb_entries as made
import pytest
from finddb_entries import DEVICE, PROBLEM, VERSIONS, answers, at, contents, row, scope
from hypothesis import given, settings
from hypothesis import strategies as st

from miofind.errors import DatabaseError, SchemaVersionError
from miofind.finddb import MEMORY, Store, environment_id, write_shippable

some_histories = st.lists(made.histories, max_size=3)


def filled(histories) -> Store:
    store = Store(MEMORY)
    store.add(histories)
    return store


def exported(store: Store) -> str:
    file = io.StringIO()
    store.export_jsonl(file)
    return file.getvalue()


@pytest.fixture
def store():
    with Store(MEMORY) as opened:
        opened.record(DEVICE, PROBLEM, [row(created_at=at(1))], scope=scope(created_at=at(1)), environment=VERSIONS)
        opened.record("cpu|2||", PROBLEM, [row("ConvB", status="crashed", time_ms=None, created_at=at(2))])
        yield opened


@settings(max_examples=15, deadline=None)
@given(one=some_histories, two=some_histories)
def test_merging_is_idempotent_and_commutative(one, two):
    with filled(one) as a, filled(two) as b, Store(MEMORY) as ab, Store(MEMORY) as ba:
        added = ab.merge(a) + ab.merge(b)
        assert ba.merge(b) + ba.merge(a) == added == ab.stats().rows + ab.stats().scopes
        assert contents(ab) == contents(ba)
        assert answers(ab) == answers(ba)
        assert ab.merge(a) == ab.merge(b) == ab.merge(ba) == 0
        assert contents(ab) == contents(ba)
        assert ab.check() == ()


@settings(max_examples=15, deadline=None)
@given(histories=some_histories)
def test_an_export_comes_back_whole(histories):
    with filled(histories) as store, Store(MEMORY) as other:
        text = exported(store)
        assert other.import_jsonl(io.StringIO(text)) == store.stats().rows + store.stats().scopes
        assert other.import_jsonl(io.StringIO(text)) == 0
        assert contents(other) == contents(store)
        assert answers(other) == answers(store)
        assert exported(other) == text


@settings(max_examples=10, deadline=None)
@given(histories=some_histories)
def test_an_export_does_not_depend_on_the_order_of_recording(histories):
    with filled(histories) as store, filled(histories[::-1]) as other:
        assert exported(store) == exported(other)


def test_an_export_is_one_object_a_line(store):
    lines = [json.loads(line) for line in exported(store).splitlines()]
    assert [line.get("kind") for line in lines] == [None, "environment", "row", "scope", "row"]
    assert lines[0] == {"format": "miofind-finddb", "schema_version": 1}
    assert lines[2]["environment"] == lines[1]["id"] == environment_id(VERSIONS)


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (1, {"format": "other"}, "no export"),
        (1, {"schema_version": "1"}, "no export"),
        (2, {"versions": {"driver": "altered"}}, "altered"),
        (2, {"versions": {"hostname": "node7"}}, "names no machine"),
        (2, {"more": 1}, "nothing else"),
        (3, {"time_ms": 0.5}, "altered"),
        (3, {"time_ms": "fast"}, "number"),
        (3, {"status": "fine"}, "status"),
        (3, {"solver_id": None}, "solver_id"),
        (3, {"solver_version": True}, "integer"),
        (3, {"color": "red"}, "'color' is unknown"),
        (3, {"id": ""}, "'id' is missing"),
        (3, {"device": 5}, "no device"),
        (3, {"network_config": "x" * 5000}, "network_config"),
        (3, {"kind": "table"}, "kind='table'"),
        (4, {"solvers": [1]}, "mapping"),
        (4, {"solvers": {"ConvA": -1}}, "version of ConvA"),
        (4, {"complete": "yes"}, "true or false"),
    ],
    ids=str,
)
def test_a_bad_line_is_named_and_nothing_is_stored(store, line, change, said):
    lines = exported(store).splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | change)
    with Store(MEMORY) as other:
        with pytest.raises(DatabaseError) as caught:
            other.import_jsonl(io.StringIO("\n".join(lines)))
        assert str(caught.value).startswith(f"line {line}: ")
        assert said in str(caught.value)
        assert other.problems() == ()


def test_a_row_whose_environment_is_missing_is_named(store):
    lines = exported(store).splitlines()
    del lines[1]
    with Store(MEMORY) as other, pytest.raises(DatabaseError, match=r"line 2: environment .* has no line before"):
        other.import_jsonl(io.StringIO("\n".join(lines)))


@pytest.mark.parametrize("missing", ["solver_id", "solver_version", "config", "status", "id"])
def test_a_field_that_is_missing_is_named(store, missing):
    lines = exported(store).splitlines()
    value = json.loads(lines[2])
    del value[missing]
    lines[2] = json.dumps(value)
    with Store(MEMORY) as other, pytest.raises(DatabaseError, match=f"line 3: field '{missing}' is missing"):
        other.import_jsonl(io.StringIO("\n".join(lines)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: it is missing"),
        ("\n", "line 1: .* is not JSON"),
        ("[]", "line 1: .* is not a JSON object"),
        ("x" * 200_000, "line 1: it is longer than"),
        ("{" * 50_000, "line 1: .* is not JSON"),
        ("[" * 50_000, "line 1: .* is not JSON"),
        ('{"format":"miofind-finddb","format":"x"}', "a key comes twice"),
        ('{"format":"miofind-finddb","schema_version":1}\n{"kind":"row"', "line 2: .* is not JSON"),
    ],
    ids=["empty", "blank", "list", "long", "deep", "deeper", "twice", "cut"],
)
def test_what_is_no_export_is_refused(store, text, said):
    with pytest.raises(DatabaseError, match=said):
        store.import_jsonl(io.StringIO(text))


def test_bytes_that_are_no_text_are_refused(store, tmp_path):
    path = tmp_path / "export.jsonl"
    path.write_bytes(b"\xff\xfe{}")
    with path.open(encoding="utf-8") as file, pytest.raises(DatabaseError, match="UTF-8"):
        store.import_jsonl(file)


def test_an_export_of_a_newer_release_is_refused(store):
    with pytest.raises(SchemaVersionError, match="upgrade"):
        store.import_jsonl(io.StringIO('{"format":"miofind-finddb","schema_version":2}\n{"kind":"new"}\n'))


def test_merging_refuses_altered_rows(store, tmp_path):
    with Store(tmp_path / "other.db") as other:
        other.record(DEVICE, "other", [row()])
        with other._database.write() as connection:
            connection.exec_driver_sql("UPDATE measurement SET time_ms = 1e-9")
        with pytest.raises(DatabaseError, match="altered"):
            store.merge(other)
    assert store.answer(DEVICE, "other") is None


def test_a_merge_reads_what_a_live_database_has_in_its_log(tmp_path):
    with Store(tmp_path / "live.db") as live, Store(MEMORY) as target:
        live.record(DEVICE, PROBLEM, [row()])
        with Store(tmp_path / "live.db", read_only=True) as source:
            assert target.merge(source) == 1


@settings(max_examples=8, deadline=None)
@given(histories=some_histories)
def test_a_shipped_file_gives_the_same_answers(tmp_path_factory, histories):
    folder = tmp_path_factory.mktemp("shipped")
    with filled(histories) as store:
        stats = write_shippable([store, store], folder / "shipped.db")
        with Store(folder / "shipped.db", read_only=True) as shipped:
            assert shipped.check() == ()
            expected = [answer for answer in answers(store) if answer.rows]
            assert answers(shipped) == expected
    assert stats.by_status.keys() <= {"ok", "cut_off"}
    assert [path.name for path in folder.iterdir()] == ["shipped.db"]


def test_a_shipped_file_is_one_file_that_needs_no_log(store, tmp_path):
    path = tmp_path / "shipped.db"
    path.write_text("what was there before")
    write_shippable([store], path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)
    first = path.read_bytes()
    write_shippable([store], path)
    assert path.read_bytes() == first


def test_a_shipped_file_holds_the_rows_that_were_chosen(store, tmp_path):
    store.record(DEVICE, PROBLEM, [row("ConvB", '{"a":1}'), row("ConvC", status="crashed", time_ms=None)])
    write_shippable([store], tmp_path / "a.db", keep=lambda key, row: row.solver_id != "ConvA")
    with Store(tmp_path / "a.db", read_only=True) as shipped:
        assert [row.solver_id for _, row in shipped.rows()] == ["ConvB"]
        assert shipped.stats().environments == 0


def test_a_failed_write_leaves_the_old_file(store, tmp_path):
    path = tmp_path / "shipped.db"
    write_shippable([store], path)
    before = path.read_bytes()
    with (
        Store(tmp_path / "missing.db", read_only=True) as missing,
        pytest.raises(DatabaseError, match="does not exist"),
    ):
        write_shippable([missing], path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["shipped.db"]
