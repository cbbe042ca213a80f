"""Merging, exporting and importing move measurements without losing or doubling one."""

from __future__ import annotations

import io
import json

import pytest
from helpers.finddb import finddb_entries as made
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, VERSIONS, answers, at, contents, row, scope
from hypothesis import given, settings
from hypothesis import strategies as st

from miofind.errors import DatabaseError, SchemaVersionError
from miofind.finddb import MEMORY, Store, environment_id

some_histories = st.lists(made.histories, max_size=3)


def filled(histories) -> Store:
    store = Store(MEMORY)
    store.add(histories)
    return store


def entries_in(store: Store) -> int:
    stats = store.stats()
    return stats.rows + stats.scopes + stats.verdicts


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


@settings(max_examples=15)
@given(one=some_histories, two=some_histories)
def test_merging_is_idempotent_and_commutative(one, two):
    with filled(one) as a, filled(two) as b, Store(MEMORY) as ab, Store(MEMORY) as ba:
        added = ab.merge(a) + ab.merge(b)
        assert ba.merge(b) + ba.merge(a) == added == entries_in(ab)
        assert contents(ab) == contents(ba)
        assert answers(ab) == answers(ba)
        assert ab.merge(a) == ab.merge(b) == ab.merge(ba) == 0
        assert contents(ab) == contents(ba)
        assert ab.check() == ()


@settings(max_examples=15)
@given(histories=some_histories)
def test_an_export_comes_back_whole(histories):
    with filled(histories) as store, Store(MEMORY) as other:
        text = exported(store)
        assert other.import_jsonl(io.StringIO(text)) == entries_in(store)
        assert other.import_jsonl(io.StringIO(text)) == 0
        assert contents(other) == contents(store)
        assert answers(other) == answers(store)
        assert exported(other) == text


@settings(max_examples=10)
@given(histories=some_histories)
def test_an_export_does_not_depend_on_the_order_of_recording(histories):
    with filled(histories) as store, filled(histories[::-1]) as other:
        assert exported(store) == exported(other)


def test_an_export_is_one_object_a_line(store):
    lines = [json.loads(line) for line in exported(store).splitlines()]
    assert [line.get("kind") for line in lines] == [None, "environment", "row", "scope", "row"]
    assert lines[0] == {"format": "miofind-finddb", "schema_version": 2}
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
        store.import_jsonl(io.StringIO('{"format":"miofind-finddb","schema_version":3}\n{"kind":"new"}\n'))


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
